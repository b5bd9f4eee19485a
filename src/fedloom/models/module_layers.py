"""Layers of a PyTorch module: their names in errors, and those that are rejected."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils.weight_norm import WeightNorm

from fedloom.errors import ExperimentError, raised_at
from fedloom.models.factories import KEY
from fedloom.models.flat import Layout


def named(name: str, layer: nn.Module) -> str:
    """Name a layer in an error; the module itself has no name."""
    return f"{KEY}: layer {name!r} ({type(layer).__name__})" if name else f"{KEY}: {type(layer).__name__}"


def class_and_text(error: Exception) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextmanager
def hooks(
    module: nn.Module,
    on_output: Callable[[str, nn.Module, Any], None],
    on_input: Callable[[str, nn.Module], None] = lambda name, layer: None,
) -> Iterator[None]:
    """Call functions before and after each call of a layer, with its name and itself, and its output afterwards."""
    handles: list[Any] = []
    for name, layer in module.named_modules():
        handles.append(layer.register_forward_pre_hook(lambda layer, _, name=name: on_input(name, layer)))
        handles.append(layer.register_forward_hook(lambda layer, _, output, name=name: on_output(name, layer, output)))
    try:
        yield
    finally:
        for hook in handles:
            hook.remove()


@contextmanager
def at_layer(module: nn.Module, activity: str, *, hint: str = "", key: str | None = None) -> Iterator[None]:
    """Reject a module that fails, naming its innermost active layer and the line of its code.

    Parameters
    ----------
    activity
        End of the message's clause about the failure.
    hint
        End of the message.
    key
        Key to change, if it is not the factory.
    """
    layers: list[tuple[str, nn.Module]] = []
    with hooks(module, lambda *_: layers.pop() and None, lambda name, layer: layers.append((name, layer))):
        try:
            yield
        except ExperimentError:
            raise
        except Exception as error:
            name, layer = layers[-1] if layers else ("", module)
            raise ExperimentError(
                f"{named(name, layer)} fails {activity} ({class_and_text(error)}){_line(error)}{hint}", key=key
            ) from error


def _line(error: Exception) -> str:
    """Return the line of the module's code that led to an error."""
    location = raised_at(error)
    if location is None or "fedloom" in Path(location.filename).parts:
        return ""
    return f", at {Path(location.filename).name}, line {location.lineno}: {location.line}"


def check_layers(module: nn.Module) -> None:
    """Reject layers that are not functions of parameters and inputs.

    Raise ExperimentError if there are such layers, or no parameters to train.
    """
    for name, layer in module.named_modules():
        label = named(name, layer)
        if isinstance(layer, torch.jit.ScriptModule):
            raise ExperimentError(
                f"{label} is compiled by TorchScript, so that its parameters cannot be replaced. Give the module from "
                "which it was scripted or traced"
            )
        if isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
            raise ExperimentError(
                f"{label} has momentum=None: its running statistics depend on the number of batches that this process "
                "has seen. Set a number, such as momentum=0.1"
            )
        _check_tensors(label, layer)
    if not any(p.requires_grad for p in module.parameters()):
        frozen = next(module.parameters(), None) is not None
        reason = "all are frozen; set requires_grad of those to train" if frozen else "it has none"
        raise ExperimentError(f"{KEY}: {type(module).__name__} has no parameters to train: {reason}")


def _check_tensors(label: str, layer: nn.Module) -> None:
    for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        if tensor.device.type != "cpu":
            fix = "call to_empty(device='cpu')" if tensor.is_meta else "`runtime.device` sets that of a run"
            raise ExperimentError(f"{label}: {key} is on {tensor.device}. Make the module on the CPU; {fix}")
        if tensor.requires_grad and tensor.dtype != torch.float32:
            fix = "Convert it to torch.float32, or keep complex numbers as torch.view_as_real"
            raise ExperimentError(f"{label}: {key} is {tensor.dtype}. {fix}")


def check_copyable(module: nn.Module) -> None:
    """Reject lazy layers whose buffers torch cannot copy before they have a shape (LazyBatchNorm)."""
    for name, layer in module.named_modules():
        if any(isinstance(b, UninitializedBuffer) for b in layer.buffers(recurse=False)):
            raise ExperimentError(
                f"{named(name, layer)} has lazy buffers, and torch cannot copy them. Call the module once with a batch "
                "of inputs, or name a factory that makes it"
            )


def copied(module: nn.Module) -> nn.Module:
    """Copy a module.

    Raise ExperimentError if it cannot be copied: the layer and the attribute, such as a lock or a weight computed in
    advance.
    """
    return _copied(module, _computed_weights(module))


def copied_around(module: nn.Module) -> nn.Module:
    """Copy all of a module (:func:`copied`) but its parameters, which the copy shares: for calls with others."""
    return _copied(module, _computed_weights(module) | {id(p): p for p in module.parameters()})


def hollowed(module: nn.Module) -> nn.Module:
    """Copy a module for calls with other parameters: zeros without memory for trained ones; share the rest."""
    placeholders = {
        id(p): nn.Parameter(p.new_zeros(()).expand(p.shape)) if p.requires_grad else p for p in module.parameters()
    }
    return _copied(module, _computed_weights(module) | placeholders)


def _copied(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(module, copies)
    except Exception as error:
        for name, layer in module.named_modules():
            for key, value in vars(layer).items():
                if key != "_modules" and not _is_copyable(value):
                    fix = "Create it where it is used"
                    if isinstance(value, Tensor):
                        fix = "Compute it from parameters in `forward`, or by torch.nn.utils.parametrizations"
                    raise ExperimentError(
                        f"{named(name, layer)}: its attribute {key} ({type(value).__name__}) cannot be copied, but "
                        f"each thread trains a copy of the module. {fix}"
                    ) from error
        raise ExperimentError(
            f"{KEY}: {type(module).__name__} cannot be copied ({class_and_text(error)}), but each thread needs a copy"
        ) from error


def _computed_weights(module: nn.Module) -> dict[int, Any]:
    """Return copies by id of the weights that the old ``torch.nn.utils.weight_norm`` recomputes at each call."""
    names = (
        (layer, hook.name)
        for layer in module.modules()
        for hook in layer._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm)
    )
    weights = [getattr(layer, name) for layer, name in names]
    return {id(weight): weight.detach().clone() for weight in weights}


def _is_copyable(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


def is_tied(module: nn.Module, layer: str) -> bool:
    """Return True if a layer shares a parameter with another one."""
    below = {id(p) for p in module.get_submodule(layer).parameters()}
    outside = [other for name, other in module.named_modules() if name != layer and not name.startswith(f"{layer}.")]
    return any(id(p) in below for other in outside for p in other.parameters(recurse=False))


NORMALIZATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Normalization layers, by batch, by instance and by example."""


@cache
def log_once(text: str, level: int = logging.INFO) -> None:
    """Log a text once in this process."""
    logging.getLogger("fedloom.models").log(level, text)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wraps, or the module itself."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


def untrained(module: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by name."""
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


def layout_of(module: nn.Module, buffers: tuple[str, ...], last: str | None, *, local: bool) -> Layout:
    """Return the layout of θ: the body's parameters, the moving tensors, and those of and below the layer ``last``."""
    parameter_shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    head = [name for name in parameter_shapes if last is not None and name.startswith(f"{last}.")]
    others = {**untrained(module), **dict(module.named_buffers())}
    shapes = parameter_shapes | {name: tuple(others[name].shape) for name in buffers}
    order = [*(name for name in parameter_shapes if name not in head), *buffers, *head]
    norms = [name for name, layer in module.named_modules() if isinstance(layer, NORMALIZATION)]
    return Layout(
        tuple((name, shapes[name]) for name in order),
        headless=last is None,
        last=last,
        buffers=buffers,
        local_buffers=local,
        normalization=tuple(name for name in order if name.rpartition(".")[0] in norms),
    )


def theta_of(module: nn.Module, layout: Layout) -> Tensor:
    """Return the module's own trained parameters and moving buffers as θ [d]."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return layout.join({name: tensors[name].detach() for name, _ in layout.entries})


def constants_of(module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Return all tensors of a module outside θ: frozen parameters, and buffers that do not move."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    entries = dict(layout.entries)
    return {name: t.detach() for name, t in tensors.items() if name not in entries}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tensors that several layers share, with the first name of each."""
    first: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    return {name: first[id(t)] for name, t in tensors.items() if first.setdefault(id(t), name) != name}


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a short digest of each tensor: of its type, shape and values."""
    digests = {}
    for name, t in tensors.items():
        digest = hashlib.blake2b(f"{t.dtype} {tuple(t.shape)}".encode(), digest_size=8)
        digest.update(t.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        digests[name] = digest.hexdigest()
    return digests


def running_statistics(module: nn.Module) -> set[str]:
    """Return the names of all buffers of layers that keep running statistics."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _NormBase)]
    return {f"{name}.{key}" if name else key for name, layer in layers for key in layer._buffers}


def batch_layers(module: nn.Module) -> list[str]:
    """Return the names of layers that normalize by the batch in training."""
    return [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]


def without_statistics(module: nn.Module) -> list[str]:
    """Return the names of layers that normalize by the batch even in evaluation, having no running statistics."""
    return [name for name in batch_layers(module) if module.get_submodule(name).running_mean is None]


def warn_of_batches(module: nn.Module) -> None:
    """Warn once that a module's predictions depend on the other examples of a batch."""
    if layers := without_statistics(module):
        log_once(
            f"{type(module).__name__}: layer {layers[0]!r} keeps no running statistics, so predictions depend on the "
            "batch: each client is measured in batches of evaluation.batch_size in the order of its examples, and a "
            "served batch by itself",
            logging.WARNING,
        )
