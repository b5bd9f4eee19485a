"""The log of a process as a file of JSON lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from fedloom.logs import JsonLines, structured
from fedloom.storage.folder import open_to_append, storing


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Write FedLoom's log to a file of JSON lines too.

    Raises
    ------
    StorageError
        If it cannot be written to.
    """
    with log_kept() as keep:
        keep(path)
        yield


@contextmanager
def log_kept(*, alone: bool = False) -> Iterator[Callable[[Path], None]]:
    """Keep FedLoom's log until the block says which file it belongs in, as JSON lines; from then on, write it there.

    An aggregator listens before it has a folder: who joins meanwhile is in its log, too.

    Parameters
    ----------
    alone
        Whether lines go, once there is a file, to it alone, unless they are shown as JSON lines.

    Yields
    ------
    Callable
        ``keep(path)``; raises StorageError if the file cannot be written to.
    """
    logger = logging.getLogger("fedloom")
    propagated = logger.propagate
    lines = MemoryHandler(sys.maxsize)  # without a target it keeps what it gets
    with ExitStack() as held:

        def keep(path: Path) -> None:
            with storing(path):
                file = held.enter_context(os.fdopen(open_to_append(path), "a", encoding="utf-8"))
            written = logging.StreamHandler(file)
            written.setFormatter(JsonLines())
            lines.setTarget(written)
            lines.capacity = 1  # each line at once
            lines.flush()
            logger.propagate = propagated and (not alone or structured())

        logger.addHandler(lines)
        try:
            yield keep
        finally:
            logger.removeHandler(lines)
            logger.propagate = propagated
            lines.close()
