"""Paired tests over clients and over seeds with Holm's correction, and intervals for a mean difference.

The clients of one training share its model, so the differences between two methods among them say nothing about
another training. Clients are therefore tested within a seed (:func:`signed_rank_test`), and trainings with one value
per seed (:func:`t_test`). Clients of several seeds are never pooled into one test as independent observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedloom.data.keyed import make_rng

EXACT_UP_TO = 100
"""Maximum number of differences for the exact test; above it, the normal approximation is close."""


def signed_rank_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test that differences are symmetric about 0.

    Zeros are ranked with the others and then left out (Pratt 1959), so that many equal pairs make the test more
    conservative; ties share their mean rank. Given the ranks, every sign pattern is equally likely under the null
    hypothesis. Up to :data:`EXACT_UP_TO` differences, patterns are counted, which is exact also with ties and zeros.
    Above that, the sum of positive ranks is taken as normal with mean Σr/2 and variance Σr²/4, without continuity
    correction.

    Parameters
    ----------
    differences
        One difference per pair. Ties are found by comparison, so equal differences must be equal floats.

    Returns
    -------
    float
        p-value; 1 if all differences are 0 or there are none.

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
    """Return the smallest p-value that :func:`signed_rank_test` can give for n differences: when all signs agree."""
    return 2.0 ** min(0, 1 - n)


def t_test(values: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that the values' population mean is 0.

    Parameters
    ----------
    values
        At least two values: the mean difference of each seed.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).
    """
    mean, error = _mean_and_error(values)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 1 - _within(abs(mean) / error, len(values) - 1)


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return Student's confidence interval for the population mean of two or more values."""
    mean, error = _mean_and_error(values)
    reach = error * _solved(lambda t: _within(t, len(values) - 1), level)
    return mean - reach, mean + reach


def clear_mean(n: int, p: float) -> float:
    """Return the |mean|, in sample standard deviations (ddof = 1), at which a t test of n ≥ 2 values gives p."""
    return _solved(lambda t: _within(t, n - 1), 1 - p) / math.sqrt(n)


def hierarchical_bootstrap(values: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of the mean over seeds of the mean over clients, resampling seeds, then clients.

    With one seed, only clients are resampled. With few seeds, the interval is too narrow if trainings vary more than
    clients: in that case it covers 75 % with 3 seeds and 90 % with 10; :func:`t_interval` covers 95 % with any number.

    Parameters
    ----------
    values
        One value per client, at least one, for each seed.
    """
    flat = np.concatenate([np.asarray(of_seed, dtype=np.float64) for of_seed in values])
    means = _drawn_weights(tuple(len(of_seed) for of_seed in values)) @ flat
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


RESAMPLES = 2000
"""Number of bootstrap resamples."""


@lru_cache(maxsize=4)
def _drawn_weights(sizes: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the weight of each value in each resample, ``[RESAMPLES, Σ sizes]``; it depends on ``sizes`` alone."""
    random, seeds = make_rng(0, "bootstrap"), len(sizes)
    picked = (random.random((RESAMPLES, seeds)) * seeds).astype(np.int64)
    weights = np.zeros((RESAMPLES, sum(sizes)))
    first = np.concatenate([[0], np.cumsum(sizes)])
    for j, n in enumerate(sizes):
        resample, _ = np.nonzero(picked == j)
        clients = (random.random((len(resample), n)) * n).astype(np.int64)
        np.add.at(weights, (resample[:, None], first[j] + clients), 1 / (n * seeds))
    return weights


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def _within(t: float, degrees: int) -> float:
    """Return the probability that a variable with Student's distribution is between -t and t.

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
    """Return where an increasing function from 0 at 0 towards 1 has a value, by bisection."""
    low, high = 0.0, 1.0
    while increasing(high) < value:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < value else (low, middle)
    return high


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that all conclusions at a level hold jointly at that level.

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
    """Return ranks from 1; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: NDArray[np.float64] = (2 * last - counts + 1) / 2
    return shared[which]


def _rank_sums(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the distribution of Σ ranks with positive sign if every sign is a fair coin toss: ``[Σ ranks + 1]``."""
    distribution = np.zeros(int(ranks.sum()) + 1)
    distribution[0] = 1.0
    for rank in ranks:
        moved = np.zeros_like(distribution)
        moved[rank:] = distribution[:-rank]
        distribution = (distribution + moved) / 2
    return distribution
