"""PyTorch module as a function of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Place: TypeAlias = tuple[dict[str, Tensor | None], str, str]
"""Place of a tensor: the dict of its layer, the key there, and its name in θ."""


class ModuleFunction:
    """Module as a function of its trained parameters and its moving buffers, in its current mode.

    It is equivalent to ``torch.func.functional_call``, but does not look up the places of the tensors at each call,
    which would take 3 % of a LeNet step. A call in training mode moves the given buffers in place. Frozen parameters and
    other buffers are constants. Threads must not share one, since a call sets tensors of the module.
    """

    def __init__(self, module: nn.Module, buffers: Collection[str] = ()) -> None:
        self.module = module
        self.own_loss = hasattr(module, "loss")
        self._buffers = places(module, "_buffers", buffers)
        self._places = [*places(module), *self._buffers]
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
            self._move_constants(x.device)
        try:
            for held, key, name in self._places:
                held[key] = parameters[name]
            return function(x, *others)
        finally:
            for held, key, name in self._buffers:
                _keep_moved(parameters[name], held[key])
            for (held, key, _), own in zip(self._places, self._own, strict=True):
                held[key] = own

    def _move_constants(self, device: torch.device) -> None:
        """Move buffers and frozen parameters to a device; a tensor of several layers stays one tensor."""
        moved: dict[int, Tensor] = {}
        for layer in self.module.modules():
            for held in (layer._buffers, layer._parameters):
                for key, t in held.items():
                    if t is not None and not t.requires_grad:
                        held[key] = moved.setdefault(id(t), t.to(device))
        self._device = device


def _keep_moved(given: Tensor, now: Tensor | None) -> None:
    """Copy a buffer that a call replaced by a new tensor, rather than changing it in place."""
    if now is not given and now is not None:
        with torch.no_grad():
            given.copy_(now)


def places(module: nn.Module, kind: str = "_parameters", names: Collection[str] = ()) -> list[Place]:
    """Return the places of all trained parameters, or those of the buffers with these names (kind ``_buffers``).

    A tensor shared by several layers has the name of its first place.
    """
    first: dict[int, str] = {}
    found: list[Place] = []
    for prefix, layer in module.named_modules():
        tensors: dict[str, Tensor | None] = getattr(layer, kind)
        for key, t in tensors.items():
            if t is None:
                continue
            name = first.setdefault(id(t), f"{prefix}.{key}" if prefix else key)
            if t.requires_grad if kind == "_parameters" else name in names:
                found.append((tensors, key, name))
    return found
