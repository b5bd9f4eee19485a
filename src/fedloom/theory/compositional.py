"""Weights of the adversary: Lemma 1 of F. Huang, J. Li, Compositional federated learning, arXiv 2106.11264."""

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


def optimal_weights(losses: Tensor, gamma: float) -> Tensor:
    """Return the r that maximizes :func:`regularized_loss`: exp(f_i/γ) / Σ exp(f_j/γ) (papers/002, Lemma 1, eq. 17-18).

    Parameters
    ----------
    losses
        f ``[n]``.
    gamma
        γ > 0: the smaller it is, the more weight the largest loss has.

    Returns
    -------
    Tensor
        r ``[n]``, on the simplex.
    """
    return torch.softmax(losses / gamma, dim=0)


def composed_loss(losses: Tensor, gamma: float) -> Tensor:
    """Return γ log((1/n) Σ exp(f_i/γ)), the maximum of :func:`regularized_loss` (papers/002, Lemma 1, eq. 5 and 21).

    Parameters
    ----------
    losses
        f ``[n]``.
    gamma
        γ > 0.

    Returns
    -------
    Tensor
        A scalar between the mean and the maximum of f.
    """
    largest = losses.max()
    above: Tensor = gamma * torch.exp((losses - largest) / gamma).mean().log()
    return largest + above
