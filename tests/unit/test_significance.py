"""The paired test against scipy, and Holm's correction by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedloom.reporting.significance import EXACT_UP_TO, holm, signed_rank_test


@pytest.mark.parametrize("n", [1, 2, 5, 12, 30, EXACT_UP_TO])
def test_without_ties_the_p_value_is_the_exact_one(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.3, 1, n)
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert signed_rank_test(differences.tolist()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_with_ties_and_zeros_it_counts_every_pattern_of_signs(seed: int) -> None:
    differences = np.random.default_rng(seed).integers(-2, 4, 10).astype(float)
    differences[0] = 0.0
    every = stats.PermutationMethod(n_resamples=np.inf)  # scipy flips all 2^n signs
    expected = stats.wilcoxon(differences, zero_method="pratt", method=every).pvalue
    assert signed_rank_test(differences.tolist()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [EXACT_UP_TO + 1, 3000])
def test_many_differences_are_as_scipy_approximates_them(n: int) -> None:
    differences = np.random.default_rng(n).integers(-20, 22, n).astype(float)
    expected = stats.wilcoxon(differences, zero_method="pratt", method="approx", correction=False).pvalue
    assert signed_rank_test(differences.tolist()) == pytest.approx(expected, rel=1e-9)


def test_a_hand_made_case() -> None:
    # Ranks 1 (a zero), 2.5, 2.5, 4; positive: 2.5 + 4. As far from the mean 4.5 as 6.5, or farther: the sums 6.5 and
    # 2.5 (twice each), 9 and 0, six of the eight patterns.
    assert signed_rank_test([0.0, 1.0, -1.0, 2.0]) == pytest.approx(6 / 8)


def test_nothing_but_zeros() -> None:
    assert signed_rank_test([0.0] * 5) == 1.0
    assert signed_rank_test([]) == 1.0


def test_the_sign_of_all_differences_does_not_matter() -> None:
    differences = [0.01, 0.03, -0.02, 0.05, 0.0, 0.01]
    assert signed_rank_test(differences) == signed_rank_test([-d for d in differences])


def test_holm_by_hand() -> None:
    # 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 * 1 raised to the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
