"""Wording of methods, numbers, sizes and times on pages and in tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def method_title(summary: Mapping[str, Any]) -> str:
    """Return the name of a finished run's method on pages: the shortest title of its predictors."""
    titles: Mapping[str, str] = summary.get("titles") or {}
    return min(titles.values(), key=len, default=str(summary["algorithm"]))


def human_bytes(count: int | None) -> str:
    """Return a byte count in decimal units, as communication is counted; a dash if unknown."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # values that round to 1000 take the next unit
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def is_masked(group: Mapping[str, Any]) -> bool:
    """Return whether a group's statistics are those under the label mask, with the unmasked ones nested."""
    return "unmasked" in group


def client_column(predictor: str, metric: str, reading: str = "unmasked") -> str:
    """Return the column of ``clients.csv`` that has a metric of a predictor under a reading."""
    return f"{predictor}_{metric}_{reading}"


def in_percent(fraction: float) -> str:
    """Return a fraction in percent with one decimal, without the sign."""
    return f"{100 * fraction:.1f}"


def number_range(values: Sequence[int]) -> str:
    """Return the lowest, highest and median value, or the single value."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}, median {statistics.median(values):g}"


def human_time(seconds: float) -> str:
    """Return a duration with two or three digits: ``4.0 ms``, ``2.00 s``, ``13 s``, ``5 min 12 s``, ``1 h 40 min``."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
