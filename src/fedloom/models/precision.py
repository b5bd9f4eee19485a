"""Computation of a network in bfloat16, while its parameters and all messages keep their type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedloom.models.flat import FlatModel, with_forward

_Forward: TypeAlias = Callable[[Mapping[str, Tensor], Tensor], Any]


def bfloat16(model: FlatModel) -> FlatModel:
    """Return a model whose convolutions and matrix products run in bfloat16, forward and backward.

    θ, the logits, the loss and the gradients keep their type, so that small updates are not rounded away. PyTorch's
    autocast decides what is safe in between. A model in float64 is unaffected.
    """

    view = with_forward(model, _autocast(model.forward))
    view.in_bfloat16 = True
    view.result = _autocast(model.result)  # type: ignore[assignment, method-assign]
    view.features = _autocast(model.features)  # type: ignore[assignment, method-assign]
    view.in_training = lambda: bfloat16(model.in_training())  # type: ignore[method-assign]
    return view


def _autocast(function: _Forward) -> _Forward:
    """Return a function of parameters and inputs that computes in bfloat16, with outputs of the parameters' type."""

    def computed(parameters: Mapping[str, Tensor], x: Tensor) -> Any:
        like = next(iter(parameters.values()))
        with torch.autocast(like.device.type, torch.bfloat16):
            found = function(parameters, x)
        return tree_map(lambda t: t.to(like.dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, found)

    return computed
