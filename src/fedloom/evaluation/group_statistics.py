"""Statistics of groups of clients: accuracies and losses, the metrics of the task, uncertainty."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from fedloom.evaluation.moments import summed_group_statistics, summed_mean, summed_metric_statistics
from fedloom.evaluation.uncertainty import group_uncertainty
from fedloom.tasks.base import CORRECT, LOSS, TOTAL
from fedloom.tasks.classification import calibration_errors
from fedloom.tasks.headline import GROUPS

if TYPE_CHECKING:
    from fedloom.evaluation.summary import EvaluationResult

Statistics: TypeAlias = dict[str, Any]
"""Statistics of a group of clients: JSON values, see :func:`group_statistics`."""


ACCURACIES = ("accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_worst_decile", "accuracy_pooled")
"""Keys of a group's statistics that are None for tasks other than classification."""


def group_statistics(counts: Tensor, *, classes: bool = True) -> Statistics | None:
    """Summarize the clients of a group under one reading.

    Parameters
    ----------
    counts
        ``[m, 3]`` (correct, total, summed loss) per client. Clients with total 0 (absent or untested) are left out;
        ``clients`` is the number of the others.
    classes
        False for data without classes: every accuracy is None.

    Returns
    -------
    dict or None
        ``clients``; ``accuracy_mean`` and ``accuracy_std`` over clients, each counting once (population standard
        deviation, ddof = 0: these are all the clients); ``accuracy_worst``; ``accuracy_worst_decile``, the mean of the
        worst ⌈n/10⌉ clients; ``accuracy_pooled``, correct/total over all examples; ``loss_mean``, the mean over clients
        of their mean loss in nats. Fractions, not percent. None for a group without tested clients.
    """
    counts = counts[counts[:, TOTAL] > 0].double()
    n = len(counts)
    if n == 0:
        return None
    loss = float((counts[:, LOSS] / counts[:, TOTAL]).mean())
    if not classes:
        return {"clients": n} | dict.fromkeys(ACCURACIES) | {"loss_mean": loss}
    accuracy = counts[:, CORRECT] / counts[:, TOTAL]
    worst = accuracy.sort().values[: math.ceil(n / 10)]
    return {
        "clients": n,
        "accuracy_mean": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std(correction=0)),
        "accuracy_worst": float(worst[0]),
        "accuracy_worst_decile": float(worst.mean()),
        "accuracy_pooled": float(counts[:, CORRECT].sum() / counts[:, TOTAL].sum()),
        "loss_mean": loss,
    }


def predictor_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, *, label_mask: bool
) -> Statistics | None:
    """Return test statistics of one predictor over the clients in ``group`` ``[n]`` bool, in both readings.

    The reading selected by ``label_mask`` is at the top level, as :func:`group_statistics` returns it, with ``metrics``
    (:func:`metric_statistics`). The other is under ``masked`` or ``unmasked``, None if no client could be measured that
    way.
    """
    main, other = ("masked", "unmasked") if label_mask else ("unmasked", "masked")
    statistics = _group_statistics(evaluation, predictor, group, main, classes=evaluation.classes > 0)
    if statistics is None:
        return None
    return statistics | {
        "metrics": metric_statistics(evaluation, predictor, group, reading=main),
        other: _group_statistics(evaluation, predictor, group, other, classes=True),
    }


def _group_statistics(
    evaluation: EvaluationResult, predictor: str, group: Tensor, reading: str, *, classes: bool
) -> Statistics | None:
    """Return the statistics of a group under one reading, from each client's counts or from sums over clients."""
    if evaluation.moments is not None:
        return summed_group_statistics(evaluation, predictor, group, reading, classes=classes)
    return group_statistics(evaluation.of(predictor, "test", reading)[group], classes=classes)


def groups(evaluation: EvaluationResult, *, label_mask: bool) -> dict[str, Statistics | None]:
    """Return ``seen`` and ``unseen`` of the personal predictor, and ``global`` of the global one over all clients.

    ``global`` contains ``seen`` and ``unseen`` for the two groups separately; it is None for a method without a global
    predictor. A group without clients is None.
    """
    everyone = torch.ones_like(evaluation.seen)

    def both(predictor: str) -> dict[str, Statistics | None]:
        return {
            "seen": predictor_statistics(evaluation, predictor, evaluation.seen, label_mask=label_mask),
            "unseen": predictor_statistics(evaluation, predictor, ~evaluation.seen, label_mask=label_mask),
        }

    overall = None
    if "global" in evaluation.predictors:
        overall = predictor_statistics(evaluation, "global", everyone, label_mask=label_mask)
        if overall is not None:
            overall |= both("global")
    return both("personal") | {"global": overall}


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


def uncertainties(evaluation: EvaluationResult) -> dict[str, dict[str, float] | None]:
    """Return the uncertainty of ``seen``, ``unseen`` (personal) and ``global``: see ``group_uncertainty``."""
    return {group: _uncertainty(evaluation, group) for group in GROUPS}


def _uncertainty(evaluation: EvaluationResult, group: str) -> dict[str, float] | None:
    predictor, members = _members(evaluation, group)
    if predictor not in evaluation.predictors:
        return None
    p, members = evaluation.predictors.index(predictor), members & evaluation.present
    return group_uncertainty(evaluation.calibration[members, p], evaluation.uncertainty[members, p])


def calibration_of_clients(evaluation: EvaluationResult, group: str) -> float | None:
    """Return the mean calibration error over the clients of ``seen``, ``unseen`` or ``global``."""
    predictor, members = _members(evaluation, group)
    if evaluation.moments is not None:
        return summed_mean(evaluation, predictor, members, "ece")
    errors = calibration_errors(evaluation.calibration[:, evaluation.predictors.index(predictor)])
    errors = errors[members & evaluation.present]
    errors = errors[~errors.isnan()]
    return float(errors.mean()) if len(errors) else None


def _members(evaluation: EvaluationResult, group: str) -> tuple[str, Tensor]:
    """Return the predictor of a group, and its clients ``[n]`` bool."""
    if group == "global":
        return "global", torch.ones_like(evaluation.seen)
    return "personal", evaluation.seen if group == "seen" else ~evaluation.seen
