"""Any ``nn.Module`` as the clients' model, as a function of its parameters; errors name the offending layer."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fedloom.errors import DataError, ExperimentError
from fedloom.models.factories import KEY, check_permitted
from fedloom.models.flat import FlatModel, Leaves
from fedloom.models.module_call import (
    ROWS,
    InputDescription,
    InputShape,
    ModuleInputs,
    call_of,
    descriptions,
    first_input,
    log_outputs,
    trial_inputs,
)
from fedloom.models.module_check import TrialData, Tried, tried
from fedloom.models.module_facts import Head, head_of, identity_of, least_batch, moving_tensors, seeded, within_tables
from fedloom.models.module_function import (
    ModuleFunction,
    TrainingStep,
    criterion_weights,
    gives_logarithms,
    own_loss,
    takes_raw_targets,
)
from fedloom.models.module_layers import (
    batch_layers,
    check_copyable,
    check_layers,
    constants_of,
    copied,
    copied_around,
    hollowed,
    is_tied,
    layout_of,
    log_once,
    running_statistics,
    theta_of,
    tied_names,
    uncompiled,
    warn_of_batches,
    without_statistics,
)
from fedloom.models.module_steps import Steps, check_steps
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION

MEMORY = "memory:"
"""Prefix of the factory name of a module that exists only in this process."""

Factory: TypeAlias = Callable[[], nn.Module]

_IN_MEMORY: dict[str, nn.Module] = {}


class _Findings(NamedTuple):
    """Findings about a module that require calling it."""

    trial: TrialData
    moving: tuple[str, ...]  # buffers and frozen parameters
    tried: Tried
    head: Head | None
    least_batch: int
    renormalizes: bool  # a call in evaluation mode changes trained parameters, as nn.Embedding(max_norm=1) does


_FOUND: dict[Hashable, _Findings] = {}
"""Findings of this process: a run creates its model several times, but checks it once."""


class ModuleModel(FlatModel):
    """PyTorch module as a function of a flat vector.

    Raise ExperimentError if it cannot be flattened; the message names the layer.

    Parameters
    ----------
    make
        Factory of the module, which uses torch's random generator.
    input_shape
        Shape of the input, or the descriptions of named inputs.
    classes
        Number of outputs K.
    kind
        Kind of a single input.
    head
        Name of the linear layer whose outputs determine those of the module; None for the last linear layer, if its
        outputs are those of the module.
    buffers
        Place of buffers that move in training: ``shared``, averaged with the parameters, or ``local``, kept by clients.
    output
        Name or position of the outputs in the module's result, if that is not a tensor; None for ``logits``.
    task, target_shape
        What is predicted, and the shape of one target.
    """

    def __init__(
        self,
        make: Factory,
        input_shape: InputShape,
        classes: int,
        kind: str,
        head: str | None = None,
        buffers: Literal["shared", "local"] = "shared",
        output: str | int | None = None,
        task: PredictionTask = CLASSIFICATION,
        target_shape: tuple[int, ...] = (),
    ) -> None:
        self._make = make
        self.task = task
        input_descriptions = descriptions(input_shape, kind, classes)
        self._module = seeded(make, 0, trial_inputs(input_descriptions, 0))
        check_layers(self._module)
        identity = identity_of(self._module, dict(input_descriptions), classes, head, output, task, target_shape)
        facts = _FOUND.get(identity)
        if facts is None:
            facts = _found(self._module, input_descriptions, classes, head, output, task, target_shape)
        if identity is not None:
            _FOUND[identity] = facts
        self._trial, moving_names, last = facts.trial, facts.moving, facts.head
        self._call, self.draws = facts.tried.call, facts.tried.draws
        self._head = None if last is None else last.name
        self.has_features = last is not None and last.has_features
        separable = self._head is not None and not is_tied(self._module, self._head)
        self.layout = replace(
            layout_of(self._module, moving_names, self._head if separable else None, local=buffers == "local"),
            channels_last=facts.tried.layout.channels_last,
            logits_apart=last is not None and (not last.gives_logits or self._call.whole),
        )
        self.needs_result = self._call.whole
        self.raw_targets = task.kind.is_number and takes_raw_targets(self._module)
        self.constants = constants_of(self._module, self.layout)
        self.tied = tied_names(self._module)
        self.unsaved = frozenset(self.constants) - self._module.state_dict().keys()
        self.steps = isinstance(own_loss(self._module), TrainingStep)  # whose loss is that of a batch
        self.needs_whole_batches = bool(moving_names or batch_layers(self._module) or self.steps)
        self.constrained, self.least_batch = bool(moving_names), facts.least_batch
        self._renormalizes = facts.renormalizes
        self.predicts_by_batch = bool(without_statistics(self._module))
        warn_of_batches(self._module)
        kind_of_module = type(self._module).__name__
        log_outputs(kind_of_module, self._call)
        if self.steps:
            log_once(f"{kind_of_module}.training_step is trained; its optimizers, hooks and logs are not used")
        elif not self.own_loss and (setting := getattr(self._module, "loss", None)) is not None:
            log_once(
                f"{kind_of_module}.loss is {repr(setting)[:40]} and not a function, so the task's loss is trained",
                logging.WARNING,
            )
        self._module = hollowed(self._module)
        self._copies = threading.local()  # a call sets parameters of the module, so threads must not share it
        self._trains = False
        self._training = copy.copy(self)
        self._training._copies, self._training._trains = threading.local(), True
        self._training._training = self._training

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleModel:
        return self

    def in_training(self) -> ModuleModel:
        """Return the module in training mode; the model itself is the module in evaluation mode."""
        return self._training

    def init(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return θ [d]: the module's initial parameters and buffers, with torch's generator seeded by this one."""
        seed = int(torch.randint(2**62, (1,), generator=generator))
        return theta_of(seeded(self._make, seed, self._trial.x), self.layout).to(dtype)

    def check_steps(
        self, *, clients: int = 1, twice: bool = False, device: torch.device | None = None, examples: bool = False
    ) -> None:
        """Make training steps as a run with these settings would; see :class:`~fedloom.models.flat.FlatModel`."""
        check_steps(self, self._trial, Steps(clients, twice, device or torch.device("cpu"), examples))

    def take_examples(self, *, vmapped: bool) -> None:
        """Choose the way to compute gradients of single examples: ``torch.func.vmap``, or one by one."""
        self.vmaps_examples = self._training.vmaps_examples = vmapped
        if not vmapped:
            log_once(
                f"{type(self._module).__name__}: torch.func.vmap cannot run it for single examples, so their gradients "
                "(federation.privacy.of: examples) are computed one by one",
                logging.WARNING,
            )

    def called_module(self) -> nn.Module:
        """Return the module that this thread's calls run."""
        return self._own().module

    def features(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Tensor:
        """Return the input of the head, ``[b, *input_shape] -> [b, f]``; the head's own entries may be missing."""
        assert self._head is not None, "has_features is False"
        function, captured = self._own(), list[Tensor]()
        like = next(iter(parameters.values()))
        head = {
            name: like.new_zeros(shape)
            for name, shape in self.layout.entries
            if name in self.layout.head and name not in parameters
        }
        if head:
            parameters = Leaves({**parameters, **head}, getattr(parameters, "buffers", None))
        layer = function.module.get_submodule(self._head)
        hook = layer.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
        try:
            self._called(function, parameters, x)
        finally:
            hook.remove()
        features = captured[0].flatten(1) if captured[0].dim() > 1 else captured[0][None]  # a single example, squeezed
        return features[: len(first_input(x))] if self.predicts_by_batch else features

    def forward(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Tensor:
        """Return outputs, ``[b, *input_shape] -> [b, *output_shape]``."""
        outputs: Tensor = self._called(self._own(), parameters, x)
        return outputs

    def result(self, parameters: Mapping[str, Tensor], x: ModuleInputs) -> Any:
        """Return all that the module returns for inputs, or the inputs if its loss calls it."""
        return self._called(self._own().for_loss, parameters, x)

    def unshaped(self, outputs: Tensor) -> Tensor:
        """Return outputs in the shape and unit in which the module gave them."""
        return self._call.unshaped(outputs)

    def _called(
        self, function: Callable[[Mapping[str, Tensor], ModuleInputs], Any], parameters: Mapping[str, Tensor], x: Any
    ) -> Any:
        """Call the module, also for a batch of one that is normalized by the batch.

        In evaluation two copies of the example form the batch, which gives the same result. An exported program does
        not distinguish this case.
        """
        if self._renormalizes and not self._trains:  # θ belongs to the caller
            parameters = {name: parameters[name].clone() for name, _ in self.layout.entries}
        by_batch = self.needs_whole_batches if self._trains else self.predicts_by_batch
        if not by_batch or torch.compiler.is_exporting() or len(first_input(x)) != 1:
            return function(parameters, x)
        if not self._trains:
            return tree_map(lambda t: t[:1], function(parameters, tree_map(lambda t: torch.cat([t, t]), x)))
        try:
            return function(parameters, x)
        except ValueError as error:
            raise DataError(
                f"the model normalizes by the batch, but a batch has one example ({error}); a client needs two train "
                "examples or more, and batch_size must be 2 or more"
            ) from error

    @property
    def own_loss(self) -> bool:
        """True if the module has a ``loss``."""
        return own_loss(self._module) is not None

    def loss(self, parameters: Mapping[str, Tensor], x: ModuleInputs, y: Tensor | None) -> Tensor:
        """Return the loss of each example, ``[b]``: the module's ``loss(outputs, y)`` if it has one."""
        if not self.own_loss:
            assert y is not None
            return self.task.loss(self.forward(parameters, x), y)
        return self._own().loss(parameters, x, self.result(parameters, x), y)

    def batch_weights(self, y: Tensor | None, weight: Tensor) -> Tensor:
        """Return the weights of the losses of a batch, ``[..., b]``; a criterion of torch averages as torch does."""
        own = own_loss(self._module)
        return super().batch_weights(y, weight) if own is None or y is None else criterion_weights(own, y, weight)

    def _own(self) -> ModuleFunction:
        """Return this thread's copy of the module, in this model's mode, as a function."""
        if not hasattr(self._copies, "function"):
            module = copied_around(self._module).train(self._trains)
            self._copies.function = ModuleFunction(module, self.layout.buffers, self._call)
        function: ModuleFunction = self._copies.function
        return function


def _found(
    module: nn.Module,
    inputs: Mapping[str, InputDescription],
    outputs: int,
    head: str | None,
    output: str | int | None,
    task: PredictionTask,
    target_shape: tuple[int, ...],
) -> _Findings:
    """Try a module, and return the findings."""
    x, others = (trial_inputs(inputs, seed) for seed in (0, 1))
    call = replace(call_of(module, x, output), exponential=gives_logarithms(module))
    x, others = within_tables(copied(module).eval(), call, x, others)
    y = task.trial_targets(ROWS, outputs, target_shape, raw=takes_raw_targets(module))
    trial = TrialData(x, others, y, task, outputs)
    buffers = moving_tensors(module, x)
    result = tried(module, layout_of(module, buffers, None, local=False), call, trial)
    last = head_of(module, result.call, x, others, head)
    return _Findings(trial, buffers, result, last, least_batch(module, x), _renormalizes(module, result, x))


def _renormalizes(module: nn.Module, trial: Tried, x: ModuleInputs) -> bool:
    """Return True if a call in evaluation mode changes the parameters that it is given."""
    theta = theta_of(module, trial.layout)
    leaves = trial.layout.leaves(theta)
    with torch.no_grad():
        ModuleFunction(copied_around(module).eval(), trial.layout.buffers, trial.call)(leaves, x)
    return not torch.equal(trial.layout.join(leaves), theta)


def remember(module: nn.Module, name: str | None = None) -> str:
    """Register a module for experiments of this process, and return its name.

    Raise ExperimentError if the object is not a module, or not the one that the run trained.

    Parameters
    ----------
    name
        Name in a run, whose weights may differ; None to name the module by its class, a hash of its layers and a hash
        of its weights.
    """
    if not isinstance(module, nn.Module):
        call = "; call it, and give the module that it returns" if callable(module) else ""
        raise ExperimentError(f"model must be an nn.Module (got {type(module).__name__}){call}", key="model")
    module = uncompiled(module)
    check_layers(module)
    check_copyable(module)
    layers, weights = hashlib.sha256(repr(module).encode()), hashlib.sha256()
    statistics, buffers = running_statistics(module), dict(module.named_buffers())
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            layers.update(f"{key} lazy".encode())
            continue
        layers.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # A run compares frozen parameters by its own digests, which name the first that differs.
        values = layers if key in buffers and key not in statistics else weights
        values.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    kind = f"{MEMORY}{type(module).__name__}-{layers.hexdigest()[:12]}"
    if name is None:
        name = f"{kind}-{weights.hexdigest()[:12]}"
    elif not name.startswith(f"{kind}-"):
        remedy = "give a module with the same layers" if name.startswith(MEMORY) else "leave it out"
        raise ExperimentError(f"model is {kind}, but the run trained {name}; {remedy}", key="model")
    _IN_MEMORY[name] = copied(module)
    return name


def factory_of(name: str, input_shape: tuple[int, ...] | Mapping[str, tuple[int, ...]], classes: int) -> Factory:
    """Return the factory of a module.

    Raise ExperimentError if there is no such function, this process may not call it, or another process has the module.

    Parameters
    ----------
    name
        ``package.module:function``, which is called with ``input_shape`` and ``classes`` if it has such parameters; or
        a name returned by :func:`remember`.
    """
    if name.startswith(MEMORY):
        if name not in _IN_MEMORY:
            raise ExperimentError(
                f"{KEY}: {name} is a module that existed only in the memory of another process; name it as "
                "package:function",
                hint="in Python, identify the module with fedloom.load(RUN, model=module)",
            )
        return lambda: copied(_IN_MEMORY[name])
    check_permitted(name)
    package, _, function = name.partition(":")
    try:
        factory = getattr(importlib.import_module(package), function)
    except Exception as error:
        raise ExperimentError(
            f"{KEY}: {name!r} cannot be imported as package:function ({type(error).__name__}: {error})",
            hint="install its package, or name its folder in PYTHONPATH",
        ) from error
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{KEY}: {name!r} is not a function; give package:function") from error
    values = {key: value for key, value in (("input_shape", input_shape), ("classes", classes)) if key in parameters}

    def make() -> nn.Module:
        try:
            module = factory(**values)
        except Exception as error:
            raise ExperimentError(f"{KEY}: {name} failed ({type(error).__name__}: {error})") from error
        if not isinstance(module, nn.Module):
            raise ExperimentError(f"{KEY}: {name} must return an nn.Module (got a {type(module).__name__})")
        return module

    return make
