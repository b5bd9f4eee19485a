"""FLowDUP by the origin of its subspace, FedAvg in the same subspace, and other methods: search, then tests.

    python research/flowdup.py [PROBLEM ...] [--out runs/flowdup]
    python research/flowdup.py --costs [--out runs/flowdup]             # CPU time of servers

Every method has the same step sizes (``RATES``). They run with seed 1, and that with the best validation accuracy of
the seen clients after the last round is chosen. With it the seeds of ``TESTS`` run, and are tested once, after the last
round. An interrupted program continues where it stopped. Results: docs/results/flowdup.md; compact file:
``python research/results.py fold flowdup runs/flowdup``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import fedloom
from fedloom.algorithms.base import Algorithm, ServerAlgorithm, Setup, find_algorithm
from fedloom.errors import QuorumError
from fedloom.messages import Message, Replies, answer_shapes
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP, LeNet

SEARCH, TESTS = 1, (2, 3, 4, 5, 6)
FOUND, COSTS = "found.json", "costs.json"
ROUNDS, COHORT, STEPS, BATCH, SIZE = 100, 5, 10, 16, 1000
"""Rounds, clients of a round, their steps and batch size, and dimensions of subspaces."""

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Step sizes of local training."""

PROBLEMS: Mapping[str, Mapping[str, Any]] = {
    "fashion-mnist": {"scheme": "classes", "classes_per_client": 3, "train_per_client": 60, "test_per_client": 60},
}
"""Partition of each data set to 50 clients, of which 10 are new."""

EMBEDDING = {"network": "mlp", "width": 32, "labels": False}
FLOWDUP = {"name": "flowdup", "embedding": EMBEDDING}
TRAINED = {"size": SIZE, "origin": "trained"}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "local": {"name": "local"},
    "fedavg": {"name": "fedavg"},
    "fine-tuning": {"name": "fedavg", "personalize_steps": 20},
    "fedavg-subspace": {**FLOWDUP, "coordinates": "shared", "subspace": {"size": SIZE}},
    "flowdup": {**FLOWDUP, "subspace": {"size": SIZE}},
    "flowdup-trained": {**FLOWDUP, "subspace": TRAINED},
    "pefll": {
        "name": "pefll",
        "embedding": EMBEDDING,
        "hypernetwork": {"size": "S"},
        "descriptor": {"size": 32, "evaluate": "all"},
        "server": {"rule": "adam", "clip": 50.0, "lr": 0.001},
    },
    "flowdup-half": {**FLOWDUP, "subspace": TRAINED, "unlabelled": 0.5},
}
"""Settings of each method below ``algorithm``."""


def algorithm(method: str, rate: float) -> dict[str, Any]:
    """Return the settings below ``algorithm``."""
    steps = 200 if method == "local" else STEPS
    return {
        **METHODS[method],
        "local": {"steps": steps, "batch_size": BATCH, "momentum": 0.9, "clip": 10.0, "lr": rate},
    }


def experiment(problem: str, method: str, rate: float, seed: int) -> dict[str, Any]:
    """Return one run's settings."""
    rounds = 0 if method == "local" else ROUNDS
    return {
        "name": f"{problem}-{method}",
        "seed": seed,
        "data": {
            "dataset": problem,
            "partition": {"clients": 50, **PROBLEMS[problem]},
            "held_out_fraction": 0.2,
            "validation_fraction": 0.15,
            "normalization": "pool",
        },
        "model": {"name": "mlp", "hidden": [32]},
        "algorithm": algorithm(method, rate),
        "federation": {"rounds": rounds, "clients_per_round": COHORT, "checkpoint_every_s": 600},
        "evaluation": {"every": max(rounds, 1)},
        "runtime": {"workers": 0, "clients_at_once": COHORT},
    }


def run(problem: str, method: str, rate: float, seed: int, out: Path) -> dict[str, float] | None:
    """Run an experiment, unless an earlier program did, and return its results; None if it diverged."""
    folder = out / problem / method / f"lr={rate:g},seed={seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
        try:
            fedloom.run(experiment(problem, method, rate, seed), out=folder, report=False, progress=False)
        except QuorumError:
            return None
    line = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    groups = {group: line[group]["metrics"]["accuracy"] for group in ("seen", "unseen")}
    found = {
        f"{group}_{name}": 100 * accuracy[key]
        for group, accuracy in groups.items()
        for name, key in (("mean", "mean"), ("worst", "worst_decile"))
    }
    spread = {f"{group}_spread": 100 * line["spread"][group]["relative"] for group in groups}
    return {"validation": 100 * line["validation_pooled"], **found, **spread, **traffic(folder)}


def traffic(folder: Path) -> dict[str, float]:
    """Return kilobytes of a client in a round, down and up, and of a new client."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    visits = ROUNDS * COHORT
    parts = (part for part in summary.values() if isinstance(part, dict))
    new = next(part["new_client"]["personal"] for part in parts if "new_client" in part)
    return {
        "round_down": summary["communication"]["payload_down"] / visits / 1000,
        "round_up": summary["communication"]["payload_up"] / visits / 1000,
        "new_down": new["payload_down"] / 1000,
        "new_up": new["payload_up"] / 1000,
    }


def compared(problem: str, method: str, out: Path) -> dict[str, Any]:
    """Search a method's step size and test it: results of all step sizes on seed 1, and of the chosen one."""
    searched = {rate: run(problem, method, rate, SEARCH, out) for rate in RATES}
    known = {rate: found["validation"] for rate, found in searched.items() if found is not None}
    best = max(known, key=lambda rate: known[rate])
    tests = {seed: run(problem, method, best, seed, out) for seed in TESTS}
    if None in tests.values():
        raise SystemExit(f"{problem}, {method}: a run with lr = {best:g} diverged")
    return {"chosen": best, "search": [[rate, found] for rate, found in searched.items()], "tests": tests}


@dataclass(frozen=True)
class Canned:
    """Round, and its cohort, whose clients have answered: what remains of ``train_round`` is the server's work."""

    answers: Mapping[type[Message], Replies[Any]]
    clients: tuple[str, ...]
    number: int = 1

    @classmethod
    def of(cls, method: Algorithm, server: ServerAlgorithm) -> Canned:
        """Return a cohort with small random answers."""
        answers, random = {}, torch.Generator().manual_seed(0)
        for answer, shapes in answer_shapes(method.messages, server.sizes).items():
            fields = {name: 1e-3 * torch.rand(COHORT, *shape, generator=random) for name, shape in shapes.items()}
            answers[answer] = Replies(answer(**fields), torch.ones(COHORT) > 0, torch.full((COHORT,), 60))
        return cls(answers, tuple(f"c{i}" for i in range(COHORT)))

    def sample(self) -> Canned:
        """Return the cohort."""
        return self

    def send(
        self, message: Message, answer: type[Message], meanwhile: Callable[[], None] | None = None
    ) -> Replies[Any]:
        """Return the answers at once, after the server's work meanwhile."""
        if meanwhile is not None:
            meanwhile()
        return self.answers[answer]


def server_ms(method: str, model: FlatModel, rounds: int = 40) -> float:
    """Return the CPU milliseconds of a server's round without the clients' part: the minimum over ``rounds`` rounds."""
    keys = algorithm(method, RATES[0])
    found = find_algorithm(str(keys.pop("name")))
    setup = Setup(model, 10, (1, 28, 28), 50, roster=tuple(f"c{i}" for i in range(40)))
    server = found.server(found.settings.model_validate(keys), setup, torch.Generator().manual_seed(0))
    cohort, took = Canned.of(found, server), []
    for _ in range(rounds):
        start = time.process_time()
        server.train_round(cohort)  # type: ignore[arg-type]
        server.settle()
        took.append(1000 * (time.process_time() - start))
    return min(took)


def costs() -> dict[str, dict[str, float]]:
    """Return the server's milliseconds by model and method."""
    models: dict[str, FlatModel] = {"mlp": MLP((1, 28, 28), [32], 10), "lenet": LeNet((1, 28, 28), 10)}
    federated = [method for method in METHODS if method not in ("local", "fine-tuning", "flowdup-half")]
    return {name: {method: server_ms(method, model) for method in federated} for name, model in models.items()}


def main() -> None:
    """Run the problems that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", action="store_true", help="only measure the servers' CPU time")
    parser.add_argument("problem", nargs="*", help=f"by default all: {', '.join(PROBLEMS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/flowdup"))
    options = parser.parse_args()
    if unknown := set(options.problem) - set(PROBLEMS):
        parser.error(f"unknown problem {', '.join(unknown)}; choose from {', '.join(PROBLEMS)}")
    if options.costs:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / COSTS).write_text(json.dumps(costs(), indent=1), encoding="utf-8")
        return
    for problem in options.problem or PROBLEMS:
        found = {}
        for method in METHODS:
            found[method] = compared(problem, method, options.out)
            print(problem, method, found[method]["chosen"], flush=True)
        (options.out / problem / FOUND).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
