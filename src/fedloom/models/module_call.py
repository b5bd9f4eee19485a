"""Calls of a module: its inputs, in a trial too, and the part of its output that holds the logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fedloom.errors import ExperimentError
from fedloom.models.factories import KEY
from fedloom.models.module_layers import log_once
from fedloom.tasks.base import PredictionTask

ROWS = 3
"""Number of trial inputs."""

ModuleInputs: TypeAlias = Tensor | Mapping[str, Tensor]
"""Inputs of a module, ``[b, ...]``, or such tensors by name."""


class InputDescription(Protocol):
    """Description of one input tensor, such as a manifest's."""

    @property
    def kind(self) -> str:
        """Kind of its values: pixels, features, tokens or integers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape for one example."""

    @property
    def high(self) -> int | None:
        """Largest value + 1 of integers; None for other kinds."""


class SingleInput(NamedTuple):
    """Description of the input of examples that have one tensor.

    Attributes
    ----------
    kind, shape
        Its kind, and its shape for one example.
    high
        Largest value + 1 of integers; None for 2.
    """

    kind: str
    shape: tuple[int, ...]
    high: int | None = None


InputShape: TypeAlias = tuple[int, ...] | Mapping[str, InputDescription]
"""Shape of a single input, or the descriptions of named ones."""


def descriptions(input_shape: InputShape, kind: str, outputs: int) -> Mapping[str, InputDescription]:
    """Return the descriptions of all input tensors; a single one has the empty name.

    The vocabulary of tokens is the list of outputs.
    """
    if isinstance(input_shape, Mapping):
        return input_shape
    return {"": SingleInput(kind, input_shape, outputs if kind == "tokens" else None)}


def trial_inputs(descriptions: Mapping[str, InputDescription], seed: int, rows: int = ROWS) -> ModuleInputs:
    """Return random inputs, ``[rows, ...]``.

    The first entry of each row of integers is the largest of the data, so that the module's tables are tried with it.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: _drawn(each, rows, generator) for name, each in descriptions.items()}
    return inputs.get("", inputs)


def _drawn(description: InputDescription, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *description.shape)
    if description.kind not in ("tokens", "integers"):
        return torch.randn(shape, generator=generator)
    high = description.high or 2
    dtype = torch.uint8 if description.kind == "tokens" else torch.int64
    values = torch.randint(high, shape, generator=generator, dtype=dtype)
    values.view(rows, -1)[:, 0] = high - 1
    return values


def first_input(x: ModuleInputs) -> Tensor:
    """Return the inputs, or the first of named ones, which has the same length and device as the others."""
    return x if isinstance(x, Tensor) else next(iter(x.values()))


def shapes(x: ModuleInputs) -> str:
    """Return the shapes of inputs, for messages."""
    if isinstance(x, Tensor):
        return str(list(x.shape))
    return ", ".join(f"{name} {list(each.shape)}" for name, each in x.items())


def shape_of(input_shape: InputShape) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """Return the shape of one input, or the shapes of named inputs."""
    if not isinstance(input_shape, Mapping):
        return input_shape
    shapes = {name: tuple(each.shape) for name, each in input_shape.items()}
    return shapes.get("", shapes)


LOGITS = "logits"
"""Field of an output that is read by default."""

OUT = "out"
"""Field that is read if there are no logits: the name in torchvision's networks for segmentation."""

_LEAST = torch.finfo(torch.float32).tiny
"""Smallest probability in logarithms; smaller ones are replaced by it."""


class UnreadOutputError(ExperimentError):
    """Output with several tensors, none of which is known to hold the logits."""


class LostAxisError(ExperimentError):
    """Outputs of a single example without the axis of the batch."""


@dataclass(frozen=True)
class ModuleCall:
    """Way in which a module is called.

    Attributes
    ----------
    by_name
        True if named inputs are arguments of those names, False if one argument is a dict of them.
    field
        Field or position of the outputs, if the module does not return a tensor.
    given, shape
        Shape of the module's output for one example, and the shape that the task needs, where they differ; both None
        where they do not.
    binary
        True if the module gives one logit z for two classes, which becomes [0, z].
    classes_first
        True if the module gives next tokens as ``[b, V, T]``.
    squeezes
        True if the outputs of a single example lack the axis of the batch.
    probabilities
        Function after which the module's outputs are probabilities; ``""`` where they are logits, or numbers.
    exponential
        True if the module gives logarithms of the numbers, as ``PoissonNLLLoss`` takes them.
    whole
        True if the module's own loss takes all that the module returns, False if it takes the tensor of outputs.
    """

    by_name: bool = False
    field: str | int = LOGITS
    given: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    binary: bool = False
    classes_first: bool = False
    squeezes: bool = False
    probabilities: Literal["", "sigmoid", "softmax"] = ""
    exponential: bool = False
    whole: bool = False

    def result(self, module: Any, x: ModuleInputs) -> Any:
        """Call a module, and return its result."""
        return module(**x) if self.by_name and isinstance(x, Mapping) else module(x)

    def __call__(self, module: Any, x: ModuleInputs) -> Tensor:
        """Call a module, and return outputs as the task needs them, ``[b, *output_shape]``."""
        return self.shaped(self.outputs(module, self.result(module, x), x))

    def outputs(self, module: Any, returned: Any, x: ModuleInputs) -> Tensor:
        """Return the tensor of outputs in a module's result for ``x``, with the axis of the batch."""
        outputs = self.read(module, returned)
        return outputs[None] if self.squeezes and len(first_input(x)) == 1 else outputs

    def shaped(self, outputs: Tensor) -> Tensor:
        """Return a module's tensor as the outputs that the task needs; probabilities become logits."""
        if self.probabilities:
            log_p = outputs.clamp(min=_LEAST).log()
            outputs = log_p if self.probabilities == "softmax" else log_p - (1 - outputs).clamp(min=_LEAST).log()
        outputs = outputs.exp() if self.exponential else outputs
        if self.shape is None:
            return outputs
        if self.classes_first:
            return outputs.transpose(1, 2)
        if not self.binary:
            return outputs.reshape(-1, *self.shape)
        z = outputs.reshape(-1, 1, *self.shape[1:])
        return torch.cat([torch.zeros_like(z), z], 1)

    def unshaped(self, outputs: Tensor) -> Tensor:
        """Return outputs in the shape and unit in which the module gave them, for its own loss."""
        shaped = outputs.log() if self.exponential else outputs
        if self.classes_first:
            shaped = outputs.transpose(1, 2)
        elif self.given is not None:
            shaped = (outputs[:, 1] - outputs[:, 0] if self.binary else shaped).reshape(-1, *self.given)
        if self.probabilities:
            shaped = shaped.exp() if self.probabilities == "softmax" else shaped.sigmoid()
        return shaped

    def reading(self, returned: Any, fit_to: Callable[[Tensor], ModuleCall | None]) -> ModuleCall:
        """Return a call that reads one field of an output: its logits, ``out``, or the only tensor that fits the task.

        A tensor that has the task's shape is preferred to one that must be reshaped.
        """
        parts = _parts(returned)
        if isinstance(returned, Tensor) or self.field != LOGITS or isinstance(parts.get(LOGITS), Tensor):
            return self
        if isinstance(parts.get(OUT), Tensor):
            return replace(self, field=OUT)
        fits = {key: fit for key, part in parts.items() if isinstance(part, Tensor) and (fit := fit_to(part))}
        candidates = [key for key, fit in fits.items() if fit.shape is None] or [*fits]
        return replace(self, field=candidates[0]) if len(candidates) == 1 else self

    def read(self, module: Any, returned: Any) -> Tensor:
        """Return the tensor of a module's output.

        Raise UnreadOutputError if it has none in this field; the message lists all fields and shapes.
        """
        if isinstance(returned, Tensor):
            return returned
        parts, field = _parts(returned), self.field
        if isinstance(field, str) and field.isdecimal() and field not in parts:
            field = int(field)
        if isinstance(field, int) and field not in parts:
            field = [*parts, *[field] * (field + 1)][field]  # position of a named part
        selected = parts.get(field)
        if isinstance(selected, Tensor):
            return selected
        subject = f"{KEY}: {type(module).__name__}"
        listing = ", ".join(f"{key} ({_shape_or_type(part)})" for key, part in parts.items())
        if not parts:
            raise UnreadOutputError(f"{subject} must return a tensor of outputs (got a {type(returned).__name__})")
        reason = f"there is no tensor {LOGITS}. Set `model.output` to the one that holds the outputs"
        if self.field != LOGITS:
            reason = f"model.output is {self.field!r}, which is no tensor among them. Choose one of them"
        raise UnreadOutputError(
            f"{subject} returns a {type(returned).__name__} of {listing}, and {reason}",
            key="model.output",
            found=self.field,
            allowed=[key for key, part in parts.items() if isinstance(part, Tensor)],
        )

    def fitted(
        self, task: PredictionTask, outputs: int, expected: tuple[int, ...], given_outputs: Tensor, rows: int
    ) -> ModuleCall | None:
        """Return this call with outputs of a shape that the task needs; None if they cannot have it.

        Tokens of a batch may be concatenated, ``[b T, V]``.

        Parameters
        ----------
        outputs
            K.
        expected
            Shape of the outputs of one example.
        given_outputs
            A module's outputs.
        rows
            b.
        """
        actual = tuple(given_outputs.shape[1:])
        is_sequence = task.kind.like == "sequence"
        if is_sequence and actual == expected[1:] and len(given_outputs) == rows * expected[0]:
            return replace(self, given=actual, shape=expected)
        if len(given_outputs) != rows:
            return None
        if actual == expected:
            return self
        if task.has_binary_form(outputs) and actual in (expected[1:], (1, *expected[1:])):
            return replace(self, given=actual, shape=expected, binary=True)
        flat = task.kind.is_number and actual == (outputs,)
        if flat or _without_ones(actual) == _without_ones(expected):
            return replace(self, given=actual, shape=expected)
        if is_sequence and actual == expected[::-1]:
            return replace(self, given=actual, shape=expected, classes_first=True)
        return None


AS_IT_IS = ModuleCall()
"""Call with one tensor, whose result is the outputs, or has them in the field ``logits``."""


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without axes of length one."""
    return tuple(size for size in shape if size != 1)


def _parts(returned: Any) -> dict[str | int, Any]:
    """Return the parts of an output by name or position; empty if it has none."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if is_dataclass(returned):
        return {field.name: getattr(returned, field.name) for field in fields(returned)}
    if isinstance(returned, tuple | list):
        named_fields = dict(zip(getattr(returned, "_fields", ()), returned, strict=False))
        return {**named_fields, **{i: part for i, part in enumerate(returned) if not named_fields}}
    return {}


def _shape_or_type(part: Any) -> str:
    return str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__


def log_outputs(name: str, call: ModuleCall) -> None:
    """Log once how a run obtains the logits of a module, unless they are the tensor that it returns."""
    if call.field not in (LOGITS, OUT):
        log_once(f"{name} returns several outputs, of which {call.field!r} is trained; model.output names another")
    if call.probabilities:
        log_once(f"{name} gives probabilities, after a {call.probabilities}: the loss is their negative log-likelihood")
    if call.binary:
        log_once(f"{name} gives one output for two classes: z becomes the logits [0, z], whose loss is a sigmoid's")


def call_of(module: nn.Module, x: ModuleInputs, output: str | int | None = None) -> ModuleCall:
    """Return the way to call a module with such inputs.

    Raise ExperimentError if the inputs are named, and the module takes neither arguments of these names nor a single
    one; or if they are one tensor, and it needs other arguments.

    Parameters
    ----------
    output
        Key ``model.output``.
    """
    field = LOGITS if output is None else output
    signature = inspect.signature(module.forward)
    if isinstance(x, Tensor):
        try:
            signature.bind(x)
        except TypeError as error:
            raise ExperimentError(
                f"{KEY}: {type(module).__name__}.forward takes {', '.join(map(str, signature.parameters.values()))}, "
                f"but an example is one tensor ({error}). Give the other arguments a default, or give examples of "
                "named tensors"
            ) from error
        return ModuleCall(field=field)
    try:
        signature.bind(**x)
    except TypeError as error:
        accepted = signature.parameters.values()
        if len(accepted) == 1 and all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in accepted):
            return ModuleCall(field=field)
        raise ExperimentError(
            f"{KEY}: {type(module).__name__}.forward takes {', '.join(map(str, accepted)) or 'nothing'}, but an "
            f"example consists of {', '.join(x)} ({error}). Name the inputs as its arguments, or take one dict"
        ) from error
    return ModuleCall(by_name=True, field=field)
