"""FedClip: FedAvg whose clients clip every gradient, element by element. An example, not from a paper."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.client import Correction, Trained, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg, FedAvgSettings
from fedloom.models.flat import FlatModel


class FedClipSettings(FedAvgSettings):
    """Keys of ``algorithm`` for FedClip: those of FedAvg, and one more."""

    largest: float = Field(default=1.0, gt=0, description="largest absolute value of an element of a gradient")


class FedClip(FedAvg):
    """FedAvg with clipped gradients."""

    name = "fedclip"
    settings = FedClipSettings
    predictors = {"personal": "FedClip + fine-tuning", "global": "FedClip"}

    def train(self, model: FlatModel, group: ClientGroup, shared: Tensor, s: FedClipSettings) -> Trained:
        """Train in a round; the correction changes the gradients of every step."""

        def clip(gradients: list[Tensor], w: list[Tensor], start: list[Tensor], given: object) -> list[Tensor]:
            return [torch.clamp(gradient, -s.largest, s.largest) for gradient in gradients]

        return train(model, group, shared, s.local, correct=Correction(clip))


FEDCLIP = FedClip()
