"""What a client measures of its predictors. Only these counts travel, never examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedloom.data.federated import ClientData, Split
from fedloom.evaluation.uncertainty import BINS, Ensemble, averaged, calibration_counts, uncertainty_counts
from fedloom.messages import Metrics

if TYPE_CHECKING:
    from fedloom.models.predictors import Predictor

SPLITS = ("validation", "test")
"""Second axis of the counts."""

READINGS = ("unmasked", "masked")
"""Third axis: over all C classes, or over those of the client's train split alone."""

CORRECT, TOTAL, LOSS = range(3)
"""Last axis: right predictions, examples, summed negative log-likelihood in nats."""

LOSS_CAP = -math.log(torch.finfo(torch.float32).tiny)
"""Largest loss of one example, in nats (87.34): what a label of probability zero costs, so that a sum is finite."""

OWN_LOSS_CAP = 1e30
"""Largest loss of one example of data without classes."""

_SLACK = 1.001
"""Probabilities are rounded: a sum of them may be beyond the number of examples by so much."""

_log = logging.getLogger("fedloom.evaluation")


class Measured(NamedTuple):
    """What one client measured of P predictors; the fields of :class:`~fedloom.messages.Metrics` for one client.

    Attributes
    ----------
    counts
        ``[P, S, R, 3]`` float64; axes names, ``SPLITS``, ``READINGS``, (correct, total, loss). Predictions tied for the
        highest probability go to the lowest class.
    confusion
        ``[P, C, C]`` int64: examples of the test split by class (row) and predicted class (column), unmasked.
    calibration
        ``[P, BINS, 3]`` float64: (examples, summed confidence, right) of the test split by confidence, unmasked.
    uncertainty
        ``[P, 3]`` float64: (examples, summed entropy, summed mutual information) of the test split, unmasked, nats.

    A prediction that is NaN is in the counts alone. Of data without classes (C = 0) there is the loss alone.
    """

    counts: Tensor
    confusion: Tensor
    calibration: Tensor
    uncertainty: Tensor


def metrics(
    predictors: Sequence[Mapping[str, Predictor]],
    clients: Sequence[ClientData],
    names: Sequence[str],
    *,
    batch_size: int,
) -> Metrics:
    """:func:`measure` for several clients, as the message that they answer an evaluation with."""
    pairs = zip(predictors, clients, strict=True)
    measured = [measure(named, client, names, batch_size=batch_size) for named, client in pairs]
    return Metrics(*(torch.stack(rows) for rows in zip(*measured, strict=True)))


def shapes(predictors: int, classes: int) -> dict[str, tuple[int, ...]]:
    """Trailing shapes of the fields of :class:`~fedloom.messages.Metrics`, for P predictors and C classes."""
    return {
        "counts": (predictors, len(SPLITS), len(READINGS), 3),
        "confusion": (predictors, classes, classes),
        "calibration": (predictors, BINS, 3),
        "uncertainty": (predictors, 3),
    }


def nothing_measured(clients: int, predictors: int, classes: int) -> Metrics:
    """What clients answer that got predictors and measured nothing."""
    zeros = {
        name: torch.zeros(clients, *shape, dtype=torch.int64 if name == "confusion" else torch.float64)
        for name, shape in shapes(predictors, classes).items()
    }
    return Metrics(**zeros)


def implausible(measured: Metrics, *, validation: int, test: int) -> str | None:
    """Say in one line what a client with so many examples cannot have measured; None if all of it can be.

    Parameters
    ----------
    measured
        The answer of one client, of the right shapes, with finite values.
    validation, test
        Examples of its splits, from the manifest.
    """
    counts, confusion, calibration, uncertainty = (tensor[0] for tensor in measured.tensors().values())
    sizes = torch.tensor([[validation], [test]], dtype=torch.float64)
    correct, total, loss = counts.unbind(-1)
    if not _whole(correct, total) or not ((total == 0) | (total == sizes)).all():
        return f"counts of {float(total.max()):g} examples, allowed: 0, or all {validation} and {test} of its splits"
    if (correct > total).any():
        return f"{float(correct.max()):g} right predictions of {float(total.max()):g} examples"
    classes = confusion.shape[-1]
    worst = (LOSS_CAP if classes else OWN_LOSS_CAP) * _SLACK
    if (loss > worst * total).any() or (loss < (_SLACK - 1 if classes else worst) * -total).any():
        return f"summed losses from {float(loss.min()):g} to {float(loss.max()):g} of {float(total.max()):g} examples"
    if confusion.numel() and (confusion.min() < 0 or confusion.max() > test or (confusion.sum((1, 2)) > test).any()):
        return f"predictions of {int(confusion.max())} examples with one label, allowed: 0 to {test} in all"
    examples, confidence, right = calibration.unbind(-1)
    summed, entropy, information = uncertainty.unbind(-1)
    if not _whole(examples, right, summed) or examples.sum(1).max() > test or summed.max() > test:
        return f"predictions with a confidence of {float(examples.sum(1).max()):g} examples, allowed: 0 to {test}"
    if (right > examples).any() or not ((confidence >= 0) & (confidence <= _SLACK * examples)).all():
        return "more right predictions, or a higher confidence, than examples"
    for sums in (entropy, information):
        if not ((sums >= -summed) & (sums <= LOSS_CAP * summed)).all():
            return f"summed uncertainties of {float(sums.abs().max()):g} nats of {float(summed.max()):g} examples"
    return None


def _whole(*counts: Tensor) -> bool:
    """Whether all numbers are whole and none is negative."""
    return all(bool(((count >= 0) & (count == count.round())).all()) for count in counts)


def measure(
    predictors: Mapping[str, Predictor], client: ClientData, names: Sequence[str], *, batch_size: int
) -> Measured:
    """Count what each predictor gets right on a client's validation and test data, and how sure it is on the latter.

    The masked reading sets the log-probability of every class absent from the client's train split to -inf and
    renormalizes; it is had from the same forward pass. Where a reading cannot be had, its total is 0: a split
    without labels or examples, and the masked reading of a client without labels in its train split.

    Nothing in the result is ever non-finite. An example whose label has probability zero (under the mask: a label
    that the train split lacks) is wrong and costs ``LOSS_CAP``. So is an example whose prediction is NaN, as after a
    diverged training: leaving it out would flatter the mean.

    A client that has nothing to train on, no examples or, where there are classes, no labels, may lack a predictor. All
    that is measured of it is 0, which leaves the client out of its statistics.

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

    Raises
    ------
    ValueError
        If a name has no predictor, or ``batch_size`` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: found {batch_size}, allowed: 1 or more")
    missing = [name for name in names if name not in predictors]
    nothing_to_train_on = len(client.train) == 0 or (client.train.y is None and client.classes > 0)
    if missing and not (nothing_to_train_on and len(missing) < len(names)):
        raise ValueError(f"client {client.id} has no predictor {missing[0]!r} (it has: {', '.join(predictors)})")
    if missing:
        _log.info("client %s has nothing to train on: %s is not measured", client.id, ", ".join(missing))
    mask = None if client.train.y is None or len(client.train) == 0 else client.present
    found: dict[int, Measured] = {}
    with torch.no_grad():
        for name in names:
            if name in predictors and id(predictors[name]) not in found:  # one predictor may have two names
                found[id(predictors[name])] = _measure(predictors[name], client, mask, batch_size)
    nothing = Measured(*(t[0, 0] for t in nothing_measured(1, 1, client.classes).tensors().values()))
    rows = [found[id(predictors[name])] if name in predictors else nothing for name in names]
    for name, row in zip(names, rows, strict=True):
        if not all(bool(tensor.isfinite().all()) for tensor in row):  # a predictor broke its contract in an unknown way
            raise ArithmeticError(f"client {client.id}: what was measured of {name!r} is not finite")
    return Measured(*(torch.stack(tensors) for tensors in zip(*rows, strict=True)))


def _measure(predictor: Predictor, client: ClientData, mask: Tensor | None, batch_size: int) -> Measured:
    """:func:`measure` for one predictor: its rows of the result."""
    counts, confusion, calibration, uncertainty = (
        t[0, 0] for t in nothing_measured(1, 1, client.classes).tensors().values()
    )
    ensemble = predictor if isinstance(predictor, Ensemble) else None
    for s, split in enumerate((client.validation, client.test)):
        if client.classes == 0:
            counts[s, 0] += _losses(predictor, split, batch_size)
            continue
        if split.y is None:
            continue
        for start in range(0, len(split), batch_size):
            x, y = split.x[start : start + batch_size], split.y[start : start + batch_size]
            draws = None if ensemble is None else ensemble.draws_log_probabilities(x)
            log_p = (predictor.log_probabilities(x) if draws is None else averaged(draws)).double()
            counts[s, 0] += _score(log_p, y)
            if mask is not None:
                absent = ~mask.to(log_p.device)
                counts[s, 1] += _score(log_p.masked_fill(absent, -math.inf).log_softmax(1), y)
            if split is client.test:
                whole = ~log_p.isnan().any(1)
                log_p, y = log_p[whole], y[whole]
                pairs = torch.bincount(y * client.classes + log_p.argmax(1), minlength=client.classes**2)
                confusion += pairs.view(client.classes, client.classes).cpu()
                calibration += calibration_counts(log_p, y)
                uncertainty += uncertainty_counts(log_p, None if draws is None else draws[:, whole])
    return Measured(counts, confusion, calibration, uncertainty)


@runtime_checkable
class OwnLoss(Protocol):
    """A predictor that knows its model's own loss: needed where data have no classes."""

    def losses(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Loss of each example, ``[b, ...], [b] -> [b]``."""


def _losses(predictor: Predictor, split: Split, batch_size: int) -> Tensor:
    """(0, total, summed loss) of data without classes: the loss is the model's own, and an infinite one is capped."""
    if not isinstance(predictor, OwnLoss):
        raise TypeError(f"{type(predictor).__name__} has no losses(x, y), which data without classes are measured by")
    total = torch.tensor([0.0, len(split), 0.0], dtype=torch.float64)
    for start in range(0, len(split), batch_size):
        batch = slice(start, start + batch_size)
        losses = predictor.losses(split.x[batch], None if split.y is None else split.y[batch]).double()
        total[LOSS] += losses.nan_to_num(nan=OWN_LOSS_CAP).clamp(max=OWN_LOSS_CAP).sum().cpu()
    return total


def _score(log_p: Tensor, y: Tensor) -> Tensor:
    """Correct, total and summed loss of log-probabilities ``[b, C]`` against labels ``[b]``."""
    broken = log_p.isnan().any(1)
    if bool(broken.any()):
        _log.warning("%d of %d predictions are NaN: counted wrong, loss %.2f each", int(broken.sum()), len(y), LOSS_CAP)
    # argmax gives the first of equal values; a NaN would win it, hence the second condition.
    correct = (log_p.argmax(1) == y) & ~broken
    loss = (-log_p.gather(1, y[:, None]).squeeze(1)).masked_fill(broken, LOSS_CAP).clamp(max=LOSS_CAP)
    return torch.stack([correct.sum().double(), loss.new_tensor(len(y)), loss.sum()]).cpu()
