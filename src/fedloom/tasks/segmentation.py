"""Segmentation: one of C classes for each pixel."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.tasks.base import (
    CategoricalTask,
    MetricSums,
    TargetShape,
    Weights,
    are_whole,
    as_weights,
    mean_defined,
    ratio,
    weights_fault,
)
from fedloom.tasks.names import IGNORED_PIXEL, METRICS

_NONE = -100
"""Index of pixels that do not count; it is not a class."""


class Segmentation(CategoricalTask):
    """Segmentation, trained by the cross-entropy of each pixel's logits, averaged over an image's pixels."""

    name: Literal["segmentation"] = Field(default="segmentation", description="one of C classes for each pixel")
    ignore_index: int = Field(
        default=IGNORED_PIXEL,
        description="value of pixels that are left out of the loss and of the metrics, as are those without a class",
    )
    class_weights: Weights | None = Field(
        default=None, description="weight of each class in the loss of its pixels; null: 1 each"
    )
    target_kind = "segmentation"
    headline = METRICS["mean_iou"]

    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``(C, height, width)``, or ``(C, depth, height, width)`` of volumes."""
        return (outputs, *target_shape)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean over the pixels that count, ``[b, C, h, w], [b, h, w] -> [b]``; 0 if none does."""
        weight = as_weights(self.class_weights, outputs)
        is_counted = _counted(y, outputs.shape[1], self.ignore_index)
        classes = y.long().where(is_counted, _NONE)
        each = F.cross_entropy(outputs, classes, weight, ignore_index=_NONE, reduction="none")
        return each.flatten(1).sum(1) / is_counted.flatten(1).sum(1).clamp(min=1)

    def negative_log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the pixels that count, which are independent given the outputs."""
        return self.loss(outputs, y) * _counted(y, outputs.shape[1], self.ignore_index).flatten(1).sum(1)

    def metric_sums(self, target: TargetShape, names: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return the pixel counts."""
        return (ClassOverlap(target.outputs, math.prod(target.shape), self.ignore_index),)

    def setting_fault(self, outputs: int) -> str | None:
        """Return why the settings do not fit C classes; None if they do."""
        if self.ignore_index == 255 and outputs > 255:
            return f"task.ignore_index is 255, one of {outputs} classes; set it to another number, such as -100"
        return weights_fault("class_weights", self.class_weights, outputs)

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return the fraction of each class among the pixels that count, ``[n, h, w] -> [n, C]``."""
        is_counted = _counted(y, outputs, self.ignore_index).flatten(1)
        classes = y.flatten(1).long().where(is_counted, y.new_zeros((), dtype=torch.long))
        parts = torch.zeros(len(y), outputs, device=y.device).scatter_add_(1, classes, is_counted.float())
        return parts / is_counted.sum(1, keepdim=True).clamp(min=1)


def _counted(y: Tensor, classes: int, ignore_index: int) -> Tensor:
    """Return True for pixels that count: those with a class, unless it is the ignored one."""
    is_counted = y != ignore_index
    return is_counted if classes > IGNORED_PIXEL else is_counted & (y != IGNORED_PIXEL)


class ClassOverlap(MetricSums):
    """Pixels of each class: predicted correctly, predicted, and true, ``[3, C]``.

    Parameters
    ----------
    classes
        C.
    pixels
        Pixels of one mask.
    ignore_index
        Value of pixels that do not count.
    """

    names = ("mean_iou", "dice", "pixel_accuracy")

    def __init__(self, classes: int, pixels: int, ignore_index: int) -> None:
        self.classes, self.pixels, self.ignored = classes, pixels, ignore_index
        self.size = 3 * classes

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, C, h, w], [b, h, w] -> [3C]``; a NaN prediction is wrong."""
        is_counted, true = _counted(y, self.classes, self.ignored), y.long()
        predicted = predictions.argmax(1).where(~predictions.isnan().any(1), (true + 1) % self.classes)
        true, predicted = true[is_counted], predicted[is_counted]
        kinds = (true[true == predicted], predicted, true)
        return torch.cat([torch.bincount(kind, minlength=self.classes) for kind in kinds]).double()

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return mean IoU and mean Dice over the classes that occur or are predicted, and the pixels' accuracy."""
        right, predicted, true = sums.reshape(len(sums), 3, self.classes).unbind(1)
        return {
            "mean_iou": mean_defined(ratio(right, predicted + true - right)),
            "dice": mean_defined(ratio(2 * right, predicted + true)),
            "pixel_accuracy": ratio(right.sum(1), true.sum(1)),
        }

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why the counts are impossible; None if they are possible."""
        right, predicted, true = sums.reshape(3, self.classes)
        if not are_whole(sums) or float(true.sum()) > examples * self.pixels or predicted.sum() != true.sum():
            return f"{float(true.sum()):g} pixels, of {examples} masks of {self.pixels}"
        if (right > torch.minimum(predicted, true)).any():
            return "more right pixels of a class than predicted or true ones"
        return None


TASK = Segmentation()
