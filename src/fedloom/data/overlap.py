"""Overlap between new clients' examples and those that a run was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import SPLITS, Manifest
from fedloom.data.scheme_base import Shift
from fedloom.data.spec import input_key


@dataclass(frozen=True)
class Overlap:
    """Number of new clients' examples, by split, that the seen clients of a run trained on.

    Attributes
    ----------
    clients
        Number of new clients that have any.
    known_by
        Evidence: the reserve that both partitions share, or a comparison of all examples.
    """

    train: int
    validation: int
    test: int
    clients: int
    known_by: Literal["reserve", "examples"]

    @property
    def any(self) -> bool:
        """True if there is any overlap."""
        return self.clients > 0


def apart_by_reserve(trained_on: Manifest, new: Manifest) -> Overlap | None:
    """Return an empty overlap if the manifests prove it: one partition assigns the examples that the other reserves."""
    both = (trained_on, new)
    sides = {bool((manifest.scheme.get("reserve") or {}).get("deal")) for manifest in both}
    same = trained_on.reserved is not None and trained_on.reserved == new.reserved
    if same and len(sides) == 2 and trained_on.source_sha256 == new.source_sha256:
        return Overlap(0, 0, 0, 0, "reserve")
    return None


def overlap(trained_on: FederatedDataset, new: FederatedDataset) -> Overlap:
    """Compare every example of ``new``, inputs and target, with the train splits of the seen clients of ``trained_on``.

    Raise DataError if a shard is missing or damaged.
    """
    train_digests: set[bytes] = set()
    for client in trained_on.manifest.roster:
        train_digests.update(_digests(trained_on, client, trained_on.tensors(client), "train"))
    counts, clients = dict.fromkeys(SPLITS, 0), 0
    for entry in new.manifest.clients:
        shard = new.tensors(entry.id)
        client_counts = {
            split: sum(digest in train_digests for digest in _digests(new, entry.id, shard, split)) for split in SPLITS
        }
        clients += any(client_counts.values())
        counts = {split: counts[split] + client_counts[split] for split in SPLITS}
    return Overlap(counts["train"], counts["validation"], counts["test"], clients, "examples")


def _digests(dataset: FederatedDataset, client: str, shard: Mapping[str, Tensor], split: str) -> Iterator[bytes]:
    """Yield a digest for each example of a split, in its form before any shift."""
    manifest = dataset.manifest
    inputs = {name: shard[input_key(split, name)].numpy() for name in manifest.spec.inputs}
    targets = shard.get(f"{split}_y")
    y = np.full(manifest.entry(client).size(split), -1) if targets is None else targets.numpy()
    if manifest.shift_groups is not None:
        shift = Shift.model_validate(manifest.scheme["shift"])
        group = manifest.shift_groups[[entry.id for entry in manifest.clients].index(client)]
        inputs[""], y = shift.undone(inputs[""], y, group, manifest.spec.classes, manifest.seed)
    rows = [np.ascontiguousarray(each).reshape(len(each), -1) for each in inputs.values()]
    for *values, target in zip(*rows, y.reshape(len(y), -1), strict=True):
        digest = hashlib.blake2b(target.tobytes(), digest_size=16)
        for each in values:
            digest.update(each.tobytes())
        yield digest.digest()
