"""Start of a run: seconds from the command to the first step, by number of workers; and a sweep of short runs.

    .venv/bin/python research/benchmarks/start.py [--repetitions N] [--runs N] [--beside PYTHON] [--json FILE]

One round of FedAvg with LeNet on made-up images. The first step is the one that the log announces ("ready to train").
Each repetition measures, in turn, importing torch, then a run for each number of workers; with ``--beside`` also in
another environment, such as that of an earlier commit. The sweep has 20 such runs, one after another, with one worker;
it is compared with the seconds of its rounds, and made again with two runs at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import describe, import_torch_s, machine, spread, table, write_json

WORKERS = (0, 1, 2)
PARALLEL = (1, 2)
CLIENTS, IMAGES = 10, 200


def write_experiment(folder: Path) -> Path:
    """Write made-up images and an experiment on them; return its file."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (CLIENTS * IMAGES, 1, 28, 28), dtype=np.uint8)
    y, who = random.integers(0, 10, CLIENTS * IMAGES), np.repeat(np.arange(CLIENTS), IMAGES)
    np.savez(folder / "images.npz", x=x, y=y, who=who)
    tree = {
        "name": "start",
        "data": {
            "dataset": "arrays",
            "root": str(folder / "data"),
            "source": {"path": str(folder / "images.npz"), "client": "who"},
            "partition": {"scheme": "natural"},
        },
        "model": {"name": "lenet"},
        "algorithm": {"name": "fedavg", "local": {"steps": 20, "batch_size": 20, "lr": 0.01}},
        "federation": {"rounds": 1, "clients_per_round": CLIENTS - 1},
    }
    (folder / "start.yaml").write_text(yaml.safe_dump(tree))
    return folder / "start.yaml"


def run(python: str, experiment: Path, out: Path, *options: str) -> tuple[float, float]:
    """Run a command; return the time at which it was given, and its seconds."""
    given, started = time.time(), time.perf_counter()
    command = [python, "-m", "fedloom", "run", str(experiment), "--out", str(out), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return given, time.perf_counter() - started


def first_step_s(python: str, experiment: Path, out: Path, workers: int) -> float:
    """Return the seconds from a run's command to its first step."""
    given, _ = run(python, experiment, out, "--workers", str(workers))
    lines = map(json.loads, (out / "logs" / "aggregator.jsonl").read_text().splitlines())
    ready: float = next(line["time"] for line in lines if line["message"].startswith("ready to train"))
    return ready - given


def sweep_s(python: str, experiment: Path, out: Path, runs: int, parallel: int) -> tuple[float, float]:
    """Return the seconds of a sweep, and of its rounds."""
    options = ("--workers", "1", "--seeds", f"1-{runs}", "--parallel", str(parallel))
    _, seconds = run(python, experiment, out, *options)
    journals = list(out.glob("*/journal.jsonl"))
    assert len(journals) == runs
    lines = [json.loads(line) for journal in journals for line in journal.read_text().splitlines()]
    return seconds, sum(line.get("seconds", 0.0) for line in lines)


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--runs", type=int, default=20, help="runs of the sweep")
    parser.add_argument("--beside", metavar="PYTHON", help="interpreter of another environment with FedLoom")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    about = machine()
    print(describe(about), flush=True)
    pythons = {"here": sys.executable, **({"beside": options.beside} if options.beside else {})}
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in pythons}
    sweeps: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        experiment = write_experiment(folder)
        for name, python in pythons.items():  # partitions the images, compiles modules
            run(python, experiment, folder / f"first-{name}")
        for repetition in range(options.repetitions):
            for name, python in pythons.items():
                seconds[name]["importing torch"].append(import_torch_s())
                for workers in WORKERS:
                    out = folder / f"{name}-{workers}-{repetition}"
                    what = f"to the first step, {workers} workers"
                    seconds[name][what].append(first_step_s(python, experiment, out, workers))
        rows = [(name, what, spread(found)) for name, of in seconds.items() for what, found in of.items()]
        print(table(("", "", "seconds, median (lowest-highest)"), rows), flush=True)
        for parallel, (name, python) in itertools.product(PARALLEL, pythons.items()):
            out = folder / f"sweep-{name}-{parallel}"
            whole, rounds = sweeps[f"{name}, {parallel}"] = sweep_s(python, experiment, out, options.runs, parallel)
            ratio = f"{whole:.1f} s, their rounds {rounds:.1f} s, {whole / rounds:.2f} times"
            print(f"{name}: sweep of {options.runs} runs, {parallel} at a time, {ratio}", flush=True)
    write_json(options.json, about, {"start": {"seconds": seconds, "sweeps": sweeps}})


if __name__ == "__main__":
    main()
