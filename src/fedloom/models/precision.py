"""Computation of a network in bfloat16, while its parameters and all messages keep their type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.models.flat import FlatModel, with_forward


def bfloat16(model: FlatModel) -> FlatModel:
    """Return a model whose convolutions and matrix products run in bfloat16, forward and backward.

    θ, the logits, the loss and the gradients keep their type, so that small updates are not rounded away. PyTorch's
    autocast decides what is safe in between. A model in float64 is unaffected.
    """

    def forward(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        with torch.autocast(_any(parameters).device.type, torch.bfloat16):
            logits = model.forward(parameters, x)
        return logits.to(_any(parameters).dtype)

    def features(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        with torch.autocast(_any(parameters).device.type, torch.bfloat16):
            found = model.features(parameters, x)
        return found.to(_any(parameters).dtype)

    view = with_forward(model, forward)
    view.in_bfloat16 = True
    view.features = features  # type: ignore[method-assign]
    view.in_training = lambda: bfloat16(model.in_training())  # type: ignore[method-assign]
    return view


def _any(parameters: Mapping[str, Tensor]) -> Tensor:
    return next(iter(parameters.values()))
