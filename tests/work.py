"""Measures of work that do not depend on other load of the machine: lines of Python, and peak bytes."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType


def lines_run(action: Callable[[], object]) -> int:
    """Count the lines of Python that an action runs in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def bytes_held(action: Callable[[], object]) -> int:
    """Measure the peak number of bytes that an action holds beyond those held before it."""
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
