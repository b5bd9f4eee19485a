"""PyTorch module as a function of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import (
    CrossEntropyLoss,
    HuberLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    PoissonNLLLoss,
    SmoothL1Loss,
    _Loss,
)

from fedloom.models.flat import Leaves
from fedloom.models.module_call import AS_IT_IS, ModuleCall, ModuleInputs, first_input

RESIDUALS = (L1Loss, MSELoss, HuberLoss, SmoothL1Loss)
"""Criteria of torch that measure the difference of outputs and targets: errors of the task, in its units."""

_AVERAGED = "averaged"
"""Attribute of a criterion whose reduction was the mean."""


def own_loss(module: nn.Module) -> Any:
    """Return the function ``loss`` of a module, or else the ``training_step`` of one of Lightning.

    None if it has neither, or an attribute ``loss`` that is no function.
    """
    loss = getattr(module, "loss", None)
    return loss if callable(loss) else TrainingStep(module) if _has_step(module) else None


class TrainingStep:
    """Loss of a ``LightningModule``, which calls the module itself; each example of a batch has the batch's loss."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def __call__(self, x: ModuleInputs, y: Tensor | None) -> Tensor:
        """Return the loss of a batch ``(x, y)``, ``[b]``, with which nothing is logged."""
        vars(self.module).update(log=_nothing, log_dict=_nothing)
        step = self.module.training_step
        arguments = ((x, y), 0)[: len(inspect.signature(step).parameters)]
        result = step(*arguments)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"training_step gives a {type(loss).__name__}; it must return the loss of the batch")
        return loss.reshape(()).expand(len(first_input(x)))


def _has_step(module: nn.Module) -> bool:
    base = next((each for each in type(module).__mro__ if each.__name__ == "LightningModule"), None)
    return base is not None and type(module).training_step is not base.training_step  # type: ignore[attr-defined]


def _nothing(*_: object, **__: object) -> None:
    return None


def takes_raw_targets(module: nn.Module) -> bool:
    """Return True if a module's own loss takes numbers in their own units, as a loop of the module's author gives them.

    A difference of outputs and targets is one of the task's errors, which are of standardized numbers.
    """
    own = own_loss(module)
    return own is not None and not isinstance(own, RESIDUALS)


def gives_logarithms(module: nn.Module) -> bool:
    """Return True if a module's own loss takes its outputs as logarithms of the numbers."""
    own = own_loss(module)
    return isinstance(own, PoissonNLLLoss) and own.log_input


def per_example(criterion: _Loss) -> None:
    """Make a criterion of torch that averages return a loss for each example; :func:`criterion_weights` averages."""
    if criterion.reduction == "mean":
        criterion.reduction = "none"
        vars(criterion)[_AVERAGED] = True


def criterion_weights(criterion: Any, y: Tensor, weight: Tensor) -> Tensor:
    """Return the weights with which the losses of a batch are the criterion's mean, ``[..., b]``.

    Torch divides the cross-entropy by the sum of the classes' weights over all targets that are not ignored. The weight
    of padding, 0, stays 0. A criterion that the module's author averages counts examples alike.
    """
    if not isinstance(criterion, CrossEntropyLoss | NLLLoss) or not vars(criterion).get(_AVERAGED):
        return weight
    is_counted = y != criterion.ignore_index
    divisor = is_counted.double()
    if criterion.weight is not None:
        divisor = divisor * criterion.weight.to(divisor)[y.where(is_counted, 0)]
    share = weight.double()
    total = (share * divisor.reshape(*weight.shape, -1).mean(-1)).sum(-1, keepdim=True)
    return (share * (share.sum(-1, keepdim=True) / total).where(total > 0, 0)).to(weight.dtype)


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
        own_places = places(module)
        self._buffers = [place for place in own_places if place[2] in buffers]
        self._places = [place for place in own_places if place[2] in buffers or _is_trained(place[0][place[1]])]
        self._constants = [
            place for place in own_places if place[2] not in buffers and not _is_trained(place[0][place[1]])
        ]
        self._own = [module_dict[key] for module_dict, key, _ in self._places]
        self._device: torch.device | None = None

    def __call__(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Tensor:
        """Return the module's outputs for ``x``."""
        outputs: Tensor = self._call(self.call, parameters, first_input(x).device, self.module, x)
        return outputs

    def result(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Any:
        """Return all that the module returns for ``x``."""
        return self._call(self.call.result, parameters, first_input(x).device, self.module, x)

    def for_loss(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Any:
        """Return what the loss needs first: all that the module returns for ``x``, or ``x`` for a training step."""
        return x if isinstance(own_loss(self.module), TrainingStep) else self.result(parameters, x)

    def loss(self, parameters: Mapping[str, Tensor], x: ModuleInputs, returned: Any, y: Tensor | None) -> Tensor:
        """Return the module's own loss of each example, ``[b]``; it may use parameters, as a penalty does.

        Parameters
        ----------
        returned
            All that the module returns for ``x``, or the tensor of outputs, in the module's shape and unit.
        """
        own, like = own_loss(self.module), first_input(x)
        outputs = returned if self.call.whole else self.call.outputs(self.module, returned, x)
        if not isinstance(own, _Loss):
            losses: Tensor = self._call(own, parameters, like.device, outputs, y)
            return losses
        if y is not None and y.is_floating_point() and y.numel() == outputs.numel():
            y = y.reshape(outputs.shape)  # axes of length one
        losses = self._call(own, parameters, like.device, outputs, y)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def _call(self, function: Any, parameters: Mapping[str, Tensor], device: torch.device, *args: Any) -> Any:
        if device != self._device:
            self._move_constants(device)
        replaced = [] if isinstance(parameters, Leaves) else [p for p in self._constants if p[2] in parameters]
        constants = [module_dict[key] for module_dict, key, _ in replaced]
        try:
            for module_dict, key, name in replaced:
                module_dict[key] = parameters[name]
            for module_dict, key, name in self._places:
                module_dict[key] = parameters[name]
            return function(*args)
        finally:
            for module_dict, key, name in self._buffers:
                _keep_moved(parameters[name], module_dict[key])
            for (module_dict, key, _), own in zip((*self._places, *replaced), (*self._own, *constants), strict=True):
                module_dict[key] = own

    def _move_constants(self, device: torch.device) -> None:
        """Move buffers and frozen parameters to a device; a tensor of several layers stays one tensor."""
        constants: dict[int, Tensor] = {}
        for layer in self.module.modules():
            kinds: tuple[dict[str, Any], ...] = (layer._buffers, layer._parameters)
            for module_dict in kinds:
                for key, t in module_dict.items():
                    if t is not None and not _is_trained(t):
                        module_dict[key] = constants.setdefault(id(t), t if t.device == device else t.to(device))
        self._device = device


def _keep_moved(tensor: Tensor, now: Tensor | None) -> None:
    """Copy a buffer that a call replaced by a new tensor, rather than changing it in place."""
    if now is not tensor and now is not None:
        with torch.no_grad():
            tensor.copy_(now)


def _is_trained(t: Tensor | None) -> bool:
    return t is not None and t.requires_grad


def places(module: nn.Module) -> list[Place]:
    """Return the places of all parameters and buffers; a tensor shared by several layers has the name of its first."""
    first: dict[int, str] = {}
    result: list[Place] = []
    for kind in ("_parameters", "_buffers"):
        for prefix, layer in module.named_modules():
            tensors: dict[str, Tensor | None] = getattr(layer, kind)
            for key, t in tensors.items():
                if t is not None:
                    name = first.setdefault(id(t), f"{prefix}.{key}" if prefix else key)
                    result.append((tensors, key, name))
    return result
