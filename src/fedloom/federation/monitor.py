"""Monitor and control of a running federation.

The round loop and the aggregator update the monitor, and any thread reads snapshots. Any thread may request a pause or
a stop, with which the round loop complies.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fedloom.errors import DataError
from fedloom.federation.activity import (
    AWAITED,
    OVER,
    RECENT,
    Activity,
    ClientCounts,
    Connected,
    LastEvaluation,
    Phase,
    PrivacySpent,
)

if TYPE_CHECKING:
    from fedloom.data.manifest import ClientEntry
    from fedloom.runs.folder import RunFolder
    from fedloom.runs.journal import Attempt


CONTROL = "control.json"
"""File in a run's folder that records a pause and who requested it."""

CONTROL_VERSION = 1

POLL_S = 0.2


class Monitor:
    """State of a federation; see :class:`Activity` for the arguments."""

    def __init__(self, run: str = "", method: str = "", rounds: int | None = None, incarnation: str = "") -> None:
        started = time.time()
        self._lock = threading.Lock()
        self._state = Activity(run, method, "waiting", started, started, incarnation, started, rounds=rounds)
        self._phase_began = time.monotonic()
        self._stopping = False
        self._last_round: Callable[[str], int | None] = lambda client: None
        self.tell_members: Callable[[], None] = lambda: None
        """Sends the members the standing of the federation, before anything that is sent to them later."""
        self._roster: Mapping[str, ClientEntry] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # seconds and client steps of rounds
        self._exchanges: Counter[str] = Counter()  # seconds
        self._phases: Counter[str] = Counter()  # seconds

    # ---- updates by the aggregator's thread and the round loop

    def enter(self, phase: Phase, message: str = "", *, doing: int | None = None, attempt: int | None = None) -> None:
        """Enter a phase; ignored once the run has ended."""
        with self._lock:
            if self._state.phase not in OVER:
                self._become(phase, message)
                self._state = replace(self._state, doing=doing, attempt=attempt)

    def _become(self, phase: Phase, message: str) -> None:
        began, self._phase_began = self._phase_began, time.monotonic()
        self._phases[self._state.phase] += self._phase_began - began  # type: ignore[assignment]
        since = self._state.since if phase == self._state.phase else time.time()
        self._state = replace(self._state, phase=phase, since=since, message=message)

    @contextmanager
    def during(self, phase: Phase, message: str = "") -> Iterator[None]:
        """Enter another phase for the block, then return to the previous one."""
        with self._lock:
            previous = self._state
            self._become(phase, message)
        try:
            yield
        finally:
            with self._lock:
                self._become(previous.phase, previous.message)
                self._state = replace(self._state, since=previous.since)

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)

    def say(self, message: str) -> None:
        """Set the message for a person."""
        self._update(message=message)

    def stopping(self) -> None:
        """Enter the phase ``stopping`` until the run ends. A signal handler may call this."""
        self._stopping = True

    def pausing(self, identity: str | None) -> None:
        """Record who requested a pause; None clears it."""
        self._update(paused_by=identity)

    def know(self, clients: Iterable[ClientEntry]) -> None:
        """Set the clients of the roster."""
        roster = {entry.id: entry for entry in clients}
        observing = sum(not entry.seen for entry in roster.values())
        with self._lock:
            self._roster = roster
            counts = replace(self._state.clients, roster=len(roster), observing=observing)
            self._state = replace(self._state, clients=counts)

    def counting(self, last_round: Callable[[str], int | None]) -> None:
        """Set the function that returns the last round that counted a client; any thread may call it."""
        self._last_round = last_round

    def resume(
        self, round: int, line: Mapping[str, Any] | None, durable_at: float | None, best_round: int | None = None
    ) -> None:
        """Resume after a round, given the last line of its metrics, the time of its checkpoint, and the best round."""
        self._update(
            round=round,
            measured=None if line is None else LastEvaluation.from_line(line),
            durable_round=None if durable_at is None else round,
            durable_at=durable_at,
            best_round=best_round,
            privacy=None if line is None else PrivacySpent.from_line(line),
        )

    def attempted(self, attempt: Attempt, *, counts: bool) -> None:
        """Record the end of an attempt at a round; ``counts`` if it became a round."""
        with self._lock:
            self._exchanges.update(attempt.phases)
            state, totals = self._state, self._state.totals
            totals = replace(totals, seconds=totals.seconds + attempt.seconds)
            if not counts:
                totals = replace(totals, failed_attempts=totals.failed_attempts + 1)
                self._state = replace(state, doing=None, attempt=None, totals=totals)
                return
            steps = attempt.statistics["client_steps"]
            self._recent.append((attempt.seconds, steps))
            cohort, answers = cohort_of(
                (record.clients, {loss.row for loss in record.lost}) for record in attempt.conversations
            )
            self._state = replace(
                state,
                doing=None,
                attempt=None,
                round=attempt.round,
                train_loss=attempt.statistics.get("loss"),
                clients=replace(state.clients, cohort=cohort, answered=answers),
                totals=replace(totals, rounds=totals.rounds + 1, client_steps=totals.client_steps + steps),
            )

    def burn(self, round: int) -> None:
        """Record that a round is left out."""
        with self._lock:
            self._state = replace(self._state, doing=None, attempt=None, round=round)

    def evaluated(self, line: Mapping[str, Any], best_round: int | None = None) -> None:
        """Record the evaluation in a line of ``metrics.jsonl``, and the best round so far; tell the members."""
        self._update(measured=LastEvaluation.from_line(line), best_round=best_round)
        self.tell_members()

    def spent(self, privacy: PrivacySpent) -> None:
        """Record the privacy that training has spent so far."""
        self._update(privacy=privacy)

    def durable(self, round: int) -> None:
        """Record that a checkpoint holds this round."""
        self._update(durable_round=round, durable_at=time.time())

    # ---- read by any thread

    @property
    def roster(self) -> Mapping[str, ClientEntry]:
        """Clients of the roster, by id."""
        return self._roster

    def last_round(self, client: str) -> int | None:
        """Return the last round that counted a client; None before the first."""
        return self._last_round(client)

    def about(self) -> dict[str, Any]:
        """Return the context of a log line: ``run``, ``phase``, ``round`` and ``attempt``, as far as known."""
        now = self._state
        round = now.round if now.doing is None else now.doing
        return {"run": now.run, "phase": now.phase, "round": round, "attempt": now.attempt}

    def now(self, connected: Connected | None = None) -> Activity:
        """Return a snapshot; ``connected`` is the aggregator's own state, None in process."""
        with self._lock:
            state = self._state
            rounds_per_s, client_steps_per_s = _rates(self._recent)
            phases = self._phases + Counter({state.phase: time.monotonic() - self._phase_began})
            totals = replace(state.totals, exchanges=dict(self._exchanges), phases=dict(phases))
        state = replace(
            state,
            time=time.time(),
            phase="stopping" if self._stopping and state.phase not in OVER else state.phase,
            rounds_per_s=rounds_per_s,
            client_steps_per_s=client_steps_per_s,
            clients=_present(state.clients, state.clients.roster),
            totals=totals,
        )
        return state if connected is None else _with_connected(state, connected)


def _with_connected(state: Activity, connected: Connected) -> Activity:
    awaiting = connected.awaiting
    return replace(
        state,
        clients=_present(state.clients, connected.clients),
        awaited=len(awaiting),
        late=sum(each.late for each in awaiting),
        awaiting=tuple(sorted(awaiting, key=lambda each: (not each.late, each.since, each.client))[:AWAITED]),
        totals=replace(
            state.totals,
            bytes_up=connected.bytes_up,
            bytes_down=connected.bytes_down,
            refusals=dict(connected.refusals),
        ),
        workers=connected.workers,
        declined=dict(connected.declined),
        too_new=dict(connected.too_new),
    )


def _present(counts: ClientCounts, connected: int) -> ClientCounts:
    return replace(counts, connected=connected, absent=max(0, counts.roster - connected))


def _rates(rounds: Collection[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Return rounds and client steps per second, given each round's seconds and steps; None without a round."""
    seconds = sum(seconds for seconds, _ in rounds)
    if not seconds:
        return None, None
    return len(rounds) / seconds, sum(steps for _, steps in rounds) / seconds


def cohort_of(conversations: Iterable[tuple[Collection[str], Collection[int]]]) -> tuple[int, int]:
    """Return the numbers of sampled and of remaining clients of a round, given its conversations and lost rows."""
    sampled: set[str] = set()
    lost_clients: set[str] = set()
    for clients, rows in conversations:
        sampled.update(clients)
        lost_clients.update(client for row, client in enumerate(clients) if row in rows)
    return len(sampled), len(sampled - lost_clients)


@dataclass(frozen=True)
class Pause:
    """A requested pause: by whom, and when, in seconds since 1970."""

    by: str
    since: float


def read_pause(folder: RunFolder) -> Pause | None:
    """Return the pause in force in a run; None without one.

    Raise DataError if the file is damaged.
    """
    match folder.json_or_none(CONTROL):
        case None | {"version": 1, "paused": None}:
            return None
        case {"version": 1, "paused": {"by": str(identity), "since": int() | float() as since}}:
            return Pause(identity, since)
    raise DataError(f"{folder.path / CONTROL}: not a record of a pause", hint="remove the file to let the run continue")


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
        recorded = read_pause(folder)
        with self._changed:
            self._folder = folder
            if self._asked is None:
                self._become(recorded)
            else:
                self._write(self._asked)

    @property
    def paused(self) -> Pause | None:
        """Requested pause, in force from the end of the current round."""
        return self._asked

    def pause(self, identity: str) -> bool:
        """Request a pause; return whether there was none before. It is recorded when this returns.

        Raise StorageError if it cannot be written; then no pause is requested.
        """
        with self._changed:
            return self._asked is None and self._set(Pause(identity, time.time()))

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
            document = None if pause is None else asdict(pause)
            self._folder.write_json(CONTROL, {"version": CONTROL_VERSION, "paused": document})

    def _become(self, pause: Pause | None) -> None:
        self._asked = pause
        self.monitor.pausing(None if pause is None else pause.by)
        self._changed.notify_all()

    def wait(self, stop: threading.Event) -> None:
        """Wait until there is no pause or ``stop`` is set."""
        with self._changed:
            while self._asked is not None and not stop.is_set():
                self._changed.wait(POLL_S)
