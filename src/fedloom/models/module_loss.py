"""Losses that modules define: functions, criteria of torch, and the training step of Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

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

from fedloom.models.module_inputs import ModuleInputs, first_input

RESIDUALS = (L1Loss, MSELoss, HuberLoss, SmoothL1Loss)
"""Criteria of torch that measure the difference of outputs and targets: errors of the task, in its units."""

_AVERAGED = "averaged"
"""Attribute of a criterion whose reduction was the mean."""


def own_loss(module: nn.Module) -> Any:
    """Return the function ``loss`` of a module, or else the ``training_step`` of one of Lightning.

    None if it has neither, or an attribute ``loss`` that is no function.
    """
    found = getattr(module, "loss", None)
    return found if callable(found) else TrainingStep(module) if _has_step(module) else None


class TrainingStep:
    """Loss of a ``LightningModule``, which calls the module itself: that of a batch, for each of its examples."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def __call__(self, x: ModuleInputs, y: Tensor | None) -> Tensor:
        """Return the loss of a batch ``(x, y)``, ``[b]``, with which nothing is logged."""
        vars(self.module).update(log=_nothing, log_dict=_nothing)
        step = self.module.training_step
        arguments = ((x, y), 0)[: len(inspect.signature(step).parameters)]
        found = step(*arguments)
        loss = found.get("loss") if isinstance(found, Mapping) else found
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
    counted = y != criterion.ignore_index
    divisor = counted.double()
    if criterion.weight is not None:
        divisor = divisor * criterion.weight.to(divisor)[y.where(counted, 0)]
    share = weight.double()
    total = (share * divisor.reshape(*weight.shape, -1).mean(-1)).sum(-1, keepdim=True)
    return (share * (share.sum(-1, keepdim=True) / total).where(total > 0, 0)).to(weight.dtype)
