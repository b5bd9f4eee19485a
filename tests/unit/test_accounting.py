"""The ε of noisy sums: against dp-accounting's own accountants, and against the exact Gaussian mechanism."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace

import dp_accounting as dp
import pytest
from facts import mentions
from work import bytes_held, lines_run

from fedloom.errors import ExperimentError
from fedloom.privacy import accounting
from fedloom.privacy.accounting import (
    EVERYONE,
    Release,
    epsilon_bound,
    epsilon_of,
    gaussian_release,
    least_multiplier,
    neighbouring_relation,
    rounds_within,
    sampled,
)
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon, noise_multiplier
from fedloom.privacy.tally import Cohorts, Tally, fits, largest

SETTINGS = [
    # population, cohort, rounds; multipliers for ε 8 and 2 by Rényi divergences (an upper bound) at δ = n^-1.1
    (90, 5, 5000, 1.95, 5.3),
    (900, 45, 5000, 2.03, 6.0),
    (900, 45, 400, 0.85, 1.9),
    (10_000, 100, 1500, 0.63, 1.07),
]


def poisson(z: float, q: float = 0.05) -> Release:
    return Release(q, z, None, None, "poisson")


def without_replacement(z: float, population: int = 900, cohort: int = 45) -> Release:
    return sampled("fixed", population, cohort, z)


def multiplier_for(epsilon: float, delta: float, release: Release, rounds: int) -> float:
    return least_multiplier(epsilon, lambda z: epsilon_of({replace(release, noise_multiplier=z): rounds}, delta))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m", "rounds", "at_8", "at_2"), SETTINGS)
def test_epsilon_of_poisson_samples_equals_dp_accountings(
    n: int, m: int, rounds: int, at_8: float, at_2: float
) -> None:
    delta = n**-1.1
    for z, by_renyi in ((at_8, 8), (at_2, 2)):
        own = dp.pld.PLDAccountant()
        own.compose(dp.PoissonSampledDpEvent(m / n, dp.GaussianDpEvent(z)), rounds)
        found = epsilon_of({sampled("poisson", n, m, z): rounds}, delta)
        assert found == pytest.approx(own.get_epsilon(delta), rel=0.01)
        assert found < by_renyi * 1.05  # figures with three digits, by a looser accountant


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m", "rounds", "at_8", "at_2"), SETTINGS[::2])
def test_calibrated_noise_spends_at_most_its_epsilon(n: int, m: int, rounds: int, at_8: float, at_2: float) -> None:
    delta = n**-1.1
    for epsilon, by_renyi in ((8.0, at_8), (2.0, at_2)):
        release = sampled("poisson", n, m, 1.0)
        z = multiplier_for(epsilon, delta, release, rounds)
        assert 0.98 * epsilon <= epsilon_of({replace(release, noise_multiplier=z): rounds}, delta) <= epsilon
        assert z < by_renyi * 1.02


def test_epsilon_without_replacement_uses_half_of_the_noise() -> None:
    """Replacing a clipped term changes a sum by up to 2C."""
    own = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    own.compose(dp.SampledWithoutReplacementDpEvent(900, 45, dp.GaussianDpEvent(12.0 / 2)), 5000)
    found = epsilon_of({without_replacement(12.0): 5000}, 1e-4)
    assert found == pytest.approx(own.get_epsilon(1e-4), rel=0.01)


def test_sampling_never_increases_epsilon() -> None:
    """The bound for samples without replacement exceeds that of no sampling at large rates."""
    for rate in (800, 899):
        found = epsilon_of({without_replacement(4.0, 900, rate): 10}, 1e-5)
        assert found <= gaussian_epsilon(2.0, 1e-5, 10)
    assert epsilon_of({poisson(4.0, 0.999): 10}, 1e-5) <= gaussian_epsilon(4.0, 1e-5, 10)


@pytest.mark.parametrize("z", [0.6, 2.0, 30.0])
@pytest.mark.parametrize("rounds", [1, 40])
def test_epsilon_without_sampling_is_exact(z: float, rounds: int) -> None:
    for release in (gaussian_release(z), sampled("poisson", 10, 10, z), Release(1.0, z, 10, 10, "poisson")):
        assert epsilon_of({release: rounds}, 1e-5) == pytest.approx(gaussian_epsilon(z, 1e-5, rounds), rel=1e-6)
    assert multiplier_for(2.0, 1e-5, gaussian_release(1.0), rounds) == pytest.approx(
        noise_multiplier(2.0, 1e-5, rounds), rel=2e-3
    )


def test_a_known_cohort_is_not_amplified() -> None:
    known = poisson(3.0).without_sampling()
    assert epsilon_of({known: 20}, 1e-5) == pytest.approx(gaussian_epsilon(3.0, 1e-5, 20), rel=1e-6)
    replaced = without_replacement(3.0).without_sampling()
    assert neighbouring_relation({replaced: 1}) == "replace-one"
    assert epsilon_of({replaced: 20}, 1e-5) == pytest.approx(gaussian_epsilon(1.5, 1e-5, 20), rel=1e-6)


@pytest.mark.slow
def test_different_releases_compose() -> None:
    """Compose a descriptor of each client, without sampling, and training."""
    own = dp.pld.PLDAccountant()
    own.compose(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.5)), 200)
    own.compose(dp.PoissonSampledDpEvent(0.02, dp.GaussianDpEvent(1.0)), 100)
    own.compose(dp.GaussianDpEvent(4.0), 3)
    found = {poisson(1.5): 200, poisson(1.0, 0.02): 100, gaussian_release(4.0): 3}
    assert epsilon_of(found, 1e-5) == pytest.approx(own.get_epsilon(1e-5), rel=0.01)
    together = epsilon_of(found, 1e-5)
    assert together > max(epsilon_of({release: count}, 1e-5) for release, count in found.items())


def test_sums_of_both_kinds_are_accounted_under_replace_one() -> None:
    mixed = {without_replacement(12.0): 100, gaussian_release(20.0): 3}
    assert neighbouring_relation(mixed) == "replace-one"
    assert neighbouring_relation({without_replacement(12.0): 0, gaussian_release(20.0): 3}) == "add-or-remove-one"
    own = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    own.compose(dp.SampledWithoutReplacementDpEvent(900, 45, dp.GaussianDpEvent(6.0)), 100)
    own.compose(dp.GaussianDpEvent(10.0), 3)
    assert epsilon_of(mixed, 1e-5) == pytest.approx(own.get_epsilon(1e-5), rel=0.01)


def test_the_bound_is_an_upper_bound_within_a_factor_of_6() -> None:
    for counts in (
        {poisson(1.5): 200, poisson(1.0, 0.02): 100, gaussian_release(4.0): 3},
        {poisson(0.5, 0.001): 3},
        {without_replacement(12.0): 100, gaussian_release(20.0): 3},
        {gaussian_release(4.0): 3},
    ):
        exact = epsilon_of(counts, 1e-5)
        assert exact * 0.999 <= epsilon_bound(counts, 1e-5) <= 6 * exact


@pytest.mark.slow
def test_many_sampling_rates_are_rounded_up() -> None:
    """Populations of an open federation vary: the ε is an upper bound, and close to that of the mean."""
    counts = {sampled("poisson", 900 + i, 45, 2.0): 5 for i in range(60)}
    found = epsilon_of(counts, 1e-5)
    largest = epsilon_of({sampled("poisson", 900, 45, 2.0): 300}, 1e-5)
    smallest = epsilon_of({sampled("poisson", 959, 45, 2.0): 300}, 1e-5)
    assert smallest < found < 1.03 * largest


@pytest.mark.slow
@pytest.mark.parametrize(("q", "z", "rounds"), [(1e-6, 0.5, 10**5), (0.3, 1e-12, 3), (0.05, 1e6, 5000), (0.5, 0.1, 10)])
def test_extreme_releases_use_little_memory_and_stay_within_the_bound(q: float, z: float, rounds: int) -> None:
    counts = {poisson(z, q): rounds}
    found: list[float] = []
    assert bytes_held(lambda: found.append(epsilon_of(counts, 1e-5))) < 200e6
    assert 0 <= found[0] <= epsilon_bound(counts, 1e-5)


def test_without_noise_epsilon_is_infinite() -> None:
    assert epsilon_of({poisson(0.0): 1}, 1e-5) == math.inf
    assert epsilon_of({poisson(0.0): 0}, 1e-5) == 0
    assert epsilon_of({}, 1e-5) == 0
    assert multiplier_for(math.inf, 1e-5, poisson(1.0), 10) == 0


def test_rounds_within_a_budget() -> None:
    release = poisson(2.0)
    rounds = rounds_within(3.0, 1e-5, release)
    assert rounds is not None
    assert epsilon_of({release: rounds}, 1e-5) <= 3 < epsilon_of({release: rounds + 1}, 1e-5)
    assert rounds_within(3.0, 1e-5, release, {release: 100}) == rounds - 100
    assert rounds_within(0.001, 1e-5, release, {release: 100}) == 0


def test_five_thousand_rounds_take_little_longer_than_ten() -> None:
    epsilon_of({poisson(2.0): 1}, 1e-5)  # imports the package, and makes the distribution of one sum
    assert lines_run(lambda: epsilon_of({poisson(2.0): 4999}, 1e-5)) < 3 * lines_run(
        lambda: epsilon_of({poisson(2.0): 10}, 1e-5)
    )


@pytest.mark.parametrize(
    "values", [(0.0, 1.0, "poisson"), (1.5, 1.0, "poisson"), (0.5, -1.0, "fixed"), (0.5, 1, "all")]
)
def test_invalid_releases_are_rejected(values: tuple[float, float, accounting.Sampling]) -> None:
    with pytest.raises(ValueError, match="got"):
        Release(values[0], values[1], 10, 5, values[2])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert epsilon_of({gaussian_release(2.0): 3}, 1e-5) == pytest.approx(gaussian_epsilon(2.0, 1e-5, 3))  # without it
    with pytest.raises(ExperimentError) as refused:
        epsilon_of({poisson(1.2345): 7}, 1e-5)
    assert mentions(str(refused.value), "dp-accounting", "fedloom[privacy]")
    assert refused.value.key == "federation.privacy"


# --- the count of releases, and the budget ----------------------------------------------------------------------------


SUM = sampled("poisson", 900, 45, 2.0)


def steps(examples: int) -> Release:
    return sampled("poisson", examples, 16, 1.5)


def test_the_budget_ends_before_it_is_exceeded() -> None:
    tally = Tally(1e-5, 1.0)
    reported = {EVERYONE: {SUM: 1}}
    while tally.may_release(reported):
        tally.add(reported)
    assert tally.sums == rounds_within(1.0, 1e-5, SUM)
    assert tally.epsilon <= 1.0
    assert Tally(1e-5).may_release({EVERYONE: {sampled("poisson", 9, 3, 0.0): 1}})


def test_the_largest_is_the_client_with_the_largest_epsilon() -> None:
    counts = {
        "many": Counter({steps(5000): 400}),
        "small": Counter({steps(100): 200}),
        "descriptors": Counter({steps(100): 190, gaussian_release(20.0): 1}),
    }
    each = {name: epsilon_of(found, 1e-5) for name, found in counts.items()}
    assert largest(counts, 1e-5) == counts[max(each, key=each.__getitem__)]
    with_sums = {**counts, EVERYONE: Counter({SUM: 50})}
    assert largest(with_sums, 1e-5) == counts[max(each, key=each.__getitem__)] + Counter({SUM: 50})
    assert largest({}, 1e-5) == Counter()


def test_an_example_budget_considers_the_clients_asked() -> None:
    tally = Tally(1e-5, 3.0)
    small, large = {"small": {steps(60): 1000}}, {"large": {steps(6000): 1000}}
    assert not tally.may_release(small)
    assert tally.may_release(large)
    tally.add(large)
    assert tally.epsilon == epsilon_of(large["large"], 1e-5)
    tally.add(small)
    assert tally.epsilon > 3
    assert tally.may_release(large)  # releases of other clients do not end it
    assert not tally.may_release({EVERYONE: {SUM: 1}})  # this also concerns the small client


def test_a_budget_allows_nothing_after_an_uncounted_release() -> None:
    tally = Tally(1e-5, 100.0)
    tally.restore({EVERYONE: {SUM: 1}}, Cohorts(), is_known=False)
    assert tally.epsilon == math.inf
    assert not tally.may_release({EVERYONE: {SUM: 1}})
    assert tally.sums == 1


@pytest.mark.slow
def test_a_thousand_clients_of_many_sizes_are_checked_quickly() -> None:
    tally = Tally(1e-5, 50.0)
    reported = {str(i): {steps(100 + i % 40): 10} for i in range(1000)}
    tally.add(reported)
    assert tally.may_release(reported)
    assert lines_run(lambda: tally.may_release(reported)) < 400 * len(reported)


def test_the_limit_is_decided_exactly() -> None:
    counts = Counter({SUM: 300})
    epsilon = epsilon_of(counts, 1e-5)
    assert fits(counts, 1e-5, epsilon)
    assert not fits(counts, 1e-5, epsilon * (1 - 1e-9))
    with pytest.raises(ValueError, match="rate"):
        Release(0.0, 1.0, None, None, "poisson")
