"""PyTorch module as a function of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class ModuleFunction:
    """Module as a function of its parameters, in its current mode.

    It is equivalent to ``torch.func.functional_call``, but does not look up the places of the parameters at each call,
    which would take 3 % of a LeNet step. Threads must not share one, since a call sets parameters of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own_loss = hasattr(module, "loss")
        self._places = places(module)
        self._own = [held[key] for held, key, _ in self._places]
        self._device: torch.device | None = None

    def __call__(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the module's outputs for ``x``."""
        found: Tensor = self._call(self.module, parameters, x)
        return found

    def loss(self, parameters: Mapping[str, Tensor], logits: Tensor, y: Tensor | None) -> Tensor:
        """Return the module's own loss of each example, ``[b]``; it may use parameters, as a penalty does."""
        found: Tensor = self._call(self.module.loss, parameters, logits, y)
        return found

    def _call(self, function: Any, parameters: Mapping[str, Tensor], x: Tensor, *others: Any) -> Any:
        if x.device != self._device:
            for layer in self.module.modules():
                for key, b in layer._buffers.items():
                    layer._buffers[key] = None if b is None else b.to(x.device)
            self._device = x.device
        try:
            for held, key, name in self._places:
                held[key] = parameters[name]
            return function(x, *others)
        finally:
            for (held, key, _), own in zip(self._places, self._own, strict=True):
                held[key] = own


def places(module: nn.Module) -> list[tuple[dict[str, Tensor | None], str, str]]:
    """Return the places of all parameters: the dict of the layer, the key there, and the parameter's name in θ.

    A parameter shared by several layers has the name of its first place.
    """
    first: dict[int, str] = {}
    found: list[tuple[dict[str, Tensor | None], str, str]] = []
    for prefix, layer in module.named_modules():
        for key, p in layer._parameters.items():
            if p is not None:
                name = first.setdefault(id(p), f"{prefix}.{key}" if prefix else key)
                found.append((layer._parameters, key, name))
    return found
