"""Snapshot of a federation's state, as plain data without torch.

``fedloom status`` shows an :class:`Activity`, live (``federation.monitor``) or from a run's files; metrics are derived
from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from fedloom.tasks.names import ACCURACY, GROUPS, Headline, MetricValues, headline_of, values_of

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
    """Numbers of clients."""

    roster: int = 0
    """Clients in the roster; in a run with a fixed population, all clients."""
    observing: int = 0
    """Clients of the roster that are measured but never train (unseen clients or observers)."""
    connected: int | None = None
    """Clients of the roster that a connected worker serves; None if files do not record it."""
    absent: int | None = None
    """The other clients of the roster."""
    cohort: int = 0
    """Clients sampled in the last round."""
    answered: int = 0
    """Clients that completed the last round."""


@dataclass(frozen=True)
class Awaited:
    """Client whose answer is awaited."""

    client: str
    worker: str | None = None
    """Worker that was asked; None if no worker serves the client now."""
    since: float = 0.0
    """Time of the request, in seconds since 1970."""
    deadline: float | None = None
    """Time at which the client counts as lost, in seconds since 1970; None for never."""
    late: bool = False
    """True if the answer takes longer than usual, or no worker serves the client."""


@dataclass(frozen=True)
class ConnectedWorker:
    """Connected worker, by the name and device that it reported."""

    name: str
    identity: str | None = None
    """Identity of the worker, where peers are identified."""
    device: str = ""
    clients: int = 0
    """Number of clients that it may serve."""
    since: float = 0.0
    """Time of joining, in seconds since 1970."""
    sign: float = 0.0
    """Time of the last frame sent or received, in seconds since 1970."""
    package: str = ""
    """Version of the fedloom package, as the worker reported it; empty if the aggregator does not show it."""
    protocol: int | None = None
    """Version of the protocol that the aggregator and the worker use; None if the aggregator does not show it."""
    withheld: str = ""
    """Measurements that its member's policy keeps, and the policy's line; empty if there are none."""


@dataclass(frozen=True)
class Group:
    """Measurements of a group of clients on test examples; None for values that were not measured.

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
    def from_line(cls, group: Mapping[str, Any], headline: Headline) -> Group:
        """Return a group of a line of ``metrics.jsonl``."""
        values = values_of(group, headline)
        names = ("accuracy_mean", "accuracy_worst_decile", "accuracy_pooled", "loss_mean")
        return cls(
            group["clients"],
            **{name: group.get(name) for name in names},
            mean=values.mean,
            worst_decile=values.worst_decile,
            pooled=values.pooled,
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
    def from_line(cls, line: Mapping[str, Any]) -> LastEvaluation:
        """Return the evaluation in a line of ``metrics.jsonl``."""
        headline = headline_of(line)
        groups = {name: Group.from_line(group, headline) for name in GROUPS if (group := line.get(name)) is not None}
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
    """Sums over rounds: of this process, or, from a run's files, of the whole run."""

    rounds: int = 0
    failed_attempts: int = 0
    client_steps: float = 0.0
    """Local SGD steps of rounds."""
    seconds: float = 0.0
    """Wall time of attempts at rounds."""
    bytes_up: int | None = None
    """Bytes from workers; None in process."""
    bytes_down: int | None = None
    """Bytes to workers; None in process."""
    exchanges: dict[str, float] = field(default_factory=dict)
    """Seconds of attempts by the message that was sent, and ``server`` for the rest."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds that the process spent in each phase; empty from files."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Number of refused or dropped parts, by reason."""


@dataclass(frozen=True)
class PrivacySpent:
    """Differential privacy of training so far (``federation.privacy``)."""

    delta: float
    sums: int
    """Number of noisy sums that ε covers."""
    epsilon: float | None = None
    """Toward readers of the models; None if there is no guarantee."""
    budget: float | None = None
    """Largest ε toward readers, before which training ends; None if there is no budget."""
    epsilon_members: float | None = None
    """Toward each client of the federation; None if there is no guarantee, or it is not known."""
    epsilon_aggregator: float | None = None
    """Toward the aggregator; None if there is no guarantee, or it is not known."""

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> PrivacySpent | None:
        """Return the privacy spent in a line of ``metrics.jsonl``; None if it has none."""
        spent = line.get("privacy")
        return None if spent is None else cls(**{each.name: spent.get(each.name) for each in fields(cls)})


@dataclass(frozen=True)
class Activity:
    """State of a federation. Times are in seconds since 1970."""

    run: str
    """Name of the experiment."""
    method: str
    phase: Phase
    time: float
    """Time of the snapshot."""
    since: float
    """Start of the phase; from files, the time of their last change."""
    incarnation: str = ""
    """Id of the aggregator's process; empty from files."""
    started: float | None = None
    """Start of the process; None from files."""
    message: str = ""
    """Message for a person."""
    round: int = 0
    """Last completed round."""
    rounds: int | None = None
    """Number of rounds to run; None for no limit."""
    doing: int | None = None
    """Current round; None between rounds."""
    attempt: int | None = None
    """Number of the current attempt at a round; None between rounds."""
    durable_round: int | None = None
    """Last round with a checkpoint; None before the first."""
    durable_at: float | None = None
    """Time of that checkpoint."""
    paused_by: str | None = None
    """Operator who requested the pause in force or due at the end of the round; None if there is no pause."""
    clients: ClientCounts = ClientCounts()
    awaited: int = 0
    """Number of awaited answers."""
    late: int = 0
    """Number of awaited answers that are late."""
    awaiting: tuple[Awaited, ...] = ()
    """Clients whose answers are awaited, late and longest awaited first, at most :data:`AWAITED`."""
    rounds_per_s: float | None = None
    """Rate over the last :data:`RECENT` rounds, in wall time of training; None before the first."""
    client_steps_per_s: float | None = None
    measured: LastEvaluation | None = None
    """Last evaluation."""
    best_round: int | None = None
    """Evaluated round with the best result on validation examples; None before the first."""
    train_loss: float | None = None
    """Training loss of the last round, if the method has one."""
    totals: Totals = Totals()
    workers: tuple[ConnectedWorker, ...] = ()
    """Connected workers, by name."""
    declined: dict[str, str] = field(default_factory=dict)
    """Reasons of workers whose members do not take part, by name, until they join again."""
    too_new: dict[str, str] = field(default_factory=dict)
    """Workers that wait until the aggregator is upgraded, by name: what they have, and what is needed."""
    privacy: PrivacySpent | None = None
    """Privacy that training has spent; None if it is not private, or nothing is known yet."""

    @property
    def durable_age_s(self) -> float | None:
        """Seconds since the last durable round became durable; None before the first."""
        return None if self.durable_at is None else max(0.0, self.time - self.durable_at)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last round at the recent rate; None if it is not known, or nothing is at work."""
        if self.rounds is None or not self.rounds_per_s or self.phase in OVER:
            return None
        return max(0, self.rounds - self.round) / self.rounds_per_s


@dataclass(frozen=True)
class Connected:
    """State known only to the aggregator (see :class:`Activity` and :class:`Totals`); ``awaiting`` is complete."""

    workers: tuple[ConnectedWorker, ...]
    awaiting: tuple[Awaited, ...]
    clients: int
    """Number of clients of the roster that a connected worker serves."""
    refusals: Mapping[str, int]
    bytes_up: int
    bytes_down: int
    declined: Mapping[str, str] = field(default_factory=dict)
    too_new: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RosterClient:
    """One client of the roster."""

    id: str
    observes: bool
    """True if it is measured but never trains."""
    connected: bool | None = None
    """True if a connected worker serves it; None if files do not record it."""
    worker: str | None = None
    """Worker that serves it; one of them if there are several."""
    identity: str | None = None
    """Identity of that worker."""
    examples: int | None = None
    """Number of training examples."""
    last_round: int | None = None
    """Last round that counted it; None before the first, and for clients that never train."""
    awaited_since: float | None = None
    """Time of the request for its pending answer; None if no answer is awaited."""
