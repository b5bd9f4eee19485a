"""Process log as a file of JSON lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from fedloom.core.logs import JsonLines, structured
from fedloom.storage.folder import open_to_append, storing


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Write FedLoom's log to a file of JSON lines as well.

    Raise StorageError if the file cannot be written.
    """
    with log_kept() as keep:
        keep(path)
        yield


@contextmanager
def log_kept(*, alone: bool = False) -> Iterator[Callable[[Path], None]]:
    """Buffer FedLoom's log until the block names its file; then write it there as JSON lines.

    An aggregator listens before it has a folder; its log includes the clients that join meanwhile. The block gets
    ``keep(path)``, which raises StorageError if the file cannot be written to. With ``alone``, lines go to the file
    only, once there is one, unless the log is shown as JSON lines.
    """
    logger = logging.getLogger("fedloom")
    propagated = logger.propagate
    lines = MemoryHandler(sys.maxsize)  # buffers while it has no target
    with ExitStack() as held:

        def keep(path: Path) -> None:
            with storing(path):
                file = held.enter_context(os.fdopen(open_to_append(path), "a", encoding="utf-8"))
            written = logging.StreamHandler(file)
            written.setFormatter(JsonLines())
            lines.setTarget(written)
            lines.capacity = 1  # flush every line
            lines.flush()
            logger.propagate = propagated and (not alone or structured())

        logger.addHandler(lines)
        try:
            yield keep
        finally:
            logger.removeHandler(lines)
            logger.propagate = propagated
            lines.close()
