"""Partition: dealing a source's examples to clients, and writing what each client gets.

The mixes π_i of a scheme (``fedloom.data.schemes``) become example counts by one rule, applied to the train, the
validation and the test pool with the same π_i, so that a client's splits have one class mix:

1. *Size* (:func:`sizes`). Client i gets N_i = min over its classes of p_c / Σ_j π_jc examples, p_c being the number
   of examples of class c in the pool, or its cap if that is less. Since N_i π_ic ≤ p_c π_ic / Σ_j π_jc, no
   class runs out, whatever was drawn, and nothing is ever drawn again.
2. *Counts* (:func:`quotas`). N_i π_i is rounded to whole examples by largest remainders.
3. *Images*. Each class of each pool is shuffled and dealt out by these counts, so that no image is dealt twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedloom.data import sources
from fedloom.data.folders import data_root, locked, published, sync, write_durably
from fedloom.data.keyed import keyed_generator, shuffled
from fedloom.data.manifest import (
    SPLITS,
    VERSION,
    ClientEntry,
    Manifest,
    Normalization,
    read_manifest,
    read_shard,
    shard_path,
)
from fedloom.data.schemes import Mixes, Scheme, unseen_count
from fedloom.data.sources import Pool, Source
from fedloom.errors import DataError, ExperimentError

log = logging.getLogger("fedloom.data")

DEALING = 1
"""Version of the way examples are dealt: to be raised with every change that deals other examples."""


@dataclass(frozen=True)
class Dealing:
    """Everything that decides who gets what."""

    scheme: Scheme
    seed: int
    unseen_fraction: float
    validation_fraction: float

    def check(self, source: Source) -> None:
        """Refuse what cannot work with a source, without reading its data.

        Raises
        ------
        ExperimentError
            Naming the key, what was found and what is allowed.
        """
        if not 0 <= self.unseen_fraction < 1:
            raise ExperimentError(f"data.unseen_fraction: found {self.unseen_fraction}; allowed: 0 or more, below 1")
        if not 0 < self.validation_fraction < 1:
            raise ExperimentError(
                f"data.validation_fraction: found {self.validation_fraction}; allowed: between 0 and 1"
            )
        self.scheme.check(source.classes)


@dataclass(frozen=True, eq=False)
class Deal:
    """Who gets what.

    Attributes
    ----------
    seen
        ``[n]`` bool.
    examples
        For each split, one array of positions per client, ascending: in the official train set for train and
        validation, in the official test set for test.
    training_pool
        Positions in the official train set that are not held out for validation, ascending.
    """

    seen: NDArray[np.bool_]
    examples: Mapping[str, list[NDArray[np.int64]]]
    training_pool: NDArray[np.int64]


def partition(
    dataset: str,
    scheme: Scheme,
    *,
    seed: int,
    unseen_fraction: float,
    validation_fraction: float,
    root: Path | str | None = None,
    mend: bool = False,
) -> Path:
    """Return the folder of a partition, made now if no earlier call with the same inputs made it.

    The folder, ``<root>/partitions/<dataset>-<key>``, is named by a hash of everything that decides its content,
    and appears whole or not at all. Its bytes depend on nothing else.

    Parameters
    ----------
    dataset
        Name of a source that is on disk (``fedloom data fetch``).
    scheme, seed, unseen_fraction, validation_fraction
        As in the experiment file. Validation examples come from the official train set.
    root
        Data root; see :func:`~fedloom.data.folders.data_root`.
    mend
        Compare an existing folder with its hashes, and make it again if it is damaged. Without it an existing folder
        is returned as it is, and damage is an error where it is read.

    Raises
    ------
    ExperimentError
        If the settings cannot be met: the key, what was found and what is allowed.
    DataError
        If the data set is missing or damaged.
    """
    source = sources.find(dataset)
    dealing = Dealing(scheme, seed, float(unseen_fraction), float(validation_fraction))
    dealing.check(source)
    folder = data_root(root) / "partitions" / f"{source.name}-{_key(source, dealing)}"
    if folder.exists() and not mend:
        return folder
    with locked(folder):
        if folder.exists() and not (mend and _damaged(folder)):
            return folder
        train, test = sources.load(source, root)
        deal = deal_examples(train.labels, test.labels, source.classes, dealing)
        with published(folder) as staging:
            write(staging, source, train, test, dealing, deal)
    return folder


def deal_examples(
    train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], classes: int, dealing: Dealing
) -> Deal:
    """Deal the examples of a source to clients.

    Parameters
    ----------
    train_labels, test_labels
        ``[N]`` and ``[M]``, the labels of the official sets.
    classes
        C.

    Raises
    ------
    ExperimentError
        If a client would go without a train, validation or test example, or without one of the classes that its
        scheme deals it.
    """
    scheme, seed = dealing.scheme, dealing.seed
    n = scheme.clients
    unseen = shuffled(keyed_generator(seed, "unseen"), n)[: unseen_count(n, dealing.unseen_fraction)]
    seen = np.ones(n, dtype=np.bool_)
    seen[unseen] = False

    by_class = _split_by_class(train_labels, test_labels, classes, dealing)
    available = {split: np.array([len(members) for members in by_class[split]]) for split in SPLITS}
    mixes = scheme.mixes(available["train"], seen, seed)
    caps = {"train": scheme.train_per_client, "validation": None, "test": scheme.test_per_client}
    examples = {}
    for split in SPLITS:
        counts = quotas(mixes, sizes(mixes, available[split], caps[split]), available[split], seed, split)
        _refuse_empty(counts, mixes, split, dealing, int(available[split].sum()))
        examples[split] = _hand_out(by_class[split], counts, seed, split)
    return Deal(seen, examples, np.sort(np.concatenate(by_class["train"])))


def sizes(mixes: Mixes, available: NDArray[np.int64], cap: int | None = None) -> NDArray[np.int64]:
    """Return how many examples each client gets of a pool, ``[n]``.

    N_i = ⌊min_{c: π_ic > 0} p_c / Σ_j π_jc⌋, at most ``cap``. Equal mixes share a pool equally; under Dirichlet
    mixes, where every π_ic > 0, all clients get the same size, and the class in greatest demand sets it.

    Parameters
    ----------
    mixes
        π, ``[n, C]``.
    available
        p, ``[C]``: examples of each class in the pool.
    """
    demand = mixes.sum(0)
    per_unit = np.divide(available, demand, out=np.full(len(demand), np.inf), where=demand > 0)
    largest = np.where(mixes > 0, per_unit, np.inf).min(1)
    # What should be a whole number may come out just below it.
    whole: NDArray[np.int64] = np.floor(largest * (1 + 1e-12) + 1e-9).astype(np.int64)
    return whole if cap is None else np.minimum(whole, cap)


def quotas(
    mixes: Mixes, size: NDArray[np.int64], available: NDArray[np.int64], seed: int, split: str
) -> NDArray[np.int64]:
    """Round N_i π_i to whole examples by largest remainders, ``[n, C]``; no class exceeds ``available``.

    Each client first gets ⌊N_i π_ic⌋ of each class; the N_i - Σ_c ⌊N_i π_ic⌋ left over go to its classes of largest
    remainder that have examples to spare, clients choosing in random order. Where a pool is dealt out to its last
    examples, the last to choose may find none to spare in their classes: then another client gives one up and takes
    one of another class. Where no exchange is left either, a client goes without (fewer than C examples).
    """
    exact = mixes * size[:, None]
    counts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    remainders = exact - counts
    open_to = remainders > 1e-9  # [n, C]: may still be rounded up
    spare = available - counts.sum(0)
    missing = size - counts.sum(1)
    for client in shuffled(keyed_generator(seed, "round", split), len(size)):
        # Ties go to the class with most to spare.
        order = np.lexsort((-spare, -np.round(remainders[client], 9)))
        chosen = [c for c in order if spare[c] > 0 and open_to[client, c]][: missing[client]]
        counts[client, chosen] += 1
        spare[chosen] -= 1
        open_to[client, chosen] = False
        missing[client] -= len(chosen)
    for client in np.flatnonzero(missing):
        while missing[client] and _exchange(int(client), counts, open_to, spare, remainders):
            missing[client] -= 1
    return counts


def _exchange(
    client: int,
    counts: NDArray[np.int64],
    open_to: NDArray[np.bool_],
    spare: NDArray[np.int64],
    remainders: NDArray[np.float64],
) -> bool:
    """Get a client one more example by an exchange with another; False if there is no such exchange.

    Of all the others that hold a rounded-up example of a class that the client is open to, and are open to a class
    with examples to spare, the one whose mix suffers least.
    """
    rounded_up = (remainders > 1e-9) & ~open_to
    instead = np.where(open_to & (spare > 0), remainders, -np.inf)
    best = instead.max(1)
    for c in np.flatnonzero(open_to[client]):
        gain = np.where(rounded_up[:, c], best - remainders[:, c], -np.inf)
        other = int(gain.argmax())
        if gain[other] > -np.inf:
            d = int(instead[other].argmax())
            counts[other, c] -= 1
            counts[other, d] += 1
            counts[client, c] += 1
            spare[d] -= 1
            open_to[other, c], open_to[other, d], open_to[client, c] = True, False, False
            return True
    return False


def write(folder: Path, source: Source, train: Pool, test: Pool, dealing: Dealing, deal: Deal) -> Manifest:
    """Write a manifest and one shard per client into an empty folder, and return the manifest.

    A shard is a safetensors file with ``train_x`` [n, *input_shape] uint8, ``train_y`` [n] int64, and so on for
    validation and test.
    """
    shards = folder / "shards"
    shards.mkdir()
    pools = {"train": train, "validation": train, "test": test}
    width = max(4, len(str(len(deal.seen) - 1)))
    entries = []
    for client, is_seen in enumerate(deal.seen):
        tensors: dict[str, NDArray[np.uint8] | NDArray[np.int64]] = {}
        counts: dict[str, tuple[int, ...]] = {}
        for split in SPLITS:
            chosen = deal.examples[split][client]
            labels = pools[split].labels[chosen]
            tensors[f"{split}_x"], tensors[f"{split}_y"] = pools[split].images[chosen], labels
            counts[split] = tuple(np.bincount(labels, minlength=source.classes).tolist())
        # Without metadata: safetensors writes more than one key of it in any order.
        content = safetensors.numpy.save(tensors)
        name = f"client-{client:0{width}d}"
        # No wait for the disk: a shard that a power cut leaves short does not have its hash, and is found out.
        shard_path(folder, name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        train_size, validation_size, test_size = (len(deal.examples[split][client]) for split in SPLITS)
        entries.append(ClientEntry(name, bool(is_seen), train_size, validation_size, test_size, counts, digest))
    sync(shards)
    manifest = Manifest(
        version=VERSION,
        dataset=source.name,
        classes=source.classes,
        class_names=source.class_names,
        input_shape=source.input_shape,
        scheme=dealing.scheme.model_dump(mode="json"),
        seed=dealing.seed,
        unseen_fraction=dealing.unseen_fraction,
        validation_fraction=dealing.validation_fraction,
        normalization=normalization(train.images, deal.training_pool),
        source_sha256={file.name: file.sha256 for file in source.files},
        clients=tuple(entries),
    )
    write_durably(folder / "partition.json", manifest.to_json().encode())
    return manifest


def normalization(images: NDArray[np.uint8], pool: NDArray[np.int64]) -> Normalization:
    """Return mean and standard deviation of each channel over a pool, of pixels scaled to 0 ... 1.

    From counts of the 256 values, so that the sums are exact and the same on every machine.
    """
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = np.bincount(images[pool, channel].reshape(-1), minlength=256)
        total = int(counts.sum())
        first = sum(value * int(count) for value, count in enumerate(counts))
        second = sum(value * value * int(count) for value, count in enumerate(counts))
        means.append(first / total / 255)
        # A constant channel carries nothing; dividing by 1 keeps it at zero.
        stds.append(((total * second - first * first) ** 0.5 / total / 255) or 1.0)
    return Normalization(tuple(means), tuple(stds))


def _split_by_class(
    train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], classes: int, dealing: Dealing
) -> dict[str, list[NDArray[np.int64]]]:
    """Positions of each class in the three pools; validation is held out of train, class by class."""
    train = [np.flatnonzero(train_labels == c) for c in range(classes)]
    test = [np.flatnonzero(test_labels == c) for c in range(classes)]
    held_out = largest_remainders(np.array([len(members) for members in train]) * dealing.validation_fraction)
    parts: dict[str, list[NDArray[np.int64]]] = {"train": [], "validation": [], "test": test}
    for c, members in enumerate(train):
        order = members[shuffled(keyed_generator(dealing.seed, "validation", c), len(members))]
        parts["validation"].append(order[: held_out[c]])
        parts["train"].append(order[held_out[c] :])
    return parts


def largest_remainders(exact: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round numbers so that their sum is the rounded sum: down, then up where the remainder is largest."""
    counts: NDArray[np.int64] = np.floor(exact + 1e-9).astype(np.int64)
    missing = round(float(exact.sum())) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def _hand_out(
    members: list[NDArray[np.int64]], counts: NDArray[np.int64], seed: int, split: str
) -> list[NDArray[np.int64]]:
    """Deal each class out in a random order: ``counts`` [n, C] -> for each client, ascending positions."""
    hands: list[list[NDArray[np.int64]]] = [[] for _ in range(len(counts))]
    for c, positions in enumerate(members):
        order = positions[shuffled(keyed_generator(seed, "deal", split, c), len(positions))]
        for hand, share in zip(hands, np.split(order, np.cumsum(counts[:, c])), strict=False):
            hand.append(share)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def _refuse_empty(counts: NDArray[np.int64], mixes: Mixes, split: str, dealing: Dealing, pool: int) -> None:
    """Refuse a split in which a client has nothing, or lacks one of the classes it was dealt."""
    scheme = dealing.scheme
    empty = int((counts.sum(1) == 0).sum())
    if empty:
        remedy = "fewer clients, or a larger data.validation_fraction" if split == "validation" else "fewer clients"
        raise ExperimentError(
            f"data.partition.clients: found {scheme.clients}; {empty} of them would have no {split} example "
            f"(the {split} pool has {pool}); allowed: {remedy}"
        )
    if scheme.scheme == "classes" and split == "train":
        lacking = int(((counts == 0) & (mixes > 0)).any(1).sum())
        if lacking:
            raise ExperimentError(
                f"data.partition.classes_per_client: found {scheme.classes_per_client}; {lacking} of {scheme.clients} "
                "clients would have no training example of one of their classes; allowed: fewer classes per client, "
                "fewer clients, or less unequal shares"
            )


def _key(source: Source, dealing: Dealing) -> str:
    """Hash of everything that decides the content of a partition, 12 hex digits."""
    inputs = {
        "version": VERSION,
        "dealing": DEALING,
        "source": [source.name, {file.name: file.sha256 for file in source.files}],
        "scheme": dealing.scheme.model_dump(mode="json"),
        "seed": dealing.seed,
        "unseen_fraction": dealing.unseen_fraction,
        "validation_fraction": dealing.validation_fraction,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]


def _damaged(folder: Path) -> bool:
    """Whether a partition on disk is not what its manifest says; logs what is wrong."""
    try:
        for client in read_manifest(folder).clients:
            read_shard(folder, client)
    except DataError as error:
        log.warning("%s; making the partition again", str(error).splitlines()[0])
        return True
    return False
