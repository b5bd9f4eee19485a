"""Time that `fedloom run --resume` takes until its first new round, by rounds done and size of the checkpoint.

    .venv/bin/python research/benchmarks/resume.py [--json FILE]

A tiny experiment (FedAvg, logistic regression, ten clients, two per round, one step each) runs for a number of rounds,
which makes a journal of that length. It is then resumed, and killed once a new round is in the journal, several times,
in process. The large checkpoint is that of PeFLL with LeNet (its hypernetwork, and Adam's two moments of each weight)
after one round. The time is from the start of the process until the first new round begins. For comparison, in turns:
the time to import torch, which is most of it; and a fresh start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import MIB, describe, import_torch_s, machine, spread, table, write_json

TINY = """
name: resume
data:
  dataset: fashion-mnist
  partition: {{scheme: classes, clients: 10, classes_per_client: 2, train_per_client: 20, test_per_client: 10}}
  held_out_fraction: 0.0
model: {{name: {model}}}
algorithm: {algorithm}
federation: {{rounds: 1, clients_per_round: 2, checkpoint_every_s: 3600}}
evaluation: {{every: 1000000}}
runtime: {{workers: 0}}
"""
FEDAVG = "{name: fedavg, local: {steps: 1, batch_size: 16}}"
PEFLL = "{name: pefll, local: {steps: 1, batch_size: 16}, server: {rule: adam}}"


def command(experiment: Path, out: Path, rounds: int) -> list[str]:
    """Return the command that runs or resumes up to this many rounds."""
    program = [sys.executable, "-m", "fedloom", "run", str(experiment), "--out", str(out), "--resume"]
    return [*program, "--set", f"federation.rounds={rounds}"]


def run(experiment: Path, out: Path, rounds: int) -> None:
    """Run or resume to the end."""
    subprocess.run(command(experiment, out, rounds), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def first_new_round_s(experiment: Path, out: Path, done: int) -> float:
    """Resume, and kill the process when its first round is done; return the seconds until that round began."""
    journal = out / "journal.jsonl"
    started = time.time()
    process = subprocess.Popen(
        command(experiment, out, done + 1000), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        # On resume, the journal is rewritten up to the checkpoint; then a line is added at the end of each round.
        while not (journal.exists() and journal.stat().st_mtime > started and _lines(journal) > done):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command(experiment, out, done))} ended with {process.returncode}")
            time.sleep(0.002)
        arrived = time.time()
    finally:
        process.kill()
        process.wait()
    return arrived - started - float(json.loads(journal.read_text().splitlines()[done])["seconds"])


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def measure(experiment: Path, out: Path, rounds: int, repetitions: int) -> dict[str, Any]:
    """Continue to this many rounds, then resume several times for one more."""
    if rounds:
        run(experiment, out, rounds)
    figures: dict[str, Any] = {"rounds": rounds, "import_torch_s": [], "resume_s": [], "experiment": experiment.stem}
    for _ in range(repetitions):
        figures["import_torch_s"].append(import_torch_s())
        if rounds == 0:
            shutil.rmtree(out, ignore_errors=True)
        figures["resume_s"].append(first_new_round_s(experiment, out, rounds))
    sizes = [path.stat().st_size for path in (out / "checkpoints").iterdir()]
    figures["checkpoint_bytes"] = max(sizes, default=0)
    figures["journal_bytes"] = (out / "journal.jsonl").stat().st_size
    return figures


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, nargs="*", default=[0, 10, 1000, 5000])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    about = machine()
    print(describe(about))
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, model, algorithm, rounds in (
            ("fedavg, logistic", "logistic", FEDAVG, options.rounds),
            ("pefll, lenet", "lenet", PEFLL, [0, 1]),
        ):
            experiment = Path(scratch) / f"{name}.yaml"
            experiment.write_text(TINY.format(model=model, algorithm=algorithm))
            for number in rounds:
                results.append(measure(experiment, Path(scratch) / name, number, options.repetitions))
                print(".", end="", flush=True)
    print("\n")
    head = [
        "",
        "rounds done",
        "journal, MiB",
        "checkpoint, MiB",
        "to the first new round, s",
        "import torch, s",
        "ratio",
    ]
    print(table(head, [_line(result) for result in results]))
    print("\nmedian (lowest-highest); 0 rounds done: a fresh start, its evaluation of round 0 included")
    write_json(options.json, about, results)


def _line(result: dict[str, Any]) -> list[str]:
    ratios = [a / b for a, b in zip(result["resume_s"], result["import_torch_s"], strict=True)]
    return [
        result["experiment"],
        f"{result['rounds']:,}",
        f"{result['journal_bytes'] / MIB:.2f}",
        f"{result['checkpoint_bytes'] / MIB:.2f}",
        spread(result["resume_s"]),
        spread(result["import_torch_s"]),
        f"{statistics.median(ratios):.2f}",
    ]


if __name__ == "__main__":
    main()
