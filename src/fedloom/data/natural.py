"""The natural scheme: one client per owner, each with its own examples.

Every owner's examples are divided by themselves, before anything is drawn, so that what a client holds depends neither
on how many owners become clients nor on which. Exchangeable examples are divided at random, class by class. Examples
in time order that share content with their neighbours (windows of a text) are divided by time, with a gap before
what is held out, so that held-out windows share no text with training windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.data.apportion import stratified
from fedloom.data.keyed import keyed_generator, shuffled
from fedloom.data.reserve import Reserved, reserved_owners
from fedloom.data.schemes import NaturalScheme
from fedloom.data.sources import Official
from fedloom.errors import ExperimentError

TEST_FRACTION = 0.2
"""Part of an owner's examples that is for testing, where neither the data set nor the user divides them (as LEAF)."""


@dataclass(frozen=True, eq=False)
class Owned:
    """What the owners that became clients hold; see :class:`~fedloom.data.assignment.Assignment`."""

    owners: tuple[str, ...]
    examples: Mapping[str, list[NDArray[np.int64]]]
    training_pool: NDArray[np.int64]
    reserved: Reserved | None


def assign_owners(
    official: Official, scheme: NaturalScheme, validation_fraction: float, seed: int, dataset: str
) -> Owned:
    """Divide every owner's examples, and draw the owners that become clients.

    Raises
    ------
    ExperimentError
        If the data set has no owners, or fewer of them qualify than are asked for.
    """
    if official.owners is None or official.train.owners is None or official.test.owners is None:
        raise ExperimentError(
            f"data.partition.scheme: found natural, but nothing is known of whose the examples of {dataset} are; "
            "allowed: classes, dirichlet, dominant, imbalanced, fixed, iid",
            hint="with data of your own, data.source.client says whose an example is (docs/data.md)",
        )
    names = official.owners.names
    division = _Division(
        labels=np.concatenate([official.train.labels, official.test.labels]),
        first_test=len(official.train),
        overlap=official.owners.overlap,
        test_fraction=scheme.test_fraction or (None if official.owners.divided else TEST_FRACTION),
        validation_fraction=validation_fraction,
        seed=seed,
    )
    whose = np.concatenate([official.train.owners, official.test.owners])
    holdings = np.split(np.argsort(whose, kind="stable"), np.cumsum(np.bincount(whose, minlength=len(names)))[:-1])
    divided = [division.divide(name, mine) for name, mine in zip(names, holdings, strict=True)]
    allowed, reserved = np.ones(len(names), dtype=np.bool_), None
    if scheme.reserve is not None:
        allowed, reserved = reserved_owners(names, scheme.reserve)
    few = [bool(of) and sum(parts.sizes) < scheme.min_examples for of, parts in zip(allowed, divided, strict=True)]
    empty = [bool(of) and min(parts.sizes) == 0 for of, parts in zip(allowed, divided, strict=True)]
    qualified = [owner for owner in np.flatnonzero(allowed).tolist() if not few[owner] and not empty[owner]]
    wanted = len(qualified) if scheme.clients is None else scheme.clients
    if not qualified or wanted > len(qualified):
        key, found = ("min_examples", scheme.min_examples) if scheme.clients is None else ("clients", scheme.clients)
        bare = sum(is_empty and not is_few for is_empty, is_few in zip(empty, few, strict=True))
        raise ExperimentError(
            f"data.partition.{key}: found {found}; {len(qualified)} of {allowed.sum()} owners qualify: {sum(few)} have "
            f"fewer than {scheme.min_examples} examples (min_examples), and {bare} more would have no train, "
            f"validation or test example; allowed: {'at most ' + str(len(qualified)) + ', or ' if qualified else ''}"
            "a smaller min_examples, or another test_fraction or data.validation_fraction"
        )
    drawn = sorted(shuffled(keyed_generator(seed, "owners"), len(qualified))[:wanted].tolist())
    chosen = [qualified[place] for place in drawn]
    caps = {"train": scheme.train_per_client, "validation": None, "test": scheme.test_per_client}
    return Owned(
        owners=tuple(names[owner] for owner in chosen),
        examples={
            split: [division.thin_out(getattr(divided[owner], split), cap, names[owner], split) for owner in chosen]
            for split, cap in caps.items()
        },
        training_pool=np.sort(np.concatenate([divided[owner].train for owner in chosen])),
        reserved=reserved,
    )


@dataclass(frozen=True, eq=False)
class _Parts:
    """One owner's examples, divided: positions, ascending."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return len(self.train), len(self.validation), len(self.test)


@dataclass(frozen=True, eq=False)
class _Division:
    """How one owner's examples are divided: test first, then validation out of what is left.

    Attributes
    ----------
    labels
        Of all examples.
    first_test
        Position of the first official test example.
    test_fraction
        None: the official division stays.
    """

    labels: NDArray[np.int64]
    first_test: int
    overlap: int
    test_fraction: float | None
    validation_fraction: float
    seed: int

    def divide(self, name: str, mine: NDArray[np.int64]) -> _Parts:
        """Divide an owner's positions, ascending; a part may come out empty."""
        if self.test_fraction is None:
            train, test = mine[mine < self.first_test], mine[mine >= self.first_test]
        else:
            train, test = self._hold_out(mine, self.test_fraction, name, "test")
        train, validation = self._hold_out(train, self.validation_fraction, name, "validation")
        return _Parts(train, validation, test)

    def _hold_out(
        self, positions: NDArray[np.int64], fraction: float, name: str, split: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what is kept and what is held out: a fraction, at least one if there is one."""
        size = min(max(1, math.floor(fraction * len(positions) + 0.5)), len(positions))
        if self.overlap:
            cut = len(positions) - size
            return positions[: max(cut - self.overlap, 0)], positions[cut:]
        out = self._drawn(positions, size, name, "hold out", split)
        return positions[~out], positions[out]

    def thin_out(self, positions: NDArray[np.int64], cap: int | None, name: str, split: str) -> NDArray[np.int64]:
        """Return at most ``cap`` of the positions: evenly spaced in time, or drawn class by class."""
        if cap is None or len(positions) <= cap:
            return positions
        if self.overlap:
            return positions[np.arange(cap) * len(positions) // cap]
        return positions[self._drawn(positions, cap, name, "cap", split)]

    def _drawn(self, positions: NDArray[np.int64], size: int, *purpose: str) -> NDArray[np.bool_]:
        return stratified(self.labels[positions], size, keyed_generator(self.seed, "owner", *purpose))
