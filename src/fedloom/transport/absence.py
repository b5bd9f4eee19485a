"""Absence of the aggregator: how long a worker tries to reach it, how often, and what it logs."""

from __future__ import annotations

import logging
import random
import time

from fedloom.errors import AbandonedError
from fedloom.transport.stream import LAST_BACKOFF_S

log = logging.getLogger("fedloom.transport.worker")

FIRST_BACKOFF_S = 0.1
FIRST_NOTICE_S = 5.0  # when to log that we are still trying to connect; the interval doubles each time
DISCONNECTED = {"data": {"event": "disconnected"}}  # of log lines


class Absence:
    """Reconnection policy: maximum duration, retry interval and log lines."""

    def __init__(self, address: str, reconnect_s: float) -> None:
        self.last_seen = time.monotonic()
        self._address = address
        self._reconnect_s = reconnect_s
        self._attempts = 0
        self._logged: set[str] = set()
        self._next_notice = FIRST_NOTICE_S

    @property
    def left_s(self) -> float:
        """Seconds that are left to reach it."""
        return self._reconnect_s - (time.monotonic() - self.last_seen)

    def error(self, reason: str) -> AbandonedError:
        """Return the error that ends the worker when none are left."""
        return AbandonedError(
            f"there has been no aggregator at {self._address} for {self._reconnect_s:g} s: {reason}",
            hint="start it again (`fedloom aggregator`), then this worker",
        )

    def log(self, reason: str, *, was_up: bool) -> None:
        """Log each reason once, and then at doubling intervals that we are still trying."""
        gone_s = time.monotonic() - self.last_seen
        if reason not in self._logged:
            self._logged.add(reason)
            message = (
                "lost the aggregator at %s (%s), reconnecting" if was_up else "no aggregator at %s (%s), connecting"
            )
            log.info(f"{message} for %.0f s", self._address, reason, self.left_s, extra=DISCONNECTED)
        elif gone_s >= self._next_notice:
            self._next_notice = 2 * gone_s
            log.info("no aggregator at %s, still trying, %.0f s", self._address, gone_s, extra=DISCONNECTED)

    def backoff_s(self) -> float:
        """Return the delay before the next attempt."""
        backoff = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2**self._attempts)
        self._attempts = min(self._attempts + 1, 16)
        wait_s: float = min(self.left_s, backoff * random.uniform(0.5, 1.0))
        return max(0.0, wait_s)
