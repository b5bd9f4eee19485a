"""Accuracy under secure aggregation beside that of plain averaging, for the same seeds.

    .venv/bin/python research/benchmarks/secure_accuracy.py [--rounds N] [--seeds N] [--methods NAME] [--json FILE]

Five methods on the clients of ``experiments/quickstart.yaml`` with an MLP, in one process. A secure sum is one of
integers, so every round rounds the mean to a grid of a known step; afterwards training amplifies the difference as it
does any rounding. The table has the mean accuracy over clients, and the largest difference between the parameters of
the two runs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import ROOT, describe, machine, table, write_json

from fedloom.engine.options import RunOptions
from fedloom.engine.run_experiment import run_experiment
from fedloom.experiment import load_experiment
from fedloom.runs.checkpoint import Checkpoints

LOCAL = "local: {batch_size: 10, clip: 50.0, steps: 5, lr: 0.03}"
METHODS = {
    "FedAvg": f"{{name: fedavg, {LOCAL}, personalize_steps: 20}}",
    "SCAFFOLD": "{name: scaffold, local: {batch_size: 10, steps: 5, lr: 0.03}, personalize_steps: 20}",
    "FedRep": f"{{name: fedrep, {LOCAL}}}",
    "pFedBayes": "{name: pfedbayes, steps: 5, batch_size: 10, zeta: 0.001, optimizer: adam, lr_personal: 0.003}",
    "ComFedL": "{name: comfedl, objective: robust, gamma: 1.0, local: {batch_size: 10, steps: 5, lr: 0.01}}",
}
AGGREGATION = "{bits: 32, range: 16}"


def last_run(out: Path, algorithm: str, seed: int, rounds: int, secure: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a method; return its summary, and the tensors of its last checkpoint."""
    settings = [f"algorithm={algorithm}", f"seed={seed}", f"federation.rounds={rounds}", f"evaluation.every={rounds}"]
    settings += ["model={name: mlp, hidden: [100]}", "runtime.workers=0"]
    settings += [f"federation.secure_aggregation={AGGREGATION}"] if secure else []
    summary = run_experiment(
        load_experiment(ROOT / "experiments" / "quickstart.yaml", settings), RunOptions(out, report=False)
    ).summary
    return summary, Checkpoints(out / "checkpoints").load("last").state


def difference(plain: dict[str, Any], secure: dict[str, Any]) -> float:
    """Return the largest difference between two states' floating-point tensors."""
    return max(
        float((plain[name] - secure[name]).abs().max())
        for name in plain
        if plain[name].is_floating_point() and plain[name].numel() and plain[name].shape == secure[name].shape
    )


def compare(algorithm: str, seed: int, rounds: int) -> dict[str, float]:
    """Run a method without and with secure sums; return accuracies in percent, and the states' difference."""
    with tempfile.TemporaryDirectory() as folder:
        (plain, theta), (secure, sums) = (
            last_run(Path(folder) / str(is_secure), algorithm, seed, rounds, is_secure) for is_secure in (False, True)
        )
    figures = {"difference": difference(theta, sums)}
    for group in ("seen", "unseen"):
        for name, summary in (("plain", plain), ("secure", secure)):
            if summary[group]:
                figures[f"{group} {name}"] = 100 * summary[group]["accuracy_mean"]
    return figures


def main() -> None:
    """Compare all methods and seeds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = machine()
    print(describe(about) + "\n")
    found = {
        (name, seed): compare(METHODS[name], seed, options.rounds) for name in options.methods for seed in options.seeds
    }
    columns = ["seen plain", "seen secure", "unseen plain", "unseen secure"]
    rows = [
        [
            name,
            str(seed),
            *(f"{figures[key]:.2f}" if key in figures else "" for key in columns),
            f"{figures['difference']:.1e}",
        ]
        for (name, seed), figures in found.items()
    ]
    print(table(["method", "seed", *columns, "largest difference"], rows))
    write_json(options.json, about, [{"method": method, "seed": seed, **f} for (method, seed), f in found.items()])


if __name__ == "__main__":
    main()
