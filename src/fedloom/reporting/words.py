"""Wording of methods, sizes and readings on pages and in tables."""

from __future__ import annotations

from collections.abc import Mapping
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
