"""Comparison of results of a module, and of the attributes of its layers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TOLERANCE = 1e-2
"""Relative tolerance between results of different kernels or different numbers of rows."""

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of a module that torch manages."""

_NESTED = 4
"""Nesting of lists and dicts up to which attributes are compared."""

ROUNDING = 1e-6
"""Norm, relative to the whole gradient's, up to which a difference in one part counts as a rounding error."""


def near(a: Tensor, b: Tensor, least: float = 1e-9, tolerance: float = TOLERANCE) -> bool:
    """Return True if the norm of the difference is at most ``tolerance`` times that of b, or at most ``least``."""
    a, b = (t.detach().double().nan_to_num(posinf=0.0, neginf=0.0) for t in (a, b))
    return bool((a - b).norm() <= tolerance * b.norm() + least)


def attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return comparable values of the attributes of all layers, by layer and key."""
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
        case nn.Module():  # hidden from the module that holds it, in a list
            return {name: _comparable(t, 0) for name, t in (*value.named_parameters(), *value.named_buffers())}
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
