"""FedLoom and other systems compared as whole processes on one machine, on two tasks that the others publish.

    .venv/bin/python research/benchmarks/headline.py [--task lr-mnist|cnn-cifar10] [--json FILE]

``lr-mnist`` is the CPU task of FLUTE's README: logistic regression on MNIST, 1,000 clients of two digits each with
sizes by a power law, 10 clients a round, batches of 10, one epoch, 100 rounds. ``cnn-cifar10`` is pfl-research's
benchmark on CIFAR-10: 1,000 users of 50 images, 50 users a round, batches of 10, one epoch, its CNN without dropout.
FedLoom partitions the data, and all systems read its partition: examples, batches, epochs, rates and weights are the
same. Flower (its simulation on Ray) and pfl (its simulation, as one process with all cores, and by torchrun with a
process per core) have their own virtual environments, created on the first call. The systems take turns. A figure is
that of a whole command from start to end, without FedLoom's report. CPU time is that of all its processes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # all systems start from compiled files, as their users' do

import numpy as np
from common import MIB, ROOT, describe, machine, spread, table, write_json
from flower import Failure, Processes

PEERS = Path(__file__).parent / "headline_peers"
PACKAGES = {"flower": ["flwr[simulation]==1.41.*"], "pfl": ["pfl[pytorch]==0.6.0"]}
NAMES = {
    "fedloom": "FedLoom, `workers: 2`",
    "fedloom-0": "FedLoom, `workers: 0`",
    "fedloom-0-together": "FedLoom, `workers: 0`, cohorts trained together",
    "flower": "Flower, simulation",
    "pfl-1": "pfl, one process and thread",
    "pfl-threads": "pfl, one process, a thread for each core",
    "pfl-processes": "pfl, torchrun, a process for each core",
}


@dataclass(frozen=True)
class Settings:
    """Settings that are the same for all systems."""

    model: str
    cohort: int
    rounds: int
    lr: float
    batch_size: int = 10
    seed: int = 1


TASKS = {
    "lr-mnist": Settings("lr", cohort=10, rounds=100, lr=0.03),
    "cnn-cifar10": Settings("cnn", cohort=50, rounds=20, lr=0.1),
}
MODELS = {"lr": {"name": "logistic"}, "cnn": {"name": "module", "factory": "task:cnn"}}


def clients_of(task: str) -> dict[str, dict[str, Any]]:
    """Return the clients' examples by name: a multiple of ten to train on, and one more, which FedLoom holds out."""
    from fedloom.data.datasets import find_dataset, load_dataset

    random = np.random.default_rng(1)
    official = load_dataset(find_dataset("mnist" if task == "lr-mnist" else "cifar10"))
    train, test = official.train, official.test
    if task == "cnn-cifar10":  # trains on all 50,000; held-out examples come from the test images
        order, other = random.permutation(50_000), random.permutation(10_000)
        found = {}
        for i in range(1000):
            mine, held = order[50 * i : 50 * i + 50], other[10 * i : 10 * i + 10]
            found[f"user-{i:04d}"] = {
                "train_x": np.concatenate([np.asarray(train.inputs)[mine], np.asarray(test.inputs)[held[:1]]]),
                "train_y": np.concatenate([train.labels[mine], test.labels[held[:1]]]),
                "test_x": np.asarray(test.inputs)[held[1:]],
                "test_y": test.labels[held[1:]],
            }
        return found
    # The partition of T. Li et al., Federated optimization in heterogeneous networks, 2020: client i has the digits i
    # and i + 1 mod 10, in numbers that are lognormal with deviation 2.
    by_digit = [random.permutation(np.flatnonzero(train.labels == digit)) for digit in range(10)]
    tests = [random.permutation(np.flatnonzero(test.labels == digit)) for digit in range(10)]
    share = random.lognormal(0, 2, (10, 200))
    share /= share.sum(1, keepdims=True)
    taken, found = np.zeros(10, int), {}
    for i in range(1000):
        of_two = []
        for j in (0, 1):
            digit = (i + j) % 10
            size = 6 - j + int(share[digit, 2 * (i // 10) + j] * (len(by_digit[digit]) - 1200))
            of_two.append(by_digit[digit][taken[digit] : taken[digit] + size])
            taken[digit] += size
        mine = random.permutation(np.concatenate(of_two))
        mine = mine[: (len(mine) - 1) // 10 * 10 + 1]
        held = np.concatenate([tests[(i + j) % 10][4 * (i // 10) : 4 * (i // 10) + 4] for j in (0, 1)])
        found[f"user-{i:04d}"] = {
            "train_x": np.asarray(train.inputs)[mine],
            "train_y": train.labels[mine],
            "test_x": np.asarray(test.inputs)[held],
            "test_y": test.labels[held],
        }
    return found


class Task:
    """Task: the data as FedLoom partitions and exports them, and the commands that run it."""

    def __init__(self, name: str, settings: Settings, folder: Path, venvs: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._venvs = venvs
        self._cores = os.cpu_count() or 1
        self._data = self._export(name)

    def _export(self, name: str) -> dict[str, Any]:
        """Write all clients' normalized examples and the index of each client's first; return the experiment's data."""
        import safetensors.torch
        import torch

        from fedloom import Federated

        federated = Federated.from_arrays(
            clients_of(name), root=self._folder / "data", validation_fraction=1e-6, held_out_fraction=0.0
        )
        dataset = federated.open(self._settings.seed)
        clients = [dataset.client(entry.id) for entry in dataset.manifest.clients]
        sizes = torch.tensor([0, *(len(client.train) for client in clients)])
        assert not (sizes % self._settings.batch_size).any()
        tensors = {
            f"{split}_{part}": torch.cat([getattr(getattr(client, split), part) for client in clients])
            for split in ("train", "test")
            for part in ("x", "y")
        }
        safetensors.torch.save_file(tensors | {"starts": sizes.cumsum(0)}, self._folder / "data.safetensors")
        self.examples = int(sizes.sum())
        return federated.section

    def run(self, system: str, seconds: float) -> dict[str, Any]:
        """Run a system and return its figures."""
        scratch = self._folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        command, environment = getattr(self, f"_{system.partition('-')[0]}")(system, scratch)
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        with Processes(scratch) as processes:
            process = processes.start(command, system, environment)
            processes.succeed(process, started + seconds, NAMES[system])
            wall = time.time() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        figures = self._of_fedloom(scratch) if system.startswith("fedloom") else _of_peer(scratch)
        return figures | {"wall_s": wall, "cpu_s": cpu, "peak_bytes": processes.peak}

    def _fedloom(self, system: str, scratch: Path) -> tuple[list[str], dict[str, str]]:
        import yaml

        s = self._settings
        runtime = {"workers": 0 if system.startswith("fedloom-0") else self._cores, "threads": 1}
        if system.endswith("-together"):
            runtime["clients_at_once"] = s.cohort
        experiment = {
            "name": "headline",
            "seed": s.seed,
            "data": self._data,
            "model": MODELS[s.model],
            "algorithm": {
                "name": "fedavg",
                "local": {"epochs": 1, "batch_size": s.batch_size, "lr": s.lr, "momentum": 0.0},
            },
            "federation": {"rounds": s.rounds, "clients_per_round": s.cohort},
            "evaluation": {"every": s.rounds, "cohort": 100},
            "runtime": runtime,
        }
        (scratch / "experiment.yaml").write_text(yaml.safe_dump(experiment))
        command = [sys.executable, "-m", "fedloom", "run", str(scratch / "experiment.yaml")]
        return [*command, "--no-report", "--out", str(scratch / "run")], {"PYTHONPATH": str(PEERS)}

    def _of_fedloom(self, scratch: Path) -> dict[str, Any]:
        import safetensors.torch
        import torch

        sys.path.insert(0, str(PEERS))
        task = importlib.import_module("task")
        rounds = [json.loads(line)["seconds"] for line in (scratch / "run" / "journal.jsonl").read_text().splitlines()]
        last = safetensors.torch.load_file(sorted((scratch / "run" / "checkpoints").rglob("*.safetensors"))[-1])
        module = task.MODELS[self._settings.model]()
        torch.nn.utils.vector_to_parameters(last["theta"], module.parameters())
        return {"rounds_s": sum(rounds), "accuracy": task.accuracy(module, task.Data(self._folder))}

    def _flower(self, system: str, scratch: Path) -> tuple[list[str], dict[str, str]]:
        environment = {"FLWR_HOME": str(scratch), "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        command = [str(self._venvs / "flower" / "bin" / "python"), str(PEERS / "on_flower.py")]
        return command, environment | {"HEADLINE_SETTINGS": self._told(scratch), "RAY_TMPDIR": str(scratch)}

    def _pfl(self, system: str, scratch: Path) -> tuple[list[str], dict[str, str]]:
        venv, threads = self._venvs / "pfl" / "bin", str(self._cores if system == "pfl-threads" else 1)
        start = [str(venv / "torchrun"), f"--nproc-per-node={self._cores}"]
        command = [*(start if system == "pfl-processes" else [str(venv / "python")]), str(PEERS / "on_pfl.py")]
        return [*command, self._told(scratch)], {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def _told(self, scratch: Path) -> str:
        settings = {**asdict(self._settings), "folder": str(self._folder), "out": str(scratch / "out.json")}
        (scratch / "settings.json").write_text(json.dumps(settings))
        return str(scratch / "settings.json")


def _of_peer(scratch: Path) -> dict[str, Any]:
    figures = json.loads((scratch / "out.json").read_text())
    return {"rounds_s": figures["ends"][-1] - figures["ends"][0], "accuracy": figures["accuracy"]}


def make_venvs(venvs: Path) -> None:
    """Create the peers' virtual environments with FedLoom's version of torch, unless they exist."""
    import torch

    for name, packages in PACKAGES.items():
        if not (venvs / name / "made").exists():
            uv, python = str(Path(sys.executable).parent / "uv"), str(venvs / name / "bin" / "python")
            subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, venvs / name], check=True)
            pinned = f"torch=={torch.__version__.partition('+')[0]}"
            install = [uv, "pip", "install", "--quiet", "--python", python, *packages, pinned, "numpy", "safetensors"]
            subprocess.run(install, check=True)
            (venvs / name / "made").touch()


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=list(TASKS), nargs="*", default=list(TASKS))
    parser.add_argument("--only", choices=list(NAMES), nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, help="rounds of each task; by default 100 and 20")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one run may take")
    parser.add_argument(
        "--venvs", type=Path, default=ROOT / ".venv" / "peers", help="folder of the other systems' virtual environments"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes end with this one
    make_venvs(options.venvs)
    about = machine() | {"packages": PACKAGES}
    print(describe(about))
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in options.task:
        settings = replace(TASKS[name], **({} if options.rounds is None else {"rounds": options.rounds}))
        with tempfile.TemporaryDirectory() as scratch:
            found = results.setdefault(name, {})
            for repetition in range(options.repetitions):
                task = Task(name, replace(settings, seed=1 + repetition), Path(scratch), options.venvs)
                for system in options.only:
                    try:
                        found.setdefault(system, []).append(task.run(system, options.timeout))
                        print(".", end="", flush=True)
                    except Failure as failure:  # one system failed; compare the others
                        print(f"\n{failure}", file=sys.stderr)
                    write_json(options.json, about, results)
        print(
            f"\n\n{name}: {task.examples:,} training examples, {settings.rounds} rounds of {settings.cohort} clients\n"
        )
        head = ["", "the command, s", "CPU of all processes, s", "the rounds, s", "peak memory, MiB", "accuracy after"]
        print(table(head, [_line(system, runs) for system, runs in found.items() if runs]))
    print(
        "\nmedian (lowest-highest) over repetitions; accuracy: of the shared model on all test images, after all rounds"
    )


def _line(system: str, runs: list[dict[str, Any]]) -> list[str]:
    return [
        NAMES[system],
        *(spread([run[key] for run in runs], "{:.1f}") for key in ("wall_s", "cpu_s", "rounds_s")),
        spread([run["peak_bytes"] / MIB for run in runs], "{:.0f}"),
        spread([run["accuracy"] for run in runs], "{:.3f}"),
    ]


if __name__ == "__main__":
    main()
