"""Measures of work that another load on the machine cannot change: lines of Python, and bytes held at once."""

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
    """Measure how many bytes an action holds at most beyond those held before it."""
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
