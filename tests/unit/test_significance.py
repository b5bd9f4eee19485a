"""The paired tests and intervals against scipy and artificial populations, and Holm's correction by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from fedloom.reporting.significance import (
    EXACT_UP_TO,
    RESAMPLES,
    hierarchical_bootstrap,
    holm,
    least_p,
    signed_rank_test,
    t_interval,
    t_test,
)


@pytest.mark.parametrize("n", [1, 2, 5, 12, 30, EXACT_UP_TO])
def test_without_ties_the_p_value_is_exact(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.3, 1, n)
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert signed_rank_test(differences.tolist()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_with_ties_and_zeros_every_sign_pattern_is_counted(seed: int) -> None:
    differences = np.random.default_rng(seed).integers(-2, 4, 10).astype(float)
    differences[0] = 0.0
    every = stats.PermutationMethod(n_resamples=np.inf)  # scipy flips all 2^n signs
    expected = stats.wilcoxon(differences, zero_method="pratt", method=every).pvalue
    assert signed_rank_test(differences.tolist()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [EXACT_UP_TO + 1, 3000])
def test_many_differences_use_scipys_approximation(n: int) -> None:
    differences = np.random.default_rng(n).integers(-20, 22, n).astype(float)
    expected = stats.wilcoxon(differences, zero_method="pratt", method="approx", correction=False).pvalue
    assert signed_rank_test(differences.tolist()) == pytest.approx(expected, rel=1e-9)


def test_only_zero_differences() -> None:
    assert signed_rank_test([0.0] * 5) == 1.0
    assert signed_rank_test([]) == 1.0


def test_holm_by_hand() -> None:
    # 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 * 1 raised to the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("seed", range(4))
def test_holm_equals_the_closed_test_of_all_intersections(seed: int) -> None:
    """Adjusted p of each: the largest Bonferroni p over the sets of hypotheses that contain it."""
    p = np.random.default_rng(seed).beta(0.3, 1, 7).tolist()
    sets = [s for size in range(1, 8) for s in itertools.combinations(range(7), size)]
    closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(7)]
    assert holm(p) == pytest.approx(closed, rel=1e-12)


def test_the_smallest_p_is_that_of_equal_signs() -> None:
    for n in (1, 2, 6, 10):
        assert least_p(n) == signed_rank_test([float(i) for i in range(1, n + 1)])
        assert least_p(n) == pytest.approx(stats.wilcoxon(np.arange(1, n + 1), method="exact").pvalue, rel=1e-12)
    assert least_p(0) == 1


@pytest.mark.parametrize("n", range(2, 13))
def test_the_t_test_and_its_interval_equal_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(0.4, 1, n).tolist()
    expected = stats.ttest_1samp(values, 0)
    assert t_test(values) == pytest.approx(expected.pvalue, rel=1e-9)
    for level in (0.5, 0.95, 0.999):
        assert t_interval(values, level) == pytest.approx(tuple(expected.confidence_interval(level)), rel=1e-9)


def test_a_t_test_by_hand() -> None:
    # Two seeds: t = 3 with one degree of freedom, whose distribution is Cauchy's: p = 1 - 2 atan(3) / π.
    assert t_test([1.0, 2.0]) == pytest.approx(1 - 2 * np.arctan(3) / np.pi)
    assert t_test([0.0, 0.0, 0.0]) == 1.0
    assert t_test([0.5, 0.5, 0.5]) == 0.0
    assert t_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_the_bootstrap_of_one_seed_resamples_its_clients() -> None:
    values = np.random.default_rng(1).normal(0.3, 1, 200)
    low, high = hierarchical_bootstrap([values.tolist()])
    expected = stats.bootstrap((values,), np.mean, n_resamples=9999, method="percentile", rng=1).confidence_interval
    error = values.std() / np.sqrt(200)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.15 * error)


def test_the_bootstrap_resamples_seeds_and_then_their_clients() -> None:
    """The spread is known: of s seed means drawn with replacement, and of the clients of each drawn seed."""
    random = np.random.default_rng(2)
    seeds = [random.normal(mean, 2.0, n).tolist() for mean, n in ((0.0, 20), (1.0, 30), (3.0, 10), (1.5, 40))]
    means = np.array([np.mean(of_seed) for of_seed in seeds])
    within = np.mean([np.var(of_seed) / len(of_seed) for of_seed in seeds])
    spread = np.sqrt((means.var() + within) / len(seeds))
    low, high = hierarchical_bootstrap(seeds, level=0.6826895)  # one standard deviation of a normal distribution
    assert (high - low) / 2 == pytest.approx(spread, rel=5 / np.sqrt(RESAMPLES))
    assert (high + low) / 2 == pytest.approx(means.mean(), abs=0.1 * spread)
    assert hierarchical_bootstrap(seeds) == hierarchical_bootstrap(seeds)


@pytest.mark.parametrize(
    ("seeds", "of_seeds", "of_clients", "by_bootstrap"),
    [(3, 1.0, 0.5, 0.75), (3, 0.2, 8.0, 0.98), (10, 1.0, 0.5, 0.90)],
)
def test_coverage_of_the_intervals(seeds: int, of_seeds: float, of_clients: float, by_bootstrap: float) -> None:
    """Draw trainings and clients from a population whose mean is 0, as described in docs/evaluation.md."""
    random, times, clients = np.random.default_rng(3), 250, 20
    student = bootstrap = pooled = 0
    for _ in range(times):
        values = random.normal(0, of_seeds, (seeds, 1)) + random.normal(0, of_clients, (seeds, clients))
        low, high = t_interval(values.mean(1).tolist())
        student += low <= 0 <= high
        low, high = hierarchical_bootstrap(values.tolist())
        bootstrap += low <= 0 <= high
        pooled += stats.ttest_1samp(values.reshape(-1), 0).pvalue >= 0.05
    error = 4 * np.sqrt(0.95 * 0.05 / times)
    assert student / times == pytest.approx(0.95, abs=error)
    assert bootstrap / times == pytest.approx(by_bootstrap, abs=0.06)
    if of_seeds > of_clients:
        assert pooled / times < 0.4  # a test over clients x seeds rejects most true null hypotheses


@pytest.mark.slow
def test_claims_about_a_reference_chosen_on_validation() -> None:
    """Eight equally good methods, three seeds, and validation correlated with test: docs/evaluation.md."""
    random, times, k, seeds = np.random.default_rng(4), 800, 8, 3
    named = chosen = excluded = 0
    for _ in range(times):
        values = random.normal(0, 1, (k, seeds))
        best = int(values.mean(1).argmax())  # by validation, in the worst case: it is as lucky as the test
        for reference in (0, best):
            others = [i for i in range(k) if i != reference]
            p = holm([t_test((values[reference] - values[i]).tolist()) for i in others])
            reported = [i for i, one in zip(others, p, strict=True) if one < 0.05]
            if reference == best:
                chosen += bool(reported)
                excluded += 0 in reported  # if row 0 is the best by a negligible difference
            if reference == 0:
                named += bool(reported)
    assert named / times < 0.05 + 3 * np.sqrt(0.05 * 0.95 / times)
    assert 0.05 < chosen / times < 0.12
    assert excluded / times < 0.03
