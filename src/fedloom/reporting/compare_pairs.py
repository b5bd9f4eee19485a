"""Paired tests of the rows of a comparison, client by client."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from fedloom.reporting.compare_rows import Row, differences
from fedloom.reporting.significance import hierarchical_bootstrap, holm, signed_rank_test, t_interval, t_test


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
    median
        Median of the differences, first minus second; None without pairs.
    mean
        Mean over seeds of the mean difference over clients.
    interval
        95 % interval of ``mean``, by Student's t over seeds; None with one seed.
    bootstrap
        95 % bootstrap interval of ``mean``, resampling seeds and, within each, clients; with one seed, clients only.
    p_of_seeds
        p-value of the signed-rank test over the clients of each seed.
    p, p_holm
        p-value: with one seed, of its signed-rank test; with several, of a t test over the seeds' mean differences.
        ``p`` is uncorrected; ``p_holm`` is corrected over all pairs of this group. None without pairs.
    p_against
        p corrected over this group's pairs with a reference only; None for other pairs.
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

    def turned(self) -> Pair:
        """Return the same comparison with first and second swapped."""
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
    found = iter(holm([value for value in p if value is not None]))
    return [None if value is None else next(found) for value in p]


def _paired(rows: Sequence[Row], i: int, j: int, group: str) -> Pair:
    first, second = (j, i) if _rank_value(rows[j], group) > _rank_value(rows[i], group) else (i, j)
    a, b, sign = rows[first], rows[second], rows[first].headline.sign
    by_seed = differences(a, b, group)
    if why := _untested(a, b, group, paired=bool(by_seed)):
        return Pair(first, second, group, why=why)
    found = list(itertools.chain(*by_seed.values()))
    means = [statistics.fmean(of_seed) for of_seed in by_seed.values()]
    p_of_seeds = tuple(map(signed_rank_test, by_seed.values()))
    several = len(means) > 1
    return Pair(
        first,
        second,
        group,
        seeds=tuple(by_seed),
        clients=len(found),
        better=sum(sign * d > 0 for d in found),
        worse=sum(sign * d < 0 for d in found),
        median=statistics.median(found),
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
