"""Projection onto the probability simplex, for methods that weight clients by their losses."""

from __future__ import annotations

import torch
from torch import Tensor


def project(v: Tensor) -> Tensor:
    """Return the point of {p: p_i ≥ 0, Σ p_i = 1} nearest to v, ``[n] -> [n]``.

    It is max(v - t, 0) for the t that makes the sum 1, found by sorting: J. Duchi, S. Shalev-Shwartz, Y. Singer,
    T. Chandra, Efficient projections onto the ℓ1-ball for learning in high dimensions, ICML 2008, Figure 1.
    """
    largest = v.sort(descending=True).values
    excess = (largest.cumsum(0) - 1) / torch.arange(1, len(v) + 1, dtype=v.dtype)
    t = excess[int((largest > excess).sum()) - 1]
    return (v - t).clamp(min=0)
