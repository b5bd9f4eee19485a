"""Head of a module: the linear layer that its outputs come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.draws import drawing_with
from fedloom.errors import ExperimentError
from fedloom.models.module_call import ModuleCall
from fedloom.models.module_inputs import ModuleInputs
from fedloom.models.module_layers import copied, is_tied


class Head(NamedTuple):
    """Head of a module.

    Attributes
    ----------
    name
        Name of the layer.
    has_features
        True if its input is one row of features for each example.
    gives_logits
        True if its outputs are the logits, False if the logits are computed from them.
    """

    name: str
    has_features: bool
    gives_logits: bool


def head_of(
    module: nn.Module, call: ModuleCall, x: ModuleInputs, others: ModuleInputs, asked: str | None
) -> Head | None:
    """Return the head of a module; None if it has none and none was requested.

    Parameters
    ----------
    x, others
        Trial inputs, and others of the same shape.
    asked
        Key ``model.head``; None for the last linear layer, if its outputs are the module's.

    Raises
    ------
    ExperimentError
        If the requested layer cannot be the head.
    """
    module = copied(module).eval()
    _perturb(module)  # else a factor whose initial value is 1 would go unnoticed
    layers = dict(module.named_modules())
    linear = [name for name, layer in layers.items() if name and isinstance(layer, nn.Linear)]
    if asked is not None:
        return _named_head(module, call, x, others, asked, linear)
    heads = (_ending(module, call, name, x) for name in linear[::-1])
    return next((head for head in heads if head is not None), None)


def _named_head(
    module: nn.Module, call: ModuleCall, x: ModuleInputs, others: ModuleInputs, asked: str, linear: Sequence[str]
) -> Head:
    """Return the head that ``model.head`` names, one of the linear layers."""
    if asked not in linear:
        raise ExperimentError(
            f"model.head: {asked!r} is not a linear layer; linear layers: {', '.join(linear) or 'none'}"
        )
    head = _ending(module, call, asked, x) or _determining(module, call, asked, x, others)
    if head is None:
        raise ExperimentError(
            f"model.head: the logits do not follow from the outputs of {asked!r} alone; name the last layer "
            "that has parameters"
        )
    if is_tied(module, asked):
        raise ExperimentError(
            f"model.head: layer {asked!r} shares a parameter with another layer. Name a layer with parameters of its "
            "own, or untie them"
        )
    return head


def _ending(module: nn.Module, call: ModuleCall, name: str, x: ModuleInputs) -> Head | None:
    """Return a layer as the head if it is called once, and its outputs are the module's."""
    given, outputs = _observed(module, call, name, x)
    if len(given) != 1:
        return None
    features, found = given[0]
    if found.shape != outputs.shape and found.shape != (*outputs.shape, 1):
        return None
    same = torch.equal(found.reshape(outputs.shape), outputs)
    gives_logits = not (call.binary or call.probabilities or call.exponential)
    return Head(name, features.dim() == 2, gives_logits) if same else None


def _determining(module: nn.Module, call: ModuleCall, name: str, x: ModuleInputs, others: ModuleInputs) -> Head | None:
    """Return a layer as the head if the module's outputs follow from its outputs alone.

    This is tested by changing all inputs and parameters, but not the layer's outputs: those of the module must stay the
    same.
    """
    given, outputs = _observed(module, call, name, x)
    if len(given) != 1:
        return None
    features, kept = given[0]
    _perturb(module)
    hook = module.get_submodule(name).register_forward_hook(lambda *_: kept)
    try:
        _, again = _observed(module, call, name, others)
    finally:
        hook.remove()
    return Head(name, features.dim() == 2, gives_logits=False) if torch.equal(again, outputs) else None


def _perturb(module: nn.Module) -> None:
    """Change every trained parameter of a module, in place, so that shared ones stay shared."""
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.mul_(1.25).add_(0.01)


def _observed(
    module: nn.Module, call: ModuleCall, name: str, x: ModuleInputs
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the inputs and outputs of each call of a layer, and the module's outputs, before they are shaped."""
    given: list[tuple[Tensor, Tensor]] = []
    hook = module.get_submodule(name).register_forward_hook(lambda _, inputs, output: given.append((inputs[0], output)))
    try:
        with torch.no_grad(), drawing_with(0):
            outputs = call.read(module, call.result(module, x))
    finally:
        hook.remove()
    return given, outputs
