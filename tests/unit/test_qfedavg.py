"""q-FedAvg against FedAvg, its one-step form on a quadratic, and plain PyTorch (Li et al., ICLR 2020)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from federations import clients, federation, group, mean_loss, setup
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.qfedavg import Q_FEDAVG, QFedAvgSettings
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.messages import Replies
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"steps": 3, "batch_size": 3, "lr": 0.05}


def made(**changes: Any) -> QFedAvgSettings:
    return QFedAvgSettings.model_validate({"local": LOCAL | changes.pop("local", {}), **changes})


def loss_of(problem: Setup, theta: Tensor, c: ClientData) -> float:
    return float(mean_loss(problem.model.logits(theta, c.train.x), c.train.y))


def visit(s: QFedAvgSettings, problem: Setup, theta: Tensor, c: ClientData, round: int) -> Tensor:
    w = theta.clone()
    for index in batches(len(c.train), 3, 3, generator(SEED, "train/train", c.id, round)):
        p = w.clone().requires_grad_()
        mean_loss(problem.model.logits(p, c.train.x[index]), c.train.y[index]).backward()
        assert p.grad is not None
        w = w - s.local.lr * p.grad
    return w


@pytest.mark.parametrize("lost", [None, {0: 1}])
def test_q_0_equals_uniform_fedavg_to_the_bit(tmp_path: Path, lost: dict[int, int] | None) -> None:
    local = LOCAL | {"momentum": 0.9, "lambda_theta": 0.01}
    average = FedAvgSettings.model_validate({"local": local, "weighting": "uniform", "personalize_steps": 2})
    fair, avg = (
        federation(tmp_path / method.name, method, s, setup(), clients(SIZES), rounds=3, lost=lost)
        for method, s in ((Q_FEDAVG, made(q=0, local=local, personalize_steps=2)), (FEDAVG, average))
    )
    fair.run()
    avg.run()
    assert torch.equal(fair.state["theta"], avg.state["theta"])
    for key, named in avg.predictors.items():
        for name, predictor in named.items():
            assert torch.equal(fair.predictors[key][name].tensors()["theta"], predictor.tensors()["theta"])


@pytest.mark.parametrize("q", [0.2, 1.0, 5.0])
@pytest.mark.usefixtures("each_task")
def test_rounds_follow_algorithm_2(tmp_path: Path, q: float) -> None:
    """F_k is that of the received model, over all train data, before training."""
    s, problem, data = made(q=q), setup(), clients(SIZES)
    run = federation(tmp_path, Q_FEDAVG, s, problem, data, rounds=2)
    w = run.state["theta"]
    big_l = 1 / s.local.lr
    for t in (1, 2):
        top, bottom = torch.zeros_like(w), 0.0
        for c in data:
            f = loss_of(problem, w, c) + s.epsilon
            delta = big_l * (w - visit(s, problem, w, c, t))
            top += f**q * delta
            bottom += q * f ** (q - 1) * float(delta.square().sum()) + big_l * f**q
        w = w - top / bottom
    run.run()
    torch.testing.assert_close(run.state["theta"], w, rtol=0, atol=1e-12)


def at(c: float, id: str) -> ClientData:
    split = Split(torch.full((4, 1), c, dtype=torch.float64), None)
    return ClientData(id, split, split, split, 0)


def test_on_a_quadratic_a_larger_q_weights_the_worse_client_more() -> None:
    """f = (θ - c)²/2 with θ = 0 and c of 1 and -3: the ratio of answers is (9)^q times that of FedAvg."""
    data, theta = [at(1.0, "c0"), at(-3.0, "c1")], torch.zeros(1, dtype=torch.float64)
    before = 0.0
    for q in (0.0, 0.2, 1.0, 3.0):
        s = made(q=q, local={"steps": 1, "lr": 0.1})
        half = Q_FEDAVG.client(s, Setup(Quadratic(1), 0, (1,), 2, torch.float64))
        answer = next(half.open(group(data), Q_FEDAVG.messages[0](theta))).tensors()
        ratio = float(-answer["delta_theta"][1, 0] / answer["delta_theta"][0, 0])
        assert ratio == pytest.approx(3 * 9**q, rel=1e-8)
        assert ratio > before
        before = ratio
        f = torch.tensor([0.5, 4.5]).double()
        g2 = torch.tensor([1.0, 9.0]).double()  # squared gradients; h/L = q F^(q-1) |g|²/L + F^q
        torch.testing.assert_close(answer["h"][:, 0], q * f ** (q - 1) * g2 * 0.1 + f**q, rtol=1e-8, atol=0)


def test_a_power_that_overflows_is_reported() -> None:
    """If it overflows, the client is lost; if it is 0 for all clients, the round fails."""
    data, theta = [at(1.0, "c0"), at(-3.0, "c1")], torch.zeros(1, dtype=torch.float64)
    s, members = made(q=2000.0, local={"steps": 1, "lr": 0.1}), group(data)
    half = Q_FEDAVG.client(s, Setup(Quadratic(1), 0, (1,), 2, torch.float64))
    answer = next(half.open(members, Q_FEDAVG.messages[0](theta)))
    assert members.lost.keys() == {1}
    assert tells(members.lost[1], "4.5", "algorithm.q", "2000")
    with pytest.raises(FloatingPointError, match=r"not finite.*algorithm\.q .*2000"):
        Q_FEDAVG.aggregate(theta, Replies(answer.select([0]), torch.tensor([True]), torch.tensor([4])), s)
