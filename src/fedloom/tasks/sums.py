"""Sums over examples from which metrics are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.tasks.names import METRICS, Headline


class MetricSums(ABC):
    """Sums that a client computes over the examples of a split; the metrics of a client, or of several, follow.

    Sums are added over batches and over clients. ``pooled`` values are those of all examples together.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics."""

    whole_split: ClassVar[bool] = False
    """True if the sums are computed from all examples of a client's split at once, not batch by batch."""

    size: int
    """Number of sums."""

    @property
    def metrics(self) -> tuple[Headline, ...]:
        """Metrics that follow from the sums."""
        return tuple(METRICS[name] for name in self.names)

    @abstractmethod
    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch, ``[b, *output_shape], [b, *target_shape] -> [size]`` float64, all finite."""

    @abstractmethod
    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return metrics by name, ``[m, size] -> [m]`` each, NaN where undefined; ``pooled`` sums are over clients."""

    def of_clients(self, predictions: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the sums of g clients, ``[g, size]``, whose examples are concatenated in these sizes."""
        parts = zip(torch.split(predictions, list(sizes)), torch.split(y, list(sizes)), strict=True)
        return torch.stack([self.of(*part).cpu() for part in parts])

    @abstractmethod
    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why a client cannot have measured these sums ``[size]`` on so many examples; None if it can."""


def are_whole(counts: Tensor) -> bool:
    """Return True if all numbers are whole and nonnegative."""
    return bool(((counts >= 0) & (counts == counts.round())).all())


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a quotient, NaN where the denominator is 0."""
    return numerator / denominator.where(denominator != 0, denominator.new_tensor(float("nan")))


def mean_defined(values: Tensor) -> Tensor:
    """Return the mean over the last axis of the values that are not NaN; NaN without any."""
    return values.nanmean(-1)
