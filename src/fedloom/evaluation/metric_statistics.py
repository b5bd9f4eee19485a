"""Statistics of a task's metrics over the clients of a group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from fedloom.evaluation.moments import summed_metric_statistics

if TYPE_CHECKING:
    from fedloom.evaluation.summary import EvaluationResult


def metric_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, *, reading: str = "unmasked"
) -> dict[str, dict[str, float | None] | None]:
    """Return ``metrics`` of a group: test statistics of each metric of the task, by name; the headline comes first.

    Each has ``mean`` and ``std`` over the clients for which it is defined (population standard deviation); ``worst``,
    and ``worst_decile``, the mean of the worst ⌈m/10⌉ of them; and ``pooled``, the metric of all their examples
    together. It is None if it is defined for no client. ``reading`` is that of accuracy and log loss.
    """
    headline = evaluation.plan.task.headline.name
    ordered = sorted(evaluation.plan.metrics, key=lambda metric: metric.name != headline)
    if evaluation.moments is not None:
        found = summed_metric_statistics(evaluation, predictor, group, reading)
        return {metric.name: found[metric.name] for metric in ordered}
    clients = evaluation.metrics(predictor, "test", group, reading=reading)
    pooled = evaluation.metrics(predictor, "test", group, reading=reading, pooled=True)
    return {
        metric.name: _over_clients(clients[metric.name], pooled[metric.name], higher=metric.higher_is_better)
        for metric in ordered
    }


def _over_clients(values: Tensor, pooled: Tensor, *, higher: bool) -> dict[str, float | None] | None:
    """Return the statistics of one metric of m clients, ``[m]``, and of all examples, ``[1]``."""
    values = values[~values.isnan()]
    if not len(values):
        return None
    worst = values.sort(descending=not higher).values[: math.ceil(len(values) / 10)]
    return {
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "worst": float(worst[0]),
        "worst_decile": float(worst.mean()),
        "pooled": None if bool(pooled.isnan()) else float(pooled),
    }
