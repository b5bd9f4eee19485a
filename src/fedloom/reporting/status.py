"""Status of a run from its files, in the form of a live federation's, even if no process runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom.data.manifest import Manifest
from fedloom.errors import DataError
from fedloom.federation.activity import Activity, Phase, RosterClient
from fedloom.federation.control import read_pause
from fedloom.federation.folder import RunFolder
from fedloom.federation.journal import DONE, EVALUATED, NAME, Attempt, attempt_of, fold
from fedloom.federation.monitor import Monitor
from fedloom.federation.published import Look, Record
from fedloom.federation.roster import Member
from fedloom.reporting.run_list import changed_at, is_held, is_whole, run_folders
from fedloom.reporting.runs import experiment_of

_CHECKPOINT = re.compile(r"round-(\d+)\.safetensors")


def newest_run(folder: Path) -> Path:
    """Return the most recently changed run in a folder or below it.

    Raises
    ------
    DataError
        If there is none.
    """
    found = list(run_folders(folder)) if folder.is_dir() else []
    if not found:
        raise DataError(
            f"{folder}: found no run; allowed: the address of an aggregator, a run's folder, or its URL",
            hint="fedloom status HOST:PORT|RUN",
        )
    return max(found, key=changed_at)


class RunFiles:
    """Reader of a run's status that can be called repeatedly; it reads the journal incrementally."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._partition: tuple[float, Manifest] | None = None
        self._begin()

    def _begin(self) -> None:
        self._end, self._inode = 0, 0
        self._monitor = Monitor()
        self._members: dict[str, Mapping[str, Any]] = {}
        self._is_open = False
        self._refused: Counter[str] = Counter()
        self._up: int | None = 0
        self._down: int | None = 0
        self._last_round: dict[str, int] = {}
        self._trouble = ""
        self._done = 0

    def activity(self) -> Activity:
        """Return the status from the run's files; ``phase`` is ``running``, ``interrupted`` or ``finished``.

        Raises
        ------
        DataError
            If a file is damaged.
        """
        folder = self._folder
        experiment = experiment_of(folder)
        self._read_journal()
        self._monitor.know(self._roster())
        summary = folder.json_or_none("summary.json")
        try:
            name, method = str(experiment["name"]), str(experiment["algorithm"]["name"])
            rounds = experiment["federation"]["rounds"]
            phase: Phase = "finished" if is_whole(experiment, summary, self._done) else "interrupted"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{folder.path}: not what FedLoom writes ({error!r})") from error
        if is_held(folder.path):
            phase = "running"
        line = folder.last_evaluation()
        durable = self._durable()
        self._monitor.resume(self._done, None if line is None else line[0], None)
        now, changed, pause = self._monitor.now(), changed_at(folder.path), read_pause(folder)
        return replace(
            now,
            run=name,
            method=method,
            phase=phase,
            since=changed,
            started=None,
            message=self._trouble,
            rounds=rounds,
            durable_round=None if durable is None else durable[0],
            durable_at=None if durable is None else durable[1],
            paused_by=None if pause is None or phase == "finished" else pause.by,
            clients=replace(now.clients, connected=None, absent=None),
            totals=replace(
                now.totals, bytes_up=self._up, bytes_down=self._down, phases={}, refusals=dict(self._refused)
            ),
        )

    def clients(self) -> list[RosterClient]:
        """Return the roster's clients sorted by id, with the information that files have."""
        self._read_journal()
        self._monitor.know(self._roster())
        roster = self._monitor.roster
        return [
            RosterClient(
                name, not roster[name].seen, examples=roster[name].train, last_round=self._last_round.get(name)
            )
            for name in sorted(roster)
        ]

    def _durable(self) -> tuple[int, float] | None:
        """Return the last round with a checkpoint, and when that was written."""
        found: list[tuple[int, float]] = []
        checkpoints = self._folder.checkpoints
        for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
            if named := _CHECKPOINT.fullmatch(path.name):
                try:
                    found.append((int(named[1]), path.stat().st_mtime))
                except FileNotFoundError:  # superseded meanwhile
                    continue
        return max(found, default=None)

    def _roster(self) -> Any:
        """Return the entries of the roster: from the journal in an open federation, else from the partition."""
        path = self._folder.path / "partition.json"
        manifest = None
        if path.exists():
            written = path.stat().st_mtime
            if self._partition is None or self._partition[0] != written:
                self._partition = written, self._folder.manifest()
            manifest = self._partition[1]
        if not self._is_open:
            return () if manifest is None else manifest.clients
        classes = 0 if manifest is None else manifest.classes
        return [Member.read(told).entry(classes) for told in self._members.values()]

    def _read_journal(self) -> None:
        path = self._folder.path / NAME
        if not path.exists():
            return
        found = path.stat()
        if found.st_ino != self._inode or found.st_size < self._end:  # another run, or truncated on resume
            self._begin()
            self._inode = found.st_ino
        for line in self._folder.placed(NAME, start=self._end):
            if line.object is None:
                return  # still being written
            self._take(attempt_of(line.object, self._folder))
            self._end = line.end

    def _take(self, attempt: Attempt) -> None:
        self._is_open = self._is_open or bool(attempt.joined)
        fold(self._members, attempt.joined, attempt.left)
        if attempt.outcome == EVALUATED:
            return
        counts = attempt.outcome == DONE
        self._monitor.attempted(attempt, counts=counts)
        self._refused.update(attempt.refused)
        self._up = _sum(self._up, attempt.wire_up)
        self._down = _sum(self._down, attempt.wire_down)
        self._trouble = ""
        if not counts:
            self._trouble = f"round {attempt.round}: attempt {attempt.attempt} failed: {attempt.outcome}"
            return
        self._done = max(self._done, attempt.round)
        for conversation in attempt.conversations:
            lost = {loss.row for loss in conversation.lost}
            for row, client in enumerate(conversation.clients):
                if row not in lost:
                    self._last_round[client] = attempt.round


class PublishedRun:
    """Reader of a published run's status that can be called repeatedly.

    Parameters
    ----------
    look
        Local mirror of the published run.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._files = RunFiles(look.folder)

    def activity(self) -> Activity:
        """Return the status as last published; ``phase`` is ``finished`` or ``published``.

        Raises
        ------
        DataError
            If there is no run, or it is damaged.
        StorageError, RefusedError
            If the store fails or denies access.
        """
        record = self._record()
        at, now = self._look.published_at(record), self._files.activity()
        phase: Phase = "finished" if record.is_finished else "published"
        return replace(now, phase=phase, since=at, durable_round=record.round, durable_at=at)

    def clients(self) -> list[RosterClient]:
        """Return the roster's clients sorted by id; raise as :meth:`activity`."""
        self._record()
        return self._files.clients()

    def _record(self) -> Record:
        record = self._look.refresh()
        if record is None:
            raise DataError(f"{self._look.url}: found no run that is published there", hint="fedloom run --publish URL")
        return record


def _sum(so_far: int | None, more: int | None) -> int | None:
    return None if so_far is None or more is None else so_far + more
