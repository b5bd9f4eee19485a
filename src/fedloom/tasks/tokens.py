"""Targets of next-token prediction from the inputs themselves; imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.tasks.names import IGNORED


def next_tokens(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Return the target of each output, ``[n, T], [n, T] -> [n, T]``: ``y``, or the inputs moved by one place.

    If ``y`` equals ``x`` wherever it is not ignored (-100), as language models expect their labels, the target of
    output t is ``y[t + 1]``, and the last output has none. Else ``y[t]`` is the target of output t.
    """
    ignored = IGNORED["next_token"]
    same = y == x if x.shape == y.shape else np.zeros(1, dtype=bool)
    if not same.any() or not (same | (y == ignored)).all():
        return y
    moved = np.full(y.shape, ignored, dtype=np.int64)
    moved[:, :-1] = y[:, 1:]
    return moved
