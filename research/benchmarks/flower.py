"""FedLoom and Flower compared: the same FedAvg, LeNet, data, partition, SGD steps and cohort.

    .venv/bin/python research/benchmarks/flower.py [--json FILE]

Flower has its own virtual environment (created on the first call) and runs ``flower_app/`` in three ways: deployed as
in its documentation, with a SuperLink and one SuperNode per client on loopback over gRPC (``grpc-rere``), and a process
per message (``subprocess`` isolation, the default); with the older ``start_server`` and ``start_client``, one gRPC
stream and one persistent process per client; and in simulation (Ray, one CPU per client, so that as many clients train
at a time as there are cores). FedLoom runs with two worker processes over gRPC on loopback. All clients take part in
every round, with one torch thread per process and no evaluation between rounds. The ways take turns. Accuracies after
the last round are shown, since equal work must give equal accuracy up to the order of batches and the initial weights.

Flower is pinned below 1.23: the last releases whose SuperNodes use gRPC and that still have ``start_server`` (1.41
uses HTTP between SuperNode and SuperLink).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from common import MIB, ROOT, descendants, describe, machine, spread, table, write_json

APP = Path(__file__).parent / "flower_app"
FLOWER = "flwr[simulation]>=1.20,<1.23"  # the last line with gRPC between SuperNode and SuperLink
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
EXPERIMENT = """
name: beside-flower
seed: {seed}
data:
  dataset: fashion-mnist
  partition: {{scheme: classes, clients: {clients}, classes_per_client: 5, train_per_client: 800, test_per_client: 500}}
  held_out_fraction: 0.0
model: {{name: lenet}}
algorithm:
  name: fedavg
  local: {{steps: {steps}, batch_size: {batch_size}, lr: {lr}, momentum: {momentum}}}
federation: {{rounds: {rounds}, clients_per_round: {clients}}}
evaluation: {{every: {rounds}}}
runtime: {{workers: 2, threads: 1}}
"""


NAMES = {
    "fedloom": "FedLoom, 2 workers",
    "deployment": "Flower, SuperLink and SuperNodes",
    "lasting": "Flower, start_server and start_client",
    "simulation": "Flower, simulation (Ray)",
}


class Memory:
    """Peak memory of this process's descendants together, as proportional set size, which counts shared pages once."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.peak = max(self.peak, sum(_pss(process) for process in descendants(os.getpid())[1:]))

    def stop(self) -> int:
        """Stop sampling; return the peak in bytes."""
        self._over.set()
        self._thread.join()
        return self.peak


def _pss(process: int) -> int:
    try:
        found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return int(found[1]) * 1024 if found else 0


def make_venv(venv: Path) -> None:
    """Create Flower's virtual environment with FedLoom's version of torch, unless it exists.

    ``FLOWER`` is not the latest release: there, SuperNodes use HTTP, and the comparison is between two systems that use
    gRPC.
    """
    import torch

    if (venv / "bin" / "flwr").exists():
        return
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    packages = [FLOWER, f"torch=={torch.__version__.partition('+')[0]}", "numpy", "safetensors"]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), *packages], check=True)


def export(experiment: Path, folder: Path) -> None:
    """Write each FedLoom client's normalized data where Flower's clients read them."""
    import safetensors.torch

    from fedloom import experiment as experiments
    from fedloom.engine.run_data import make_partition

    dataset = make_partition(experiments.load_experiment(experiment))
    for i, entry in enumerate(dataset.manifest.clients):
        client = dataset.client(entry.id)
        splits = {"train": client.train, "test": client.test}
        tensors = {f"{name}_{part}": getattr(split, part) for name, split in splits.items() for part in ("x", "y")}
        safetensors.torch.save_file(tensors, folder / f"client-{i}.safetensors")


def fedloom_run(experiment: Path, scratch: Path, seconds: float) -> dict[str, Any]:
    """Run FedLoom and return its figures."""
    out = scratch / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "fedloom", "run", str(experiment), "--out", str(out)]
    with Processes(scratch) as processes:
        run = processes.start(command, "fedloom", {})
        processes.succeed(run, time.time() + seconds, "FedLoom's run")
    rounds = [json.loads(line)["seconds"] for line in (out / "journal.jsonl").read_text().splitlines()]
    ready = re.search(r"ready to train after ([0-9.]+) s", (out / "logs" / "aggregator.jsonl").read_text())
    assert ready is not None
    summary = json.loads((out / "summary.json").read_text())
    return {
        "rounds": rounds,
        "start_s": float(ready[1]),
        "peak_bytes": processes.peak,
        "accuracy": summary["global"]["accuracy_mean"],
    }


class Failure(Exception):
    """Failed or timed-out run, with the end of its processes' output."""


class Processes:
    """Processes of one run: their logs, their memory, and their guaranteed end.

    This process is the subreaper of orphans, so that all descendants end with the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.peak = 0

    def __enter__(self) -> Processes:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        for log in self._folder.glob("*.log"):
            log.unlink()
        self._memory = Memory()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = self._memory.stop()
        for _name, process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for _name, process in self._started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while left := descendants(os.getpid())[1:]:
            for process_id in left:
                os.kill(process_id, signal.SIGKILL)
            for _child in left:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    break

    def start(self, command: list[str], name: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to a log with this name."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log, cwd=APP)
        self._started.append((name, process))
        return process

    def until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait for a condition; fail if a process ends meanwhile."""
        while not condition():
            self._check(deadline, what)
            time.sleep(0.05)

    def succeed(self, run: subprocess.Popen[bytes], deadline: float, what: str) -> None:
        """Wait until a process succeeds; fail if another fails meanwhile."""
        while run.poll() is None:
            self._check(deadline, what)
            time.sleep(0.05)
        if run.returncode != 0:
            raise self.failure(f"{what} ended with exit status {run.returncode}")

    def _check(self, deadline: float, what: str) -> None:
        for name, process in self._started:
            if process.poll():
                raise self.failure(f"{what}: {name} ended with exit status {process.returncode}")
        if time.time() > deadline:
            raise self.failure(f"{what} was not done in time (--timeout)")

    def failure(self, message: str) -> Failure:
        """Return a failure with the ends of the logs."""
        logs = (f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in self._folder.glob("*.log"))
        return Failure("\n".join([message, *logs]))


class Flower:
    """Flower's three ways to run the app."""

    def __init__(self, venv: Path, folder: Path, settings: dict[str, Any], seconds: float) -> None:
        self._bin = venv / "bin"
        self._folder = folder
        self._settings = {"folder": str(folder), **settings}
        self._seconds = seconds
        self._clients: int = settings["clients"]

    def deployment(self) -> dict[str, Any]:
        """Run a SuperLink, and a SuperNode per client that starts a process for every message."""
        app_io, fleet, control = (f"127.0.0.1:{_free_port()}" for _ in range(3))

        def start(processes: Processes, deadline: float) -> subprocess.Popen[bytes]:
            link = [self._program("flower-superlink"), "--insecure", "--serverappio-api-address", app_io]
            link += ["--fleet-api-type", "grpc-rere", "--fleet-api-address", fleet, "--control-api-address", control]
            processes.start(link, "superlink", self._environment("superlink"))
            processes.until(lambda: _listening(fleet) and _listening(control), deadline, "the SuperLink's start")
            for i in range(self._clients):
                node = [self._program("flower-supernode"), "--insecure", "--grpc-rere", "--superlink", fleet]
                node += ["--clientappio-api-address", f"127.0.0.1:{_free_port()}"]
                node += ["--node-config", f"partition-id={i} num-partitions={self._clients}"]
                processes.start(node, f"supernode-{i}", self._environment(f"supernode-{i}"))
            return self._flwr_run(processes, "deployment", f'address="{control}"')

        return self._run(start, "Flower's deployment")

    def with_steps(self) -> dict[str, Any]:
        """Run ``start_server``, and a process with ``start_client`` per client."""
        address = f"127.0.0.1:{_free_port()}"

        def start(processes: Processes, deadline: float) -> subprocess.Popen[bytes]:
            python = [self._program("python"), "-m", "flower_app.lasting"]
            config = json.dumps(self._run_config())
            server = processes.start([*python, "server", address, config], "server", self._environment("server"))
            processes.until(lambda: _listening(address), deadline, "the server's start")
            for i in range(self._clients):
                client = [*python, f"client-{i}", address, config]
                processes.start(client, f"client-{i}", self._environment(f"client-{i}"))
            return server

        return self._run(start, "Flower's start_server")

    def simulation(self) -> dict[str, Any]:
        """Run all clients in Flower's simulation on Ray, one CPU each."""

        def start(processes: Processes, deadline: float) -> subprocess.Popen[bytes]:
            return self._flwr_run(processes, "simulation", f"options.num-supernodes={self._clients}")

        return self._run(start, "Flower's simulation")

    def _run(self, start: Callable[[Processes, float], subprocess.Popen[bytes]], what: str) -> dict[str, Any]:
        result = self._folder / "flower.json"
        result.unlink(missing_ok=True)
        shutil.rmtree(self._folder / "homes", ignore_errors=True)
        started = time.time()
        deadline = started + self._seconds
        with Processes(self._folder) as processes:
            processes.succeed(start(processes, deadline), deadline, what)
            if not result.exists():  # `flwr run` ends with 0 when the app fails
                raise processes.failure(f"{what} ended without a result")
        figures = json.loads(result.read_text())
        ends = figures["ends"]
        return {
            "rounds": [b - a for a, b in pairwise(ends)],
            "start_s": ends[0] - started,
            "peak_bytes": processes.peak,
            "accuracy": figures["accuracy"],
        }

    def _flwr_run(self, processes: Processes, federation: str, options: str) -> subprocess.Popen[bytes]:
        run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in self._run_config().items())
        command = [self._program("flwr"), "run", str(APP), federation, "--stream"]
        command += ["--run-config", run_config, "--federation-config", options]
        return processes.start(command, "run", self._environment("run"))

    def _run_config(self) -> dict[str, Any]:
        return {key.replace("_", "-"): value for key, value in self._settings.items()}

    def _program(self, name: str) -> str:
        return str(self._bin / name)

    def _environment(self, name: str) -> dict[str, str]:
        home = self._folder / "homes" / name  # one for each, as on separate machines
        home.mkdir(parents=True, exist_ok=True)
        return {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self._folder),
        }


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="local SGD steps per client and round")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--only", choices=list(NAMES), nargs="*")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that one run may take")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv" / "flower", help="Flower's virtual environment")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes end with this one
    make_venv(options.venv)
    about = machine()
    shown = subprocess.run([options.venv / "bin" / "flwr", "--version"], capture_output=True, text=True, check=True)
    about["flower"] = shown.stdout.strip().splitlines()[0]
    print(f"{describe(about)}, {about['flower']}")
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        experiment = folder / "experiment.yaml"
        settings = {"clients": options.clients, "rounds": options.rounds, "steps": options.steps, "seed": 1}
        settings |= {"batch_size": 32, "lr": 0.01, "momentum": 0.9}
        experiment.write_text(EXPERIMENT.format(**settings))
        export(experiment, folder)
        flower = Flower(options.venv, folder, settings, options.timeout)
        ways = {
            "fedloom": lambda: fedloom_run(experiment, folder, options.timeout),
            "deployment": flower.deployment,
            "lasting": flower.with_steps,
            "simulation": flower.simulation,
        }
        for _ in range(options.repetitions):
            for name, way in ways.items():
                if not options.only or name in options.only:
                    try:
                        results.setdefault(name, []).append(way())
                    except Failure as failure:
                        sys.exit(f"\n{failure}")
                    print(".", end="", flush=True)
                    write_json(options.json, about, results)
    print("\n")
    steps = options.clients * options.steps
    head = ["", "client steps/s", "round, s", "first round done after, s", "peak memory, MiB", "accuracy after"]
    print(table(head, [_line(name, runs, steps) for name, runs in results.items()]))
    print("\nmedian (lowest-highest) over repetitions; steps/s and rounds without the first round, which waits for the")
    print("clients to start; accuracy: mean over clients of the global model after all rounds")


def _line(name: str, runs: list[dict[str, Any]], steps: int) -> list[str]:
    later = [statistics.mean(run["rounds"][1:]) for run in runs]
    return [
        NAMES[name],
        spread([steps / s for s in later], "{:.1f}"),
        spread(later),
        spread([run["start_s"] + run["rounds"][0] for run in runs], "{:.1f}"),
        spread([run["peak_bytes"] / MIB for run in runs], "{:.0f}"),
        spread([run["accuracy"] for run in runs], "{:.3f}"),
    ]


if __name__ == "__main__":
    main()
