"""Embedding networks φ, which map an example to descriptor space; a descriptor is their mean (papers/001, §3)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatNetwork, Layout
from fedloom.models.lenet import lenet_features, lenet_layout
from fedloom.models.lstm import LSTM


class EmbeddingNetwork(FlatNetwork):
    """Embedding network φ(x, y; η_v), ``[b, *input_shape], [b] -> [b, l]``."""

    @abstractmethod
    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed a batch; ``y`` is None for the unlabelled variant."""

    def describe(
        self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None, clip: float | None = None
    ) -> Tensor:
        """Return the descriptor v(B; η_v) = 1/|B| Σ φ(x, y), [l]; with ``clip``, of :func:`clipped` rows (float64)."""
        embedded = self.forward(parameters, x, y)
        return (embedded if clip is None else clipped(embedded, clip)).mean(0)


def clipped(values: Tensor, norm: float) -> Tensor:
    """Clip rows ``[n, l]`` to ℓ2 norm at most ``norm``, in float64.

    A row with a nonfinite number becomes zero, so that every example's row is bounded. Replacing one of n examples
    moves the mean of the rows by at most 2·norm/n.
    """
    rows = values.double()
    rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)
    longer: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(norm)
    return rows * (norm / longer)


class LeNetEmbedding(EmbeddingNetwork):
    """LeNet with C label planes appended to the image (papers/001, Table 4 and §4 "Models").

    A label plane is constant and the convolution has no padding, so the plane contributes a constant over the image:
    the sum of its kernel. It is added as a label-dependent bias, which is the same function as convolving C more
    channels and an order of magnitude cheaper.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int, *, labels: bool) -> None:
        self.channels, height, width = input_shape
        self.classes = classes
        self.labels = labels
        self.layout = lenet_layout(self.channels + (classes if labels else 0), height, width, size)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, channels, height, width], [b] -> [b, l]``."""
        kernel, bias = parameters["conv1.weight"], parameters["conv1.bias"]
        h = F.conv2d(x, kernel[:, : self.channels], bias)
        if self.labels:
            assert y is not None
            planes = F.one_hot(y, self.classes).to(x.dtype) @ kernel[:, self.channels :].sum((2, 3)).t()  # [b, 16]
            h = h + planes[:, :, None, None]
        return F.linear(lenet_features(parameters, h), parameters["fc3.weight"], parameters["fc3.bias"])


class LinearEmbedding(EmbeddingNetwork):
    """One linear layer on the one-hot label (papers/001, §4 "Models"; the paper's choice for CIFAR-100)."""

    def __init__(self, classes: int, size: int) -> None:
        self.classes = classes
        self.layout = Layout((("fc.weight", (size, classes)), ("fc.bias", (size,))))

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, ...], [b] -> [b, l]``."""
        assert y is not None
        weight, bias = parameters["fc.weight"], parameters["fc.bias"]
        return F.linear(F.one_hot(y, self.classes).to(weight.dtype), weight, bias)


class MLPEmbedding(EmbeddingNetwork):
    """One hidden layer with ReLU on the input with its one-hot label appended (papers/001, A.5, Table 9: "MLP").

    Inputs of any shape are flattened. The paper does not give the width.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int, *, width: int, labels: bool) -> None:
        self.classes = classes
        self.labels = labels
        inputs = math.prod(input_shape) + (classes if labels else 0)
        self.layout = Layout(
            (
                ("fc1.weight", (width, inputs)),
                ("fc1.bias", (width,)),
                ("fc2.weight", (size, width)),
                ("fc2.bias", (size,)),
            )
        )

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, *input_shape], [b] -> [b, l]``."""
        p = parameters
        h = x.flatten(1)
        if self.labels:
            assert y is not None
            h = torch.cat([h, F.one_hot(y, self.classes).to(x.dtype)], 1)
        h = F.relu(F.linear(h, p["fc1.weight"], p["fc1.bias"]))
        return F.linear(h, p["fc2.weight"], p["fc2.bias"])


class LSTMEmbedding(EmbeddingNetwork):
    """The character model with l outputs (papers/001, A.3 "Shakespeare dataset").

    The paper does not say how the label enters. Here it is a token, appended as the one that follows.
    """

    def __init__(self, vocabulary: int, size: int, *, width: int, labels: bool) -> None:
        self.labels = labels
        self.network = LSTM(vocabulary, hidden=width, outputs=size)
        self.layout = self.network.layout

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return the bound of the character model."""
        return self.network.bound(name, shape, fan_in)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, tokens], [b] -> [b, l]``."""
        if self.labels:
            assert y is not None
            x = torch.cat([x, y[:, None].to(x.dtype)], 1)
        return self.network.forward(parameters, x)


EMBEDDINGS: dict[str, tuple[str, ...]] = {
    "pixels": ("lenet", "linear", "mlp"),
    "features": ("mlp", "linear"),
    "tokens": ("lstm", "linear"),
}
"""Kind of input -> embedding networks that accept it, the recommended one first."""


class EmbeddingSettings(Settings):
    """Choice of embedding network: keys of ``algorithm.embedding``."""

    network: Literal["lenet", "linear", "mlp", "lstm"] = Field(
        default="lenet",
        description="lenet (images; papers/001, Table 4), linear on the labels alone, mlp (images and features; "
        "papers/001, Table 9), lstm (tokens; papers/001, A.3)",
    )
    width: int | None = Field(
        default=None, ge=1, description="width of the hidden layers of mlp and lstm; null: 100 for mlp and 256 for lstm"
    )
    labels: bool = Field(default=True, description="false: φ uses only x, so that unlabelled clients can be described")

    @model_validator(mode="after")
    def _sees_something(self) -> Self:
        if self.network == "linear" and not self.labels:
            raise ValueError("network linear uses only labels; set labels to true (got labels=False)")
        if self.width is not None and self.network not in ("mlp", "lstm"):
            raise ValueError(f"network {self.network} has a fixed width; set it to null (got width={self.width})")
        return self

    def network_for(self, kind: str, input_shape: tuple[int, ...], classes: int, size: int) -> EmbeddingNetwork:
        """Return the network for inputs of a kind (pixels, features, tokens) and descriptors of length ``size``.

        Raises
        ------
        ExperimentError
            If it does not accept such inputs.
        """
        allowed = EMBEDDINGS[kind]
        if self.network not in allowed:
            raise ExperimentError(
                f"algorithm.embedding.network: {self.network!r} does not accept {kind}; choose from "
                f"{', '.join(allowed)}",
                hint=f"set algorithm.embedding.network: {allowed[0]}",
                key="algorithm.embedding.network",
                found=self.network,
                allowed=allowed,
            )
        match self.network:
            case "linear":
                return LinearEmbedding(classes, size)
            case "mlp":
                return MLPEmbedding(input_shape, classes, size, width=self.width or 100, labels=self.labels)
            case "lstm":
                return LSTMEmbedding(classes, size, width=self.width or 256, labels=self.labels)
            case "lenet":
                try:
                    return LeNetEmbedding(input_shape, classes, size, labels=self.labels)
                except ValueError as error:
                    raise ExperimentError(
                        f"algorithm.embedding.network: 'lenet': {error}; choose linear or mlp",
                        hint="algorithm.embedding.network: linear describes a client by its labels alone",
                        key="algorithm.embedding.network",
                        found=self.network,
                    ) from error
