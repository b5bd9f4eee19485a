"""Statistics of the evaluations at the end of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.tasks.headline import GROUPS, headline_of, values_of
from fedloom.tasks.names import MODEL_LOSS, Headline

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
    for name in GROUPS:
        groups = [line[name] for line in lines if line[name] is not None]
        found[name] = _over_evaluations(groups, headline_of(lines[-1])) if len(groups) == len(lines) else None
    return found


def _over_evaluations(groups: Sequence[Mapping[str, Any]], headline: Headline) -> dict[str, dict[str, float]]:
    """Return mean, lowest and highest of a group's headline, or of its losses if there is none."""
    values = [values_of(group, headline) for group in groups]
    columns = {f"{headline.name}_{key}": [getattr(each, key) for each in values] for key in ("mean", "pooled")}
    known = {key: column for key, column in columns.items() if None not in column}
    if not known or headline == MODEL_LOSS:
        known = {"loss_mean": [group["loss_mean"] for group in groups]}
    return {
        key: {"mean": math.fsum(column) / len(column), "lowest": min(column), "highest": max(column)}
        for key, column in known.items()
    }
