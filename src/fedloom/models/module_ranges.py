"""Largest integers of the columns of an input, each of which a module may look up in a table of its own size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.models.module_call import ModuleCall
from fedloom.models.module_inputs import ModuleInputs, mapped

_MOST = 256
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
    if column.dtype != torch.int64 or column.dim() != 2 or column.shape[1] > _MOST:
        return None
    high = int(column.max())
    limits = torch.zeros(column.shape[1], dtype=torch.int64)
    for j in range(column.shape[1]):

        def is_beyond(value: int, j: int = j) -> bool:
            given = mapped(x, lambda t: torch.zeros_like(t) if t.dtype == torch.int64 else t)
            (given if isinstance(given, Tensor) else given[name])[:, j] = value
            return _is_beyond(module, call, given)

        limits[j] = _largest(high, is_beyond)
    return limits if int(limits.max()) == high else None


def _largest(high: int, is_beyond: Callable[[int], bool]) -> int:
    """Return the largest value from 0 to ``high`` that is not beyond; ``high`` is tried first."""
    low, most = 0, high
    while low < most:
        middle = high if most == high and low == 0 else (low + most + 1) // 2
        low, most = (low, middle - 1) if is_beyond(middle) else (middle, most)
    return low


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
