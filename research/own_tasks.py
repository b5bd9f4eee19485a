"""Five small federations of other tasks and inputs: a search on validation, then tests with other seeds.

    python research/own_tasks.py [PROBLEM ...] [--out runs/own-tasks]

For each problem, every method has the same number of settings (``GRIDS``). They run with seed 1, and that with the best
validation headline after the last round is chosen. With it the seeds of ``TESTS`` run, and are tested once, after the
last round. An interrupted program continues where it stopped. Results: docs/results/own-tasks.md; compact file:
``python research/results.py fold own-tasks runs/own-tasks``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import task_problems as problems
import torch
from torch import nn

import fedloom
from fedloom.errors import QuorumError

SEARCH, TESTS = 1, (2, 3, 4)
HELD_OUT, TEST_FRACTION = 0.25, 0.4
FOUND = "found.json"
GROUPS = ("seen", "unseen")
KEYS = ("mean", "worst_decile")

Setting = Mapping[str, float]
"""Values by axis: ``lr``, the step size of all local training, and keys below ``algorithm``."""

RATES = (0.01, 0.03, 0.1)
GRIDS: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = {
    "regression": {
        "local": {"lr": RATES, "local.steps": (100, 400, 1600)},
        "fedavg": {"lr": RATES, "personalize_steps": (20, 100, 400)},
        "pefll": {"lr": RATES, "server.lr": (0.001, 0.003, 0.01)},
    },
    "signals": {method: {"lr": (0.03, 0.1)} for method in ("local", "fedavg", "fedbn")},
    "shapes": {
        "local": {"lr": RATES, "local.steps": (50, 200)},
        "fedavg": {"lr": RATES, "personalize_steps": (50, 200)},
    },
    "categories": {method: {"lr": RATES} for method in ("local", "fedavg", "ditto")},
    "cameras": {method: {"lr": (0.003, 0.01)} for method in ("local", "fedavg", "fedavg-local-statistics")},
}
"""Values by axis, of each problem and its methods."""


@dataclass(frozen=True)
class Problem:
    """Data of a seed, the clients' model, and the length of training.

    ``model`` is the clients' module, or the settings of a built-in model. ``clients`` make ``steps`` steps in a round,
    ``at_once`` of them in one stack. A client that trains alone makes ``alone`` steps, and one that fine-tunes ``fine``
    steps, unless the grid says otherwise.
    """

    draw: Callable[[int], problems.Clients]
    model: Callable[[], nn.Module] | Mapping[str, Any]
    rounds: int
    clients: int = 8
    steps: int = 20
    batch: int = 16
    alone: int = 200
    fine: int = 50
    at_once: int = 1


PROBLEMS = {
    "regression": Problem(problems.regression, problems.regressor, rounds=150, at_once=8),
    "signals": Problem(problems.signals, problems.signal_network, rounds=20, clients=6, fine=100),
    "shapes": Problem(problems.shapes, problems.SmallUNet, rounds=20, clients=5, batch=8),
    "categories": Problem(problems.categories, problems.MixedTable, rounds=30, at_once=8),
    "cameras": Problem(problems.digits, {"name": "resnet18"}, rounds=10, clients=3, steps=8, alone=40, fine=8),
}


def settings(problem: str, method: str) -> Iterator[Setting]:
    """Yield the settings of a method's grid."""
    grid = GRIDS[problem][method]
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def algorithm(problem: str, method: str, setting: Setting) -> dict[str, Any]:
    """Return the settings below ``algorithm``."""
    about = PROBLEMS[problem]
    local = {"steps": about.steps, "batch_size": about.batch, "momentum": 0.9, "clip": 10.0, "lr": setting["lr"]}
    made: dict[str, Any] = {"name": method.partition("-")[0], "local": local}
    if method == "local":
        local["steps"] = about.alone
    elif made["name"] == "fedavg":
        made["personalize_steps"] = about.fine
    elif method == "ditto":
        made |= {"personal": dict(local), "proximity": 0.1, "personalize_steps": about.fine}
    elif method == "pefll":
        made |= {"embedding": {"network": "mlp"}, "descriptor": {"evaluate": "all"}}
        made["server"] = {"rule": "adam", "clip": 50.0}
    for key, value in setting.items():
        *folders, name = key.split(".")
        place = made
        for folder in folders:
            place = place[folder]
        if key != "lr":
            place[name] = value
    return made


def experiment(problem: str, method: str, setting: Setting, seed: int, data: Path) -> dict[str, Any]:
    """Return one run's settings; the data of its seed are stored in the folder ``data``."""
    about = PROBLEMS[problem]
    rounds = 0 if method == "local" else about.rounds
    made = {
        "name": f"{problem}-{method}",
        "seed": seed,
        "data": fedloom.Federated.from_arrays(
            about.draw(seed),
            root=data,
            held_out_fraction=HELD_OUT,
            partition={"scheme": "natural", "test_fraction": TEST_FRACTION},
        ),
        "algorithm": algorithm(problem, method, setting),
        "federation": {"rounds": rounds, "clients_per_round": about.clients},
        "evaluation": {"every": max(rounds, 1)},
        "runtime": {"workers": 0, "clients_at_once": about.at_once},
    }
    if isinstance(about.model, Mapping):
        made["model"] = {**about.model, "buffers": "local" if method.endswith("local-statistics") else "shared"}
    return made


def last_line(problem: str, method: str, setting: Setting, seed: int, out: Path) -> dict[str, Any] | None:
    """Run an experiment, unless an earlier program did, and return its last evaluation; None if it diverged."""
    point = ",".join(f"{key}={value:g}" for key, value in setting.items())
    folder = out / problem / method / f"{point},seed={seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
        make = PROBLEMS[problem].model
        torch.manual_seed(seed)
        made = experiment(problem, method, setting, seed, out / "data")
        run = fedloom.run if isinstance(make, Mapping) else partial(fedloom.run, model=make())
        try:
            run(made, out=folder, report=False, progress=False)
        except QuorumError:
            return None
    line: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return line


def validation(line: Mapping[str, Any] | None) -> float | None:
    """Return the pooled headline on validation examples of seen clients; None for a run that diverged."""
    return None if line is None else line["validation_pooled"]


def tested(line: Mapping[str, Any]) -> dict[str, float]:
    """Return statistics of the headline over clients: of personal models, and of the shared one if any."""
    name = line["headline"]["name"]
    found = {f"{group}_{key}": line[group]["metrics"][name][key] for group in GROUPS for key in KEYS}
    if line["global"] is not None:
        shared = {group: line["global"][group]["metrics"][name] for group in GROUPS}
        found |= {f"global_{group}_{key}": shared[group][key] for group in GROUPS for key in KEYS}
    return found


def compared(problem: str, method: str, out: Path) -> dict[str, Any]:
    """Search a method's setting and test it: validation results of all settings, and test results of the chosen one."""
    lines = [(setting, last_line(problem, method, setting, SEARCH, out)) for setting in settings(problem, method)]
    headline = next(line["headline"] for _, line in lines if line is not None)
    known = [(setting, value) for setting, line in lines if (value := validation(line)) is not None]
    sign = 1 if headline["higher_is_better"] else -1
    best, _ = max(known, key=lambda both: sign * both[1])
    tests = {}
    for seed in TESTS:
        line = last_line(problem, method, best, seed, out)
        if line is None:
            raise SystemExit(f"{problem}, {method}: the run with seed {seed} and {dict(best)} diverged")
        tests[seed] = tested(line)
    searched = [{"setting": setting, "validation": validation(line)} for setting, line in lines]
    return {"headline": headline["name"], "chosen": best, "search": searched, "tests": tests}


def main() -> None:
    """Run the problems that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="*", help=f"by default all: {', '.join(PROBLEMS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/own-tasks"))
    options = parser.parse_args()
    if unknown := set(options.problem) - set(PROBLEMS):
        parser.error(f"unknown problem {', '.join(unknown)}; choose from {', '.join(PROBLEMS)}")
    for problem in options.problem or PROBLEMS:
        found = {}
        for method in GRIDS[problem]:
            found[method] = compared(problem, method, options.out)
            print(problem, method, found[method]["chosen"], flush=True)
        (options.out / problem / FOUND).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
