"""Data without targets, whose models define their own loss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.tasks.base import LOSS, TOTAL, Counts, PredictionTask, TargetShape
from fedloom.tasks.names import METRICS
from fedloom.tasks.sums import MetricSums, ratio


class OwnLoss(PredictionTask):
    """Task of data without classes and targets: the model's own loss; no experiment names it."""

    name: Literal["own_loss"] = Field(default="own_loss", description="the loss that the model defines")
    target_kind = "classification"
    headline = METRICS["loss"]

    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return an empty shape: outputs have no meaning."""
        return ()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Raise TypeError: only the model has a loss."""
        raise TypeError("data without targets need a model that defines its loss")

    def metric_sums(self, target: TargetShape, asked: Collection[str] = ()) -> tuple[MetricSums, ...]:
        """Return nothing."""
        return ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the loss alone."""
        return ("loss",)

    def metrics_of_counts(self, counts: Counts) -> dict[str, Tensor]:
        """Return the mean loss."""
        return {"loss": ratio(counts.counts[:, LOSS], counts.counts[:, TOTAL])}

    def label_input_size(self, outputs: int, target_shape: tuple[int, ...]) -> int:
        """Return 0."""
        return 0

    def label_input(self, y: Tensor, outputs: int) -> Tensor:
        """Return nothing, ``[n, 0]``."""
        return torch.zeros(len(y), 0, device=y.device)


OWN_LOSS = OwnLoss()
