"""Random subspaces of parameter space: θ = θ₀ + P v, v in R^k, with θ₀ and P drawn from a seed.

P is a signed random grouping. A random permutation divides the d coordinates of θ into k groups of d/k, rounded up or
down; row i of P has one entry, ±1/√n_j with a fair sign, in the column j of its group, n_j being the size of that
group. Columns have disjoint supports and norm 1, so PᵀP = I exactly: ‖P v‖ = ‖v‖, and PPᵀ projects orthogonally. Over
the draw, E[PPᵀ] = (k/d) I, so E‖Pᵀ g‖² = (k/d) ‖g‖² for any g, as for the columns of a uniform orthonormal frame. P v
and Pᵀ g cost O(d), and P is d indices and signs, which every process draws again. Training in a random subspace: C. Li,
H. Farkhoor, R. Liu, J. Yosinski, Measuring the intrinsic dimension of objective landscapes, ICLR 2018, arXiv
1804.08838; groups without signs are those of Uni-LoRA, arXiv 2506.00799.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.keyed import make_rng, signed_grouping
from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel


class Subspace:
    """Affine subspace θ₀ + P R^k of a model's parameters; θ₀ is the model's initialization.

    Parameters
    ----------
    model
        Model of d parameters.
    size
        k, from 1 to d.
    seed
        Seed from which every process draws the same θ₀ and P.
    dtype
        Type of θ₀ and of the entries of P.

    Attributes
    ----------
    origin
        The point θ₀, ``[d]``.
    groups
        Column of the one nonzero entry of each row of P, ``[d]`` int64.
    entries
        These entries, ``[d]``.
    """

    def __init__(self, model: FlatModel, size: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        d, self.size = model.layout.size, size
        own = int(make_rng(seed, "subspace", "origin").random() * 2**53)
        self.origin = model.init(torch.Generator().manual_seed(own), dtype)
        grouping = signed_grouping(seed, "subspace", count=d, groups=size)
        self.groups, positive = torch.from_numpy(grouping[0]).long(), torch.from_numpy(grouping[1])
        norms = torch.bincount(self.groups).double().rsqrt()[self.groups]
        self.entries = torch.where(positive, norms, -norms).to(dtype)
        self._copies: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def expand(self, v: Tensor, origin: Tensor | None = None) -> Tensor:
        """Return θ = θ₀ + P v, ``[k] -> [d]`` or ``[g, k] -> [g, d]``; differentiable, also in an ``origin`` given."""
        vectors, groups, entries = self._on(v.device)
        return (vectors if origin is None else origin) + entries * v.index_select(-1, groups)

    def project(self, change: Tensor) -> Tensor:
        """Return Pᵀ Δθ, ``[g, d] -> [g, k]``: the gradient with respect to v where Δθ is that of θ."""
        _, groups, entries = self._on(change.device)
        return change.new_zeros(len(change), self.size).index_add_(1, groups, entries * change)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return θ₀ and P's columns and entries on a device."""
        if device not in self._copies:
            self._copies[device] = (self.origin.to(device), self.groups.to(device), self.entries.to(device))
        return self._copies[device]


DIMENSION = 500
"""k by default, if the model has as many parameters."""


class SubspaceSettings(Settings):
    """Settings of a random subspace θ₀ + P v of the clients' model."""

    size: int | None = Field(
        default=None, ge=1, description="k: length of v; null: 500, or the number of the model's parameters if smaller"
    )

    def dimension(self, model: FlatModel) -> int:
        """Return k for a model."""
        return min(DIMENSION, model.layout.size) if self.size is None else self.size

    def check(self, model: FlatModel, key: str) -> None:
        """Check that a model has at least k parameters.

        Raise ExperimentError if it has fewer; the message begins with the ``key`` of these settings.
        """
        if self.dimension(model) > model.layout.size:
            raise ExperimentError(
                f"{key}.size: must be at most {model.layout.size}, the number of the model's parameters (got "
                f"{self.size})",
                key=f"{key}.size",
                found=self.size,
            )

    def of(self, model: FlatModel, seed: int, dtype: torch.dtype) -> Subspace:
        """Return the subspace of a model that a seed draws."""
        return Subspace(model, self.dimension(model), seed, dtype)
