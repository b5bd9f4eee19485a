"""Record of a worker: what it does, has measured, sent and received, and how long that took."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass
class WorkerState:
    """State of a worker. Times are in seconds since 1970; texts of others are printable.

    Attributes
    ----------
    since, reason, allowed
        Time since which it is connected or not; why it is not; False while its member's policy keeps it disconnected.
    round_at
        Time of the last change of the federation's round.
    asked
        Conversation that the clients answer now.
    results
        By predictor and round, the mean of the headline over the worker's clients, on their test examples.
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
    results: dict[str, dict[int, float]] = field(default_factory=dict)
    lost: int = 0
    lost_reason: str = ""

    @property
    def round(self) -> int:
        """Last round that the federation has completed."""
        return 0 if self.standing is None else self.standing.round

    def own(self, predictor: str) -> dict[str, Any]:
        """Return round and value of a predictor's last result, and of its best one."""
        rounds, sign = self.results[predictor], 1 if self.headline is None else self.headline.sign
        last, best = max(rounds), max(rounds, key=lambda each: rounds[each] * sign)
        return {"round": last, "value": rounds[last], "best_round": best, "best": rounds[best]}


class WorkerRecord:
    """Record of what happens in a worker: events of its connection, and of its clients' work. Thread-safe.

    What takes time, bytes by kind and the clients' results, is noted only ``in_detail``.
    """

    def __init__(self, now: Callable[[], float] = time.time, *, in_detail: bool = False) -> None:
        self.in_detail = in_detail
        self.listener: Callable[[Standing], None] = lambda standing: None
        """Called with each standing, in the connection's thread."""
        self.spent: Callable[[], tuple[float, float] | None] = lambda: None  # ε and δ, where a policy counts them
        self._now = now
        self._lock = threading.Lock()
        self._state = WorkerState(now())
        self._turned = time.monotonic()
        self._transfers = 0
        self._values: dict[tuple[str, int], dict[str, float]] = {}  # of the last evaluation, by client
        self._sums = frozenset(getattr(capability("sums"), "VOCABULARY", ())) if in_detail else frozenset()

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
        self.listener(standing)

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
        if not self.in_detail or key is None or key.purpose != EVALUATE:
            return
        test, reading = SPLITS.index("test"), READINGS.index("unmasked")
        with self._lock:
            self._state.headline = headline
            self._values = {each: values for each, values in self._values.items() if each[1] == key.round}
            for p, name in enumerate(predictors):
                tensors = measured.counts[:, p, test, reading], measured.confusion[:, p], measured.calibration[:, p]
                found = plan.values(Counts(*tensors), measured.sums[:, p, test])[headline.name].tolist()
                values = self._values.setdefault((name, key.round), {})
                values |= {each: v for each, v in zip(clients, found, strict=True) if math.isfinite(v)}
                if values:
                    self._state.results.setdefault(name, {})[key.round] = sum(values.values()) / len(values)
