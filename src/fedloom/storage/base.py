"""What a store can do, whatever it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.errors import StorageError


class Absent(StorageError):
    """There is nothing of that name."""


class Taken(StorageError):
    """There is something of that name already, and it stays as it is."""


@dataclass(frozen=True)
class Entry:
    """Something in a store: its name, its size in bytes, and when it was written, in seconds since the epoch."""

    name: str
    size: int
    modified: float = field(default=0.0, compare=False)


class Store(ABC):
    """Named contents, each whole or absent, whatever happens while it is written.

    A name is a relative path with slashes, such as ``checkpoints/round-000010.safetensors``. Every method raises
    ``StorageError`` when the store fails, and ``RefusedError`` when it refuses us; both say what to do.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The folder, or ``s3://bucket/prefix``: what opens this store again."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a content.

        Raises
        ------
        Absent
            If it is not there.
        """

    @abstractmethod
    def write(self, name: str, content: bytes, *, durably: bool = True) -> None:
        """Write a content, in place of what was there.

        Parameters
        ----------
        durably
            Wait until it outlives a power cut; without, it outlives this process. S3 always does the former.
        """

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Write a content that was not there before: of all that try at once, one succeeds.

        Raises
        ------
        Taken
            If something of that name is there.
        """

    @abstractmethod
    def upload(self, name: str, path: Path) -> None:
        """Write the content of a file, in place of what was there."""

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Write a content to a file, which is whole or as it was; its folder is made.

        Raises
        ------
        Absent
            If it is not there.
        """

    @abstractmethod
    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Everything whose name starts so, in the order of names; ``shards/`` is what lies in that folder."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove contents; those that are not there are removed already."""

    @abstractmethod
    def tidy(self, prefix: str) -> None:
        """Remove what processes that were killed have left half-written in a folder, such as ``shards/``."""

    @abstractmethod
    def under(self, prefix: str) -> Store:
        """The part of this store below a folder."""

    @abstractmethod
    def check(self, *, writing: bool = True) -> None:
        """Find out within about 20 seconds whether this store can be used.

        Parameters
        ----------
        writing
            Whether it is to be written to; a trace of that is removed again.

        Raises
        ------
        RefusedError
            If credentials are missing or wrong, or do not allow it, or the service lacks something needed.
        StorageError
            If it cannot be reached, or the bucket is not there.
        """


def parts_of(name: str) -> list[str]:
    """Return the parts of a name.

    Raises
    ------
    ValueError
        If it could name something outside the store, or two names one thing: empty parts, ``.`` and ``..``.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"found {name!r}; allowed: a relative path without empty parts, '.' and '..'")
    return parts
