"""Requirements on every method that treats a model's body and head separately."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import (
    CLASSES,
    IMAGE,
    Federation,
    answers_as_alone,
    clients,
    federation,
    held_out_elsewhere,
    made_by,
    setup,
)

from fedloom.algorithms.base import Algorithm
from fedloom.algorithms.fedbabu import FEDBABU
from fedloom.algorithms.fedper import FEDPER
from fedloom.algorithms.fedrep import FEDREP
from fedloom.algorithms.fedrod import FEDROD
from fedloom.algorithms.lgfedavg import LGFEDAVG
from fedloom.core.settings import Settings
from fedloom.data.federated import ClientData
from fedloom.errors import ExperimentError
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
SMALL = MLP(IMAGE, [5], CLASSES)
BODY, ALL = SMALL.layout.body_size, SMALL.layout.size


@dataclass(frozen=True)
class Case:
    """Method, the number of values sent each way besides loss and weight, and the part that a client keeps."""

    algorithm: Algorithm
    down: int
    up: int
    kept: slice | None = None
    name: str = "head"
    further: dict[str, Any] = field(default_factory=lambda: {"personalize_epochs": 2})
    atol: float = 1e-12

    @property
    def settings(self) -> Settings:
        return self.algorithm.settings.model_validate({"local": LOCAL} | self.further)

    def run(self, folder: Path, data: list[ClientData]) -> Federation:
        f = federation(folder, self.algorithm, self.settings, setup(), data, rounds=2, unseen=["c2"])
        f.run()
        return f


HEAD = slice(BODY, None)
CASES = [
    Case(FEDBABU, ALL, BODY),
    Case(FEDPER, BODY, BODY, HEAD),
    Case(
        FEDREP,
        BODY,
        BODY,
        HEAD,
        further={"head": {"epochs": 2, "batch_size": 2, "lr": 0.1}, "personalize_epochs": 2},
        atol=1e-10,
    ),
    Case(FEDROD, ALL, ALL, HEAD, further={}),
    Case(LGFEDAVG, ALL, ALL - BODY, slice(BODY), "body"),
]
methods = pytest.mark.parametrize("case", CASES, ids=lambda case: case.algorithm.name)


@methods
def test_only_the_shared_part_is_sent_and_held_out_examples_change_nothing(case: Case, tmp_path: Path) -> None:
    data = clients(SIZES)
    one, other = (case.run(tmp_path / str(i), d) for i, d in enumerate((data, held_out_elsewhere(data))))
    attempts = one.loop.journal.counted()
    assert len(attempts) == 2
    for attempt in attempts:
        assert (attempt.payload_down, attempt.payload_up) == (8 * 2 * case.down, 8 * 2 * (case.up + 2))
    assert {name: tuple(t.shape) for name, t in one.state.items()} == {"theta": (case.down,)}
    found, expected = made_by(one), made_by(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@methods
def test_a_batch_of_clients_replies_as_single_clients(case: Case) -> None:
    """One of them already has a personal part, the others have none."""
    theta, own = (SMALL.init(torch.Generator().manual_seed(seed), torch.float64) for seed in (3, 4))
    states = None if case.kept is None else [None, {case.name: own[case.kept]}, None]
    opening, *_, ask = case.algorithm.messages
    half, sent = case.algorithm.client(case.settings, setup()), theta[: case.down]
    personalizes = "personalize_epochs" in case.further
    asked = ask(sent) if personalizes else None
    answers_as_alone(half, clients((9, 4, 6)), opening(sent), asked, states, case.atol)


@methods
def test_a_model_of_one_layer_is_rejected(case: Case) -> None:
    with pytest.raises(ExperimentError) as refused:
        case.algorithm.check_model(case.settings, MLP(IMAGE, [], CLASSES))
    assert refused.value.key == "model.name"
