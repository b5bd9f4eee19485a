"""The hypernetwork h: descriptors to model parameters (papers/001, Table 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatNetwork, Layout, vjp

TILE = 8
"""Rows per matrix product. A GEMM's bits depend on how many rows it has, so the hypernetwork always runs on this many,
zero-padded: a client's θ is the same whoever else is in its cohort."""

HIDDEN_LAYERS = {"S": 1, "M": 3, "L": 5}
"""Hidden 100x100 layers of the sizes of papers/001, A.5; M is Table 5."""


@dataclass(frozen=True)
class Pullback:
    """The reverse pass of one batch of models: what the clients' Δθ say about v and η_h (Algorithm 2, line 12).

    Attributes
    ----------
    d_v
        ``[c, l]``: row i is J_v(θ_i)ᵀ Δθ_i, not averaged.
    d_eta_h
        Call it for Σ_i w_i J_{η_h}(θ_i)ᵀ Δθ_i, by parameter name. The products with the last layer, which is nearly all
        of η_h, are made only then, so that they can overlap with the clients' work.
    """

    d_v: Tensor
    d_eta_h: Callable[[], dict[str, Tensor]]


class Hypernetwork(FlatNetwork):
    """Linear(l, 100), then hidden 100x100 layers, ReLU after each, then Linear(100, D).

    Parameters
    ----------
    descriptor_size, model_size
        l and D.
    size
        S, M (Table 5) or L.
    output_relu
        ReLU after the last hidden layer, as in Table 5. The official code has none there, which makes the last two
        layers one linear map.
    """

    width = 100

    def __init__(
        self, descriptor_size: int, model_size: int, size: Literal["S", "M", "L"] = "M", *, output_relu: bool = True
    ) -> None:
        self.hidden_layers = HIDDEN_LAYERS[size]
        self.output_relu = output_relu
        self.descriptor_size = descriptor_size
        widths = [descriptor_size, *[self.width] * (self.hidden_layers + 1), model_size]
        entries: list[tuple[str, tuple[int, ...]]] = []
        for i, (before, after) in enumerate(pairwise(widths), start=1):
            entries += [(f"fc{i}.weight", (after, before)), (f"fc{i}.bias", (after,))]
        self.layout = Layout(tuple(entries))
        self.last = f"fc{len(widths) - 1}"

    def _trunk(self, parameters: Mapping[str, Tensor], v: Tensor) -> Tensor:
        h = v
        for i in range(1, self.hidden_layers + 2):
            h = F.linear(h, parameters[f"fc{i}.weight"], parameters[f"fc{i}.bias"])
            if i <= self.hidden_layers or self.output_relu:
                h = F.relu(h)
        return h

    def __call__(self, parameters: Mapping[str, Tensor], v: Tensor) -> Tensor:
        """θ = h(v; η_h), ``[c, l] -> [c, D]``, without a graph."""
        weight, bias = parameters[f"{self.last}.weight"], parameters[f"{self.last}.bias"]
        with torch.no_grad():
            tiles = [F.linear(self._trunk(parameters, tile), weight, bias) for tile in _tiles(v)]
        return torch.cat(tiles)[: len(v)]

    def vjp(self, parameters: Mapping[str, Tensor], v: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Pullback]]:
        """θ = h(v; η_h) and its reverse pass.

        Returns
        -------
        theta
            ``[c, D]``.
        pullback
            ``(delta_theta [c, D], weights [c]) -> Pullback``.
        """
        weight, bias = parameters[f"{self.last}.weight"], parameters[f"{self.last}.bias"]
        names = [name for name in parameters if not name.startswith(self.last)]
        leaves = {name: parameters[name].detach().requires_grad_() for name in names}
        inputs = [tile.detach().requires_grad_() for tile in _tiles(v)]
        hidden = [self._trunk(leaves, tile) for tile in inputs]
        with torch.no_grad():
            theta = torch.cat([F.linear(h.detach(), weight, bias) for h in hidden])[: len(v)]

        def pullback(delta_theta: Tensor, weights: Tensor) -> Pullback:
            deltas = _tiles(delta_theta)
            shares = _tiles(weights.to(delta_theta.dtype)[:, None])
            d_v: list[Tensor] = []
            d_trunk = {name: torch.zeros_like(leaves[name]) for name in names}
            for x, h, delta, share in zip(inputs, hidden, deltas, shares, strict=True):
                d_hidden = delta @ weight  # [tile, 100]
                d_v += vjp(h, [x], d_hidden, keep=True)
                for name, g in zip(names, vjp(h, list(leaves.values()), share * d_hidden), strict=True):
                    d_trunk[name] += g

            def d_eta_h() -> dict[str, Tensor]:
                d_weight, d_bias = torch.empty_like(weight), torch.zeros_like(bias)
                with torch.no_grad():
                    for i, (h, delta, share) in enumerate(zip(hidden, deltas, shares, strict=True)):
                        d_weight.addmm_(delta.t(), share * h, beta=min(i, 1))  # the first tile overwrites
                        d_bias.addmv_(delta.t(), share[:, 0])
                return {**d_trunk, f"{self.last}.weight": d_weight, f"{self.last}.bias": d_bias}

            return Pullback(torch.cat(d_v)[: len(v)], d_eta_h)

        return theta, pullback


def _tiles(rows: Tensor) -> list[Tensor]:
    """Cut [c, ...] into tiles of ``TILE`` rows, the last one zero-padded."""
    short = -len(rows) % TILE
    if short:
        rows = torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])])
    return list(torch.split(rows, TILE))
