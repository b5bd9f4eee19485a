"""How much of a line a worker takes: frames wait for those before them to be paid for at a rate."""

from __future__ import annotations

import asyncio
import re
import time
from typing import NamedTuple

from fedloom.errors import ExperimentError, argument

UNITS = {"kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
"""Bytes a second."""

LEAST = 256 * UNITS["kbit/s"]
"""At which a frame of 1 MiB takes 33 s: a stream on which nothing comes for 90 s is given up."""


class Bandwidth(NamedTuple):
    """Bytes a second that may go up, to the aggregator, and come down."""

    up: float
    down: float


def parse_bandwidth(text: str) -> Bandwidth:
    """Read what ``--bandwidth`` says: ``10Mbit/s``, or ``2Mbit/s,20Mbit/s`` up and down.

    Raises
    ------
    ExperimentError
        If it is nothing of the kind, or less than 256 kbit/s.
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


class Line:
    """One direction of a worker's line. Belongs to one event loop.

    In any t seconds at most rate · t bytes and one frame more pass.

    Parameters
    ----------
    rate
        Bytes a second; None: any.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def free(self) -> None:
        """Wait until what has passed is paid for."""
        while (left := self._free_at - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def charge(self, size: int) -> None:
        """Note that so many bytes pass now."""
        if self._rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
