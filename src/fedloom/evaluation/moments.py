"""Statistics over clients from sums alone, for evaluations whose metrics are summed securely.

Each client adds its own metrics and their squares, so the mean and the deviation over clients are exact, and no
client's metrics are known. The worst clients are unknown, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.evaluation.plan import READINGS, SPLITS, EvaluationPlan
from fedloom.messages import Metrics, SummedMetrics
from fedloom.tasks.base import CORRECT, LOSS, TOTAL, Counts

if TYPE_CHECKING:
    from fedloom.evaluation.group_statistics import Statistics
    from fedloom.evaluation.summary import EvaluationResult

ACCURACY, MEAN_LOSS, OWN = 0, 1, 2
"""Positions of the moments: accuracy and mean loss of a reading, then the metrics of the plan."""

NUMBER, SUM, SQUARES = range(3)
"""Last axis of moments: clients for which a metric is defined, sum of their values, sum of the squares."""


def summed_shapes(plan: EvaluationPlan, predictors: int) -> dict[str, tuple[int, ...]]:
    """Return the trailing shapes of the ``SummedMetrics`` fields, for P predictors; of moments ``(P, R, 2 + M, 3)``."""
    shapes = plan.shapes(predictors) | {"moments": (predictors, len(READINGS), OWN + len(plan.metrics), 3)}
    return {field.name: shapes[field.name] for field in SummedMetrics.fields()}


def summed_metrics(measured: Metrics, plan: EvaluationPlan) -> SummedMetrics:
    """Return the measurements of c clients with the moments of each client's own metrics on its test split."""
    test = SPLITS.index("test")
    by_predictor = []
    for p in range(measured.counts.shape[1]):
        by_reading = []
        for r in range(len(READINGS)):
            counts = measured.counts[:, p, test, r]
            values = plan.values(
                Counts(counts, measured.confusion[:, p], measured.calibration[:, p]), measured.sums[:, p, test]
            )
            total = counts[:, TOTAL]
            own = [values[metric.name].double() for metric in plan.metrics]
            found = torch.stack([counts[:, CORRECT] / total, counts[:, LOSS] / total, *own], dim=1)  # [c, 2 + M]
            defined = ~found.isnan() & (total > 0)[:, None]
            found = torch.where(defined, found, 0.0)
            by_reading.append(torch.stack([defined.double(), found, found.square()], dim=-1))
        by_predictor.append(torch.stack(by_reading, dim=1))
    sent = measured.tensors() | {"moments": torch.stack(by_predictor, dim=1)}
    return SummedMetrics(**{field.name: sent[field.name] for field in SummedMetrics.fields()})


def summed_group_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, reading: str, *, classes: bool
) -> Statistics | None:
    """Return the statistics of a group of clients (``group_statistics``); those of the worst clients are None."""
    moments = _of(evaluation, predictor, group, reading)
    tested = round(float(moments[MEAN_LOSS, NUMBER]))
    if tested == 0:
        return None
    counts = evaluation.of(predictor, "test", reading)[group].sum(0)
    mean, std = _mean_and_std(moments[ACCURACY])
    return {
        "clients": tested,
        "accuracy_mean": mean if classes else None,
        "accuracy_std": std if classes else None,
        "accuracy_worst": None,
        "accuracy_worst_decile": None,
        "accuracy_pooled": float(counts[CORRECT] / counts[TOTAL]) if classes else None,
        "loss_mean": _mean_and_std(moments[MEAN_LOSS])[0],
    }


def summed_metric_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, reading: str
) -> dict[str, dict[str, float | None] | None]:
    """Return the statistics of each metric (``metric_statistics``); those of the worst clients are None."""
    pooled = evaluation.metrics(predictor, "test", group, reading=reading, pooled=True)
    moments = _of(evaluation, predictor, group, reading)[OWN:]
    found: dict[str, dict[str, float | None] | None] = {}
    for metric, moment in zip(evaluation.plan.metrics, moments, strict=True):
        if not float(moment[NUMBER]):
            found[metric.name] = None
            continue
        mean, std = _mean_and_std(moment)
        whole = float(pooled[metric.name])
        found[metric.name] = {
            "mean": mean,
            "std": std,
            "worst": None,
            "worst_decile": None,
            "pooled": None if math.isnan(whole) else whole,
        }
    return found


def summed_mean(evaluation: EvaluationResult, predictor: str, group: Tensor, metric: str) -> float | None:
    """Return the mean of a metric over the clients of a group; None if it is defined for none, or not measured."""
    names = [each.name for each in evaluation.plan.metrics]
    if metric not in names:
        return None
    moment = _of(evaluation, predictor, group, READINGS[0])[OWN + names.index(metric)]
    return _mean_and_std(moment)[0] if float(moment[NUMBER]) else None


def _of(evaluation: EvaluationResult, predictor: str, group: Tensor, reading: str) -> Tensor:
    """Return the moments of a group's clients, ``[2 + M, 3]``."""
    assert evaluation.moments is not None
    p, r = evaluation.predictors.index(predictor), READINGS.index(reading)
    return evaluation.moments[group & evaluation.present, p, r].sum(0)


def _mean_and_std(moment: Tensor) -> tuple[float, float]:
    """Return mean and population standard deviation from number, sum and sum of squares."""
    number, total, squares = moment.tolist()
    mean = total / number
    return mean, math.sqrt(max(0.0, squares / number - mean**2))
