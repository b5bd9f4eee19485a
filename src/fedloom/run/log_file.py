"""The log of a process as a file of JSON lines."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.storage.folder import open_to_append, storing


class JsonLines(logging.Formatter):
    """A log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``logger``, ``message``, and ``trace`` where there is one."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII: nothing in it ends the line, or speaks to a terminal


@contextmanager
def logged_to(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Write FedLoom's log to a file of JSON lines too, or to it alone.

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
    logger.propagate = propagated and not alone
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        handler.close()
        file.close()
