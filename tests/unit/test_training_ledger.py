"""Total ε of a client's trainings and descriptors, against dp-accounting and integrals; lines of a ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from facts import refusing
from pydantic import ValidationError
from scipy.integrate import quad
from scipy.stats import multivariate_normal, norm

from fedloom.core import digests
from fedloom.core.words import rounded_up
from fedloom.errors import DataError, ExperimentError
from fedloom.ledger.ledger import PrivacyAccountant
from fedloom.ledger.training_cost import ClaimedTraining
from fedloom.privacy.accounting import Release, epsilon_of, gaussian_release, sampled
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon, noise_multiplier
from fedloom.privacy.spent import CountedRelease, PrivacyGuarantee, Spent, TrainingCost, released

Fedloom = Callable[..., tuple[int, str, str]]
REPLACE, ADD = dp.NeighboringRelation.REPLACE_ONE, dp.NeighboringRelation.ADD_OR_REMOVE_ONE
Z = noise_multiplier(1.0, 1e-5)


def training(*releases: tuple[Release, int], unit: str = "examples", epsilon: float = 2.0) -> TrainingCost:
    kinds = {release.sampling for release, _ in releases}
    relation = "replace-one" if "fixed" in kinds else "add-or-remove-one"
    counted = released(dict(releases)) if releases else None
    known = {"unit": unit, "neighbouring": relation, "epsilon": epsilon, "delta": 1e-5, "releases": counted}
    return TrainingCost.model_validate(known)


def poisson(rate: float, z: float) -> Release:
    return Release(rate, z, None, None, "poisson")


# --- replacing one unit -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "z", "count"), [(0.05, 1.0, 300), (0.01, 1.1, 1000), (0.3, 2.0, 20), (0.5, 5.0, 1)])
def test_epsilon_under_replace_one_equals_dp_accountings(rate: float, z: float, count: int) -> None:
    own = dp.pld.PLDAccountant(REPLACE)
    own.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), count)
    counts = {poisson(rate, z): count}
    found = epsilon_of(counts, 1e-5, replacing=True)
    assert found == pytest.approx(own.get_epsilon(1e-5), rel=0.01)
    one = dp.pld.PLDAccountant(ADD)
    one.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), count)
    assert one.get_epsilon(1e-5) < found
    away = epsilon_of(counts, 1e-5 / (1 + math.exp(found / 2)))  # removed, then another one added
    assert found <= 2 * away


@pytest.mark.parametrize("rate", [0.1, 0.7])
def test_one_sum_under_replace_one_equals_the_integral(rate: float) -> None:
    def density(x: float, at: float) -> float:
        return float((1 - rate) * norm.pdf(x, 0, 1.3) + rate * norm.pdf(x, at, 1.3))

    epsilon = epsilon_of({poisson(rate, 1.3): 1}, 1e-4, replacing=True)

    def beyond(x: float) -> float:
        return max(density(x, 1) - math.exp(epsilon) * density(x, -1), 0.0)

    assert quad(beyond, -15, 15, limit=500)[0] == pytest.approx(1e-4, rel=1e-3)


def test_opposite_terms_are_the_most_distinguishable() -> None:
    """Compare δ by integration on a grid in the plane, where terms need not lie on a line."""
    rate, epsilon, z = 0.3, 0.8, 1.0
    at = np.linspace(-8, 8, 401)
    grid = np.stack(np.meshgrid(at, at), axis=-1)
    cell = (at[1] - at[0]) ** 2

    def density(x: tuple[float, float]) -> Any:
        normal = multivariate_normal(mean=(0.0, 0.0), cov=z**2)
        return (1 - rate) * normal.pdf(grid) + rate * normal.pdf(grid - np.array(x))

    def delta(x: tuple[float, float], other: tuple[float, float]) -> float:
        return float(np.maximum(density(x) - math.exp(epsilon) * density(other), 0).sum() * cell)

    most = delta((1, 0), (-1, 0))
    random = np.random.default_rng(0)
    for angle, length, further in zip(*random.uniform(0, 1, (3, 20)), strict=True):
        turned = (further * math.cos(2 * math.pi * angle), further * math.sin(2 * math.pi * angle))
        assert delta((length, 0.0), turned) <= most * (1 + 1e-6)
        assert delta((1.0, 0.0), (turned[0] / further, turned[1] / further)) <= most * (1 + 1e-6)


def test_converting_to_replace_one_is_free_if_it_already_is() -> None:
    fixed = {sampled("fixed", 900, 45, 12.0): 100}
    assert epsilon_of(fixed, 1e-5, replacing=True) == epsilon_of(fixed, 1e-5)
    assert epsilon_of({gaussian_release(4.0): 3}, 1e-5, replacing=True) == pytest.approx(gaussian_epsilon(2, 1e-5, 3))


# --- totals -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["examples", "clients"])
def test_the_total_of_training_and_descriptors_uses_the_accountant(unit: str) -> None:
    """A Gaussian event of the package has the noise for adding one: replacing one changes it by twice as much."""
    own = dp.pld.PLDAccountant(REPLACE)
    own.compose(dp.PoissonSampledDpEvent(0.032, dp.GaussianDpEvent(1.1)), 200)
    for _ in range(3):
        own.compose(dp.GaussianDpEvent(2 * Z))
    spent = Spent((Z, Z, Z), (training((poisson(0.032, 1.1), 200), unit=unit),))
    found = spent.total(1e-5)
    assert found.epsilon == pytest.approx(own.get_epsilon(1e-5), rel=0.01)
    assert (found.delta, found.is_basic) == (1e-5, False)
    alone = Spent(trainings=spent.trainings).total(1e-5).epsilon, gaussian_epsilon(Z, 1e-5, 3)
    assert max(alone) < found.epsilon < sum(alone)


def test_the_total_with_fixed_size_sums_uses_renyi_divergences() -> None:
    own = dp.rdp.RdpAccountant(neighboring_relation=REPLACE)
    own.compose(dp.SampledWithoutReplacementDpEvent(900, 45, dp.GaussianDpEvent(6.0)), 100)
    own.compose(dp.GaussianDpEvent(Z), 2)
    found = Spent((Z, Z), (training((sampled("fixed", 900, 45, 12.0), 100)),)).total(1e-5)
    assert found.epsilon == pytest.approx(own.get_epsilon(1e-5), rel=0.01)


def test_two_trainings_and_several_kinds_of_sums_compose() -> None:
    own = dp.pld.PLDAccountant(REPLACE)
    own.compose(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(2.0)), 100)
    own.compose(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(1.5)), 50)
    own.compose(dp.GaussianDpEvent(20.0), 7)
    trainings = (
        training((poisson(0.05, 2.0), 60), (gaussian_release(20.0), 7)),
        training((poisson(0.05, 2.0), 40), (poisson(0.02, 1.5), 50), unit="clients"),
    )
    assert Spent((), trainings).total(1e-5).epsilon == pytest.approx(own.get_epsilon(1e-5), rel=0.01)


def test_fixed_size_samples_keep_the_amplification_of_other_trainings() -> None:
    fixed, drawn = training((sampled("fixed", 900, 45, 12.0), 100)), training((poisson(0.01, 1.0), 1000))
    halves = Spent(trainings=(fixed,)).total(5e-6).epsilon + Spent((Z,), (drawn,)).total(5e-6).epsilon
    found = Spent((Z,), (fixed, drawn)).total(1e-5)
    assert found.epsilon == pytest.approx(halves, rel=1e-9)
    assert found.epsilon < 0.1 * epsilon_of(fixed.counts + drawn.counts, 1e-5, replacing=True)
    assert (found.delta, found.is_basic) == (1e-5, False)


def test_epsilon_of_a_claim_without_its_mechanism_is_added() -> None:
    found = Spent((Z,), (training(epsilon=1.5),)).total(1e-6)
    assert found.is_basic
    assert found.epsilon == pytest.approx(gaussian_epsilon(Z, 1e-6) + 3.0)
    assert found.delta == pytest.approx(1e-6 + (1 + math.exp(1.5)) * 1e-5)
    replaced = training(epsilon=1.5).model_copy(update={"neighbouring": "replace-one"})
    assert Spent((), (replaced,)).total(1e-6) == type(found)(1.5, 1e-5, is_basic=True)
    assert Spent().total(1e-5).epsilon == 0.0
    assert Spent((), (training(epsilon=1e9),)).total(1e-5).delta > 1  # finite, but no guarantee


def test_meaningless_releases_are_rejected() -> None:
    good = {"rate": 0.1, "noise_multiplier": 1.0, "sampling": "poisson", "times": 3}
    CountedRelease.model_validate(good)
    for bad in ({"rate": 0.0}, {"rate": 1.5}, {"noise_multiplier": 0.0}, {"times": 0}, {"sampling": "round"}):
        with pytest.raises(ValidationError):
            CountedRelease.model_validate({**good, **bad})
    with pytest.raises(ValidationError):
        TrainingCost.model_validate({**training().model_dump(), "unit": "hospitals"})


# --- the file ---------------------------------------------------------------------------------------------------------


def request(z: float = Z, delta: float = 1e-5) -> PrivacyGuarantee:
    return PrivacyGuarantee(1.0, delta, 1.0, z, 50)


def claimed(digest: str = "a", *releases: tuple[Release, int]) -> ClaimedTraining:
    return ClaimedTraining("wards", digest, training(*(releases or ((poisson(0.05, 2.0), 60),))))


def test_a_ledger_has_one_total_of_trainings_and_requests(tmp_path: Path) -> None:
    path = tmp_path / "l"
    accountant = PrivacyAccountant(path)
    assert accountant.add_training(claimed())
    assert not accountant.add_training(claimed())  # the same run
    reported = accountant.charge(request(), where="here")
    assert accountant.add_training(claimed("b"))  # another one with equal settings
    counts = {poisson(0.05, 2.0): 60, gaussian_release(2 * Z): 1}
    assert reported.total_epsilon == epsilon_of(counts, 1e-5, replacing=True)
    assert (reported.requests, reported.trainings, reported.total_delta) == (1, 1, 1e-5)
    found = accountant.content()
    assert found.total.epsilon == epsilon_of({**counts, poisson(0.05, 2.0): 120}, 1e-5, replacing=True)
    assert [line["version"] for line in found.lines] == [3, 2, 3]
    assert json.loads(path.read_text().splitlines()[0])["delta"] == 1e-5


def test_training_is_counted_beyond_the_budget_and_then_stops_requests(tmp_path: Path) -> None:
    alone = epsilon_of({poisson(0.05, 2.0): 60}, 1e-5, replacing=True)
    accountant = PrivacyAccountant(tmp_path / "l", budget=alone / 2)
    assert accountant.add_training(claimed())
    before = (tmp_path / "l").read_bytes()
    with refusing(ExperimentError, rounded_up(alone, 4)):
        accountant.charge(request())
    assert (tmp_path / "l").read_bytes() == before
    total = Spent((Z,), (claimed().cost,)).total(1e-5).epsilon
    assert PrivacyAccountant(tmp_path / "l", budget=total).charge(request()).total_epsilon == total


def test_any_flipped_bit_of_a_training_or_a_request_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "l"
    PrivacyAccountant(path).add_training(claimed())
    PrivacyAccountant(path).charge(request(), where="here")
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"l, line \d"):
            PrivacyAccountant(path).charge(request(), where="here")
        assert path.read_bytes() == changed


@pytest.mark.parametrize("lacking", ["unit", "claim", "releases.times", "delta"])
def test_an_invalid_training_line_is_rejected(tmp_path: Path, lacking: str) -> None:
    path = tmp_path / "l"
    PrivacyAccountant(path).add_training(claimed())
    first, second = path.read_bytes().splitlines(keepends=True)
    line = {key: value for key, value in json.loads(second).items() if key not in ("digest", lacking)}
    if lacking == "releases.times":
        del line["releases"][0]["times"]
    path.write_bytes(first + digests.line_of(line, json.loads(first)["digest"]))
    with refusing(DataError, "line 2"):
        PrivacyAccountant(path).content()


def test_a_missing_ledger_is_an_error(tmp_path: Path, fedloom: Fedloom) -> None:
    code, _, errors = fedloom("ledger", tmp_path / "nowhere")
    assert (code, "nowhere" in errors) == (3, True)
    assert not (tmp_path / "nowhere").exists()
