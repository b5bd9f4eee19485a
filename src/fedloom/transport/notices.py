"""Publisher of a run's progress to watchers: the aggregator's side of ``fedloom.transport.progress``."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import grpc

from fedloom.runs.journal import Attempt
from fedloom.transport import stream
from fedloom.transport.progress import ENDS, Progress, State, to_wire
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.words import pluralize

EVERY_S = 0.2
"""Minimum interval between progress messages to a watcher: rounds may take milliseconds."""

WATCHERS = 256
"""Maximum number of watchers at one time: each checks for news several times a second."""


class ProgressPublisher:
    """Progress of a run (:class:`~fedloom.transport.progress.Progress`) and its watchers.

    Any thread may write it (it is an observer of the round loop, ``federation.loop.Observer``); it is read on the
    aggregator's event loop.

    Parameters
    ----------
    run
        Name of the run.
    rounds
        Number of rounds to run.
    clients
        Number of clients, seen and unseen.
    """

    def __init__(self, run: str, rounds: int, clients: int) -> None:
        self._lock = threading.Lock()
        self._now = Progress(run, "waiting", 0, rounds, 0, clients)
        self._evaluations: list[Progress] = []
        self._watchers = 0
        self._unwatched_since = time.monotonic()

    def tell(self, state: State, message: str = "", *, round: int | None = None) -> None:
        """Update the progress; ignored once the run has ended."""
        with self._lock:
            if self._now.state not in ENDS:
                round = self._now.round if round is None else round
                self._now = replace(self._now, state=state, message=message, round=round)

    def say(self, message: str) -> None:
        """Update only the message shown to a person."""
        with self._lock:
            if self._now.state not in ENDS:
                self._now = replace(self._now, message=message)

    def workers(self, count: int, clients_unserved: int) -> None:
        """Update the number of connected workers and of clients without a worker."""
        with self._lock:
            self._now = replace(self._now, workers=count, clients_unserved=clients_unserved)

    # ---- observer of the round loop

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Report a completed round."""
        self.tell("training", round=attempt.round)

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Report a failed attempt."""
        self.tell(
            "training", f"round {attempt.round}: attempt {attempt.attempt} of {attempts} failed: {attempt.outcome}"
        )

    def evaluating(self, round: int, done: int, clients: int) -> None:
        """Report how many clients an evaluation has measured so far."""
        self.tell("evaluating", f"{done} of {pluralize(clients, 'client')} measured", round=round)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Report a line written to metrics.jsonl."""
        self.tell("training", round=line["round"])
        with self._lock:
            self._evaluations.append(replace(self._now, evaluated=line))

    # ---- watchers

    @property
    def unwatched_s(self) -> float:
        """Seconds since the last watcher left; 0 while anyone watches."""
        with self._lock:
            return 0.0 if self._watchers else time.monotonic() - self._unwatched_since

    def read_within(self, seconds: float) -> None:
        """Wait until every watcher has been told of the end, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._watchers and time.monotonic() < deadline:
            time.sleep(0.02)

    async def watch(self, request: wire.WatchRequest, context: Any) -> None:
        """Handle one watcher's stream; it begins with the newest evaluation, if any."""
        if self._watchers >= WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{WATCHERS} watch already: come again")
        with self._lock:
            self._watchers += 1
            seen = max(0, len(self._evaluations) - 1)
        told: Progress | None = None
        told_at = 0.0
        try:
            while told is None or told.state not in ENDS:
                if told is not None:
                    await asyncio.sleep(EVERY_S)
                with self._lock:
                    now, new = self._now, self._evaluations[seen:]
                for evaluation in new:
                    await context.write(to_wire(evaluation))
                seen += len(new)
                if now != told or time.monotonic() - told_at > stream.HEARTBEAT_S:
                    await context.write(to_wire(now))
                    told, told_at = now, time.monotonic()
        finally:
            with self._lock:
                self._watchers -= 1
                self._unwatched_since = time.monotonic()
