"""Evaluation of several clients' classifiers together: each predicts alone, and their sums are taken in one step.

The sums of a small client take longer than its predictions. Results are equal to those of
:func:`~fedloom.evaluation.measure.measure` up to the rounding of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.data.federated import ClientData, Split
from fedloom.evaluation.plan import SPLITS, EvaluationPlan
from fedloom.evaluation.uncertainty import BINS, calibration_counts, entropy, is_ensemble
from fedloom.messages import Metrics
from fedloom.tasks.base import LOSS_CAP

if TYPE_CHECKING:
    from fedloom.models.predictors import Predictor

_MOST = 1 << 20
"""Maximum number of log-probabilities held at once."""


def measured_together(
    predictors: Sequence[Mapping[str, Predictor]],
    clients: Sequence[ClientData],
    names: Sequence[str],
    *,
    batch_size: int,
    plan: EvaluationPlan,
) -> Metrics | None:
    """Measure the predictors of g clients; None if clients must be measured one by one.

    None is returned for tasks other than classification, splits without labels or larger than a batch, clients without
    a predictor or training examples, ensembles, predictions or measurements that are not finite, and large groups.

    Parameters
    ----------
    predictors
        Predictors of each client by name.
    """
    if not (
        plan.classes and _are_small(clients, batch_size, plan) and all(_has_all(named, names) for named in predictors)
    ):
        return None
    present = torch.stack([client.present for client in clients]).cpu()
    found = plan.nothing(len(clients), len(names))
    done: dict[tuple[int, ...], int] = {}
    for i, name in enumerate(names):
        each = [named[name] for named in predictors]
        same = done.setdefault(tuple(map(id, each)), i)  # two names may share predictors
        if same < i:
            for name, tensor in found.tensors().items():
                if name != "models":
                    tensor[:, i] = tensor[:, same]
        elif not _measure(found, i, each, clients, ~present, plan):
            return None
    return found if all(tensor.isfinite().all() for tensor in found.tensors().values()) else None


def _are_small(clients: Sequence[ClientData], batch_size: int, plan: EvaluationPlan) -> bool:
    """Return whether all splits have labels and at most a batch, and all train splits examples with labels."""
    splits = [split for client in clients for split in (client.validation, client.test)]
    return (
        all(client.train.y is not None and len(client.train) > 0 for client in clients)
        and all(split.y is not None and len(split) <= batch_size for split in splits)
        and sum(map(len, splits)) * plan.classes <= _MOST
    )


def _has_all(named: Mapping[str, Predictor], names: Sequence[str]) -> bool:
    """Return whether a client has all predictors, and none is an ensemble."""
    return all(name in named and not is_ensemble(type(named[name])) for name in names)


@torch.no_grad()
def _measure(
    found: Metrics,
    i: int,
    predictors: Sequence[Predictor],
    clients: Sequence[ClientData],
    absent: Tensor,
    plan: EvaluationPlan,
) -> bool:
    """Measure each client's i-th predictor; return False if a log-probability is NaN."""
    for s, name in enumerate(SPLITS):
        splits: list[Split] = [getattr(client, name) for client in clients]
        there = [j for j, split in enumerate(splits) if len(split)]
        if not there:
            continue
        sizes = [len(splits[j]) for j in there]
        log_p = torch.cat([predictors[j].log_probabilities(splits[j].x) for j in there]).double().cpu()  # type: ignore[arg-type]
        y = torch.cat([splits[j].y for j in there]).cpu()  # type: ignore[misc]
        client = torch.tensor(there).repeat_interleave(torch.tensor(sizes))
        masked = log_p.masked_fill(absent[client], -math.inf).log_softmax(1)
        if log_p.isnan().any() or masked.isnan().any():
            return False
        found.counts[:, i, s, 0] = _scores(log_p, y, client, len(clients))
        found.counts[:, i, s, 1] = _scores(masked, y, client, len(clients))
        if plan.size:
            found.sums[there, i, s] = torch.cat([part.of_clients(log_p, y, sizes) for part in plan.sums], 1)
        if name == "test":
            _add_distributions(found, i, log_p, y, client)
    return True


def _scores(log_p: Tensor, y: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return correct, total and summed loss of each client, ``[g, 3]``."""
    loss = -log_p.gather(1, y[:, None]).squeeze(1)
    values = torch.stack([(log_p.argmax(1) == y).double(), torch.ones_like(loss), loss.clamp(max=LOSS_CAP)], 1)
    return _summed(values, client, clients)


def _add_distributions(found: Metrics, i: int, log_p: Tensor, y: Tensor, client: Tensor) -> None:
    """Add confusion, calibration and uncertainty of single networks, which have no mutual information."""
    g, _, classes, _ = found.confusion.shape
    pairs = torch.bincount((client * classes + y) * classes + log_p.argmax(1), minlength=g * classes**2)
    found.confusion[:, i] = pairs.view(g, classes, classes)
    found.calibration[:, i] = calibration_counts(log_p, y, client, g).view(g, BINS, 3)
    total = entropy(log_p)
    found.uncertainty[:, i] = _summed(
        torch.stack([torch.ones_like(total), total, torch.zeros_like(total)], 1), client, g
    )


def _summed(values: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the sum of each client's rows, ``[n, k] -> [g, k]`` float64."""
    return values.new_zeros(clients, values.shape[1]).index_add_(0, client, values)
