"""Manifest of a federated data set: everything about it except the data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from fedloom.core import digests
from fedloom.data.folders import naming_owner
from fedloom.data.reserve import Reserved
from fedloom.data.spec import DataSpec, parse_document
from fedloom.errors import DataError, as_storage_error
from fedloom.storage.folder import read_file

if TYPE_CHECKING:
    from torch import Tensor

MeasuredOn: TypeAlias = Literal["seen", "pool"]
"""Training examples that normalization is measured on.

``seen``: all but those of unseen clients; ``pool``: all, as in publications that use the figures of a whole data set.
"""

CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Pattern of client ids. An id names a file, so it must not be able to name one in another folder."""

VERSION: Final = 4
FIX = "create it again: fedloom partition EXPERIMENT"
SPLITS = ("train", "validation", "test")

ClientId: TypeAlias = Annotated[str, Field(pattern=f"^{CLIENT_ID.pattern}$")]
Sha256: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class ClientEntry:
    """Manifest entry of one client.

    Attributes
    ----------
    id
        Stable id; also the name of its shard.
    seen
        True if the client takes part in training.
    train, validation, test
        Number of examples in each split.
    class_counts
        For each split, examples of each class ``[C]``; all zero where the split has no labels.
    sha256
        SHA-256 of the shard file, hex.
    owner
        Name of its natural owner in the source; None where examples were drawn without regard to owners.
    """

    id: ClientId
    seen: bool
    train: Size
    validation: Size
    test: Size
    class_counts: Mapping[str, tuple[Size, ...]]
    sha256: Sha256
    owner: str | None = None

    def size(self, split: str) -> int:
        """Return the number of examples in a split, given by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[split]


@dataclass(frozen=True)
class Manifest:
    """Federated data set without its data: each client's examples by split and class, and how the partition was made.

    Attributes
    ----------
    version
        Version of this format.
    dataset, spec
        Name of the source, and its inputs and targets, with the normalization of the training examples.
    scheme, seed, held_out_fraction, validation_fraction
        Settings that the partition was made with.
    source_sha256
        SHA-256 of each official file, hex, by name.
    clients
        Entries in order.
    reserved
        Examples or owners reserved for new clients; None if there are none.
    shift_groups
        Group of each client where labels are permuted or images rotated (``scheme.shift``); None if the data are
        unchanged.
    measured_on
        Examples that the normalization was measured on.
    """

    version: Literal[4]
    dataset: str
    spec: DataSpec
    scheme: Mapping[str, Any]
    seed: int
    held_out_fraction: float
    validation_fraction: float
    source_sha256: Mapping[str, str]
    clients: tuple[ClientEntry, ...]
    reserved: Reserved | None = None
    shift_groups: tuple[int, ...] | None = None
    measured_on: MeasuredOn = "seen"

    def __post_init__(self) -> None:
        """Raise ValueError if the clients contradict each other, the classes or the scheme."""
        if len({client.id for client in self.clients}) != len(self.clients):
            raise ValueError("a client id occurs twice")
        if self.shift_groups is not None and len(self.shift_groups) != len(self.clients):
            raise ValueError(f"shift_groups has {len(self.shift_groups)} numbers for {len(self.clients)} clients")

    @cached_property
    def roster(self) -> tuple[str, ...]:
        """Ids of the seen clients, in order."""
        return tuple(client.id for client in self.clients if client.seen)

    @cached_property
    def unseen(self) -> tuple[str, ...]:
        """Ids of the unseen clients, in order."""
        return tuple(client.id for client in self.clients if not client.seen)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, hex; identifies this partition."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def _entries(self) -> dict[str, ClientEntry]:
        return {client.id: client for client in self.clients}

    @cached_property
    def _owned(self) -> dict[str, ClientEntry]:
        return {client.owner: client for client in self.clients if client.owner is not None}

    def entry(self, client: str) -> ClientEntry:
        """Return the entry of a client; raise DataError if there is no such client."""
        if client not in self._entries and not self.clients:
            raise DataError(f"client {client!r} is not in the roster, which is empty")
        if client not in self._entries:
            first, last = self.clients[0].id, self.clients[-1].id
            allowed = first if first == last else f"one of its {len(self.clients)} clients, {first} to {last}"
            raise DataError(f"client {client!r} is not in the partition of {self.dataset}; choose {allowed}")
        return self._entries[client]

    def named(self, client: str) -> ClientEntry:
        """Return the entry of a client, given its id or its owner's name; raise DataError if there is none."""
        if client in self._owned:
            return self._owned[client]
        try:
            return self.entry(client)
        except DataError as error:
            owners = sorted(self._owned)
            also = f", or an owner's name, {owners[0]} to {owners[-1]}" if owners else ""
            raise DataError(f"{error}{also}") from None

    def class_proportions(self, clients: Sequence[str] | None = None) -> Tensor:
        """Return the class mixes π of train splits, ``[n, C]`` float64, default all clients; zeros if unlabelled."""
        import torch  # here, so that reading a manifest does not import torch

        entries = self.clients if clients is None else [self.entry(client) for client in clients]
        counts = torch.tensor([entry.class_counts["train"] for entry in entries], dtype=torch.float64)
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def to_json(self) -> str:
        """Return the canonical JSON: sorted keys, no spaces, and a digest of the rest at its end."""
        known = _ADAPTER.dump_python(self, mode="json")
        return digests.with_compact_digest(json.dumps(known, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the manifest") -> Manifest:
        """Return the manifest in a JSON text, which errors call ``source``.

        Raise DataError if it is damaged, of another version, or contradicts itself.
        """
        content = text.encode() if isinstance(text, str) else text
        manifest = parse_document(_ADAPTER, content, source, VERSION, FIX)
        fault = None if manifest.spec.is_normalized else "spec: the normalization is missing"
        if not manifest.clients and manifest.dataset != "own":  # clients may join later
            fault = "it has no clients"
        fault = fault or next(
            filter(None, (counts_fault(each, manifest.spec.classes) for each in manifest.clients)), None
        )
        try:
            manifest.fingerprint  # noqa: B018 - computed now, so that it fails here
        except ValueError as error:
            fault = f"scheme: {error}"
        if fault is not None:
            raise DataError(f"{source} is damaged: {fault}", hint=FIX)
        return manifest


_ADAPTER = TypeAdapter(Manifest)


def counts_fault(client: ClientEntry, classes: int) -> str | None:
    """Return a contradiction between a client's class counts, its sizes and the number of classes, or None."""
    if set(client.class_counts) != set(SPLITS):
        return f"class_counts of {client.id} has {sorted(client.class_counts)}; it must have {sorted(SPLITS)}"
    for split in SPLITS:
        size, counts = client.size(split), client.class_counts[split]
        if len(counts) != classes or sum(counts) not in (0, size):
            return f"class_counts of {client.id}: {split} must have {classes} counts, whose sum is {size} or 0"
    return None


def read_stored(path: Path, missing: str, hint: str, *, shared: bool = True) -> bytes:
    """Return the content of a file of a data set, which is ``shared`` if it is in the data root.

    Raise DataError with the message ``missing`` if it does not exist; DataError or StorageError if it cannot be read.
    """
    try:
        with naming_owner(path) if shared else nullcontext():
            return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{missing}: {path} does not exist", hint=hint) from None
    except OSError as error:
        if shared:
            raise as_storage_error(error) from error
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a partition on disk; raise DataError if it is missing or damaged."""
    path = folder / "partition.json"
    return Manifest.from_json(read_stored(path, "the manifest of a partition is missing", FIX), source=str(path))


def shard_path(folder: Path, client: str) -> Path:
    """Return the path of a client's shard in a partition."""
    return folder / "shards" / f"{client}.safetensors"


def read_shard(folder: Path, entry: ClientEntry) -> bytes:
    """Return the bytes of a client's shard; raise DataError if it is missing, or does not match its hash."""
    path = shard_path(folder, entry.id)
    content = read_stored(path, f"the shard of client {entry.id} is missing", FIX)
    check_shard(content, entry.sha256, str(path), FIX)
    return content


def check_shard(content: bytes, sha256: str, source: str, hint: str) -> None:
    """Check the bytes of a client's shard against their hash; raise DataError with the hint if they differ."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(f"the shard {source} is damaged: its sha256 is {digest}; it must be {sha256}", hint=hint)
