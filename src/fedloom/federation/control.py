"""Operator control of a federation: pause, resume, stop. Any thread may request it; the round loop complies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fedloom.errors import DataError
from fedloom.federation.monitor import Monitor
from fedloom.runs.folder import RunFolder

NAME = "control.json"
"""File in a run's folder that records a pause and who requested it."""

VERSION = 1
POLL_S = 0.2


@dataclass(frozen=True)
class Pause:
    """A requested pause: by whom, and when, in seconds since 1970."""

    by: str
    since: float


def read_pause(folder: RunFolder) -> Pause | None:
    """Return the pause in force in a run; None without one.

    Raise DataError if the file is damaged.
    """
    match folder.json_or_none(NAME):
        case None | {"version": 1, "paused": None}:
            return None
        case {"version": 1, "paused": {"by": str(by), "since": int() | float() as since}}:
            return Pause(by, since)
    raise DataError(f"{folder.path / NAME}: not a record of a pause", hint="remove the file to let the run continue")


class Control:
    """Requests of an operator to the round loop: pause, resume, stop.

    Parameters
    ----------
    monitor
        Notified of a requested pause.
    stop
        Ends the run after the current round, or at once if called with True.

    Both are also attributes.
    """

    def __init__(self, monitor: Monitor, stop: Callable[[bool], None]) -> None:
        self.monitor = monitor
        self.stop = stop
        self._changed = threading.Condition()
        self._asked: Pause | None = None
        self._folder: RunFolder | None = None

    def keep(self, folder: RunFolder) -> None:
        """Set the folder that a pause is recorded in; a pause recorded there takes effect.

        Raise DataError if the record is damaged. Raise StorageError if a pause requested earlier cannot be written.
        """
        found = read_pause(folder)
        with self._changed:
            self._folder = folder
            if self._asked is None:
                self._become(found)
            else:
                self._write(self._asked)

    @property
    def paused(self) -> Pause | None:
        """Requested pause, in force from the end of the current round."""
        return self._asked

    def pause(self, by: str) -> bool:
        """Request a pause; return whether there was none before. It is recorded when this returns.

        Raise StorageError if it cannot be written; then no pause is requested.
        """
        with self._changed:
            return self._asked is None and self._set(Pause(by, time.time()))

    def resume(self) -> bool:
        """End a pause; return whether there was one.

        Raise StorageError if this cannot be written; then the pause stays in force.
        """
        with self._changed:
            return self._asked is not None and self._set(None)

    def _set(self, pause: Pause | None) -> bool:
        self._write(pause)
        self._become(pause)
        return True

    def _write(self, pause: Pause | None) -> None:
        if self._folder is not None:
            self._folder.write_json(NAME, {"version": VERSION, "paused": None if pause is None else asdict(pause)})

    def _become(self, pause: Pause | None) -> None:
        self._asked = pause
        self.monitor.pausing(None if pause is None else pause.by)
        self._changed.notify_all()

    def wait(self, stop: threading.Event) -> None:
        """Wait until there is no pause or ``stop`` is set."""
        with self._changed:
            while self._asked is not None and not stop.is_set():
                self._changed.wait(POLL_S)
