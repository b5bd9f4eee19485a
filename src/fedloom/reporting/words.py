"""What methods, sizes and readings are called, on pages and in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def method_title(summary: Mapping[str, Any]) -> str:
    """What a page calls the method of a finished run: the shortest title of its predictors."""
    titles: Mapping[str, str] = summary.get("titles") or {}
    return min(titles.values(), key=len, default=str(summary["algorithm"]))


def human_bytes(count: int | None) -> str:
    """Bytes for people, in the decimal units in which communication is counted; a dash where it is not known."""
    if count is None:
        return "–"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # what rounds to 1000 belongs to the next unit
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def is_masked(group: Mapping[str, Any]) -> bool:
    """Whether the statistics of a group are those under the label mask (then the other reading is inside)."""
    return "unmasked" in group
