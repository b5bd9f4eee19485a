"""Evaluation of a client's predictors. Only counts leave the client, never examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedloom.data.federated import ClientData, Split
from fedloom.evaluation.uncertainty import BINS, EnsemblePredictor, averaged, calibration_counts, uncertainty_counts
from fedloom.messages import Metrics

if TYPE_CHECKING:
    from fedloom.models.predictors import Predictor

SPLITS = ("validation", "test")
"""Second axis of the counts."""

READINGS = ("unmasked", "masked")
"""Third axis: over all C classes, or only those of the client's train split."""

CORRECT, TOTAL, LOSS = range(3)
"""Last axis: correct predictions, examples, summed negative log-likelihood in nats."""

LOSS_CAP = -math.log(torch.finfo(torch.float32).tiny)
"""Maximum loss of one example, in nats (87.34), given to a label of probability zero so that sums are finite."""

OWN_LOSS_CAP = 1e30
"""Maximum loss of one example of data without classes."""

_SLACK = 1.001
"""Relative tolerance for rounding of sums of probabilities."""

_log = logging.getLogger("fedloom.evaluation")


class Measurements(NamedTuple):
    """Measurements of P predictors on one client; the fields of :class:`~fedloom.messages.Metrics` for it.

    Attributes
    ----------
    counts
        ``[P, S, R, 3]`` float64; axes names, ``SPLITS``, ``READINGS``, (correct, total, loss). Predictions tied for the
        highest probability go to the lowest class.
    confusion
        ``[P, C, C]`` int64: examples of the test split by class (row) and predicted class (column), unmasked.
    calibration
        ``[P, BINS, 3]`` float64: (examples, summed confidence, correct) of the test split by confidence, unmasked.
    uncertainty
        ``[P, 3]`` float64: (examples, summed entropy, summed mutual information) of the test split, unmasked, nats.

    A NaN prediction enters only the counts. For data without classes (C = 0) only the loss is measured.
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
    """Run :func:`measure` for several clients, and return the message that answers an evaluation."""
    pairs = zip(predictors, clients, strict=True)
    measured = [measure(named, client, names, batch_size=batch_size) for named, client in pairs]
    return Metrics(*(torch.stack(rows) for rows in zip(*measured, strict=True)))


def shapes(predictors: int, classes: int) -> dict[str, tuple[int, ...]]:
    """Return the trailing shapes of the :class:`~fedloom.messages.Metrics` fields, for P predictors and C classes."""
    return {
        "counts": (predictors, len(SPLITS), len(READINGS), 3),
        "confusion": (predictors, classes, classes),
        "calibration": (predictors, BINS, 3),
        "uncertainty": (predictors, 3),
    }


def nothing_measured(clients: int, predictors: int, classes: int) -> Metrics:
    """Return the answer of clients that received predictors but measured nothing."""
    zeros = {
        name: torch.zeros(clients, *shape, dtype=torch.int64 if name == "confusion" else torch.float64)
        for name, shape in shapes(predictors, classes).items()
    }
    return Metrics(**zeros)


def implausible(measured: Metrics, *, validation: int, test: int) -> str | None:
    """Return one line on why a client with this many examples cannot have measured this; None if it can.

    Parameters
    ----------
    measured
        Answer of one client, of the right shapes, with finite values.
    validation, test
        Number of examples in its splits, from the manifest.
    """
    counts, confusion, calibration, uncertainty = (tensor[0] for tensor in measured.tensors().values())
    sizes = torch.tensor([[validation], [test]], dtype=torch.float64)
    return (
        _implausible_counts(counts, sizes, classes=confusion.shape[-1])
        or _implausible_confusion(confusion, test)
        or _implausible_confidence(calibration, uncertainty, test)
    )


def _implausible_counts(counts: Tensor, sizes: Tensor, *, classes: int) -> str | None:
    correct, total, loss = counts.unbind(-1)
    if not _whole(correct, total) or not ((total == 0) | (total == sizes)).all():
        validation, test = (int(size) for size in sizes)
        return f"counts of {float(total.max()):g} examples, not 0 or all {validation} and {test} of its splits"
    if (correct > total).any():
        return f"{float(correct.max()):g} right predictions of {float(total.max()):g} examples"
    most = (LOSS_CAP if classes else OWN_LOSS_CAP) * _SLACK
    least = _SLACK - 1 if classes else most
    if (loss > most * total).any() or (loss < least * -total).any():
        return f"summed losses from {float(loss.min()):g} to {float(loss.max()):g} of {float(total.max()):g} examples"
    return None


def _implausible_confusion(confusion: Tensor, test: int) -> str | None:
    if confusion.numel() and (confusion.min() < 0 or confusion.max() > test or (confusion.sum((1, 2)) > test).any()):
        return f"predictions of {int(confusion.max())} examples with one label, of {test} test examples in all"
    return None


def _implausible_confidence(calibration: Tensor, uncertainty: Tensor, test: int) -> str | None:
    examples, confidence, right = calibration.unbind(-1)
    summed, *sums = uncertainty.unbind(-1)
    if not _whole(examples, right, summed) or examples.sum(1).max() > test or summed.max() > test:
        return f"predictions with a confidence of {float(examples.sum(1).max()):g} examples, of {test} test examples"
    if (right > examples).any() or not ((confidence >= 0) & (confidence <= _SLACK * examples)).all():
        return "more right predictions, or a higher confidence, than examples"
    for total in sums:
        if not ((total >= -summed) & (total <= LOSS_CAP * summed)).all():
            return f"summed uncertainties of {float(total.abs().max()):g} nats of {float(summed.max()):g} examples"
    return None


def _whole(*counts: Tensor) -> bool:
    """Return whether all numbers are whole and nonnegative."""
    return all(bool(((count >= 0) & (count == count.round())).all()) for count in counts)


def measure(
    predictors: Mapping[str, Predictor], client: ClientData, names: Sequence[str], *, batch_size: int
) -> Measurements:
    """Count each predictor's correct predictions on validation and test data, and its confidence on the latter.

    The masked reading sets the log-probability of every class absent from the client's train split to -inf and
    renormalizes; it uses the same forward pass. A reading that is not available has total 0: a split without labels or
    examples, and the masked reading of a client whose train split has no labels.

    All results are finite. An example whose label has probability zero (under the mask: a label that the train split
    lacks) counts as wrong and costs ``LOSS_CAP``. So does an example with a NaN prediction, as after a diverged
    training: leaving it out would flatter the mean.

    A client without examples to train on, or without labels where there are classes, may lack a predictor. All its
    measurements are then 0, which leaves the client out of that predictor's statistics.

    Parameters
    ----------
    predictors
        Predictors of this client by name.
    client
        Data of the client, on the device of the predictors.
    names
        P names in reporting order (``ClientAlgorithm.predictors``).
    batch_size
        Examples per forward pass.

    Raises
    ------
    ValueError
        If a name has no predictor, or ``batch_size`` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more (got {batch_size})")
    _check_missing([name for name in names if name not in predictors], predictors, client, names)
    mask = None if client.train.y is None or len(client.train) == 0 else client.present
    nothing = _nothing(client)
    found = {id(predictor): predictor for name, predictor in predictors.items() if name in names}  # two names may share
    with torch.no_grad():
        rows = {key: _measure(predictor, client, mask, batch_size) for key, predictor in found.items()}
    measured = [rows[id(predictors[name])] if name in predictors else nothing for name in names]
    broken = [name for name, row in zip(names, measured, strict=True) if not all(t.isfinite().all() for t in row)]
    if broken:  # the predictor broke its contract
        raise ArithmeticError(f"client {client.id}: the measurements of {broken[0]!r} are not finite")
    return Measurements(*(torch.stack(tensors) for tensors in zip(*measured, strict=True)))


def _check_missing(
    missing: Sequence[str], predictors: Mapping[str, Predictor], client: ClientData, names: Sequence[str]
) -> None:
    """Raise if predictors are missing, unless the client has nothing to train on and has one."""
    nothing_to_train_on = len(client.train) == 0 or (client.train.y is None and client.classes > 0)
    if missing and not (nothing_to_train_on and len(missing) < len(names)):
        raise ValueError(f"client {client.id} has no predictor {missing[0]!r} (it has: {', '.join(predictors)})")
    if missing:
        _log.info("client %s has nothing to train on: %s is not evaluated", client.id, ", ".join(missing))


def _nothing(client: ClientData) -> Measurements:
    """Return the measurements of one predictor without test examples."""
    return Measurements(*(t[0, 0] for t in nothing_measured(1, 1, client.classes).tensors().values()))


def _measure(predictor: Predictor, client: ClientData, mask: Tensor | None, batch_size: int) -> Measurements:
    """Run :func:`measure` for one predictor, and return its rows of the result."""
    counts, confusion, calibration, uncertainty = _nothing(client)
    ensemble = predictor if isinstance(predictor, EnsemblePredictor) else None
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
    return Measurements(counts, confusion, calibration, uncertainty)


@runtime_checkable
class OwnLoss(Protocol):
    """Predictor that computes its model's own loss, which data without classes need."""

    def losses(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return the loss of each example, ``[b, ...], [b] -> [b]``."""


def _losses(predictor: Predictor, split: Split, batch_size: int) -> Tensor:
    """Return (0, total, summed loss) of data without classes: the model's own loss, capped if infinite."""
    if not isinstance(predictor, OwnLoss):
        raise TypeError(f"{type(predictor).__name__} has no losses(x, y), which data without classes need")
    total = torch.tensor([0.0, len(split), 0.0], dtype=torch.float64)
    for start in range(0, len(split), batch_size):
        batch = slice(start, start + batch_size)
        losses = predictor.losses(split.x[batch], None if split.y is None else split.y[batch]).double()
        total[LOSS] += losses.nan_to_num(nan=OWN_LOSS_CAP).clamp(max=OWN_LOSS_CAP).sum().cpu()
    return total


def _score(log_p: Tensor, y: Tensor) -> Tensor:
    """Return correct, total and summed loss of log-probabilities ``[b, C]`` against labels ``[b]``."""
    broken = log_p.isnan().any(1)
    if bool(broken.any()):
        _log.warning("%d of %d predictions are NaN: counted wrong, loss %.2f each", int(broken.sum()), len(y), LOSS_CAP)
    # argmax returns the first of equal values, and would return a NaN; hence the second condition.
    correct = (log_p.argmax(1) == y) & ~broken
    loss = (-log_p.gather(1, y[:, None]).squeeze(1)).masked_fill(broken, LOSS_CAP).clamp(max=LOSS_CAP)
    return torch.stack([correct.sum().double(), loss.new_tensor(len(y)), loss.sum()]).cpu()
