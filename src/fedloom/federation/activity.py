"""Current state of a federation: a snapshot as plain data, and the monitor that produces it.

``fedloom status`` shows an :class:`Activity`, live or from a run's files; metrics are derived from it. Nothing here
imports torch.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedloom.data.manifest import ClientEntry
    from fedloom.runs.journal import Attempt

LivePhase = Literal["waiting", "training", "evaluating", "saving", "paused", "stopping", "finished", "failed"]
"""Phase reported by a running process; ``waiting`` for members or workers."""

Phase = LivePhase | Literal["running", "interrupted", "published"]
"""Phase of a federation, live or derived from a run's files.

From files, ``running`` means that a process is at work on the run, ``interrupted`` that none is and the run has not
finished, and ``published`` that a store has an unfinished run, on which a process may or may not be at work.
"""

OVER: frozenset[Phase] = frozenset(("finished", "failed", "interrupted"))
"""Phases after which a process does no more work."""

RECENT = 20
"""Number of recent rounds that rates are computed from."""

AWAITED = 100
"""Maximum number of awaited clients listed in a snapshot: those awaited longest."""


@dataclass(frozen=True)
class ClientCounts:
    """Numbers of clients.

    Attributes
    ----------
    roster
        Clients in the roster; in a run with a fixed population, all clients.
    observing
        Clients of the roster that are measured but never train (unseen clients or observers).
    connected, absent
        Clients of the roster that a connected worker serves, and the others; None where files do not say.
    cohort, answered
        Clients asked in the last round, and those that answered to its end.
    """

    roster: int = 0
    observing: int = 0
    connected: int | None = None
    absent: int | None = None
    cohort: int = 0
    answered: int = 0


@dataclass(frozen=True)
class Awaited:
    """Client whose answer is awaited.

    Attributes
    ----------
    client
        Id of the client.
    worker
        Worker that was asked; None if no worker serves the client now.
    since, deadline
        Time of the request, and time at which the client counts as lost (None: never), in seconds since 1970.
    late
        True if the answer takes longer than usual, or no worker serves the client.
    """

    client: str
    worker: str | None = None
    since: float = 0.0
    deadline: float | None = None
    late: bool = False


@dataclass(frozen=True)
class ConnectedWorker:
    """Connected worker.

    Attributes
    ----------
    name, device
        Name and device that the worker reported.
    identity
        Identity of the worker, where peers are identified.
    clients
        Number of clients that it may serve.
    since, sign
        Time of joining, and time of the last frame sent or received, in seconds since 1970.
    """

    name: str
    identity: str | None = None
    device: str = ""
    clients: int = 0
    since: float = 0.0
    sign: float = 0.0


@dataclass(frozen=True)
class Group:
    """Measurements of a group of clients on test examples: means over clients; None where there is none."""

    clients: int = 0
    accuracy_mean: float | None = None
    accuracy_worst_decile: float | None = None
    accuracy_pooled: float | None = None
    loss_mean: float | None = None


@dataclass(frozen=True)
class Measured:
    """Last evaluation: its round, groups (``seen``, ``unseen``, ``global``), and results on validation examples.

    ``train_loss`` is the mean over the rounds since the previous evaluation.
    """

    round: int
    groups: dict[str, Group] = field(default_factory=dict)
    validation_pooled: float | None = None
    validation_loss: float | None = None
    train_loss: float | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Measured:
        """Return the evaluation in a line of ``metrics.jsonl``."""
        groups = {
            name: Group(**{key: told.get(key) for key in Group.__dataclass_fields__})
            for name in ("seen", "unseen", "global")
            if (told := line.get(name)) is not None
        }
        loss = (line.get("train") or {}).get("loss")
        return cls(line["round"], groups, line.get("validation_pooled"), line.get("validation_loss"), loss)


@dataclass(frozen=True)
class Totals:
    """Sums over rounds: of this process, or, from a run's files, of the whole run.

    Attributes
    ----------
    rounds, failed_attempts
        Number of rounds and of failed attempts.
    client_steps
        Local SGD steps of rounds.
    seconds
        Wall time of attempts at rounds.
    bytes_up, bytes_down
        Bytes from workers and to them; None in process.
    exchanges
        Seconds of attempts by the message that was sent, and ``server`` for the rest.
    phases
        Seconds that the process spent in each phase; empty from files.
    refusals
        Number of refused or dropped parts, by reason.
    """

    rounds: int = 0
    failed_attempts: int = 0
    client_steps: float = 0.0
    seconds: float = 0.0
    bytes_up: int | None = None
    bytes_down: int | None = None
    exchanges: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Activity:
    """State of a federation. Times are in seconds since 1970.

    Attributes
    ----------
    run, method
        Names of the experiment and its method.
    incarnation
        Id of the aggregator's process; empty from files.
    time, started
        Time of the snapshot, and start of the process; ``started`` is None from files.
    phase, since, message
        Current phase, its start (from files: their last change), and a message for a person.
    round, rounds
        Last completed round, and number of rounds to run; None for no limit.
    doing, attempt
        Current round, and number of the attempt at it; None between rounds.
    durable_round, durable_at
        Last round with a checkpoint, and the time of that checkpoint; None before the first.
    paused_by
        Name of the operator who requested the pause in force or due at the end of the round; None without a pause.
    clients
        Numbers of clients.
    awaited, late
        Number of awaited answers, and how many of them are late.
    awaiting
        Clients whose answers are awaited, late and longest awaited first, at most :data:`AWAITED`.
    rounds_per_s, client_steps_per_s
        Rates over the last :data:`RECENT` rounds, in wall time of training; None before the first.
    measured, train_loss
        Last evaluation, and training loss of the last round if the method has one.
    totals
        Sums over rounds.
    workers
        Connected workers, by name.
    """

    run: str
    method: str
    phase: Phase
    time: float
    since: float
    incarnation: str = ""
    started: float | None = None
    message: str = ""
    round: int = 0
    rounds: int | None = None
    doing: int | None = None
    attempt: int | None = None
    durable_round: int | None = None
    durable_at: float | None = None
    paused_by: str | None = None
    clients: ClientCounts = ClientCounts()
    awaited: int = 0
    late: int = 0
    awaiting: tuple[Awaited, ...] = ()
    rounds_per_s: float | None = None
    client_steps_per_s: float | None = None
    measured: Measured | None = None
    train_loss: float | None = None
    totals: Totals = Totals()
    workers: tuple[ConnectedWorker, ...] = ()

    @property
    def durable_age_s(self) -> float | None:
        """Seconds since the last durable round became durable; None before the first."""
        return None if self.durable_at is None else max(0.0, self.time - self.durable_at)


@dataclass(frozen=True)
class Connected:
    """State known only to the aggregator: connected workers, awaited clients, and refusals.

    Attributes
    ----------
    workers, awaiting
        See :class:`Activity`; ``awaiting`` is complete.
    clients
        Number of clients of the roster that a connected worker serves.
    refusals, bytes_up, bytes_down
        See :class:`Totals`.
    """

    workers: tuple[ConnectedWorker, ...]
    awaiting: tuple[Awaited, ...]
    clients: int
    refusals: Mapping[str, int]
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class RosterClient:
    """One client of the roster.

    Attributes
    ----------
    id
        Id of the client.
    observes
        True if it is measured but never trains.
    connected
        True if a connected worker serves it; None where files do not say.
    worker, identity
        Worker that serves it (one of them if there are several), and that worker's identity.
    examples
        Number of training examples.
    last_round
        Last round that counted it; None before the first, and for clients that never train.
    awaited_since
        Time of the request for its pending answer; None if no answer is awaited.
    """

    id: str
    observes: bool
    connected: bool | None = None
    worker: str | None = None
    identity: str | None = None
    examples: int | None = None
    last_round: int | None = None
    awaited_since: float | None = None


class Rates:
    """Rounds and client steps per second of training, over recent rounds."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def add(self, seconds: float, client_steps: float) -> None:
        """Add a round."""
        self._recent.append((seconds, client_steps))

    @property
    def now(self) -> tuple[float | None, float | None]:
        """Rounds and client steps per second; None before the first round."""
        seconds = sum(seconds for seconds, _ in self._recent)
        if not seconds:
            return None, None
        return len(self._recent) / seconds, sum(steps for _, steps in self._recent) / seconds


class Monitor:
    """Tracks the state of a federation: the round loop updates it, any thread reads it.

    Parameters
    ----------
    run, method, incarnation
        See :class:`Activity`.
    rounds
        Number of rounds to run; None for no limit.
    """

    def __init__(self, run: str = "", method: str = "", rounds: int | None = None, incarnation: str = "") -> None:
        self._lock = threading.Lock()
        self._about = {"run": run, "method": method, "incarnation": incarnation, "rounds": rounds}
        self._started = time.time()
        self._phase: Phase = "waiting"
        self._since, self._since_monotonic, self._message = self._started, time.monotonic(), ""
        self._round = 0
        self._doing: int | None = None
        self._attempt: int | None = None
        self._durable: tuple[int, float] | None = None
        self._paused_by: str | None = None
        self._stopping = False
        self._last_round: Callable[[str], int | None] = lambda client: None
        self._roster: Mapping[str, ClientEntry] = {}
        self._observing = 0
        self._cohort = self._answered = 0
        self._rates = Rates()
        self._measured: Measured | None = None
        self._loss: float | None = None
        self._rounds = self._failed = 0
        self._steps = self._seconds = 0.0
        self._exchanges: defaultdict[str, float] = defaultdict(float)
        self._phases: defaultdict[str, float] = defaultdict(float)

    # ---- updates by the aggregator's thread and the round loop

    def enter(self, phase: Phase, message: str = "", *, doing: int | None = None, attempt: int | None = None) -> None:
        """Enter a phase; ignored once the run has ended."""
        with self._lock:
            if self._phase not in OVER:
                self._become(phase, message)
                self._doing, self._attempt = doing, attempt

    def _become(self, phase: Phase, message: str) -> None:
        now = time.monotonic()
        self._phases[self._phase] += now - self._since_monotonic
        if phase != self._phase:
            self._since = time.time()
        self._phase, self._message, self._since_monotonic = phase, message, now

    @contextmanager
    def during(self, phase: Phase, message: str = "") -> Iterator[None]:
        """Enter another phase for the block, then return to the previous one."""
        with self._lock:
            before = self._phase, self._message, self._since
            self._become(phase, message)
        try:
            yield
        finally:
            with self._lock:
                self._become(before[0], before[1])
                self._since = before[2]

    def say(self, message: str) -> None:
        """Set the message for a person."""
        with self._lock:
            self._message = message

    def stopping(self) -> None:
        """Record that the run was asked to stop: its phase until it ends. A signal handler may call this."""
        self._stopping = True

    def pausing(self, by: str | None) -> None:
        """Record who requested a pause; None clears it."""
        with self._lock:
            self._paused_by = by

    def know(self, clients: Iterable[ClientEntry]) -> None:
        """Set the clients of the roster."""
        roster = {entry.id: entry for entry in clients}
        observing = sum(not entry.seen for entry in roster.values())
        with self._lock:
            self._roster, self._observing = roster, observing

    def counting(self, last_round: Callable[[str], int | None]) -> None:
        """Set the function that returns the last round that counted a client; any thread may call it."""
        self._last_round = last_round

    def resume(self, round: int, line: Mapping[str, Any] | None, durable_at: float | None) -> None:
        """Resume after a round, given the last line of its metrics and the time of its checkpoint."""
        with self._lock:
            self._round = round
            self._measured = None if line is None else Measured.of(line)
            self._durable = None if durable_at is None else (round, durable_at)

    def attempted(self, attempt: Attempt, *, counts: bool) -> None:
        """Record the end of an attempt at a round; ``counts`` if it became a round."""
        with self._lock:
            self._seconds += attempt.seconds
            for name, seconds in attempt.phases.items():
                self._exchanges[name] += seconds
            self._doing = self._attempt = None
            if not counts:
                self._failed += 1
                return
            self._round, self._rounds = attempt.round, self._rounds + 1
            steps = attempt.statistics["client_steps"]
            self._steps += steps
            self._rates.add(attempt.seconds, steps)
            self._loss = attempt.statistics.get("loss")
            self._cohort, self._answered = cohort_of(
                (record.clients, {loss.row for loss in record.lost}) for record in attempt.conversations
            )

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Record the evaluation in a line of ``metrics.jsonl``."""
        with self._lock:
            self._measured = Measured.of(line)

    def durable(self, round: int) -> None:
        """Record that a checkpoint holds this round."""
        with self._lock:
            self._durable = round, time.time()

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
        round = self._doing if self._doing is not None else self._round
        return {"run": self._about["run"], "phase": self._phase, "round": round, "attempt": self._attempt}

    def now(self, connected: Connected | None = None) -> Activity:
        """Return a snapshot; ``connected`` is the aggregator's own state, None in process."""
        with self._lock:
            phase = self._phase
            if self._stopping and phase not in OVER:
                phase = "stopping"
            phases: dict[str, float] = dict(self._phases)
            phases[self._phase] = phases.get(self._phase, 0.0) + time.monotonic() - self._since_monotonic
            rounds_per_s, steps_per_s = self._rates.now
            in_roster = len(self._roster)
            here = in_roster if connected is None else connected.clients
            awaiting = () if connected is None else connected.awaiting
            return Activity(
                **self._about,  # type: ignore[arg-type]
                phase=phase,
                time=time.time(),
                since=self._since,
                started=self._started,
                message=self._message,
                round=self._round,
                doing=self._doing,
                attempt=self._attempt,
                durable_round=None if self._durable is None else self._durable[0],
                durable_at=None if self._durable is None else self._durable[1],
                paused_by=self._paused_by,
                clients=ClientCounts(
                    in_roster, self._observing, here, max(0, in_roster - here), self._cohort, self._answered
                ),
                awaited=len(awaiting),
                late=sum(each.late for each in awaiting),
                awaiting=tuple(sorted(awaiting, key=_longest_first)[:AWAITED]),
                rounds_per_s=rounds_per_s,
                client_steps_per_s=steps_per_s,
                measured=self._measured,
                train_loss=self._loss,
                totals=Totals(
                    self._rounds,
                    self._failed,
                    self._steps,
                    self._seconds,
                    None if connected is None else connected.bytes_up,
                    None if connected is None else connected.bytes_down,
                    dict(self._exchanges),
                    phases,
                    {} if connected is None else dict(connected.refusals),
                ),
                workers=() if connected is None else connected.workers,
            )


def cohort_of(conversations: Iterable[tuple[Collection[str], Collection[int]]]) -> tuple[int, int]:
    """Return how many clients a round asked, and how many it kept, given its conversations and their lost rows."""
    asked: set[str] = set()
    lost: set[str] = set()
    for clients, rows in conversations:
        asked.update(clients)
        lost.update(client for row, client in enumerate(clients) if row in rows)
    return len(asked), len(asked - lost)


def _longest_first(awaited: Awaited) -> tuple[bool, float, str]:
    return not awaited.late, awaited.since, awaited.client
