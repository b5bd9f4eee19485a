"""PyTorch module as a function of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from fedloom.models.flat import Leaves
from fedloom.models.module_call import AS_IT_IS, ModuleCall
from fedloom.models.module_inputs import ModuleInputs, first_input
from fedloom.models.module_loss import TrainingStep, own_loss

Place: TypeAlias = tuple[dict[str, Tensor | None], str, str]
"""Place of a tensor: the dict of its layer, the key there, and its name in θ."""


class ModuleFunction:
    """Module as a function of its trained parameters and its moving buffers, in its current mode.

    It is equivalent to ``torch.func.functional_call``, but does not look up the places of the tensors at each call,
    which would take 3 % of a LeNet step. A call in training mode moves the given buffers in place. Frozen parameters
    and other buffers are constants of the module, unless a plain mapping has them, as that of a saved model does.
    Threads must not share one, since a call sets tensors of the module.

    Parameters
    ----------
    module
        The module.
    buffers
        Names of the buffers that move.
    call
        Way in which it is called.
    """

    def __init__(self, module: nn.Module, buffers: Collection[str] = (), call: ModuleCall = AS_IT_IS) -> None:
        self.module = module
        self.call = call
        found = places(module)
        self._buffers = [place for place in found if place[2] in buffers]
        self._places = [place for place in found if place[2] in buffers or _is_trained(place[0][place[1]])]
        self._constants = [place for place in found if place[2] not in buffers and not _is_trained(place[0][place[1]])]
        self._own = [held[key] for held, key, _ in self._places]
        self._device: torch.device | None = None

    def __call__(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Tensor:
        """Return the module's outputs for ``x``."""
        found: Tensor = self._call(self.call, parameters, first_input(x).device, self.module, x)
        return found

    def result(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Any:
        """Return all that the module returns for ``x``."""
        return self._call(self.call.result, parameters, first_input(x).device, self.module, x)

    def for_loss(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Any:
        """Return what the loss needs first: all that the module returns for ``x``, or ``x`` for a training step."""
        return x if isinstance(own_loss(self.module), TrainingStep) else self.result(parameters, x)

    def loss(self, parameters: Mapping[str, Tensor], x: ModuleInputs, found: Any, y: Tensor | None) -> Tensor:
        """Return the module's own loss of each example, ``[b]``; it may use parameters, as a penalty does.

        Parameters
        ----------
        found
            All that the module returns for ``x``, or the tensor of outputs, in the module's shape and unit.
        """
        own, like = own_loss(self.module), first_input(x)
        taken = found if self.call.whole else self.call.outputs(self.module, found, x)
        if not isinstance(own, _Loss):
            losses: Tensor = self._call(own, parameters, like.device, taken, y)
            return losses
        if y is not None and y.is_floating_point() and y.numel() == taken.numel():
            y = y.reshape(taken.shape)  # axes of length one
        losses = self._call(own, parameters, like.device, taken, y)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def _call(self, function: Any, parameters: Mapping[str, Tensor], device: torch.device, *args: Any) -> Any:
        if device != self._device:
            self._move_constants(device)
        given = [] if isinstance(parameters, Leaves) else [p for p in self._constants if p[2] in parameters]
        constants = [held[key] for held, key, _ in given]
        try:
            for held, key, name in given:
                held[key] = parameters[name]
            for held, key, name in self._places:
                held[key] = parameters[name]
            return function(*args)
        finally:
            for held, key, name in self._buffers:
                _keep_moved(parameters[name], held[key])
            for (held, key, _), own in zip((*self._places, *given), (*self._own, *constants), strict=True):
                held[key] = own

    def _move_constants(self, device: torch.device) -> None:
        """Move buffers and frozen parameters to a device; a tensor of several layers stays one tensor."""
        moved: dict[int, Tensor] = {}
        for layer in self.module.modules():
            kinds: tuple[dict[str, Any], ...] = (layer._buffers, layer._parameters)
            for held in kinds:
                for key, t in held.items():
                    if t is not None and not _is_trained(t):
                        held[key] = moved.setdefault(id(t), t if t.device == device else t.to(device))
        self._device = device


def _keep_moved(given: Tensor, now: Tensor | None) -> None:
    """Copy a buffer that a call replaced by a new tensor, rather than changing it in place."""
    if now is not given and now is not None:
        with torch.no_grad():
            given.copy_(now)


def _is_trained(t: Tensor | None) -> bool:
    return t is not None and t.requires_grad


def places(module: nn.Module) -> list[Place]:
    """Return the places of all parameters and buffers; a tensor shared by several layers has the name of its first."""
    first: dict[int, str] = {}
    found: list[Place] = []
    for kind in ("_parameters", "_buffers"):
        for prefix, layer in module.named_modules():
            tensors: dict[str, Tensor | None] = getattr(layer, kind)
            for key, t in tensors.items():
                if t is not None:
                    name = first.setdefault(id(t), f"{prefix}.{key}" if prefix else key)
                    found.append((tensors, key, name))
    return found
