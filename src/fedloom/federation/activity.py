"""Snapshot of a federation's state, as plain data without torch.

``fedloom status`` shows an :class:`Activity`, live (``federation.monitor``) or from a run's files; metrics are derived
from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedloom.tasks.headline import GROUPS, MetricValues, headline_of, values_of
from fedloom.tasks.names import ACCURACY, Headline

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
        Clients of the roster that a connected worker serves, and the others; None if files do not record it.
    cohort, answered
        Clients sampled in the last round, and those that completed it.
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
    """Measurements of a group of clients on test examples; None where there is none.

    ``mean``, ``worst_decile`` and ``pooled`` are of the headline metric (:attr:`LastEvaluation.headline`).
    """

    clients: int = 0
    accuracy_mean: float | None = None
    accuracy_worst_decile: float | None = None
    accuracy_pooled: float | None = None
    loss_mean: float | None = None
    mean: float | None = None
    worst_decile: float | None = None
    pooled: float | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any], headline: Headline) -> Group:
        """Return a group of a line of ``metrics.jsonl``."""
        values = values_of(told, headline)
        return cls(
            told["clients"],
            told.get("accuracy_mean"),
            told.get("accuracy_worst_decile"),
            told.get("accuracy_pooled"),
            told.get("loss_mean"),
            values.mean,
            values.worst_decile,
            values.pooled,
        )

    @property
    def values(self) -> MetricValues:
        """Values of the headline metric."""
        return MetricValues(self.mean, worst_decile=self.worst_decile, pooled=self.pooled)


@dataclass(frozen=True)
class LastEvaluation:
    """Last evaluation: its round, groups (``seen``, ``unseen``, ``global``), and results on validation examples.

    ``metric``, ``higher_is_better`` and ``percent`` are those of the headline metric. ``train_loss`` is the mean over
    the rounds since the previous evaluation.
    """

    round: int
    groups: dict[str, Group] = field(default_factory=dict)
    validation_pooled: float | None = None
    validation_loss: float | None = None
    train_loss: float | None = None
    metric: str = ACCURACY.name
    higher_is_better: bool = ACCURACY.higher_is_better
    percent: bool = ACCURACY.percent

    @property
    def headline(self) -> Headline:
        """Headline metric."""
        return Headline(self.metric, self.higher_is_better, self.percent)

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> LastEvaluation:
        """Return the evaluation in a line of ``metrics.jsonl``."""
        headline = headline_of(line)
        groups = {name: Group.of(told, headline) for name in GROUPS if (told := line.get(name)) is not None}
        loss = (line.get("train") or {}).get("loss")
        return cls(
            line["round"],
            groups,
            line.get("validation_pooled"),
            line.get("validation_loss"),
            loss,
            headline.name,
            headline.higher_is_better,
            headline.percent,
        )


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
class PrivacySpent:
    """Differential privacy of training so far (``federation.privacy``).

    Attributes
    ----------
    delta, epsilon
        (ε, δ) toward readers of the models; ``epsilon`` is None if there is no guarantee.
    sums
        Number of noisy sums that they are about.
    budget
        Largest ε, before which training ends; None without.
    """

    delta: float
    sums: int
    epsilon: float | None = None
    budget: float | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> PrivacySpent | None:
        """Return the privacy spent in a line of ``metrics.jsonl``; None without."""
        told = line.get("privacy")
        return None if told is None else cls(told["delta"], told["sums"], told["epsilon"], told["budget"])


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
    privacy
        Privacy that training has spent; None if it is not private, or nothing is known yet.
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
    measured: LastEvaluation | None = None
    train_loss: float | None = None
    totals: Totals = Totals()
    workers: tuple[ConnectedWorker, ...] = ()
    privacy: PrivacySpent | None = None

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
        True if a connected worker serves it; None if files do not record it.
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
