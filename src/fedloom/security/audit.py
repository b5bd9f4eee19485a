"""Audit log: one JSON object per line for each join, refusal, revocation and change of settings."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

from fedloom.core.files import PRIVATE_FILE, open_to_append, storing

Event: TypeAlias = Literal["join", "leave", "refused", "revoked", "settings", "control", "handed_out", "predicted"]
"""Kind of an event.

In order: a peer joined; left; was refused; was disconnected by a revocation; an access file changed; an operator
paused, resumed or stopped the federation; a client's model was sent to a peer; a client's model was used for a
prediction that a peer requested.
"""

REPEATED_S = 10.0
"""Time during which further refusals of one kind to one host are counted instead of written."""

KINDS = 1000
"""Maximum number of kinds of refusals that are counted separately; further kinds share one counter."""

WAITING = 1000
"""Maximum number of lines that wait for a file."""

LONGEST = 500
"""Maximum length of a text that a peer may have chosen, in characters."""

Value: TypeAlias = str | int | float | bool | None


class Audit:
    """Appends to a file that only its owner may read (0600). Any thread may write.

    Each line has ``time`` (UTC), ``event``, and the caller's fields. A line is in the file when the call returns. The
    file is opened for each line, so that it may be moved (logrotate) at any time. Refusals, which anyone can cause in
    any number, are written at most once every :data:`REPEATED_S` per kind and host; ``repeated`` counts those left out
    since the last.

    Parameters
    ----------
    path
        The file, in an existing folder. With None, the last :data:`WAITING` lines wait for :meth:`keep`.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque(maxlen=WAITING)
        # (kind, host) -> (time of last line, refusals since)
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}

    def keep(self, path: Path) -> None:
        """Set the file, and write the waiting lines to it.

        Raise StorageError if it cannot be written to.
        """
        with self._lock:
            self._path = path
            self._put("".join(self._waiting))
            self._waiting.clear()

    def write(self, event: Event, **details: Value) -> None:
        """Write a line.

        Raise StorageError if it cannot be written: a peer that cannot be logged must not be admitted.
        """
        with self._lock:
            self._append(event, details)

    def refused(self, host: str, kind: str, **details: Value) -> None:
        """Log or count the refusal of a peer.

        Parameters
        ----------
        host
            Address of the peer, without the port.
        kind
            Kind of the refusal; never chosen by a peer.

        Raises
        ------
        StorageError
            If it cannot be written.
        """
        with self._lock:
            key = (kind, host) if (kind, host) in self._refused or len(self._refused) < KINDS else ("", "")
            now, (written_at, count_repeated) = self._clock(), self._refused.get(key, (-REPEATED_S, 0))
            if now - written_at < REPEATED_S:
                self._refused[key] = (written_at, count_repeated + 1)
                return
            if len(self._refused) >= KINDS:
                for old in [
                    k
                    for k, (refused_at, count) in self._refused.items()
                    if now - refused_at >= REPEATED_S and not count
                ]:
                    del self._refused[old]
            self._refused[key] = (now, 0)
            self._append(
                "refused",
                {"host": host, "kind": kind, **details} | ({"repeated": count_repeated} if count_repeated else {}),
            )

    def _append(self, event: Event, details: Mapping[str, Value]) -> None:
        shortened = {key: value[:LONGEST] if isinstance(value, str) else value for key, value in details.items()}
        timestamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": timestamp, "event": event, **shortened}) + "\n"  # ASCII, so that no text ends a line
        if self._path is None:
            self._waiting.append(line)
        else:
            self._put(line)

    def _put(self, text: str) -> None:
        assert self._path is not None
        with storing(self._path):
            file = open_to_append(self._path, PRIVATE_FILE)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)
