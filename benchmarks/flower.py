"""FedLoom beside Flower: the same FedAvg, LeNet, data, partition, steps and cohort.

    .venv/bin/python benchmarks/flower.py [--json FILE]

Flower gets a virtual environment of its own (made on the first call) and runs ``flower_app/`` in both of its ways: a
SuperLink and one SuperNode per client on loopback, and its simulation (Ray, one CPU per client, so that two train at a
time). FedLoom runs with two worker processes. All clients take part in every round, one torch thread per process, no
evaluation between rounds. The ways take turns; accuracies after the last round stand beside them, since equal work
must give equal accuracy up to the order of batches and the initial draw.
"""

from __future__ import annotations

import argparse
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
EXPERIMENT = """
name: beside-flower
seed: {seed}
data:
  dataset: fashion-mnist
  partition: {{scheme: classes, clients: {clients}, classes_per_client: 5, train_per_client: 800, test_per_client: 500}}
  unseen_fraction: 0.0
model: {{name: lenet}}
algorithm: {{name: fedavg, local: {{steps: {steps}, batch_size: 32, lr: 0.01, momentum: 0.9}}}}
federation: {{rounds: {rounds}, clients_per_round: {clients}}}
evaluation: {{every: {rounds}}}
runtime: {{workers: 2, threads: 1}}
"""


class Memory:
    """The most that this process's descendants hold together: proportional set size, shared pages counted once."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.peak = max(self.peak, sum(_pss(process) for process in descendants(os.getpid())[1:]))

    def stop(self) -> int:
        """Stop watching; returns bytes."""
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
    """Make Flower's virtual environment, with the torch that FedLoom has, unless it is there."""
    import torch

    if (venv / "bin" / "flwr").exists():
        return
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    packages = ["flwr[simulation]", f"torch=={torch.__version__.partition('+')[0]}", "numpy", "safetensors"]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), *packages], check=True)


def export(experiment: Path, folder: Path) -> None:
    """Write what each FedLoom client has, normalized, where Flower's clients read it."""
    import safetensors.torch

    from fedloom import experiment as experiments
    from fedloom.cli.compose import dealt

    dataset = dealt(experiments.load(experiment))
    for i, entry in enumerate(dataset.manifest.clients):
        client = dataset.client(entry.id)
        splits = {"train": client.train, "test": client.test}
        tensors = {f"{name}_{part}": getattr(split, part) for name, split in splits.items() for part in ("x", "y")}
        safetensors.torch.save_file(tensors, folder / f"client-{i}.safetensors")


def fedloom_run(experiment: Path, scratch: Path) -> dict[str, Any]:
    """Run FedLoom; returns its figures."""
    out = scratch / "run"
    shutil.rmtree(out, ignore_errors=True)
    memory = Memory()
    command = [sys.executable, "-m", "fedloom", "run", str(experiment), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = memory.stop()
    rounds = [json.loads(line)["seconds"] for line in (out / "journal.jsonl").read_text().splitlines()]
    ready = re.search(r"ready to train after ([0-9.]+) s", (out / "logs" / "aggregator.jsonl").read_text())
    assert ready is not None
    summary = json.loads((out / "summary.json").read_text())
    return {
        "rounds": rounds,
        "start_s": float(ready[1]),
        "peak_bytes": peak,
        "accuracy": summary["global"]["accuracy_mean"],
    }


class Flower:
    """Flower's processes: their environment, ports and end."""

    def __init__(self, venv: Path, folder: Path, settings: dict[str, Any]) -> None:
        self._bin = venv / "bin"
        self._folder = folder
        self._settings = settings
        home = folder / "flwr-home"
        self._environment = {
            **os.environ,
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_DEDUP_LOGS": "0",
        }
        self._environment.pop("PYTHONPATH", None)

    def deployment(self) -> dict[str, Any]:
        """A SuperLink and a SuperNode for each client."""
        return self._run([], self._settings["clients"], None)

    def simulation(self) -> dict[str, Any]:
        """A SuperLink that simulates the clients on Ray, one CPU each."""
        resources = (
            f"num-supernodes={self._settings['clients']} client-resources-num-cpus=1 client-resources-num-gpus=0.0"
        )
        return self._run(["--simulation"], 0, resources)

    def _run(self, link_options: list[str], nodes: int, federation: str | None) -> dict[str, Any]:
        result = self._folder / "flower.json"
        result.unlink(missing_ok=True)
        home = Path(self._environment["FLWR_HOME"])
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        port = _free_port()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        started = time.time()
        memory = Memory()
        processes = []
        try:
            link = ["flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
            processes.append(self._start([*link, *link_options], "superlink"))
            _until(lambda: _listening(port), 60, processes, "the SuperLink does not listen")
            for i in range(nodes):
                node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port"]
                node += [str(_free_port()), "--node-config", f"partition-id={i} num-partitions={nodes}"]
                processes.append(self._start(node, f"supernode-{i}"))
            overrides = {**self._settings, "folder": str(self._folder)}
            run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in overrides.items())
            command = ["flwr", "run", str(APP), "bench", "--stream", "--run-config", run_config]
            command += ["--federation-config", federation] if federation is not None else []
            if self._start(command, "run").wait(300) != 0 or not result.exists():
                raise RuntimeError("Flower's run failed")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self._folder.glob("*.log"))
            raise RuntimeError(f"{error}\n{logs}") from None
        finally:
            peak = memory.stop()
            for process in reversed(processes):
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        figures = json.loads(result.read_text())
        ends = figures["ends"]
        return {
            "rounds": [b - a for a, b in pairwise(ends)],
            "start_s": ends[0] - started,
            "peak_bytes": peak,
            "accuracy": figures["accuracy"],
        }

    def _start(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        program = str(self._bin / command[0])
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [program, *command[1:]], env=self._environment, stdout=log, stderr=log, start_new_session=True
            )


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(condition: Callable[[], bool], seconds: float, processes: list[subprocess.Popen[bytes]], what: str) -> None:
    ends = time.time() + seconds
    while not condition():
        if time.time() > ends or any(process.poll() is not None for process in processes):
            raise RuntimeError(what)
        time.sleep(0.05)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="local SGD steps per client and round")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--only", choices=["fedloom", "deployment", "simulation"], nargs="*")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv" / "flower", help="Flower's virtual environment")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that Flower's processes end with us
    make_venv(options.venv)
    about = machine()
    version = subprocess.run(
        [options.venv / "bin" / "flwr", "--version"], capture_output=True, text=True
    ).stdout.strip()
    about["flower"] = version.splitlines()[0] if version else "unknown"
    print(f"{describe(about)}, {about['flower']}")
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        experiment = folder / "experiment.yaml"
        settings = {"clients": options.clients, "rounds": options.rounds, "steps": options.steps, "seed": 1}
        experiment.write_text(EXPERIMENT.format(**settings))
        export(experiment, folder)
        flower = Flower(options.venv, folder, settings)
        ways = {
            "fedloom": lambda: fedloom_run(experiment, folder),
            "deployment": flower.deployment,
            "simulation": flower.simulation,
        }
        for _ in range(options.repetitions):
            for name, way in ways.items():
                if not options.only or name in options.only:
                    results.setdefault(name, []).append(way())
                    print(".", end="", flush=True)
    print("\n")
    steps = options.clients * options.steps
    head = ["", "client steps/s", "round, s", "first round, s", "start-up, s", "peak memory, MiB", "accuracy after"]
    print(table(head, [_line(name, runs, steps) for name, runs in results.items()]))
    print("\nmedian (lowest-highest) over repetitions; steps/s and rounds without the first round; accuracy: mean over")
    print(f"clients of the global model after {options.rounds} rounds; start-up: from the command to the first round")
    write_json(options.json, about, results)


NAMES = {
    "fedloom": "FedLoom, 2 workers",
    "deployment": "Flower, SuperLink and SuperNodes",
    "simulation": "Flower, simulation (Ray)",
}


def _line(name: str, runs: list[dict[str, Any]], steps: int) -> list[str]:
    later = [statistics.mean(run["rounds"][1:]) for run in runs]
    return [
        NAMES[name],
        spread([steps / s for s in later], "{:.1f}"),
        spread(later),
        spread([run["rounds"][0] for run in runs]),
        spread([run["start_s"] for run in runs], "{:.1f}"),
        spread([run["peak_bytes"] / MIB for run in runs], "{:.0f}"),
        spread([run["accuracy"] for run in runs], "{:.3f}"),
    ]


if __name__ == "__main__":
    main()
