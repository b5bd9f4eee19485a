"""Checks of a module of torch before anything runs: one training step and predictions, as a run makes them.

What a run could not do, or could not repeat, is refused here, with the layer and the fix.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fedloom.errors import ExperimentError, raised_at
from fedloom.models.flat import Layout
from fedloom.models.module_function import ModuleFunction

KEY = "model.factory"

ROWS = 3
"""Inputs by which a module is tried."""

TOLERANCE = 1e-2
"""Relative difference up to which results of other kernels, or of another number of rows, are equal."""

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of a module that torch itself keeps."""

_NESTED = 4
"""Levels of lists and dicts at which attributes are compared."""


def named(name: str, layer: nn.Module) -> str:
    """Name a layer in an error; the module itself has no name."""
    return f"{KEY}: layer {name!r} ({type(layer).__name__})" if name else f"{KEY}: {type(layer).__name__}"


# --- as it stands -----------------------------------------------------------------------------------------------------


def check_layers(module: nn.Module) -> None:
    """Refuse layers that are not functions of parameters and inputs.

    Raises
    ------
    ExperimentError
        If there are any, or none that is trained.
    """
    for name, layer in module.named_modules():
        where = named(name, layer)
        if any(is_lazy(p) for p in layer.parameters(recurse=False)):
            raise ExperimentError(
                f"{where} makes its parameters at run time; allowed: layers that have theirs from the start"
            )
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _NormBase) and layer.track_running_stats):
            raise ExperimentError(
                f"{where} normalizes by the batch and keeps running statistics; allowed: GroupNorm or LayerNorm"
            )
        rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ExperimentError(
                f"{where} drops at random (p = {rate:g}), and no run could be repeated; allowed: p = 0"
            )
        _check_tensors(where, layer)
    if next(module.parameters(), None) is None:
        raise ExperimentError(f"{KEY}: {type(module).__name__} has no parameters; allowed: some to train")


def _check_tensors(where: str, layer: nn.Module) -> None:
    for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        if tensor.is_meta:
            raise ExperimentError(
                f"{where}: {key} is on the meta device, where tensors have no values. Make the module on the CPU, or "
                "call to_empty(device='cpu') and initialize it"
            )
        if tensor.device.type != "cpu":
            raise ExperimentError(
                f"{where}: {key} is on {tensor.device}. Make the module on the CPU; `runtime.device` says where a run "
                "computes"
            )
    for key, p in layer.named_parameters(recurse=False):
        if not p.requires_grad:
            raise ExperimentError(f"{where}: {key} is frozen; allowed: parameters that are trained, and buffers")
        if p.dtype != torch.float32:
            raise ExperimentError(f"{where}: {key} is {p.dtype}; allowed: torch.float32")


def copied(module: nn.Module) -> nn.Module:
    """Copy a module.

    Raises
    ------
    ExperimentError
        If it cannot be copied: the layer and its attribute, such as a lock, or a weight that is computed beforehand.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        for name, layer in module.named_modules():
            for key, value in vars(layer).items():
                if key != "_modules" and not _is_copyable(value):
                    raise ExperimentError(f"{named(name, layer)}: {_why_not(key, value)}") from error
        raise ExperimentError(
            f"{KEY}: {type(module).__name__} cannot be copied ({_said(error)}), and each thread trains a copy of it"
        ) from error


def _is_copyable(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


def _why_not(key: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return (
            f"its {key} was computed from parameters when the module was made, so that training would not change it. "
            "Compute it in `forward`, or by torch.nn.utils.parametrizations (weight_norm, spectral_norm)"
        )
    return (
        f"its attribute {key} ({type(value).__name__}) cannot be copied, and each thread trains a copy of the module. "
        "Keep it outside of the module, or make it where it is used"
    )


# --- as it runs -------------------------------------------------------------------------------------------------------


def tried_layout(module: nn.Module, layout: Layout, x: Tensor, classes: int) -> Layout:
    """Try a module as a run calls it, and return its layout, with the memory format that it runs with.

    Parameters
    ----------
    layout
        Of its parameters.
    x
        ``[ROWS, *input_shape]``.

    Raises
    ------
    ExperimentError
        If it fails, gives no logits, draws random numbers, keeps a state, predicts one input by others, or if its
        gradient is not the one that torch takes of the module itself.
    """
    trial = _Trial(module, layout, x, torch.arange(len(x)) % classes, classes)
    with torch.random.fork_rng(devices=[]):
        trial.check_calls(training=True)
        logits = trial.check_calls(training=False)
        kernels = any(len(shape) == 4 for _, shape in layout.entries)
        expected = trial.own_gradient()
        if kernels and not trial.runs_channels_last(expected, logits):
            layout = replace(layout, channels_last=False)
        if not kernels or not layout.channels_last:
            replace(trial, layout=layout).check_gradient(expected)
    return layout


@dataclass(frozen=True, eq=False)
class _Trial:
    """A module and inputs by which it is tried."""

    module: nn.Module
    layout: Layout
    x: Tensor
    y: Tensor
    classes: int

    @property
    def what(self) -> str:
        return f"{KEY}: {type(self.module).__name__}"

    @cached_property
    def theta(self) -> Tensor:
        """The module's parameters as θ."""
        return self.layout.join({name: p.detach() for name, p in self.module.named_parameters()})

    @cached_property
    def elsewhere(self) -> Tensor:
        """Another θ, each entry with a factor of its own: what is taken from the module's own parameters is found."""
        factors = torch.rand(self.layout.size, generator=torch.Generator().manual_seed(0))
        return self.theta * (0.5 + factors)

    def check_calls(self, *, training: bool) -> Tensor:
        """Call the module in one mode, with an input alone, and with the same inputs again; return its outputs."""
        mode = "in training mode" if training else "in evaluation mode"
        function = ModuleFunction(copied(self.module).train(training))
        parameters = replace(self.layout, channels_last=False).leaves(self.theta, requires_grad=training)

        def call(x: Tensor) -> Tensor:
            with torch.set_grad_enabled(training), _at_layer(function.module, f"for inputs {list(x.shape)} {mode}"):
                return function(parameters, x)

        buffers = {name: b.clone() for name, b in function.module.named_buffers()}
        names = {name for name, _ in function.module.named_parameters()}
        with _no_draws(function.module, mode):
            first = call(self.x)
        self._check_outputs(first, len(self.x))
        self._check_tensors_kept(function.module, names, buffers, mode)
        before = _attributes(function.module)
        with _no_draws(function.module, mode, watch=True):
            alone = call(self.x[1:2])
        self._check_outputs(alone, 1)
        if not torch.equal(first, call(self.x)):
            raise ExperimentError(
                f"{self.what} gives other outputs for the same inputs {mode}; allowed: nothing drawn at random, and "
                "nothing kept from one call to the next"
            )
        self._check_attributes_kept(function.module, before, mode)
        if not _near(alone, first[1:2]):
            raise ExperimentError(
                f"{self.what} gives other outputs for an input alone than for the same input beside others {mode}, so "
                "that a prediction would depend on evaluation.batch_size. Normalize each example by itself"
            )
        if not training and self._are_probabilities(first):
            raise ExperimentError(
                f"{self.what} gives probabilities, and the loss takes a softmax of its own. Return logits: leave out "
                "the last softmax"
            )

        return first

    def own_gradient(self) -> dict[str, Tensor]:
        """Return the gradient that torch takes of the module itself, elsewhere than at its own parameters."""
        function, there = self._in_training(), self.layout.split(self.elsewhere)
        own = dict(function.module.named_parameters())
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(there[name])
        return self._gradients(function, own)

    def runs_channels_last(self, expected: Mapping[str, Tensor], logits: Tensor) -> bool:
        """Return True if a training step and predictions are right with channels-last kernels."""
        try:
            self.check_gradient(expected)
            with torch.no_grad():
                predicted = ModuleFunction(copied(self.module).eval())(self.layout.leaves(self.theta), self.x)
        except Exception:  # it runs with other kernels, or is refused with them
            return False
        return _near(predicted, logits)

    def check_gradient(self, expected: Mapping[str, Tensor]) -> None:
        """Make one training step as training makes it, and compare its gradient with that of the module itself."""
        function = self._in_training()
        found = self._gradients(function, self.layout.leaves(self.elsewhere, requires_grad=True))
        for name, there in expected.items():
            if not _near(found[name], there):
                layer = name.rpartition(".")[0]
                raise ExperimentError(
                    f"{named(layer, self.module.get_submodule(layer))}: the gradient of {name} is not that of the "
                    "module itself, which keeps its parameters somewhere else, too: in an attribute or a list, or by "
                    "torch.utils.checkpoint. Take parameters from their layers in `forward`, without checkpoints"
                )

    def _in_training(self) -> ModuleFunction:
        return ModuleFunction(copied(self.module).train())

    def _gradients(self, function: ModuleFunction, at: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the mean loss to all parameters; zeros for those that the module does not use."""
        mode, module = "in training mode", function.module
        with torch.enable_grad(), _no_draws(module, mode), _at_layer(module, "in a training step"):
            losses = self._losses(function, at, function(at, self.x), self.y)
            if not losses.requires_grad:
                raise ExperimentError(
                    f"{self.what}: no parameter has a gradient {mode}. Compute the outputs from parameters, without "
                    "torch.no_grad() or detach()"
                )
            gradients = torch.autograd.grad(losses.mean(), list(at.values()), materialize_grads=True)
        return dict(zip(at, gradients, strict=True))

    def _losses(self, function: ModuleFunction, leaves: Mapping[str, Tensor], logits: Tensor, y: Tensor) -> Tensor:
        if not function.own_loss:
            return _cross_entropy(logits, y)
        try:
            losses = function.loss(leaves, logits, y)
        except Exception as error:
            raise ExperimentError(
                f"{self.what}.loss(logits, y) failed ({type(error).__name__}: {error}); allowed: a loss of each example"
            ) from error
        if not isinstance(losses, Tensor) or losses.shape != (len(y),):
            found = f"{list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ExperimentError(
                f"{self.what}.loss gives {found} for {len(y)} examples; allowed: one each, [{len(y)}]"
            )
        return losses

    def _check_outputs(self, outputs: Any, rows: int) -> None:
        if isinstance(outputs, Tensor) and outputs.shape == (rows, self.classes) and outputs.is_floating_point():
            return
        kind = isinstance(outputs, Tensor)
        found = f"{outputs.dtype} {list(outputs.shape)}" if kind else f"a {type(outputs).__name__}"
        raise ExperimentError(f"{self.what} gives {found} for {rows} inputs; allowed: logits, [{rows}, {self.classes}]")

    def _check_tensors_kept(self, module: nn.Module, names: set[str], buffers: Mapping[str, Tensor], mode: str) -> None:
        """Refuse parameters that a call has made, and buffers that it has changed."""
        made = sorted({name for name, _ in module.named_parameters()} - names)
        if made:
            layer = made[0].rpartition(".")[0]
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} makes its parameters at run time ({made[0]}); allowed: "
                "layers that have theirs from the start"
            )
        for name, b in module.named_buffers():
            if name not in buffers or not torch.equal(buffers[name], b):
                layer = name.rpartition(".")[0]
                raise ExperimentError(
                    f"{named(layer, module.get_submodule(layer))} changes its buffer {name} when it is called {mode}; "
                    "allowed: constants. Leave the layer out, or replace it by one without a running state"
                )

    def _check_attributes_kept(self, module: nn.Module, before: Mapping[tuple[str, str], Any], mode: str) -> None:
        """Refuse a state in Python: attributes that change from call to call with the same inputs."""
        after = _attributes(module)
        changed = [place for place in after if after[place] != before.get(place)]
        if changed:
            layer, key = changed[0]
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} changes its attribute {key} each time it is called "
                f"{mode}, so that results may depend on how often, and on evaluation.batch_size. Keep no state in a "
                "module: compute it from the inputs, or leave it out"
            )

    def _are_probabilities(self, outputs: Tensor) -> bool:
        summed = bool(((outputs.sum(1) - 1).abs() < 1e-4).all())
        return self.classes > 1 and summed and bool((outputs >= 0).all())


@contextmanager
def _no_draws(module: nn.Module, mode: str, *, watch: bool = False) -> Iterator[None]:
    """Refuse random numbers, however seldom they matter: by the generators that are used, which are put back.

    ``watch`` finds other generators than those that all code shares, too; some layers have another kernel then.
    """
    given = _GivenGenerators()
    before = _generators() | {given.name: given.used}
    drew: list[tuple[str, nn.Module]] = []  # the innermost first, as it returns first
    untouched: list[bool] = []

    def used() -> list[str]:
        now = _generators() | {given.name: given.used}
        return [name for name, state in now.items() if state != before[name]]

    def leave(name: str, layer: nn.Module) -> None:
        if untouched.pop() and used():
            drew.append((name, layer))

    with _hooks(module, leave, lambda name, layer: untouched.append(not used())):
        try:
            with given if watch else nullcontext():
                yield
        finally:
            found = used()
            random.setstate(before["Python"])
            np.random.set_state(before["numpy"])  # noqa: NPY002  # it is the modules that may use it
            torch.default_generator.set_state(torch.frombuffer(bytearray(before["torch"]), dtype=torch.uint8))
    if found:
        raise ExperimentError(
            f"{named(*(drew or [('', module)])[0])} has other outputs for the same inputs in another run, since it "
            f"draws random numbers {mode} (by {found[0]}). Leave it out, or set its probability to 0"
        )


def _generators() -> dict[str, Any]:
    """States of the generators that all code of a process shares."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": (name, tuple(np.asarray(keys).tolist()), *rest),
        "Python": random.getstate(),
    }


class _GivenGenerators(TorchFunctionMode):
    """Notes whether functions of torch are given a generator of their own."""

    name = "a generator of its own"

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        self.used = self.used or (kwargs or {}).get("generator") is not None
        return func(*args, **(kwargs or {}))


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def _near(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal but for rounding, by the norm of their difference."""
    a, b = (t.detach().double().nan_to_num(posinf=0.0, neginf=0.0) for t in (a, b))
    return bool((a - b).norm() <= TOLERANCE * b.norm() + 1e-9)


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Values of the attributes of all layers that can be compared, by layer and attribute."""
    return {
        (name, key): _comparable(value, _NESTED)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in _INTERNAL
    }


def _comparable(value: Any, levels: int) -> Any:
    """A value that is equal to another exactly if they are the same; None for what cannot be compared."""
    found: Any = None
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        found = str(value.dtype), tuple(value.shape), content.numpy().tobytes()
    elif isinstance(value, np.ndarray):
        found = str(value.dtype), value.shape, value.tobytes()
    elif isinstance(value, torch.Generator):
        found = value.get_state().numpy().tobytes()
    elif isinstance(value, np.random.Generator):
        found = str(value.bit_generator.state)
    elif isinstance(value, random.Random):
        found = value.getstate()
    elif isinstance(value, dict) and levels:
        found = {str(key): _comparable(each, levels - 1) for key, each in value.items()}
    elif isinstance(value, list | tuple) and levels:
        found = [_comparable(each, levels - 1) for each in value]
    elif isinstance(value, set | frozenset):
        found = sorted(map(repr, value))
    elif isinstance(value, int | float | str | bytes):
        found = repr(value)
    return found


@contextmanager
def _at_layer(module: nn.Module, doing: str) -> Iterator[None]:
    """Refuse a module that fails, by the innermost of its layers that was at work, and the line of its code."""
    at: list[tuple[str, nn.Module]] = []
    with _hooks(module, lambda *_: at.pop() and None, lambda name, layer: at.append((name, layer))):
        try:
            yield
        except ExperimentError:
            raise
        except Exception as error:
            name, layer = at[-1] if at else ("", module)
            raise ExperimentError(f"{named(name, layer)} fails {doing} ({_said(error)}){_line(error)}") from error


@contextmanager
def _hooks(
    module: nn.Module,
    after: Callable[[str, nn.Module], None],
    before: Callable[[str, nn.Module], None] = lambda name, layer: None,
) -> Iterator[None]:
    """Call functions with name and layer before and after each layer is called."""
    hooks: list[Any] = []
    for name, layer in module.named_modules():
        hooks.append(layer.register_forward_pre_hook(lambda layer, _, name=name: before(name, layer)))
        hooks.append(layer.register_forward_hook(lambda layer, *_, name=name: after(name, layer)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _said(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said}"


def _line(error: Exception) -> str:
    """The line of the module's code that led to an error."""
    at = raised_at(error)
    return (
        ""
        if at is None or "fedloom" in Path(at.filename).parts
        else f", at {Path(at.filename).name}, line {at.lineno}: {at.line}"
    )


def is_tied(module: nn.Module, layer: str) -> bool:
    """Return True if a layer shares a parameter with another one."""
    below = {id(p) for p in module.get_submodule(layer).parameters()}
    outside = [other for name, other in module.named_modules() if name != layer and not name.startswith(f"{layer}.")]
    return any(id(p) in below for other in outside for p in other.parameters(recurse=False))
