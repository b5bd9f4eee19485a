"""Paired tests over clients and over seeds, corrected by Holm, and intervals for a mean difference.

The clients of one training share its model, so how far two methods differ among them says nothing of how far another
training would: clients are tested within a seed (:func:`signed_rank_test`), trainings by one number a seed
(:func:`t_test`). Clients of several seeds are never put into one test as if each were an observation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedloom.data.keyed import keyed_generator

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


def least_p(n: int) -> float:
    """Smallest p-value that :func:`signed_rank_test` can give for n differences: that of n signs which all agree."""
    return 2.0 ** min(0, 1 - n)


def t_test(values: Sequence[float]) -> float:
    """Two-sided p-value of Student's t test: is the mean of what these are a sample of 0?

    Parameters
    ----------
    values
        At least two: the mean difference of each seed.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).
    """
    mean, error = _mean_and_error(values)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 1 - _within(abs(mean) / error, len(values) - 1)


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's confidence interval of the mean that two or more values are a sample of."""
    mean, error = _mean_and_error(values)
    reach = error * _solved(lambda t: _within(t, len(values) - 1), level)
    return mean - reach, mean + reach


def clear_mean(n: int, p: float) -> float:
    """How many of its own standard deviations (ddof = 1) the mean of n ≥ 2 values must be from 0 for a t test's p."""
    return _solved(lambda t: _within(t, n - 1), 1 - p) / math.sqrt(n)


def hierarchical_bootstrap(values: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean over seeds of the mean over clients: seeds are drawn again, then their clients.

    With one seed clients alone are drawn. With few seeds it is too narrow where trainings differ more than clients: of
    3 seeds it covers 75 % there, of 10 it covers 90 %, where :func:`t_interval` covers 95 % of any number.

    Parameters
    ----------
    values
        For each seed one value per client, at least one.
    """
    flat = np.concatenate([np.asarray(of_seed, dtype=np.float64) for of_seed in values])
    means = _drawn_weights(tuple(len(of_seed) for of_seed in values)) @ flat
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


RESAMPLES = 2000
"""How often seeds and clients are drawn again."""


@lru_cache(maxsize=4)
def _drawn_weights(sizes: tuple[int, ...]) -> NDArray[np.float64]:
    """What each value counts in each resample, ``[RESAMPLES, Σ sizes]``: the same for all pairs of so many clients."""
    random, seeds = keyed_generator(0, "bootstrap"), len(sizes)
    picked = (random.random((RESAMPLES, seeds)) * seeds).astype(np.int64)
    weights = np.zeros((RESAMPLES, sum(sizes)))
    first = np.concatenate([[0], np.cumsum(sizes)])
    for j, n in enumerate(sizes):
        resample, _ = np.nonzero(picked == j)
        clients = (random.random((len(resample), n)) * n).astype(np.int64)
        np.add.at(weights, (resample[:, None], first[j] + clients), 1 / (n * seeds))
    return weights


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def _within(t: float, degrees: int) -> float:
    """Probability that a variable of Student's distribution is between -t and t.

    Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd, degrees - 1, 2):  # powers of the cosine
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _solved(increasing: Callable[[float], float], value: float) -> float:
    """Where a function that goes from 0 at 0 to 1 has a value, by bisection."""
    low, high = 0.0, 1.0
    while increasing(high) < value:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < value else (low, middle)
    return high


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
