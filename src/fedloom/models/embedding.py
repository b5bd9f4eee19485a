"""Embedding networks φ, which map an example to descriptor space; a descriptor is their mean (papers/001, §3).

The paper's label input is the one-hot class. Other tasks define their own vector (``PredictionTask.label_input``).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel, FlatNetwork, Layout, linear, linear_entries
from fedloom.models.module_call import ModuleInputs
from fedloom.models.networks import LSTM, lenet_features, lenet_layout
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION


class EmbeddingNetwork(FlatNetwork):
    """Embedding network φ(x, y; η_v), ``[b, *input_shape], [b, *target_shape] -> [b, l]``.

    Parameters
    ----------
    outputs
        K. Subclasses also have ``size``, the length l of a descriptor, and take the rest as ``target``.
    labels
        False if φ uses only x.
    task, target_shape
        Task, which converts a target into a label input, and the shape of one target.
    """

    def __init__(
        self,
        outputs: int,
        *,
        labels: bool = True,
        task: PredictionTask = CLASSIFICATION,
        target_shape: tuple[int, ...] = (),
    ) -> None:
        self.outputs = outputs
        self.task = task
        self.labels = labels
        self.label_size = task.label_input_size(outputs, target_shape) if labels else 0
        """Length L of the label input; 0 for the unlabelled variant."""

    def label_input(self, y: Tensor | None, like: Tensor) -> Tensor:
        """Return targets as inputs of another tensor's type, ``[b, *target_shape] -> [b, L]``."""
        assert y is not None
        return self.task.label_input(y, self.outputs).to(like.dtype)

    @abstractmethod
    def forward(self, parameters: Mapping[str, Tensor], x: Any, y: Tensor | None) -> Tensor:
        """Embed a batch, one tensor or named ones; ``y`` is None for the unlabelled variant."""

    def describe(
        self, parameters: Mapping[str, Tensor], x: ModuleInputs, y: Tensor | None, clip: float | None = None
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
    """LeNet with L label planes appended to the image (papers/001, Table 4 and §4 "Models").

    A label plane is constant and the convolution has no padding, so the plane contributes a constant over the image:
    the sum of its kernel. It is added as a label-dependent bias, which is the same function as convolving L more
    channels and an order of magnitude cheaper.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int, size: int, **target: Any) -> None:
        super().__init__(outputs, **target)
        self.channels, height, width = input_shape
        self.layout = lenet_layout(self.channels + self.label_size, height, width, size)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, channels, height, width], [b, *target_shape] -> [b, l]``."""
        kernel, bias = parameters["conv1.weight"], parameters["conv1.bias"]
        h = F.conv2d(x, kernel[:, : self.channels], bias)
        if self.labels:
            planes = self.label_input(y, x) @ kernel[:, self.channels :].sum((2, 3)).t()  # [b, 16]
            h = h + planes[:, :, None, None]
        return linear(parameters, "fc3", lenet_features(parameters, h))


class LinearEmbedding(EmbeddingNetwork):
    """Linear layer on the label input alone (papers/001, §4 "Models"; the paper's choice for CIFAR-100)."""

    def __init__(self, outputs: int, size: int, **target: Any) -> None:
        super().__init__(outputs, **target)
        self.layout = Layout((("fc.weight", (size, self.label_size)), ("fc.bias", (size,))))

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, ...], [b, *target_shape] -> [b, l]``."""
        return linear(parameters, "fc", self.label_input(y, parameters["fc.weight"]))


class MLPEmbedding(EmbeddingNetwork):
    """Hidden layer with ReLU on the input with the label input appended (papers/001, A.5, Table 9: "MLP").

    Inputs of any shape are flattened. The paper does not give the width.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int, size: int, *, width: int, **target: Any) -> None:
        super().__init__(outputs, **target)
        inputs = math.prod(input_shape) + self.label_size
        self.layout = Layout(tuple(linear_entries([inputs, width, size])))

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, *input_shape], [b, *target_shape] -> [b, l]``."""
        h = x.flatten(1)
        if self.labels:
            h = torch.cat([h, self.label_input(y, x)], 1)
        return linear(parameters, "fc2", F.relu(linear(parameters, "fc1", h)))


class LSTMEmbedding(EmbeddingNetwork):
    """Character model with l outputs (papers/001, A.3 "Shakespeare dataset").

    The paper does not say how the network gets the label. Here a class is appended to the input as one more token.
    Targets of other tasks, such as next tokens, are not used.
    """

    def __init__(self, vocabulary: int, size: int, *, width: int, **target: Any) -> None:
        task = target.get("task", CLASSIFICATION)
        super().__init__(vocabulary, labels=target.get("labels", True) and task.kind.is_class, task=task)
        self.network = LSTM(vocabulary, hidden=width, outputs=size)
        self.layout = self.network.layout

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return the bound of the character model."""
        return self.network.bound(name, shape, fan_in)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed ``[b, tokens], [b, *target_shape] -> [b, l]``."""
        if self.labels:
            assert y is not None
            x = torch.cat([x, y[:, None].to(x.dtype)], 1)
        return self.network.forward(parameters, x)


class PretrainedEmbedding(MLPEmbedding):
    """MLP on features of the clients' model at its first parameters, in place of the input.

    The features are the inputs of the model's head, which for adapters on a pretrained module are those of the module:
    a fixed function of x. Each example's features are standardized (``F.layer_norm`` without parameters), so that the
    rates of η_v do not depend on their scale.

    Raise ValueError if the model has no features of single examples.

    Parameters
    ----------
    model
        Model of the clients, in evaluation mode.
    size, width
        Length l of a descriptor, and width of the hidden layer.
    """

    def __init__(self, model: FlatModel, outputs: int, size: int, *, width: int, **target: Any) -> None:
        widths = [shape[1] for name, shape in model.layout.entries if name in model.layout.head and len(shape) == 2]
        if not model.has_features or model.predicts_by_batch or not widths:
            raise ValueError("the model has no trained linear head that takes one row of features for each example")
        self.features_size = max(widths)
        """Number f of features."""
        super().__init__((self.features_size,), outputs, size, width=width, **target)
        self._model = model
        self._start: dict[torch.device, Mapping[str, Tensor]] = {}

    def forward(self, parameters: Mapping[str, Tensor], x: ModuleInputs, y: Tensor | None) -> Tensor:
        """Embed ``[b, ...], [b, *target_shape] -> [b, l]``."""
        features = self._features(x, parameters["fc1.weight"])
        return super().forward(parameters, F.layer_norm(features, (self.features_size,)), y)

    @torch.no_grad()
    def _features(self, x: ModuleInputs, like: Tensor) -> Tensor:
        """Return the model's features at its first parameters, ``[b, f]``."""
        if like.device not in self._start:
            theta = self._model.init(torch.Generator().manual_seed(0), like.dtype)
            self._start[like.device] = self._model.layout.leaves(theta.to(like.device))
        return self._model.features(self._start[like.device], x)  # type: ignore[arg-type]


EMBEDDINGS: dict[str, tuple[str, ...]] = {
    "pixels": ("lenet", "linear", "mlp"),
    "features": ("mlp", "linear"),
    "tokens": ("lstm", "linear"),
    "integers": ("linear",),
    "named": ("linear",),
}
"""Kind of input -> embedding networks that accept it directly, the recommended one first."""


def networks_for(kind: str, task: PredictionTask) -> tuple[str, ...]:
    """Return the names of the embedding networks for inputs of a kind in a task, the recommended one first.

    ``pretrained``, which depends on the model instead, is not among them.

    Sequences whose targets are their next tokens have the vocabulary that ``lstm`` needs. Other integers and named
    tensors have no specific network: ``linear`` describes a client by its targets alone.
    """
    if task.kind.like == "sequence":
        return ("lstm",)
    if kind == "tokens" and not task.kind.is_class:  # a vocabulary that the targets do not have
        return ("linear",)
    return EMBEDDINGS.get(kind, ("linear",))


class EmbeddingSettings(Settings):
    """Choice of embedding network: keys of ``algorithm.embedding``."""

    network: Literal["lenet", "linear", "mlp", "lstm", "pretrained"] = Field(
        default="lenet",
        description="lenet (images; papers/001, Table 4), linear on the targets alone (any inputs), mlp (images, and "
        "features of any rank, flattened; papers/001, Table 9), lstm (tokens; papers/001, A.3), pretrained (any "
        "inputs: mlp on the features of the clients' model at its initialization)",
    )
    width: int | None = Field(
        default=None,
        ge=1,
        description="width of the hidden layers of mlp, lstm and pretrained; null: 256 for lstm, else 100",
    )
    labels: bool = Field(default=True, description="false: φ uses only x, so that unlabelled clients can be described")

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.network == "linear" and not self.labels:
            raise ValueError("network linear uses only labels; set labels to true (got labels=False)")
        if self.width is not None and self.network not in ("mlp", "lstm", "pretrained"):
            raise ValueError(f"network {self.network} has a fixed width; set it to null (got width={self.width})")
        return self

    def check(self, model: FlatModel) -> None:
        """Raise ExperimentError if φ takes labels and the loss of the clients' model uses none."""
        if self.labels and not model.needs_labels:
            raise ExperimentError(
                "algorithm.embedding.labels: the loss of this model uses no labels, so that the data may have none; "
                "set it to false (got true)",
                key="algorithm.embedding.labels",
                found=True,
            )

    def network_for(
        self,
        kind: str,
        input_shape: tuple[int, ...],
        outputs: int,
        size: int,
        task: PredictionTask = CLASSIFICATION,
        target_shape: tuple[int, ...] = (),
        model: FlatModel | None = None,
    ) -> EmbeddingNetwork:
        """Return the network for inputs of a kind, targets of a task, and descriptors of length ``size``.

        Raise ExperimentError if it does not accept such inputs, or the model has no features.

        Parameters
        ----------
        model
            Model of the clients, which ``pretrained`` needs.
        """
        allowed = networks_for(kind, task)
        if self.network not in (*allowed, "pretrained"):
            raise self._refused(f"does not accept {kind} in {task.name}", allowed)
        target: dict[str, Any] = {"labels": self.labels, "task": task, "target_shape": target_shape}
        width = self.width or (256 if self.network == "lstm" else 100)
        try:
            match self.network:
                case "linear":
                    return LinearEmbedding(outputs, size, **target)
                case "lstm":
                    return LSTMEmbedding(outputs, size, width=width, **target)
                case "lenet":
                    return LeNetEmbedding(input_shape, outputs, size, **target)
                case "mlp":
                    return MLPEmbedding(input_shape, outputs, size, width=width, **target)
                case "pretrained":
                    assert model is not None
                    return PretrainedEmbedding(model, outputs, size, width=width, **target)
        except ValueError as error:
            others = tuple(name for name in allowed if name != self.network)
            raise self._refused(f"does not fit: {error}", others) from error

    def _refused(self, reason: str, allowed: tuple[str, ...]) -> ExperimentError:
        return ExperimentError(
            f"algorithm.embedding.network: {self.network!r} {reason}; choose from {', '.join(allowed)}",
            hint=f"set algorithm.embedding.network: {allowed[0]}",
            key="algorithm.embedding.network",
            found=self.network,
            allowed=allowed,
        )
