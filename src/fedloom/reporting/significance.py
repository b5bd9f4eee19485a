"""Paired tests of rows over clients and over seeds with Holm's correction, and intervals for a mean difference.

The clients of one training share its model, so the differences between two methods among them say nothing about
another training. Clients are therefore tested within a seed (:func:`signed_rank_test`), and trainings with one value
per seed (:func:`t_test`). Clients of several seeds are never pooled into one test as independent observations.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedloom.core.keyed import make_rng
from fedloom.reporting.run_results import Row, differences

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
    if not d.any():
        return 1.0
    if len(d) > EXACT_UP_TO:
        return float(stats.wilcoxon(d, zero_method="pratt", method="approx", correction=False).pvalue)
    ranks = stats.rankdata(np.abs(d))[d != 0]
    doubled = np.rint(2 * ranks).astype(np.int64)  # mean ranks are multiples of a half
    distribution = _rank_sums(doubled)
    total, positive = int(doubled.sum()), int(doubled[d[d != 0] > 0].sum())
    far = np.abs(2 * np.arange(total + 1) - total) >= abs(2 * positive - total)
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
    if len(set(values)) == 1:
        return 0.0 if values[0] else 1.0
    t = np.mean(values) / stats.sem(values)
    return float(2 * stats.t.sf(abs(t), len(values) - 1))


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return Student's confidence interval for the population mean of two or more values."""
    if len(set(values)) == 1:
        return values[0], values[0]
    low, high = stats.t.interval(level, len(values) - 1, np.mean(values), stats.sem(values))
    return float(low), float(high)


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
    seeds_drawn = (random.random((RESAMPLES, seeds)) * seeds).astype(np.int64)
    weights = np.zeros((RESAMPLES, sum(sizes)))
    first = np.concatenate([[0], np.cumsum(sizes)])
    for j, n in enumerate(sizes):
        resample, _ = np.nonzero(seeds_drawn == j)
        clients = (random.random((len(resample), n)) * n).astype(np.int64)
        np.add.at(weights, (resample[:, None], first[j] + clients), 1 / (n * seeds))
    return weights


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that all conclusions at a level hold jointly at that level.

    The k-th smallest of m is multiplied by m − k + 1, and is never less than a smaller one's.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statistics 6 (1979).
    """
    order = np.argsort(p, kind="stable")
    increasing = np.maximum.accumulate(np.minimum(np.asarray(p)[order] * np.arange(len(p), 0, -1), 1.0))
    adjusted = np.empty(len(p))
    adjusted[order] = increasing
    return [float(value) for value in adjusted]


def _rank_sums(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the distribution of Σ ranks with positive sign if every sign is a fair coin toss: ``[Σ ranks + 1]``."""
    distribution = np.zeros(int(ranks.sum()) + 1)
    distribution[0] = 1.0
    for rank in ranks:
        shifted = np.zeros_like(distribution)
        shifted[rank:] = distribution[:-rank]
        distribution = (distribution + shifted) / 2
    return distribution


@dataclass(frozen=True)
class Pair:
    """Paired comparison of two rows of a block; ``first`` and ``second`` are row indices, the better row first.

    Clients of a seed share one training. With one seed, the test is over clients, and concerns them under this one
    training. With several, it is over seeds, with one value each.

    Attributes
    ----------
    seeds
        Seeds in which both rows were measured on the same partition.
    clients, better, worse
        Numbers of paired clients over all those seeds: in total, with the first row better, and with it worse.
    median, mean
        Of the differences, first minus second: their median, and the mean over seeds of the mean over clients.
    interval, bootstrap
        95 % intervals of ``mean``: Student's t over seeds (None with one), and resampling seeds, then clients.
    p_of_seeds
        p-value of the signed-rank test over the clients of each seed.
    p, p_holm, p_against
        p-value: with one seed, of its signed-rank test; with several, of a t test over the seeds' mean differences.
        ``p`` is uncorrected; ``p_holm`` is corrected over all pairs of this group, ``p_against`` over those with a
        reference (None for others). None without pairs.
    why
        Reason why the two rows cannot be compared; empty if they can.
    """

    first: int
    second: int
    group: str
    seeds: tuple[int, ...] = ()
    clients: int = 0
    better: int = 0
    worse: int = 0
    median: float | None = None
    mean: float | None = None
    interval: tuple[float, float] | None = None
    bootstrap: tuple[float, float] | None = None
    p_of_seeds: tuple[float, ...] = ()
    p: float | None = None
    p_holm: float | None = None
    p_against: float | None = None
    why: str = ""

    @property
    def over(self) -> str:
        """Unit of observation of the test: ``seeds``, or ``clients`` of one seed."""
        return "seeds" if len(self.seeds) > 1 else "clients"

    @property
    def ends(self) -> tuple[float, float]:
        """95 % interval that suits the test, for a pair that was tested."""
        ends = self.interval or self.bootstrap
        assert ends is not None
        return ends

    def has(self, row: int) -> bool:
        """Return whether a row is one of the two."""
        return row in (self.first, self.second)

    def seen_from(self, row: int) -> Pair:
        """Return the same comparison with ``row`` first, if it is one of the two."""
        if row != self.second:
            return self
        turned = replace(self, first=self.second, second=self.first, better=self.worse, worse=self.better)
        median, mean = (None if value is None else -value for value in (self.median, self.mean))
        interval, bootstrap = (None if i is None else (-i[1], -i[0]) for i in (self.interval, self.bootstrap))
        return replace(turned, median=median, mean=mean, interval=interval, bootstrap=bootstrap)


def test_pairs(rows: Sequence[Row], blocks: Iterable[Sequence[int]], references: Set[int], group: str) -> list[Pair]:
    """Test all pairs of rows within each block for a group of clients, with Holm's correction.

    The correction is computed over all pairs, and again over pairs with a reference only: k - 1 for k rows. ``blocks``
    and ``references`` are indices of rows.
    """
    pairs = [_paired(rows, i, j, group) for members in blocks for i, j in itertools.combinations(members, 2)]
    over_all = _corrected([pair.p for pair in pairs])
    against = _corrected([None if references.isdisjoint((pair.first, pair.second)) else pair.p for pair in pairs])
    return [replace(pair, p_holm=a, p_against=b) for pair, a, b in zip(pairs, over_all, against, strict=True)]


def _corrected(p: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected by Holm's method over the available ones."""
    corrected = iter(holm([value for value in p if value is not None]))
    return [None if value is None else next(corrected) for value in p]


def _paired(rows: Sequence[Row], i: int, j: int, group: str) -> Pair:
    first, second = (j, i) if _rank_value(rows[j], group) > _rank_value(rows[i], group) else (i, j)
    a, b, sign = rows[first], rows[second], rows[first].headline.sign
    by_seed = differences(a, b, group)
    if reason := _untested(a, b, group, paired=bool(by_seed)):
        return Pair(first, second, group, why=reason)
    clients = list(itertools.chain(*by_seed.values()))
    means = [statistics.fmean(of_seed) for of_seed in by_seed.values()]
    p_of_seeds = tuple(map(signed_rank_test, by_seed.values()))
    several = len(means) > 1
    return Pair(
        first,
        second,
        group,
        seeds=tuple(by_seed),
        clients=len(clients),
        better=sum(sign * d > 0 for d in clients),
        worse=sum(sign * d < 0 for d in clients),
        median=statistics.median(clients),
        mean=statistics.fmean(means),
        interval=t_interval(means) if several else None,
        bootstrap=hierarchical_bootstrap(list(by_seed.values())),
        p_of_seeds=p_of_seeds,
        p=t_test(means) if several else p_of_seeds[0],
    )


def _untested(a: Row, b: Row, group: str, *, paired: bool) -> str:
    """Return why two rows cannot be compared; empty if they can."""
    for row in (a, b):
        if row.over_seeds(group) is None:
            return f"{row.label} has no result for {group} clients"
    if paired:
        return ""
    common = set(a.seeds) & set(b.seeds)
    return "their partitions differ despite the same seed" if common else "they have no seed in common"


def _rank_value(row: Row, group: str) -> float:
    return -math.inf if row.over_seeds(group) is None else row.headline.sign * row.mean(group)
