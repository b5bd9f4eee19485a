"""Folder store, its part on a PersistentVolumeClaim (``pvc://CLAIM/PATH``, as KServe writes it), atomic file writes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fedloom.errors import StorageError, argument
from fedloom.storage.base import Absent, Store, StoredObject, Taken, parts_of

PARTIAL = ".partial"
"""Suffix of files being written; their names start with a dot."""


PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of files and folders with clients' data: only their owner has access."""


def make_private(folder: Path) -> None:
    """Create a folder, and its missing parents, accessible only to its owner."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(PRIVATE_FOLDER, exist_ok=True)


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
        to = self._path(name)
        with opened(path):
            self._within(to, lambda: copy_atomically(path, to, private=True))

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
        for path, size, modified in _files(folder):
            name = f"{above}/{path}" if above else path
            if path.startswith(start):
                entries.append(StoredObject(name, size, modified))
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


def write_atomically(path: Path, content: bytes, *, durably: bool = True, private: bool = False) -> None:
    """Write a file atomically: it is complete or absent at all times.

    With ``durably``, wait for the disk; otherwise the file survives this process, but not a power cut. With
    ``private``, only its owner may read it.

    Raise StorageError if it cannot be written; an existing file of that name is unchanged.
    """
    with staged(path) as partial:
        fill(partial, content, durably=durably, private=private)
        partial.replace(path)
        if durably:
            sync(path.parent)


def copy_atomically(source: Path, path: Path, *, private: bool = False) -> None:
    """Copy a file atomically; raise StorageError if it cannot be written, and leave an existing file unchanged."""
    with staged(path) as partial:
        if private:
            partial.touch(PRIVATE_FILE)
        shutil.copyfile(source, partial)
        sync(partial)
        partial.replace(path)
        sync(path.parent)


def copy_folder(source: Path, out: Path, ignore: Callable[[str, list[str]], Iterable[str]] | None = None) -> None:
    """Copy a folder into another, which may exist; raise StorageError if that cannot be written."""
    with storing(out):
        shutil.copytree(source, out, ignore=ignore, dirs_exist_ok=True)


FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Reasons of the system for refusing to write more."""


@contextmanager
def storing(path: Path, done: str = "written") -> Iterator[None]:
    """Turn an OSError in the block into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # of a folder; it lists all files
            reason = str(error.args[0][0][-1])
        raise StorageError(
            f"{path} cannot be {done}: {reason.lower()}",
            hint=f"free some space: no complete file is lost, and {argument('resume')} continues a run"
            if any(text in reason for text in FULL)
            else "fix the path or its permissions",
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; raise StorageError if it cannot be read."""
    with storing(path, "read"):
        file = open_file(path)
    with file:
        yield file


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raise OSError if it cannot be read or is not a regular file: reading a pipe could block, and a device may never end.
    """
    with open_file(path) as file:
        return file.read()


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; raises like :func:`read_file`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "is a pipe or a device, not a file", str(path))


def open_to_append(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor for appending to a file.

    Raise OSError if it cannot be written to; also for a pipe without a reader, which would block.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, mode)
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside a file; no other process uses it, and it is removed after the block.

    Raise StorageError if a write in the block fails.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    with storing(path):
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)


def fill(path: Path, content: bytes, *, durably: bool = True, private: bool = False) -> None:
    """Write a file that has no readers yet, optionally readable by its owner only, and flushed to disk."""
    mode = PRIVATE_FILE if private else 0o666
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
        if durably:
            file.flush()
            os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path, above: str = "") -> Iterator[tuple[str, int, float]]:
    """Yield relative path, size and time of every complete file below a folder; skip files removed meanwhile."""
    with storing(folder, "read"), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as children:
        for entry in children:
            name = f"{above}{entry.name}"
            if entry.is_dir():
                yield from _files(folder / entry.name, f"{name}/")
            elif not (entry.name.startswith(".") and entry.name.endswith(PARTIAL)):
                with suppress(FileNotFoundError):
                    about = entry.stat()
                    yield name, about.st_size, about.st_mtime


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
