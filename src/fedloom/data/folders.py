"""Data root, folder locks, atomic publication of folders, and the files below a folder."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from fedloom.core import digests
from fedloom.core.files import read_file, storing, sync
from fedloom.core.home import expanded
from fedloom.core.words import parsed_json
from fedloom.errors import DataError, StorageError, as_storage_error

log = logging.getLogger("fedloom.data")

T = TypeVar("T")


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
        existing = next((above for above in (path, *path.parents) if _is_there(above)), path)
        raise StorageError(
            f"{path}: {(cause.strerror or str(cause)).lower()}: {existing} belongs to {_owner(existing)}",
            hint="use your own data root (data.root, or the variable FEDLOOM_DATA), or ask the owner to share it with "
            "a group: chgrp -R GROUP DIR && chmod -R g+rwX DIR, and chmod g+s on its folders",
        ) from error


def read_stored(path: Path, missing: str, hint: str, *, shared: bool = True) -> bytes:
    """Return the content of a file of a data set, which is ``shared`` if it is in the data root.

    Raise DataError with the message ``missing`` if it does not exist; DataError or StorageError if it cannot be read.
    """
    try:
        with naming_owner(path) if shared else nullcontext():
            return read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{missing}: {path} does not exist", hint=hint) from None
    except OSError as error:
        if shared:
            raise as_storage_error(error) from error
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error


def check_digest(content: bytes, sha256: str, source: str, hint: str) -> None:
    """Check the content of a file, which errors call ``source``, against its hash; raise DataError if they differ."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(f"{source} is damaged: its sha256 is {digest}; it must be {sha256}", hint=hint)


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


LEFT_BEHIND = frozenset(
    {
        "thumbs.db",
        "ehthumbs.db",
        "ehthumbs_vista.db",
        "desktop.ini",
        "$recycle.bin",
        "system volume information",
        "__macosx",
        "icon\r",
        "@eadir",
        "#recycle",
        "lost+found",
    }
)
"""Names, in lower case, of files and folders that Windows, macOS and network drives add to a user's own."""

MOST_FOLDERS = 1_000_000
"""Maximum number of folders to walk: a few folders linked to each other can make an unbounded number of paths."""


def is_passed_over(name: str) -> bool:
    """Return True if a name is hidden or one that an operating system leaves behind."""
    return name.startswith(".") or name.lower() in LEFT_BEHIND


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder in a deterministic order: the files of each folder before its subfolders.

    Links to folders are followed. Hidden files and those of :data:`LEFT_BEHIND` are skipped.

    Raise DataError if a folder cannot be read, a link leads to a folder above it, or there are more than
    :data:`MOST_FOLDERS` folders.
    """
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    walked = 0
    while waiting:
        parent, above = waiting.pop()
        walked += 1
        if walked > MOST_FOLDERS:
            raise DataError(
                f"{folder} has more than {MOST_FOLDERS:,} folders, counting those that links lead to; remove the "
                "links between its folders"
            )
        files, folders, here = _entries(parent)
        if here in above:
            raise DataError(f"{parent} is a link to a parent folder, which forms a cycle; remove the link")
        yield from (parent / name for name in files)
        waiting += [(parent / name, above | {here}) for name in reversed(folders)]


def folders_in(folder: Path) -> list[str]:
    """Return the sorted names of the folders directly in a folder; raises and skips like :func:`files_below`."""
    return _entries(folder)[1]


def _entries(folder: Path) -> tuple[list[str], list[str], tuple[int, int]]:
    """Return the sorted names of files and of folders, and the (device, inode) pair that identifies this folder."""
    files: list[str] = []
    folders: list[str] = []
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            for entry in entries:
                if not is_passed_over(entry.name):
                    (folders if entry.is_dir() else files).append(entry.name)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read ({(error.strerror or str(error)).lower()}); change its permissions, or move it "
            "elsewhere"
        ) from error
    return sorted(files), sorted(folders), (status.st_dev, status.st_ino)


def parse_document(adapter: TypeAdapter[T], content: bytes, source: str, version: int, hint: str) -> T:
    """Return the object in a JSON text with a compact digest; raise DataError if damaged or of another version."""
    try:
        return adapter.validate_json(digests.without_compact_digest(content))
    except (digests.Damaged, ValidationError) as error:
        try:
            stated_version = parsed_json(content)["version"]
        except (ValueError, TypeError, KeyError):
            stated_version = version
        if stated_version == version:
            raise DataError(f"{source} is damaged: {text_fault(error)}", hint=hint) from error
        fault = f"has version {stated_version}; this FedLoom reads version {version}"
        raise DataError(f"{source} {fault}", hint=hint) from error


def text_fault(error: digests.Damaged | ValidationError) -> str:
    """Return the key and the error of an invalid JSON text."""
    if isinstance(error, digests.Damaged):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole text'}: {first['msg']:.200}"
