"""ComFedL against autograd, finite differences, optimization over the simplex, and FedAvg (papers/002)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds.compositional import regularized_loss
from federations import CLASSES, IMAGE, client, clients, close, federation, group, mean_loss, setup
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.optimize import minimize
from torch import Tensor

from fedloom.algorithms import batches as mini_batches
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.comfedl import (
    COMFEDL,
    ComFedLSettings,
    composed_loss,
    compositional_sgd,
    loss_at_shared_model,
    optimal_weights,
)
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings, PersonalizeRequest
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData
from fedloom.errors import QuorumError
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP, LeNet

SIZES = (4, 9, 6)
SEED = 7  # of the federations
SMALL = MLP(IMAGE, [5], CLASSES)
ZERO = torch.zeros(1, dtype=torch.float64)


def made(**changes: Any) -> ComFedLSettings:
    """Three plain steps on batches of 3."""
    local = {"steps": 3, "batch_size": 3, "lr": 0.05} | changes.pop("local", {})
    return ComFedLSettings.model_validate({"gamma": 0.7, "local": local, **changes})


def starts(model: FlatModel, g: int) -> Tensor:
    return torch.stack([model.init(torch.Generator().manual_seed(i), torch.float64) for i in range(g)])


def loss(model: FlatModel, theta: Tensor, c: ClientData, index: Tensor | slice = slice(None)) -> Tensor:
    return mean_loss(model.logits(theta, c.train.x[index]), c.train.y[index])


def after_inner_step(
    model: FlatModel, theta: Tensor, c: ClientData, index: Tensor | slice, s: ComFedLSettings
) -> Tensor:
    """Return w - η∇f(w) as a differentiable function of a leaf w, by autograd alone."""
    (slope,) = torch.autograd.grad(loss(model, theta, c, index), [theta], create_graph=not s.first_order)
    return theta - s.inner_lr * slope


def composed(
    model: FlatModel, theta: Tensor, c: ClientData, first: Tensor | slice, second: Tensor | slice, s: ComFedLSettings
) -> Tensor:
    """Return the loss whose exponential is used: f_B(w), or f_B̃(w - η∇f_B(w))."""
    if s.objective == "robust":
        return loss(model, theta, c, first)
    return loss(model, after_inner_step(model, theta, c, first, s), c, second)


# --- Lemma 1 ----------------------------------------------------------------------------------------------------------


@given(f=st.lists(st.floats(0, 5), min_size=2, max_size=6), gamma=st.sampled_from([0.1, 0.2, 1.0, 5.0]))
@hypothesis_settings(max_examples=10)
def test_lemma_1_weights_maximize_over_the_simplex(f: list[float], gamma: float) -> None:
    """Optimize numerically without the closed form: r = softmax(z) over all z."""
    losses = torch.tensor(f, dtype=torch.float64)

    def descend(z: Any) -> tuple[float, Any]:
        free = torch.tensor(z, dtype=torch.float64, requires_grad=True)
        value = -regularized_loss(losses, free.softmax(0), gamma)
        (slope,) = torch.autograd.grad(value, [free])
        return value.item(), slope.numpy()

    found = minimize(descend, [0.0] * len(f), jac=True, method="BFGS", options={"gtol": 1e-9})
    r = optimal_weights(losses, gamma)
    assert float(r.sum()) == pytest.approx(1, abs=1e-12)
    assert -found.fun == pytest.approx(float(composed_loss(losses, gamma)), abs=1e-6)
    close(r, torch.tensor(found.x, dtype=torch.float64).softmax(0), atol=1e-3)
    assert float(regularized_loss(losses, r, gamma)) == pytest.approx(float(composed_loss(losses, gamma)), abs=1e-12)


def test_the_composed_loss_lies_between_mean_and_maximum_without_overflow() -> None:
    losses = torch.tensor([1.0, 900.0, 3.0], dtype=torch.float64)
    assert float(composed_loss(losses, 1e-2)) == pytest.approx(900 - 1e-2 * math.log(3))
    assert float(composed_loss(losses, 1e9)) == pytest.approx(float(losses.mean()), abs=1e-3)
    assert optimal_weights(losses, 1e-2).tolist() == [0.0, 1.0, 0.0]


# --- the step along u -------------------------------------------------------------------------------------------------

OBJECTIVES: dict[str, dict[str, Any]] = {
    "robust": {"objective": "robust"},
    "damaml": {"objective": "damaml", "inner_lr": 0.3},
    "first order": {"objective": "damaml", "inner_lr": 0.3, "first_order": True},
}


def shift_of(scale: str) -> Tensor:
    return ZERO if scale == "literal" else ZERO + 0.9


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", [SMALL, LeNet(IMAGE, CLASSES)], ids=["mlp", "lenet"])
@pytest.mark.parametrize("scale", ["literal", "largest", "normalized"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.usefixtures("each_task")
def test_local_steps_follow_the_gradient_of_the_whole_composition(objective: str, scale: str, model: FlatModel) -> None:
    """Differentiate exp(ℓ(f(w))/γ) as one expression; both batches come from separate generators."""
    s, c = made(scale=scale, **OBJECTIVES[objective], gamma=1.5), client("c0", 11)
    shift = shift_of(scale)
    theta = starts(model, 1)
    members = group([c])
    first = list(batches(11, 3, 3, members.generator(0, "train")))
    second = list(batches(11, 3, 3, members.generator(0, "outer")))
    w, losses = theta[0].clone(), []
    for B, C in zip(first, second, strict=True):
        p = w.clone().requires_grad_()
        f = composed(model, p, c, B, C, s)
        g = torch.exp((f - shift[0]) / s.gamma) * (s.gamma if scale == "normalized" else 1)
        (u,) = torch.autograd.grad(g, [p])
        w = w - s.local.lr * u
        losses.append(f.item())
    made_by_it = compositional_sgd(model, theta, group([c]), s, shift)
    close(theta[0] + made_by_it.delta_theta[0], w)
    assert made_by_it.loss.item() == pytest.approx(sum(losses) / 3, abs=1e-12)
    assert made_by_it.first.item() == pytest.approx(losses[0], abs=1e-12)
    assert (made_by_it.steps.item(), made_by_it.left.item()) == (3, 0)
    assert (w - theta[0]).abs().max() > 1e-3


@pytest.mark.parametrize("objective", ["robust", "damaml"])
def test_one_step_matches_finite_differences(objective: str) -> None:
    """Compare by coordinate, with no derivative in the test except that of the inner step."""
    s = made(scale="literal", **OBJECTIVES[objective], gamma=1.5, local={"steps": 1, "lr": 1.0})
    model, c = MLP(IMAGE, [], CLASSES), client("c0", 7)
    theta = starts(model, 1)
    members = group([c])
    B = next(batches(7, 3, 1, members.generator(0, "train")))
    C = next(batches(7, 3, 1, members.generator(0, "outer")))

    def value(w: Tensor) -> float:
        return math.exp(composed(model, w.clone().requires_grad_(), c, B, C, s).item() / s.gamma)

    u = -compositional_sgd(model, theta, group([c]), s, ZERO).delta_theta[0]
    for k in (*range(0, len(theta[0]), 97), -1):
        e = torch.zeros_like(theta[0])
        e[k] = 1e-5
        assert float(u[k]) == pytest.approx((value(theta[0] + e) - value(theta[0] - e)) / 2e-5, rel=1e-6, abs=1e-8)


def test_the_two_batches_are_drawn_independently() -> None:
    """The draws of one do not depend on whether, or in what size, the other is drawn."""
    drawn: list[tuple[str, str]] = []
    c = client("c0", 30)

    class Noted(type(group([c]))):  # type: ignore[misc]
        def generator(self, i: int, purpose: str, *, orders: bool = False) -> torch.Generator:
            drawn.append((self.clients[i].id, purpose))
            return super().generator(i, purpose, orders=orders)

    members = Noted([c], group([c])._generator)
    s = made(**OBJECTIVES["damaml"], local={"steps": 4, "outer_batch_size": 7})
    compositional_sgd(SMALL, starts(SMALL, 1), members, s, ZERO)
    assert sorted(drawn) == [("c0", "outer"), ("c0", "train")]
    first, second = (torch.cat(list(batches(30, 3, 4, group([c]).generator(0, p)))) for p in ("train", "outer"))
    assert not torch.equal(first, second)
    drawn.clear()
    compositional_sgd(SMALL, starts(SMALL, 1), members, made(), ZERO)
    assert drawn == [("c0", "train")]


@pytest.mark.parametrize("local", [{"lambda_theta": 0.1}, {"momentum": 0.5}, {"clip": 0.02}, {"mask_absent": True}])
def test_options_beyond_the_paper_act_on_u(local: dict[str, Any]) -> None:
    """At γ = 10⁹ and normalized, u is ∇f, so they must act as in local SGD."""
    c, theta = client("c0", 11), starts(SMALL, 1)
    if "mask_absent" in local:
        c.train.y[:] = torch.arange(11) % 2  # label 2 is absent
    s = made(gamma=1e9, local=local)
    plain = LocalSGD.model_validate({"steps": 3, "batch_size": 3, "lr": 0.05, "momentum": 0.0} | local)
    expected = train(SMALL, group([c]), theta, plain).theta
    close(theta + compositional_sgd(SMALL, theta, group([c]), s, ZERO).delta_theta, expected, atol=1e-9)
    without = train(SMALL, group([c]), theta, LocalSGD(steps=3, batch_size=3, lr=0.05, momentum=0.0)).theta
    assert (expected - without).abs().max() > 1e-6


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.usefixtures("each_task")
def test_a_full_batch_step_of_all_clients_is_a_gradient_step_on_the_composed_loss(
    tmp_path: Path, objective: str
) -> None:
    """Normalized, τ = 1: the mean of the clients' steps is exactly -η times the gradient of eq. 5."""
    s = made(**OBJECTIVES[objective], local={"steps": 1, "batch_size": 100})
    problem, data = setup(), clients(SIZES)
    run = federation(tmp_path, COMFEDL, s, problem, data)
    theta = run.state["theta"].requires_grad_()
    f = torch.stack([composed(problem.model, theta, c, slice(None), slice(None), s) for c in data])
    objective_5 = s.gamma * torch.log(torch.exp(f / s.gamma).mean())
    (slope,) = torch.autograd.grad(objective_5, [theta])
    run.run()
    close(run.state["theta"], (theta - s.local.lr * slope).detach())
    # Lemma 1, reported: the same gradient is that of Σ r_i f_i with r held fixed.
    (attempt,) = run.loop.journal.counted()
    r = optimal_weights(f.detach(), s.gamma)
    assert attempt.statistics["objective"] == pytest.approx(objective_5.item(), abs=1e-12)
    assert [attempt.statistics[f"r.{c.id}"] for c in data] == pytest.approx(r.tolist(), abs=1e-12)
    assert attempt.statistics["r_largest"] == pytest.approx(float(r.max()), abs=1e-12)
    assert attempt.statistics["r_smallest"] == pytest.approx(float(r.min()), abs=1e-12)
    assert attempt.statistics["effective_clients"] == pytest.approx(float(1 / (r * r).sum()), abs=1e-9)


def test_a_large_gamma_gives_uniform_fedavg(tmp_path: Path) -> None:
    """γ → ∞: r_i = 1/n (papers/002, below eq. 4), and both methods draw the same batches."""
    problem, data = setup(), clients(SIZES)
    local = {"steps": 3, "batch_size": 3, "lr": 0.05, "momentum": 0.0}
    one = federation(tmp_path / "a", COMFEDL, made(gamma=1e10), problem, data, rounds=2)
    other = federation(
        tmp_path / "b",
        FEDAVG,
        FedAvgSettings.model_validate({"local": local, "weighting": "uniform"}),
        problem,
        data,
        rounds=2,
    )
    one.run()
    other.run()
    close(one.state["theta"], other.state["theta"], atol=1e-9)
    assert one.loop.journal.counted()[1].statistics["effective_clients"] == pytest.approx(3)


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("factor_at", ["step", "round"])
def test_the_mean_is_uniform_over_the_answering_clients(tmp_path: Path, lost: int, factor_at: str) -> None:
    """Sizes do not count, and a client that was lost before it sent its loss does not count in (5)."""
    s, problem, data = made(factor_at=factor_at), setup(), clients(SIZES)
    run = federation(tmp_path, COMFEDL, s, problem, data, lost={0: lost})
    theta = run.state["theta"]
    here = [c for i, c in enumerate(data) if i != lost]
    shift = composed_loss(torch.stack([loss(problem.model, theta, c) for c in here]), s.gamma)[None]
    moved = []
    for c in here:
        members = group([c])
        members._generator = lambda id, purpose: generator(SEED, f"train/{purpose}", id, 1)
        held = loss(problem.model, theta, c).reshape(1, 1) if factor_at == "round" else None
        moved.append(compositional_sgd(problem.model, theta[None], members, s, shift, held).delta_theta[0])
    run.run()
    close(run.state["theta"], theta + torch.stack(moved).mean(0))
    (attempt,) = run.loop.journal.counted()
    assert {name for name in attempt.statistics if name.startswith("r.")} == {f"r.{c.id}" for c in here}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_start_loss_may_be_that_of_all_train_data_in_chunks(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, data = made(**OBJECTIVES[objective]), clients((11, 3, 6))
    theta = starts(SMALL, 1).expand(3, -1)
    expected = torch.stack(
        [composed(SMALL, theta[0].clone().requires_grad_(), c, slice(None), slice(None), s).detach() for c in data]
    )
    for piece in (512, 4):
        monkeypatch.setattr(mini_batches, "PIECE", piece)
        close(loss_at_shared_model(SMALL, theta, group(data), s), expected[:, None])
        for i, c in enumerate(data):
            close(loss_at_shared_model(SMALL, theta[:1], group([c]), s), expected[i : i + 1, None])


@pytest.mark.parametrize("objective", ["robust", "damaml"])
def test_the_start_loss_may_be_that_of_one_batch(objective: str) -> None:
    s, c, theta = made(**OBJECTIVES[objective], losses_on="batch"), client("c0", 11), starts(SMALL, 1)
    members = group([c])
    B, C = (next(batches(11, 3, 1, members.generator(0, p))) for p in ("loss", "loss-outer"))
    expected = composed(SMALL, theta[0].clone().requires_grad_(), c, B, C, s)
    close(loss_at_shared_model(SMALL, theta, group([c]), s)[0, 0], expected.detach())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_fixed_factor_is_a_constant_step_size_per_client(objective: str) -> None:
    """n r_i times the gradient of the loss inside the exponential, at every step."""
    s, c, theta = made(**OBJECTIVES[objective]), client("c0", 11), starts(SMALL, 1)
    f = torch.tensor([[2.0], [0.3], [1.1]], dtype=torch.float64)
    members = group([c])
    w = theta[0]
    for B, C in zip(*(batches(11, 3, 3, members.generator(0, p)) for p in ("train", "outer")), strict=True):
        p = w.clone().requires_grad_()
        (slope,) = torch.autograd.grad(composed(SMALL, p, c, B, C, s), [p])
        w = w - s.local.lr * 3 * optimal_weights(f.flatten(), s.gamma)[0] * slope
    shift = composed_loss(f.flatten(), s.gamma)[None]
    close(theta[0] + compositional_sgd(SMALL, theta, members, s, shift, f[:1]).delta_theta[0], w)


# --- the two drivers --------------------------------------------------------------------------------------------------


def test_a_diverged_client_does_not_affect_its_batch() -> None:
    s, data = made(scale="literal", gamma=1e-3), clients((5, 5))
    theta = starts(SMALL, 2)
    theta[1] = 0  # loss log 3, exp(1098.6) is beyond float64
    easy = SMALL.layout.split(theta[0])
    for part in easy.values():
        part.zero_()
    easy["fc2.bias"][0] = 50
    data[0].train.y[:] = 0  # loss 0
    together = compositional_sgd(SMALL, theta, group(data), s, ZERO)
    assert together.left.flatten().tolist() == [0, 1]
    assert together.left_loss.flatten().tolist() == pytest.approx([0, math.log(3)])
    alone = compositional_sgd(SMALL, theta[:1], group(data[:1]), s, ZERO)
    close(together.delta_theta[:1], alone.delta_theta)
    assert torch.equal(together.delta_theta[1], torch.zeros_like(theta[1]))
    assert all(tensor.isfinite().all() for tensor in together.tensors().values())


def test_a_finished_client_is_not_reported_as_diverged() -> None:
    """A finished client is evaluated until the last of its batch is finished; its factor may overflow."""
    s = made(scale="literal", gamma=1.0, local={"steps": None, "epochs": 1, "batch_size": 3, "lr": 1000.0})
    data = clients((3, 6))
    theta = starts(SMALL, 2)
    alone = compositional_sgd(SMALL, theta[:1], group(data[:1]), s, ZERO)
    together = compositional_sgd(SMALL, theta, group(data), s, ZERO)
    assert alone.left.item() == together.left[0].item() == 0
    close(together.delta_theta[:1], alone.delta_theta)


# --- leaving the finite range -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        (
            {"scale": "literal", "gamma": 1e-3},
            r"^.*c0 .* local step 1\b.* 1\.\d+\b.*\b0\.001\b.*literal.*scale: .*local\.lr .*\b0\.05\b.*gamma",
        ),
        (
            {"scale": "literal", "gamma": 1.0, "local": {"lr": 1e4}},
            r"c\d .* local step [23]\b.* [\d.e+]+, .* 1 .*literal",
        ),
        ({"scale": "largest", "factor_at": "step", "local": {"lr": 1e6}}, r"local step \d.*largest.*local\.lr"),
        (
            {"scale": "literal", "gamma": 2e-3, "local": {"lr": 1e100, "steps": 1}},
            r"local step 1\b.* 1\.\d+\b.*\b1e\+100\b",
        ),
    ],
)
def test_clients_with_non_finite_values_are_named_with_the_step(
    tmp_path: Path, changes: dict[str, Any], output: str
) -> None:
    data = clients(SIZES)
    run = federation(tmp_path, COMFEDL, made(**changes), setup(), data)
    theta = run.state["theta"]
    with pytest.raises(QuorumError, match=output):
        run.run()
    assert torch.equal(run.state["theta"], theta)
    assert not run.loop.journal.counted()


@pytest.mark.parametrize("scale", ["largest", "normalized"])
def test_a_client_with_a_non_finite_loss_is_reported(tmp_path: Path, scale: str) -> None:
    data = clients(SIZES)
    data[1].train.x[0] = torch.inf
    run = federation(tmp_path, COMFEDL, made(scale=scale), setup(MLP(IMAGE, [], CLASSES)), data)
    with pytest.raises(QuorumError, match=r"c1 .*local\.lr"):
        run.run()


# --- personalization --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "tuning"),
    [
        ({"objective": "robust"}, None),
        ({"objective": "robust", "adapt_steps": 4}, {"steps": 4, "lr": 0.05}),
        ({"objective": "damaml", "inner_lr": 0.3}, {"steps": 1, "lr": 0.3}),
        ({"objective": "damaml", "inner_lr": 0.3, "adapt_steps": 3}, {"steps": 3, "lr": 0.3}),
        ({"objective": "damaml", "adapt_steps": 0}, None),
    ],
)
@pytest.mark.usefixtures("each_task")
def test_the_personal_model_is_the_shared_one_trained_on_train_data(
    tmp_path: Path, changes: dict[str, Any], tuning: dict[str, Any] | None
) -> None:
    s, problem, data = made(**changes), setup(), clients(SIZES)
    run = federation(tmp_path, COMFEDL, s, problem, data, unseen=["c2"])
    run.run()
    theta = run.state["theta"]
    half = COMFEDL.client(s, problem)
    assert half.personalization_steps("global", 9) == 0
    assert half.personalization_steps("personal", 9) == (tuning or {"steps": 0})["steps"]
    for c in data:
        named = run.predictors[1, c.id]
        assert torch.equal(named["global"].tensors()["theta"], theta)
        expected = theta
        if tuning is not None:
            members = group([c])
            members._generator = lambda id, purpose: generator(SEED, f"evaluate/{purpose}", id, 1)
            plain = LocalSGD.model_validate({"batch_size": 3, "momentum": 0.0, **tuning})
            expected = train(problem.model, members, theta[None], plain, purpose="adapt").theta[0]
            assert not torch.equal(expected, theta)
        assert torch.equal(named["personal"].tensors()["theta"], expected)


def test_damaml_adapts_by_its_own_inner_step() -> None:
    """On one full batch, `personal` is the y = w - η∇f(w) of eq. 10."""
    s, c = made(**OBJECTIVES["damaml"], local={"batch_size": 100}), client("c0", 7)
    theta = starts(SMALL, 1)
    with pytest.raises(StopIteration) as end:
        next(COMFEDL.client(s, setup()).open(group([c]), PersonalizeRequest(theta[0])))
    w = theta[0].clone().requires_grad_()
    close(end.value.value[0]["personal"].tensors()["theta"], after_inner_step(SMALL, w, c, slice(None), s).detach())


# --- settings, traffic, start-up --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"first_order": True}, "first_order: "),
        ({"local": {"outer_batch_size": 4}}, r"local\.outer_batch_size: .*\b4\b"),
        ({"local": {"epochs": 1}}, "steps=3, epochs=1"),
        ({"scale": "literal", "factor_at": "round"}, "factor_at: "),
        ({"gamma": 0.0}, "gamma"),
        ({"scale": "clipped"}, "scale"),
    ],
)
def test_invalid_settings_are_rejected(changes: dict[str, Any], output: str) -> None:
    with pytest.raises(ValidationError, match=output):
        made(**changes)


def test_defaults_are_the_papers_if_stated() -> None:
    s = ComFedLSettings()
    assert (s.gamma, s.local.steps, s.local.lr) == (0.2, 5, 0.01)  # §5.1
    assert (s.local.momentum, s.local.lambda_theta, s.local.clip) == (0, 0, None)
    assert s.inner_lr == 0.05  # §5.2
    assert [ComFedLSettings(scale=scale).holds for scale in ("literal", "largest", "normalized")] == [False, True, True]


@pytest.mark.slow
def test_one_client_trains_without_sympy() -> None:
    """Importing it takes torch seconds (docs/design.md, §9)."""
    program = """
import json, sys, torch
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.comfedl import ComFedLSettings, compositional_sgd, loss_at_shared_model
from fedloom.data.federated import ClientData, Split
from fedloom.models.networks import LeNet
split = Split(torch.randn(4, 1, 16, 16), torch.tensor([0, 1, 2, 0]))
client = ClientData("c", split, split, split, 3)
clients = ClientGroup([client], lambda client, purpose: torch.Generator().manual_seed(0))
model = LeNet((1, 16, 16), 3)
theta = model.init(torch.Generator().manual_seed(0))[None]
for objective in ("robust", "damaml"):
    settings = ComFedLSettings(objective=objective)
    there = loss_at_shared_model(model, theta, clients, settings)
    compositional_sgd(model, theta, clients, settings, there[0])
print(json.dumps([name for name in ("sympy", "torch._dynamo") if name in sys.modules]))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
