"""Client state: what a client keeps from one round to the next, with the workers and never with the aggregator.

A state is one file, or one object of a bucket, named by the conversation it was kept in (:class:`Version`). The
aggregator knows the names alone: it tells each client which version to start from, that of the last round that counted
it, so that a client lost in the middle of a round goes on from where it was before. A conversation held again after a
crash writes its version again, with equal content.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedloom.errors import DataError
from fedloom.storage import Absent, Store

log = logging.getLogger("fedloom.states")


@dataclass(frozen=True, order=True)
class Version:
    """Names a client's state: the round, attempt, conversation and row that it was kept in."""

    round: int
    attempt: int
    conversation: int
    row: int

    def __str__(self) -> str:
        """As in the name of a file."""
        return f"{self.round}-{self.attempt}-{self.conversation}-{self.row}"


@dataclass(frozen=True)
class Versions:
    """What the aggregator says of one client's state when it opens a conversation.

    Attributes
    ----------
    start
        Where to start from; None for a client that no round has counted yet.
    needed
        What checkpoints that still exist would start from.
    """

    start: Version | None
    needed: frozenset[Version] = frozenset()


class States(Protocol):
    """Where client states are kept; every worker that may serve a client reaches the same one."""

    def load(self, client: str, version: Version) -> dict[str, Tensor] | None:
        """Return a state, None if it is not there."""

    def save(self, client: str, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Store a state."""

    def forget(self, client: str, before: Version, needed: Iterable[Version]) -> None:
        """Remove a client's versions before one, but those that are needed."""


_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)\.safetensors")


class StoredStates:
    """Client states in a store, a folder or S3: ``<client>/<version>.safetensors``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def load(self, client: str, version: Version) -> dict[str, Tensor] | None:
        """Return a state, None if it is not there.

        Raises
        ------
        DataError
            If it is damaged.
        StorageError
            If the store cannot be read.
        """
        name = _name(client, version)
        try:
            content = self._store.read(name)
        except Absent:
            return None
        try:
            return safetensors.torch.load(content)
        except SafetensorError as error:
            raise DataError(f"{self._store.url}/{name}: not a client state ({error})") from error

    def save(self, client: str, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Store a state, whole or not at all.

        Without waiting for the disk, which would cost more than many a client's training: after a power cut a state may
        be lost, and is found out.

        Raises
        ------
        StorageError
            If it cannot be written.
        """
        dense = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        self._store.write(_name(client, version), safetensors.torch.save(dense), durably=False)

    def forget(self, client: str, before: Version, needed: Iterable[Version]) -> None:
        """Remove a client's versions before one, but those that are needed."""
        kept = set(needed)
        old = []
        for entry in self._store.entries(f"{client}/"):
            named = _NAME.fullmatch(entry.name, len(client) + 1)
            version = Version(*map(int, named.groups())) if named else None
            if version is not None and version < before and version not in kept:
                old.append(entry.name)
        self._store.remove(old)


def _name(client: str, version: Version) -> str:
    return f"{client}/{version}.safetensors"
