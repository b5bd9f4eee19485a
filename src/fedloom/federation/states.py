"""Client state: data that a client keeps between rounds, stored with the workers and never with the aggregator.

A state is one file, or one object of a bucket, named by the conversation it was kept in (:class:`Version`). The
aggregator stores only the names. It sends each client the version to start from, that of the last round that counted
it, so that a client lost in the middle of a round continues from its earlier state. A conversation repeated after a
crash of the aggregator keeps a separate version, named by the aggregator's new ``life``, so a worker that has not
noticed the crash does no harm.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedloom.errors import DataError
from fedloom.runs.journal import Version
from fedloom.storage import Absent, Store

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("fedloom.states")

VERSION = 2
"""Version of the file format."""


@dataclass(frozen=True)
class Versions:
    """Versions of one client's state, sent by the aggregator when it opens a conversation."""

    start: Version | None
    """Version to start from; None for a client that no round has counted yet."""
    needed: frozenset[Version] = frozenset()
    """Versions that existing checkpoints would start from."""
    life: int = 0
    """Life of the aggregator that sends this; a later aggregator has a greater one."""

    def superseded(self, version: Version) -> bool:
        """Return whether no conversation will start from a version again.

        This holds if it is not needed, and this aggregator has advanced past it or only an earlier aggregator knew it.
        Versions of a later aggregator are never considered superseded.
        """
        if self.start is None or version == self.start or version in self.needed:
            return False
        return version.life < self.life or (version.life == self.life and version < self.start)


_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-(\d+)\.safetensors")


class States:
    """Client states in a store (a folder or S3): ``<client>/<version>.safetensors``.

    Every worker that may serve a client reaches the same store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def load(self, client: str, version: Version) -> dict[str, Tensor] | None:
        """Return a state; None if it does not exist.

        Raise DataError if it is damaged. Raise StorageError if the store cannot be read.
        """
        from fedloom.runs.checkpoint import decode_tensors  # imports torch, which reading a journal does not need

        name = _name(client, version)
        try:
            content = self._store.read(name)
        except Absent:
            return None
        try:
            tensors, metadata = decode_tensors(content)
            if metadata != _about(client):
                raise ValueError(f"it belongs to {metadata}, not {_about(client)}")
        except ValueError as error:
            raise DataError(
                f"{name} is not a client state: {error}",  # sent to the aggregator, unlike the location
                hint=f"restore it in {self._store.url} from a copy; or remove it, and federation.lost_state decides",
            ) from error
        return tensors

    def save(self, client: str, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Store a state atomically.

        It does not wait for the disk, which would take longer than the training of many clients: a power failure may
        lose a state, which is detected later.

        Raise StorageError if it cannot be written.
        """
        from fedloom.runs.checkpoint import tensor_parts

        self._store.write_parts(_name(client, version), tensor_parts(tensors, _about(client)))

    def forget(self, client: str, versions: Versions) -> None:
        """Remove a client's superseded versions, and partial files of killed workers."""
        self._store.tidy(f"{client}/")
        old = []
        for entry in self._store.entries(f"{client}/"):
            match = _NAME.fullmatch(entry.name, len(client) + 1)
            if match and versions.superseded(Version(*map(int, match.groups()))):
                old.append(entry.name)
        self._store.remove(old)


def _about(client: str) -> dict[str, object]:
    return {"version": VERSION, "client": client}


def _name(client: str, version: Version) -> str:
    return f"{client}/{version}.safetensors"
