"""Mean-field Gaussians over θ as vectors v = (μ, ρ), σ = softplus(ρ): papers/003, §2 and §4.

In messages a Gaussian over θ in R^d is one tensor ``[..., 2, d]``: μ in row 0, ρ in row 1. All derivatives are in
closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

MU, RHO = range(2)
"""Rows of v."""


def softplus(rho: float) -> float:
    """Return σ for one ρ."""
    return math.log1p(math.exp(rho)) if rho < 30 else rho


def inverse_softplus(sigma: Tensor) -> Tensor:
    """Return ρ with log(1 + exp ρ) = σ, for σ > 0; accurate for both small and large σ."""
    return sigma + torch.log(-torch.expm1(-sigma))


def gaussian(mu: Tensor, rho: float) -> Tensor:
    """Return v ``[2, d]`` with mean ``mu`` ``[d]`` and standard deviation softplus(``rho``) everywhere."""
    return torch.stack([mu, torch.full_like(mu, rho)])


class MeanField:
    """Gaussian N(μ, σ²) with the quantities for its derivatives: σ, and ``slope`` = dσ/dρ, each ``[..., d]``.

    ``mu`` and ``rho`` may be changed in place if :meth:`refresh` follows.

    Parameters
    ----------
    v
        ``[..., 2, d]``; copied.
    """

    def __init__(self, v: Tensor) -> None:
        self.mu = v.select(-2, MU).clone()
        self.rho = v.select(-2, RHO).clone()
        self.sigma = torch.empty_like(self.rho)
        self.slope = torch.empty_like(self.rho)
        self.refresh()

    def refresh(self) -> None:
        """Compute σ = log(1 + e^ρ) and dσ/dρ = e^ρ / (1 + e^ρ) from one exponential."""
        e = torch.exp(self.rho, out=self.slope)
        torch.log1p(e, out=self.sigma)
        e.div_(1 + e)

    def tensors(self) -> list[Tensor]:
        """Return everything that a step changes in place."""
        return [self.mu, self.rho, self.sigma, self.slope]

    @property
    def v(self) -> Tensor:
        """Vector (μ, ρ), ``[..., 2, d]``."""
        return torch.stack([self.mu, self.rho], dim=-2)

    def sample(self, noise: Tensor) -> Tensor:
        """Return θ = μ + σ g for standard normal g (eq. 26)."""
        return torch.addcmul(self.mu, self.sigma, noise)


def add_posterior_gradient(d_mu: Tensor, d_sigma: Tensor, q: MeanField, w: MeanField, scale: float) -> None:
    """Add ``scale`` · ∂KL(q ‖ w)/∂(μ_q, σ_q) in place (derivative of eq. 8)::

    ∂KL/∂μ_q = (μ_q - μ_w) / σ_w²        ∂KL/∂σ_q = (σ_q - σ_w)(σ_q + σ_w) / (σ_w² σ_q)

    The factored form is exactly 0 where q = w. There, σ_q / σ_w² - 1 / σ_q would leave a rounding error of a few units
    in the last place, which Adam would normalize to steps of its learning rate.
    """
    variance = w.sigma.square()
    d_mu.addcdiv_(q.mu - w.mu, variance, value=scale)
    spread = (q.sigma - w.sigma).mul_(q.sigma + w.sigma)
    d_sigma.addcdiv_(spread, variance.mul_(q.sigma), value=scale)


def prior_gradient(q: MeanField, w: MeanField) -> tuple[Tensor, Tensor]:
    """Return ∂KL(q ‖ w)/∂(μ_w, ρ_w) (derivative of eq. 28)::

    ∂KL/∂μ_w = (μ_w - μ_q) / σ_w²        ∂KL/∂σ_w = ((σ_w - σ_q)(σ_w + σ_q) - (μ_w - μ_q)²) / σ_w³

    Both are exactly 0 where q = w, as in :func:`add_posterior_gradient`.
    """
    variance = w.sigma.square()
    distance = w.mu - q.mu
    spread = (w.sigma - q.sigma).mul_(w.sigma + q.sigma).addcmul_(distance, distance, value=-1)
    d_mu = distance.div_(variance)
    return d_mu, spread.div_(variance.mul_(w.sigma)).mul_(w.slope)


def matched_moments(mu: Tensor, second: Tensor) -> Tensor:
    """Return v ``[2, d]`` of the Gaussian that minimizes Σ_i KL(q_i ‖ w) (Lemma A.2, eqs. A.27 and A.28).

    Parameters
    ----------
    mu
        ``[d]``, mean of the μ_i.
    second
        ``[d]``, mean of σ_i² + (μ_i - mu)².
    """
    return torch.stack([mu, inverse_softplus(second.sqrt())])


BETAS = (0.9, 0.99999)
"""Decay rates of the momentum and of the Hessian's estimate, the package's defaults."""


def by_ivon(
    q: MeanField,
    w: MeanField,
    lr: float,
    zeta: float,
    betas: tuple[float, float],
    memory: list[Tensor] | None = None,
) -> Callable[[Tensor, Tensor], None]:
    """Return a function ``(∂/∂μ, ∂/∂σ) -> None`` that steps q in place, under the prior w, with fresh momentum.

    The derivatives are those of the likelihood's part of Ω, sums over the n examples. In terms of σ, with G = ∂Ω/∂σ and
    τ = h + δ = ζ/(n σ²), the new estimate h' = β₂h + (1 - β₂)ĥ + ½(1 - β₂)²(h - ĥ)²/τ is τ' = τ (1 + x + ½x²), x = (1 -
    β₂) σ G/ζ, which is positive for any x: the Hessian needs no memory other than σ. Then μ' = μ - lr (m/(1 - β₁ᵗ) +
    δ(μ - μ_w))/τ', where m is the momentum of the mean loss's gradient. Where the likelihood's derivatives are 0 and q
    = w, both stay bitwise unchanged. ``memory`` gets the momentum and the number of steps.
    """
    beta1, beta2 = betas
    momentum, made = torch.zeros_like(q.mu), torch.tensor(0)
    if memory is not None:
        memory += [momentum, made]

    def step(d_mu: Tensor, d_sigma: Tensor) -> None:
        made.add_(1)
        momentum.lerp_(d_mu, 1 - beta1)
        d_mu = momentum / (1 - beta1 ** int(made))
        add_posterior_gradient(d_mu, d_sigma, q, w, zeta)
        x = d_sigma.mul_(q.sigma).mul_((1 - beta2) / zeta)
        sigma = q.sigma * (1 + x + x.square() / 2).rsqrt()
        q.mu.addcmul_(d_mu, sigma.square(), value=-lr / zeta)
        q.rho.copy_(torch.where(sigma == q.sigma, q.rho, inverse_softplus(sigma)))
        q.refresh()

    return step
