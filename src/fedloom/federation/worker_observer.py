"""Observer of a worker: events of its connection, and of its clients' work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.standing import Standing
from fedloom.federation.transport import ConversationKey
from fedloom.messages import Metrics


class WorkerObserver:
    """Callbacks for events of a worker; these ignore them.

    They are called from several threads, return at once, raise nothing, and change nothing that they are given.
    """

    counts_bytes = False
    """True to be told of bytes, for which each frame is read once more."""

    def joined(self, run: str) -> None:
        """Note that the aggregator has admitted the worker to a run."""

    def disconnected(self, reason: str, *, allowed: bool = True) -> None:
        """Note that the worker is not connected; it tries again, or waits until its member's policy allows it."""

    def told(self, standing: Standing) -> None:
        """Note the federation's standing."""

    def moved(self, size: int, message: str, purpose: str, *, sending: bool) -> None:
        """Count bytes on the wire that carry a message of a class, or a part of the protocol such as ``hello``."""

    def transferring(self, change: int) -> None:
        """Change the number of messages that are under way now."""

    def answering(self, key: ConversationKey | None) -> None:
        """Note the conversation whose message the clients answer now; None when they have."""

    def closed(self, key: ConversationKey) -> None:
        """Note the end of a conversation."""

    def lost(self, client: str, reason: str) -> None:
        """Count a question that a client does not answer."""

    def measured(
        self, clients: Sequence[str], measured: Metrics, predictors: Sequence[str], plan: EvaluationPlan
    ) -> None:
        """Note the measurements of a group of clients, before any is withheld or summed."""

    def counting(self, spent: Callable[[], tuple[float, float] | None]) -> None:
        """Take a function that returns the (ε, δ) that the clients have spent; None if nothing is counted."""
