"""FedClip: FedAvg whose clients clip every gradient, element by element. It is an example, of no paper."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithms.base import ClientGroup
from fedloom.algorithms.client import Trained, train
from fedloom.algorithms.recipe import FineTuning, shared_model
from fedloom.models.flat import FlatModel


class FedClipSettings(FineTuning):
    """Keys of ``algorithm`` for FedClip: those of FedAvg, and one more."""

    largest: float = Field(default=1.0, gt=0, description="largest absolute value of an element of a gradient")


def clipped_sgd(model: FlatModel, group: ClientGroup, theta: Tensor, s: FedClipSettings) -> Trained:
    """Local training; ``correct`` changes the gradients of every step."""

    def correct(gradients: list[Tensor], w: list[Tensor], start: list[Tensor], given: object) -> list[Tensor]:
        return [torch.clamp(gradient, -s.largest, s.largest) for gradient in gradients]

    return train(model, group, theta, s.local, correct=correct)


FEDCLIP = shared_model(
    "fedclip",
    FedClipSettings,
    local=clipped_sgd,
    titles={"personal": "FedClip + fine-tuning", "global": "FedClip"},
)
