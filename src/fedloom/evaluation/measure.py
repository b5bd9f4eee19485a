"""What a client measures of its predictors. Only these counts travel, never examples, labels or predictions."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.data.federated import ClientData, Split

if TYPE_CHECKING:
    from fedloom.algorithms.base import Predictor

SPLITS = ("validation", "test")
"""Second axis of the counts."""

READINGS = ("unmasked", "masked")
"""Third axis: over all C classes, or over those of the client's train split alone."""

CORRECT, TOTAL, LOSS = range(3)
"""Last axis: right predictions, examples, summed negative log-likelihood in nats."""

LOSS_CAP = -math.log(torch.finfo(torch.float32).tiny)
"""Largest loss of one example, in nats (87.34): what a label of probability zero costs, so that a sum is finite."""

_log = logging.getLogger("fedloom.evaluation")


def measure(
    predictors: Mapping[str, Predictor], client: ClientData, names: Sequence[str], *, batch_size: int
) -> Tensor:
    """Count what each predictor gets right on a client's validation and test data.

    The masked reading sets the log-probability of every class absent from the client's train split to -inf and
    renormalizes; it is had from the same forward pass. Where a reading cannot be had, its total is 0: a split
    without labels or examples, and the masked reading of a client without labels in its train split.

    Nothing in the result is ever non-finite. An example whose label has probability zero (under the mask: a label
    that the train split lacks) is wrong and costs ``LOSS_CAP``. So is an example whose prediction is NaN, as after a
    diverged training: leaving it out would flatter the mean.

    Parameters
    ----------
    predictors
        By name, of this client.
    client
        Its data, on the device of the predictors.
    names
        P names in the order in which they are reported (``ClientHalf.predictors``).
    batch_size
        Examples per forward pass.

    Returns
    -------
    Tensor
        ``[P, S, R, 3]`` float64 on the CPU; axes ``names``, ``SPLITS``, ``READINGS``, (correct, total, loss).
        Predictions tied for the highest probability go to the lowest class.

    Raises
    ------
    ValueError
        If a name has no predictor, or ``batch_size`` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: found {batch_size}, allowed: 1 or more")
    missing = [name for name in names if name not in predictors]
    if missing:
        raise ValueError(f"client {client.id} has no predictor {missing[0]!r} (it has: {', '.join(predictors)})")
    mask = None if client.train.y is None or len(client.train) == 0 else client.present
    counts = torch.zeros(len(names), len(SPLITS), len(READINGS), 3, dtype=torch.float64)
    with torch.no_grad():
        for p, name in enumerate(names):
            for s, split in enumerate((client.validation, client.test)):
                counts[p, s] = _count(predictors[name], split, mask, batch_size)
                if not bool(counts[p, s].isfinite().all()):  # a predictor broke its contract in a way not foreseen here
                    raise ArithmeticError(f"client {client.id}: the counts of {name!r} are not finite")
    return counts


def _count(predictor: Predictor, split: Split, mask: Tensor | None, batch_size: int) -> Tensor:
    """Counts of one predictor on one split, ``[R, 3]``."""
    counts = torch.zeros(len(READINGS), 3, dtype=torch.float64)
    if split.y is None:
        return counts
    for start in range(0, len(split), batch_size):
        y = split.y[start : start + batch_size]
        log_p = predictor.log_probabilities(split.x[start : start + batch_size]).double()
        counts[0] += _score(log_p, y)
        if mask is not None:
            absent = ~mask.to(log_p.device)
            counts[1] += _score(log_p.masked_fill(absent, -math.inf).log_softmax(1), y)
    return counts


def _score(log_p: Tensor, y: Tensor) -> Tensor:
    """Correct, total and summed loss of log-probabilities ``[b, C]`` against labels ``[b]``."""
    broken = log_p.isnan().any(1)
    if bool(broken.any()):
        _log.warning("%d of %d predictions are NaN: counted wrong, loss %.2f each", int(broken.sum()), len(y), LOSS_CAP)
    # argmax gives the first of equal values; a NaN would win it, hence the second condition.
    correct = (log_p.argmax(1) == y) & ~broken
    loss = (-log_p.gather(1, y[:, None]).squeeze(1)).masked_fill(broken, LOSS_CAP).clamp(max=LOSS_CAP)
    return torch.stack([correct.sum().double(), loss.new_tensor(len(y)), loss.sum()]).cpu()
