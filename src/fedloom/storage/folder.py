"""A store that is a folder, and how a file appears in one: whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedloom.errors import StorageError, argument
from fedloom.storage.base import Absent, Entry, Store, Taken, parts_of

PARTIAL = ".partial"
"""How the name of a file ends that is being written; it starts with a dot."""


PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of what holds data of clients: their owner alone may look."""


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, which only its owner may look into."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(PRIVATE_FOLDER, exist_ok=True)


class FolderStore(Store):
    """A store in a folder of this machine, or one that several machines have mounted.

    What it holds are data of clients, what they keep, and models: only the user who wrote them may read them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._folder)

    def read(self, name: str) -> bytes:
        """Return a content."""
        path = self._path(name)
        with _reading(path):
            return read_file(path)

    def write(self, name: str, content: bytes, *, durably: bool = True) -> None:
        """Write a content, in place of what was there."""
        path = self._path(name)
        self._within(path, lambda: write_atomically(path, content, durably=durably, private=True))

    def create(self, name: str, content: bytes) -> None:
        """Write a content that was not there before."""
        path = self._path(name)

        def write() -> None:
            # A link, unlike a rename, never takes the place of what is there.
            with staged(path) as partial:
                fill(partial, content, private=True)
                os.link(partial, path)
                sync(path.parent)

        try:
            self._within(path, write)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                raise Taken(f"{path}: found there already") from None
            raise

    def upload(self, name: str, path: Path) -> None:
        """Write the content of a file, in place of what was there."""
        to = self._path(name)
        with opened(path):
            self._within(to, lambda: copy_atomically(path, to, private=True))

    def download(self, name: str, path: Path) -> None:
        """Write a content to a file, which is whole or as it was."""
        source = self._path(name)
        with _reading(source):
            source.stat()
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        copy_atomically(source, path)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Everything whose name starts so, in the order of names."""
        above, _, start = prefix.rpartition("/")
        folder = self._path(above) if above else self._folder
        found = []
        for path, size, modified in _files(folder):
            name = f"{above}/{path}" if above else path
            if path.startswith(start):
                found.append(Entry(name, size, modified))
        yield from sorted(found, key=lambda entry: entry.name.encode())

    def remove(self, names: Iterable[str]) -> None:
        """Remove contents."""
        for name in names:
            path = self._path(name)
            with storing(path, "removed"):
                path.unlink(missing_ok=True)

    def tidy(self, prefix: str) -> None:
        """Remove what processes that were killed have left half-written in a folder.

        One that writes there now writes again (:meth:`write`).
        """
        folder = self._path(prefix.rstrip("/"))
        with storing(folder, "removed"):
            for partial in folder.glob(f".*{PARTIAL}"):
                partial.unlink(missing_ok=True)

    def under(self, prefix: str) -> FolderStore:
        """The part of this store below a folder."""
        return FolderStore(self._path(prefix))

    def check(self, *, writing: bool = True) -> None:
        """Find out whether the folder is there, or can be made, and written to."""
        if writing:
            probe = f".probe-{uuid.uuid4().hex}"
            self.create(probe, b"")
            self.remove([probe])
        elif not self._folder.is_dir():
            raise Absent(f"{self._folder}: found no folder there", hint="make it, or change storage")

    def _path(self, name: str) -> Path:
        return self._folder.joinpath(*parts_of(name))

    def _within(self, path: Path, write: Callable[[], None]) -> None:
        """Write, and make the folder first where that was what failed."""
        try:
            write()
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            with storing(path):
                make_private(path.parent)
            write()


def write_atomically(path: Path, content: bytes, *, durably: bool = True, private: bool = False) -> None:
    """Write a file so that it is whole or absent, whatever happens meanwhile.

    Parameters
    ----------
    durably
        Wait until the disk has it. Without, it outlives this process, not a power cut.
    private
        Only its owner may read it.

    Raises
    ------
    StorageError
        If it cannot be written; a file of that name stays as it was.
    """
    with staged(path) as partial:
        fill(partial, content, durably=durably, private=private)
        partial.replace(path)
        if durably:
            sync(path.parent)


def copy_atomically(source: Path, path: Path, *, private: bool = False) -> None:
    """Copy a file so that the copy is whole or absent.

    Raises
    ------
    StorageError
        If it cannot be written; a file of that name stays as it was.
    """
    with staged(path) as partial:
        if private:
            partial.touch(PRIVATE_FILE)
        shutil.copyfile(source, partial)
        sync(partial)
        partial.replace(path)
        sync(path.parent)


@contextmanager
def storing(path: Path, done: str = "written") -> Iterator[None]:
    """Turn a failure to write into a StorageError that names the place."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise StorageError(
            f"{path}: cannot be {done}: {(error.strerror or str(error)).lower()}",
            hint=f"make room: nothing that was complete is lost, and a run goes on with {argument('resume')}"
            if full
            else "fix the path or its permissions",
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it.

    Raises
    ------
    StorageError
        If it cannot be read.
    """
    try:
        file = open_file(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    with file:
        yield file


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises
    ------
    OSError
        If it cannot be read, or is no regular file: a pipe would be waited for, and a device may never end.
    """
    with open_file(path) as file:
        return file.read()


def open_file(path: Path) -> BinaryIO:
    """Open a file to read it; as of :func:`read_file`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.ENXIO, "is a pipe or device, and no file", str(path))


def open_to_append(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor of a file to append to.

    Raises
    ------
    OSError
        If it cannot be written to; of a pipe that nobody reads, too, which would be waited for.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, mode)
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Give a name beside a file, which nobody else writes to and which is gone after the block.

    Raises
    ------
    StorageError
        If something cannot be written in the block.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    with storing(path):
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)


def fill(path: Path, content: bytes, *, durably: bool = True, private: bool = False) -> None:
    """Write a file where nobody looks yet, for its owner alone or not, and wait for the disk if that is asked for."""
    mode = PRIVATE_FILE if private else 0o666
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
        if durably:
            file.flush()
            os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path, above: str = "") -> Iterator[tuple[str, int, float]]:
    """Every whole file below a folder: relative path, size, time. What is removed meanwhile may be left out."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                name = f"{above}{entry.name}"
                if entry.is_dir():
                    yield from _files(folder / entry.name, f"{name}/")
                elif not (entry.name.startswith(".") and entry.name.endswith(PARTIAL)):
                    try:
                        stat = entry.stat()
                        yield name, stat.st_size, stat.st_mtime
                    except FileNotFoundError:
                        continue
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {(error.strerror or str(error)).lower()}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Absent(f"{path}: found nothing there") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
