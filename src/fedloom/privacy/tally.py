"""Count of what a training has released, its ε, and the budget that ends it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from fedloom.privacy.accounting import EVERYONE, Release, epsilon_bound, epsilon_of

Counts = Mapping[str, Mapping[Release, int]]
"""Releases by the client whose examples they are about; :data:`EVERYONE` for sums over clients."""


Unit = Literal["clients", "examples"]
"""Unit that is protected: a client with all its data, or one training example of a client."""


class Tally:
    """Releases of a training so far. Not for use from several threads at once.

    Parameters
    ----------
    delta
        δ of the ε.
    limit
        Largest ε that the releases may reach; None for none.
    unit
        Unit that the releases are about.
    """

    def __init__(self, delta: float, limit: float | None = None, unit: Unit = "clients") -> None:
        self.delta = delta
        self.limit = limit
        self.unit = unit
        self.counts: dict[str, Counter[Release]] = {}
        self.is_known = True

    def restore(self, counts: Counts, *, is_known: bool) -> None:
        """Restore earlier releases; they count as unknown if some had no noise, or were not counted."""
        self.counts = {client: Counter(releases) for client, releases in counts.items()}
        self.is_known = is_known

    def add(self, releases: Counts) -> None:
        """Count releases."""
        for client, found in releases.items():
            self.counts.setdefault(client, Counter()).update(found)

    @property
    def epsilon(self) -> float:
        """ε toward readers of the trained models, for the client with the largest; inf if it is not known."""
        return epsilon_of(self.most(), self.delta) if self.is_known else math.inf

    @property
    def sums(self) -> int:
        """Number of releases that :attr:`epsilon` is about."""
        return sum(self.most().values())

    def most(self) -> Counter[Release]:
        """Return the releases about the client with the largest ε, those about everyone included."""
        return largest(self.counts, self.delta)

    def may_release(self, more: Counts) -> bool:
        """Return whether the budget allows these releases in addition to the earlier ones."""
        if self.limit is None:
            return True
        if not self.is_known:
            return False
        after = {who: self.counts.get(who, Counter()) + Counter(more.get(who, {})) for who in {*self.counts, *more}}
        everyone = after.pop(EVERYONE, Counter())
        changed = [releases for who, releases in after.items() if who in more or EVERYONE in more]
        each = _distinct(releases + everyone for releases in changed) or [everyone]
        return all(fits(counts, self.delta, self.limit) for counts in each)


def largest(counts: Counts, delta: float) -> Counter[Release]:
    """Return the releases about the client with the largest ε at δ, those about everyone included."""
    everyone = Counter(counts.get(EVERYONE, {}))
    each = _distinct(Counter(own) + everyone for client, own in counts.items() if client != EVERYONE) or [everyone]
    if len(each) == 1:
        return each[0]
    bounds = sorted(((epsilon_bound(found, delta), i) for i, found in enumerate(each)), reverse=True)
    best, least = each[bounds[0][1]], -1.0
    for bound, i in bounds:
        if bound <= least:  # no later client can have a larger ε
            break
        if (epsilon := epsilon_of(each[i], delta)) > least:
            best, least = each[i], epsilon
    return best


def is_same_for_all(counts: Counts) -> bool:
    """Return whether the same was released about every client that has releases."""
    return len(_distinct(Counter(own) for client, own in counts.items() if client != EVERYONE)) <= 1


def fits(counts: Mapping[Release, int], delta: float, limit: float) -> bool:
    """Return whether the ε of these releases is at most the limit; a bound decides where it can, which is fast."""
    return epsilon_bound(counts, delta) <= limit or epsilon_of(counts, delta) <= limit


def _distinct(each: Iterable[Counter[Release]]) -> list[Counter[Release]]:
    return [Counter(dict(found)) for found in {frozenset(counts.items()) for counts in each}]
