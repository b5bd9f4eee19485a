"""Trial inputs of a module: one tensor, or named ones, as in the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

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


def trial_inputs(described: Mapping[str, InputDescription], seed: int, rows: int = ROWS) -> ModuleInputs:
    """Return random inputs, ``[rows, ...]``.

    The first entry of each row of integers is the largest of the data, so that the module's tables are tried with it.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {name: _drawn(each, rows, generator) for name, each in described.items()}
    return found.get("", found)


def _drawn(described: InputDescription, rows: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *described.shape)
    if described.kind not in ("tokens", "integers"):
        return torch.randn(shape, generator=generator)
    high = described.high or 2
    dtype = torch.uint8 if described.kind == "tokens" else torch.int64
    drawn = torch.randint(high, shape, generator=generator, dtype=dtype)
    drawn.view(rows, -1)[:, 0] = high - 1
    return drawn


def mapped(x: ModuleInputs, function: Callable[[Tensor], Tensor]) -> ModuleInputs:
    """Apply a function to each tensor of the inputs, and return the results."""
    return function(x) if isinstance(x, Tensor) else {name: function(each) for name, each in x.items()}


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
    found = {name: tuple(each.shape) for name, each in input_shape.items()}
    return found.get("", found)
