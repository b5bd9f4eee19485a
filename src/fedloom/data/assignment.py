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

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng, shuffled
from fedloom.core.words import first_of, pluralize
from fedloom.data.apportion import Mixes, quotas
from fedloom.data.datasets import Dataset, Pool, RawDataset
from fedloom.data.manifest import SPLITS, MeasuredOn
from fedloom.data.natural import assign_owners
from fedloom.data.scheme_base import ByClass, MixScheme, Reserved, partition_error, reserved_classes
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
    assert not isinstance(scheme, MeansScheme), "its examples are drawn (fedloom.data.assignment)"
    if not isinstance(scheme, NaturalScheme):
        return _assign_by_mix(official, classes, scheme, settings)
    owned = assign_owners(official, scheme, settings.validation_fraction, settings.seed, dataset)
    seen = draw_seen(len(owned.owners), settings.held_out_fraction, settings.seed)
    pools = [pool for pool, is_seen in zip(owned.training_pools, seen, strict=True) if is_seen]
    return Assignment(
        seen,
        owned.examples,
        np.sort(np.concatenate(owned.training_pools)),
        np.sort(np.concatenate(pools)),
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
    reserve = None
    if scheme.reserve is not None:
        train, test, reserve = reserved_classes(train, test, scheme.reserve, official.group)
    pools = scheme.pools(train, test, official.group, settings.validation_fraction, seed)
    available = {split: np.array([len(members) for members in pools[split]]) for split in SPLITS}
    mixes = scheme.mixes(available["train"], seen, seed)
    examples, notes = {}, _notes_on_copies(official)
    sizes: dict[str, int] = {}
    unused: list[str] = []
    for split in SPLITS:
        size = scheme.sizes(split, mixes, available[split], seen, seed)
        counts = quotas(mixes, size, available[split], seed, split)
        _refuse_shortfall(counts, size, mixes, split, scheme, available[split])
        examples[split] = _deal(pools[split], counts, seed, split)
        sizes[split] = int(counts.sum())
        if _leaves_unused(scheme, split, size, sizes[split], int(available[split].sum())):
            unused.append(split)
    if unused:
        demand, pool_sizes = mixes.sum(0), available[unused[0]]
        scarce = int(np.divide(pool_sizes, demand, out=np.full(classes, np.inf), where=demand > 0).argmin())
        idle = [str(c) for c in np.flatnonzero((demand == 0) & (pool_sizes > 0))]
        dealt = ", ".join(f"{sizes[split]:,} of {available[split].sum():,} {split} examples" for split in unused)
        reason = (
            f"no client has class {first_of(idle, 10)}"
            if idle
            else f"class {scarce} has {pool_sizes[scarce]:,} and limits all"
        )
        notes.append(f"only {dealt} are assigned: {reason}; use more clients, or another scheme")
    pool = np.sort(np.concatenate(pools["train"]))
    of_unseen = [mine for mine, is_seen in zip(examples["train"], seen, strict=True) if not is_seen]
    positions = np.setdiff1d(pool, np.concatenate(of_unseen), assume_unique=True) if of_unseen else pool
    return Assignment(seen, examples, pool, positions, (None,) * scheme.clients, reserve, tuple(notes))


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
        classes = len(np.unique(labels[0]))
        if classes < groups:
            raise ExperimentError(
                f"data.partition.quantiles: {groups} groups are not possible, because so many targets are equal that "
                f"only {classes} are not empty; use at most {max(classes, 2)}",
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


def _leaves_unused(scheme: MixScheme, split: str, size: NDArray[np.int64], used_size: int, available: int) -> bool:
    """Return True if a large part of a pool stays unassigned, although no limit requires that."""
    cap = scheme.cap(split)
    exact = isinstance(scheme, FixedScheme) or (isinstance(scheme, ImbalancedScheme) and split == "train")
    is_requested = exact or (cap is not None and bool((size >= cap).all()))
    return not is_requested and available - used_size > max(UNUSED * available, scheme.clients)


def _refuse_shortfall(
    counts: NDArray[np.int64],
    size: NDArray[np.int64],
    mixes: Mixes,
    split: str,
    scheme: MixScheme,
    available: NDArray[np.int64],
) -> None:
    """Reject a split in which a client has no example, lacks one of its classes, or falls short of an exact size."""
    if empty := int((counts.sum(1) == 0).sum()):
        remedy = " or a larger data.validation_fraction" if split == "validation" else ""
        absent = [str(c) for c in np.flatnonzero((available == 0) & (mixes > 0).any(0))]
        lacks = f", and lacks class {first_of(absent)}" if absent else ""
        raise partition_error(
            "clients",
            scheme.clients,
            f"leaves {empty} clients without a {split} example (the {split} pool has {available.sum()}{lacks})",
            f"use fewer clients{remedy}, or a scheme that needs less",
        )
    if isinstance(scheme, ClassesScheme) and split == "train":
        shortfall = int(((counts == 0) & (mixes > 0)).any(1).sum())
        if shortfall:
            raise partition_error(
                "classes_per_client",
                scheme.classes_per_client,
                f"leaves {shortfall} of {scheme.clients} clients without a training example of one of their classes",
                "use fewer classes per client, fewer clients, or less unequal shares",
            )
    if isinstance(scheme, ImbalancedScheme) and split == "train" and not np.array_equal(counts.sum(1), size):
        fault = f"would use nearly all of {available.sum():,} training examples, and the mixes cannot be met"
        raise partition_error("large_size", scheme.large_size, fault, "use smaller or fewer clients")


def client_means(scheme: MeansScheme, seen: NDArray[np.bool_], seed: int) -> NDArray[np.float64]:
    """Return the mean of every client, ``[n, dimension]``: m_0 for the first seen one, m_0 plus a bias for others."""
    d = scheme.dimension
    own = scheme.distance * _direction(seed, d, "user")
    means = np.tile(own + scheme.bias * _direction(seed, d, "helpers"), (scheme.clients, 1))
    for client in range(scheme.clients):
        means[client] += scheme.spread * _direction(seed, d, "spread", client)
    means[int(np.flatnonzero(seen)[0])] = own
    return means


def draw_means(
    source: Dataset, scheme: MeansScheme, settings: PartitionSettings
) -> tuple[Dataset, RawDataset, Assignment]:
    """Draw examples and assign them; also return the source with the shape of the examples.

    A client's validation examples are the last ``validation_fraction`` of those not used for testing.
    """
    seen = draw_seen(scheme.clients, settings.held_out_fraction, settings.seed)
    means = client_means(scheme, seen, settings.seed)
    pools = {}
    for split, size in (("train", scheme.train_per_client), ("test", scheme.test_per_client)):
        examples = [
            mean + scheme.noise * _normals(settings.seed, (size, scheme.dimension), "examples", split, client)
            for client, mean in enumerate(means)
        ]
        inputs = np.concatenate(examples).astype(np.float32)
        pools[split] = Pool(inputs, np.zeros(len(inputs), dtype=np.int64))
    held_out = min(max(1, round(settings.validation_fraction * scheme.train_per_client)), scheme.train_per_client - 1)
    positions = np.arange(len(pools["train"])).reshape(scheme.clients, -1)
    cut = scheme.train_per_client - held_out
    test = len(pools["train"]) + np.arange(len(pools["test"])).reshape(scheme.clients, -1)
    split_positions = {"train": list(positions[:, :cut]), "validation": list(positions[:, cut:]), "test": list(test)}
    pool = np.sort(positions[:, :cut].reshape(-1))
    train_positions = np.sort(positions[seen, :cut].reshape(-1))
    assignment = Assignment(seen, split_positions, pool, train_positions, (None,) * scheme.clients)
    shaped = dataclasses.replace(source, spec=scheme.drawn_spec(source.spec))
    return shaped, RawDataset(pools["train"], pools["test"]), assignment


def _normals(seed: int, shape: tuple[int, ...], *purpose: str | int) -> NDArray[np.float64]:
    """Return standard normal numbers by Box-Muller: numpy keeps only its uniform stream stable across releases."""
    uniform = make_rng(seed, "means", *purpose).random((2, *shape))
    normals: NDArray[np.float64] = np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * math.pi * uniform[1])
    return normals


def _direction(seed: int, dimension: int, *purpose: str | int) -> NDArray[np.float64]:
    """Return a random unit vector."""
    normals = _normals(seed, (dimension,), "direction", *purpose)
    direction: NDArray[np.float64] = normals / np.linalg.norm(normals)
    return direction
