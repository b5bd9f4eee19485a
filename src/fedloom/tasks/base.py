"""Contract of a prediction task."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from fedloom.core.settings import Settings
from fedloom.tasks.names import Headline


class PredictionTask(Settings):
    """Keys of ``task``: what the models predict, and how that is trained and measured.

    K is the number of outputs: classes, labels, numbers, classes of a pixel, or tokens of the vocabulary.
    """

    name: str
    headline: ClassVar[Headline]

    @abstractmethod
    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a model's output for one example, given K and the shape of one target."""

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example, ``[b, *output_shape], [b, *target_shape] -> [b]``."""
