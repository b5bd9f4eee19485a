"""Data root, folder locks, and atomic publication of folders."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.core.home import expanded
from fedloom.errors import StorageError
from fedloom.storage.folder import storing, sync

log = logging.getLogger("fedloom.data")


def data_root(root: Path | str | None = None) -> Path:
    """Return the folder that holds all data: ``root``, else ``$FEDLOOM_DATA``, else ``~/.cache/fedloom``."""
    return expanded(root or os.environ.get("FEDLOOM_DATA") or "~/.cache/fedloom", "FEDLOOM_DATA or HOME")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is about to be created; other processes wait.

    The lock is released when the process ends, even if it is killed. Several users may share the parent folders: anyone
    who can read the lock file can hold the lock.

    Raise StorageError, naming the owner of the folder and the remedy, if this user cannot create the lock.
    """
    path = folder.parent / f".{folder.name}.lock"
    with naming_owner(path), storing(path):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:  # another user's lock file
            if not path.exists():
                raise
            lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def naming_owner(path: Path) -> Iterator[None]:
    """Turn a permission error in the block into a StorageError with the owner of the nearest folder and the remedy."""
    try:
        yield
    except (PermissionError, StorageError) as error:
        cause = error.__cause__ if isinstance(error, StorageError) else error
        if not isinstance(cause, PermissionError):
            raise
        there = next((above for above in (path, *path.parents) if _is_there(above)), path)
        raise StorageError(
            f"{path}: {(cause.strerror or str(cause)).lower()}: {there} belongs to {_owner(there)}",
            hint="use your own data root (data.root, or the variable FEDLOOM_DATA), or ask the owner to share it with "
            "a group: chgrp -R GROUP DIR && chmod -R g+rwX DIR, and chmod g+s on its folders",
        ) from error


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):  # a user unknown to this machine
        try:
            return f"the user {path.stat().st_uid}"
        except OSError:
            return "another user"


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Yield an empty staging folder that replaces ``folder`` when the block ends without an exception.

    A process killed in the block leaves a staging folder, which readers ignore and the next writer removes. Call this
    under :func:`locked`.

    Raise StorageError, naming the folder, for any OSError, also in the block.
    """
    with naming_owner(folder), storing(folder):
        for leftover in folder.parent.glob(f".{folder.name}.staging-*"):
            log.info("removing %s, left by a process that was killed", leftover)
            shutil.rmtree(leftover)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.staging-", dir=folder.parent))
    try:
        content = staging / "content"
        with storing(folder):
            content.mkdir()
            yield content
        with naming_owner(folder), storing(folder):
            if folder.exists():
                folder.rename(staging / "replaced")
            content.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
