"""Callbacks for run progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.runs.journal import Attempt


class RunObserver:
    """Callbacks for run progress; override the ones you need. They are called in the thread that runs the rounds.

    Those of a tracker are called in a thread of its own, one at a time and in order
    (:class:`~fedloom.engine.tracking.TrackerThread`). If a run fails, it raises its error, and the only further call is
    :meth:`ended`.
    """

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Handle the start of a run with this many clients, in a folder or at a URL.

        Data, model, method and folder have been checked by then.
        """

    def waiting_for_workers(self, address: str, partition: str, states: str | None) -> None:
        """Handle the start of an aggregator at an address, ``host:port``, to which workers connect.

        They serve the partition in this folder or at this URL, and keep client states at ``states``, unless it is None.
        """

    def resumed(self, round: int) -> None:
        """Handle the resumption of training after this round."""

    def stopping(self, *, after_round: bool) -> None:
        """Handle a stop request; the run stops after the current round, or at once."""

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Handle the end of a round; ``rounds`` is the planned number, None without end."""

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Handle a failed attempt at a round; ``attempts`` is the maximum."""

    def evaluating(self, round: int, count: int, clients: int) -> None:
        """Handle evaluation progress: the number of clients measured so far."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """Handle a new line of ``metrics.jsonl``."""

    def notice(self, text: str) -> None:
        """Handle a one-line message for the user, e.g. why there is no report."""

    def ended(self) -> None:
        """Handle the end of a run that has called :meth:`started`, whether it succeeded or failed."""
