"""Local SGD against torch.optim.SGD step by step, its batches, and its two drivers against each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, client, clients, group
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.training import LocalSGD, batches, first_batch, local_sgd, predictors_of
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError
from fedloom.models.flat import FlatModel
from fedloom.models.lenet import LeNet
from fedloom.models.mlp import MLP

SMALL = MLP(IMAGE, [5], CLASSES)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def starts(model: FlatModel, g: int) -> Tensor:
    return torch.stack([model.init(seeded(i), torch.float64) for i in range(g)])


# --- batches ----------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 60), size=st.integers(1, 40), epochs=st.integers(1, 4), extra=st.integers(0, 5))
@hypothesis_settings(deadline=None)
def test_batches_are_fresh_permutations_with_the_remainder_dropped(n: int, size: int, epochs: int, extra: int) -> None:
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
    # The permutations are the generator's own, one after another, however many are left out at the end.
    random = seeded(n)
    orders = [torch.randperm(n, generator=random)[: per_epoch * b] for _ in range(-(-steps // per_epoch))]
    assert torch.equal(torch.cat(found), torch.cat(orders)[: steps * b])


def test_epochs_differ() -> None:
    first, second = torch.stack(list(batches(64, 64, 2, seeded())))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort()[0], second.sort()[0])


@given(n=st.integers(0, 200), size=st.integers(1, 64), k=st.integers(1, 50))
def test_step_counts(n: int, size: int, k: int) -> None:
    assert LocalSGD(steps=k, batch_size=size).count(n) == (k if n else 0)
    assert LocalSGD(epochs=k, batch_size=size).count(n) == (k * (n // min(size, n)) if n else 0)


@given(n=st.integers(1, 50), size=st.integers(1, 50))
def test_a_first_batch_has_the_size_asked_for_or_all(n: int, size: int) -> None:
    index = first_batch(Split(torch.zeros(n, 1), None), size, seeded(n))
    assert len(index) == min(n, size) == len(index.unique())


@pytest.mark.parametrize("length", [{}, {"steps": 3, "epochs": 2}])
def test_exactly_one_length_is_asked_for(length: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="exactly one of steps and epochs: found steps="):
        LocalSGD(**length)


# --- against torch.optim ----------------------------------------------------------------------------------------------


def by_torch(model: FlatModel, theta: Tensor, c: ClientData, s: LocalSGD, decay: str) -> tuple[Tensor, float]:
    """torch.optim.SGD on the same batches; λ_θ‖θ‖² in the loss, or as weight decay 2λ_θ."""
    p = theta.clone().requires_grad_()
    in_loss = s.lambda_theta if decay == "loss" else 0.0
    optimizer = torch.optim.SGD(
        [p], lr=s.lr, momentum=s.momentum, weight_decay=2 * s.lambda_theta if decay == "optimizer" else 0.0
    )
    assert c.train.y is not None
    losses = []
    for index in batches(len(c.train), s.batch_size, s.count(len(c.train)), group([c]).generator(0, "train")):
        optimizer.zero_grad()
        logits = model.logits(p, c.train.x[index])
        if s.mask_absent:
            logits = torch.where(c.present, logits, torch.tensor(-torch.inf, dtype=logits.dtype))
        loss = F.cross_entropy(logits, c.train.y[index])
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
# With clipping the two differ: here the gradient of f_i is clipped, its term λ_θ‖θ‖² included.


@pytest.mark.parametrize(("name", "decay"), CASES)
def test_local_sgd_is_torchs_sgd(name: str, decay: str) -> None:
    s = LocalSGD.model_validate({"batch_size": 4, "lr": 0.05, **VARIANTS[name]})
    c = client("c0", 11)
    theta = starts(SMALL, 1)
    start = theta.clone()
    found, steps, loss = local_sgd(SMALL, theta, group([c]), s)
    expected, expected_loss = by_torch(SMALL, theta[0], c, s, decay)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-13)
    assert steps.tolist() == [[s.count(11)]]
    assert loss.item() == pytest.approx(expected_loss, abs=1e-13)
    assert torch.equal(theta, start)  # what came in is not changed
    assert (found - theta).abs().max() > 1e-4


def test_lenet_trains_as_torchs_does() -> None:
    """Channels-last leaves and ReLU after the pooling change no number beyond rounding."""
    model, c = LeNet(IMAGE, CLASSES), client("c0", 9)
    s = LocalSGD(steps=4, batch_size=4, lr=0.05, lambda_theta=0.01)
    theta = starts(model, 1)
    found, _, _ = local_sgd(model, theta, group([c]), s)
    torch.testing.assert_close(found[0], by_torch(model, theta[0], c, s, "loss")[0], rtol=0, atol=1e-12)


def test_momentum_is_fresh_at_every_visit() -> None:
    s, c = LocalSGD(steps=3, batch_size=4), client("c0", 11)
    once, _, _ = local_sgd(SMALL, starts(SMALL, 1), group([c]), s)
    again, _, _ = local_sgd(SMALL, starts(SMALL, 1), group([c]), s)
    assert torch.equal(once, again)


def test_the_purpose_picks_the_batches() -> None:
    s, c = LocalSGD(steps=3, batch_size=4), client("c0", 11)
    trained, tuned = (local_sgd(SMALL, starts(SMALL, 1), group([c]), s, p)[0] for p in ("train", "fine-tune"))
    assert not torch.equal(trained, tuned)


# --- one driver against the other -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_group_is_trained_as_its_clients_one_by_one(name: str) -> None:
    s = LocalSGD.model_validate({"batch_size": 4, "lr": 0.05, **VARIANTS[name]})
    data = clients((11, 3, 6, 1))  # smaller than a batch too; of unequal step counts under epochs
    theta = starts(SMALL, len(data))
    compare(
        local_sgd(SMALL, theta, group(data), s),
        [local_sgd(SMALL, theta[i : i + 1], group([c]), s) for i, c in enumerate(data)],
    )


def test_a_group_of_lenets_is_trained_as_its_clients_one_by_one() -> None:
    model, data = LeNet(IMAGE, CLASSES), clients((7, 3))
    s = LocalSGD(epochs=2, batch_size=3, lr=0.05)
    theta = starts(model, 2)
    compare(
        local_sgd(model, theta, group(data), s),
        [local_sgd(model, theta[i : i + 1], group([c]), s) for i, c in enumerate(data)],
    )


def compare(together: tuple[Tensor, ...], alone: Iterable[tuple[Tensor, ...]]) -> None:
    for mine, theirs in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.cat(theirs), rtol=0, atol=1e-10)


# --- masking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g", [1, 2], ids=["alone", "group"])
def test_under_the_mask_rows_of_absent_labels_get_no_gradient(g: int) -> None:
    data = clients((6, 7)[:g])
    for c in data:
        assert c.train.y is not None
        c.train.y[:] = torch.arange(len(c.train)) % 2  # label 2 is absent
    s = LocalSGD(steps=5, batch_size=4, mask_absent=True)
    theta = starts(SMALL, g)
    found, _, loss = local_sgd(SMALL, theta, group(data), s)
    for before, after in zip(theta, found, strict=True):
        old, new = SMALL.layout.split(before), SMALL.layout.split(after)
        assert torch.equal(old["fc2.weight"][2], new["fc2.weight"][2])
        assert torch.equal(old["fc2.bias"][2], new["fc2.bias"][2])
        assert not torch.equal(old["fc2.weight"][:2], new["fc2.weight"][:2])
    assert loss.isfinite().all()
    unmasked, _, _ = local_sgd(SMALL, theta, group(data), s.model_copy(update={"mask_absent": False}))
    assert not torch.equal(SMALL.layout.split(unmasked[0])["fc2.bias"][2], SMALL.layout.split(theta[0])["fc2.bias"][2])


# --- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("g", [1, 2], ids=["alone", "group"])
@pytest.mark.parametrize("fault", ["no labels", "no examples"])
def test_clients_that_cannot_train_say_so(g: int, fault: str) -> None:
    data = clients((6, 7)[:g])
    c = data[-1]
    train = Split(c.train.x, None) if fault == "no labels" else Split(c.train.x[:0], torch.zeros(0).long())
    data[-1] = ClientData(c.id, train, c.validation, c.test, c.classes)
    with pytest.raises(DataError, match=f"client {c.id}: its train split (has no labels|is empty)"):
        local_sgd(SMALL, starts(SMALL, g), group(data), LocalSGD(steps=1))


# --- predictors -------------------------------------------------------------------------------------------------------


def test_a_predictor_is_the_softmax_of_its_theta() -> None:
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
