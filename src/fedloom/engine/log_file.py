"""Process log as a file of JSON lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from fedloom.core.files import open_to_append, storing
from fedloom.core.logs import JsonLines, structured


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Write FedLoom's log to a file of JSON lines as well.

    Raise StorageError if the file cannot be written.
    """
    with log_kept() as keep:
        keep(path)
        yield


class _File(logging.Handler):
    """Handler that appends JSON lines to a file, until a line cannot be written; ``failed`` is then called once."""

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self._descriptor, self._failed = descriptor, failed

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line; without a buffer, so that closing the file cannot fail."""
        line = f"{self.format(record)}\n".encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self._failed(error)


@contextmanager
def log_kept(*, alone: bool = False) -> Iterator[Callable[[Path], None]]:
    """Buffer FedLoom's log until the block names its file; then write it there as JSON lines.

    An aggregator listens before it has a folder; its log includes the clients that join meanwhile. The block gets
    ``keep(path)``, which raises StorageError if the file cannot be opened. With ``alone``, lines go to the file
    only, once there is one, unless the log is shown as JSON lines. If the file cannot be written to later, as on a full
    disk, the log says so where it is shown, and continues there.
    """
    logger = logging.getLogger("fedloom")
    propagated = logger.propagate
    lines = MemoryHandler(sys.maxsize)  # buffers while it has no target
    with ExitStack() as stack:

        def keep(path: Path) -> None:
            with storing(path):
                descriptor = open_to_append(path)
            stack.callback(os.close, descriptor)

            def failed(error: OSError) -> None:
                lines.setTarget(logging.NullHandler())
                logger.propagate = propagated
                logger.warning("%s cannot be written: %s", path, error.strerror)

            lines.setTarget(_File(descriptor, failed))
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
