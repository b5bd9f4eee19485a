"""Bounds on ε from attacks, against scipy, published values and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedloom.privacy.audit_bounds import (
    binomial_tail,
    epsilon_of_rates,
    one_run_epsilon,
    one_run_p_value,
    rate_bounds,
)


@given(st.integers(1, 400), st.floats(0, 1), st.data())
def test_the_tail_equals_that_of_the_binomial_distribution(n: int, p: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    # SciPy is less exact in far tails: near 1e-290 it is off by 1e-9, relative to rational arithmetic.
    assert binomial_tail(k, n, p) == pytest.approx(stats.binom.sf(k - 1, n, p), rel=1e-9, abs=1e-250)


@given(st.integers(1, 300), st.sampled_from([0.9, 0.95, 0.975]), st.data())
def test_rate_bounds_are_quantiles_of_beta_distributions(n: int, confidence: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = rate_bounds(k, n, confidence)
    assert low == pytest.approx(stats.beta.ppf(1 - confidence, k, n - k + 1) if k else 0.0, abs=1e-9)
    assert high == pytest.approx(stats.beta.ppf(confidence, k + 1, n - k) if k < n else 1.0, abs=1e-9)


def test_rates_without_trials_have_trivial_bounds() -> None:
    assert rate_bounds(0, 0, 0.95) == (0.0, 1.0)
    assert epsilon_of_rates(0, 0, 0, 0, delta=1e-5, confidence=0.95) == 0.0


def test_random_guessing_gives_epsilon_0() -> None:
    assert epsilon_of_rates(50, 100, 50, 100, delta=0.0, confidence=0.95) == 0.0


@pytest.mark.parametrize("counts", [(900, 1000, 10, 1000), (990, 1000, 100, 1000), (40, 1000, 1, 1000)])
def test_epsilon_is_the_larger_of_both_rate_ratios(counts: tuple[int, int, int, int]) -> None:
    tp, n1, fp, n0 = counts
    tpr = stats.beta.ppf(0.025, tp, n1 - tp + 1)
    fpr = stats.beta.ppf(0.975, fp + 1, n0 - fp)
    expected = max(math.log((tpr - 1e-3) / fpr), math.log((1 - fpr - 1e-3) / (1 - tpr)))
    assert epsilon_of_rates(tp, n1, fp, n0, delta=1e-3, confidence=0.95) == pytest.approx(expected, abs=1e-6)


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Compute theorem 5.2 of Steinke et al., term by term."""
    w = stats.binom(r, math.exp(epsilon) / (1 + math.exp(epsilon)))
    more = max((w.sf(v - i - 1) - w.sf(v - 1)) / i for i in range(1, m + 1))
    return min(1.0, w.sf(v - 1) + 2 * m * delta * more)


@given(st.integers(1, 60), st.floats(0, 4), st.sampled_from([0.0, 1e-5, 1e-2]), st.data())
def test_the_p_value_equals_that_of_the_theorem(m: int, epsilon: float, delta: float, data: st.DataObject) -> None:
    r = data.draw(st.integers(1, m))
    v = data.draw(st.integers(0, r))
    assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(p_value(m, r, v, epsilon, delta), rel=1e-8)


@pytest.mark.parametrize(
    ("m", "r", "v", "delta", "published"), [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)]
)  # Appendix D and section 7 of the paper
def test_bounds_of_one_run_equal_the_published_ones(m: int, r: int, v: int, delta: float, published: float) -> None:
    found = one_run_epsilon(m, r, v, delta=delta, confidence=0.95)
    assert found == pytest.approx(published, abs=1e-3)
    assert one_run_p_value(m, r, v, found, delta) <= 0.05 < one_run_p_value(m, r, v, found + 1e-6, delta)


def test_random_guesses_give_no_bound() -> None:
    assert one_run_epsilon(200, 100, 50, delta=1e-5, confidence=0.95) == 0.0
    assert one_run_epsilon(200, 0, 0, delta=1e-5, confidence=0.95) == 0.0


def test_all_right_guesses_give_a_bound_that_grows_with_their_number() -> None:
    found = one_run_epsilon(1000, 1000, 1000, delta=0.0, confidence=0.95)
    p = 0.05 ** (1 / 1000)
    assert found == pytest.approx(math.log(p / (1 - p)), abs=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_of_randomized_response_holds_in_19_of_20_runs(epsilon: float) -> None:
    random, m, p = np.random.default_rng(1), 500, 1 / (1 + math.exp(-epsilon))
    bounds = [one_run_epsilon(m, m, int((random.random(m) < p).sum()), delta=1e-6, confidence=0.95) for _ in range(400)]
    assert np.mean(np.array(bounds) <= epsilon) >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 400)
    assert np.mean(bounds) > 0.6 * epsilon  # randomized response is the tight case
