"""Log of a run for machine readers (``fedloom --log-format json``)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fedloom.runner.observer import RunObserver

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.runs.journal import Attempt

log = logging.getLogger("fedloom.run")


class LoggedRun(RunObserver):
    """Observer that logs each round and evaluation as one line, with its numbers under ``data``."""

    def started(self, experiment: Experiment, clients: int, where: str) -> None:
        """Log the start of the run."""
        log.info("started", extra={"run": experiment.name, "data": {"clients": clients, "folder": where}})

    def waiting_for_workers(self, address: str, partition: str, states: str | None) -> None:
        """Log the address that workers connect to."""
        log.info("waiting for workers at %s", address)

    def resumed(self, round: int) -> None:
        """Log the round after which training resumes."""
        log.info("resuming", extra={"round": round})

    def stopping(self, *, after_round: bool) -> None:
        """Log when the run will stop."""
        log.info("stopping after this round" if after_round else "stopping")

    def notice(self, text: str) -> None:
        """Log the message."""
        log.info("%s", text)

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Log a round: its seconds, in total and by phase, bytes, clients, and the method's statistics."""
        log.info("round done", extra={"round": attempt.round, "attempt": attempt.attempt, "data": _numbers(attempt)})

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Log a failed attempt and the reason."""
        about = {"round": attempt.round, "attempt": attempt.attempt, "data": _numbers(attempt)}
        log.warning("attempt failed: %s", attempt.outcome, extra=about)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Log an evaluation as in ``metrics.jsonl``."""
        log.info("evaluated", extra={"round": line["round"], "data": line})


def _numbers(attempt: Attempt) -> dict[str, Any]:
    return {
        "seconds": attempt.seconds,
        "phases": attempt.phases,
        "clients": sum(len(record.clients) for record in attempt.conversations),
        "lost": [
            {"client": loss.client, "exchange": loss.exchange, "reason": loss.reason}
            for record in attempt.conversations
            for loss in record.lost
        ],
        "payload_up": attempt.payload_up,
        "payload_down": attempt.payload_down,
        "wire_up": attempt.wire_up,
        "wire_down": attempt.wire_down,
        "statistics": attempt.statistics,
    }
