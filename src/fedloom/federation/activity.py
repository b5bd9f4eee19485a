"""What a federation is doing now: a snapshot as plain data, and the monitor that it is taken from.

:class:`Activity` is what ``fedloom status`` shows, live or from a run's files, and what else tells of a federation
(metrics) is made of it. Nothing here knows torch.
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
    from fedloom.federation.journal import Attempt

LivePhase = Literal["waiting", "training", "evaluating", "saving", "paused", "stopping", "finished", "failed"]
"""Of a process that tells it itself; ``waiting`` for members or workers."""

Phase = LivePhase | Literal["running", "interrupted", "published"]
"""Beside these, from the files of a run alone: ``running`` where a process is at work on it,
``interrupted`` where none is and it has not come to its end; ``published`` of what a store has of a run that has not,
which does not say whether a process is at work."""

OVER: frozenset[Phase] = frozenset(("finished", "failed", "interrupted"))
"""Phases of which a process makes nothing more."""

RECENT = 20
"""Rounds that rates are of."""

AWAITED = 100
"""Clients that a snapshot names of those who are awaited: the ones that are awaited longest."""


@dataclass(frozen=True)
class ClientCounts:
    """How many clients there are of each kind.

    Attributes
    ----------
    roster
        In the roster; of a run whose clients are all known, all of them.
    observing
        Of these: measured, and never train (unseen, or observers).
    connected, absent
        Of these: served by a worker that is connected, and not; None where files do not say it.
    cohort, answered
        Of the last round: those asked, and those who answered to its end.
    """

    roster: int = 0
    observing: int = 0
    connected: int | None = None
    absent: int | None = None
    cohort: int = 0
    answered: int = 0


@dataclass(frozen=True)
class Awaited:
    """A client whose answer is awaited.

    Attributes
    ----------
    client
        Its id.
    worker
        Whom it was asked of; None: nobody serves it now.
    since, deadline
        When it was asked, and when it counts as lost (None: never), in seconds since 1970.
    late
        Whether that takes longer than answers usually do, or nobody serves it.
    """

    client: str
    worker: str | None = None
    since: float = 0.0
    deadline: float | None = None
    late: bool = False


@dataclass(frozen=True)
class ConnectedWorker:
    """A worker that is connected.

    Attributes
    ----------
    name, device
        As it says.
    identity
        Whose it is, where peers say who they are.
    clients
        How many it may serve.
    since, sign
        When it came, and when something last went either way, in seconds since 1970.
    """

    name: str
    identity: str | None = None
    device: str = ""
    clients: int = 0
    since: float = 0.0
    sign: float = 0.0


@dataclass(frozen=True)
class Group:
    """What a group of clients was measured to have: means over clients of test examples; None where there is none."""

    clients: int = 0
    accuracy_mean: float | None = None
    accuracy_worst_decile: float | None = None
    accuracy_pooled: float | None = None
    loss_mean: float | None = None


@dataclass(frozen=True)
class Measured:
    """The last evaluation: of which round, the groups (``seen``, ``unseen``, ``global``), and on validation examples.

    ``train_loss`` is the mean of the rounds since the one before.
    """

    round: int
    groups: dict[str, Group] = field(default_factory=dict)
    validation_pooled: float | None = None
    validation_loss: float | None = None
    train_loss: float | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Measured:
        """What a line of ``metrics.jsonl`` says."""
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
        How many.
    client_steps
        Local SGD steps of rounds.
    seconds
        Wall time of attempts at rounds.
    bytes_up, bytes_down
        Bytes from workers and to them; None in process.
    exchanges
        Seconds of attempts by the message that was sent, and ``server``, the rest.
    phases
        Seconds that the process spent in each phase; empty from files.
    refusals
        What was refused or dropped, by reason.
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
    """What a federation is doing. Times are seconds since 1970.

    Attributes
    ----------
    run, method
        Names of the experiment and its method.
    incarnation
        Of the aggregator's process; empty from files.
    time, started
        When this was so, and when the process began; None from files.
    phase, since, message
        What is done, since when (from files: when they last changed), and what a person should know of it.
    round, rounds
        The last round that is done, and how many there are to be; None: no end.
    doing, attempt
        The round under way, and which attempt at it; None between rounds.
    durable_round, durable_at
        The last round that a checkpoint holds, and since when; None before the first.
    paused_by
        Who asked for the pause that holds, or is to come at the end of the round; None without.
    clients
        How many.
    awaited, late
        How many clients' answers are awaited, and how many of them are late.
    awaiting
        Who they are, the longest first, at most :data:`AWAITED`.
    rounds_per_s, client_steps_per_s
        Of the last :data:`RECENT` rounds, in the wall time of training; None before the first.
    measured, train_loss
        The last evaluation, and the training loss of the last round, of a method that has one.
    totals
        Sums over rounds.
    workers
        Those that are connected, by name.
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
        """For how long the last durable round has been durable; None before the first."""
        return None if self.durable_at is None else max(0.0, self.time - self.durable_at)


@dataclass(frozen=True)
class Connected:
    """What the aggregator knows besides the round loop: who is connected, who is awaited, and what was refused.

    Attributes
    ----------
    workers, awaiting
        As of :class:`Activity`; ``awaiting`` is whole.
    clients
        How many clients of the roster a connected worker serves.
    refusals, bytes_up, bytes_down
        As of :class:`Totals`.
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
        Of the client.
    observes
        Whether it is measured and never trains.
    connected
        Whether a connected worker serves it; None where files do not say it.
    worker, identity
        The worker that serves it (of several one), and whose that is.
    examples
        Training examples.
    last_round
        The last round that counted it; None before the first, and of those who never train.
    awaited_since
        When it was asked for what it has not answered yet; None if nothing is awaited.
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
    """Rounds and steps per second of training, of the last rounds."""

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
    """Keeps what a federation is doing: the round loop tells it, any thread asks.

    Parameters
    ----------
    run, method, incarnation
        As of :class:`Activity`.
    rounds
        How many there are to be; None: no end.
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

    # ---- what the aggregator's thread and the round loop tell

    def enter(self, phase: Phase, message: str = "", *, doing: int | None = None, attempt: int | None = None) -> None:
        """Something else is done from now on; after the end nothing is."""
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
        """Another phase in the block, and then the one before."""
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
        """What a person should know of what is done."""
        with self._lock:
            self._message = message

    def stopping(self) -> None:
        """The run was asked to stop: that is its phase until it has ended. A signal handler may say so."""
        self._stopping = True

    def pausing(self, by: str | None) -> None:
        """Somebody has asked for a pause; None: for its end."""
        with self._lock:
            self._paused_by = by

    def know(self, clients: Iterable[ClientEntry]) -> None:
        """Who is in the roster now."""
        roster = {entry.id: entry for entry in clients}
        observing = sum(not entry.seen for entry in roster.values())
        with self._lock:
            self._roster, self._observing = roster, observing

    def counting(self, last_round: Callable[[str], int | None]) -> None:
        """Who knows the last round that counted a client; any thread asks it."""
        self._last_round = last_round

    def resume(self, round: int, line: Mapping[str, Any] | None, durable_at: float | None) -> None:
        """A run goes on after a round, of which a checkpoint was written then; the last line of its metrics."""
        with self._lock:
            self._round = round
            self._measured = None if line is None else Measured.of(line)
            self._durable = None if durable_at is None else (round, durable_at)

    def attempted(self, attempt: Attempt, *, counts: bool) -> None:
        """An attempt at a round has ended; whether it became a round."""
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
        """A line of ``metrics.jsonl`` has been written."""
        with self._lock:
            self._measured = Measured.of(line)

    def durable(self, round: int) -> None:
        """A checkpoint holds this round from now on."""
        with self._lock:
            self._durable = round, time.time()

    # ---- what any thread asks

    @property
    def roster(self) -> Mapping[str, ClientEntry]:
        """Who is in the roster, by id."""
        return self._roster

    def last_round(self, client: str) -> int | None:
        """The last round that counted a client; None before the first."""
        return self._last_round(client)

    def about(self) -> dict[str, Any]:
        """What a line of the log is about: ``run``, ``phase``, ``round`` and ``attempt``, as far as they are known."""
        round = self._doing if self._doing is not None else self._round
        return {"run": self._about["run"], "phase": self._phase, "round": round, "attempt": self._attempt}

    def now(self, connected: Connected | None = None) -> Activity:
        """Return a snapshot; ``connected`` is what an aggregator knows besides, None in process."""
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
    """How many clients a round asked, and how many of them it did not lose, by conversations and rows lost."""
    asked: set[str] = set()
    lost: set[str] = set()
    for clients, rows in conversations:
        asked.update(clients)
        lost.update(client for row, client in enumerate(clients) if row in rows)
    return len(asked), len(asked - lost)


def _longest_first(awaited: Awaited) -> tuple[bool, float, str]:
    return not awaited.late, awaited.since, awaited.client
