"""Assignment of examples to clients.

All schemes except ``natural`` and ``means`` assign by class mix. One rule turns the mixes π_i of a scheme
(``fedloom.data.schemes``) into example counts. It applies to the train, validation and test pools with the same π_i,
so that all splits of a client have the same class mix:
1. *Size* (:func:`~fedloom.data.apportion.feasible_sizes`). Client i gets N_i = min over its classes of p_c / Σ_j π_jc
   examples, where p_c is the number of examples of class c in the pool, or its cap if that is less. Since N_i π_ic ≤
   p_c π_ic / Σ_j π_jc, no class runs out, whatever the draw, and nothing is redrawn. A scheme that sets its own sizes
   gets them exactly or is rejected.
2. *Counts* (:func:`~fedloom.data.apportion.quotas`). N_i π_i is rounded to whole examples by largest remainders.
3. *Examples*. Each class of each pool is shuffled and dealt out by these counts, so that no example is assigned twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled
from fedloom.core.words import pluralize
from fedloom.data.apportion import Mixes, quotas
from fedloom.data.datasets import Dataset, RawDataset
from fedloom.data.manifest import SPLITS, MeasuredOn
from fedloom.data.natural import assign_owners
from fedloom.data.reserve import Reserved, reserved_classes
from fedloom.data.scheme_base import ByClass, MixScheme
from fedloom.data.schemes import (
    ClassesScheme,
    FixedScheme,
    ImbalancedScheme,
    MeansScheme,
    NaturalScheme,
    Scheme,
    unseen_count,
)
from fedloom.errors import ExperimentError

UNUSED = 0.2
"""Fraction of a pool that may stay unused without a note."""


@dataclass(frozen=True)
class PartitionSettings:
    """Settings that determine which client gets which example of a source."""

    scheme: Scheme
    seed: int
    held_out_fraction: float
    validation_fraction: float
    normalization: MeasuredOn = "seen"

    def check(self, source: Dataset) -> None:
        """Raise ExperimentError, naming the key, if the settings do not fit a data set; no data are read."""
        for key, found, fits, range_ in (
            ("held_out_fraction", self.held_out_fraction, 0 <= self.held_out_fraction < 1, "0 or more, and below 1"),
            ("validation_fraction", self.validation_fraction, 0 < self.validation_fraction < 1, "between 0 and 1"),
        ):
            if not fits:
                raise ExperimentError(
                    f"data.{key}: {found} is out of range; set it to a number {range_}", key=f"data.{key}", found=found
                )
        self.scheme.check_data(source.spec)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Examples of each client.

    Positions count the official train examples first, then the official test examples.

    Attributes
    ----------
    seen
        ``[n]`` bool.
    examples
        For each split, one array of positions per client, ascending.
    training_pool
        Positions that training examples were drawn from, ascending.
    measured
        Positions of the training pool that normalization is measured on, ascending: all that no unseen client holds.
    owners
        For each client, the name of its natural owner; None if it has none.
    reserved
        Examples or owners reserved for new clients; None if there are none.
    notes
        Sentences for the user: owners or examples left out, and repeated inputs.
    """

    seen: NDArray[np.bool_]
    examples: Mapping[str, list[NDArray[np.int64]]]
    training_pool: NDArray[np.int64]
    measured: NDArray[np.int64]
    owners: tuple[str | None, ...]
    reserved: Reserved | None = None
    notes: tuple[str, ...] = ()


def assign_examples(
    official: RawDataset,
    classes: int,
    settings: PartitionSettings,
    dataset: str = "the data set",
) -> Assignment:
    """Assign the examples of a source, which errors call ``dataset``, to clients.

    Raise ExperimentError if the scheme cannot be satisfied, or a client would get no train, validation or test example,
    or none of a class that its scheme assigns to it. ``classes`` is the number of classes, or of groups of examples.
    """
    scheme = settings.scheme
    assert not isinstance(scheme, MeansScheme), "its examples are drawn (fedloom.data.means)"
    if not isinstance(scheme, NaturalScheme):
        return _assign_by_mix(official, classes, scheme, settings)
    owned = assign_owners(official, scheme, settings.validation_fraction, settings.seed, dataset)
    seen = draw_seen(len(owned.owners), settings.held_out_fraction, settings.seed)
    measured = [pool for pool, is_seen in zip(owned.training_pools, seen, strict=True) if is_seen]
    return Assignment(
        seen,
        owned.examples,
        np.sort(np.concatenate(owned.training_pools)),
        np.sort(np.concatenate(measured)),
        owned.owners,
        owned.reserved,
        (*_notes_on_copies(official), *owned.notes),
    )


def _assign_by_mix(official: RawDataset, classes: int, scheme: MixScheme, settings: PartitionSettings) -> Assignment:
    """Assign examples by class mix; raise like :func:`assign_examples`."""
    seed = settings.seed
    seen = draw_seen(scheme.clients, settings.held_out_fraction, seed)
    train = _by_class(official.train.labels, classes)
    test = [members + len(official.train) for members in _by_class(official.test.labels, classes)]
    reserved = None
    if scheme.reserve is not None:
        train, test, reserved = reserved_classes(train, test, scheme.reserve, official.group)
    pools = scheme.pools(train, test, official.group, settings.validation_fraction, seed)
    available = {split: np.array([len(members) for members in pools[split]]) for split in SPLITS}
    mixes = scheme.mixes(available["train"], seen, seed)
    examples, notes = {}, _notes_on_copies(official)
    used: dict[str, int] = {}
    unused: list[str] = []
    for split in SPLITS:
        size = scheme.sizes(split, mixes, available[split], seen, seed)
        counts = quotas(mixes, size, available[split], seed, split)
        _refuse_shortfall(counts, size, mixes, split, scheme, available[split])
        examples[split] = _deal(pools[split], counts, seed, split)
        used[split] = int(counts.sum())
        if _unused(scheme, split, size, used[split], int(available[split].sum())):
            unused.append(split)
    if unused:
        notes.append(_note_unused(unused, used, available, mixes))
    pool = np.sort(np.concatenate(pools["train"]))
    of_unseen = [mine for mine, is_seen in zip(examples["train"], seen, strict=True) if not is_seen]
    measured = np.setdiff1d(pool, np.concatenate(of_unseen), assume_unique=True) if of_unseen else pool
    return Assignment(seen, examples, pool, measured, (None,) * scheme.clients, reserved, tuple(notes))


def grouped_by_target(official: RawDataset, groups: int) -> RawDataset:
    """Return the data set with the group of each example as its label: one, or quantiles of its target.

    Raise ExperimentError if the training targets have too few different values.
    """
    pools = official.train, official.test
    if groups == 1:
        labels = [np.zeros(len(pool), dtype=np.int64) for pool in pools]
    else:
        numbers = [pool.labels.reshape(-1) for pool in pools]
        edges = np.quantile(numbers[0], np.arange(1, groups) / groups) if len(numbers[0]) else np.zeros(groups - 1)
        labels = [np.searchsorted(edges, each, side="right").astype(np.int64) for each in numbers]
        found = len(np.unique(labels[0]))
        if found < groups:
            raise ExperimentError(
                f"data.partition.quantiles: {groups} groups are not possible, because so many targets are equal that "
                f"only {found} are not empty; use at most {max(found, 2)}",
                key="data.partition.quantiles",
                found=groups,
            )
    train, test = (replace(pool, labels=each) for pool, each in zip(pools, labels, strict=True))
    return replace(official, train=train, test=test)


def draw_seen(clients: int, held_out_fraction: float, seed: int) -> NDArray[np.bool_]:
    """Draw the clients that take part in training, ``[n]`` bool."""
    seen = np.ones(clients, dtype=np.bool_)
    seen[shuffled(make_rng(seed, "unseen"), clients)[: unseen_count(clients, held_out_fraction)]] = False
    return seen


def _by_class(labels: NDArray[np.int64], classes: int) -> list[NDArray[np.int64]]:
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def _deal(members: ByClass, counts: NDArray[np.int64], seed: int, split: str) -> list[NDArray[np.int64]]:
    """Deal each class out in random order: ``counts`` [n, C] -> ascending positions for each client."""
    hands: list[list[NDArray[np.int64]]] = [[] for _ in range(len(counts))]
    for c, positions in enumerate(members):
        order = positions[shuffled(make_rng(seed, "deal", split, c), len(positions))]
        for hand, share in zip(hands, np.split(order, np.cumsum(counts[:, c])), strict=False):
            hand.append(share)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def _notes_on_copies(official: RawDataset) -> list[str]:
    """Return notes on the repeated inputs of a local data set: their number, and those in both given splits."""
    if official.equal is None:
        return []
    notes, first_test = [], len(official.train)
    copies = len(official.equal) - len(np.unique(official.equal))
    if copies:
        repeat = pluralize(copies, "example repeats another's input", "examples repeat another's input")
        notes.append(f"{repeat}; equal inputs stay in one split")
    shared = np.isin(official.equal[first_test:], official.equal[:first_test])
    if shared.any():
        first = int(shared.argmax())
        those = f"{shared.sum():,} of {pluralize(len(shared), 'test example')}"
        pair = f"test example {first} and training example {official.equal[first_test + first]}"
        notes.append(
            f"the source's own split is kept: {those} have inputs that also occur in training (first: "
            f"{pair}); accuracy on them does not measure accuracy on new inputs. Remove one of each, or leave out "
            "the column of splits or the test data, so that FedLoom divides the examples"
        )
    return notes


def _unused(scheme: MixScheme, split: str, size: NDArray[np.int64], used: int, available: int) -> bool:
    """Return True if a large part of a pool stays unassigned, although no limit requires that."""
    cap = scheme.cap(split)
    exact = isinstance(scheme, FixedScheme) or (isinstance(scheme, ImbalancedScheme) and split == "train")
    asked = exact or (cap is not None and bool((size >= cap).all()))
    return not asked and available - used > max(UNUSED * available, scheme.clients)


def _note_unused(
    splits: Sequence[str], used: Mapping[str, int], available: Mapping[str, NDArray[np.int64]], mixes: Mixes
) -> str:
    """Return a note on the unassigned examples of these splits and on the class that limits the assignment."""
    demand, pool = mixes.sum(0), available[splits[0]]
    scarce = int(np.divide(pool, demand, out=np.full(len(demand), np.inf), where=demand > 0).argmin())
    dealt = ", ".join(f"{used[split]:,} of {available[split].sum():,} {split} examples" for split in splits)
    if idle := np.flatnonzero((demand == 0) & (pool > 0)).tolist():
        named = ", ".join(map(str, idle[:10])) + (", ..." if len(idle) > 10 else "")
        return (
            f"only {dealt} are assigned: no client's mix has class {named}. Use more clients or more classes per client"
        )
    return (
        f"only {dealt} are assigned: class {scarce} has {pool[scarce]:,} and limits each client whose mix has it. To "
        "use more, leave that class out, or choose a scheme that needs less of it"
    )


def _refuse_shortfall(
    counts: NDArray[np.int64],
    size: NDArray[np.int64],
    mixes: Mixes,
    split: str,
    scheme: MixScheme,
    available: NDArray[np.int64],
) -> None:
    """Reject a split in which a client has no example, lacks one of its classes, or falls short of an exact size."""
    empty = counts.sum(1) == 0
    if empty.any():
        remedy = "fewer clients, or a larger data.validation_fraction" if split == "validation" else "fewer clients"
        pool = f"the {split} pool has {available.sum()}"
        absent = np.flatnonzero((available == 0) & (mixes[empty] > 0).any(0))
        if len(absent):
            pool += f", and none of class {', '.join(map(str, absent))}, which these clients' mixes require"
            remedy = "a scheme without these classes in its mixes, such as natural, or data that have all classes"
        raise ExperimentError(
            f"data.partition.clients: of {scheme.clients} clients {empty.sum()} have no {split} example ({pool}); "
            f"use {remedy}",
            key="data.partition.clients",
            found=scheme.clients,
        )
    if isinstance(scheme, ClassesScheme) and split == "train":
        lacking = int(((counts == 0) & (mixes > 0)).any(1).sum())
        if lacking:
            raise ExperimentError(
                f"data.partition.classes_per_client: with {scheme.classes_per_client}, {lacking} of {scheme.clients} "
                "clients would have no training example of one of their classes; use fewer classes per client, fewer "
                "clients, or less unequal shares"
            )
    if isinstance(scheme, ImbalancedScheme) and split == "train" and not np.array_equal(counts.sum(1), size):
        raise ExperimentError(
            f"data.partition.large_size: {scheme.large_size} (small_size {scheme.small_size}) would use nearly all of "
            f"{available.sum():,} training examples, and the mixes cannot be met in whole examples; use smaller or "
            "fewer clients"
        )
