"""Hypernetwork h, which maps descriptors to model parameters (papers/001, Table 5)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.settings import Settings
from fedloom.models.flat import FlatNetwork, Layout, linear, linear_entries, vjp

TILE = 8
"""Rows per matrix product. The bits of a GEMM depend on its number of rows, so the hypernetwork always runs on this
many, zero-padded: a client's θ does not depend on the rest of its cohort. The last layer combines several tiles into
one product where that is found to give the same bits."""

ROWS = (64, 32, 16)
"""Row counts to try for the last layer's product beyond ``TILE``. A library that copies the weights into another layout
for each product takes twice as long for eight products of 8 rows as for one of 64."""

COLUMNS = 4096
"""Maximum columns of the last layer per matrix product, in float32 on a CPU. Their weights, 1.6 MB, stay in the cache
for all tiles, whereas all 34 MB of a LeNet's would be reread for each tile. In float64, where speed matters less, a
number's bits depend on the number of columns."""

HIDDEN_LAYERS = {"S": 1, "M": 3, "L": 5}
"""Number of hidden 100x100 layers for the sizes of papers/001, A.5; M is Table 5."""


@dataclass(frozen=True)
class Pullback:
    """Reverse pass of one batch of models: the clients' Δθ pulled back to v and η_h (Algorithm 2, line 12).

    Attributes
    ----------
    d_v
        ``[c, l]``: row i is J_v(θ_i)ᵀ Δθ_i, not averaged.
    d_eta_h
        Function that returns Σ_i w_i J_{η_h}(θ_i)ᵀ Δθ_i by parameter name. Only this call computes the products with
        the last layer, which is nearly all of η_h, so that they can overlap with the clients' work.
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
        ReLU after the last hidden layer, as in Table 5. The official code omits it, which makes the last two layers one
        linear map.
    """

    width = 100

    def __init__(
        self, descriptor_size: int, model_size: int, size: Literal["S", "M", "L"] = "M", *, output_relu: bool = True
    ) -> None:
        self.hidden_layers = HIDDEN_LAYERS[size]
        self.output_relu = output_relu
        self.descriptor_size = descriptor_size
        widths = [descriptor_size, *[self.width] * (self.hidden_layers + 1), model_size]
        self.layout = Layout(tuple(linear_entries(widths)))
        self.last = f"fc{len(widths) - 1}"

    def started_at(self, theta: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters η_h whose output is θ ``[D]`` for every v: the last layer's weights are 0.

        Its first update depends on the hidden layers, so that models of different clients then differ.
        """
        weight, bias = f"{self.last}.weight", f"{self.last}.bias"
        return {**parameters, weight: torch.zeros_like(parameters[weight]), bias: theta.clone()}

    def _trunk(self, parameters: Mapping[str, Tensor], v: Tensor) -> Tensor:
        h = v
        for i in range(1, self.hidden_layers + 2):
            h = linear(parameters, f"fc{i}", h)
            if i <= self.hidden_layers or self.output_relu:
                h = F.relu(h)
        return h

    def forward(self, parameters: Mapping[str, Tensor], v: Tensor) -> Tensor:
        """Return h(v; η_h), ``[..., l] -> [..., D]``, differentiably and without tiles, as clients train it."""
        return linear(parameters, self.last, self._trunk(parameters, v))

    def __call__(self, parameters: Mapping[str, Tensor], v: Tensor) -> Tensor:
        """Return θ = h(v; η_h), ``[c, l] -> [c, D]``, without a graph."""
        with torch.no_grad():
            return self._output(parameters, [self._trunk(parameters, tile) for tile in _tiles(v)])[: len(v)]

    def _output(self, parameters: Mapping[str, Tensor], hidden: Sequence[Tensor]) -> Tensor:
        """Return the last layer's output for all tiles, ``[TILE * tiles, D]``, without a graph."""
        weight, bias = parameters[f"{self.last}.weight"].detach(), parameters[f"{self.last}.bias"].detach()
        h = torch.cat([tile.detach() for tile in hidden])
        fast = weight.device.type == "cpu" and weight.dtype == torch.float32
        theta = weight.new_empty(len(h), len(weight))
        blocks = -(-len(weight) // COLUMNS) if fast else 1
        for w, b, out in zip(weight.chunk(blocks), bias.chunk(blocks), theta.chunk(blocks, 1), strict=True):
            offset = 0
            for rows in (*(_larger(self.width, len(w), torch.get_num_threads()) if fast else ()), TILE):
                while len(h) - offset >= rows:
                    torch.addmm(b, h[offset : offset + rows], w.t(), out=out[offset : offset + rows])
                    offset += rows
        return theta

    def vjp(self, parameters: Mapping[str, Tensor], v: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Pullback]]:
        """Return θ = h(v; η_h) and its reverse pass.

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
            theta = self._output(parameters, hidden)[: len(v)]

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


class HypernetworkShape(Settings):
    """Settings of a hypernetwork's layers."""

    size: Literal["S", "M", "L"] = Field(
        default="M", description="number of hidden layers: 1, 3 or 5 (papers/001, A.5); M is Table 5"
    )
    output_relu: bool = Field(default=True, description="ReLU before the output layer (the official code has none)")
    start: Literal["drawn", "model"] = Field(
        default="drawn",
        description="model: the output layer starts with weights 0 and biases θ₀, the model's own initialization (in "
        "a subspace 0), so every client starts from θ₀, as adapters of a pretrained model need; drawn: at random",
    )

    def network(self, descriptor_size: int, model_size: int) -> Hypernetwork:
        """Return the network R^l -> R^D."""
        return Hypernetwork(descriptor_size, model_size, self.size, output_relu=self.output_relu)


@functools.cache
def _larger(width: int, columns: int, threads: int) -> tuple[int, ...]:
    """Return the sizes in ``ROWS`` that give each row the same bits as in a tile, found by trial.

    This is for float32 and this number of threads. A product's order of summation depends on its shape, not on the
    numbers.
    """
    random = torch.Generator().manual_seed(0)
    w, b = torch.randn(columns, width, generator=random), torch.randn(columns, generator=random)
    h = torch.randn(max(ROWS), width, generator=random)
    expected = torch.cat([torch.addmm(b, tile, w.t()) for tile in torch.split(h, TILE)])
    return tuple(rows for rows in ROWS if torch.equal(torch.addmm(b, h[:rows], w.t()), expected[:rows]))


def _tiles(rows: Tensor) -> list[Tensor]:
    """Cut [c, ...] into tiles of ``TILE`` rows, the last one zero-padded."""
    short = -len(rows) % TILE
    if short:
        rows = torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])])
    return list(torch.split(rows, TILE))
