"""Files and folders: atomic writes, reads that cannot block, private modes, and their errors."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fedloom.errors import StorageError, argument

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

PARTIAL = ".partial"
"""Suffix of files being written; their names start with a dot."""


PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of files and folders with clients' data: only their owner has access."""


def make_private(folder: Path) -> None:
    """Create a folder, and its missing parents, accessible only to its owner."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(PRIVATE_FOLDER, exist_ok=True)


def write_atomically(path: Path, *content: Buffer, durably: bool = True, private: bool = False) -> None:
    """Write a file atomically, in parts: it is complete or absent at all times.

    With ``durably``, wait for the disk; otherwise the file survives this process, but not a power cut. With
    ``private``, only its owner may read it.

    Raise StorageError if it cannot be written; an existing file of that name is unchanged.
    """
    with staged(path) as partial:
        fill(partial, *content, durably=durably, private=private)
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


def fill(path: Path, *content: Buffer, durably: bool = True, private: bool = False) -> None:
    """Write a file that has no readers yet, in parts; optionally readable by its owner only, and flushed to disk."""
    mode = PRIVATE_FILE if private else 0o666
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
        file.writelines(content)
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
