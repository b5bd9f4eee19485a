"""DRFA and AFL against FedAvg, and their algorithms in plain PyTorch; the projection against bisection."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import clients, close, federation, mean_loss, setup
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.afl import AFL, AFLSettings, project_onto_simplex
from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.drfa import DRFA, DRFASettings
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.core.settings import Settings
from fedloom.data.federated import ClientData
from fedloom.federation.randomness import generator

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL: dict[str, Any] = {"steps": 3, "batch_size": 3, "lr": 0.05}


def problem(n: int = 3) -> Setup:
    return dataclasses.replace(setup(), roster=tuple(f"c{i}" for i in range(n)))


def drfa(**changes: Any) -> DRFASettings:
    return DRFASettings.model_validate({"local": LOCAL | {"momentum": 0.0}} | changes)


def afl(**changes: Any) -> AFLSettings:
    return AFLSettings.model_validate({"local": LOCAL | {"steps": 1, "momentum": 0.0}} | changes)


# --- the simplex ------------------------------------------------------------------------------------------------------


def by_bisection(v: Tensor) -> Tensor:
    """Return max(v - t, 0), with t found by bisection so that it sums to 1."""
    low, high = float(v.min()) - 1, float(v.max())
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if float((v - t).clamp(min=0).sum()) > 1 else (low, t)
    return (v - low).clamp(min=0)


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_the_projection_equals_one_without_sorting(n: int) -> None:
    random = torch.Generator().manual_seed(n)
    for scale in (1e-3, 1.0, 30.0):
        v = scale * torch.randn(n, generator=random, dtype=torch.float64)
        p = project_onto_simplex(v)
        close(p, by_bisection(v), atol=1e-12 * max(1, scale))
        assert float(p.sum()) == pytest.approx(1, abs=1e-12)
        close(project_onto_simplex(v + 7.5), p, atol=1e-13 * max(1, scale) * 10)  # only differences count
        close(project_onto_simplex(p), p)
    ties = torch.tensor([2.0, 2.0, -1.0]).double()
    close(project_onto_simplex(ties), torch.tensor([0.5, 0.5, 0.0]).double(), atol=0)


# --- the methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drfa", "afl"])
def test_constant_weights_give_uniform_fedavg_to_the_bit(tmp_path: Path, name: str) -> None:
    method = {"drfa": DRFA, "afl": AFL}[name]
    local = LOCAL | {"momentum": 0.9, "lambda_theta": 0.01}
    s: Settings = drfa(gamma=0, replace=False, local=local) if name == "drfa" else afl(weights_lr=0, local=local)
    average = FedAvgSettings.model_validate({"local": local, "weighting": "uniform"})
    mine, avg = (
        federation(tmp_path / m.name, m, settings, problem(), clients(SIZES), rounds=3)
        for m, settings in ((method, s), (FEDAVG, average))
    )
    mine.run()
    avg.run()
    assert torch.equal(mine.state["theta"], avg.state["theta"])
    assert torch.equal(mine.state["weights"], torch.full((3,), 1 / 3, dtype=torch.float64))


def loss_at(p: Setup, theta: Tensor, c: ClientData, index: Tensor) -> Tensor:
    return mean_loss(p.model.logits(theta, c.train.x[index]), c.train.y[index])


def visit(p: Setup, theta: Tensor, c: ClientData, round: int, steps: int) -> list[Tensor]:
    """Return w after 0, 1, ... steps."""
    path = [theta]
    for index in batches(len(c.train), 3, steps, generator(SEED, "train/train", c.id, round)):
        w = path[-1].clone().requires_grad_()
        (g,) = torch.autograd.grad(loss_at(p, w, c, index), [w])
        path.append(path[-1] - 0.05 * g)
    return path


@pytest.mark.usefixtures("each_task")
def test_rounds_of_drfa_follow_algorithm_1(tmp_path: Path) -> None:
    """Each draw has a row: seven draws of three clients repeat some of them."""
    s, p, data = drfa(gamma=0.05), problem(), clients(SIZES)
    run = federation(tmp_path, DRFA, s, p, data, rounds=3, cohort=2)
    w, weights = run.state["theta"], torch.full((3,), 1 / 3, dtype=torch.float64)
    run.run()
    for t, attempt in enumerate(run.loop.journal.counted(), start=1):
        drawn = generator(SEED, "cohort", round=t, attempt=1)
        rows = sorted(torch.multinomial(weights, 2, replacement=True, generator=drawn).tolist())
        trained, asked = attempt.conversations
        assert trained.clients == [f"c{i}" for i in rows]
        moment = int(torch.randint(1, 4, (1,), generator=generator(SEED, "server/moment", round=t, attempt=1)))
        paths = [visit(p, w, data[i], t, 3) for i in rows]
        noted = torch.stack([path[moment] for path in paths]).mean(0)
        v = torch.zeros(3, dtype=torch.float64)
        for id in asked.clients:
            c = data[int(id[1:])]
            index = next(batches(len(c.train), 3, 1, generator(SEED, "train/loss", c.id, t)))
            v[int(id[1:])] = 3 / 2 * loss_at(p, noted, c, index)
        assert len(set(asked.clients)) == 2
        w, weights = torch.stack([path[-1] for path in paths]).mean(0), by_bisection(weights + 3 * 0.05 * v)
    close(run.state["theta"], w)
    close(run.state["weights"], weights)


@pytest.mark.parametrize("cohort", [3, 2])
@pytest.mark.usefixtures("each_task")
def test_rounds_of_afl_descend_ascend_and_return_the_average(tmp_path: Path, cohort: int) -> None:
    s, p, data = afl(weights_lr=0.3), problem(), clients(SIZES)
    run = federation(tmp_path, AFL, s, p, data, rounds=3, cohort=cohort)
    w, weights = run.state["theta"], torch.full((3,), 1 / 3, dtype=torch.float64)
    seen = []
    run.run()
    for t, attempt in enumerate(run.loop.journal.counted(), start=1):
        step, v = torch.zeros_like(w), torch.zeros(3, dtype=torch.float64)
        for id in attempt.conversations[0].clients:
            i = int(id[1:])
            c = data[i]
            index = next(batches(len(c.train), 3, 1, generator(SEED, "train/train", c.id, t)))
            here = w.clone().requires_grad_()
            loss = loss_at(p, here, c, index)
            step += 3 / cohort * weights[i] * torch.autograd.grad(loss, [here])[0]
            v[i] = 3 / cohort * float(loss.detach())
        w, weights = w - 0.05 * step, by_bisection(weights + 0.3 * v)
        seen.append(w)
    close(run.state["theta"], w)
    close(run.state["weights"], weights)
    average = torch.stack(seen).mean(0)
    close(run.predictors[3, "c0"]["global"].tensors()["theta"], average)


def test_lost_clients_have_no_effect(tmp_path: Path) -> None:
    p, data = problem(), clients(SIZES)
    run = federation(tmp_path, AFL, afl(weights_lr=0.3), p, data, lost={0: 1})
    two = federation(tmp_path / "two", AFL, afl(weights_lr=0.3), p, [data[0], data[2]])
    run.run()
    two.run()
    close(run.state["theta"], two.state["theta"])


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ValidationError, match=r"local.epochs: .*local.steps"):
        drfa(local={"epochs": 2})
    with pytest.raises(ValidationError, match=r"replace: .*gamma 0.1"):
        drfa(replace=False, gamma=0.1)
    for settings, key in ((drfa, "gamma"), (afl, "weights_lr")):
        with pytest.raises(ValidationError, match=key):
            settings(**{key: -0.1})
    for method, made in ((DRFA, drfa()), (AFL, afl())):
        closed = method.requires_fixed_population(made)
        assert closed[0] == "name"
