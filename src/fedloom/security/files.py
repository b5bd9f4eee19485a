"""Small trusted files: read completely or refused, written for their owner only, reloaded when they change."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from fedloom.core.files import staged, storing, sync
from fedloom.errors import ExperimentError, FedloomError, argument

log = logging.getLogger("fedloom.security")

LARGEST = 16 << 20
"""Maximum size of a trusted file in bytes."""

SETTLE_S, SETTLES = 0.1, 10
"""Seconds to wait while several files are replaced one after another, and maximum number of attempts to read them."""

_T = TypeVar("_T")
_State = tuple[int, int, int, int] | None


def read_text(path: Path, name: str) -> str:
    """Return the text of a file.

    Parameters
    ----------
    name
        Name of the file in errors, such as ``tls.key``.

    Raises
    ------
    ExperimentError
        If it cannot be read, is not a regular file (reading a pipe would block), is too large, or is not UTF-8.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ExperimentError(f"{name} {path} is not a regular file.")
            if status.st_size > LARGEST:
                raise ExperimentError(f"{name} {path} has {status.st_size:,} bytes; at most {LARGEST:,} are read.")
            return file.read(LARGEST + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{name} {path} is not a UTF-8 text file (byte {error.start})") from None
    except OSError as error:
        raise ExperimentError(f"{name} {path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read (0600), atomically replacing an existing one.

    Raise StorageError if it cannot be written; an existing file stays unchanged.
    """
    with staged(path) as partial:
        _fill(partial, text, 0o600)
        partial.replace(path)
        sync(path.parent)


def create(path: Path, text: str, *, private: bool = False) -> None:
    """Create a new file; only its owner may read one that is ``private``.

    Raise ExperimentError if the file exists already; it stays unchanged. Raise StorageError if it cannot be written.
    """
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with staged(path) as partial:
        _fill(partial, text, 0o600 if private else 0o644)
        try:
            os.link(partial, path)  # unlike a rename, it never replaces an existing file
        except FileExistsError:
            raise ExperimentError(f"{path} already exists; choose a new file, or give {argument('replace')}.") from None
        sync(path.parent)


def _fill(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


class ReloadingFile(Generic[_T]):
    """Value read from files, reloaded when one of them changes.

    Files that cannot be read or are invalid cause a warning; the previous value stays in force until they change again.
    Any thread may use it.

    Parameters
    ----------
    paths
        The files.
    reader
        Reads all of them.

    Raises
    ------
    FedloomError
        The first error of ``read``, because there is no previous value to keep.
    """

    def __init__(self, paths: Sequence[Path], reader: Callable[[], _T]) -> None:
        self.paths = tuple(paths)
        self.version = 0
        """Number of changes of the value."""
        self._lock = threading.Lock()  # a slow reader must not replace a newer value with an older one
        self._read = reader
        self._value = self._first()

    def _first(self) -> _T:
        """Return the first value; retry while files are being replaced, such as a certificate and its key in turn."""
        for attempts_left in reversed(range(SETTLES)):
            self._state = self._found()  # before reading: changes during it cause another read
            try:
                return self._read()
            except FedloomError:
                time.sleep(SETTLE_S)
                if not attempts_left or self._found() == self._state:
                    raise
        raise AssertionError("the last attempt returns or raises")

    @property
    def value(self) -> _T:
        """Value as last read."""
        return self._value

    @property
    def stale(self) -> bool:
        """True if a file has changed since it was last checked; never waits for a reader."""
        return self._found() != self._state

    def refresh(self) -> int:
        """Reload the files if one has changed; return the number of changes of the value so far."""
        with self._lock:
            state = self._found()
            if state == self._state:
                return self.version
            self._state = state
            try:
                value = self._read()
            except FedloomError as error:
                log.warning("the previous content stays in force: %s", error)
                return self.version
            if value != self._value:
                self._value = value
                self.version += 1
            return self.version

    def _found(self) -> tuple[_State, ...]:
        return tuple(map(_state, self.paths))


def _state(path: Path) -> _State:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
