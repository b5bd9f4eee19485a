"""What methods, sizes and readings are called, on pages and in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS = {
    ("pefll", "personal"): "PeFLL",
    ("fedavg", "global"): "FedAvg",
    ("fedavg", "personal"): "FedAvg + fine-tuning",
    ("local", "personal"): "Local",
    ("pfedbayes", "personal"): "pFedBayes",
    ("pfedbayes", "global"): "pFedBayes, global model",
    ("comfedl", "personal"): "ComFedL",
    ("comfedl", "global"): "ComFedL, shared model",
    ("wga alone", "personal"): "Alone",
    ("wga alone", "global"): "Alone, mean of all",
    ("wga wga", "personal"): "WGA",
    ("wga wga", "global"): "WGA, mean of all",
    ("wga bc", "personal"): "Bias Correction",
    ("wga bc", "global"): "Bias Correction, mean of all",
    ("wga oracle", "personal"): "Bias Correction, oracle",
    ("wga oracle", "global"): "Bias Correction, oracle, mean of all",
}
"""What a table calls the predictors of a method (:attr:`Run.method`); others are called by method and predictor."""


def method_title(method: str, predictor: str | None = None) -> str:
    """What a table calls a predictor of a method, or the method itself."""
    if predictor is None:
        return min((title for (name, _), title in METHODS.items() if name == method), key=len, default=method)
    return METHODS.get((method, predictor), f"{method} ({predictor})")


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
