"""Count of what a training has released, its ε, and the budget that ends it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedloom.privacy.accounting import EVERYONE, Release, epsilon_bound, epsilon_of
from fedloom.privacy.settings import least_survivors

Counts = Mapping[str, Mapping[Release, int]]
"""Releases by the client whose examples they are about; :data:`EVERYONE` for sums over clients."""


Unit = Literal["clients", "examples"]
"""Unit that is protected: a client with all its data, or one training example of a client."""


@dataclass
class Cohorts:
    """Cohorts of noisy sums over clients, as far as their members know them: each knows those that it was in.

    Attributes
    ----------
    of
        Sums by client that was asked for its part; :data:`EVERYONE` for sums whose cohorts were not recorded, which
        count as known to all.
    smallest
        Least number of clients that stayed in a cohort until its sum was known; None without one.
    """

    of: dict[str, Counter[Release]] = field(default_factory=dict)
    smallest: int | None = None

    def add(self, release: Release, clients: Collection[str] | None, times: int = 1) -> None:
        """Record the cohort of a sum; None if it is not known."""
        for client in (EVERYONE,) if clients is None else set(clients):
            self.of.setdefault(client, Counter())[release] += times

    def note(self, stayed: int) -> None:
        """Record how many clients stayed in a cohort; none does in an empty one, which has no sum."""
        if stayed:
            self.smallest = min(stayed, self.smallest or stayed)

    def most(self) -> list[Counter[Release]]:
        """Return the sums that a member knows, for each member of which no other knows all these and more."""
        recorded = self.of.get(EVERYONE, Counter())
        counts_found = _distinct(own + recorded for client, own in self.of.items() if client != EVERYONE) or [recorded]
        return [one for one in counts_found if not any(one < other for other in counts_found)]

    @property
    def shares(self) -> int:
        """Least number of shares of noise in a sum, if its clients add it."""
        return least_survivors(self.smallest or 0)


def toward_members(
    releases: Mapping[Release, int], counts_known: Mapping[Release, int], shares: int = 0
) -> Counter[Release]:
    """Return releases as seen by a client of the federation that knows the cohorts of the sums ``counts_known``.

    Sampling hides nothing in these. If the noise of a sum consists of at least so many ``shares``, the member also
    knows its own one, and the rest of the noise is smaller by √((shares − 1) / shares). In the other sums it was not
    drawn.
    """
    result = Counter[Release]()
    factor = math.sqrt(1 - 1 / shares) if shares else 1.0
    for release, count in releases.items():
        seen = min(count, counts_known.get(release, 0))
        plain = release.without_sampling()
        result[replace(plain, noise_multiplier=plain.noise_multiplier * factor)] += seen
        result[release.beside()] += count - seen
    return +result


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
        self.cohorts = Cohorts()
        self.is_known = True

    def restore(self, counts: Counts, cohorts: Cohorts, *, is_known: bool) -> None:
        """Restore earlier releases; they count as unknown if some had no noise, or were not counted."""
        self.counts = {client: Counter(releases) for client, releases in counts.items()}
        self.cohorts, self.is_known = cohorts, is_known

    def add(self, releases: Counts, cohort: Collection[str] | None = None) -> None:
        """Count releases; those about everyone are sums over this cohort."""
        for client, counts in releases.items():
            self.counts.setdefault(client, Counter()).update(counts)
        for release, times in releases.get(EVERYONE, {}).items():
            self.cohorts.add(release, cohort, times)

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

    def may_release(self, additional: Counts) -> bool:
        """Return whether the budget allows these releases in addition to the earlier ones."""
        if self.limit is None:
            return True
        if not self.is_known:
            return False
        total = {
            client: self.counts.get(client, Counter()) + Counter(additional.get(client, {}))
            for client in {*self.counts, *additional}
        }
        everyone = total.pop(EVERYONE, Counter())
        changed_counts = [
            releases for client, releases in total.items() if client in additional or EVERYONE in additional
        ]
        each = _distinct(releases + everyone for releases in changed_counts) or [everyone]
        return all(fits(counts, self.delta, self.limit) for counts in each)


def largest(counts: Counts, delta: float) -> Counter[Release]:
    """Return the releases about the client with the largest ε at δ, those about everyone included."""
    everyone = Counter(counts.get(EVERYONE, {}))
    each = _distinct(Counter(own) + everyone for client, own in counts.items() if client != EVERYONE) or [everyone]
    if len(each) == 1:
        return each[0]
    bounds = sorted(((epsilon_bound(releases, delta), i) for i, releases in enumerate(each)), reverse=True)
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
    return [Counter(dict(items)) for items in {frozenset(counts.items()) for counts in each}]
