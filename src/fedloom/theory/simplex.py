"""The probability simplex, on which methods that weight clients by their losses keep the weights."""

from __future__ import annotations

import torch
from torch import Tensor


def project(v: Tensor) -> Tensor:
    """The point of {p: p_i ≥ 0, Σ p_i = 1} that is nearest to v, ``[n] -> [n]``.

    It is max(v - t, 0) for the t that makes it sum to 1, found by sorting: J. Duchi, S. Shalev-Shwartz, Y. Singer,
    T. Chandra, Efficient projections onto the ℓ1-ball for learning in high dimensions, ICML 2008, Figure 1.
    """
    largest = v.sort(descending=True).values
    excess = (largest.cumsum(0) - 1) / torch.arange(1, len(v) + 1, dtype=v.dtype)
    t = excess[int((largest > excess).sum()) - 1]
    return (v - t).clamp(min=0)
