"""Where data lies, and how a folder appears there: whole or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.home import expanded
from fedloom.storage.folder import sync

log = logging.getLogger("fedloom.data")


def data_root(root: Path | str | None = None) -> Path:
    """Return the folder that holds all data: ``root``, else ``$FEDLOOM_DATA``, else ``~/.cache/fedloom``."""
    return expanded(root or os.environ.get("FEDLOOM_DATA") or "~/.cache/fedloom", "FEDLOOM_DATA or HOME")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is about to be made; others wait. It goes when the process goes, killed or not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Give an empty staging folder that takes the place of ``folder`` when the block ends without an exception.

    A process killed in the block leaves a staging folder, which no reader looks at and the next writer removes.
    Call it under :func:`locked`.
    """
    for leftover in folder.parent.glob(f".{folder.name}.staging-*"):
        log.info("removing %s, left by a process that was killed", leftover)
        shutil.rmtree(leftover)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.staging-", dir=folder.parent))
    try:
        content = staging / "content"
        content.mkdir()
        yield content
        if folder.exists():
            folder.rename(staging / "replaced")
        content.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
