"""pFedMe against closed forms on a quadratic, and Algorithm 1 in plain PyTorch (Dinh et al., NeurIPS 2020)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from federations import clients, close, federation, group, mean_loss, setup
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.pfedme import PFEDME, PFedMeSettings
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
H = torch.tensor([2.0, 0.5], dtype=torch.float64)
MODEL = Quadratic(2, (2.0, 0.5))
START = torch.tensor([3.0, -1.0], dtype=torch.float64)


def made(**changes: Any) -> PFedMeSettings:
    base = {"steps": 3, "batch_size": 3, "lr": 0.02, "proximity": 4.0, "inner_steps": 2, "inner_lr": 0.05}
    return PFedMeSettings.model_validate(base | {"personalize_epochs": 2} | changes)


def at(c: Tensor, n: int = 4, id: str = "c0") -> ClientData:
    """Return a client with f(θ) = Σ h (θ - c)²/2 on every batch: its examples are all c."""
    split = Split(c.double().repeat(n, 1), None)
    return ClientData(id, split, split, split, 0)


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proximity", [0.5, 4.0, 9.0])
def test_with_many_inner_steps_theta_is_the_proximal_point_and_w_approaches_it(proximity: float) -> None:
    """Expect θ = (h c + λ w_i)/(h + λ), and w_i ← w_i - ηλ(w_i - θ), R times."""
    s = made(steps=4, inner_steps=500, inner_lr=0.1, proximity=proximity)
    c = torch.tensor([-1.0, 5.0], dtype=torch.float64)
    w = START
    for _ in range(4):
        theta = (H * c + proximity * w) / (H + proximity)
        w = w - s.lr * proximity * (w - theta)
    trained = PFEDME.train(MODEL, group([at(c)]), START[None], s)
    close(trained.theta[0], w)
    assert trained.steps.tolist() == [[4.0 * 500]]


def test_the_personal_model_is_the_proximal_point_of_the_shared_one() -> None:
    s, c = made(inner_lr=0.1, personalize_epochs=2000, batch_size=4), torch.tensor([-1.0, 5.0]).double()
    found = PFEDME.personalize(MODEL, group([at(c)]), START[None], s)
    close(found["personal"][0], (H * c + 4 * START) / (H + 4))
    assert torch.equal(found["global"][0], START)


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def visit(s: PFedMeSettings, problem: Setup, w: Tensor, c: ClientData, round: int) -> tuple[Tensor, list[float]]:
    """Run lines 4-8, with the proximal term differentiated with the loss; θ continues from batch to batch."""
    theta, losses = w.clone(), []
    for index in batches(len(c.train), s.batch_size, s.steps, generator(SEED, "train/train", c.id, round)):
        for _ in range(s.inner_steps):
            p = theta.clone().requires_grad_()
            loss = mean_loss(problem.model.logits(p, c.train.x[index]), c.train.y[index])
            (d,) = torch.autograd.grad(loss + s.proximity / 2 * (p - w).square().sum(), [p])
            theta = theta - s.inner_lr * d
            losses.append(loss.item())
        w = w - s.lr * s.proximity * (w - theta)
    return w, losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.3])
@pytest.mark.usefixtures("each_task")
def test_rounds_follow_algorithm_1(tmp_path: Path, beta: float, weighting: str) -> None:
    """Expect w ← (1 - β) w + β mean w_i, β being server_lr; every w_i starts at w in each round."""
    s, problem, data = made(server_lr=beta, weighting=weighting), setup(), clients(SIZES)
    run = federation(tmp_path, PFEDME, s, problem, data, rounds=2)
    w = run.state["theta"]
    weights = torch.tensor([float(n) if weighting == "examples" else 1.0 for n in SIZES]).double()
    losses: list[float] = []
    for t in (1, 2):
        visits = [visit(s, problem, w, c, t) for c in data]
        mean = (weights[:, None] * torch.stack([end for end, _ in visits])).sum(0) / weights.sum()
        w = (1 - beta) * w + beta * mean
        losses.append(sum(sum(seen) / len(seen) for _, seen in visits) / 3)
    run.run()
    close(run.state["theta"], w)
    attempts = run.loop.journal.counted()
    assert [a.statistics["client_steps"] for a in attempts] == [3 * s.steps * s.inner_steps] * 2
    assert [a.statistics["loss"] for a in attempts] == pytest.approx(losses, abs=1e-12)


@pytest.mark.usefixtures("each_task")
def test_the_personal_model_is_theta_and_not_w_i(tmp_path: Path) -> None:
    s, problem, data = made(), setup(), clients(SIZES)
    run = federation(tmp_path, PFEDME, s, problem, data, unseen=["c2"])
    run.run()
    w = run.state["theta"]
    half = PFEDME.client(s, problem)
    for c in data:
        named = run.predictors[1, c.id]
        assert list(named) == ["personal", "global"]
        assert torch.equal(named["global"].tensors()["theta"], w)
        theta, n = w, len(c.train)
        count = s.personalize_epochs * (n // min(n, s.batch_size))
        for index in batches(n, s.batch_size, count, generator(SEED, "evaluate/personalize", c.id, 1)):
            p = theta.clone().requires_grad_()
            loss = mean_loss(problem.model.logits(p, c.train.x[index]), c.train.y[index])
            (d,) = torch.autograd.grad(loss + s.proximity / 2 * (p - w).square().sum(), [p])
            theta = theta - s.inner_lr * d
        found = named["personal"].tensors()["theta"]
        close(found, theta)
        w_i = w - s.lr * s.proximity * (w - theta)
        assert (found - w_i).abs().max() > 1e-4
        assert (half.personalization_steps("personal", n), half.personalization_steps("global", n)) == (count, 0)


def test_only_a_diverging_client_is_lost() -> None:
    # Examples so far away that the losses overflow, and a curvature at which steps of 0.05 explode.
    wild = at(torch.tensor([1e200, 0.0]))
    members = group([at(torch.tensor([1.0, 1.0]), id="c1"), wild])
    trained = PFEDME.train(MODEL, members, START.expand(2, -1), made())
    assert list(members.lost) == [1]
    assert "local step 1 of 6" in members.lost[1]
    assert tells(members.lost[1], "algorithm.inner_lr", "0.05")
    alone = PFEDME.train(MODEL, group([at(torch.tensor([1.0, 1.0]), id="c1")]), START[None], made())
    close(trained.theta[:1], alone.theta)
