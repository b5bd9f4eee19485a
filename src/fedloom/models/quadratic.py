"""Noisy quadratic model, a problem with a known solution (papers/004, §6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout


class Quadratic(FlatModel):
    """Estimator θ of the mean of the inputs: an input x costs (θ - x)ᵀ H (θ - x)/2, H diagonal.

    For inputs of mean m and covariance Σ, a client's objective is f_i(θ) = (θ - m)ᵀH(θ - m)/2 + tr(HΣ)/2, and its
    stochastic gradient H(θ - x) has the noise H(x - m). With H = I this is mean estimation.

    Parameters
    ----------
    features
        Length of an input, and of θ.
    curvature
        Diagonal of H: one number for all coordinates, or one for each; all above 0.

    Raises
    ------
    ValueError
        If the number of curvatures differs from ``features``.
    """

    needs_labels = False

    def __init__(self, features: int, curvature: float | Sequence[float] = 1.0) -> None:
        diagonal = [curvature] * features if isinstance(curvature, int | float) else list(curvature)
        if len(diagonal) != features:
            raise ValueError(f"curvature has {len(diagonal)} numbers, but the inputs have {features} features")
        self.layout = Layout((("theta", (features,)),))
        self.curvature = torch.tensor(diagonal, dtype=torch.float64)

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return 0: θ starts at 0."""
        del name, shape, fan_in
        return 0.0

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the inputs themselves, ``[b, f]``."""
        del parameters
        return x

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return θ for each input, ``[b, f] -> [b, f]``."""
        return parameters["theta"].expand_as(x)

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Return (θ - x)ᵀ H (θ - x)/2 of each input, ``[b, f] -> [b]``; labels are ignored."""
        del y
        curvature = self.curvature.to(x)
        return (curvature * (self.forward(parameters, x) - x).square()).sum(1) / 2
