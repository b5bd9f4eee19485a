"""Small files that are trusted: read whole or refused, written for their owner alone, read again when they change."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from fedloom.errors import ExperimentError, FedloomError, argument
from fedloom.storage.folder import staged, storing, sync

log = logging.getLogger("fedloom.trust")

LARGEST = 16 << 20
"""Bytes of a file that is trusted."""

SETTLE_S, SETTLES = 0.1, 10
"""How long it may take until the next of several files is replaced, and how often that is waited for."""

_T = TypeVar("_T")
_State = tuple[int, int, int, int] | None


def read_text(path: Path, what: str) -> str:
    """Return the text of a file.

    Parameters
    ----------
    what
        What to call it in errors, such as ``--tls-key``.

    Raises
    ------
    ExperimentError
        If it cannot be read, is no regular file (a pipe would be waited for), is too large, or no UTF-8.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ExperimentError(f"{what} {path}: found no regular file; allowed: a file")
            if found.st_size > LARGEST:
                raise ExperimentError(f"{what} {path}: found {found.st_size:,} bytes; allowed: at most {LARGEST:,}")
            return file.read(LARGEST + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{what} {path}: not a UTF-8 text file (byte {error.start})") from None
    except OSError as error:
        raise ExperimentError(f"{what} {path}: cannot be read: {(error.strerror or str(error)).lower()}") from error


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read (0600), whole or not at all, in place of what was there.

    Raises
    ------
    StorageError
        If it cannot be written; a file of that name stays as it was.
    """
    with staged(path) as partial:
        _fill(partial, text, 0o600)
        partial.replace(path)
        sync(path.parent)


def create(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file that was not there before; only its owner may read one that is ``private``.

    Raises
    ------
    ExperimentError
        If there is a file of that name; it stays as it is.
    StorageError
        If it cannot be written.
    """
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with staged(path) as partial:
        _fill(partial, text, 0o600 if private else 0o644)
        try:
            os.link(partial, path)  # unlike a rename, it never takes the place of what is there
        except FileExistsError:
            raise ExperimentError(f"{path} exists already; choose a new file, or give {argument('replace')}.") from None
        sync(path.parent)


def _fill(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


class Reread(Generic[_T]):
    """What some files say, read again when one of them changes.

    Files that cannot be read, or say what is not allowed, are refused with a warning; what they said before stays in
    force until they change again. Any thread may ask.

    Parameters
    ----------
    paths
        The files.
    read
        Reads them all.

    Attributes
    ----------
    version
        How often there was another value.

    Raises
    ------
    FedloomError
        What ``read`` raises the first time: there is nothing to stay in force then.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        self.paths = tuple(paths)
        self.version = 0
        self._lock = threading.Lock()  # a slow reader must not put an older value in the place of a newer one
        self._read = read
        self._value = self._first()

    def _first(self) -> _T:
        """Read them the first time, and again if they were being replaced, as a certificate and its key are in turn."""
        for left in reversed(range(SETTLES)):
            self._state = self._found()  # before they are read: what changes meanwhile is read again
            try:
                return self._read()
            except FedloomError:
                time.sleep(SETTLE_S)
                if not left or self._found() == self._state:
                    raise
        raise AssertionError("the last time returns or raises")

    @property
    def value(self) -> _T:
        """What they said when they were last read."""
        return self._value

    @property
    def stale(self) -> bool:
        """Whether a file has changed since it was last looked at; this waits for nobody who reads."""
        return self._found() != self._state

    def refresh(self) -> int:
        """Look whether a file has changed, and read them if so; return how often there was another value so far."""
        with self._lock:
            state = self._found()
            if state == self._state:
                return self.version
            self._state = state
            try:
                value = self._read()
            except FedloomError as error:
                log.warning("what was read before stays in force: %s", error)
                return self.version
            if value != self._value:
                self._value = value
                self.version += 1
            return self.version

    def _found(self) -> tuple[_State, ...]:
        return tuple(map(_state, self.paths))


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
