"""Measurements of a client, compared with numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.data.federated import ClientData, Split
from fedloom.evaluation.measure import Measurements, measure, measured_together, metrics
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.evaluation.uncertainty import group_uncertainty
from fedloom.tasks.base import LOSS_CAP, MetricSums


@dataclass
class Fixed:
    """A predictor whose log-probabilities are its input."""

    def log_probabilities(self, x: Tensor) -> Tensor:
        return x

    def probabilities(self, x: Tensor) -> Tensor:
        return x.exp()

    def tensors(self) -> dict[str, Tensor]:
        return {}


def client(train_y: list[int] | None, test: Split, validation: Split | None = None, classes: int = 4) -> ClientData:
    n = 3 if train_y is None else len(train_y)
    train = Split(torch.zeros(n, classes), None if train_y is None else torch.tensor(train_y, dtype=torch.int64))
    nothing = Split(torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64))
    return ClientData("client-0000", train, nothing if validation is None else validation, test, classes)


def random_split(n: int, classes: int, seed: int, labels: list[int] | None = None) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, classes, generator=generator).log_softmax(1)
    allowed = torch.tensor(range(classes) if labels is None else labels)
    return Split(x, allowed[torch.randint(len(allowed), (n,), generator=generator)])


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10**6))
def test_measurements_match_numpy_for_both_label_masks_and_any_batch_size(n: int, batch_size: int, seed: int) -> None:
    test, validation = random_split(n, 4, seed, [1, 3]), random_split(n + 2, 4, seed + 1, [1, 3])
    data = client([3, 1, 1], test, validation)
    counts, confusion, *_ = measure({"personal": Fixed()}, data, ["personal"], batch_size=batch_size)
    expected_confusion = np.zeros((4, 4), dtype=int)
    np.add.at(expected_confusion, (test.y.numpy(), test.x.numpy().argmax(1)), 1)
    assert confusion[0].tolist() == expected_confusion.tolist()
    assert counts.shape == (1, 2, 2, 3)
    assert counts.dtype == torch.float64
    for s, split in enumerate((validation, test)):
        log_p, y = split.x.double().numpy(), split.y.numpy()
        for r, classes in enumerate(([0, 1, 2, 3], [1, 3])):
            p = np.full_like(log_p, 0.0)
            p[:, classes] = np.exp(log_p[:, classes])
            p /= p.sum(1, keepdims=True)
            correct = (p.argmax(1) == y).sum()
            loss = -np.log(p[np.arange(len(y)), y]).sum()
            expected = [correct, len(y), loss]
            # without the mask, the predictor's own normalization is used, which float32 rounded
            np.testing.assert_allclose(counts[0, s, r].numpy(), expected, rtol=1e-5)


def test_predictors_are_in_the_order_of_the_names() -> None:
    class Worst(Fixed):
        def log_probabilities(self, x: Tensor) -> Tensor:
            return (-x).log_softmax(1)

    test = random_split(20, 4, 0)
    test = Split(test.x, test.x.argmax(1))
    predictors = {"global": Worst(), "personal": Fixed()}
    counts, *_ = measure(predictors, client([0, 1, 2, 3], test), ["personal", "global"], batch_size=7)
    assert counts[:, 1, 0, 0].tolist() == [20, 0]


def test_a_predictor_with_two_names_is_measured_once() -> None:
    asked: list[int] = []

    class Counted(Fixed):
        def log_probabilities(self, x: Tensor) -> Tensor:
            asked.append(len(x))
            return x

    one, data = Counted(), client([0], random_split(5, 4, 0))
    measured = measure({"personal": one, "global": one}, data, ["personal", "global"], batch_size=10)
    assert asked == [5]
    alone = measure({"personal": Fixed()}, data, ["personal"], batch_size=10)
    for both, single in zip(measured, alone, strict=True):
        assert torch.equal(both, torch.cat([single, single]))


def test_without_labels_nothing_is_counted() -> None:
    labelled, unlabelled = random_split(5, 4, 0), Split(torch.zeros(5, 4), None)
    counts, confusion, *_ = measure({"personal": Fixed()}, client([0], unlabelled), ["personal"], batch_size=8)
    assert not counts.any()
    assert not confusion.any()
    counts, *_ = measure({"personal": Fixed()}, client(None, labelled), ["personal"], batch_size=8)
    assert counts[0, 1, 0, 1] == 5  # unmasked needs labels of the test split only
    assert not counts[0, 1, 1].any()  # no mask without labels of the train split
    counts, *_ = measure({"personal": Fixed()}, client([], labelled), ["personal"], batch_size=8)
    assert not counts[0, 1, 1].any()


def test_a_label_outside_the_mask_is_wrong_with_the_maximum_loss() -> None:
    test = Split(torch.tensor([[0.1, 0.2, 0.6, 0.1]]).log(), torch.tensor([2]))
    counts, *_ = measure({"personal": Fixed()}, client([0, 1], test), ["personal"], batch_size=8)
    assert counts[0, 1, 0].tolist() == pytest.approx([1, 1, -math.log(0.6)])
    assert counts[0, 1, 1].tolist() == [0, 1, LOSS_CAP]


@pytest.mark.parametrize("row", [[math.nan] * 4, [math.nan, 0.0, 0.0, 0.0], [-math.inf] * 4])
def test_a_broken_prediction_is_wrong_with_a_finite_loss(row: list[float]) -> None:
    test = Split(torch.tensor([row]), torch.tensor([1]))
    counts, confusion, *_ = measure({"personal": Fixed()}, client([0, 1], test), ["personal"], batch_size=8)
    assert counts[0, 1].tolist() == [[0, 1, LOSS_CAP], [0, 1, LOSS_CAP]]
    assert int(confusion.sum()) == (0 if any(math.isnan(value) for value in row) else 1)


def test_ties_go_to_the_lowest_class() -> None:
    test = Split(torch.full((4, 4), math.log(0.25)), torch.tensor([0, 1, 2, 3]))
    counts, *_ = measure({"personal": Fixed()}, client([1, 2], test), ["personal"], batch_size=8)
    assert counts[0, 1, :, 0].tolist() == [1, 1]  # class 0 unmasked, class 1 masked


def test_measuring_tracks_no_gradient() -> None:
    class Trained(Fixed):
        weight = torch.ones(4, requires_grad=True)

        def log_probabilities(self, x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return (x * self.weight).log_softmax(1)

    measure({"personal": Trained()}, client([0], random_split(3, 4, 0)), ["personal"], batch_size=8)


def test_a_missing_predictor_is_named() -> None:
    data = client([0], random_split(3, 4, 0))
    with pytest.raises(ValueError, match=r"client-0000.*'global'"):
        measure({"personal": Fixed()}, data, ["personal", "global"], batch_size=1)
    alone = replace(data, train=Split(data.train.x[:0], torch.tensor([], dtype=torch.int64)))
    found = measure({"global": Fixed()}, alone, ["personal", "global"], batch_size=1)
    assert found.counts[:, 1, 0, 1].tolist() == [0, 3]  # total, of the test split
    assert not any(tensor[0].any() for tensor in found)
    with pytest.raises(ValueError, match=r"client-0000.*'personal'"):
        measure({}, alone, ["personal", "global"], batch_size=1)


def test_calibration_against_a_hand_computation() -> None:
    """Six predictions with confidences 0.42, 0.42, 0.7, 0.7, 0.7 and 1, of which 1, 2 and 1 are right."""
    p = torch.tensor([[0.42, 0.3, 0.2, 0.08]] * 2 + [[0.1, 0.7, 0.1, 0.1]] * 3 + [[0.0, 0.0, 0.0, 1.0]])
    test = Split(p.log(), torch.tensor([0, 2, 1, 1, 0, 3]))
    found = measure({"personal": Fixed()}, client([0], test), ["personal"], batch_size=4)
    expected = torch.zeros(1, 15, 3, dtype=torch.float64)
    expected[0, 6] = torch.tensor([2, 0.84, 1])
    expected[0, 10] = torch.tensor([3, 2.1, 2])
    expected[0, 14] = torch.tensor([1, 1.0, 1])
    torch.testing.assert_close(found.calibration, expected, atol=1e-6, rtol=0)
    statistics = group_uncertainty(found.calibration, found.uncertainty)
    assert statistics["ece"] == pytest.approx((abs(1 - 0.84) + abs(2 - 2.1) + 0) / 6)
    nats = [-sum(q * math.log(q) for q in row if q) for row in p.double().tolist()]
    assert statistics["entropy"] == pytest.approx(sum(nats) / 6)
    assert statistics["mutual_information"] == 0


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 10**6))
def test_calibration_matches_numpy_for_every_batch_size(n: int, batch_size: int, seed: int) -> None:
    test = random_split(n, 4, seed)
    found = (
        measure({"personal": Fixed()}, client([0], test), ["personal"], batch_size=batch_size).calibration[0].numpy()
    )
    p = np.exp(test.x.double().numpy())
    for m in range(15):
        inside = (p.max(1) > m / 15) & (p.max(1) <= (m + 1) / 15)
        right = (p.argmax(1) == test.y.numpy())[inside].sum()
        np.testing.assert_allclose(found[m], [inside.sum(), p.max(1)[inside].sum(), right], atol=1e-9)


def test_ensemble_members_are_averaged_and_their_disagreement_is_mutual_information() -> None:
    class Two(Fixed):
        """Ensemble of a network that returns its input, and one that returns it with the classes reversed."""

        def draws_log_probabilities(self, x: Tensor) -> Tensor:
            return torch.stack([x, x.flip(1)])

    test = random_split(30, 4, 3)
    found = measure({"personal": Two()}, client([0, 1, 2, 3], test), ["personal"], batch_size=7)
    first = test.x.double().exp().numpy()
    p = (first + first[:, ::-1]) / 2
    correct = (p.argmax(1) == test.y.numpy()).sum()
    loss = -np.log(p[np.arange(30), test.y.numpy()]).sum()
    np.testing.assert_allclose(found.counts[0, 1, 0].numpy(), [correct, 30, loss], rtol=1e-6)
    total = -(p * np.log(p)).sum()
    each = -(first * np.log(first)).sum()
    np.testing.assert_allclose(found.uncertainty[0].numpy(), [30, total, total - each], rtol=1e-6)
    assert total - each > 1


def test_a_broken_prediction_has_no_confidence() -> None:
    test = Split(torch.tensor([[math.nan] * 4, [0.0, -math.inf, -math.inf, -math.inf]]), torch.tensor([1, 0]))
    found = measure({"personal": Fixed()}, client([0, 1], test), ["personal"], batch_size=8)
    assert found.uncertainty.tolist() == [[1, 0, 0]]
    assert found.calibration.sum(1).tolist() == [[1, 1, 1]]


class Named(MetricSums):
    """A user-defined metric with sums per client."""

    names = ("brier",)
    size = 1

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        return (predictions.double().exp().amax(1) * (y + 1)).sum()[None]

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        return {}

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        return None


def test_small_clients_are_measured_together_as_one_by_one() -> None:
    data = [
        client([3, 1, 1], random_split(5, 4, 1), random_split(2, 4, 2)),
        client([0, 2], random_split(7, 4, 3)),
        client([1], Split(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)), random_split(3, 4, 4)),
    ]
    plan = EvaluationPlan.of_classes(4)
    plan = replace(plan, sums=(*plan.sums, Named()))
    shared, names = Fixed(), ["personal", "global", "other"]
    predictors = [{"personal": Fixed(), "global": shared, "other": shared} for _ in data]
    found = measured_together(predictors, data, names, batch_size=7, plan=plan)
    for name, rows in zip(
        Measurements._fields,
        zip(
            *(measure(p, d, names, batch_size=7, plan=plan) for p, d in zip(predictors, data, strict=True)), strict=True
        ),
        strict=True,
    ):
        expected = torch.stack(rows)
        assert found.tensors()[name].dtype == expected.dtype
        torch.testing.assert_close(found.tensors()[name], expected, rtol=1e-12, atol=1e-12)
    assert found.counts[0].abs().sum() > 0
    together = metrics(predictors, data, names, batch_size=7, plan=plan)
    assert all(torch.equal(a, b) for a, b in zip(together.tensors().values(), found.tensors().values(), strict=True))


@pytest.mark.parametrize("case", ["large", "no labels", "no train data", "missing", "not a number", "masked out"])
def test_large_clients_are_measured_one_by_one(case: str) -> None:
    x, y = torch.zeros(2, 4).log_softmax(1), torch.tensor([0, 1])
    if case == "not a number":
        x = x * math.nan
    if case == "masked out":
        x = torch.tensor([[0.0, *[-math.inf] * 3]] * 2)
    test = Split(x, None if case == "no labels" else y)
    data = [client([] if case == "no train data" else [1, 1], test) for _ in range(2)]
    predictors = [{"personal": Fixed()}, {} if case == "missing" else {"personal": Fixed()}]
    size = 1 if case == "large" else 9
    plan = EvaluationPlan.of_classes(4)
    assert measured_together(predictors, data, ["personal"], batch_size=size, plan=plan) is None
