"""Aggregation of clients' updates: means by examples or uniform, bounded norms, trimmed means."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.settings import Settings
from fedloom.messages import Replies
from fedloom.models.flat import Layout

COLUMNS = 1 << 16
"""Coordinates per piece of a trimmed mean."""


class Averaging(Settings):
    """Keys of ``algorithm`` common to all methods that average updates."""

    server_lr: float = Field(default=1.0, gt=0, description="factor on the average update")
    weighting: Literal["examples", "uniform"] = Field(default="examples", description="average by n_i or uniformly")
    max_norm: float | None = Field(
        default=None,
        gt=0,
        description="maximum norm of a client's update, to which larger ones are scaled down; null: none",
    )
    trim: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="fraction of the clients' values left out at each end, per coordinate; 0.5: the median",
    )

    @model_validator(mode="after")
    def _trimmed_alike(self) -> Self:
        if self.trim and self.weighting != "uniform":
            raise ValueError(
                f"trim: a trimmed mean counts every client once; set weighting to uniform (got {self.weighting}), or "
                "trim to 0"
            )
        return self

    @property
    def robust(self) -> bool:
        """True if the server processes each update separately."""
        return self.max_norm is not None or self.trim > 0


def mean_update(updates: Replies[Any], s: Averaging) -> Tensor:
    """Return Σ p_i Δθ_i ``[s]`` over present clients, p_i by examples or uniform, or the robust mean if one is set."""
    changes = updates.delta_theta if s.max_norm is None else bounded(updates.delta_theta, s.max_norm)
    if s.trim:
        return trimmed_mean(changes[updates.present], s.trim)
    weights = updates.weights if s.weighting == "examples" else updates.mean_weights
    mean: Tensor = updates.mean(changes, weights)
    return mean


def buffers_by_mean(layout: Layout, theta: Tensor, mean: Tensor, stepped: Tensor) -> Tensor:
    """Return θ ``[d]`` after a server's step, in which buffers move by the clients' mean change alone.

    A rate or a momentum could move a mean of variances out of their range.
    """
    if not layout.buffers:
        return stepped
    return torch.where(layout.mask(layout.buffers), theta + mean, stepped)


def norms_of(updates: Replies[Any], s: Any) -> dict[str, float]:
    """Return statistics of bounded updates: the median of their norms, and the number above the bound."""
    if not isinstance(s, Averaging) or s.max_norm is None:
        return {}
    norms = torch.linalg.vector_norm(updates.delta_theta[updates.present], dim=1, dtype=torch.float64)
    return {"update_norm": float(norms.median()), "bounded": float((norms > s.max_norm).sum())}


def bounded(x: Tensor, most: float) -> Tensor:
    """Scale rows ``[c, s]`` down to at most this ℓ2 norm; smaller rows stay bitwise unchanged.

    Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, Can you really backdoor federated learning?, 2019,
    arXiv 1911.07963, §3.
    """
    norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    scale = torch.where(norms > most, most / norms, 1.0)
    found: Tensor = x * scale.to(x.dtype)[:, None]
    return found


def trimmed_mean(x: Tensor, share: float) -> Tensor:
    """Return the mean ``[s]`` of m rows ``[m, s]`` without the ⌊share · m⌋ largest and smallest of each coordinate.

    At least one value remains, or two of an even number: a share of a half gives the median. D. Yin, Y. Chen,
    K. Ramchandran, P. Bartlett, Byzantine-robust distributed learning, ICML 2018, arXiv 1803.01498, Definitions 1, 2.
    """
    rows = len(x)
    cut = min(math.floor(share * rows + 1e-9), (rows - 1) // 2)  # 0.29 · 100 is 28.999...
    parts = []
    for columns in torch.split(x, COLUMNS, dim=1):  # sorting copies
        middle = columns.sort(dim=0).values[cut : rows - cut]
        total = torch.zeros_like(middle[0])
        for row in middle:
            total += row
        parts.append(total / len(middle))
    return torch.cat(parts)
