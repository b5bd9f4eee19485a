"""What those who are not known yet, or do wrong, may cost an aggregator: connections, joins, refusals, lines of log."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable

CONNECTIONS = 1024
RESERVED_FILES = 256
"""Descriptors kept for everything but connections: the journal, checkpoints, a store, worker processes."""


def connections() -> int:
    """How many connections may be open at one time; the process's limit of open files is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + RESERVED_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    files = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
    return max(files - RESERVED_FILES, files // 4)


class Budget:
    """So much at once, and so much each second.

    Parameters
    ----------
    most, per_s
        What there is at first and at most, and what comes back each second.
    clock
        In seconds.
    """

    def __init__(self, most: float, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_s, self._clock = most, per_s, clock
        self._left, self._at = most, clock()

    def spend(self, cost: float = 1.0) -> bool:
        """Take it, if it is there."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < cost:
            return False
        self._left -= cost
        return True


class Sparing(logging.Filter):
    """Lets 20 lines of one kind pass at once, and then one every two seconds, which says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[str, tuple[Budget, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line may pass; lines are of one kind if they differ in what they tell of only."""
        kind = str(record.msg)
        budget, left_out = self._kinds.get(kind) or (Budget(20, 0.5, self._clock), 0)
        passes = budget.spend()
        self._kinds[kind] = (budget, 0 if passes else left_out + 1)
        if passes and left_out:
            record.msg = f"{kind} (and {left_out} more of this kind)"
        return passes
