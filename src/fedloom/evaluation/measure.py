"""Evaluation of a client's predictors. Only counts leave the client, never examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from fedloom.data.federated import ClientData, Split
from fedloom.data.inputs import Inputs, take
from fedloom.evaluation.plan import SPLITS, EvaluationPlan
from fedloom.evaluation.spread import add_sketches, implausible_sketch
from fedloom.evaluation.uncertainty import (
    BINS,
    EnsemblePredictor,
    averaged,
    calibration_counts,
    entropy,
    is_ensemble,
    uncertainty_counts,
)
from fedloom.messages import Metrics
from fedloom.tasks.base import LOSS, LOSS_CAP, VALUE_CAP, are_whole

if TYPE_CHECKING:
    from fedloom.models.predictors import Predictor

_SLACK = 1.001
"""Relative tolerance for rounding of sums of probabilities."""

_log = logging.getLogger("fedloom.evaluation")


class Measurements(NamedTuple):
    """Measurements of P predictors on one client; the first fields of :class:`~fedloom.messages.Metrics` for it.

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
    sums
        ``[P, S, K]`` float64: the sums of the plan, unmasked.

    A NaN prediction enters only counts and sums. For tasks other than classification, and for data without targets
    (C = 0), counts have only examples and losses, and confusion, calibration and uncertainty are empty or 0.
    """

    counts: Tensor
    confusion: Tensor
    calibration: Tensor
    uncertainty: Tensor
    sums: Tensor


def metrics(
    predictors: Sequence[Mapping[str, Predictor]],
    clients: Sequence[ClientData],
    names: Sequence[str],
    *,
    batch_size: int,
    plan: EvaluationPlan | None = None,
) -> Metrics:
    """Run :func:`measure` for several clients, and return the message that answers an evaluation.

    Sums of small clients are taken together (:func:`~fedloom.evaluation.measure.measured_together`).
    """
    result = None
    if len(clients) > 1 and plan is not None:
        result = measured_together(predictors, clients, names, batch_size=batch_size, plan=plan)
    if result is None:
        pairs = zip(predictors, clients, strict=True)
        rows_measured = [
            measure(predictor_set, client, names, batch_size=batch_size, plan=plan) for predictor_set, client in pairs
        ]
        size = 0 if plan is None else plan.shapes(len(names))["models"][0]
        models = torch.zeros(len(clients), size, dtype=torch.float64)
        columns = map(torch.stack, zip(*rows_measured, strict=True))
        result = Metrics(**dict(zip(Measurements._fields, columns, strict=True)), models=models)
    if plan is not None and plan.sketches:
        add_sketches(result.models, predictors)
    return result


def implausible(metrics: Metrics, plan: EvaluationPlan, *, validation: int, test: int) -> str | None:
    """Return one line on why a client with this many examples cannot have measured this; None if it can.

    ``metrics`` is the answer of one client, of the right shapes, with finite values. ``validation`` and ``test`` are
    the numbers of examples in its splits, from the manifest.
    """
    counts, confusion, calibration, uncertainty, sums, models = (tensor[0] for tensor in metrics.tensors().values())
    sizes = torch.tensor([[validation], [test]], dtype=torch.float64)
    by_predictor = (plan.implausible(each, (validation, test)) for each in sums)
    return (
        _implausible_counts(counts, sizes, plan)
        or _implausible_confusion(confusion, test)
        or _implausible_confidence(calibration, uncertainty, test)
        or next((fault for fault in by_predictor if fault is not None), None)
        or implausible_sketch(models)
    )


def _implausible_counts(counts: Tensor, sizes: Tensor, plan: EvaluationPlan) -> str | None:
    correct, total, loss = counts.unbind(-1)
    if not are_whole(correct) or not are_whole(total) or not ((total == 0) | (total == sizes)).all():
        validation, test = (int(size) for size in sizes)
        return f"counts of {float(total.max()):g} examples, not 0 or all {validation} and {test} of its splits"
    if (correct > total).any():
        return f"{float(correct.max()):g} right predictions of {float(total.max()):g} examples"
    most = (LOSS_CAP if plan.classes else VALUE_CAP) * _SLACK
    least = _SLACK - 1 if plan.targets.outputs else most
    if (loss > most * total).any() or (loss < least * -total).any():
        return f"summed losses from {float(loss.min()):g} to {float(loss.max()):g} of {float(total.max()):g} examples"
    return None


def _implausible_confusion(confusion: Tensor, test: int) -> str | None:
    if confusion.numel() and (confusion.min() < 0 or confusion.max() > test or (confusion.sum((1, 2)) > test).any()):
        return f"predictions of {int(confusion.max())} examples with one label, of {test} test examples in all"
    return None


def _implausible_confidence(calibration: Tensor, uncertainty: Tensor, test: int) -> str | None:
    examples, confidence, right = calibration.unbind(-1)
    entropy_sum, *sums = uncertainty.unbind(-1)
    if (
        not (are_whole(examples) and are_whole(right) and are_whole(entropy_sum))
        or examples.sum(1).max() > test
        or entropy_sum.max() > test
    ):
        return f"predictions with a confidence of {float(examples.sum(1).max()):g} examples, of {test} test examples"
    if (right > examples).any() or not ((confidence >= 0) & (confidence <= _SLACK * examples)).all():
        return "more right predictions, or a higher confidence, than examples"
    for total in sums:
        if not ((total >= -entropy_sum) & (total <= LOSS_CAP * entropy_sum)).all():
            return f"summed uncertainties of {float(total.abs().max()):g} nats of {float(entropy_sum.max()):g} examples"
    return None


def measure(
    predictors: Mapping[str, Predictor],
    client: ClientData,
    names: Sequence[str],
    *,
    batch_size: int,
    plan: EvaluationPlan | None = None,
) -> Measurements:
    """Compute each predictor's sums on validation and test data, and its confidence on the latter.

    The masked reading sets the log-probability of every class absent from the client's train split to -inf and
    renormalizes; it uses the same forward pass. A reading that is not available has total 0: a split without labels or
    examples, and the masked reading of a client whose train split has no labels.

    All results are finite. An example whose label has probability zero (under the mask: a label that the train split
    lacks) counts as wrong and costs ``LOSS_CAP``. So does an example with a NaN prediction, as after a diverged
    training: leaving it out would flatter the mean.

    A client without examples to train on, or without labels where there are classes, may lack a predictor. All its
    measurements are then 0, which leaves the client out of that predictor's statistics. For other clients, raise
    ValueError if one of the names has no predictor.

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
    plan
        Task, and what to measure; None: the client's classes, with default settings.
    """
    plan = EvaluationPlan.of_classes(client.classes) if plan is None else plan
    unlabelled = client.train.y is None or len(client.train) == 0
    if missing := [name for name in names if name not in predictors]:
        nothing_to_train_on = len(client.train) == 0 or (client.train.y is None and plan.targets.outputs > 0)
        if not nothing_to_train_on or len(missing) == len(names):
            raise ValueError(f"client {client.id} has no predictor {missing[0]!r} (it has: {', '.join(predictors)})")
        _log.info("client %s has nothing to train on: %s is not evaluated", client.id, ", ".join(missing))
    mask = client.present if plan.classes and not unlabelled else None
    rows: dict[int, Measurements] = {}  # two names may share a predictor
    for name in names:
        predictor = predictors.get(name)
        if predictor is not None and id(predictor) not in rows:
            with torch.no_grad():
                rows[id(predictor)] = row = _measure(predictor, client, plan, mask, batch_size)
            if not torch.cat([tensor.flatten() for tensor in row]).isfinite().all():  # it broke its contract
                raise ArithmeticError(f"client {client.id}: the measurements of {name!r} are not finite")
    rows_measured = [rows[id(predictors[name])] if name in predictors else _nothing(plan) for name in names]
    return Measurements(*(torch.stack(tensors) for tensors in zip(*rows_measured, strict=True)))


def _nothing(plan: EvaluationPlan) -> Measurements:
    """Return the measurements of one predictor without test examples."""
    zeros = plan.nothing(1, 1).tensors()
    return Measurements(*(zeros[name][0, 0] for name in Measurements._fields))


def _measure(
    predictor: Predictor, client: ClientData, plan: EvaluationPlan, mask: Tensor | None, batch_size: int
) -> Measurements:
    """Run :func:`measure` for one predictor, and return its rows of the result.

    ``mask`` has the classes of the client's train split, ``[C]`` bool; None without labels there, or classes.
    """
    metrics = _nothing(plan)
    for s, split in enumerate((client.validation, client.test)):
        if plan.targets.outputs == 0:
            metrics.counts[s, 0] += _losses(predictor, split, batch_size)
        elif split.y is not None:
            sums = _SplitSums(plan)
            for start in range(0, len(split), batch_size):
                batch = slice(start, start + batch_size)
                x: Any = take(split.x, batch)
                y = split.y[batch]
                if plan.classes:
                    log_p = _measure_classes(predictor, x, y, metrics, s, mask)
                    sums.add(log_p, y)
                else:
                    predictions = predictor.predictions(x)
                    metrics.counts[s, 0] += _task_losses(plan, predictions, y)
                    sums.add(predictions, y)
            if len(split) and plan.size:
                metrics.sums[s] = sums.total()
    return metrics


def _measure_classes(
    predictor: Predictor, x: Any, y: Tensor, metrics: Measurements, s: int, mask: Tensor | None
) -> Tensor:
    """Add a batch of split ``s`` to all measurements but the sums; return its log-probabilities ``[b, C]``."""
    draws = cast(EnsemblePredictor, predictor).draws_log_probabilities(x) if is_ensemble(type(predictor)) else None
    all_log_p = (predictor.log_probabilities(x) if draws is None else averaged(draws)).double()
    metrics.counts[s, 0] += _score(all_log_p, y)
    if mask is not None:
        absent = ~mask.to(all_log_p.device)
        metrics.counts[s, 1] += _score(all_log_p.masked_fill(absent, -math.inf).log_softmax(1), y)
    if SPLITS[s] == "test":
        log_p, labels, broken = all_log_p, y, all_log_p.isnan().any(1)
        if broken.any():
            log_p, labels = all_log_p[~broken], y[~broken]
            draws = None if draws is None else draws[:, ~broken]
        classes = metrics.confusion.shape[-1]
        pairs = torch.bincount(labels * classes + log_p.argmax(1), minlength=classes**2)
        metrics.confusion.add_(pairs.view(classes, classes).cpu())
        metrics.calibration.add_(calibration_counts(log_p, labels))
        metrics.uncertainty.add_(uncertainty_counts(log_p, draws))
    return all_log_p


class _SplitSums:
    """Sums of a plan over the batches of a split; those that need the whole split are computed at its end."""

    def __init__(self, plan: EvaluationPlan) -> None:
        self._parts = plan.sums
        self._sums: list[Tensor | float] = [0.0] * len(plan.sums)
        self._keeps = any(part.whole_split for part in plan.sums)
        self._batches: list[tuple[Tensor, Tensor]] = []

    def add(self, predictions: Tensor, y: Tensor) -> None:
        """Add a batch."""
        if self._keeps:
            self._batches.append((predictions, y))
        for i, part in enumerate(self._parts):
            if not part.whole_split:
                self._sums[i] = self._sums[i] + part.of(predictions, y).cpu()

    def total(self) -> Tensor:
        """Return all sums, ``[K]``."""
        if self._batches:
            predictions, y = (torch.cat(tensors) for tensors in zip(*self._batches, strict=True))
            for i, part in enumerate(self._parts):
                if part.whole_split:
                    self._sums[i] = part.of(predictions, y).cpu()
        return torch.cat([sums for sums in self._sums if isinstance(sums, Tensor)])


def _task_losses(plan: EvaluationPlan, predictions: Tensor, y: Tensor) -> Tensor:
    """Return (0, total, summed loss) of a batch: the task's loss, capped if infinite or NaN."""
    losses = plan.task.loss(predictions, y).double().nan_to_num(nan=VALUE_CAP).clamp(max=VALUE_CAP)
    return torch.tensor([0.0, len(y), float(losses.sum())], dtype=torch.float64)


@runtime_checkable
class LossPredictor(Protocol):
    """Predictor that computes its model's own loss, which data without classes need."""

    def losses(self, x: Inputs, y: Tensor | None) -> Tensor:
        """Return the loss of each example, ``[b, ...], [b] -> [b]``."""


def _losses(predictor: Predictor, split: Split, batch_size: int) -> Tensor:
    """Return (0, total, summed loss) of data without classes: the model's own loss, capped if infinite."""
    if not isinstance(predictor, LossPredictor):
        raise TypeError(f"{type(predictor).__name__} has no losses(x, y), which data without classes need")
    total = torch.tensor([0.0, len(split), 0.0], dtype=torch.float64)
    for start in range(0, len(split), batch_size):
        batch = slice(start, start + batch_size)
        losses = predictor.losses(take(split.x, batch), None if split.y is None else split.y[batch]).double()
        total[LOSS] += losses.nan_to_num(nan=VALUE_CAP).clamp(max=VALUE_CAP).sum().cpu()
    return total


def _score(log_p: Tensor, y: Tensor) -> Tensor:
    """Return correct, total and summed loss of log-probabilities ``[b, C]`` against labels ``[b]``."""
    # argmax returns the first of equal values.
    correct, loss = log_p.argmax(1) == y, -log_p.gather(1, y[:, None]).squeeze(1)
    if log_p.isnan().any():
        broken = log_p.isnan().any(1)
        count = int(broken.sum())
        _log.warning("%d of %d predictions are NaN: counted wrong, loss %.2f each", count, len(y), LOSS_CAP)
        correct, loss = correct & ~broken, loss.masked_fill(broken, LOSS_CAP)
    loss_sum = float(loss.clamp(max=LOSS_CAP).sum())
    return torch.tensor([int(correct.sum()), len(y), loss_sum], dtype=torch.float64)


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
    """Measure the predictors of g clients, by name; None if clients must be measured one by one.

    None is returned for tasks other than classification, splits without labels or larger than a batch, clients without
    a predictor or training examples, ensembles, predictions or measurements that are not finite, and large groups.
    """
    single = (
        name in predictor_set and not is_ensemble(type(predictor_set[name]))
        for predictor_set in predictors
        for name in names
    )
    if not (plan.classes and _are_small(clients, batch_size, plan) and all(single)):
        return None
    present = torch.stack([client.present for client in clients]).cpu()
    result = plan.nothing(len(clients), len(names))
    measured_rows: dict[tuple[int, ...], int] = {}
    for i, name in enumerate(names):
        each = [predictor_set[name] for predictor_set in predictors]
        same = measured_rows.setdefault(tuple(map(id, each)), i)  # two names may share predictors
        if same < i:
            for name, tensor in result.tensors().items():
                if name != "models":
                    tensor[:, i] = tensor[:, same]
        elif not _measure_group(result, i, each, clients, ~present, plan):
            return None
    return result if all(tensor.isfinite().all() for tensor in result.tensors().values()) else None


def _are_small(clients: Sequence[ClientData], batch_size: int, plan: EvaluationPlan) -> bool:
    """Return whether all splits have labels and at most a batch, and all train splits examples with labels."""
    splits = [split for client in clients for split in (client.validation, client.test)]
    return (
        all(client.train.y is not None and len(client.train) > 0 for client in clients)
        and all(split.y is not None and len(split) <= batch_size for split in splits)
        and sum(map(len, splits)) * plan.classes <= _MOST
    )


@torch.no_grad()
def _measure_group(
    metrics: Metrics,
    i: int,
    predictors: Sequence[Predictor],
    clients: Sequence[ClientData],
    absent: Tensor,
    plan: EvaluationPlan,
) -> bool:
    """Measure each client's i-th predictor; return False if a log-probability is NaN."""
    for s, name in enumerate(SPLITS):
        splits: list[Split] = [getattr(client, name) for client in clients]
        with_examples = [j for j, split in enumerate(splits) if len(split)]
        if not with_examples:
            continue
        sizes = [len(splits[j]) for j in with_examples]
        log_p = torch.cat([predictors[j].log_probabilities(splits[j].x) for j in with_examples]).double().cpu()  # type: ignore[arg-type]
        y = torch.cat([splits[j].y for j in with_examples]).cpu()  # type: ignore[misc]
        client = torch.tensor(with_examples).repeat_interleave(torch.tensor(sizes))
        masked = log_p.masked_fill(absent[client], -math.inf).log_softmax(1)
        if log_p.isnan().any() or masked.isnan().any():
            return False
        metrics.counts[:, i, s, 0] = _scores(log_p, y, client, len(clients))
        metrics.counts[:, i, s, 1] = _scores(masked, y, client, len(clients))
        if plan.size:
            metrics.sums[with_examples, i, s] = torch.cat([part.of_clients(log_p, y, sizes) for part in plan.sums], 1)
        if name == "test":
            _add_distributions(metrics, i, log_p, y, client)
    return True


def _scores(log_p: Tensor, y: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return correct, total and summed loss of each client, ``[g, 3]``."""
    loss = -log_p.gather(1, y[:, None]).squeeze(1)
    values = torch.stack([(log_p.argmax(1) == y).double(), torch.ones_like(loss), loss.clamp(max=LOSS_CAP)], 1)
    return _summed(values, client, clients)


def _add_distributions(metrics: Metrics, i: int, log_p: Tensor, y: Tensor, client: Tensor) -> None:
    """Add confusion, calibration and uncertainty of single networks, which have no mutual information."""
    g, _, classes, _ = metrics.confusion.shape
    pairs = torch.bincount((client * classes + y) * classes + log_p.argmax(1), minlength=g * classes**2)
    metrics.confusion[:, i] = pairs.view(g, classes, classes)
    metrics.calibration[:, i] = calibration_counts(log_p, y, client, g).view(g, BINS, 3)
    total = entropy(log_p)
    metrics.uncertainty[:, i] = _summed(
        torch.stack([torch.ones_like(total), total, torch.zeros_like(total)], 1), client, g
    )


def _summed(values: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the sum of each client's rows, ``[n, k] -> [g, k]`` float64."""
    return values.new_zeros(clients, values.shape[1]).index_add_(0, client, values)
