"""Claims of differential privacy: each toward its observer, and only about what happened."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Literal

import pytest

from fedloom.privacy.accounting import Release, epsilon_of, gaussian_release, sampled
from fedloom.privacy.claim import Claim, claim
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon
from fedloom.privacy.settings import TrainingPrivacy

SUM = sampled("poisson", 900, 45, 2.0)


def made(counts: dict[str, dict[Release, int]], *, simulated: bool = False, **rest: Any) -> Claim:
    how = {name: rest.pop(name) for name in ("secure", "unknown", "covers", "does_not_cover") if name in rest}
    settings = {"clip": 0.5, "noise_multiplier": 2.0, "delta": 1e-5, **rest}
    return claim(TrainingPrivacy.model_validate(settings), counts, simulated=simulated, **how)


def test_central_noise_protects_from_readers_but_not_from_the_aggregator() -> None:
    found = made({"": {SUM: 300}})
    assert found.epsilon == found.to_readers.epsilon == epsilon_of({SUM: 300}, 1e-5)
    assert found.to_readers.amplified
    assert found.to_aggregator.epsilon is None
    assert found.to_aggregator.because
    assert (found.sampling, found.sums, found.noise) == (("poisson",), 300, "secret")
    assert made({"": {SUM: 300}}, secure=True).to_aggregator.because != found.to_aggregator.because


def test_sampling_does_not_amplify_against_the_aggregator() -> None:
    found = made({"": {SUM: 300}}, noise="distributed")
    assert found.to_aggregator.epsilon == pytest.approx(gaussian_epsilon(2.0, 1e-5, 300), rel=1e-6)
    assert not found.to_aggregator.amplified
    assert found.epsilon is not None
    assert found.epsilon < found.to_aggregator.epsilon
    assert found.mechanism == "discrete-gaussian"


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_observers_with_more_knowledge_get_a_weaker_guarantee(sampling: Literal["poisson", "fixed"]) -> None:
    """For equal neighbouring datasets."""
    found = made({"": {sampled(sampling, 12, 6, 5.0): 30}}, noise="distributed", sampling=sampling)
    assert found.to_readers.epsilon is not None
    assert found.to_aggregator.epsilon is not None
    assert found.to_readers.epsilon <= found.to_aggregator.epsilon


def test_fixed_cohorts_are_accounted_under_replace_one() -> None:
    found = made({"": {sampled("fixed", 900, 45, 20.0): 30}}, sampling="fixed")
    assert (found.neighbouring, found.sampling) == ("replace-one", ("fixed",))


def test_the_claim_covers_the_client_with_most_example_releases() -> None:
    steps = sampled("poisson", 500, 32, 4.0)
    rare = sampled("poisson", 5000, 32, 4.0)
    found = made({"a": {steps: 100}, "b": {steps: 300, gaussian_release(5.0): 2}, "c": {rare: 400}}, of="examples")
    assert found.epsilon == epsilon_of({steps: 300, gaussian_release(5.0): 2}, 1e-5)
    assert found.to_aggregator == found.to_readers
    assert (found.sums, set(found.sampling)) == (302, {"all", "poisson"})


def test_releases_about_all_clients_count_for_each() -> None:
    found = made({"": {SUM: 10}, "a": {gaussian_release(3.0): 1}, "b": {}})
    assert found.epsilon == epsilon_of({SUM: 10, gaussian_release(3.0): 1}, 1e-5)


def test_without_noise_or_count_there_is_no_claim() -> None:
    for found in (made({"": {sampled("poisson", 900, 45, 0.0): 1}}), made({"": {SUM: 5}}, unknown="it resumed")):
        assert found.epsilon is None
        assert found.to_readers.because
        assert str(found.to_readers.because) in found.statement[0]
    assert made({}).epsilon == 0
    assert made({"": Counter()}).sums == 0


def test_a_claim_is_json_and_tells_if_noise_can_be_subtracted() -> None:
    found = made({"": {SUM: 300}}, simulated=True, covers=["Update"], does_not_cover=["DescriptorUpdate"])
    document = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert document["noise"] == "seed"
    assert document["covers"] == ["Update"]
    assert "DescriptorUpdate" in document["does_not_cover"]
    assert document["to_readers"]["epsilon"] == document["epsilon"]
    assert len(document["statement"]) == len(made({"": {SUM: 300}}).statement) + 1
    assert any("seed" in sentence for sentence in document["statement"])
