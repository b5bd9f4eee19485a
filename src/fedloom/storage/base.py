"""Interface of all stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

ENDPOINT, REGION = "FEDLOOM_S3_ENDPOINT", "AWS_REGION"
"""Environment variables of a service's address and region."""
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
S3_VARIABLES = (*CREDENTIALS, "AWS_SESSION_TOKEN", REGION, ENDPOINT)
"""Environment variables of a service: required credentials, and optional ones."""


class Absent(StorageError):
    """Name that does not exist in the store."""


class Taken(StorageError):
    """Name that exists already; its content is unchanged."""


@dataclass(frozen=True)
class StoredObject:
    """Object in a store: its name, size in bytes, and modification time in seconds since the epoch."""

    name: str
    size: int
    modified: float = field(default=0.0, compare=False)


class Store(ABC):
    """Named objects, each complete or absent, even if a write is interrupted.

    A name is a relative path with slashes, such as ``checkpoints/round-000010.safetensors``. Every method raises
    ``StorageError`` when the store fails, and ``RefusedError`` when it denies access; both include the remedy.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Folder, or ``s3://bucket/prefix``, that reopens this store."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of an object; raise Absent if there is none of that name."""

    @abstractmethod
    def write(self, name: str, content: bytes, *, durably: bool = True) -> None:
        """Write an object, replacing any existing one.

        With ``durably``, wait until it survives a power cut, as it always does on S3; otherwise it only survives this
        process.
        """

    def write_parts(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write an object from its parts, not durably. A store that can do so does not join them in memory."""
        self.write(name, b"".join(parts), durably=False)

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Write an object; of concurrent calls, exactly one succeeds. Raise Taken if the name exists."""

    @abstractmethod
    def upload(self, name: str, path: Path) -> None:
        """Write an object from a file, replacing any existing one."""

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Write an object to a file atomically, creating its folder; raise Absent if there is none of that name."""

    @abstractmethod
    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield all objects whose names start with a prefix, sorted by name; ``shards/`` lists that folder."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""

    @abstractmethod
    def tidy(self, prefix: str) -> None:
        """Remove partial files left by killed processes in a folder, such as ``shards/``."""

    @abstractmethod
    def under(self, prefix: str) -> Store:
        """Return the part of this store below a folder."""

    @abstractmethod
    def check(self, *, writing: bool = True) -> None:
        """Check within about 20 seconds that this store can be read, and with ``writing`` also written to.

        Raise RefusedError if credentials are missing, wrong or insufficient, or the service lacks a required feature;
        StorageError if the store cannot be reached, or the bucket does not exist.
        """


def parts_of(name: str) -> list[str]:
    """Return the parts of a name; raise ValueError if it could lead outside the store, or name an object twice."""
    if not has_plain_parts(name):
        raise ValueError(f"{name!r} must be a relative path without empty parts, '.' and '..'.")
    return name.split("/")


def has_plain_parts(name: str) -> bool:
    """Return True if no part of a name is empty, ``.`` or ``..``."""
    return not any(part in ("", ".", "..") or "\0" in part for part in name.split("/"))
