"""Every method, with settings for a small federation, for tests of all methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from federations import CLASSES, IMAGE, Federation, clients, federation, problem_of

from fedloom.algorithms.base import available, find_algorithm
from fedloom.data.federated import ClientData
from fedloom.federation.progress import Saves
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP, BatchNormConvNet
from fedloom.privacy.examples import ExamplePrivacy

SIZES = (4, 9, 6)
PLAIN = MLP(IMAGE, [5], CLASSES)
NORMALIZED = BatchNormConvNet(IMAGE, [3], [], CLASSES)
LOCAL = {"steps": 3, "batch_size": 3, "lr": 0.05}


def ours() -> set[str]:
    """Return the methods of this repository; those of other packages may be installed beside them."""
    return {name for name in available() if find_algorithm(name).server.__module__.startswith("fedloom.")}


_EXAMPLES = {name: find_algorithm(name).example_settings() for name in sorted(ours())}

METHODS = {name: s | ({"local": LOCAL} if "local" in s else {}) for name, s in _EXAMPLES.items()} | {
    "afl": {"local": LOCAL | {"steps": 1}},
    "comfedl": {"objective": "robust", "gamma": 1.0, "local": LOCAL},
    "comfedl damaml": {"objective": "damaml", "gamma": 1.0, "local": LOCAL},
    "fedprox": {"mu": 0.5, "local": LOCAL},  # without stragglers, every step is made
    "pfedme": {"steps": 2, "inner_steps": 2, "batch_size": 3, "personalize_epochs": 1},
    "pfedbayes": {"steps": 3, "batch_size": 3, "optimizer": "adam", "lr_personal": 0.02, "lr_global": 0.01, "draws": 2},
    "pefll": {"local": LOCAL, "embedding": {"network": "linear"}},
    "pfnm": {"local": LOCAL},
    "flowdup": {"local": LOCAL, "embedding": {"network": "linear", "labels": True}, "subspace": {"size": 9}},
}
"""Settings by method; after a space stands which settings, where a method is here twice."""


def made(
    folder: Path,
    name: str,
    model: FlatModel | None = None,
    data: Sequence[ClientData] | None = None,
    unseen: Sequence[str] = (),
    rounds: int = 1,
    at_once: int = 1,
    cohort: int | None = None,
    examples: ExamplePrivacy | None = None,
    saves: Saves | None = None,
    checkpoint_every_s: float = 1e9,
    **settings: Any,
) -> Federation:
    """Return a federation for one round by default, by METHODS and settings, with a plain model if possible."""
    model = model or (NORMALIZED if name == "fedbn" else PLAIN)
    data = clients(SIZES) if data is None else data
    method = find_algorithm(name.split()[0])
    roster = tuple(c.id for c in data if c.id not in unseen)
    problem = problem_of(model, data, roster=roster)
    s = method.settings.model_validate(METHODS[name] | settings)
    rounds = rounds if method.trains else 0
    return federation(
        folder, method, s, problem, data, rounds=rounds, unseen=unseen, evaluation_cohort=2, at_once=at_once,
        cohort=cohort, examples=examples, saves=saves, checkpoint_every_s=checkpoint_every_s,
    )  # fmt: skip


def run(folder: Path, name: str, *args: Any, **kwargs: Any) -> Federation:
    """Return the federation of :func:`made` after its rounds."""
    f = made(folder, name, *args, **kwargs)
    f.run()
    return f
