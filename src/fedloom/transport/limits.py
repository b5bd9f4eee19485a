"""Limits on what peers may cost an aggregator (connections, joins, refusals, log lines), and a worker's bandwidth."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

from fedloom.errors import ExperimentError, argument

CONNECTIONS = 1024
RESERVED_FILES = 256
"""File descriptors reserved for everything but connections: the journal, checkpoints, a store, worker processes."""


UNITS = {"kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
"""Bytes per second, by unit."""

LEAST = 256 * UNITS["kbit/s"]
"""Lowest rate: a frame of 1 MiB takes 33 s at this rate, and a stream without data for 90 s is abandoned."""


def connections() -> int:
    """Raise the process's file limit as far as needed and allowed; return the maximum number of open connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    file_count = CONNECTIONS + RESERVED_FILES
    limit = file_count if hard == resource.RLIM_INFINITY else min(file_count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    files = file_count if soft == resource.RLIM_INFINITY else min(file_count, soft)
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


class Bandwidth(NamedTuple):
    """Bytes per second up, to the aggregator, and down."""

    up: float
    down: float


def parse_bandwidth(text: str) -> Bandwidth:
    """Parse the value of ``--bandwidth``: ``10Mbit/s``, or ``2Mbit/s,20Mbit/s`` for up and down.

    Raise ExperimentError if the text is not such a rate, or is below 256 kbit/s.
    """
    rates = []
    for part in text.split(","):
        rate = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})\s*", part)
        rates.append(float(rate[1]) * UNITS[rate[2]] if rate else 0.0)
    if len(rates) > 2 or min(rates) < LEAST:
        raise ExperimentError(
            f"{argument('bandwidth')} must be a rate of at least 256kbit/s, or two, up and down, separated by a comma "
            f"(got {text!r}); units are {', '.join(UNITS)}.",
            key="bandwidth",
            found=text,
        )
    return Bandwidth(rates[0], rates[-1])


class BandwidthLimiter:
    """Rate limiter for one direction of a worker's connection. Belongs to one event loop.

    In any t seconds, at most rate · t bytes and one more frame pass.

    Parameters
    ----------
    rate
        Bytes per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def free(self) -> None:
        """Wait until the rate allows for the bytes sent so far."""
        while (wait_s := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    def charge(self, size: int) -> None:
        """Record bytes that are sent now."""
        if self._rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
