"""Token-bucket bandwidth limit for a worker's frames."""

from __future__ import annotations

import asyncio
import re
import time
from typing import NamedTuple

from fedloom.errors import ExperimentError, argument

UNITS = {"kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
"""Bytes per second, by unit."""

LEAST = 256 * UNITS["kbit/s"]
"""Lowest rate: a frame of 1 MiB takes 33 s at this rate, and a stream without data for 90 s is abandoned."""


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
        found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})\s*", part)
        rates.append(float(found[1]) * UNITS[found[2]] if found else 0.0)
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
        while (left := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def charge(self, size: int) -> None:
        """Record bytes that are sent now."""
        if self._rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
