"""Paired tests over clients: Wilcoxon's signed ranks, corrected by Holm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EXACT_UP_TO = 100
"""Largest number of differences whose sign patterns are counted; beyond it the normal distribution is close."""


def signed_rank_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test: are differences as often, and as far, above 0 as below?

    Zeros are ranked with the others and then left out (Pratt 1959), so that many equal pairs make the test more
    cautious; ties share their mean rank. Given the ranks, every pattern of signs is equally likely under the null
    hypothesis: up to :data:`EXACT_UP_TO` differences the patterns are counted, which is exact with ties and zeros too;
    beyond, the sum of positive ranks is taken as normal with its mean Σr/2 and variance Σr²/4, without continuity
    correction.

    Parameters
    ----------
    differences
        One per pair. Equal differences must be equal floats: ties are found by comparing.

    Returns
    -------
    float
        p; 1 where all differences are 0, or there are none.

    Source: F. Wilcoxon, "Individual comparisons by ranking methods", Biometrics Bulletin 1 (1945); J. W. Pratt,
    "Remarks on zeros and ties in the Wilcoxon signed rank procedures", JASA 54 (1959).
    """
    d = np.asarray(differences, dtype=np.float64)
    ranks = mean_ranks(np.abs(d))
    ranks, positive = ranks[d != 0], d[d != 0] > 0
    if not len(ranks):
        return 1.0
    statistic = float(ranks[positive].sum())
    mean = float(ranks.sum()) / 2
    if len(d) > EXACT_UP_TO:
        z = (statistic - mean) / math.sqrt(float((ranks**2).sum()) / 4)
        return math.erfc(abs(z) / math.sqrt(2))
    distribution = _rank_sums(np.rint(2 * ranks).astype(np.int64))  # mean ranks are multiples of a half
    far = np.abs(np.arange(len(distribution)) - 2 * mean) >= abs(2 * statistic - 2 * mean)
    return min(1.0, float(distribution[far].sum()))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values so that all conclusions drawn at a level hold together at that level.

    The k-th smallest of m is multiplied by m − k + 1, and is never less than a smaller one's.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statistics 6 (1979).
    """
    adjusted = [0.0] * len(p)
    largest = 0.0
    for k, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - k) * p[i]))
        adjusted[i] = largest
    return adjusted


def mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: NDArray[np.float64] = (2 * last - counts + 1) / 2
    return shared[which]


def _rank_sums(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Distribution of Σ ranks with a positive sign, when every sign is a fair coin: ``[Σ ranks + 1]``."""
    distribution = np.zeros(int(ranks.sum()) + 1)
    distribution[0] = 1.0
    for rank in ranks:
        moved = np.zeros_like(distribution)
        moved[rank:] = distribution[:-rank]
        distribution = (distribution + moved) / 2
    return distribution
