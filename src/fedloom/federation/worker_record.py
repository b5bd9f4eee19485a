"""Record of a worker: what it does, has measured, sent and received, and how long that took."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedloom.core.plugins import capability
from fedloom.core.words import REASON_CHARACTERS, printable
from fedloom.evaluation.plan import READINGS, SPLITS, EvaluationPlan
from fedloom.federation.measuring import MEASURE
from fedloom.federation.standing import Standing
from fedloom.federation.transport import EVALUATE, TRAIN, ConversationKey
from fedloom.messages import Metrics, SummedMetrics
from fedloom.tasks.base import Counts
from fedloom.tasks.names import Headline

PHASES = ("training", "evaluation", "transfer", "waiting", "disconnected")
"""Phases that the time of a worker is divided into. Transfer is time in which nothing is computed."""


class OwnResult(NamedTuple):
    """Mean of a metric over the worker's clients, on their test examples: of the last evaluation, and the best."""

    round: int
    value: float
    best_round: int
    best: float


@dataclass
class WorkerState:
    """State of a worker. Times are in seconds since 1970; texts of others are printable.

    Attributes
    ----------
    connected, since
        True if the worker is connected; time since which it is, or is not.
    reason, allowed
        Reason why it is not connected; False while its member's policy keeps it disconnected.
    standing, standing_at, round_at
        Last standing of the federation, its time, and the time of the last change of its round.
    asked
        Conversation that the clients answer now.
    seconds, sent, received
        Wall time by phase; bytes on the wire by kind.
    headline, results, evaluations
        Metric of the own results, these by predictor, and the number of evaluations.
    lost, lost_reason
        Number of questions that a client did not answer, and the last reason.
    """

    since: float = 0.0
    run: str = ""
    connected: bool = False
    reason: str = "connecting"
    allowed: bool = True
    standing: Standing | None = None
    standing_at: float = 0.0
    round_at: float | None = None
    asked: ConversationKey | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    headline: Headline | None = None
    results: dict[str, OwnResult] = field(default_factory=dict)
    evaluations: int = 0
    lost: int = 0
    lost_reason: str = ""

    @property
    def round(self) -> int:
        """Last round that the federation has completed."""
        return 0 if self.standing is None else self.standing.round


class WorkerRecord:
    """Record of what happens in a worker: events of its connection, and of its clients' work. Thread-safe.

    With ``counts_bytes`` it counts bytes by kind, for which each frame is read once more.
    """

    def __init__(self, now: Callable[[], float] = time.time, *, counts_bytes: bool = False) -> None:
        self.counts_bytes = counts_bytes
        self.spent: Callable[[], tuple[float, float] | None] = lambda: None  # ε and δ, where a policy counts them
        self._now = now
        self._lock = threading.Lock()
        self._state = WorkerState(now())
        self._turned = time.monotonic()
        self._transfers = 0
        self._measuring: tuple[int, dict[str, dict[str, float]]] | None = None  # round, values by predictor and client
        self._sums = frozenset(getattr(capability("sums"), "VOCABULARY", ())) if counts_bytes else frozenset()

    def state(self) -> WorkerState:
        """Return a copy of the state."""
        with self._lock:
            self._turn()
            return copy.deepcopy(self._state)

    def _turn(self) -> None:
        """Add the time since the last change to its phase."""
        now, state = time.monotonic(), self._state
        if state.asked is not None:
            phase = "training" if state.asked.purpose == TRAIN else "evaluation"
        elif not state.connected:
            phase = "disconnected"
        else:
            phase = "transfer" if self._transfers else "waiting"
        state.seconds[phase] += now - self._turned
        self._turned = now

    def joined(self, run: str) -> None:
        """Note that the aggregator has admitted the worker to a run."""
        with self._lock:
            self._turn()
            self._state.run, self._state.since = printable(run, 200), self._now()
            self._state.connected = self._state.allowed = True

    def disconnected(self, reason: str, *, allowed: bool = True) -> None:
        """Note that the worker is not connected; it tries again, or waits until its member's policy allows it."""
        with self._lock:
            self._turn()
            if self._state.connected:
                self._state.connected, self._state.since = False, self._now()
            self._state.reason, self._state.allowed = printable(reason, REASON_CHARACTERS), allowed
            self._transfers = 0

    def told(self, standing: Standing) -> None:
        """Note the federation's standing."""
        with self._lock:
            if self._state.standing is None or standing.round != self._state.round:
                self._state.round_at = self._now()
            self._state.standing, self._state.standing_at = standing, self._now()

    def moved(self, size: int, message: str, purpose: str, *, sending: bool) -> None:
        """Count bytes on the wire that carry a message of a class, or a part of the protocol such as ``hello``."""
        kind = self._kind(message, purpose, sending=sending)
        with self._lock:
            (self._state.sent if sending else self._state.received)[kind] += size

    def _kind(self, message: str, purpose: str, *, sending: bool) -> str:
        if not purpose:
            return "announcements" if message in ("hello", "welcome") else "other"
        if message in self._sums:
            return "sums"
        if not sending:
            return "models"
        if purpose == MEASURE or message in (Metrics.__name__, SummedMetrics.__name__):
            return "measurements"
        return "updates" if purpose == TRAIN else "personalization"

    def transferring(self, change: int) -> None:
        """Change the number of messages under way."""
        with self._lock:
            self._turn()
            self._transfers = max(0, self._transfers + change)

    def answering(self, key: ConversationKey | None) -> None:
        """Note the conversation whose message the clients answer now; None when they have."""
        with self._lock:
            self._turn()
            self._state.asked = key
            if key is not None and self._measuring is not None and key.round != self._measuring[0]:
                self._end_evaluation()

    def closed(self, key: ConversationKey) -> None:
        """Note the end of a conversation."""
        with self._lock:
            if key.purpose == EVALUATE:
                self._end_evaluation()

    def lost(self, client: str, reason: str) -> None:
        """Count a question that a client does not answer."""
        with self._lock:
            self._state.lost += 1
            self._state.lost_reason = printable(f"{client}: {reason}", REASON_CHARACTERS)

    def measured(
        self, clients: Sequence[str], measured: Metrics, predictors: Sequence[str], plan: EvaluationPlan
    ) -> None:
        """Note the measurements of a group of clients, before any is withheld or summed."""
        key, headline = self._state.asked, plan.task.headline
        if key is None or key.purpose != EVALUATE:
            return
        test, reading = SPLITS.index("test"), READINGS.index("unmasked")
        found = {}
        for p, name in enumerate(predictors):
            counts = Counts(measured.counts[:, p, test, reading], measured.confusion[:, p], measured.calibration[:, p])
            values = plan.values(counts, measured.sums[:, p, test])[headline.name].tolist()
            found[name] = {client: v for client, v in zip(clients, values, strict=True) if math.isfinite(v)}
        with self._lock:
            if self._measuring is None or self._measuring[0] != key.round:
                self._end_evaluation()
                self._measuring = (key.round, {})
            self._state.headline = headline
            for name, by_client in found.items():
                self._measuring[1].setdefault(name, {}).update(by_client)

    def _end_evaluation(self) -> None:
        measuring, self._measuring, state = self._measuring, None, self._state
        if measuring is None or state.headline is None:
            return
        round, found = measuring
        for name, by_client in found.items():
            if by_client:
                value = sum(by_client.values()) / len(by_client)
                best = before[2:] if (before := state.results.get(name)) else (round, value)
                is_better = (value - best[1]) * state.headline.sign > 0
                state.results[name] = OwnResult(round, value, *((round, value) if is_better else best))
        state.evaluations += 1
