"""Runs in a folder, watched for changes by any number of pages."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fedloom.errors import FedloomError
from fedloom.federation.activity import Activity
from fedloom.reporting.status import RunStatus
from fedloom.runs.files import AUDIT, EXPERIMENT, JOURNAL, METRICS, PARTITION, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.runs.listing import DAMAGED, RUNNING, RunEntry, entry_of, run_folders

PATIENCE_S = 0.6
"""Seconds after which a page shows the runs read so far; its next refresh reads more of them."""

CHANGING = frozenset((EXPERIMENT, SUMMARY, METRICS, JOURNAL, PARTITION, AUDIT, "clients.csv"))
"""Files by which a change of a run is noticed."""

Signature: TypeAlias = tuple[object, ...]
"""Value that differs once a file of a run has changed."""


@dataclass(frozen=True)
class WatchedRun:
    """Run as last read.

    ``name`` is its path below the watched folder; ``remaining_s`` are the seconds until its last round at the recent
    rate, None if unknown.
    """

    name: str
    entry: RunEntry
    signature: Signature
    remaining_s: float | None = None

    @property
    def folder(self) -> RunFolder:
        """Folder of the run."""
        return RunFolder(Path(self.entry.path))


class RunWatch:
    """Runs in a folder and below it, of which only those with changed files are read again.

    Any thread may use it. A call returns what it has read after ``patience_s`` seconds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.patience_s = PATIENCE_S
        self._lock = threading.RLock()
        self._runs: dict[Path, WatchedRun] = {}
        self._status: dict[Path, RunStatus] = {}

    def read(self) -> tuple[Mapping[str, WatchedRun], int]:
        """Return the runs by name, and the number of runs that are not read yet because time was up."""
        with self._lock:
            signatures = {path: _signature(path) for path in run_folders(self.folder)}
            until, unread = time.monotonic() + self.patience_s, 0
            for known in (self._runs, self._status):
                for path in known.keys() - signatures.keys():
                    del known[path]
            for path in sorted(signatures, key=lambda path: signatures[path], reverse=True):  # newest first
                last = self._runs.get(path)
                if last is not None and last.signature == signatures[path]:
                    continue
                if time.monotonic() > until:
                    unread += last is None
                    continue
                self._runs[path] = self._watched(path, signatures[path])
            return {run.name: run for run in self._runs.values()}, unread

    def find(self, name: str) -> WatchedRun | None:
        """Return the run with this name as it is now; None if there is none."""
        with self._lock:
            known = (path for path, run in self._runs.items() if run.name == name and (path / EXPERIMENT).is_file())
            new = (path for path in run_folders(self.folder) if self._name(path) == name)
            path = next(known, None) or next(new, None)
            return None if path is None else self._watched(path, _signature(path))

    def activity(self, run: WatchedRun) -> Activity:
        """Return the status of a run, whose journal is read only as far as it has grown; raise DataError if damaged."""
        with self._lock:
            return self._status.setdefault(Path(run.entry.path), RunStatus(run.folder)).activity()

    def _watched(self, path: Path, signature: Signature) -> WatchedRun:
        entry = _entry(path)
        run = WatchedRun(self._name(path), entry, signature)
        if entry.state != RUNNING:
            self._status.pop(path, None)
            return run
        try:
            return WatchedRun(run.name, entry, signature, self.activity(run).remaining_s)
        except (FedloomError, OSError):
            return run

    def _name(self, path: Path) -> str:
        """Return the name of a run; characters that do not print, and bytes that are no text, are replaced."""
        name = str(path.relative_to(self.folder)) if path != self.folder else self.folder.resolve().name
        text = os.fsencode(name).decode(errors="replace")
        return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _entry(path: Path) -> RunEntry:
    """Return the entry of a run, which may vanish, or become unreadable, at any time."""
    try:
        return entry_of(RunFolder(path))
    except (FedloomError, OSError, ValueError) as error:
        return RunEntry(str(path), DAMAGED, fault=f"{path} cannot be read ({error})")


def _signature(path: Path) -> Signature:
    """Return the signature of a run, which begins with the time of its last change."""
    stats = tuple(_stats(path))
    return (max((changed for changed, *_ in stats), default=0), _is_held(path), *stats)


def _stats(path: Path) -> Iterator[tuple[int, int, str]]:
    with suppress(OSError), os.scandir(path) as files:
        for file in sorted((file for file in files if file.name in CHANGING), key=lambda file: file.name):
            stat = file.stat()
            yield stat.st_mtime_ns, stat.st_size, file.name


def _is_held(path: Path) -> bool:
    try:
        return RunFolder(path).is_held()
    except (FedloomError, OSError):
        return False
