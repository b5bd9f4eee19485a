"""Tensors of a PyTorch module: trained parameters, tensors that calls in training move, and constants."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy

from fedloom.core.draws import drawing_with
from fedloom.errors import ExperimentError
from fedloom.models.factories import KEY
from fedloom.models.flat import Layout
from fedloom.models.module_call import call_of
from fedloom.models.module_inputs import ModuleInputs, mapped, shapes
from fedloom.models.module_layers import class_and_text, copied
from fedloom.models.module_loss import per_example

NORMALIZATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Normalization layers: batch and instance normalization, and those of each example."""

_log = logging.getLogger("fedloom.models")
_warned: set[str] = set()


def seeded(make: Callable[[], nn.Module], seed: int, x: ModuleInputs) -> nn.Module:
    """Return a new module in training mode, made with torch's generator seeded.

    If its attribute ``loss`` is a criterion of torch, that returns a loss for each example. Lazy layers create their
    parameters in a call in evaluation mode on trial inputs ``x``, from the same generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = uncompiled(make())
        if isinstance(criterion := getattr(module, "loss", None), _Loss):
            per_example(criterion)
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            try:
                with torch.no_grad():
                    call_of(module, x).result(module.eval(), x)
            except Exception as error:
                raise ExperimentError(
                    f"{KEY}: {type(module).__name__} has lazy layers and fails on inputs {shapes(x)}, from which "
                    f"they would take their shapes ({class_and_text(error)})"
                ) from error
        return module.train()


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wraps, or the module itself."""
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found


def moving_tensors(module: nn.Module, x: ModuleInputs) -> tuple[str, ...]:
    """Return the names of the floating-point buffers and frozen parameters that a call in training mode changes.

    The module is called as it is, and with other trained parameters, which also move a teacher that equals its student
    at the start. Calls that fail move nothing: the check of the module reports them with the layer.
    """
    kept = {**untrained(module), **dict(module.named_buffers())}
    moving: set[str] = set()
    for apart in (False, True):
        tried = copied(module).train()
        if apart:
            displace(p for p in tried.parameters() if p.requires_grad)
        try:
            with torch.enable_grad(), drawing_with(0):
                call_of(tried, x).result(tried, x)
        except Exception:  # the check names the layer
            continue
        after = {**untrained(tried), **dict(tried.named_buffers())}
        moving |= {name for name, t in kept.items() if t.is_floating_point() and _has_moved(t, after.get(name))}
    return tuple(name for name in kept if name in moving)


def untrained(module: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by name."""
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


@torch.no_grad()
def displace(parameters: Iterable[Tensor]) -> None:
    """Move trained parameters in place, those at zero too, each by its own distance."""
    generator = torch.Generator().manual_seed(0)
    for p in parameters:
        p.mul_(0.5 + torch.rand(p.shape, generator=generator))
        p.add_(torch.randn(p.shape, generator=generator), alpha=1e-3)


def least_batch(module: nn.Module, x: ModuleInputs) -> int:
    """Return the fewest examples on which a call in training mode succeeds: 2 if it fails for one alone, else 1."""
    if not batch_layers(module):
        return 1
    tried, one = copied(module).train(), mapped(x, lambda t: t[:1])
    try:
        with torch.enable_grad(), drawing_with(0):
            call_of(tried, x).result(tried, one)
    except ValueError:
        return 2
    return 1


def _has_moved(before: Tensor, after: Tensor | None) -> bool:
    return after is not None and after.shape == before.shape and not torch.equal(after, before)


def layout_of(module: nn.Module, buffers: tuple[str, ...], last: str | None, *, local: bool) -> Layout:
    """Return the layout of θ: the body's parameters, the moving tensors, and those of and below the layer ``last``."""
    named = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    head = [name for name in named if last is not None and name.startswith(f"{last}.")]
    others = {**untrained(module), **dict(module.named_buffers())}
    shapes = named | {name: tuple(others[name].shape) for name in buffers}
    order = [*(name for name in named if name not in head), *buffers, *head]
    return Layout(
        tuple((name, shapes[name]) for name in order),
        headless=last is None,
        last=last,
        buffers=buffers,
        local_buffers=local,
        normalization=_of_normalization(module, order),
    )


def _of_normalization(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that belong to normalization layers."""
    norms = [name for name, layer in module.named_modules() if isinstance(layer, NORMALIZATION)]
    return tuple(name for name in names if name.rpartition(".")[0] in norms)


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
    named = module.state_dict(keep_vars=True)
    return {name: first[id(t)] for name, t in named.items() if first.setdefault(id(t), name) != name}


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a short digest of each tensor: of its type, shape and values."""
    found = {}
    for name, t in tensors.items():
        digest = hashlib.blake2b(f"{t.dtype} {tuple(t.shape)}".encode(), digest_size=8)
        digest.update(t.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
    return found


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
    """Warn, once for each kind of module, that its predictions depend on the other examples of a batch."""
    kind = type(module).__name__
    if (layers := without_statistics(module)) and kind not in _warned:
        _warned.add(kind)
        _log.warning(
            "%s: layer %r keeps no running statistics, so predictions depend on the batch: each client is measured in "
            "batches of evaluation.batch_size in the order of its examples, and a served batch by itself",
            kind,
            layers[0],
        )


@cache
def warn_of_examples(kind: str) -> None:
    """Warn, once for each kind of module, that each gradient of a single example takes a separate call."""
    _log.warning(
        "%s: torch.func.vmap cannot run it for single examples, so their gradients (federation.privacy.of: examples) "
        "are computed one by one",
        kind,
    )
