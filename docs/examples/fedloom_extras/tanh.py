"""A perceptron with one hidden layer of tanh units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout
from fedloom.models.registry import ModelChoice


class Tanh(FlatModel):
    """Network without parameters of its own: ``layout`` lists the contents of the vector θ in order."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        self.layout = Layout(
            (
                ("fc1.weight", (hidden, inputs)),
                ("fc1.bias", (hidden,)),
                ("fc2.weight", (classes, hidden)),
                ("fc2.bias", (classes,)),
            )
        )

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``[b, *input_shape] -> [b, hidden]``."""
        return F.linear(x.flatten(1), parameters["fc1.weight"], parameters["fc1.bias"]).tanh()

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``[b, *input_shape] -> [b, C]`` logits."""
        return F.linear(self.features(parameters, x), parameters["fc2.weight"], parameters["fc2.bias"])


class TanhSettings(ModelChoice):
    """Keys of ``model``."""

    name: Literal["tanh"] = Field(default="tanh", description="one hidden layer of tanh units")
    hidden: int = Field(default=20, ge=1, description="hidden units")
    takes = ("pixels", "features")

    def make(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the network for these inputs."""
        return Tanh(math.prod(input_shape), self.hidden, classes)


TANH = TanhSettings()
