"""Classification: one of C classes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.tasks.auroc import Auroc
from fedloom.tasks.base import (
    CORRECT,
    LOSS,
    TOTAL,
    CategoricalTask,
    Counts,
    MetricSums,
    TargetShape,
    Weights,
    as_weights,
    mean_defined,
    ratio,
    weights_fault,
)
from fedloom.tasks.names import METRICS


class Classification(CategoricalTask):
    """Classification, trained by the cross-entropy of logits."""

    name: Literal["classification"] = Field(default="classification", description="one of C classes")
    class_weights: Weights | None = Field(
        default=None, description="weight of each class in the loss of its examples; null: 1 each"
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="part of each target that is spread evenly over all classes in training"
    )
    target_kind = "classification"
    headline = METRICS["accuracy"]
    optional = ("auroc",)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy, ``[b, C], [b] -> [b]``, times the weight of each example's class."""
        weight = as_weights(self.class_weights, outputs)
        return F.cross_entropy(outputs, y, weight, reduction="none", label_smoothing=self.label_smoothing)

    def metric_sums(self, target: TargetShape, names: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return the sums of the Brier score and, if requested, of the AUROC."""
        return (Brier(), *([Auroc(target.outputs, of_classes=True)] if "auroc" in names else []))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that follow from counts, confusion and calibration."""
        return ("accuracy", "balanced_accuracy", "macro_f1", "log_loss", "ece")

    def metrics_of_counts(self, counts: Counts) -> dict[str, Tensor]:
        """Return the metrics of counts, ``[m]`` each.

        Balanced accuracy is the mean recall of the classes that occur; macro F1 the mean over the classes that occur or
        are predicted.
        """
        correct, total, loss = (counts.counts[:, i] for i in (CORRECT, TOTAL, LOSS))
        confusion = counts.confusion
        right = confusion.diagonal(dim1=1, dim2=2).double()
        true, prediction_counts = confusion.sum(2).double(), confusion.sum(1).double()
        return {
            "accuracy": ratio(correct, total),
            "balanced_accuracy": mean_defined(ratio(right, true)),
            "macro_f1": mean_defined(ratio(2 * right, true + prediction_counts)),
            "log_loss": ratio(loss, total),
            "ece": calibration_errors(counts.calibration),
        }

    def setting_fault(self, outputs: int) -> str | None:
        """Return why ``class_weights`` do not fit C classes; None if they do."""
        return weights_fault("class_weights", self.class_weights, outputs)

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return classes as indicator vectors, ``[n] -> [n, C]``."""
        return F.one_hot(y, outputs).float()


class Brier(MetricSums):
    """Number of examples, and summed Brier score Σ_c (p_c - 1[c = y])², 0 ... 2 each (Brier 1950)."""

    names = ("brier",)
    size = 2

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, C], [b] -> [2]``; a NaN prediction costs 2."""
        p = predictions.double().exp()
        right = p.gather(1, y[:, None])
        total = float(p.square().sum() - 2 * right.sum()) + len(y)
        if math.isnan(total):
            score = p.square().sum(1) - 2 * right.squeeze(1) + 1
            total = float(score.nan_to_num(nan=2.0).clamp(0, 2).sum())
        return torch.tensor([len(y), min(max(total, 0.0), 2.0 * len(y))], dtype=torch.float64)

    def of_clients(self, predictions: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the sums of several clients, ``[g, 2]``, of predictions of which none is NaN."""
        p, number = predictions.double().exp(), torch.tensor(sizes, device=y.device)
        score = p.square().sum(1) - 2 * p.gather(1, y[:, None]).squeeze(1) + 1
        client = torch.arange(len(sizes), device=y.device).repeat_interleave(number)
        total = score.new_zeros(len(sizes)).index_add_(0, client, score.clamp(0, 2))
        return torch.stack([number.double(), total], 1).cpu()

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return the mean score."""
        return {"brier": ratio(sums[:, 1], sums[:, 0])}

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why the sums are impossible: they do not cover all examples, or the score is above 2."""
        n, total = float(sums[0]), float(sums[1])
        if n not in (0.0, float(examples)) or not 0 <= total <= 2 * n * (1 + 1e-6):
            return f"a summed Brier score of {total:g} of {n:g} examples, of {examples} in all"
        return None


def calibration_errors(calibration: Tensor) -> Tensor:
    """Return the expected calibration error of each client, ``[m, BINS, 3] -> [m]``; NaN without examples.

    Its mean, weighted by examples, is never below the error of all examples together, where one client's overconfidence
    offsets another's caution. With few examples even a calibrated client has a positive error, by chance in small bins.
    The last axis is: examples of the bin, their summed confidence, and those predicted correctly.
    """
    examples, confidence, right = calibration.unbind(-1)
    return (right - confidence).abs().sum(-1) / examples.sum(-1)


TASK = CLASSIFICATION = Classification()
