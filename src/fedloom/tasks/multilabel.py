"""Multilabel classification: any of K labels."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.tasks.auroc import Auroc
from fedloom.tasks.base import (
    LOSS_CAP,
    MetricSums,
    PredictionTask,
    TargetShape,
    Weights,
    are_whole,
    as_weights,
    mean_defined,
    ratio,
    weights_fault,
)
from fedloom.tasks.names import METRICS


class Multilabel(PredictionTask):
    """Multilabel classification, trained by the binary cross-entropy of logits, averaged over the labels."""

    name: Literal["multilabel"] = Field(default="multilabel", description="any of K labels, each 0 or 1")
    pos_weight: Weights | None = Field(
        default=None, description="weight of each label's positive examples in the loss; null: 1 each"
    )
    target_kind = "multilabel"
    headline = METRICS["auroc"]

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean binary cross-entropy over the labels, ``[b, K], [b, K] -> [b]``."""
        weight = as_weights(self.pos_weight, outputs)
        entropy = F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), pos_weight=weight, reduction="none")
        return entropy.mean(1)

    def negative_log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the labels, which are independent given the outputs."""
        return self.loss(outputs, y) * outputs.shape[1]

    def probabilities(self, predictions: Tensor) -> Tensor:
        """Return the probability of each label, ``[b, K] -> [b, K]``."""
        return predictions.sigmoid()

    def combine(self, draws: Tensor) -> Tensor:
        """Return the logits of the mean probabilities, ``[S, b, K] -> [b, K]``."""
        return F.logsigmoid(draws).logsumexp(0) - F.logsigmoid(-draws).logsumexp(0)

    def metric_sums(self, target: TargetShape, names: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return the sums of the AUROC, and of the other metrics."""
        return (Auroc(target.outputs, of_classes=False), LabelCounts(target.outputs))

    def setting_fault(self, outputs: int) -> str | None:
        """Return why ``pos_weight`` does not fit K labels; None if it does."""
        return weights_fault("pos_weight", self.pos_weight, outputs)

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return the labels themselves, ``[n, K]``."""
        return y.float()


class LabelCounts(MetricSums):
    """Examples, exact matches and summed log loss; and for each label the right positives, predicted and true ones.

    A label is predicted if its probability is above 1/2. A NaN logit is a wrong prediction and costs ``LOSS_CAP``.
    """

    names = ("macro_f1", "micro_f1", "exact_match", "log_loss")

    def __init__(self, labels: int) -> None:
        self.labels = labels
        self.size = 3 + 3 * labels

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, K], [b, K] -> [3 + 3K]``."""
        logits, true = predictions.double(), y > 0.5
        predicted = (logits > 0).where(~logits.isnan(), ~true)
        loss = -F.logsigmoid(logits.where(true, -logits)).nan_to_num(nan=-LOSS_CAP, neginf=-LOSS_CAP)
        n, matches = logits.new_tensor(len(y)), (predicted == true).all(1).sum().double()
        labels = torch.stack([predicted & true, predicted, true]).sum(1).double()
        return torch.cat([torch.stack([n, matches, loss.clamp(max=LOSS_CAP).mean(1).sum()]), labels.flatten()])

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return macro F1 (over labels that occur or are predicted), micro F1, exact matches and mean log loss."""
        n, matches, loss = sums[:, :3].unbind(1)
        right, predicted, true = sums[:, 3:].reshape(len(sums), 3, self.labels).unbind(1)
        return {
            "macro_f1": mean_defined(ratio(2 * right, predicted + true)),
            "micro_f1": ratio(2 * right.sum(1), (predicted + true).sum(1)),
            "exact_match": ratio(matches, n),
            "log_loss": ratio(loss, n),
        }

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why the sums are impossible; None if they are possible."""
        n, matches, loss = sums[:3].tolist()
        right, predicted, true = sums[3:].reshape(3, self.labels)
        if n not in (0.0, float(examples)) or not are_whole(sums[[0, 1, *range(3, self.size)]]) or matches > n:
            return f"{matches:g} matches of {n:g} examples, of {examples} in all"
        if (right > torch.minimum(predicted, true)).any() or max(predicted.max(), true.max()) > n:
            return f"labels of {float(predicted.max()):g} examples, of {n:g} in all"
        if not (0 <= loss <= LOSS_CAP * n * (1 + 1e-6) and math.isfinite(loss)):
            return f"a summed log loss of {loss:g} of {n:g} examples"
        return None


TASK = Multilabel()
