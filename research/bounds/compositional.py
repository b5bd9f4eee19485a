"""Objective of the adversary: Lemma 1 of F. Huang, J. Li, Compositional federated learning, arXiv 2106.11264."""

from __future__ import annotations

import torch
from torch import Tensor


def regularized_loss(losses: Tensor, weights: Tensor, gamma: float) -> Tensor:
    """Return Σ r_i f_i - γ Σ r_i log(n r_i), which the adversary r maximizes (papers/002, eq. 4 with KL; eq. 14).

    Parameters
    ----------
    losses
        f ``[n]``.
    weights
        r ``[n]`` on the simplex.
    gamma
        γ > 0.

    Returns
    -------
    Tensor
        A scalar.
    """
    divergence: Tensor = torch.special.xlogy(weights, len(weights) * weights).sum()
    return (weights * losses).sum() - gamma * divergence
