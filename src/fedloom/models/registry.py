"""The models an experiment file can name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel
from fedloom.models.lenet import LeNet
from fedloom.models.mlp import MLP
from fedloom.settings import Settings


class LeNetSettings(Settings):
    """The LeNet of papers/001, Table 3."""

    name: Literal["lenet"] = Field(default="lenet", description="LeNet of papers/001, Table 3, for images from 16x16")

    def build(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for inputs ``[channels, height, width]``."""
        if len(input_shape) != 3 or min(input_shape[1:]) < 16:
            raise ExperimentError(f"model.name: found 'lenet' for inputs {input_shape}, which needs images from 16x16")
        return LeNet(input_shape, classes)


class LogisticSettings(Settings):
    """Multinomial logistic regression."""

    name: Literal["logistic"] = Field(default="logistic", description="multinomial logistic regression")

    def build(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for inputs of any shape."""
        return MLP(input_shape, [], classes)


class MLPSettings(Settings):
    """A multilayer perceptron with free widths."""

    name: Literal["mlp"] = Field(default="mlp", description="multilayer perceptron, ReLU between layers")
    hidden: list[int] = Field(default=[100], min_length=1, description="widths of the hidden layers, each at least 1")

    def build(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        """Make the model for inputs of any shape."""
        if min(self.hidden) < 1:
            raise ExperimentError(f"model.hidden: found {self.hidden}, allowed: widths of at least 1")
        return MLP(input_shape, self.hidden, classes)


ModelSettings = LeNetSettings | LogisticSettings | MLPSettings

MODELS: dict[str, type[Settings]] = {"lenet": LeNetSettings, "logistic": LogisticSettings, "mlp": MLPSettings}
