"""Statistics of the evaluations at the end of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LATE = 8
"""Number of evaluations at the end of training that are summarized together."""


def late(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return ``last_evaluations`` of ``summary.json``: statistics of the evaluations at the end of training.

    A single evaluation, and even more the highest of several, is unreliable if accuracy fluctuates between evaluations.

    Parameters
    ----------
    lines
        Up to :data:`LATE` last lines of ``metrics.jsonl``, ascending. Lines before training are left out unless there
        are no others.

    Returns
    -------
    dict or None
        ``evaluations``, their number; ``rounds``, the first and the last; and for ``seen``, ``unseen`` and ``global``,
        by ``accuracy_mean`` and ``accuracy_pooled`` (of another task its headline, as ``rmse_mean`` and
        ``rmse_pooled``; without targets ``loss_mean``), {``mean``, ``lowest``, ``highest``}; None for a group that some
        line lacks. None without lines.
    """
    lines = [line for line in lines if line["round"]] or list(lines)
    if not lines:
        return None
    found: dict[str, Any] = {"evaluations": len(lines), "rounds": [lines[0]["round"], lines[-1]["round"]]}
    for group in ("seen", "unseen", "global"):
        of_group = [_with_headline(line[group], line) for line in lines if line[group] is not None]
        found[group] = _over_evaluations(of_group) if len(of_group) == len(lines) else None
    return found


def _with_headline(group: Mapping[str, Any], line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a group's statistics with mean and pooled value of the headline, where the task has another than loss."""
    name = line.get("headline", {}).get("name", "accuracy")
    values = (group.get("metrics") or {}).get(name)
    if name in ("accuracy", "loss") or values is None:
        return group
    return {f"{name}_{key}": values[key] for key in ("mean", "pooled")} | {"loss_mean": group["loss_mean"]}


def _over_evaluations(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return mean, lowest and highest of a group's headline, or of its losses if there is none."""
    found: dict[str, dict[str, float]] = {}
    headline = [key for key in groups[0] if key.endswith(("_mean", "_pooled")) and key != "loss_mean"]
    for keys in (headline, ["loss_mean"]):
        for key in keys if not found else ():
            values = [one[key] for one in groups if one.get(key) is not None]
            if len(values) == len(groups):
                mean = math.fsum(values) / len(values)
                found[key] = {"mean": mean, "lowest": min(values), "highest": max(values)}
    return found
