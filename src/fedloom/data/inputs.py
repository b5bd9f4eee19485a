"""Inputs of examples: a tensor, or named tensors whose first axes agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
"""``[n, ...]``, or such tensors by name."""

X = TypeVar("X", bound=Inputs)


def each(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Apply a function to each tensor of the inputs, and return the results."""
    return function(x) if isinstance(x, Tensor) else {name: function(tensor) for name, tensor in x.items()}


def each_named(x: Inputs, function: Callable[[str, Tensor], Tensor]) -> Inputs:
    """Apply a function to each name and tensor, and return the results; a single tensor has the empty name."""
    return function("", x) if isinstance(x, Tensor) else {name: function(name, tensor) for name, tensor in x.items()}


def first(x: Inputs) -> Tensor:
    """Return the inputs, or the first of named ones; all have the same number of examples and device."""
    return x if isinstance(x, Tensor) else next(iter(x.values()))


def single(x: Inputs) -> Tensor:
    """Return the one input tensor; raise TypeError for named ones, which callers reject."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected one input tensor, but there are {', '.join(x)}")
    return x


def count(x: Inputs) -> int:
    """Return the number n of examples."""
    return len(first(x))


def take(x: X, rows: Tensor | slice) -> X:
    """Return the examples at these positions, or in this slice."""
    return cast("X", each(x, lambda tensor: tensor[rows]))


def selected(x: Inputs, index: Tensor) -> Inputs:
    """Return the examples at positions ``[m]``, like :func:`take` but in half the time on a CPU."""
    return each(x, lambda tensor: tensor.index_select(0, index))


def pieces(x: Inputs, size: int) -> Iterator[Any]:
    """Yield the examples in pieces of at most ``size``."""
    return (take(x, slice(start, start + size)) for start in range(0, count(x), size))


def joined(parts: Sequence[Inputs]) -> Inputs:
    """Return the examples of several inputs, concatenated."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}  # type: ignore[index]


def unflattened(x: Inputs, shape: Sequence[int]) -> Inputs:
    """Return examples ``[g · b, ...]`` with first axes ``[g, b, ...]``."""
    return each(x, lambda tensor: tensor.view(*shape, *tensor.shape[1:]))
