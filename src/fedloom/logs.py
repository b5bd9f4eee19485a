"""What a line of a log is made of, and who may say what it is about."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

FIELDS = ("run", "phase", "round", "attempt", "client", "worker", "exchange")
"""What a line may be about: given with the record (``extra``), or by :func:`lines_about`."""

_about: Callable[[], Mapping[str, Any]] = dict


@contextmanager
def lines_about(about: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Every line of this process that is written as JSON in the block is about what this returns, too.

    Parameters
    ----------
    about
        Is called by any thread that logs, with each line; returns some of :data:`FIELDS`.
    """
    global _about
    before, _about = _about, about
    try:
        yield
    finally:
        _about = before


class JsonLines(logging.Formatter):
    """A log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``logger``, ``message``, those of :data:`FIELDS` that are known, ``data`` and ``trace``.

        ``data`` is what a record was given as such: numbers of a round or an evaluation.
        """
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        own = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        known = {**_about(), **own}
        line |= {name: known[name] for name in FIELDS if known.get(name) is not None}
        if hasattr(record, "data"):
            line["data"] = record.data
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII: nothing in it ends the line, or speaks to a terminal


def structured() -> bool:
    """Whether this process shows its log as JSON lines (``fedloom --log-format json``)."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
