"""Local SGD against torch.optim.SGD step by step, its batches, and its two drivers compared with each other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from facts import mentions, tells
from federations import CLASSES, IMAGE, client, clients, group, mean_loss
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms import batches as mini_batches
from fedloom.algorithms.apfl import APFL, APFLSettings
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import Change, Correction, LocalTrainer, Trained, train
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.comfedl import ComFedLSettings, compositional_sgd
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.per_fedavg import PER_FEDAVG, PerFedAvgSettings
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP, LeNet
from fedloom.models.predictors import predictors_of

SMALL = MLP(IMAGE, [5], CLASSES)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def starts(model: FlatModel, g: int) -> Tensor:
    return torch.stack([model.init(seeded(i), torch.float64) for i in range(g)])


# --- batches ----------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 60), size=st.integers(1, 40), epochs=st.integers(1, 4), extra=st.integers(0, 5))
def test_batches_are_fresh_permutations_without_the_remainder(n: int, size: int, epochs: int, extra: int) -> None:
    b = min(size, n)
    per_epoch = n // b
    steps = epochs * per_epoch + extra
    found = list(batches(n, size, steps, seeded(n)))
    assert len(found) == steps
    assert all(len(batch) == b for batch in found)
    for start in range(0, steps, per_epoch):
        epoch = torch.cat(found[start : start + per_epoch])
        assert len(epoch.unique()) == len(epoch)  # without replacement within an epoch
        assert 0 <= int(epoch.min()) <= int(epoch.max()) < n
    # The permutations are the generator's own, one after another, regardless of the remainder left out at the end.
    random = seeded(n)
    orders = [torch.randperm(n, generator=random)[: per_epoch * b] for _ in range(-(-steps // per_epoch))]
    assert torch.equal(torch.cat(found), torch.cat(orders)[: steps * b])


@given(n=st.integers(0, 200), size=st.integers(1, 64), k=st.integers(1, 50))
def test_step_counts(n: int, size: int, k: int) -> None:
    assert LocalSGD(steps=k, batch_size=size).count(n) == (k if n else 0)
    assert LocalSGD(epochs=k, batch_size=size).count(n) == (k * (n // min(size, n)) if n else 0)


@pytest.mark.parametrize("length", [{}, {"steps": 3, "epochs": 2}])
def test_exactly_one_length_is_required(length: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"steps=.*epochs="):
        LocalSGD(**length)


# --- against torch.optim ----------------------------------------------------------------------------------------------


def by_torch(model: FlatModel, theta: Tensor, c: ClientData, s: LocalSGD, decay: str) -> tuple[Tensor, float]:
    """Train by torch.optim.SGD on the same batches; λ_θ‖θ‖² in the loss, or as weight decay 2λ_θ."""
    p = theta.clone().requires_grad_()
    in_loss = s.lambda_theta if decay == "loss" else 0.0
    optimizer = torch.optim.SGD(
        [p], lr=s.lr, momentum=s.momentum, weight_decay=2 * s.lambda_theta if decay == "optimizer" else 0.0
    )
    losses = []
    for index in batches(len(c.train), s.batch_size, s.count(len(c.train)), group([c]).generator(0, "train")):
        optimizer.zero_grad()
        logits = model.logits(p, c.train.x[index])
        if s.mask_absent:
            logits = torch.where(c.present, logits, torch.tensor(-torch.inf, dtype=logits.dtype))
        loss = mean_loss(logits, c.train.y[index])
        (loss + in_loss * p.square().sum()).backward()
        losses.append(loss.item())
        if s.clip is not None:
            torch.nn.utils.clip_grad_norm_([p], s.clip)
        optimizer.step()
    return p.detach(), sum(losses) / len(losses)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 7, "momentum": 0.0},
    "momentum": {"steps": 7},
    "decay": {"steps": 7, "lambda_theta": 0.1},
    "clipped": {"steps": 7, "clip": 0.3},
    "clipped decay": {"steps": 5, "clip": 0.3, "lambda_theta": 0.1},
    "never clipped": {"steps": 7, "clip": 1e6},
    "epochs": {"epochs": 3},
    "masked": {"steps": 7, "mask_absent": True},
    "all": {"epochs": 3, "momentum": 0.5, "lambda_theta": 0.01, "clip": 1.0, "mask_absent": True},
}


CASES = [(name, "loss") for name in VARIANTS] + [("decay", "optimizer")]
# With clipping they differ: here the gradient of f_i is clipped with its term λ_θ‖θ‖².


@pytest.mark.parametrize(("name", "decay"), CASES)
def test_local_sgd_equals_torchs_sgd(name: str, decay: str) -> None:
    s = LocalSGD.model_validate({"batch_size": 4, "lr": 0.05, **VARIANTS[name]})
    c = client("c0", 11)
    theta = starts(SMALL, 1)
    start = theta.clone()
    trained = train(SMALL, group([c]), theta, s)
    found = trained.theta
    expected, expected_loss = by_torch(SMALL, theta[0], c, s, decay)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-13)
    assert trained.steps.tolist() == [[s.count(11)]]
    assert trained.loss.item() == pytest.approx(expected_loss, abs=1e-13)
    assert torch.equal(theta, start)  # the input is not changed
    assert (found - theta).abs().max() > 1e-4


def test_zero_momentum_equals_no_momentum_to_the_bit() -> None:
    """Its buffers are omitted: they would be 0 · m + g."""
    model, one = MLP(IMAGE, [5], CLASSES), client("c0", 11)
    s = LocalSGD(steps=7, batch_size=4, lr=0.1, momentum=0.0)
    found = train(model, group([one]), starts(model, 1), s).theta
    tiny = s.model_copy(update={"momentum": 1e-300})  # rounds to nothing in float32, and has buffers
    assert torch.equal(found, train(model, group([one]), starts(model, 1), tiny).theta)


def test_equal_models_share_one_predictor() -> None:
    model = MLP(IMAGE, [5], CLASSES)
    theta = starts(model, 2)
    named = predictors_of(model, **{"personal": theta, "global": theta, "other": theta.clone()})
    assert all(each["personal"] is each["global"] is not each["other"] for each in named)
    assert named[0]["personal"] is not named[1]["personal"]


# --- the two drivers --------------------------------------------------------------------------------------------------


def compare(together: Trained, alone: Sequence[Trained]) -> None:
    for name in ("theta", "steps", "loss"):
        theirs = torch.cat([getattr(one, name) for one in alone])
        torch.testing.assert_close(getattr(together, name), theirs, rtol=0, atol=1e-10)


# --- masking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g", [1, 2], ids=["alone", "group"])
def test_masked_rows_of_absent_labels_get_no_gradient(g: int) -> None:
    data = clients((6, 7)[:g])
    for c in data:
        c.train.y[:] = torch.arange(len(c.train)) % 2  # label 2 is absent
    s = LocalSGD(steps=5, batch_size=4, mask_absent=True)
    theta = starts(SMALL, g)
    trained = train(SMALL, group(data), theta, s)
    for before, after in zip(theta, trained.theta, strict=True):
        old, new = SMALL.layout.split(before), SMALL.layout.split(after)
        assert torch.equal(old["fc2.weight"][2], new["fc2.weight"][2])
        assert torch.equal(old["fc2.bias"][2], new["fc2.bias"][2])
        assert not torch.equal(old["fc2.weight"][:2], new["fc2.weight"][:2])
    assert trained.loss.isfinite().all()
    unmasked = train(SMALL, group(data), theta, s.model_copy(update={"mask_absent": False})).theta
    assert not torch.equal(SMALL.layout.split(unmasked[0])["fc2.bias"][2], SMALL.layout.split(theta[0])["fc2.bias"][2])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g", [1, 2], ids=["alone", "group"])
@pytest.mark.parametrize("fault", ["no labels", "no examples"])
def test_clients_that_cannot_train_report_the_reason(g: int, fault: str) -> None:
    data = clients((6, 7)[:g])
    c = data[-1]
    broken = Split(c.train.x, None) if fault == "no labels" else Split(c.train.x[:0], torch.zeros(0).long())
    data[-1] = ClientData(c.id, broken, c.validation, c.test, c.classes)
    with pytest.raises(DataError, match=f"client {c.id}: .*({'labels' if fault == 'no labels' else 'empty'})"):
        train(SMALL, group(data), starts(SMALL, g), LocalSGD(steps=1))


# --- predictors -------------------------------------------------------------------------------------------------------


def test_a_predictor_applies_softmax_to_its_model() -> None:
    theta = starts(SMALL, 2)
    x = client("c0", 5).test.x
    named = predictors_of(SMALL, personal=theta, other=theta.flip(0))
    assert [list(d) for d in named] == [["personal", "other"]] * 2
    for i in range(2):
        p = named[i]["personal"].probabilities(x)
        torch.testing.assert_close(p, SMALL.logits(theta[i], x).softmax(1), rtol=0, atol=1e-14)
        torch.testing.assert_close(p.sum(1), torch.ones(len(x)).double())
        assert torch.equal(named[i]["personal"].tensors()["theta"], theta[i])
        assert torch.equal(named[i]["other"].tensors()["theta"], theta[1 - i])


# --- single clients against a stack -----------------------------------------------------------------------------------

UNEVEN = (11, 3, 6, 1)
"""Train split sizes: one is below a batch of 4, and epochs give unequal numbers of steps."""

PULL: Change = lambda gradients, w, start, given: [  # noqa: E731
    g + 0.7 * (a - b) - 0.2 * v for g, a, b, v in zip(gradients, w, start, given["v"], strict=True)
]


@pytest.mark.parametrize("model", [SMALL, LeNet(IMAGE, CLASSES)], ids=["mlp", "lenet"])
@pytest.mark.parametrize("only", ["all", "body", "head"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_all_options_of_train_work_for_stacked_clients(
    name: str, only: Literal["all", "body", "head"], model: Any
) -> None:
    """Corrections by the weights, their start and a vector per client; numbers of steps per client; a part of θ."""
    s = LocalSGD.model_validate({"batch_size": 4, "lr": 0.05, **VARIANTS[name]})
    data, theta = clients(UNEVEN), starts(model, 4)
    vectors, counts = theta.flip(0) / 3, [3, 5, 1, 4]

    def trained(rows: list[int]) -> Trained:
        return train(
            model,
            group([data[i] for i in rows]),
            theta[rows],
            s,
            correct=Correction(PULL, {"v": vectors[rows]}),
            only=only,
            counts=[counts[i] for i in rows],
            purpose="other",
        )

    together = trained([0, 1, 2, 3])
    compare(together, [trained([i]) for i in range(4)])
    assert together.steps.flatten().tolist() == counts
    body = model.layout.body_size
    assert torch.equal(together.theta[:, :body], theta[:, :body]) is (only == "head")
    assert torch.equal(together.theta[:, body:], theta[:, body:]) is (only == "body")


def test_a_correction_is_added_to_the_gradient_first() -> None:
    """By hand: a gradient, the correction, λ_θ, clipping, momentum."""
    c, theta, v = client("c0", 11), starts(SMALL, 1), starts(SMALL, 2)[1:]
    s = LocalSGD(steps=4, batch_size=4, lr=0.05, momentum=0.5, lambda_theta=0.1, clip=0.4)
    found = train(SMALL, group([c]), theta, s, correct=Correction(PULL, {"v": v})).theta[0]
    p, momentum = theta[0].clone().requires_grad_(), torch.zeros_like(theta[0])
    for index in batches(11, 4, 4, group([c]).generator(0, "train")):
        (g,) = torch.autograd.grad(mean_loss(SMALL.logits(p, c.train.x[index]), c.train.y[index]), [p])
        with torch.no_grad():
            g = g + 0.7 * (p - theta[0]) - 0.2 * v[0] + 2 * 0.1 * p
            g = g * min(1.0, 0.4 / (float(g.norm()) + 1e-6))
            momentum = 0.5 * momentum + g
            p -= 0.05 * momentum
    torch.testing.assert_close(found, p.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("model", [SMALL, LeNet(IMAGE, CLASSES)], ids=["mlp", "lenet"])
def test_losses_and_gradients_of_stacked_clients_equal_those_of_each(
    model: FlatModel, mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On mini-batches, halves of them, and all data in chunks, whose numbers differ between clients."""
    monkeypatch.setattr(mini_batches, "PIECE", 4)
    data, theta = clients(UNEVEN), starts(model, 4)
    for c in data:
        c.train.y[:] = torch.arange(len(c.train)) % 2  # label 2 is absent
    alone = [LocalTrainer(model, group([c]), mask_absent=mask) for c in data]
    stack = LocalTrainer(model, group(data), mask_absent=mask)
    assert (stack.stacked, alone[0].stacked) == (True, False)
    assert torch.equal(stack.join(stack.parameters(theta)), theta)

    def same(together: Sequence[Batch], apart: Sequence[Sequence[Batch]]) -> None:
        g, loss = stack.gradient_at(theta, *together)
        value = stack.value(stack.parameters(theta), *together)
        for i, (one, pieces) in enumerate(zip(alone, apart, strict=True)):
            own, own_loss = one.gradient_at(theta[i : i + 1], *pieces)
            torch.testing.assert_close(g[i : i + 1], own, rtol=0, atol=1e-12)
            torch.testing.assert_close(loss[i : i + 1], own_loss, rtol=0, atol=1e-12)
            torch.testing.assert_close(value[i : i + 1].detach(), own_loss, rtol=0, atol=1e-12)

    same(stack.everything(), [one.everything() for one in alone])
    drawn = list(stack.batches(5, [2] * 4, "x"))
    apart = [list(one.batches(5, [2], "x")) for one in alone]
    for t in range(2):
        same([drawn[t]], [[mine[t]] for mine in apart])
    totals = list(stack.batches(5, [1] * 4, "x", totals=[3.0, 1.0, 2.0, 5.0]))
    same(
        totals, [list(one.batches(5, [1], "x", totals=[n])) for one, n in zip(alone, (3.0, 1.0, 2.0, 5.0), strict=True)]
    )
    # For clients with at least two examples: otherwise a half is empty.
    first, second, share = stack.halves(drawn[0])
    parts = [one.halves(mine[0]) for one, mine in zip(alone, apart, strict=True)]
    same([first], [[part[0]] for part in parts])
    torch.testing.assert_close(share, torch.cat([part[2] for part in parts]))
    w = stack.parameters(theta)
    g, _ = stack.gradient(w, second)
    for i in range(3):
        own, _ = alone[i].gradient_at(theta[i : i + 1], parts[i][1])
        torch.testing.assert_close(stack.join(dict(zip(w, g, strict=True)))[i : i + 1], own, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("each_task")
def test_a_gradient_covers_all_examples_and_selected_leaves() -> None:
    c, theta = client("c0", 11), starts(SMALL, 1)
    local = LocalTrainer(SMALL, group([c]))
    p = theta[0].clone().requires_grad_()
    loss = mean_loss(SMALL.logits(p, c.train.x), c.train.y)
    (expected,) = torch.autograd.grad(loss, [p])
    found, value = local.gradient_at(theta, *local.everything())
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(value[0], loss.detach(), rtol=0, atol=1e-14)
    w = local.parameters(theta)
    head = [w[name] for name in SMALL.layout.head]
    part, _ = local.gradient(w, *local.everything(), of=head)
    torch.testing.assert_close(
        torch.cat([g.flatten() for g in part]), expected[SMALL.layout.body_size :], rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("sizes", [(11,), UNEVEN], ids=["alone", "stack"])
@pytest.mark.usefixtures("each_task")
def test_a_gradient_is_differentiable(sizes: tuple[int, ...]) -> None:
    """∇ ‖∇f(w)‖²/2 = ∇²f(w) ∇f(w), against autograd on the flat vector."""
    data, theta = clients(sizes), starts(SMALL, len(sizes))
    local = LocalTrainer(SMALL, group(data))
    w = local.parameters(theta)
    slope, _ = local.gradient(w, *local.everything(), differentiable=True)
    half = sum((g.square().sum() for g in slope), torch.zeros(())) / 2
    second = torch.autograd.grad(half, list(w.values()))
    found = local.join(dict(zip(w, second, strict=True)))
    for i, c in enumerate(data):
        p = theta[i].clone().requires_grad_()
        (first,) = torch.autograd.grad(mean_loss(SMALL.logits(p, c.train.x), c.train.y), [p], create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum() / 2, [p])
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_diverging_client_is_lost_without_its_batch(at: int) -> None:
    data, s = clients((6, 6, 6)), LocalSGD(steps=5, batch_size=3, lr=0.05)
    theta = starts(SMALL, 3)
    data[at] = dataclasses.replace(data[at], train=Split(data[at].train.x * 1e200, data[at].train.y))
    members = group(data)
    together = train(SMALL, members, theta, s, key="head.lr")
    assert list(members.lost) == [at]
    alone = group([data[at]])
    train(SMALL, alone, theta[at : at + 1], s, key="head.lr")
    assert alone.lost[0] == members.lost[at]
    assert re.search(r"local step \d of 5; .*algorithm\.head\.lr .*0\.05", alone.lost[0])
    for i in {0, 1, 2} - {at}:
        one = train(SMALL, group([data[i]]), theta[i : i + 1], s)
        torch.testing.assert_close(together.theta[i : i + 1], one.theta, rtol=0, atol=1e-10)
        torch.testing.assert_close(together.loss[i : i + 1], one.loss, rtol=0, atol=1e-10)


def test_an_infinite_loss_at_the_start_is_reported() -> None:
    """The reason names the start instead of the client's steps, for example after too large a step of the server."""
    s, theta = LocalSGD(steps=5, batch_size=3, lr=0.05), starts(SMALL, 2)
    theta[1] *= 1e200
    members = group(clients((6, 6)))
    train(SMALL, members, theta, s)
    assert list(members.lost) == [1]
    assert tells(members.lost[1], "local step 1 of 5", "algorithm.local.lr", "0.05")
    assert mentions(members.lost[1], "smaller steps earlier", "not finite", "start")


def test_a_clients_state_is_a_row_of_its_batch() -> None:
    data = clients((3, 4))
    members = ClientGroup(data, group(data)._generator, [None, {"x": torch.tensor([5.0, 6.0])}])
    assert members.load_state("x", torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[1, 2], [5, 6]]
    rows = torch.tensor([[7.0], [8.0]])
    members.save_state(y=rows)
    rows.zero_()
    assert [members.kept[i]["y"].tolist() for i in range(2)] == [[7], [8]]


class Watched(LeNet):
    """Model that records the memory layouts in which its first kernel, of one input channel, was used."""

    def __init__(self) -> None:
        super().__init__((1, 28, 28), 3)
        self.layouts: set[tuple[int, ...]] = set()

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        self.layouts.add(parameters["conv1.weight"].stride())
        return super().loss(parameters, x, y)


@pytest.mark.parametrize("method", ["per-fedavg", "apfl", "comfedl"])
def test_additional_models_have_the_same_memory_layout(method: str) -> None:
    """Otherwise a convolution of one channel is slower by half for no visible reason."""
    model = Watched()
    split = Split(torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0]))
    there = group([ClientData("c0", split, split, split, 3)])
    theta = model.init(torch.Generator().manual_seed(0))[None]
    local = {"steps": 2, "batch_size": 2}
    if method == "per-fedavg":
        for hessian in ("none", "finite_difference", "exact"):
            PER_FEDAVG.train(
                model, there, theta, PerFedAvgSettings.model_validate({"local": local, "hessian": hessian})
            )
    elif method == "apfl":
        APFL.train(model, there, theta, APFLSettings.model_validate({"local": local}))
    else:
        s = ComFedLSettings.model_validate({"local": local, "objective": "damaml"})
        compositional_sgd(model, theta, there, s, torch.zeros(1, dtype=torch.float64))
    assert model.layouts == {LocalTrainer(model, there).parameters(theta)["conv1.weight"].stride()}
