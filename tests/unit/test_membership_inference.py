"""Membership inference: curves against scikit-learn, bounds on known scores, losses of every task."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy import Lazy

from fedloom.attacks.membership import MemberScores, RocCurve, example_losses, membership_document, membership_epsilon
from fedloom.data.federated import ClientData, Split
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.models.networks import MLP
from fedloom.models.predictors import ModelPredictor

sk = Lazy("sklearn.metrics")
SCORES = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=60)


@settings(max_examples=50)
@given(SCORES, SCORES)
def test_curve_and_area_equal_scikit_learns(members: list[float], others: list[float]) -> None:
    found = RocCurve.of(np.array(members), np.array(others))
    labels, scores = [1] * len(members) + [0] * len(others), members + others
    fpr, tpr, thresholds = sk.roc_curve(labels, scores, drop_intermediate=False)
    np.testing.assert_allclose(found.fpr, fpr)
    np.testing.assert_allclose(found.tpr, tpr)
    np.testing.assert_allclose(found.thresholds[1:], thresholds[1:])
    assert found.auc == pytest.approx(sk.roc_auc_score(labels, scores))
    assert found.tpr_at(0.01) == max(t for f, t in zip(fpr, tpr, strict=True) if f <= 0.01)


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    random = np.random.default_rng(0)
    points = RocCurve.of(random.normal(1, 1, 5000), random.normal(0, 1, 5000)).points(50)
    assert len(points) <= 50
    assert points[0] == [0, 0]
    assert points[-1] == [1, 1]


def test_uninformative_scores_give_epsilon_0() -> None:
    random = np.random.default_rng(1)
    members, others = random.normal(size=2000), random.normal(size=2000)
    assert membership_epsilon(members, others, delta=1e-5, confidence=0.95, seed=1) < 0.1


def test_the_bound_for_scores_of_known_epsilon_is_close_below_it() -> None:
    epsilon, random = 1.5, np.random.default_rng(2)
    truth = 1 / (1 + math.exp(-epsilon))  # randomized response
    bounds = [
        membership_epsilon(
            *((random.random(4000) < p).astype(float) for p in (truth, 1 - truth)), delta=0, confidence=0.95, seed=seed
        )
        for seed in range(40)
    ]
    assert np.mean(np.array(bounds) <= epsilon) >= 0.85
    assert np.mean(bounds) > 0.8 * epsilon


def test_the_bound_for_separated_scores_grows_with_their_number() -> None:
    found = [membership_epsilon(np.ones(n), np.zeros(n), delta=0, confidence=0.95, seed=1) for n in (100, 1000)]
    assert 2 < found[0] < found[1] < 8


def test_the_document_names_the_most_exposed_client() -> None:
    random = np.random.default_rng(3)
    scores = {
        "a": MemberScores(random.normal(size=50), random.normal(size=50)),
        "b": MemberScores(random.normal(size=50) + 3, random.normal(size=50)),
    }
    found = membership_document(scores, delta=1e-5, confidence=0.95, seed=1)
    assert found["auc_clients"]["client"] == "b"
    assert (found["clients"], found["members"], found["others"]) == (2, 100, 100)
    assert membership_document({}, delta=1e-5, confidence=0.95, seed=1) is None


def test_losses_are_negative_log_likelihoods_for_any_batch_size() -> None:
    model, plan = MLP((4,), [3], 5), EvaluationPlan.of_classes(5)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(23, 4, generator=generator), torch.randint(5, (23,), generator=generator)
    predictor = ModelPredictor(model, model.init(generator))
    expected = torch.nn.functional.cross_entropy(predictor.predictions(x), y, reduction="none").double().numpy()
    for size in (1, 7, 100):
        np.testing.assert_allclose(example_losses(predictor, Split(x, y), plan, size), expected, rtol=1e-5)
    assert len(example_losses(predictor, Split(x[:0], y[:0]), plan, 5)) == 0


@pytest.mark.parametrize("lacks", ["train", "test", "labels"])
def test_clients_without_both_kinds_of_examples_are_left_out(lacks: str) -> None:
    model, plan = MLP((4,), [3], 5), EvaluationPlan.of_classes(5)
    whole, empty = Split(torch.randn(3, 4), torch.tensor([0, 1, 2])), Split(torch.zeros(0, 4), torch.zeros(0).long())
    train = empty if lacks == "train" else Split(whole.x, None) if lacks == "labels" else whole
    client = ClientData("a", train, empty, empty if lacks == "test" else whole, 5)
    predictor = ModelPredictor(model, model.init(torch.Generator()))
    assert MemberScores.of(predictor, client, plan, 5) is None
