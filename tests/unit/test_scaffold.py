"""SCAFFOLD against plain PyTorch, FedAvg, and a fixed point that FedAvg lacks (Karimireddy et al., 2020)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import clients, close, federation, kept, mean_loss, rostered, setup
from pydantic import ValidationError

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.scaffold import SCAFFOLD, ScaffoldSettings
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
MODEL = setup().model


def made(**changes: Any) -> ScaffoldSettings:
    return ScaffoldSettings.model_validate({"local": LOCAL | changes.pop("local", {}), **changes})


def average(**changes: Any) -> FedAvgSettings:
    local = {"momentum": 0.0} | LOCAL | changes.pop("local", {})
    return FedAvgSettings.model_validate({"local": local, "weighting": "uniform", **changes})


def test_the_first_round_equals_fedavgs_to_the_bit_and_the_second_differs(tmp_path: Path) -> None:
    """Compare with FedAvg in round 1, where all control variates are zero."""
    data = clients(SIZES)
    for rounds in (1, 2):
        mine = rostered(
            tmp_path / f"s{rounds}", SCAFFOLD, made(personalize_steps=2), data, rounds=rounds, unseen=["c2"]
        )
        other = rostered(
            tmp_path / f"a{rounds}", FEDAVG, average(personalize_steps=2), data, rounds=rounds, unseen=["c2"]
        )
        assert torch.equal(mine.state["theta"], other.state["theta"]) is (rounds == 1)
        for c in data if rounds == 1 else ():
            for name, predictor in other.predictors[1, c.id].items():
                assert torch.equal(mine.predictors[1, c.id][name].tensors()["theta"], predictor.tensors()["theta"])


@pytest.mark.usefixtures("each_task")
def test_rounds_follow_algorithm_1(tmp_path: Path) -> None:
    s, data, n = made(server_lr=0.7), clients(SIZES), 3
    start = federation(tmp_path / "start", SCAFFOLD, s, setup(), data).state
    theta, c, own = start["theta"], start["c"], {x.id: start["c"] for x in data}
    f = rostered(tmp_path / "run", SCAFFOLD, s, data, rounds=3, cohort=2)
    for t, attempt in enumerate(f.loop.journal.counted(), start=1):
        moves, changes = [], []
        for x in (x for x in data if x.id in attempt.conversations[0].clients):
            y, count = theta, s.local.count(len(x.train))
            for index in batches(len(x.train), 3, count, generator(SEED, "train/train", x.id, t)):
                p = y.clone().requires_grad_()
                (g,) = torch.autograd.grad(mean_loss(MODEL.logits(p, x.train.x[index]), x.train.y[index]), [p])
                y = y - 0.05 * (g - own[x.id] + c)
            new = own[x.id] - c + (theta - y) / (count * 0.05)
            moves.append(y - theta)
            changes.append(new - own[x.id])
            own[x.id] = new
        theta, c = theta + 0.7 * sum(moves) / 2, c + sum(changes) / n
    close(f.state["theta"], theta)
    close(f.state["c"], c)


def test_c_is_the_mean_of_the_counted_clients_control_variates(tmp_path: Path) -> None:
    """Average over the whole roster: a client that never answers counts with zero."""
    f = rostered(tmp_path, SCAFFOLD, made(), clients((*SIZES, 5)), rounds=3, lost={0: 1}, unseen=["c3"])
    close(f.state["c"], (kept(tmp_path, "c0", "c") + kept(tmp_path, "c2", "c")) / 3)
    assert f.state["c"].abs().max() > 1e-3


@pytest.mark.slow
def test_it_converges_to_the_optimum_with_unequal_local_steps(tmp_path: Path) -> None:
    """Expect the mean of the clients' means, which FedAvg misses, because clients with more steps move it further."""
    centres, sizes = torch.tensor([[1.0, 0.0], [0.0, -2.0], [5.0, 3.0]]).double(), (1, 2, 4)
    splits = [Split(c.repeat(n, 1), None) for c, n in zip(centres, sizes, strict=True)]
    data = [ClientData(f"c{i}", split, split, split, 0) for i, split in enumerate(splits)]
    problem, local = Setup(Quadratic(2, (1.0, 0.5)), 0, (2,), 3, torch.float64), {"batch_size": 1, "lr": 0.1}
    mine = rostered(tmp_path / "s", SCAFFOLD, made(local=local), data, rounds=80, problem=problem)
    other = rostered(tmp_path / "a", FEDAVG, average(local=local), data, rounds=80, problem=problem)
    close(mine.state["theta"], centres.mean(0), atol=1e-3)
    assert (other.state["theta"] - centres.mean(0)).abs().max() > 0.1


@pytest.mark.parametrize(("key", "value"), [("momentum", 0.9), ("clip", 1.0)])
def test_optimizers_other_than_plain_sgd_are_rejected(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        made(local={key: value})
    with pytest.raises(ValidationError, match="weighting"):
        made(weighting="examples")
    assert made(local={"lr": 0.1}).local.sgd.momentum == 0
    assert SCAFFOLD.requires_fixed_population(made()) is not None
