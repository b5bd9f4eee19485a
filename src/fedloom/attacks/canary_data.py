"""Partitions with canaries: copies of a partition with clients or examples that exist only for an audit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.files import copy_atomically, fill, make_private, storing, write_atomically
from fedloom.core.keyed import make_rng, shuffled
from fedloom.data.federated import FederatedDataset, Manifest
from fedloom.data.manifest import SPLITS, ClientEntry, shard_path
from fedloom.errors import ExperimentError, argument

NAME = "canary"
"""Prefix of the ids of canary clients."""

COPIED = 16
"""Maximum number of training examples of a canary client, which are copies of another client's."""


def canary_names(dataset: FederatedDataset, count: int) -> tuple[str, ...]:
    """Return ids of canary clients.

    Raise ExperimentError if the partition has clients of such names, because it holds canaries already.
    """
    names = tuple(f"{NAME}-{i:0{len(str(count - 1))}d}" for i in range(count))
    if conflicting := {client.id for client in dataset.manifest.clients}.intersection(names):
        raise ExperimentError(
            f"The partition {dataset.folder} has canaries already: {min(conflicting)}.", found=min(conflicting)
        )
    return names


def write_with_clients(dataset: FederatedDataset, folder: Path, names: Sequence[str], seed: int) -> Manifest:
    """Write a partition with canary clients beside the others; return its manifest.

    Each holds copies of a few training examples of a seen client, so that it can take part in a round like any client,
    and no validation or test examples, so that it enters no result.
    """
    random, hosts = make_rng(seed, "audit", "hosts"), dataset.manifest.roster
    entries: list[ClientEntry] = []
    make_private(folder / "shards")
    for name in names:
        tensors = dataset.tensors(hosts[int(random.random() * len(hosts))])
        shard = {key: each[: COPIED if key.startswith("train_") else 0].contiguous() for key, each in tensors.items()}
        entries.append(
            _write_shard(folder, ClientEntry(name, True, 0, 0, 0, {}, ""), shard, dataset.manifest.spec.classes)
        )
    _link(dataset, folder, [client.id for client in dataset.manifest.clients])
    groups = dataset.manifest.shift_groups
    manifest = replace(
        dataset.manifest,
        clients=(*dataset.manifest.clients, *entries),
        shift_groups=None if groups is None else (*groups, *[0] * len(entries)),
    )
    return _finish(folder, manifest)


@dataclass(frozen=True)
class CanaryExample:
    """Training example whose target is replaced by another, and which is either in the training set or left out.

    Attributes
    ----------
    client
        Client that it belongs to.
    place
        Position in its train split.
    target
        Class that replaces its own; for other tasks the position of the example in the train split whose target does.
    """

    client: str
    place: int
    target: int


def draw_examples(dataset: FederatedDataset, count: int, seed: int) -> tuple[CanaryExample, ...]:
    """Draw canaries among the training examples of seen clients, and wrong targets for them.

    Raise ExperimentError if they would be more than half of the examples, or the data have no targets.
    """
    manifest = dataset.manifest
    if not manifest.spec.outputs:
        raise ExperimentError(
            f"{argument('of')} examples needs data with targets, and {manifest.dataset} has none.", key="of"
        )
    sizes = [(client.id, client.train) for client in manifest.clients if client.seen]
    total = sum(size for _, size in sizes)
    if 2 * count > total:
        raise ExperimentError(
            f"{argument('canaries')} must be at most {total // 2}, half of the training examples (got {count}).",
            key="canaries",
            found=count,
        )
    random = make_rng(seed, "audit", "examples")
    positions = np.sort(shuffled(random, total)[:count])
    starts = np.cumsum([0, *(size for _, size in sizes)])
    owners = np.searchsorted(starts, positions, side="right") - 1
    labels: dict[str, Tensor] = {}
    examples = []
    for place, owner in zip((positions - starts[owners]).tolist(), owners.tolist(), strict=True):
        client, size = sizes[owner]
        if manifest.spec.classes:
            if client not in labels:
                labels[client] = dataset.tensors(client)["train_y"]
            shift = 1 + int(random.random() * (manifest.spec.classes - 1))
            target = (int(labels[client][place]) + shift) % manifest.spec.classes
        else:
            target = (place + 1 + int(random.random() * (size - 1))) % size
        examples.append(CanaryExample(client, place, target))
    return tuple(examples)


def canary_targets(y: Tensor, canaries: Sequence[CanaryExample], classes: int) -> Tensor:
    """Return the targets of canaries, all of one client, given the targets of its train split ``[n, ...]``."""
    targets = torch.tensor([canary.target for canary in canaries])
    return targets.to(y) if classes else y[targets.to(y.device)]


def write_with_examples(
    dataset: FederatedDataset, folder: Path, canaries: Sequence[CanaryExample], coins: NDArray[np.bool_]
) -> Manifest:
    """Write a partition that has the canaries that are in, with their wrong targets, and lacks the others.

    Return its manifest.
    """
    make_private(folder / "shards")
    by_client: dict[str, list[int]] = {}
    for i, canary in enumerate(canaries):
        by_client.setdefault(canary.client, []).append(i)
    entries = []
    for entry in dataset.manifest.clients:
        if entry.id not in by_client:
            entries.append(entry)
            continue
        of_client, tensors = [canaries[i] for i in by_client[entry.id]], dataset.tensors(entry.id)
        places = torch.tensor([canary.place for canary in of_client])
        y = tensors["train_y"].clone()
        y[places] = canary_targets(tensors["train_y"], of_client, dataset.manifest.spec.classes)
        stays = torch.ones(len(y), dtype=torch.bool)
        stays[places] = torch.from_numpy(coins[by_client[entry.id]])
        tensors = {
            key: each[stays] if key.startswith("train_") else each for key, each in {**tensors, "train_y": y}.items()
        }
        entries.append(_write_shard(folder, entry, tensors, dataset.manifest.spec.classes))
    _link(dataset, folder, [entry.id for entry in entries if entry.id not in by_client])
    return _finish(folder, replace(dataset.manifest, clients=tuple(entries)))


def _write_shard(folder: Path, entry: ClientEntry, tensors: Mapping[str, Tensor], classes: int) -> ClientEntry:
    """Write a shard; return the client's entry with its numbers."""
    content = safetensors.torch.save(dict(tensors))
    with storing(path := shard_path(folder, entry.id)):
        fill(path, content, durably=False, private=True)
    train, validation, test = (
        next(len(each) for key, each in tensors.items() if key.startswith(f"{split}_x")) for split in SPLITS
    )
    none = torch.zeros(0, dtype=torch.int64)
    counts = {
        split: tuple(torch.bincount(tensors.get(f"{split}_y", none), minlength=classes).tolist()) if classes else ()
        for split in SPLITS
    }
    return ClientEntry(
        entry.id, entry.seen, train, validation, test, counts, hashlib.sha256(content).hexdigest(), entry.owner
    )


def _link(dataset: FederatedDataset, folder: Path, clients: Sequence[str]) -> None:
    """Link the shards of unchanged clients into the new partition; copy them where the disk has no links."""
    dataset.verify(clients)
    for client in clients:
        source, target = dataset.shard_file(client), shard_path(folder, client)
        with suppress(OSError):
            os.link(source, target)
            continue
        copy_atomically(source, target, private=True)


def _finish(folder: Path, manifest: Manifest) -> Manifest:
    write_atomically(folder / "partition.json", manifest.to_json().encode())
    return manifest
