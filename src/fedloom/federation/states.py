"""Client state: what a client keeps from one round to the next, with the workers and never with the aggregator.

A state is one file, or one object of a bucket, named by the conversation it was kept in (:class:`Version`). The
aggregator knows the names alone: it tells each client which version to start from, that of the last round that counted
it, so that a client lost in the middle of a round goes on from where it was before. A conversation held again after a
crash of the aggregator keeps a version of its own, named by the aggregator's new life: a worker that has not heard of
that yet does it no harm.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedloom.errors import DataError
from fedloom.storage import Absent, Store

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("fedloom.states")

VERSION = 2
"""Of the format of a state's file."""


@dataclass(frozen=True, order=True)
class Version:
    """Names a client's state: the round, attempt, conversation, row and aggregator's life that it was kept in."""

    round: int
    attempt: int
    conversation: int
    row: int
    life: int = 0

    def __str__(self) -> str:
        """As in the name of a file."""
        return f"{self.round}-{self.attempt}-{self.conversation}-{self.row}-{self.life}"


@dataclass(frozen=True)
class Versions:
    """What the aggregator says of one client's state when it opens a conversation.

    Attributes
    ----------
    start
        Where to start from; None for a client that no round has counted yet.
    needed
        What checkpoints that still exist would start from.
    life
        Of the aggregator that says so; a later one has a larger.
    """

    start: Version | None
    needed: frozenset[Version] = frozenset()
    life: int = 0

    def superseded(self, version: Version) -> bool:
        """Whether nothing will start from a version again.

        It is not needed, and either this aggregator has gone on from it or only an earlier one knew it. What a later
        one knows is not this one's to judge.
        """
        if self.start is None or version == self.start or version in self.needed:
            return False
        return version.life < self.life or (version.life == self.life and version < self.start)


class States(Protocol):
    """Where client states are kept; every worker that may serve a client reaches the same one."""

    def load(self, client: str, version: Version) -> dict[str, Tensor] | None:
        """Return a state, None if it is not there."""

    def save(self, client: str, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Store a state."""

    def forget(self, client: str, versions: Versions) -> None:
        """Remove a client's versions that are superseded, and what workers that were killed left of others."""


class NoStates:
    """For clients that never train, and so keep nothing."""

    def load(self, client: str, version: Version) -> None:
        """There is none."""

    def save(self, client: str, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Refuse: nothing is kept outside training.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError(f"client {client} does not train: nothing can be kept")

    def forget(self, client: str, versions: Versions) -> None:
        """There is nothing."""


_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-(\d+)\.safetensors")


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
        from fedloom.federation import tensor_file  # imports torch, which a journal is read without

        name = _name(client, version)
        try:
            content = self._store.read(name)
        except Absent:
            return None
        try:
            tensors, about = tensor_file.decode(content)
            if about != _about(client):
                raise ValueError(f"found {about}, expected {_about(client)}")
        except ValueError as error:
            raise DataError(
                f"{name}: not a client state: {error}",  # the aggregator is told this line, but not where it lies
                hint=f"restore it in {self._store.url} from a copy; or remove it, and federation.lost_state decides",
            ) from error
        return tensors

    def save(self, client: str, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Store a state, whole or not at all.

        Without waiting for the disk, which would cost more than many a client's training: after a power cut a state may
        be lost, and is found out.

        Raises
        ------
        StorageError
            If it cannot be written.
        """
        from fedloom.federation import tensor_file

        dense = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        self._store.write(_name(client, version), tensor_file.encode(dense, _about(client)), durably=False)

    def forget(self, client: str, versions: Versions) -> None:
        """Remove a client's versions that are superseded, and what workers that were killed left of others."""
        self._store.tidy(f"{client}/")
        old = []
        for entry in self._store.entries(f"{client}/"):
            named = _NAME.fullmatch(entry.name, len(client) + 1)
            if named and versions.superseded(Version(*map(int, named.groups()))):
                old.append(entry.name)
        self._store.remove(old)


def _about(client: str) -> dict[str, object]:
    return {"version": VERSION, "client": client}


def _name(client: str, version: Version) -> str:
    return f"{client}/{version}.safetensors"
