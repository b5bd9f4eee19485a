"""Checks of a PyTorch module before a run: one training step and predictions, as in a run.

Modules that a run could not use or reproduce are rejected here, with the layer and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils._pytree import tree_leaves, tree_map

from fedloom.core.draws import drawing_with
from fedloom.core.memory import collection_paused
from fedloom.errors import ExperimentError
from fedloom.models.factories import KEY
from fedloom.models.flat import Layout, Leaves
from fedloom.models.module_call import LostAxisError, ModuleCall, ModuleInputs, UnreadOutputError, first_input, shapes
from fedloom.models.module_draws import GLOBAL, ROUNDING, NumpyGenerators, attributes, draws_noted, near
from fedloom.models.module_facts import ConvolutionSizes, displace
from fedloom.models.module_function import ModuleFunction, TrainingStep, own_loss
from fedloom.models.module_layers import (
    at_layer,
    batch_layers,
    copied,
    copied_around,
    named,
    theta_of,
    untrained,
    without_statistics,
)
from fedloom.tasks.base import PredictionTask

_SEEDS = 5
"""Number of seeds with which a module that draws is called, so that branches taken at random are all tried."""

_FACTORS = (1.0, 10.0, -10.0)
"""Factors by which parameters are scaled to test whether outputs are probabilities in general."""


@dataclass(frozen=True)
class TrialData:
    """Data with which a module is checked.

    Attributes
    ----------
    x, others
        Trial inputs, and others of the same shape.
    y
        Trial targets.
    task, outputs
        Task, and K.
    """

    x: ModuleInputs
    others: ModuleInputs
    y: Tensor
    task: PredictionTask
    outputs: int

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the outputs of one example."""
        return self.task.output_shape(self.outputs, tuple(self.y.shape[1:]))


@dataclass(frozen=True)
class Tried:
    """Findings about a module: layout with memory format, way of calling, and libraries that it draws with."""

    layout: Layout
    call: ModuleCall
    draws: tuple[str, ...]


def tried(module: nn.Module, layout: Layout, call: ModuleCall, data: TrialData) -> Tried:
    """Call a module as a run does, and return the findings.

    Raise ExperimentError if it fails, returns no outputs that fit the task, draws random numbers in evaluation or by a
    generator of its own, keeps a state, lets predictions depend on other inputs, or if its gradient differs from
    torch's gradient of the module itself.

    Parameters
    ----------
    layout
        Layout of its parameters.
    call
        Way in which it takes inputs.
    """
    trial = _Trial(module, layout, data, call)
    with torch.random.fork_rng(devices=[]), collection_paused():
        trial.call = trial.fitting_call()
        trial.call = trial.of_probabilities()
        trial.call = trial.call_for_loss()
        trial.checked(training=True)
        outputs = trial.checked(training=False)
        kernels = any(len(shape) == 4 for _, shape in layout.entries)
        expected = trial.own_gradient()
        if kernels and not (trial.sizes.gains_from_channels_last and trial.runs_channels_last(expected, outputs)):
            layout = replace(layout, channels_last=False)
        if not kernels or not layout.channels_last or trial.noted:
            trial.layout = replace(layout, channels_last=False)
            trial.check_gradient(expected)
    return Tried(layout, trial.call, tuple(library for library in GLOBAL if library in trial.noted))


@dataclass(eq=False)
class _Trial:
    """Module with the inputs on which it is tried."""

    module: nn.Module
    layout: Layout
    data: TrialData
    call: ModuleCall
    noted: set[str] = field(default_factory=set)  # libraries that it draws from in training mode
    generators: NumpyGenerators = field(default_factory=NumpyGenerators)
    sizes: ConvolutionSizes = field(default_factory=ConvolutionSizes)

    @property
    def what(self) -> str:
        return f"{KEY}: {type(self.module).__name__}"

    @cached_property
    def theta(self) -> Tensor:
        """Trained parameters and moving buffers of the module as θ."""
        return theta_of(self.module, self.layout)

    @cached_property
    def elsewhere(self) -> Tensor:
        """θ with every entry scaled by its own factor, to reveal use of the module's original parameters."""
        factors = torch.rand(self.layout.size, generator=torch.Generator().manual_seed(0))
        return self.theta * (0.5 + factors)

    def fitting_call(self, *, training: bool = False) -> ModuleCall:
        """Return the call with outputs of the shape that the task needs, from one in this mode."""
        function, task, rows = self._function(training=training), self.data.task, len(self.data.y)
        mode = "training" if training else "evaluation"
        with (
            torch.no_grad(),
            drawing_with(0),
            self.sizes.noted(function.module),
            at_layer(function.module, f"for inputs {shapes(self.data.x)} in {mode} mode"),
        ):
            returned = function.result(self._contiguous(), self.data.x)
        expected = self.data.output_shape

        def fitted(outputs: Tensor) -> ModuleCall | None:
            return self.call.fitted(task, self.data.outputs, expected, outputs, rows) if outputs.dim() else None

        reading = self.call.reading(returned, fitted)
        outputs = reading.read(self.module, returned)
        fit = fitted(outputs)
        if fit is None:
            of_classes = task.kind.is_class
            noun = "logits" if of_classes else f"outputs for {task.name}"
            actual = f"{outputs.dtype} {list(outputs.shape)}"
            problem = f"must return {noun}, {[rows, *expected]}, for {rows} inputs (got {actual})"
            if of_classes and tuple(outputs.shape) in ((rows,), (rows, 1)):
                raise ExperimentError(
                    f'{self.what}: set task="regression" (in a file data.source.task) if the targets are numbers, '
                    f"such as ratings or counts: whole numbers are read as classes, here {self.data.outputs}. A model "
                    f"of classes {problem}"
                )
            raise ExperimentError(f"{self.what} {problem}")
        return replace(fit, field=reading.field)

    def of_probabilities(self) -> ModuleCall:
        """Return the call with the kind of its outputs, logits or probabilities, judged by several parameters."""
        task = self.data.task
        if all(task.sums_to_one(self._scaled(factor)) for factor in _FACTORS):
            return replace(self.call, probabilities="softmax")
        if self.call.binary or task.kind.is_binary:
            outputs = (self.call.unshaped(self._scaled(factor)) for factor in _FACTORS)
            if all(bool(((z >= 0) & (z <= 1)).all()) for z in outputs):  # NaN is not
                return replace(self.call, probabilities="sigmoid")
        return self.call

    def _scaled(self, factor: float) -> Tensor:
        """Return the outputs for parameters times a factor, with noise unless it is 1, so that none of them is 0."""
        generator, own = torch.Generator().manual_seed(0), self._contiguous()
        noise = 0.0 if factor == 1 else 1.0
        scaled = {name: factor * p + noise * torch.randn(p.shape, generator=generator) for name, p in own.items()}
        with torch.no_grad(), drawing_with(0):
            return self._function(training=False)(Leaves(scaled, own.buffers), self.data.x)

    def call_for_loss(self) -> ModuleCall:
        """Return the call with what the module's own loss takes: all of the result, or else the outputs in it."""
        function = self._function(training=True)
        if not self.has_loss:
            return self.call
        if isinstance(own_loss(self.module), TrainingStep):
            return replace(self.call, whole=True)
        leaves = self._contiguous()
        place = at_layer(function.module, f"for inputs {shapes(self.data.x)} in training mode")
        with torch.no_grad(), drawing_with(0), place:
            returned = function.result(leaves, self.data.x)
        if isinstance(returned, Tensor):
            return self.call
        function.call = replace(self.call, whole=True)
        with torch.no_grad(), suppress(Exception):  # a loss of the outputs alone
            if function.loss(leaves, self.data.x, returned, self.data.y).shape == (len(self.data.y),):
                return function.call
        try:
            self.call.read(self.module, returned)
        except UnreadOutputError:
            return replace(self.call, field=self.fitting_call(training=True).field)
        return self.call

    @cached_property
    def has_loss(self) -> bool:
        """True if the module has a loss of its own, other than a criterion of torch, which takes a tensor."""
        own = own_loss(self.module)
        return own is not None and not isinstance(own, _Loss)

    def checked(self, *, training: bool) -> Tensor:
        """Check calls in one mode, after which ``call`` fits the mode, and return the outputs."""
        try:
            return self.check_calls(training=training)
        except UnreadOutputError:  # it returns other outputs in training mode
            self.call = replace(self.call, field=self.fitting_call(training=training).field)
        except LostAxisError:
            self.call = replace(self.call, squeezes=True)
        return self.check_calls(training=training)

    def check_calls(self, *, training: bool) -> Tensor:
        """Call the module in one mode, also with a single input and again with the same inputs; return its outputs."""
        mode = "in training mode" if training else "in evaluation mode"
        function, x, rows = self._function(training=training), self.data.x, len(self.data.y)
        own = training and self.has_loss  # its outputs in training may be any
        thetas: list[Tensor] = []

        def call(
            x: ModuleInputs, *, seed: int = 0, note: bool = False, watch: bool = False, apart: bool = False
        ) -> Tensor:
            module, notes = function.module, self.noted if training else None
            noting = draws_noted(module, self.generators, notes, watch=watch) if note else nullcontext()
            layer = at_layer(module, f"for inputs {shapes(x)} {mode}")
            parameters = self._contiguous(requires_grad=training)  # fresh buffers
            if apart:
                displace(parameters.values())
            with torch.set_grad_enabled(training), drawing_with(seed), noting, layer:
                returned = function.result(parameters, x) if own else function(parameters, x)
            thetas[:] = [self.layout.join(parameters).detach()]
            return _joined(returned, len(first_input(x))).detach()  # without its graph, which has all parameters

        tensors = {**untrained(function.module), **dict(function.module.named_buffers())}
        tensors = {name: t.clone() for name, t in tensors.items()}
        names = {name for name, _ in function.module.named_parameters()}
        first = call(x, note=True)
        self._check_outputs(first, rows, own=own)
        self._check_tensors_kept(function.module, names, tensors, mode, thetas[0])
        once = thetas[0]
        for seed in range(1, _SEEDS if self.noted else 1):
            self._check_outputs(call(x, seed=seed, note=True), rows, own=own)
        attributes_before = attributes(function.module)
        by_batch = self.layout.buffers or batch_layers(self.module) if training else without_statistics(self.module)
        alone = call(x if by_batch else tree_map(lambda t: t[1:2], x), note=True, watch=True)
        self._check_outputs(alone, rows if by_batch else 1, own=own)
        call(x, apart=True)
        self._require(
            torch.equal(first, call(x)) and torch.equal(once, thetas[0]),
            f"gives different outputs for the same inputs {mode}. Draw only from the global generators of torch, numpy "
            "and Python, and keep no state between calls",
        )
        self._check_attributes_kept(function.module, attributes_before, mode)
        function = self._function(training=training)
        call(self.data.others)
        self._require(
            torch.equal(first, call(x)),
            f"gives different outputs {mode} after a call with other inputs: it keeps state from them, which differs "
            "between processes. Compute it from the inputs at each call",
        )
        draws = training and bool(self.noted)  # alone, an example has other draws than in a batch
        self._require(
            bool(by_batch) or draws or alone.numel() * rows != first.numel() or near(alone, first[1:2].view_as(alone)),
            f"gives different outputs for a single input and for the same input in a batch {mode}, so that a "
            "prediction would depend on evaluation.batch_size. Normalize each example separately",
        )
        return first

    def _require(self, holds: bool, otherwise: str) -> None:
        """Reject the module unless a condition holds; ``otherwise`` completes the message after its name."""
        if not holds:
            raise ExperimentError(f"{self.what} {otherwise}")

    def own_gradient(self, *, training: bool = True) -> dict[str, Tensor]:
        """Return torch's gradient of the module itself, away from its initial parameters."""
        module, parameters = copied(self.module).train(training), self.layout.split(self.elsewhere)
        function = ModuleFunction(module, self.layout.buffers, self.call)
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(parameters[name])
        return self._gradients(function, Leaves(own, {name: parameters[name].clone() for name in self.layout.buffers}))

    def runs_channels_last(self, expected: Mapping[str, Tensor], outputs: Tensor) -> bool:
        """Return True if a training step and predictions are correct with channels-last kernels.

        The order in which a layer draws depends on the memory format, so steps with draws are compared without them.
        """
        try:
            if self.noted:
                leaves = self.layout.divided(self.layout.leaves(self.theta, requires_grad=True))
                self._gradients(self._function(training=True), leaves)
                self.check_gradient(self.own_gradient(training=False), training=False)
            else:
                self.check_gradient(expected)
            with torch.no_grad():
                contiguous = self._function(training=False)(self.layout.leaves(self.theta), self.data.x)
        except Exception:  # use contiguous kernels, or reject the module with them
            return False
        return near(contiguous, outputs)

    def check_gradient(self, expected: Mapping[str, Tensor], *, training: bool = True) -> None:
        """Make one training step, and compare its gradient with that of the module itself.

        Where the exact gradient is 0, as for a bias before batch normalization, both sides have rounding errors alone.
        """
        leaves = self.layout.divided(self.layout.leaves(self.elsewhere, requires_grad=True))
        gradients = self._gradients(self._function(training=training), leaves)
        least = 1e-9 + ROUNDING * max(
            float(reference.nan_to_num(posinf=0.0, neginf=0.0).norm()) for reference in expected.values()
        )
        for name, reference in expected.items():
            if not near(gradients[name], reference, least):
                layer = name.rpartition(".")[0]
                raise ExperimentError(
                    f"{named(layer, self.module.get_submodule(layer))}: the gradient of {name} differs from "
                    "that of the module itself, which also holds its parameters elsewhere: in an attribute or a list, "
                    "or through torch.utils.checkpoint. In `forward`, take parameters from their layers, without "
                    "checkpoints"
                )

    def _function(self, *, training: bool) -> ModuleFunction:
        return ModuleFunction(copied_around(self.module).train(training), self.layout.buffers, self.call)

    def _contiguous(self, *, requires_grad: bool = False) -> Leaves:
        plain = replace(self.layout, channels_last=False)
        return plain.divided(plain.leaves(self.theta, requires_grad=requires_grad))

    def _gradients(self, function: ModuleFunction, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the mean loss for all parameters; zeros for unused ones."""
        module = function.module
        with (
            torch.enable_grad(),
            drawing_with(0),
            draws_noted(module, self.generators, self.noted),
            at_layer(module, "in a training step"),
        ):
            losses = self._losses(function, leaves)
            if not losses.requires_grad:
                raise ExperimentError(
                    f"{self.what}: no parameter has a gradient in training mode. Compute the outputs from parameters, "
                    "without torch.no_grad() or detach()"
                )
            gradients = torch.autograd.grad(losses.mean(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))

    def _losses(self, function: ModuleFunction, leaves: Mapping[str, Tensor]) -> Tensor:
        x, y = self.data.x, self.data.y
        own = own_loss(function.module)
        name = "training_step" if isinstance(own, TrainingStep) else "loss(outputs, y), of each example,"
        if own is None:
            return self.data.task.loss(function(leaves, x), y)
        actual = function.for_loss(leaves, x)
        try:
            losses = function.loss(leaves, x, actual, y)
        except Exception as error:
            raise ExperimentError(f"{self.what}.{name} must return a loss ({type(error).__name__}: {error})") from error
        if not isinstance(losses, Tensor) or losses.shape != (len(y),):
            actual = f"{list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise ExperimentError(
                f"{self.what}.loss must give a loss of each of {len(y)} examples, [{len(y)}] (got {actual}); compute "
                "it with reduction='none'"
            )
        return losses

    def _check_outputs(self, outputs: Tensor, rows: int, *, own: bool) -> None:
        expected = tuple(outputs.shape) if own else (rows, *self.data.output_shape)
        if rows == 1 and outputs.shape == expected[1:] and not self.call.squeezes:
            raise LostAxisError(
                f"{self.what} must return logits, {list(expected)}, for 1 input (got {list(outputs.shape)})"
            )
        if outputs.shape != expected or not outputs.is_floating_point():
            raise ExperimentError(
                f"{self.what} must return logits, {list(expected)}, for {rows} inputs (got {outputs.dtype} "
                f"{list(outputs.shape)})"
            )
        if outputs.isnan().any():
            raise ExperimentError(f"{self.what} gives NaN for inputs of mean 0 and deviation 1, or random integers")

    def _check_tensors_kept(
        self, module: nn.Module, names: set[str], tensors_before: Mapping[str, Tensor], mode: str, theta: Tensor
    ) -> None:
        """Reject new parameters, and tensors that change in evaluation or that are not part of θ.

        Integers may count calls in training: a module whose outputs depend on them is rejected by another check.
        """
        created = sorted({name for name, _ in module.named_parameters()} - names)
        if created:
            layer = created[0].rpartition(".")[0]
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} creates its parameters at run time ({created[0]}). Use "
                "layers that create them at construction"
            )
        buffers_of_theta = self.layout.divided(self.layout.split(theta)).buffers
        still = self.layout.divided(self.layout.split(self.theta)).buffers
        buffers = dict(module.named_buffers())
        for name, t in {**untrained(module), **buffers}.items():
            counts = module.training and not t.is_floating_point()
            is_unchanged = name in tensors_before and torch.equal(tensors_before[name], t)
            if name in buffers_of_theta and not module.training:
                is_unchanged = torch.equal(buffers_of_theta[name], still[name])
            if not is_unchanged and not counts:
                layer, kind = name.rpartition(".")[0], "buffer" if name in buffers else "frozen parameter"
                raise ExperimentError(
                    f"{named(layer, module.get_submodule(layer))} changes its {kind} {name} when called {mode}. "
                    "Buffers and frozen parameters must be constants, or floating-point tensors that change only in "
                    "training"
                )

    def _check_attributes_kept(
        self, module: nn.Module, attributes_before: Mapping[tuple[str, str], Any], mode: str
    ) -> None:
        """Reject state in Python attributes that changes between calls with the same inputs."""
        attributes_after = attributes(module)
        differing = [place for place in attributes_after if attributes_after[place] != attributes_before.get(place)]
        if differing:
            layer, key = differing[0]
            raise ExperimentError(
                f"{named(layer, module.get_submodule(layer))} changes its attribute {key} each time it is called "
                f"{mode}, so that results may depend on the number of calls, and on evaluation.batch_size. Keep no "
                "state in a module: compute it from the inputs, or leave it out"
            )


def _joined(returned: Any, rows: int) -> Tensor:
    """Return all numbers of a result that belong to examples, ``[rows, ...]``."""
    if isinstance(returned, Tensor):
        return returned
    parts = [t for t in tree_leaves(returned) if isinstance(t, Tensor) and t.dim() and len(t) == rows]
    return torch.cat([t.flatten(1).float() if t.dim() > 1 else t[:, None].float() for t in parts], 1)
