"""The log of a process as a file of JSON lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.logs import JsonLines, structured
from fedloom.storage.folder import open_to_append, storing


@contextmanager
def logged_to(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Write FedLoom's log to a file of JSON lines too, or to it alone, unless it is shown as JSON lines, too.

    Raises
    ------
    StorageError
        If it cannot be written to.
    """
    with storing(path):
        file = os.fdopen(open_to_append(path), "a", encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("fedloom")
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = propagated and (not alone or structured())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        handler.close()
        file.close()
