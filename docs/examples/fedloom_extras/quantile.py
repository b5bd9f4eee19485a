"""A task: a quantile of the target, trained and measured by the pinball loss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.tasks.base import MetricSums, PredictionTask, TargetShape, are_whole, ratio
from fedloom.tasks.names import Headline
from fedloom.tasks.regression import Regression

NUMBERS = Regression()


class QuantileMetrics(MetricSums):
    """Sums of a client: examples, pinball loss in standardized units, and targets that are not above the prediction."""

    metrics = (Headline("pinball", False, False), Headline("coverage", True, True))
    size = 3

    def __init__(self, level: float, std: float) -> None:
        self.level, self.std = level, std

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, 1], [b] -> [3]``."""
        predicted = predictions.flatten().double().nan_to_num(nan=1e15).clamp(-1e15, 1e15)
        covered = (y.flatten() <= predicted).sum()
        return torch.stack([covered.new_tensor(len(y)), pinball(predicted, y.flatten(), self.level).sum(), covered])

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return the mean pinball loss in the target's unit, and the fraction of covered targets."""
        return {"pinball": ratio(sums[:, 1], sums[:, 0]) * self.std, "coverage": ratio(sums[:, 2], sums[:, 0])}

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return the reason if these sums are impossible for a client with so many examples; else None."""
        n, loss, covered = sums.tolist()
        if n in (0, examples) and are_whole(sums[2]) and covered <= n and loss >= 0:
            return None
        return f"{covered:g} of {n:g} examples covered, with a loss of {loss:g}"


class Quantile(PredictionTask):
    """Keys of ``task``: the quantile."""

    name: Literal["quantile"] = Field(default="quantile", description="a quantile of one number")
    level: float = Field(default=0.9, gt=0, lt=1, description="which quantile; 0.5 is the median")
    target_kind = "regression"
    headline = QuantileMetrics.metrics[0]

    def setting_fault(self, outputs: int) -> str | None:
        """Return the reason if the settings do not fit K outputs; else None."""
        return None if outputs == 1 else f"task.name: quantile predicts one number, but there are {outputs}"

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the pinball loss of each example, ``[b, 1], [b] -> [b]`` (Koenker and Bassett 1978)."""
        return pinball(outputs.flatten(), y.flatten(), self.level)

    def metric_sums(self, target: TargetShape, asked: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return the sums that a client computes."""
        return (QuantileMetrics(self.level, target.std[0] if target.std else 1.0),)

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return the number as the input of a network, ``[n, 1]``."""
        return NUMBERS.label_input(y, outputs)


def pinball(predicted: Tensor, y: Tensor, level: float) -> Tensor:
    """Return the loss of each example, whose minimum is the quantile: ``[b], [b] -> [b]``."""
    error = y - predicted
    return torch.maximum(level * error, (level - 1) * error)


QUANTILE = Quantile()
