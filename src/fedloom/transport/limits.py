"""Limits on what unknown or misbehaving peers may cost an aggregator: connections, joins, refusals, log lines."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable

CONNECTIONS = 1024
RESERVED_FILES = 256
"""File descriptors reserved for everything but connections: the journal, checkpoints, a store, worker processes."""


def connections() -> int:
    """Raise the process's file limit as far as needed and allowed; return the maximum number of open connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + RESERVED_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    files = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
    return max(files - RESERVED_FILES, files // 4)


class TokenBucket:
    """Token bucket.

    Parameters
    ----------
    most, per_s
        Capacity, which is also the initial amount, and tokens refilled per second.
    clock
        Clock in seconds.
    """

    def __init__(self, most: float, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_s, self._clock = most, per_s, clock
        self._left, self._at = most, clock()

    def spend(self, cost: float = 1.0) -> bool:
        """Take ``cost`` tokens if available; return whether they were."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < cost:
            return False
        self._left -= cost
        return True


class RateLimitFilter(logging.Filter):
    """Log filter that passes 20 lines of a kind at once, then one every two seconds with the number left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[str, tuple[TokenBucket, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line passes; lines with the same format string are of one kind."""
        kind = str(record.msg)
        budget, left_out = self._kinds.get(kind) or (TokenBucket(20, 0.5, self._clock), 0)
        passes = budget.spend()
        self._kinds[kind] = (budget, 0 if passes else left_out + 1)
        if passes and left_out:
            record.msg = f"{kind} (and {left_out} more of this kind)"
        return passes
