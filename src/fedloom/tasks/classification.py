"""Classification: one of C classes."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.tasks.base import PredictionTask
from fedloom.tasks.names import Headline


class Classification(PredictionTask):
    """Classification, trained by the cross-entropy of logits."""

    name: Literal["classification"] = Field(default="classification", description="one of C classes")
    headline = Headline("accuracy", higher_is_better=True, percent=True)

    def output_shape(self, outputs: int, target_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``(C,)``."""
        return (outputs,)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy, ``[b, C], [b] -> [b]``."""
        return F.cross_entropy(outputs, y, reduction="none")


CLASSIFICATION = Classification()
