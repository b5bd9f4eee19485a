"""Checks of a PyTorch module before a run: one training step and predictions, as in a run.

Modules that a run could not use or reproduce are rejected here, with the layer and the fix.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.errors import ExperimentError, raised_at
from fedloom.models.factories import KEY
from fedloom.models.flat import Layout, Leaves
from fedloom.models.module_draws import NumpyGenerators, collection_paused, no_draws
from fedloom.models.module_function import ModuleFunction
from fedloom.models.module_layers import copied, hooks, named, said
from fedloom.models.module_state import batch_layers, theta_of, without_statistics

ROWS = 3
"""Number of trial inputs."""

TOLERANCE = 1e-2
"""Relative tolerance between results of different kernels or different numbers of rows."""

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of a module that torch manages."""

_NESTED = 4
"""Nesting of lists and dicts up to which attributes are compared."""


def tried_layout(module: nn.Module, layout: Layout, x: Tensor, classes: int) -> Layout:
    """Try a module as a run calls it, and return its layout with the memory format to use.

    Parameters
    ----------
    layout
        Layout of its parameters.
    x
        ``[ROWS, *input_shape]``.

    Raises
    ------
    ExperimentError
        If it fails, returns no logits, draws random numbers, keeps a state, lets predictions depend on other inputs, or
        if its gradient differs from torch's gradient of the module itself.
    """
    trial = _Trial(module, layout, x, torch.arange(len(x)) % classes, classes)
    with torch.random.fork_rng(devices=[]), collection_paused():
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
    """Module with the inputs on which it is tried."""

    module: nn.Module
    layout: Layout
    x: Tensor
    y: Tensor
    classes: int
    generators: NumpyGenerators = field(default_factory=NumpyGenerators)

    @property
    def what(self) -> str:
        return f"{KEY}: {type(self.module).__name__}"

    @cached_property
    def theta(self) -> Tensor:
        """The module's trained parameters and moving buffers as θ."""
        return theta_of(self.module, self.layout)

    @cached_property
    def elsewhere(self) -> Tensor:
        """Another θ, each entry scaled by its own factor, which reveals use of the module's original parameters."""
        factors = torch.rand(self.layout.size, generator=torch.Generator().manual_seed(0))
        return self.theta * (0.5 + factors)

    def check_calls(self, *, training: bool) -> Tensor:
        """Call the module in one mode, also with a single input and again with the same inputs; return its outputs."""
        mode = "in training mode" if training else "in evaluation mode"
        function = self._function(training=training)
        plain = replace(self.layout, channels_last=False)
        moved: list[Tensor] = []

        def call(x: Tensor) -> Tensor:
            parameters = plain.divided(plain.leaves(self.theta, requires_grad=training))  # fresh buffers
            with torch.set_grad_enabled(training), _at_layer(function.module, f"for inputs {list(x.shape)} {mode}"):
                outputs = function(parameters, x)
            moved[:] = [plain.join(parameters).detach()]
            return outputs

        buffers = {name: b.clone() for name, b in function.module.named_buffers()}
        names = {name for name, _ in function.module.named_parameters()}
        with no_draws(function.module, mode, self.generators):
            first = call(self.x)
        self._check_outputs(first, len(self.x))
        self._check_tensors_kept(function.module, names, buffers, mode, moved[0])
        once, before = moved[0], _attributes(function.module)
        by_batch = self.layout.buffers or batch_layers(self.module) if training else without_statistics(self.module)
        with no_draws(function.module, mode, self.generators, watch=True):
            alone = call(self.x if by_batch else self.x[1:2])
        self._check_outputs(alone, len(self.x) if by_batch else 1)
        if not torch.equal(first, call(self.x)) or not torch.equal(once, moved[0]):
            raise ExperimentError(
                f"{self.what} gives different outputs for the same inputs {mode}. Draw nothing at random, and keep no "
                "state between calls"
            )
        self._check_attributes_kept(function.module, before, mode)
        function = self._function(training=training)
        call(self.x / 2 + 0.25 if self.x.is_floating_point() else 1 - self.x)
        if not torch.equal(first, call(self.x)):
            raise ExperimentError(
                f"{self.what} gives different outputs {mode} after a call with other inputs: it keeps state from them, "
                "which differs between processes. Compute it from the inputs at each call"
            )
        if not by_batch and not _near(alone, first[1:2]):
            raise ExperimentError(
                f"{self.what} gives different outputs for a single input and for the same input in a batch {mode}, so "
                "that a prediction would depend on evaluation.batch_size. Normalize each example separately"
            )
        if not training and self._are_probabilities(first):
            raise ExperimentError(
                f"{self.what} gives probabilities, but the loss applies a softmax. Return logits: remove the last "
                "softmax"
            )

        return first

    def own_gradient(self) -> dict[str, Tensor]:
        """Return torch's gradient of the module itself, away from its initial parameters."""
        function, there = self._function(training=True), self.layout.split(self.elsewhere)
        own = {name: p for name, p in function.module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(there[name])
        return self._gradients(function, Leaves(own, {name: there[name].clone() for name in self.layout.buffers}))

    def runs_channels_last(self, expected: Mapping[str, Tensor], logits: Tensor) -> bool:
        """Return True if a training step and predictions are correct with channels-last kernels."""
        try:
            self.check_gradient(expected)
            with torch.no_grad():
                predicted = self._function(training=False)(self.layout.leaves(self.theta), self.x)
        except Exception:  # use contiguous kernels, or reject the module with them
            return False
        return _near(predicted, logits)

    def check_gradient(self, expected: Mapping[str, Tensor]) -> None:
        """Make one training step, and compare its gradient with that of the module itself."""
        leaves = self.layout.divided(self.layout.leaves(self.elsewhere, requires_grad=True))
        found = self._gradients(self._function(training=True), leaves)
        for name, there in expected.items():
            if not _near(found[name], there):
                layer = name.rpartition(".")[0]
                raise ExperimentError(
                    f"{named(layer, self.module.get_submodule(layer))}: the gradient of {name} is not that of the "
                    "module itself, which also keeps its parameters elsewhere: in an attribute or a list, or by "
                    "torch.utils.checkpoint. Take parameters from their layers in `forward`, without checkpoints"
                )

    def _function(self, *, training: bool) -> ModuleFunction:
        return ModuleFunction(copied(self.module).train(training), self.layout.buffers)

    def _gradients(self, function: ModuleFunction, at: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the mean loss for all parameters; zeros for unused ones."""
        mode, module = "in training mode", function.module
        with torch.enable_grad(), no_draws(module, mode, self.generators), _at_layer(module, "in a training step"):
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
                f"{self.what}.loss(logits, y) must return a loss per example ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(losses, Tensor) or losses.shape != (len(y),):
            found = f"{list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ExperimentError(
                f"{self.what}.loss must give a loss of each of {len(y)} examples, [{len(y)}] (got {found})"
            )
        return losses

    def _check_outputs(self, outputs: Any, rows: int) -> None:
        if isinstance(outputs, Tensor) and outputs.shape == (rows, self.classes) and outputs.is_floating_point():
            if outputs.isnan().any():
                raise ExperimentError(f"{self.what} gives NaN for inputs of mean 0 and deviation 1, or tokens 0 and 1")
            return
        kind = isinstance(outputs, Tensor)
        found = f"{outputs.dtype} {list(outputs.shape)}" if kind else f"a {type(outputs).__name__}"
        raise ExperimentError(
            f"{self.what} must return logits, [{rows}, {self.classes}], for {rows} inputs (got {found})"
        )

    def _check_tensors_kept(
        self, module: nn.Module, names: set[str], buffers: Mapping[str, Tensor], mode: str, theta: Tensor
    ) -> None:
        """Reject new parameters, buffers that change in evaluation, and others that change than those of θ.

        A whole number that counts calls in training is no reason: outputs that depended on it would be rejected.
        """
        made = sorted({name for name, _ in module.named_parameters()} - names)
        if made:
            layer = made[0].rpartition(".")[0]
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} creates its parameters at run time ({made[0]}). Use "
                "layers that create them at construction"
            )
        moved = self.layout.divided(self.layout.split(theta)).buffers
        still = self.layout.divided(self.layout.split(self.theta)).buffers
        for name, b in module.named_buffers():
            counts = module.training and not b.is_floating_point()
            kept = name in buffers and torch.equal(buffers[name], b)
            if name in moved and not module.training:
                kept = torch.equal(moved[name], still[name])
            if not kept and not counts:
                layer = name.rpartition(".")[0]
                raise ExperimentError(
                    f"{named(layer, module.get_submodule(layer))} changes its buffer {name} when called {mode}. "
                    "Buffers must be constants, or floating-point tensors that move in training alone"
                )

    def _check_attributes_kept(self, module: nn.Module, before: Mapping[tuple[str, str], Any], mode: str) -> None:
        """Reject state in Python attributes that changes between calls with the same inputs."""
        after = _attributes(module)
        changed = [place for place in after if after[place] != before.get(place)]
        if changed:
            layer, key = changed[0]
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} changes its attribute {key} each time it is called "
                f"{mode}, so that results may depend on the number of calls, and on evaluation.batch_size. Keep no "
                "state in a "
                "module: compute it from the inputs, or leave it out"
            )

    def _are_probabilities(self, outputs: Tensor) -> bool:
        summed = bool(((outputs.sum(1) - 1).abs() < 1e-4).all())
        return self.classes > 1 and summed and bool((outputs >= 0).all())


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def _near(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal up to rounding, by the norm of their difference."""
    a, b = (t.detach().double().nan_to_num(posinf=0.0, neginf=0.0) for t in (a, b))
    return bool((a - b).norm() <= TOLERANCE * b.norm() + 1e-9)


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (name, key): _comparable(value, _NESTED)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in _INTERNAL
    }


def _comparable(value: Any, levels: int) -> Any:
    """Return a value that is equal for equal contents only; None for types that cannot be compared."""
    match value:
        case Tensor():
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return str(value.dtype), tuple(value.shape), content.numpy().tobytes()
        case np.ndarray():
            return str(value.dtype), value.shape, value.tobytes()
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case np.random.Generator():
            return str(value.bit_generator.state)
        case random.Random():
            return value.getstate()
        case set() | frozenset():
            return sorted(map(repr, value))
        case int() | float() | str() | bytes():
            return repr(value)
    return _comparable_items(value, levels - 1) if levels else None


def _comparable_items(value: Any, levels: int) -> Any:
    if isinstance(value, dict):
        return {str(key): _comparable(each, levels) for key, each in value.items()}
    return [_comparable(each, levels) for each in value] if isinstance(value, list | tuple) else None


@contextmanager
def _at_layer(module: nn.Module, doing: str) -> Iterator[None]:
    """Reject a module that fails, naming its innermost active layer and the line of its code."""
    at: list[tuple[str, nn.Module]] = []
    with hooks(module, lambda *_: at.pop() and None, lambda name, layer: at.append((name, layer))):
        try:
            yield
        except ExperimentError:
            raise
        except Exception as error:
            name, layer = at[-1] if at else ("", module)
            raise ExperimentError(f"{named(name, layer)} fails {doing} ({said(error)}){_line(error)}") from error


def _line(error: Exception) -> str:
    """Return the line of the module's code that led to an error."""
    at = raised_at(error)
    return (
        ""
        if at is None or "fedloom" in Path(at.filename).parts
        else f", at {Path(at.filename).name}, line {at.lineno}: {at.line}"
    )
