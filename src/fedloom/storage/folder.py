"""Folder store, and its part on a PersistentVolumeClaim (``pvc://CLAIM/PATH``, as KServe writes it)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fedloom.core.files import (
    PARTIAL,
    copy_atomically,
    fill,
    make_private,
    opened,
    read_file,
    staged,
    storing,
    sync,
    write_atomically,
)
from fedloom.errors import StorageError
from fedloom.storage.base import Absent, Store, StoredObject, Taken, parts_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class FolderStore(Store):
    """Store in a folder of this machine, possibly mounted on several machines.

    It holds data, states and models of clients, so only the user who wrote them may read them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        """Path of the folder."""
        return str(self._folder)

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        path = self._path(name)
        with _reading(path):
            return read_file(path)

    def write(self, name: str, content: bytes, *, durably: bool = True) -> None:
        """Write an object, replacing any existing one."""
        path = self._path(name)
        self._within(path, lambda: write_atomically(path, content, durably=durably, private=True))

    def write_parts(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write an object from its parts, not durably."""
        path = self._path(name)
        self._within(path, lambda: write_atomically(path, *parts, durably=False, private=True))

    def create(self, name: str, content: bytes) -> None:
        """Write an object that must not exist yet."""
        path = self._path(name)

        def write() -> None:
            # Unlike a rename, a link never replaces an existing file.
            with staged(path) as partial:
                fill(partial, content, private=True)
                os.link(partial, path)
                sync(path.parent)

        try:
            self._within(path, write)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                raise Taken(f"{path} already exists") from None
            raise

    def upload(self, name: str, path: Path) -> None:
        """Write an object from a file, replacing any existing one."""
        target = self._path(name)
        with opened(path):
            self._within(target, lambda: copy_atomically(path, target, private=True))

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file atomically."""
        source = self._path(name)
        with _reading(source):
            source.stat()
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        copy_atomically(source, path)

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield all objects whose names start with a prefix, sorted by name."""
        above, _, start = prefix.rpartition("/")
        folder = self._path(above) if above else self._folder
        entries = []
        for path, size, modified_at in _files(folder):
            name = f"{above}/{path}" if above else path
            if path.startswith(start):
                entries.append(StoredObject(name, size, modified_at))
        yield from sorted(entries, key=lambda entry: entry.name.encode())

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects."""
        for name in names:
            path = self._path(name)
            with storing(path, "removed"):
                path.unlink(missing_ok=True)

    def tidy(self, prefix: str) -> None:
        """Remove partial files left by killed processes in a folder.

        A process that is writing there now retries its write (:meth:`write`).
        """
        folder = self._path(prefix.rstrip("/"))
        with storing(folder, "removed"):
            for partial in folder.glob(f".*{PARTIAL}"):
                partial.unlink(missing_ok=True)

    def under(self, prefix: str) -> FolderStore:
        """Return the part of this store below a folder."""
        return FolderStore(self._path(prefix))

    def check(self, *, writing: bool = True) -> None:
        """Check that the folder exists or, with ``writing``, that it can be created and written to."""
        if writing:
            probe = f".probe-{uuid.uuid4().hex}"
            self.create(probe, b"")
            self.remove([probe])
        elif not self._folder.is_dir():
            raise Absent(f"{self._folder} does not exist", hint="create the folder, or change storage")

    def _path(self, name: str) -> Path:
        return self._folder.joinpath(*parts_of(name))

    def _within(self, path: Path, write: Callable[[], None]) -> None:
        """Run a write; if it fails because the folder is missing, create the folder and retry."""
        try:
            write()
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            with storing(path):
                make_private(path.parent)
            write()


def _files(folder: Path, above: str = "") -> Iterator[tuple[str, int, float]]:
    """Yield relative path, size and time of every complete file below a folder; skip files removed meanwhile."""
    with storing(folder, "read"), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as children:
        for entry in children:
            name = f"{above}{entry.name}"
            if entry.is_dir():
                yield from _files(folder / entry.name, f"{name}/")
            elif not (entry.name.startswith(".") and entry.name.endswith(PARTIAL)):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    yield name, status.st_size, status.st_mtime


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    with storing(path, "read"):
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise Absent(f"{path} does not exist") from error


VARIABLE = "FEDLOOM_CLAIMS"
"""Environment variable that names another folder of claims."""


class ClaimStore(FolderStore):
    """Store in a folder of a mounted claim.

    Raise StorageError if the claim is not mounted in this pod or on this machine.
    """

    def __init__(self, claim: str, path: str, mounts: str) -> None:
        self._claim, self._path_in_claim, self._mounts = claim, path, mounts
        mount = Path(os.environ.get(VARIABLE) or mounts, claim)
        if not mount.is_dir():
            raise StorageError(
                f"{self.url}: the claim {claim} is not mounted here, at {mount}",
                hint="only pods that mount the claim have access to it (docs/storage.md)",
            )
        super().__init__(mount / path)

    @property
    def url(self) -> str:
        """URL of the folder, the same in every pod."""
        return f"pvc://{self._claim}/{self._path_in_claim}".rstrip("/")

    def under(self, prefix: str) -> ClaimStore:
        """Return the part of this store below a folder."""
        path = PurePosixPath(self._path_in_claim, *parts_of(prefix))
        return ClaimStore(self._claim, str(path), self._mounts)
