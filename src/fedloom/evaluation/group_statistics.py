"""Statistics of groups of clients: accuracies and losses, the metrics of the task, uncertainty."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedloom.evaluation.plan import READINGS, SPLITS, EvaluationPlan, EvaluationResult
from fedloom.evaluation.spread import spread
from fedloom.evaluation.uncertainty import group_uncertainty
from fedloom.messages import Metrics, SummedMetrics
from fedloom.tasks.base import CORRECT, LOSS, TOTAL, Counts
from fedloom.tasks.classification import calibration_errors
from fedloom.tasks.names import GROUPS, MetricValues

Statistics: TypeAlias = dict[str, Any]
"""Statistics of a group of clients: JSON values, see :func:`group_statistics`."""

Values: TypeAlias = dict[str, float | None]
"""Statistics of a metric: the fields of :class:`~fedloom.tasks.names.MetricValues`."""

ACCURACY, MEAN_LOSS, OWN = 0, 1, 2
"""Positions of the moments: accuracy and mean loss of a reading, then the metrics of the plan."""

NUMBER, SUM, SQUARES = range(3)
"""Last axis of moments: clients for which a metric is defined, sum of their values, sum of the squares."""


def summed_shapes(plan: EvaluationPlan, predictors: int) -> dict[str, tuple[int, ...]]:
    """Return the trailing shapes of the ``SummedMetrics`` fields, for P predictors; of moments ``(P, R, 2 + M, 3)``."""
    shapes = plan.shapes(predictors) | {"moments": (predictors, len(READINGS), OWN + len(plan.metrics), 3)}
    return {field.name: shapes[field.name] for field in SummedMetrics.fields()}


def summed_metrics(metrics: Metrics, plan: EvaluationPlan) -> SummedMetrics:
    """Return the measurements of c clients with the moments of each client's own metrics on its test split."""
    test = SPLITS.index("test")
    by_predictor = []
    for p in range(metrics.counts.shape[1]):
        by_reading = []
        for r in range(len(READINGS)):
            counts = metrics.counts[:, p, test, r]
            values = plan.values(
                Counts(counts, metrics.confusion[:, p], metrics.calibration[:, p]), metrics.sums[:, p, test]
            )
            total = counts[:, TOTAL]
            own = [values[metric.name].double() for metric in plan.metrics]
            statistics = torch.stack([counts[:, CORRECT] / total, counts[:, LOSS] / total, *own], dim=1)  # [c, 2 + M]
            is_defined = ~statistics.isnan() & (total > 0)[:, None]
            statistics = torch.where(is_defined, statistics, 0.0)
            by_reading.append(torch.stack([is_defined.double(), statistics, statistics.square()], dim=-1))
        by_predictor.append(torch.stack(by_reading, dim=1))
    tensors = metrics.tensors() | {"moments": torch.stack(by_predictor, dim=1)}
    return SummedMetrics(**{field.name: tensors[field.name] for field in SummedMetrics.fields()})


def _summed_values(moment: Tensor, pooled: float) -> Values | None:
    """Return the statistics of one metric that follow from its moments, ``[3]``; None if it is defined for none."""
    if not float(moment[NUMBER]):
        return None
    values = MetricValues(*_mean_and_std(moment), pooled=None if math.isnan(pooled) else pooled)
    return values._asdict()


def _moments(evaluation: EvaluationResult, predictor: str, group: Tensor, reading: str) -> Tensor:
    """Return the moments of a group's clients, ``[2 + M, 3]``."""
    assert evaluation.moments is not None
    p, r = evaluation.predictors.index(predictor), READINGS.index(reading)
    return evaluation.moments[group & evaluation.present, p, r].sum(0)


def _mean_and_std(moment: Tensor) -> tuple[float, float]:
    """Return mean and population standard deviation from number, sum and sum of squares."""
    number, total, squares = moment.tolist()
    mean = total / number
    return mean, math.sqrt(max(0.0, squares / number - mean**2))


def group_statistics(counts: Tensor, *, classes: bool = True) -> Statistics | None:
    """Summarize the clients of a group under one reading, given ``[m, 3]`` (correct, total, summed loss) per client.

    Clients with total 0 (absent or untested) are left out; ``clients`` is the number of the others, and the result None
    without any. ``accuracy_mean`` and ``accuracy_std`` are over clients, each counting once (population standard
    deviation, ddof = 0: these are all the clients); ``accuracy_worst_decile`` is the mean of the worst ⌈n/10⌉ clients,
    after ``accuracy_worst``; ``accuracy_pooled``, correct/total over all examples; ``loss_mean``, the mean over clients
    of their mean loss in nats. Fractions, not percent. Without ``classes``, every accuracy is None.
    """
    counts = counts[counts[:, TOTAL] > 0].double()
    n = len(counts)
    if n == 0:
        return None
    loss = float((counts[:, LOSS] / counts[:, TOTAL]).mean())
    pooled = counts[:, CORRECT].sum() / counts[:, TOTAL].sum()
    accuracies = _over_clients(counts[:, CORRECT] / counts[:, TOTAL], pooled, higher=True) if classes else None
    return {"clients": n, **_accuracies(accuracies), "loss_mean": loss}


def _accuracies(values: Values | None) -> Values:
    """Return the keys of a group's statistics that are None for tasks other than classification."""
    return {f"accuracy_{key}": None if values is None else values[key] for key in MetricValues._fields}


def predictor_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, *, label_mask: bool
) -> Statistics | None:
    """Return test statistics of one predictor over the clients in ``group`` ``[n]`` bool, in both readings.

    The reading selected by ``label_mask`` is at the top level, as :func:`group_statistics` returns it, with ``metrics``
    (:func:`metric_statistics`). The other is under ``masked`` or ``unmasked``, None if no client could be measured that
    way.
    """
    main, other = ("masked", "unmasked") if label_mask else ("unmasked", "masked")
    statistics = reading_statistics(evaluation, predictor, group, main, classes=evaluation.classes > 0)
    if statistics is None:
        return None
    return statistics | {
        "metrics": metric_statistics(evaluation, predictor, group, reading=main),
        other: reading_statistics(evaluation, predictor, group, other, classes=True),
    }


def reading_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, reading: str, *, classes: bool
) -> Statistics | None:
    """Return :func:`group_statistics` of a group under one reading; without those of the worst clients from sums."""
    counts = evaluation.of(predictor, "test", reading)[group]
    if evaluation.moments is None:
        return group_statistics(counts, classes=classes)
    moments = _moments(evaluation, predictor, group, reading)
    clients_tested = round(float(moments[MEAN_LOSS, NUMBER]))
    if clients_tested == 0:
        return None
    counts = counts.sum(0)
    accuracies = _summed_values(moments[ACCURACY], float(counts[CORRECT] / counts[TOTAL])) if classes else None
    return {"clients": clients_tested, **_accuracies(accuracies), "loss_mean": _mean_and_std(moments[MEAN_LOSS])[0]}


def groups(evaluation: EvaluationResult, *, label_mask: bool) -> dict[str, Statistics | None]:
    """Return ``seen`` and ``unseen`` of the personal predictor, and ``global`` of the global one over all clients.

    ``global`` contains ``seen`` and ``unseen`` for the two groups separately; it is None for a method without a global
    predictor. A group without clients is None.
    """

    def both(predictor: str) -> dict[str, Statistics | None]:
        groups = {"seen": evaluation.seen, "unseen": ~evaluation.seen}
        return {
            name: predictor_statistics(evaluation, predictor, group, label_mask=label_mask)
            for name, group in groups.items()
        }

    overall = None
    if "global" in evaluation.predictors:
        everyone = torch.ones_like(evaluation.seen)
        overall = predictor_statistics(evaluation, "global", everyone, label_mask=label_mask)
        if overall is not None:
            overall |= both("global")
    return both("personal") | {"global": overall}


def metric_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, *, reading: str = "unmasked"
) -> dict[str, Values | None]:
    """Return ``metrics`` of a group: test statistics of each metric of the task, by name; the headline comes first.

    Each has ``mean`` and ``std`` over the clients for which it is defined (population standard deviation); ``worst``,
    and ``worst_decile``, the mean of the worst ⌈m/10⌉ of them; and ``pooled``, the metric of all their examples
    together. It is None if it is defined for no client. ``reading`` is that of accuracy and log loss.
    """
    metrics = evaluation.plan.metrics
    pooled = evaluation.metrics(predictor, "test", group, reading=reading, pooled=True)
    statistics: dict[str, Values | None]
    if evaluation.moments is not None:
        moments = _moments(evaluation, predictor, group, reading)[OWN:]
        pairs = zip(metrics, moments, strict=True)
        statistics = {metric.name: _summed_values(moment, float(pooled[metric.name])) for metric, moment in pairs}
    else:
        clients = evaluation.metrics(predictor, "test", group, reading=reading)
        statistics = {
            metric.name: _over_clients(clients[metric.name], pooled[metric.name], higher=metric.higher_is_better)
            for metric in metrics
        }
    headline = evaluation.plan.task.headline.name
    return {name: statistics[name] for name in sorted(statistics, key=lambda name: name != headline)}


def _over_clients(values: Tensor, pooled: Tensor, *, higher: bool) -> Values | None:
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


def spreads(evaluation: EvaluationResult) -> dict[str, dict[str, Any] | None]:
    """Return the :func:`~fedloom.evaluation.spread.spread` of the personal models of ``seen`` and ``unseen`` clients.

    A group is None if sketches were not measured.
    """
    models, groups = evaluation.models, {"seen": evaluation.seen, "unseen": ~evaluation.seen}
    if models is None or not models.shape[1]:
        return dict.fromkeys(groups)
    return {name: spread(models[members & evaluation.present]) for name, members in groups.items()}


def uncertainties(evaluation: EvaluationResult) -> dict[str, dict[str, float] | None]:
    """Return the uncertainty of ``seen``, ``unseen`` (personal) and ``global``: see ``group_uncertainty``."""
    result: dict[str, dict[str, float] | None] = dict.fromkeys(GROUPS)
    for group in GROUPS:
        predictor, members = _members(evaluation, group)
        if predictor in evaluation.predictors:
            p, members = evaluation.predictors.index(predictor), members & evaluation.present
            result[group] = group_uncertainty(evaluation.calibration[members, p], evaluation.uncertainty[members, p])
    return result


def calibration_of_clients(evaluation: EvaluationResult, group: str) -> float | None:
    """Return the mean calibration error over the clients of ``seen``, ``unseen`` or ``global``."""
    predictor, members = _members(evaluation, group)
    if evaluation.moments is not None:
        names = [metric.name for metric in evaluation.plan.metrics]
        if "ece" not in names:
            return None
        moment = _moments(evaluation, predictor, members, READINGS[0])[OWN + names.index("ece")]
        return _mean_and_std(moment)[0] if float(moment[NUMBER]) else None
    errors = calibration_errors(evaluation.calibration[:, evaluation.predictors.index(predictor)])
    errors = errors[members & evaluation.present]
    errors = errors[~errors.isnan()]
    return float(errors.mean()) if len(errors) else None


def _members(evaluation: EvaluationResult, group: str) -> tuple[str, Tensor]:
    """Return the predictor of a group, and its clients ``[n]`` bool."""
    if group == "global":
        return "global", torch.ones_like(evaluation.seen)
    return "personal", evaluation.seen if group == "seen" else ~evaluation.seen
