"""The audit log: one JSON object a line for each join, refusal, revocation and change of settings."""

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

from fedloom.storage.folder import PRIVATE_FILE, open_to_append, storing

Event: TypeAlias = Literal["join", "leave", "refused", "revoked", "settings", "control", "handed_out"]
"""What happened: a peer was let in, or went; was not let in; was put out while it was connected; a file that decides
about others changed; an operator paused the federation, had it go on, or stopped it; a peer was given a
client's model."""

REPEATED_S = 10.0
"""For so long, refusals of one kind to one host are counted, not written."""

KINDS = 1000
"""Kinds of refusals that are told apart; those beyond share one."""

WAITING = 1000
"""Lines that wait for a file at most."""

LONGEST = 500
"""Characters of a text that a peer may have chosen."""

Value: TypeAlias = str | int | float | bool | None


class Audit:
    """Appends to a file that only its owner may read (0600). Any thread may write.

    Each line has ``time`` (UTC), ``event``, and what the caller tells. A line is in the file when the call returns. The
    file is opened for each line: it may be moved away (logrotate) at any time. Refusals, of which anybody can cause any
    number, are written at most once each :data:`REPEATED_S` for a kind and host; ``repeated`` says how many more there
    were since the last.

    Parameters
    ----------
    path
        The file; its folder is there. Without, lines wait for :meth:`keep`, the last :data:`WAITING` of them.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque(maxlen=WAITING)
        self._refused: dict[tuple[str, str], tuple[float, int]] = {}  # kind and host: written when, counted since

    def keep(self, path: Path) -> None:
        """Say where lines go, and write those that wait.

        Raises
        ------
        StorageError
            If it cannot be written to.
        """
        with self._lock:
            self._path = path
            self._put("".join(self._waiting))
            self._waiting.clear()

    def write(self, event: Event, **told: Value) -> None:
        """Write a line.

        Raises
        ------
        StorageError
            If it cannot be written: who may not be watched may not be let in.
        """
        with self._lock:
            self._append(event, told)

    def refused(self, host: str, kind: str, **told: Value) -> None:
        """Write that a peer of a host was not let in, or count it.

        Parameters
        ----------
        host
            Without its port.
        kind
            Why, in a word that no peer chooses.

        Raises
        ------
        StorageError
            If it cannot be written.
        """
        with self._lock:
            key = (kind, host) if (kind, host) in self._refused or len(self._refused) < KINDS else ("", "")
            now, (written, repeated) = self._clock(), self._refused.get(key, (-REPEATED_S, 0))
            if now - written < REPEATED_S:
                self._refused[key] = (written, repeated + 1)
                return
            if len(self._refused) >= KINDS:
                for old in [k for k, (when, count) in self._refused.items() if now - when >= REPEATED_S and not count]:
                    del self._refused[old]
            self._refused[key] = (now, 0)
            self._append("refused", {"host": host, "kind": kind, **told} | ({"repeated": repeated} if repeated else {}))

    def _append(self, event: Event, told: Mapping[str, Value]) -> None:
        cut = {key: value[:LONGEST] if isinstance(value, str) else value for key, value in told.items()}
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": when, "event": event, **cut}) + "\n"  # ASCII: no line ends but ours
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
