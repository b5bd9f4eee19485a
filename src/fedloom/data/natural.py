"""Natural scheme: one client per owner, each with its own examples.

Each owner's examples are split separately, before owners are drawn. A client's data therefore depend neither on the
number of owners that become clients nor on which ones do. Exchangeable examples are split at random, class by class.
Examples in time order that share content with their neighbours (windows of a text) are split by time, with a gap before
the held-out windows, so that these share no text with training windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled
from fedloom.core.words import first_of, pluralize
from fedloom.data.apportion import firsts_of, held_out, stratified_sample
from fedloom.data.datasets import RawDataset
from fedloom.data.manifest import SPLITS
from fedloom.data.scheme_base import Reserved, reserved_owners
from fedloom.data.schemes import NaturalScheme
from fedloom.errors import ExperimentError

TEST_FRACTION = 0.2
"""Fraction of an owner's examples for testing, where neither the data set nor the user sets a split (as in LEAF)."""


@dataclass(frozen=True, eq=False)
class Owned:
    """Examples of the owners that became clients; see :class:`~fedloom.data.assignment.Assignment`.

    The training examples of each client were drawn from its ``training_pools``, ascending positions.
    """

    owners: tuple[str, ...]
    examples: Mapping[str, list[NDArray[np.int64]]]
    training_pools: list[NDArray[np.int64]]
    reserved: Reserved | None
    notes: tuple[str, ...]


def assign_owners(
    official: RawDataset, scheme: NaturalScheme, validation_fraction: float, seed: int, dataset: str
) -> Owned:
    """Split every owner's examples, and draw the owners that become clients.

    Raise ExperimentError if the data set has no owners, or fewer of them qualify than requested.
    """
    if official.owners is None or official.train.owners is None or official.test.owners is None:
        raise ExperimentError(
            f"data.partition.scheme: natural needs owners, and {dataset} has none; choose classes, dirichlet, "
            "dominant, imbalanced, fixed or iid",
            hint="with your own data, name the owners' column at data.source.client (docs/data.md)",
            key="data.partition.scheme",
            found="natural",
        )
    names, group = official.owners.names, official.group
    division = _Division(
        labels=np.concatenate([official.train.labels, official.test.labels]),
        first_test=len(official.train),
        overlap=official.owners.overlap,
        test_fraction=scheme.test_fraction or (None if official.owners.divided else TEST_FRACTION),
        validation_fraction=validation_fraction,
        seed=seed,
        group=group,
        place=np.full(len(group), -1),
    )
    owners = np.concatenate([official.train.owners, official.test.owners])
    allowed, available, reserve, notes = _apart_from_reserve(names, owners, group, scheme)
    holdings = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners, minlength=len(names)))[:-1])
    divided = [division.divide(name, mine[available[mine]]) for name, mine in zip(names, holdings, strict=True)]
    qualified, left_out = _qualified_owners(names, allowed, divided, scheme)
    count = len(qualified) if scheme.clients is None else scheme.clients
    places = sorted(shuffled(make_rng(seed, "owners"), len(qualified))[:count].tolist())
    selected = [qualified[place] for place in places]
    caps = {"train": scheme.train_per_client, "validation": None, "test": scheme.test_per_client}
    return Owned(
        owners=tuple(names[owner] for owner in selected),
        examples={
            split: [division.thin_out(getattr(divided[owner], split), cap, names[owner], split) for owner in selected]
            for split, cap in caps.items()
        },
        training_pools=[divided[owner].train for owner in selected],
        reserved=reserve,
        notes=(*notes, *left_out),
    )


def _apart_from_reserve(
    names: Sequence[str], owners: NDArray[np.int64], group: NDArray[np.int64], scheme: NaturalScheme
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Reserved | None, tuple[str, ...]]:
    """Return the owners that may become clients, the examples that may be assigned, the reserve, and notes."""
    if scheme.reserve is None:
        return np.ones(len(names), dtype=np.bool_), np.ones(len(owners), dtype=np.bool_), None, ()
    allowed, reserve = reserved_owners(names, scheme.reserve)
    if not scheme.reserve.deal:
        return allowed, np.ones(len(owners), dtype=np.bool_), reserve, ()
    available = ~allowed[owners] | ~np.isin(group, group[~allowed[owners]])
    copies = int((~available).sum())
    note = f"{pluralize(copies, 'example')} of the reserved owners are left out: other owners have equal inputs"
    return allowed, available, reserve, (note,) if copies else ()


def _qualified_owners(
    names: Sequence[str], allowed: NDArray[np.bool_], divided: Sequence[_Parts], scheme: NaturalScheme
) -> tuple[list[int], tuple[str, ...]]:
    """Return the owners that can become clients, and a note that names the others with the reasons."""
    owners = np.flatnonzero(allowed).tolist()
    few = [owner for owner in owners if sum(map(len, divided[owner])) < scheme.min_examples]
    empty = [owner for owner in owners if min(map(len, divided[owner])) == 0 and owner not in {*few}]
    unfit = {*few, *empty}
    qualified = [owner for owner in owners if owner not in unfit]
    if not qualified or len(qualified) < (scheme.clients or 0):
        key, value = ("min_examples", scheme.min_examples) if scheme.clients is None else ("clients", scheme.clients)
        fewer = f"use at most {len(qualified)}, or " if qualified else "use "
        raise ExperimentError(
            f"data.partition.{key}: at {value}, {len(qualified)} of {len(owners)} owners qualify: {len(few)} have "
            f"fewer than {scheme.min_examples} examples (min_examples), and {len(empty)} more would have no train, "
            f"validation or test example; {fewer}a smaller min_examples, or another test_fraction or "
            "data.validation_fraction",
            key=f"data.partition.{key}",
            found=value,
        )
    reasons = ((few, f"fewer than {scheme.min_examples} examples (min_examples)"), (empty, "an empty split"))
    failures = [
        f"{first_of([names[owner] for owner in failing], 5)} ({len(failing)} with {reason})"
        for failing, reason in reasons
        if failing
    ]
    note = f"{len(unfit)} of {pluralize(len(names), 'owner')} cannot become clients: {'; '.join(failures)}"
    return qualified, (note,) if failures else ()


class _Parts(NamedTuple):
    """Positions of one owner's examples in each split, ascending."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Division:
    """Splitter of each owner's examples: test first, then validation from the rest.

    Attributes
    ----------
    first_test
        Position of the first official test example; without a ``test_fraction``, the official split is kept.
    group
        ``[n]``: the group of equal inputs that each example belongs to. A group stays in one split, also across owners;
        the first owner of the group determines which.
    place
        ``[n]``: the position in ``SPLITS`` of each group split so far, -1 for all others; filled in here.
    """

    labels: NDArray[np.int64]
    first_test: int
    overlap: int
    test_fraction: float | None
    validation_fraction: float
    seed: int
    group: NDArray[np.int64]
    place: NDArray[np.int64]

    def divide(self, name: str, mine: NDArray[np.int64]) -> _Parts:
        """Split an owner's positions, ascending; a part may be empty."""
        if self.overlap:
            return self._by_time(mine)
        is_given = self.test_fraction is None
        rest = mine[mine < self.first_test] if is_given else mine
        firsts = firsts_of(rest, self.group)
        place = self.place[self.group[firsts]]
        if self.test_fraction is not None:
            self._hold_out(firsts, place, self.test_fraction, name, "test")
        self._hold_out(firsts, place, self.validation_fraction, name, "validation")
        place[place < 0] = SPLITS.index("train")
        self.place[self.group[firsts]] = place
        train, validation, test = (rest[self.place[self.group[rest]] == split] for split in range(len(SPLITS)))
        return _Parts(train, validation, mine[mine >= self.first_test] if is_given else test)

    def _by_time(self, mine: NDArray[np.int64]) -> _Parts:
        """Split positions in time order: the last ones are held out, with a gap before them."""
        if self.test_fraction is None:
            train, test = mine[mine < self.first_test], mine[mine >= self.first_test]
        else:
            train, test = self._last(mine, self.test_fraction)
        train, validation = self._last(train, self.validation_fraction)
        return _Parts(train, validation, test)

    def _last(self, positions: NDArray[np.int64], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        boundary = len(positions) - held_out(fraction, len(positions))
        return positions[: max(boundary - self.overlap, 0)], positions[boundary:]

    def _hold_out(
        self, firsts: NDArray[np.int64], place: NDArray[np.int64], fraction: float, name: str, split: str
    ) -> None:
        """Draw groups for a split besides those already in it, and record them in ``place`` ``[len(firsts)]``."""
        own = SPLITS.index(split)
        candidates = place <= own  # not held out for a later split, which is drawn first
        free = np.flatnonzero(place < 0)
        size = held_out(fraction, int(candidates.sum())) - int((place == own).sum())
        if len(free) and size > 0:
            size = min(size, len(free))
            place[free[self._drawn(firsts[free], size, name, "hold out", split)]] = own

    def thin_out(self, positions: NDArray[np.int64], cap: int | None, name: str, split: str) -> NDArray[np.int64]:
        """Return at most ``cap`` of the positions: evenly spaced in time, or drawn class by class."""
        if cap is None or len(positions) <= cap:
            return positions
        if self.overlap:
            return positions[np.arange(cap) * len(positions) // cap]
        return positions[self._drawn(positions, cap, name, "cap", split)]

    def _drawn(self, positions: NDArray[np.int64], size: int, *purpose: str) -> NDArray[np.bool_]:
        return stratified_sample(self.labels[positions], size, make_rng(self.seed, "owner", *purpose))
