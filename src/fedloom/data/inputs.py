"""Inputs of examples: a tensor, or named tensors whose first axes agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
"""``[n, ...]``, or such tensors by name."""

X = TypeVar("X", bound=Inputs)


def each(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs after a function of each tensor."""
    return function(x) if isinstance(x, Tensor) else {name: function(tensor) for name, tensor in x.items()}


def first(x: Inputs) -> Tensor:
    """Return the inputs, or the first of named ones: any tells the number of examples and the device."""
    return x if isinstance(x, Tensor) else next(iter(x.values()))


def count(x: Inputs) -> int:
    """Return the number n of examples."""
    return len(first(x))


def take(x: X, rows: Tensor | slice) -> X:
    """Return some examples."""
    return cast("X", each(x, lambda tensor: tensor[rows]))


def joined(parts: Sequence[Inputs]) -> Inputs:
    """Return the examples of several inputs in one."""
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}  # type: ignore[index]
