"""Manifest of a federated data set: everything about it except the data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from fedloom.core import digests
from fedloom.core.words import first_of
from fedloom.data.folders import check_digest, parse_document, read_stored
from fedloom.data.scheme_base import Reserved
from fedloom.data.spec import DataSpec
from fedloom.errors import DataError

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

    def entry(self, client: str) -> ClientEntry:
        """Return the entry of a client; raise DataError if there is no such client."""
        if client not in self._entries:
            raise DataError(
                f"client {client!r} is not in the partition of {self.dataset}; its clients are "
                f"{first_of([*self._entries], 5) or 'none yet'}"
            )
        return self._entries[client]

    def named(self, client: str) -> ClientEntry:
        """Return the entry of a client, given its id or its owner's name; raise DataError if there is none."""
        by_owner = {entry.owner: entry for entry in self.clients if entry.owner is not None}
        if client not in by_owner and client not in self._entries and by_owner:
            raise DataError(
                f"client {client!r} is not in the partition of {self.dataset}; its owners are {first_of([*by_owner])}"
            )
        return by_owner[client] if client in by_owner else self.entry(client)

    def class_proportions(self, clients: Sequence[str] | None = None) -> Tensor:
        """Return the class mixes π of train splits, ``[n, C]`` float64, default all clients; zeros if unlabelled."""
        import torch  # here, so that reading a manifest does not import torch

        entries = self.clients if clients is None else [self.entry(client) for client in clients]
        counts = torch.tensor([entry.class_counts["train"] for entry in entries], dtype=torch.float64)
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def to_json(self) -> str:
        """Return the canonical JSON: sorted keys, no spaces, and a digest of the rest at its end."""
        document = _ADAPTER.dump_python(self, mode="json")
        return digests.with_compact_digest(json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False))

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the manifest") -> Manifest:
        """Return the manifest in a JSON text, which errors call ``source``.

        Raise DataError if it is damaged, of another version, or contradicts itself.
        """
        content = text.encode() if isinstance(text, str) else text
        manifest = parse_document(_ADAPTER, content, source, VERSION, FIX)
        try:
            manifest.fingerprint  # noqa: B018 - computed now, so that numbers that are not finite fail here
        except ValueError as error:
            raise DataError(f"{source} is damaged: scheme: {error}", hint=FIX) from error
        return manifest


_ADAPTER = TypeAdapter(Manifest)


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
    check_digest(content, entry.sha256, f"the shard {path}", FIX)
    return content
