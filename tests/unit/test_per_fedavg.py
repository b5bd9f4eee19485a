"""Per-FedAvg against closed forms on a quadratic, autograd of its objective, FedAvg (Fallah et al., NeurIPS 2020)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import clients, close, federation, group, held_out_elsewhere, mean_loss, setup
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.afl import project_onto_simplex
from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.per_fedavg import PER_FEDAVG, PerFedAvgSettings
from fedloom.algorithms.tr_maml import TR_MAML, TRMAMLSettings
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.9}
HESSIANS = ("none", "finite_difference", "exact")
MODEL = setup().model


def made(**changes: Any) -> PerFedAvgSettings:
    local = LOCAL | changes.pop("local", {})
    return PerFedAvgSettings.model_validate({"local": local, "inner_lr": 0.1, **changes})


def start() -> Tensor:
    return MODEL.init(torch.Generator().manual_seed(3), torch.float64)


@pytest.mark.parametrize("hessian", HESSIANS)
def test_steps_on_a_quadratic_have_a_closed_form(hessian: str) -> None:
    """Expect x ← x - βh(1 - αh)(x - c), with (1 - αh)² where the Hessian is included (a finite difference is exact)."""
    h, c = torch.tensor([2.0, 0.5]).double(), torch.tensor([-1.0, 5.0]).double()
    split = Split(c.repeat(4, 1), None)
    s = made(hessian=hessian, inner_lr=0.3, local={"epochs": None, "steps": 3, "lr": 0.2, "momentum": 0.0})
    theta = torch.tensor([3.0, -1.0]).double()
    found = PER_FEDAVG.train(
        Quadratic(2, (2.0, 0.5)), group([ClientData("c0", split, split, split, 0)]), theta[None], s
    )
    slope = 1 - 0.2 * h * (1 - 0.3 * h) ** (1 if hessian == "none" else 2)
    close(found.theta[0], c + slope**3 * (theta - c), atol=1e-11)
    assert found.steps.item() == 3


@pytest.mark.parametrize("hessian", HESSIANS)
def test_without_an_inner_step_it_equals_fedavg_to_the_bit(tmp_path: Path, hessian: str) -> None:
    data, local = clients(SIZES), LOCAL | {"lambda_theta": 0.01, "clip": 0.5}
    mine, average = (
        federation(tmp_path / method.name, method, s, setup(), data, rounds=2, unseen=["c2"])
        for method, s in (
            (PER_FEDAVG, made(hessian=hessian, inner_lr=0.0, local=local)),
            (FEDAVG, FedAvgSettings.model_validate({"local": local})),
        )
    )
    mine.run()
    average.run()
    assert torch.equal(mine.state["theta"], average.state["theta"])
    for key, named in average.predictors.items():
        for name, predictor in named.items():
            assert torch.equal(mine.predictors[key][name].tensors()["theta"], predictor.tensors()["theta"])
    found, expected = ([a.statistics for a in run.loop.journal.counted()] for run in (mine, average))
    assert found == expected


@pytest.mark.parametrize("sizes", [(6,), (6, 4)], ids=["alone", "group"])
@pytest.mark.usefixtures("each_task")
def test_the_gradient_is_that_of_the_objective(sizes: tuple[int, ...]) -> None:
    """Make one step on whole train splits, where the three batches are equal."""
    data, theta = clients(sizes), start()
    expected: dict[str, list[Tensor]] = {hessian: [] for hessian in HESSIANS}
    for c in data:
        p = theta.clone().requires_grad_()

        def f(q: Tensor, c: ClientData = c) -> Tensor:
            return mean_loss(MODEL.logits(q, c.train.x), c.train.y)

        (slope,) = torch.autograd.grad(f(p), [p], create_graph=True)
        (exact,) = torch.autograd.grad(f(p - 0.1 * slope), [p])
        q = (p - 0.1 * slope).detach().requires_grad_()
        (first,) = torch.autograd.grad(f(q), [q])
        expected["none"].append(first)
        expected["exact"].append(exact)
    assert (torch.stack(expected["none"]) - torch.stack(expected["exact"])).abs().max() > 1e-3
    expected["finite_difference"] = expected["exact"]
    for hessian in HESSIANS:
        local = {"epochs": None, "steps": 1, "batch_size": 10, "lr": 1.0, "momentum": 0.0}
        found = PER_FEDAVG.train(MODEL, group(data), theta.expand(len(data), -1), made(hessian=hessian, local=local))
        atol = 1e-5 if hessian == "finite_difference" else 1e-12
        close(theta - found.theta, torch.stack(expected[hessian]), atol=atol)


@pytest.mark.usefixtures("each_task")
def test_the_three_batches_of_a_step_are_drawn_independently() -> None:
    """Make one step of the exact form, each part on the batch of a separate generator."""
    (c,), theta = clients((9,)), start()
    x, y, p = c.train.x, c.train.y, theta.clone().requires_grad_()
    outer, inner, third = (
        next(batches(9, 3, 1, generator(0, purpose, "c0", 1))) for purpose in ("train", "inner", "hessian")
    )
    (slope,) = torch.autograd.grad(mean_loss(MODEL.logits(p, x[inner]), y[inner]), [p])
    ahead = (p - 0.1 * slope).detach().requires_grad_()
    (q,) = torch.autograd.grad(mean_loss(MODEL.logits(ahead, x[outer]), y[outer]), [ahead])
    (there,) = torch.autograd.grad(mean_loss(MODEL.logits(p, x[third]), y[third]), [p], create_graph=True)
    (product,) = torch.autograd.grad((there * q).sum(), [p])
    s = made(hessian="exact", local={"epochs": None, "steps": 1})
    close(PER_FEDAVG.train(MODEL, group([c]), theta[None], s).theta[0], theta - 0.05 * (q - 0.1 * product))


@pytest.mark.usefixtures("each_task")
def test_personalization_steps_on_train_data_with_the_inner_rate(tmp_path: Path) -> None:
    s, data = made(personalize_steps=2), clients(SIZES)
    run, other = (
        federation(tmp_path / name, PER_FEDAVG, s, setup(), those, rounds=2, unseen=["c2"])
        for name, those in (("run", data), ("other", held_out_elsewhere(data)))
    )
    run.run()
    other.run()
    w = run.state["theta"]
    assert torch.equal(w, other.state["theta"])
    for c in data:
        named, theta = run.predictors[2, c.id], w
        for index in batches(len(c.train), 3, 2, generator(SEED, "evaluate/fine-tune", c.id, 2)):
            p = theta.clone().requires_grad_()
            (d,) = torch.autograd.grad(mean_loss(MODEL.logits(p, c.train.x[index]), c.train.y[index]), [p])
            theta = theta - 0.1 * d
        close(named["personal"].tensors()["theta"], theta)
        assert torch.equal(named["global"].tensors()["theta"], w)
        assert torch.equal(
            named["personal"].tensors()["theta"], other.predictors[2, c.id]["personal"].tensors()["theta"]
        )
    steps = [
        PER_FEDAVG.client(made(**k), setup()).personalization_steps("personal", 6) for k in ({}, {"inner_lr": 0.0})
    ]
    assert steps == [1, 0]


@pytest.mark.parametrize("hessian", ["none", "exact"])
def test_a_delta_without_finite_differences_is_rejected(hessian: str) -> None:
    with pytest.raises(ValidationError, match=rf"delta: .*0\.01 with hessian {hessian}"):
        made(hessian=hessian, delta=0.01)
    with pytest.raises(ValidationError, match="delta"):
        made(hessian="finite_difference", delta=0.0)


# --- TR-MAML ----------------------------------------------------------------------------------------------------------


ROBUST: dict[str, Any] = {"steps": 3, "batch_size": 3, "lr": 0.05, "momentum": 0.9}


def problem() -> Setup:
    return dataclasses.replace(setup(), roster=("c0", "c1", "c2"))


@pytest.mark.parametrize("hessian", ["none", "exact"])
def test_constant_weights_give_uniform_per_fedavg_to_the_bit(tmp_path: Path, hessian: str) -> None:
    keys = {"local": ROBUST, "hessian": hessian, "inner_lr": 0.05}
    mine, other = (
        federation(tmp_path / m.name, m, s, problem(), clients(SIZES), rounds=2)
        for m, s in (
            (TR_MAML, TRMAMLSettings.model_validate(keys | {"weights_lr": 0})),
            (PER_FEDAVG, PerFedAvgSettings.model_validate(keys | {"weighting": "uniform"})),
        )
    )
    mine.run()
    other.run()
    assert torch.equal(mine.state["theta"], other.state["theta"])
    for key, named in other.predictors.items():
        for name, predictor in named.items():
            assert torch.equal(mine.predictors[key][name].tensors()["theta"], predictor.tensors()["theta"])


def at(c: float, id: str) -> ClientData:
    split = Split(torch.full((4, 1), c, dtype=torch.float64), None)
    return ClientData(id, split, split, split, 0)


def test_a_round_on_quadratics_matches_a_hand_computation(tmp_path: Path) -> None:
    """F_i = (1 - α)² (w - c)²/2: w descends by n p_i ∇F_i, p ascends on F_i, not on p_i F_i."""
    centres, alpha, lr, rate = (1.0, -3.0, 0.5), 0.2, 0.1, 0.3
    keys = {"inner_lr": alpha, "hessian": "exact", "weights_lr": rate}
    s = TRMAMLSettings.model_validate(keys | {"local": {"steps": 1, "lr": lr, "momentum": 0.0}})
    p = Setup(Quadratic(1), 3, (1,), 3, torch.float64, roster=("c0", "c1", "c2"))
    run = federation(tmp_path, TR_MAML, s, p, [at(c, f"c{i}") for i, c in enumerate(centres)], rounds=3)
    w, weights, c = (
        torch.zeros(1).double(),
        torch.full((3,), 1 / 3, dtype=torch.float64),
        torch.tensor(centres).double(),
    )
    for _ in range(3):
        slope, value = (1 - alpha) ** 2 * (w - c), ((1 - alpha) * (w - c)).square() / 2
        w, weights = w - lr * (weights * slope).sum(), project_onto_simplex(weights + rate * value)
    run.run()
    torch.testing.assert_close(run.state["theta"], w, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.state["weights"], weights, rtol=0, atol=1e-12)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
