"""Four small federations of other tasks and inputs: a search on validation, then tests with other seeds.

    python research/own_tasks.py [PROBLEM ...] [--out runs/own-tasks]

Every method's step size is one of ``RATES``: that with the best validation headline after the last round with seed 1.
With it the seeds of ``TESTS`` run, and are tested once, after the last round. An interrupted program continues where it
stopped. Results: docs/results/own-tasks.md; compact file: ``python research/results.py fold own-tasks runs/own-tasks``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import task_problems as problems
from torch import nn

import fedloom

RATES = (0.01, 0.03, 0.1)
SEARCH, TESTS = 1, (2, 3, 4)
LOCAL = {"steps": 20, "batch_size": 16, "momentum": 0.9, "clip": 10.0}
FOUND = "found.json"

METHODS: Mapping[str, Mapping[str, Any]] = {
    "local": {"name": "local", "local": LOCAL | {"steps": 200}},
    "fedavg": {"name": "fedavg", "personalize_steps": 20},
    "ditto": {"name": "ditto", "proximity": 0.1},
    "pefll": {"name": "pefll", "embedding": {"network": "mlp"}, "server": {"rule": "adam", "lr": 0.001, "clip": 50.0}},
    "fedbn": {"name": "fedbn"},
}


@dataclass(frozen=True)
class Problem:
    """Data of a seed, the clients' module, and the methods that are compared."""

    draw: Callable[[int], problems.Clients]
    make: Callable[[], nn.Module]
    methods: Sequence[str]
    rounds: int = 60


PROBLEMS = {
    "regression": Problem(problems.regression, problems.regressor, ("local", "fedavg", "ditto", "pefll")),
    "signals": Problem(problems.signals, problems.signal_network, ("local", "fedavg", "ditto", "fedbn")),
    "shapes": Problem(problems.shapes, problems.segmenter, ("local", "fedavg", "ditto"), rounds=30),
    "categories": Problem(problems.categories, problems.MixedTable, ("local", "fedavg", "ditto")),
}


def experiment(problem: str, method: str, rate: float, seed: int) -> dict[str, Any]:
    """Return one run's settings."""
    about = PROBLEMS[problem]
    known = dict(METHODS[method])
    algorithm = {**known, "local": {**known.get("local", LOCAL), "lr": rate}}
    if method == "ditto":
        algorithm["personal"] = algorithm["local"]
    rounds = 0 if method == "local" else about.rounds
    return {
        "name": problem,
        "seed": seed,
        "data": fedloom.Federated.from_arrays(about.draw(seed), held_out_fraction=problems.UNSEEN),
        "algorithm": algorithm,
        "federation": {"rounds": rounds, "clients_per_round": 8},
        "evaluation": {"every": max(rounds, 1)},
    }


def last_line(problem: str, method: str, rate: float, seed: int, out: Path) -> dict[str, Any]:
    """Run an experiment, unless an earlier program did, and return its last evaluation and its headline."""
    folder = out / problem / method / f"lr={rate:g},seed={seed}"
    if not (folder / "summary.json").exists():
        made = experiment(problem, method, rate, seed)
        fedloom.run(made, model=PROBLEMS[problem].make(), out=folder, report=False, progress=False)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    headline = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["headline"]
    return {**json.loads(lines[-1]), "headline": headline}


def compared(problem: str, out: Path) -> dict[str, Any]:
    """Return chosen rates, their validation results, and the test results of each method."""
    found: dict[str, Any] = {}
    for method in PROBLEMS[problem].methods:
        lines = {rate: last_line(problem, method, rate, SEARCH, out) for rate in RATES}
        name, higher = lines[RATES[0]]["headline"]["name"], lines[RATES[0]]["headline"]["higher_is_better"]
        validation = {rate: line["validation_pooled"] for rate, line in lines.items()}
        rate = (max if higher else min)(RATES, key=lambda rate: validation[rate])
        tests = {}
        for seed in TESTS:
            line = last_line(problem, method, rate, seed, out)
            tests[seed] = {
                f"{group}_{key}": line[group]["metrics"][name][key]
                for group in ("seen", "unseen")
                for key in ("mean", "worst_decile")
            }
            if line["global"] is not None:
                tests[seed] |= {"global_mean": line["global"]["metrics"][name]["mean"]}
        found[method] = {"headline": name, "rate": rate, "validation": validation, "tests": tests}
    return found


def main() -> None:
    """Run the problems that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="*", choices=[*PROBLEMS, []], help="by default all")
    parser.add_argument("--out", type=Path, default=Path("runs/own-tasks"))
    options = parser.parse_args()
    for problem in options.problem or PROBLEMS:
        found = compared(problem, options.out)
        (options.out / problem / FOUND).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
