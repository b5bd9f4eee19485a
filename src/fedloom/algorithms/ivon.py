"""IVON: optimizer of a mean-field Gaussian, with an online estimate of the Hessian's diagonal.

Y. Shen, N. Daheim, B. Cong, P. Nickl, G. M. Marconi, C. Bazan, R. Yokota, I. Gurevych, D. Cremers, M. E. Khan,
T. Möllenhoff, Variational learning is effective for large deep networks, ICML 2024, arXiv 2402.17641, Algorithm 1. IVON
minimizes λ E_q[ℓ(θ)] + KL(q ‖ N(0, 1/(λδ))) for a mean loss ℓ, effective sample size λ and prior precision λδ. Its q
has mean m and variance 1/(λ(h + δ)), where h is the estimate. With λ = n/ζ, and a separate prior N(μ_w, σ_w²) of each
coordinate, so that δ = ζ/(n σ_w²), this objective is Ω/ζ of pFedBayes (papers/003, eq. 27).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.algorithms.mean_field import MeanField, add_posterior_gradient, inverse_softplus

BETAS = (0.9, 0.99999)
"""Decay rates of the momentum and of the Hessian's estimate, the package's defaults."""


def by_ivon(
    q: MeanField, w: MeanField, lr: float, zeta: float, betas: tuple[float, float]
) -> Callable[[Tensor, Tensor], None]:
    """Return a function ``(∂/∂μ, ∂/∂σ) -> None`` that steps q in place, under the prior w, with fresh momentum.

    The derivatives are those of the likelihood's part of Ω, sums over the n examples. In terms of σ, with G = ∂Ω/∂σ and
    τ = h + δ = ζ/(n σ²), the new estimate h' = β₂h + (1 - β₂)ĥ + ½(1 - β₂)²(h - ĥ)²/τ is τ' = τ (1 + x + ½x²), x = (1 -
    β₂) σ G/ζ, which is positive for any x: the Hessian needs no memory other than σ. Then μ' = μ - lr (m/(1 - β₁ᵗ) +
    δ(μ - μ_w))/τ', where m is the momentum of the mean loss's gradient. Where the likelihood's derivatives are 0 and q
    = w, both stay bitwise unchanged.
    """
    beta1, beta2 = betas
    momentum, made = torch.zeros_like(q.mu), 0

    def step(d_mu: Tensor, d_sigma: Tensor) -> None:
        nonlocal made
        made += 1
        momentum.lerp_(d_mu, 1 - beta1)
        d_mu = momentum / (1 - beta1**made)
        add_posterior_gradient(d_mu, d_sigma, q, w, zeta)
        x = d_sigma.mul_(q.sigma).mul_((1 - beta2) / zeta)
        sigma = q.sigma * (1 + x + x.square() / 2).rsqrt()
        q.mu.addcmul_(d_mu, sigma.square(), value=-lr / zeta)
        q.rho.copy_(torch.where(sigma == q.sigma, q.rho, inverse_softplus(sigma)))
        q.refresh()

    return step
