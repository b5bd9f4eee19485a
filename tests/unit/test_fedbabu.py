"""FedBABU against FedAvg on a model whose head gets no gradient, and SGD on the body (Oh et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import (
    CLASSES,
    IMAGE,
    Federation,
    clients,
    federation,
    setup,
    sgd,
)
from torch import Tensor

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.fedbabu import FEDBABU, FedBABUSettings
from fedloom.federation.randomness import generator
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
SMALL = MLP(IMAGE, [5], CLASSES)
BODY = SMALL.layout.body_size


class NoGradientToTheHead(MLP):
    """MLP of the same values that passes no gradient to its head."""

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        held = {name: p.detach() + 0 * p if name in self.layout.head else p for name, p in parameters.items()}
        return super().forward(held, x)


def made(**changes: Any) -> FedBABUSettings:
    return FedBABUSettings.model_validate({"local": LOCAL, "personalize_epochs": 2} | changes)


def run(folder: Path, s: FedBABUSettings, **keys: Any) -> Federation:
    f = federation(folder, FEDBABU, s, setup(), keys.pop("data", clients(SIZES)), rounds=2, unseen=["c2"], **keys)
    f.run()
    return f


def test_without_head_gradients_it_equals_fedavg_to_the_bit(tmp_path: Path) -> None:
    s = FedAvgSettings.model_validate({"local": LOCAL})
    problem = setup(NoGradientToTheHead(IMAGE, [5], CLASSES))
    avg = federation(tmp_path / "avg", FEDAVG, s, problem, clients(SIZES), rounds=2, unseen=["c2"])
    start = avg.state["theta"]
    avg.run()
    babu = run(tmp_path / "babu", made(personalize_epochs=0))
    assert torch.equal(babu.state["theta"], avg.state["theta"])
    assert torch.equal(babu.state["theta"][BODY:], start[BODY:])
    assert not torch.equal(babu.state["theta"][:BODY], start[:BODY])
    for c in clients(SIZES):
        for predictor in babu.predictors[2, c.id].values():
            assert torch.equal(predictor.tensors()["theta"], avg.state["theta"])


@pytest.mark.usefixtures("each_task")
def test_rounds_train_the_body_and_personalization_trains_all(tmp_path: Path) -> None:
    s, data = made(), clients(SIZES)
    theta = federation(tmp_path / "start", FEDBABU, s, setup(), data).state["theta"]
    weights = torch.tensor(SIZES[:2], dtype=torch.float64)
    for t in (1, 2):
        ends = [sgd(SMALL, theta, c, s.local, slice(BODY), generator(SEED, "train/train", c.id, t)) for c in data[:2]]
        theta = (weights[:, None] * torch.stack(ends)).sum(0) / weights.sum()
    f = run(tmp_path / "run", s)
    torch.testing.assert_close(f.state["theta"], theta, rtol=0, atol=1e-12)
    for c in data:
        tuned = sgd(SMALL, theta, c, s.local, slice(None), generator(SEED, "evaluate/fine-tune", c.id, 2))
        named = f.predictors[2, c.id]
        torch.testing.assert_close(named["personal"].tensors()["theta"], tuned, rtol=0, atol=1e-12)
        assert torch.equal(named["global"].tensors()["theta"], f.state["theta"])
    half = FEDBABU.client(s, setup())
    assert (half.personalization_steps("personal", 6), half.personalization_steps("global", 6)) == (4, 0)
    assert not half.stateful
