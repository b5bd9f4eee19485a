"""Format of log lines, and the context attached to them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedloom.errors import without_secrets

FIELDS = ("run", "phase", "round", "attempt", "client", "worker", "exchange")
"""Context fields of a line, from the record (``extra``) or from :func:`lines_about`."""

_about: Callable[[], Mapping[str, Any]] = dict


@contextmanager
def lines_about(context: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Add context to every JSON log line of this process within the block.

    Parameters
    ----------
    context
        Called with each line, from any thread that logs; returns some of :data:`FIELDS`.
    """
    global _about
    previous, _about = _about, context
    try:
        yield
    finally:
        _about = previous


class JsonLines(logging.Formatter):
    """Formatter that writes a log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return ``time``, ``level``, ``logger``, ``message``, known :data:`FIELDS`, ``data`` and ``trace`` as JSON.

        ``data`` holds the numbers of a round or an evaluation, if the record carries them. User information in URLs is
        removed.
        """
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        own = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        fields = {**_about(), **own}
        line |= {name: fields[name] for name in FIELDS if fields.get(name) is not None}
        if hasattr(record, "data"):
            line["data"] = record.data
        if record.exc_info:
            line["trace"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line)  # ASCII: no line ends or terminal escapes


def structured() -> bool:
    """Return whether this process logs JSON lines (``fedloom --log-format json``)."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
