"""FLowDUP and PeFLL, with labels and without, in four small federations: a search on validation, then tests.

    python research/flowdup.py [PROBLEM ...] [--out runs/flowdup]
    python research/flowdup.py --costs [--out runs/flowdup]             # CPU time of servers, on a quiet machine

Every method has four settings (``GRIDS``). They run with seed 1, and that with the best validation accuracy of the seen
clients after the last round is chosen. With it the seeds of ``TESTS`` run, and are tested once, after the last round.
An interrupted program continues where it stopped. Results: docs/results/flowdup.md; compact file:
``python research/results.py fold flowdup runs/flowdup``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fedloom.models.lenet import LeNet
from fedloom.models.mlp import MLP

SEARCH, TESTS = 1, (2, 3, 4)
FOUND, COSTS = "found.json", "costs.json"
ROUNDS, COHORT, STEPS, BATCH, SIZE = 100, 5, 10, 16, 1000
"""Rounds, clients of a round, their steps and batch size, and dimensions of subspaces."""

PROBLEMS: Mapping[str, Mapping[str, Any]] = {
    "fashion-mnist": {"scheme": "classes", "classes_per_client": 3, "train_per_client": 60, "test_per_client": 60},
    "qmnist": {"scheme": "natural", "min_examples": 60, "test_fraction": 0.4},
    "cifar10": {"scheme": "classes", "classes_per_client": 2, "train_per_client": 100, "test_per_client": 60},
    "mnist": {
        "scheme": "iid",
        "train_per_client": 60,
        "test_per_client": 60,
        "shift": {"kind": "rotation", "groups": 4},
    },
}
"""Partition of each data set to 50 clients, of which 10 are new."""

Setting = Mapping[str, float]
"""Values by axis: ``lr``, the step size of local training, and keys below ``algorithm``."""

SERVERS = {"lr": (0.03, 0.1), "server.lr": (0.001, 0.003)}
GENERATORS = {"lr": (0.1, 0.3), "lambda_centre": (0.001, 0.1)}
GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "local": {"lr": (0.03, 0.1), "local.steps": (50, 200)},
    "fedavg": {"lr": (0.003, 0.01, 0.03, 0.1)},
    "fine-tuning": {"lr": (0.01, 0.03), "personalize_steps": (20, 100)},
    "pefll": SERVERS,
    "pefll-unlabelled": SERVERS,
    "pefll-subspace": SERVERS,
    "flowdup": GENERATORS,
    "flowdup-half": GENERATORS,
}
"""Values by axis of each method."""


def settings(method: str) -> Iterator[Setting]:
    """Yield the settings of a method's grid."""
    for values in itertools.product(*GRIDS[method].values()):
        yield dict(zip(GRIDS[method], values, strict=True))


def algorithm(method: str, setting: Setting) -> dict[str, Any]:
    """Return the settings below ``algorithm``."""
    local = {"steps": STEPS, "batch_size": BATCH, "momentum": 0.9, "clip": 10.0, "lr": setting["lr"]}
    name, _, variant = method.partition("-")
    made: dict[str, Any] = {"name": "fedavg" if name == "fine" else name, "local": local}
    embedding = {"network": "mlp", "width": 32, "labels": name == "pefll" and variant != "unlabelled"}
    if name == "pefll":
        subspace = {"size": SIZE} if variant == "subspace" else None
        made |= {"embedding": embedding, "hypernetwork": {"size": "S", "subspace": subspace}}
        made["descriptor"] = {"size": 32, "evaluate": "all"}
        made["server"] = {"rule": "adam", "clip": 50.0}
    elif name == "flowdup":
        made |= {"embedding": embedding, "subspace": {"size": SIZE}, "unlabelled": 0.5 if variant == "half" else 0.0}
    for key, value in setting.items():
        *folders, last = key.split(".")
        place = made
        for folder in folders:
            place = place[folder]
        if key != "lr":
            place[last] = value
    return made


def experiment(problem: str, method: str, setting: Setting, seed: int) -> dict[str, Any]:
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
        "algorithm": algorithm(method, setting),
        "federation": {"rounds": rounds, "clients_per_round": COHORT, "checkpoint_every_s": 600},
        "evaluation": {"every": max(rounds, 1)},
        "runtime": {"workers": 0, "clients_at_once": COHORT},
    }


def run(problem: str, method: str, setting: Setting, seed: int, out: Path) -> dict[str, float] | None:
    """Run an experiment, unless an earlier program did, and return its results; None if it diverged."""
    point = ",".join(f"{key}={value:g}" for key, value in setting.items())
    folder = out / problem / method / f"{point},seed={seed}"
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
        try:
            fedloom.run(experiment(problem, method, setting, seed), out=folder, report=False, progress=False)
        except QuorumError:
            return None
    line = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    found = {
        f"{group}_{name}": 100 * line[group]["metrics"]["accuracy"][key]
        for group in ("seen", "unseen")
        for name, key in (("mean", "mean"), ("worst", "worst_decile"))
    }
    return {"validation": 100 * line["validation_pooled"], **found, **traffic(folder)}


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
    """Search a method's setting and test it: validation results of all settings, and results of the chosen one."""
    searched = [(setting, run(problem, method, setting, SEARCH, out)) for setting in settings(method)]
    known = [(setting, found) for setting, found in searched if found is not None]
    best, _ = max(known, key=lambda both: both[1]["validation"])
    tests = {seed: run(problem, method, best, seed, out) for seed in TESTS}
    if None in tests.values():
        raise SystemExit(f"{problem}, {method}: a run with {dict(best)} diverged")
    validation = [(setting, None if found is None else found["validation"]) for setting, found in searched]
    return {"chosen": best, "search": validation, "tests": tests}


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
    setting = next(settings(method))
    found = find_algorithm(str(algorithm(method, setting).pop("name")))
    keys = {key: value for key, value in algorithm(method, setting).items() if key != "name"}
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
    federated = [method for method in GRIDS if method not in ("local", "fine-tuning", "flowdup-half")]
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
        for method in GRIDS:
            found[method] = compared(problem, method, options.out)
            print(problem, method, found[method]["chosen"], flush=True)
        (options.out / problem / FOUND).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
