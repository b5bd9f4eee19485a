"""Fully connected classifiers: multinomial logistic regression and the MLP with configurable widths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout, linear, linear_entries


class MLP(FlatModel):
    """Linear layers of the given widths with ReLU between them; without hidden layers, logistic regression."""

    def __init__(self, input_shape: tuple[int, ...], hidden: Sequence[int], classes: int) -> None:
        widths = [math.prod(input_shape), *hidden, classes]
        self.depth = len(widths) - 1
        self.layout = Layout(tuple(linear_entries(widths)))

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the last hidden layer, ``[b, *input_shape] -> [b, width of the last hidden layer]``."""
        h = x.flatten(1)
        for i in range(1, self.depth):
            h = F.relu(linear(parameters, f"fc{i}", h))
        return h

    def forward_together(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
        """Return the logits of g clients, ``[g, b, *input_shape] -> [g, b, C]``; None for a subclass.

        Layers are W xᵀ, so that the gradient of W has its memory layout: a step along a transposed one takes twice as
        long.
        """
        if type(self) is not MLP:
            return None
        h = x.flatten(2)
        for i in range(1, self.depth + 1):
            weight, bias = parameters[f"fc{i}.weight"], parameters[f"fc{i}.bias"]
            h = torch.matmul(weight, h.transpose(1, 2)).transpose(1, 2) + bias[:, None]
            h = h if i == self.depth else F.relu(h)
        return h
