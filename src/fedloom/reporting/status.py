"""Status of a run from its files, in the form of a live federation's, even if no process runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedloom.core import digests
from fedloom.data.manifest import Manifest
from fedloom.errors import DataError
from fedloom.federation.activity import Activity, Phase, RosterClient
from fedloom.federation.monitor import Monitor, read_pause
from fedloom.federation.roster import Member
from fedloom.runs.files import JOURNAL, PARTITION, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import BURNT, DONE, EVALUATED, SPENT, Attempt, added, attempt_of, fold
from fedloom.runs.listing import has_ended


class RunStatus:
    """Status of a run, read again at each call, with the journal read only as far as it has grown.

    Every method first updates the copy of a published run, and raises as :meth:`RunFolder.refresh`.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._partition: tuple[float, Manifest] | None = None
        self._begin()

    def _begin(self) -> None:
        self._end, self._digest = 0, digests.beginning(JOURNAL)
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
        """Return the status; ``phase`` is ``running``, ``interrupted``, ``finished``, or ``published`` for a copy.

        Raise DataError if a file is damaged.
        """
        run = self._run
        run.refresh()
        experiment, summary = run.stored_experiment(), run.json_or_none(SUMMARY)
        self._read_journal()
        self._monitor.know(self._roster())
        last, durable = run.last_evaluation(), run.durable()
        self._monitor.resume(self._done, None if last is None else last[0], None)
        try:
            name, method = str(experiment["name"]), str(experiment["algorithm"]["name"])
            rounds = experiment["federation"]["rounds"]
            phase: Phase = "finished" if has_ended(experiment, summary, self._done) else "interrupted"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{run.path} was not written by FedLoom ({error!r})") from error
        since = run.changed_at()
        if run.published is not None and (record := run.published.record) is not None:
            phase, since = "finished" if record.is_finished else "published", run.published.published_at()
            durable = record.round, since
        elif run.is_held():
            phase = "running"
        now, pause = self._monitor.now(), read_pause(run)
        return replace(
            now,
            run=name,
            method=method,
            phase=phase,
            since=since,
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
        self._run.refresh()
        self._read_journal()
        self._monitor.know(self._roster())
        return [
            RosterClient(name, not entry.seen, examples=entry.train, last_round=self._last_round.get(name))
            for name, entry in sorted(self._monitor.roster.items())
        ]

    def _roster(self) -> Any:
        """Return the entries of the roster: from the journal in an open federation, else from the partition."""
        path = self._run.path / PARTITION
        manifest = None
        if path.exists():
            modified_at = path.stat().st_mtime
            if self._partition is None or self._partition[0] != modified_at:
                self._partition = modified_at, self._run.manifest()
            manifest = self._partition[1]
        if not self._is_open:
            return () if manifest is None else manifest.clients
        classes = 0 if manifest is None else manifest.spec.classes
        return [Member.read(member).entry(classes) for member in self._members.values()]

    def _read_journal(self) -> None:
        if not self._run.line_file(JOURNAL).has_line(self._end, self._digest):  # another run, or truncated on resume
            self._begin()
        for line in self._run.placed(JOURNAL, start=self._end):
            if line.object is None:
                return  # still being written
            self._take(attempt_of(line.object, self._run))
            self._end, self._digest = line.end, line.digest

    def _take(self, attempt: Attempt) -> None:
        self._is_open = self._is_open or bool(attempt.joined)
        fold(self._members, attempt.joined, attempt.left)
        if attempt.outcome == EVALUATED:
            return
        if attempt.outcome == SPENT:
            self._trouble = "training has ended: another round would exceed its privacy budget"
            return
        if attempt.outcome == BURNT:
            self._monitor.burn(attempt.round)
            self._done = max(self._done, attempt.round)
            return
        counts = attempt.outcome == DONE
        self._monitor.attempted(attempt, counts=counts)
        self._refused.update(attempt.refused)
        self._up = added(self._up, attempt.wire_up)
        self._down = added(self._down, attempt.wire_down)
        self._trouble = ""
        if not counts:
            self._trouble = f"round {attempt.round}: attempt {attempt.attempt} failed: {attempt.outcome}"
            return
        self._done = max(self._done, attempt.round)
        for conversation in attempt.conversations:
            lost_rows = {loss.row for loss in conversation.lost}
            for row, client in enumerate(conversation.clients):
                if row not in lost_rows:
                    self._last_round[client] = attempt.round
