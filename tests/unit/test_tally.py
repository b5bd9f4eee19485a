"""The count of releases, the client that released most, and the budget that ends training."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from work import lines_run

from fedloom.privacy.accounting import EVERYONE, Release, epsilon_of, gaussian_release, rounds_within, sampled
from fedloom.privacy.tally import Cohorts, Tally, fits, largest

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
