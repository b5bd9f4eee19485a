"""Facts about a module that calls with trial inputs reveal: moving tensors, head, sizes of tables, memory format."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fedloom.core.draws import drawing_with
from fedloom.errors import ExperimentError
from fedloom.models.factories import KEY
from fedloom.models.module_call import (
    InputDescription,
    InputShape,
    ModuleCall,
    ModuleInputs,
    call_of,
    descriptions,
    shapes,
    trial_inputs,
)
from fedloom.models.module_function import per_example
from fedloom.models.module_layers import (
    batch_layers,
    class_and_text,
    copied,
    hooks,
    is_tied,
    named,
    uncompiled,
    untrained,
)


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


def moving_tensors(module: nn.Module, x: ModuleInputs) -> tuple[str, ...]:
    """Return the names of the floating-point buffers and frozen parameters that a call in training mode changes.

    The module is called as it is, and with other trained parameters, which also move a teacher that equals its student
    at the start. Calls that fail move nothing: the check of the module reports them with the layer.
    """
    tensors = {**untrained(module), **dict(module.named_buffers())}
    names: set[str] = set()
    for apart in (False, True):
        copy = copied(module).train()
        if apart:
            displace(p for p in copy.parameters() if p.requires_grad)
        try:
            with torch.enable_grad(), drawing_with(0):
                call_of(copy, x).result(copy, x)
        except Exception:  # the check names the layer
            continue
        tensors_after = {**untrained(copy), **dict(copy.named_buffers())}
        floating = {name: t for name, t in tensors.items() if t.is_floating_point() and name in tensors_after}
        names |= {
            n for n, t in floating.items() if tensors_after[n].shape == t.shape and not torch.equal(t, tensors_after[n])
        }
    return tuple(name for name in tensors if name in names)


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
    copy, one = copied(module).train(), tree_map(lambda t: t[:1], x)
    try:
        with torch.enable_grad(), drawing_with(0):
            call_of(copy, x).result(copy, one)
    except ValueError:
        return 2
    return 1


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
    module: nn.Module, call: ModuleCall, x: ModuleInputs, others: ModuleInputs, name: str | None
) -> Head | None:
    """Return the head of a module; None if it has none and none was requested.

    It is the last linear layer that is called once and whose outputs are the module's; or the layer ``name``, if the
    module's outputs follow from its outputs. That is tested by changing all inputs and parameters, but not the layer's
    outputs: those of the module must stay the same.

    Raise ExperimentError if the requested layer cannot be the head.

    Parameters
    ----------
    x, others
        Trial inputs, and others of the same shape.
    name
        Key ``model.head``.
    """
    module = copied(module).eval()
    _perturb(module)  # else a factor whose initial value is 1 would go unnoticed
    layers = {each: layer for each, layer in module.named_modules() if each and isinstance(layer, nn.Linear)}
    if name is not None and name not in layers:
        raise ExperimentError(
            f"model.head: {name!r} is not a linear layer; linear layers: {', '.join(layers) or 'none'}"
        )
    calls, outputs = _linear_calls(module, call, layers, x)
    head = None
    for each in reversed(layers) if name is None else [name]:
        if head is None and len(calls[each]) == 1:
            features, head_output = calls[each][0]
            fits = head_output.shape in (outputs.shape, (*outputs.shape, 1))
            if fits and torch.equal(head_output.reshape(outputs.shape), outputs):
                is_shaped = bool(call.binary or call.probabilities or call.exponential)
                head = Head(each, features.dim() == 2, gives_logits=not is_shaped)
    if name is None:
        return head
    if head is None and len(calls[name]) == 1:
        features, head_output = calls[name][0]
        _perturb(module)
        hook = layers[name].register_forward_hook(lambda *_: head_output)
        if torch.equal(_linear_calls(module, call, {}, others)[1], outputs):
            head = Head(name, features.dim() == 2, gives_logits=False)
        hook.remove()
    if head is None:
        raise ExperimentError(
            f"model.head: the logits do not follow from the outputs of {name!r} alone; name the last layer "
            "that has parameters"
        )
    if is_tied(module, name):
        raise ExperimentError(
            f"model.head: layer {name!r} shares a parameter with another layer. Name a layer with parameters of its "
            "own, or untie them"
        )
    return head


def _perturb(module: nn.Module) -> None:
    """Change every trained parameter of a module, in place, so that shared ones stay shared."""
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.mul_(1.25).add_(0.01)


def _linear_calls(
    module: nn.Module, call: ModuleCall, layers: Mapping[str, nn.Module], x: ModuleInputs
) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], Tensor]:
    """Return input and output of each call of some layers, and the module's outputs, before they are shaped."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
    handles = [
        layer.register_forward_hook(lambda _, inputs, output, name=name: calls[name].append((inputs[0], output)))
        for name, layer in layers.items()
    ]
    with torch.no_grad(), drawing_with(0):
        outputs = call.read(module, call.result(module, x))
    for hook in handles:
        hook.remove()
    return calls, outputs


COLUMNS = 256
"""Largest number of columns that are tried one by one."""


def within_tables(module: nn.Module, call: ModuleCall, *trials: ModuleInputs) -> list[ModuleInputs]:
    """Return trial inputs whose integers ``[b, columns]`` do not exceed the table in which each column is looked up.

    The data are described by the largest integer of all columns, so at least one column must accept it. Otherwise the
    inputs stay unchanged, and the check rejects the module at the layer that fails.
    """
    if not any(_is_beyond(module, call, trial) for trial in trials):
        return list(trials)
    x = trials[0]
    names = [""] if isinstance(x, Tensor) else list(x)
    limits = {name: limit for name in names if (limit := _limits(module, call, x, name)) is not None}
    return [_limited(trial, limits) for trial in trials]


def _limits(module: nn.Module, call: ModuleCall, x: ModuleInputs, name: str) -> Tensor | None:
    """Return the largest integer that each column accepts while the others are 0; None if none accepts the largest."""
    column = x if isinstance(x, Tensor) else x[name]
    if column.dtype != torch.int64 or column.dim() != 2 or column.shape[1] > COLUMNS:
        return None
    high = int(column.max())
    limits = torch.zeros(column.shape[1], dtype=torch.int64)
    for j in range(column.shape[1]):

        def is_beyond(value: int, j: int = j) -> bool:
            zeros = tree_map(lambda t: torch.zeros_like(t) if t.dtype == torch.int64 else t, x)
            (zeros if isinstance(zeros, Tensor) else zeros[name])[:, j] = value
            return _is_beyond(module, call, zeros)

        limits[j] = max(bisect_left(range(high), True, key=is_beyond) - 1, 0) if is_beyond(high) else high
    return limits if int(limits.max()) == high else None


def _limited(x: ModuleInputs, limits: dict[str, Tensor]) -> ModuleInputs:
    if isinstance(x, Tensor):
        return torch.minimum(x, limits[""]) if "" in limits else x
    return {name: torch.minimum(t, limits[name]) if name in limits else t for name, t in x.items()}


@torch.no_grad()
def _is_beyond(module: nn.Module, call: ModuleCall, x: ModuleInputs) -> bool:
    """Return True if the module looks up an integer that a table does not have."""
    try:
        call.result(module, x)
    except IndexError:
        return True
    except Exception:  # the check names the layer
        return False
    return False


KERNEL_ENTRIES = 32
"""Kernel entries for each output of the convolutions of one example, up to which channels-last kernels are faster.

Every call reorders channels-last kernels, which outweighs the gain where kernels are large and images small: a ResNet18
with 7x7 kernels at its entry has 200 for images of 32x32 (1.2 times the time) and 50 for 64x64 (as fast), and a
VGG of 4 blocks has 13 (0.8 times the time). See docs/models.md.
"""


class ConvolutionSizes:
    """Sizes of the kernels and of the outputs of a module's convolutions in a call with trial inputs.

    Unlike times, they depend only on the module and the shape of its inputs, so all processes of a run choose the same
    memory format, and get the same bits.
    """

    def __init__(self) -> None:
        self._kernels = self._outputs = 0
        self._by_instance = False

    @contextmanager
    def noted(self, module: nn.Module) -> Iterator[None]:
        """Note the sizes of all convolutions that are called within the block."""
        self._by_instance = any(isinstance(layer, _InstanceNorm) for layer in module.modules())
        convolutions = [layer for layer in module.modules() if isinstance(layer, _ConvNd)]
        handles = [layer.register_forward_hook(self._note) for layer in convolutions]
        try:
            yield
        finally:
            for hook in handles:
                hook.remove()

    def _note(self, layer: Any, inputs: Any, outputs: Any) -> None:
        del inputs
        if isinstance(outputs, Tensor) and layer.weight.dim() == 4:
            self._kernels += layer.weight.numel()
            self._outputs += outputs.numel() // max(len(outputs), 1)

    @property
    def gains_from_channels_last(self) -> bool:
        """True if channels-last kernels are faster; instance normalization would change the format back each time."""
        return not self._by_instance and self._kernels <= KERNEL_ENTRIES * self._outputs


PROBES = (5.0, 6.0, 7.0)
"""Extreme standardized features, at which truncated codes differ from each other, but indices of buckets are equal."""


LOOKUPS = frozenset(
    {"__getitem__", "embedding", "embedding_bag", "gather", "index_select", "one_hot", "take", "take_along_dim"}
)
"""Functions of torch that look values up by integers."""


def check_codes(make: Callable[[], nn.Module], input_shape: InputShape, kind: str = "features") -> None:
    """Reject a module that looks up values by codes that it truncates from features.

    Raise ExperimentError if there is such a lookup; the error names the layer.

    Parameters
    ----------
    make
        Factory of the module.
    input_shape
        Shape of the input, or the descriptions of named inputs.
    kind
        Kind of a single input.
    """
    input_descriptions = descriptions(input_shape, kind, outputs=2)
    if not any(each.kind == "features" for each in input_descriptions.values()):
        return
    with torch.random.fork_rng(devices=[]):
        module = make().eval()
        seen = [_lookups(module, input_descriptions, value) for value in PROBES]
    for (layer, first), *others in zip(*seen, strict=False):
        if any(not torch.equal(first, other) for _, other in others):
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} looks up codes that it truncates from the features, but "
                "features are standardized as measurements, so the codes would differ from those in the data",
                hint="pack the codes as integers, or give the network a column of 0 and 1 for each category",
            )


def _lookups(module: nn.Module, descriptions: Mapping[str, InputDescription], value: float) -> list[tuple[str, Tensor]]:
    """Return the layer and the integers of each lookup, for features that consist of one value."""
    x = trial_inputs(descriptions, 0, rows=2)
    if isinstance(x, Tensor):
        x = torch.full_like(x, value)
    else:
        x = {name: torch.full_like(t, value) if descriptions[name].kind == "features" else t for name, t in x.items()}
    layers: list[str] = []
    mode = _Lookups(layers)
    inside = hooks(module, lambda name, *_: layers.remove(name), lambda name, layer: layers.append(name))
    with inside, mode, torch.no_grad(), suppress(Exception):  # expected: integers out of range
        call_of(module, x).result(module, x)
    return mode.found


class _Lookups(TorchFunctionMode):
    """Mode that records the integers with which functions of torch look values up.

    Parameters
    ----------
    layers
        Names of the layers that are being called, the innermost last.
    """

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.found: list[tuple[str, Tensor]] = []
        self._layers = layers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in LOOKUPS:
            layer = self._layers[-1] if self._layers else ""
            tensors = (t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor))
            integers = [
                t for t in tensors if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool
            ]
            self.found += [(layer, t.clone()) for t in integers]
        return func(*args, **(kwargs or {}))


class _Walk:
    """Traversal of all parts of an object in a fixed order, by the protocol that copies objects.

    Classes and functions are kept as objects, because a Python module that is reloaded has others of the same names.
    """

    def __init__(self) -> None:
        self.digest = hashlib.blake2b()
        self.code: list[object] = []
        self._places: dict[int, int] = {}
        self._alive: list[object] = []  # so that no two values share an id

    def add(self, value: Any) -> None:
        """Add a value and all of its parts; a value met before is added as a reference.

        Raise TypeError if the content of a part cannot be read, as that of a lock or of a function's enclosed
        variables.
        """
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._note(f"{type(value).__name__} {value!r}")
        elif isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType):
            if isinstance(value, FunctionType) and "<" in value.__qualname__:
                raise TypeError("enclosed variables may change")
            self._note("code")
            self.code.append(value)
        elif id(value) in self._places:
            self._note(f"again {self._places[id(value)]}")
        else:
            self._places[id(value)] = len(self._places)
            self._alive.append(value)
            self._add_parts(value)

    def _add_parts(self, value: Any) -> None:
        self.add(type(value))
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            self._note(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}")
            self.digest.update(content.data)
            return
        parts = value if isinstance(value, tuple | str) else value.__reduce_ex__(4)
        self._note(str(len(parts)))
        for part in (parts,) if isinstance(parts, str) else parts:
            self.add(tuple(part) if isinstance(part, Iterator) else part)

    def _note(self, text: str) -> None:
        self.digest.update(f"{len(text)}:{text}".encode())


def identity_of(module: nn.Module, *others: object) -> Hashable | None:
    """Return a key that is equal for modules of the same code with equal tensors and attributes, and equal ``others``.

    It is None if the content of an attribute cannot be read, such as that of a lock.
    """
    walk = _Walk()
    try:
        walk.add((module, *others))
    except Exception:  # code of the module may raise anything; the module is then checked again each time
        return None
    return walk.digest.digest(), tuple(walk.code)
