"""A network computed in bfloat16, its parameters and all that travels staying as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.models.flat import FlatModel


class Bfloat16(FlatModel):
    """Convolutions and matrix products of a model in bfloat16, forwards and backwards.

    θ, the logits, the loss and the gradients keep their type, so that small updates are not rounded away; PyTorch's
    autocast decides what is safe in between. A model in float64 is not touched by it.

    Parameters
    ----------
    model
        A classifier.
    """

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        self.layout = model.layout

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """That of the model."""
        return self.model.bound(name, shape, fan_in)

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Those of the model, ``[b, *input_shape] -> [b, f]``."""
        with torch.autocast(x.device.type, torch.bfloat16):
            features = self.model.features(parameters, x)
        return features.to(self._dtype(parameters))

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits of the model, ``[b, *input_shape] -> [b, C]``."""
        with torch.autocast(x.device.type, torch.bfloat16):
            logits = self.model.forward(parameters, x)
        return logits.to(self._dtype(parameters))

    def _dtype(self, parameters: Mapping[str, Tensor]) -> torch.dtype:
        return next(iter(parameters.values())).dtype
