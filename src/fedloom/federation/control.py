"""What an operator asks of a federation: that it pauses, goes on, stops. Any thread asks, the round loop obeys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fedloom.errors import DataError
from fedloom.federation.activity import Monitor
from fedloom.federation.folder import RunFolder

NAME = "control.json"
"""In a run's folder: whether it is paused, and who asked for that."""

VERSION = 1
POLL_S = 0.2


@dataclass(frozen=True)
class Pause:
    """A pause that was asked for: by whom, and when, in seconds since 1970."""

    by: str
    since: float


def read_pause(folder: RunFolder) -> Pause | None:
    """Return the pause that holds in a run; None without one.

    Raises
    ------
    DataError
        If what says so is damaged.
    """
    match folder.json_or_none(NAME):
        case None | {"version": 1, "paused": None}:
            return None
        case {"version": 1, "paused": {"by": str(by), "since": int() | float() as since}}:
            return Pause(by, since)
    raise DataError(f"{folder.path / NAME}: not a record of a pause", hint="remove it; then the run continues")


class Control:
    """Pause, and stop.

    Parameters
    ----------
    monitor
        Is told of a pause that is asked for.
    stop
        Ends the run after the round under way, or, if it is given True, at once.

    Both are attributes, too.
    """

    def __init__(self, monitor: Monitor, stop: Callable[[bool], None]) -> None:
        self.monitor = monitor
        self.stop = stop
        self._changed = threading.Condition()
        self._asked: Pause | None = None
        self._folder: RunFolder | None = None

    def keep(self, folder: RunFolder) -> None:
        """Say where a pause is written down; one that is there holds.

        Raises
        ------
        DataError
            If what is there is damaged.
        StorageError
            If a pause that was asked for before cannot be written.
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
        """The pause that was asked for, and holds from the end of the round under way."""
        return self._asked

    def pause(self, by: str) -> bool:
        """Ask for a pause; whether there was none. It is written down when this returns.

        Raises
        ------
        StorageError
            If it cannot be written; then it was not asked for.
        """
        with self._changed:
            return self._asked is None and self._set(Pause(by, time.time()))

    def resume(self) -> bool:
        """End a pause; whether there was one.

        Raises
        ------
        StorageError
            If that cannot be written; then the pause holds.
        """
        with self._changed:
            return self._asked is not None and self._set(None)

    def _set(self, pause: Pause | None) -> bool:
        self._write(pause)
        self._become(pause)
        return True

    def _write(self, pause: Pause | None) -> None:
        if self._folder is not None:
            told = None if pause is None else asdict(pause)
            self._folder.write_json(NAME, {"version": VERSION, "paused": told})

    def _become(self, pause: Pause | None) -> None:
        self._asked = pause
        self.monitor.pausing(None if pause is None else pause.by)
        self._changed.notify_all()

    def wait(self, stop: threading.Event) -> None:
        """Wait while there is a pause, until ``stop`` is set."""
        with self._changed:
            while self._asked is not None and not stop.is_set():
                self._changed.wait(POLL_S)
