"""Claims of differential privacy: each toward its observer, and only about what happened."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Literal

import dp_accounting
import dp_accounting.pld
import pytest
from facts import mentions

from fedloom.privacy.accounting import Release, epsilon_of, gaussian_release, sampled
from fedloom.privacy.claim import Claim, claim
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.privacy.tally import Cohorts

SUM = sampled("poisson", 900, 45, 2.0)


def made(counts: dict[str, dict[Release, int]], *, simulated: bool = False, **rest: Any) -> Claim:
    how = {
        name: rest.pop(name) for name in ("secure", "unknown", "covers", "does_not_cover", "cohorts") if name in rest
    }
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


def accountant(*parts: tuple[dp_accounting.DpEvent, int]) -> float:
    """Return the ε of Gaussian mechanisms and Poisson samples of them, by the package's own accountant."""
    found = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    for event, count in parts:
        found.compose(event, count)
    epsilon: float = found.get_epsilon(1e-5)
    return epsilon


def cohorts_of(*members: int, release: Release, smallest: int) -> Cohorts:
    """Return cohorts in which the members were this often."""
    return Cohorts({f"client-{i}": Counter({release: times}) for i, times in enumerate(members)}, smallest)


def test_a_member_of_secure_sums_knows_the_cohorts_it_was_in() -> None:
    """Take the page's example: 50 of 1,000 clients in each of 300 rounds. One client was in 15 cohorts."""
    drawn = sampled("poisson", 1000, 50, 1.2)
    cohorts = cohorts_of(4, 15, 9, release=drawn, smallest=50)
    sampled_event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.2))
    central = made({"": {drawn: 300}}, secure=True, cohorts=cohorts)
    expected = accountant((sampled_event, 285), (dp_accounting.GaussianDpEvent(1.2), 15))
    assert central.to_members.epsilon == pytest.approx(expected, rel=2e-3)
    assert central.to_members.epsilon == pytest.approx(19.16, abs=0.01)
    assert (central.member_cohorts, central.to_members.amplified) == (15, False)
    assert central.epsilon == pytest.approx(4.139, abs=0.001)
    assert central.to_aggregator.epsilon is None
    distributed = made({"": {drawn: 300}}, secure=True, cohorts=cohorts, noise="distributed")
    # 34 of 50 shares are in each sum at least, and the member knows one.
    own = dp_accounting.GaussianDpEvent(1.2 * math.sqrt(33 / 34))
    assert distributed.to_members.epsilon == pytest.approx(accountant((sampled_event, 285), (own, 15)), rel=2e-3)
    assert distributed.to_aggregator.epsilon == pytest.approx(gaussian_epsilon(1.2, 1e-5, 300), rel=1e-6)
    text = " ".join(distributed.statement)
    assert mentions(text, "ε = 4.14", "ε = 19.6", "15 sums", "ε = 165")


def test_a_member_that_does_not_know_the_cohorts_is_a_reader_but_for_its_own_draw() -> None:
    poisson = made({"": {SUM: 300}})
    assert poisson.to_members == poisson.to_readers
    drawn = sampled("fixed", 40, 10, 20.0)
    fixed = made({"": {drawn: 30}}, sampling="fixed")
    assert fixed.to_members.epsilon == epsilon_of({sampled("fixed", 39, 10, 20.0): 30}, 1e-5)
    assert fixed.epsilon is not None
    assert fixed.to_members.epsilon is not None
    assert fixed.epsilon < fixed.to_members.epsilon
    secure = made(
        {"": {drawn: 30}}, sampling="fixed", secure=True, cohorts=cohorts_of(8, 3, release=drawn, smallest=10)
    )
    known = {sampled("fixed", 39, 10, 20.0): 22, drawn.without_sampling(): 8}
    assert secure.to_members.epsilon == epsilon_of(known, 1e-5)


def test_cohorts_that_were_not_recorded_are_known_to_every_member() -> None:
    for cohorts in (
        None,
        Cohorts({"": Counter({SUM: 300})}),
        Cohorts({"": Counter({SUM: 299}), "a": Counter({SUM: 1})}),
    ):
        found = made({"": {SUM: 300}}, secure=True, cohorts=cohorts)
        assert found.to_members.epsilon == pytest.approx(gaussian_epsilon(2.0, 1e-5, 300), rel=1e-6)
        assert found.member_cohorts == 300


def test_the_member_that_learns_most_is_reported() -> None:
    """The sum with less noise reveals more, so the member of most cohorts does not always learn most."""
    loud = sampled("poisson", 900, 45, 8.0)
    of = {"many": Counter({loud: 20}), "few": Counter({SUM: 6}), "less": Counter({SUM: 5})}
    found = made({"": {SUM: 50, loud: 50}}, secure=True, cohorts=Cohorts(of, 45))
    assert found.to_members.epsilon == epsilon_of({SUM: 44, SUM.without_sampling(): 6, loud: 50}, 1e-5)
    assert found.member_cohorts == 6


def test_a_client_in_all_rounds_knows_its_share_of_the_noise() -> None:
    everyone = Release(1.0, 3.0, 6, 6, "all")
    cohorts = cohorts_of(20, release=everyone, smallest=6)
    found = made({"": {everyone: 20}}, secure=True, cohorts=cohorts, noise="distributed")
    assert found.to_readers.epsilon == found.to_aggregator.epsilon
    assert found.to_members.epsilon == pytest.approx(gaussian_epsilon(3.0 * math.sqrt(3 / 4), 1e-5, 20), rel=1e-6)


def test_fixed_cohorts_are_accounted_under_replace_one() -> None:
    found = made({"": {sampled("fixed", 900, 45, 20.0): 30}}, sampling="fixed")
    assert (found.neighbouring, found.sampling) == ("replace-one", ("fixed",))


def test_the_claim_covers_the_client_with_most_example_releases() -> None:
    steps = sampled("poisson", 500, 32, 4.0)
    rare = sampled("poisson", 5000, 32, 4.0)
    found = made({"a": {steps: 100}, "b": {steps: 300, gaussian_release(5.0): 2}, "c": {rare: 400}}, of="examples")
    assert found.epsilon == epsilon_of({steps: 300, gaussian_release(5.0): 2}, 1e-5)
    assert found.to_members == found.to_aggregator == found.to_readers
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
