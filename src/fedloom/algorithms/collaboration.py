"""Best weights of personalized collaborative learning (papers/004), and the updates of WGA and Bias Correction.

User 0 minimizes f_0 with N helpers. A1: f_0 is L-smooth. A2: ‖∇f_0(x)‖² ≥ 2μ F(x), with F = f_0 - min f_0. A3:
‖B(x) - B(y)‖ ≤ δ‖x - y‖ with B = ∇f_avg - ∇f_0. A4: ‖B(x)‖² ≤ m‖∇f_0(x)‖² + ζ². A5: every user's gradient has variance
at most σ² + M‖∇f_0(x)‖² (Appendix A; M = 0 in the main text), independently of the others'. Our copy of the paper lacks
its formulas: docs/theory.md, "Collaboration", derives the bounds that these weights minimize.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CollaborationConstants:
    """Constants of A1-A5 for one problem.

    Attributes
    ----------
    helpers
        N.
    bias
        ζ² of A4, the part of the squared gradient distance that does not shrink with ‖∇f_0‖.
    noise
        σ² of A5, the variance of one user's stochastic gradient (summed over coordinates).
    smoothness, pl
        L of A1; μ of A2.
    scaling
        m of A4.
    dissimilarity
        δ of A3.
    growth
        M of Appendix A's A5, the part of the variance that grows with ‖∇f_0‖².
    """

    helpers: float
    bias: float
    noise: float
    smoothness: float = 1.0
    pl: float = 1.0
    scaling: float = 0.0
    dissimilarity: float = 0.0
    growth: float = 0.0

    def __post_init__(self) -> None:
        """Check the constants.

        Raise ValueError if a constant is out of range.
        """
        if not self.helpers > 0:
            raise ValueError(f"helpers must be above 0 (got {self.helpers})")
        if not 0 < self.pl <= self.smoothness:
            raise ValueError(f"pl must be above 0 and at most smoothness, {self.smoothness} (got {self.pl})")
        for name in ("bias", "noise", "scaling", "dissimilarity", "growth"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more (got {getattr(self, name)})")


def optimal_alpha(p: CollaborationConstants, step_size: float) -> float:
    """Return the α that minimizes the floor of WGA: papers/004, "Speedup over training alone", with our constants.

    With A = L η σ², D = A/N + ζ² and q = m A - L η M ζ² it is the smaller root of q α² - (A + D + q) α + A = 0. For
    m = M = 0 this is 1/(1 + 1/N + r), r = ζ²/(L η σ²); without bias and m N/(N + 1), whatever M is.
    """
    a = p.smoothness * step_size * p.noise
    if a == 0:
        return 0.0  # no noise to reduce: collaboration could only add bias
    growing = p.smoothness * step_size * p.growth * p.bias
    b = a * (1 + p.scaling) + a / p.helpers + p.bias - growing
    return 2 * a / (b + math.sqrt(b * b - 4 * (p.scaling * a - growing) * a))


def optimal_alpha_oracle(p: CollaborationConstants, oracle: float) -> float:
    """Return the α of least variance: 1/(1 + (1 + v²/σ²)/N) (papers/004, after Theorem 2)."""
    return p.helpers * p.noise / (p.helpers * p.noise + p.noise + oracle) if p.noise else 0.0


def relative_bias_bc(p: CollaborationConstants, step_size: float, beta: float) -> float:
    """Return r for BC with equal Hessians (δ = 0): β (1 + 1/N) / ((2 - β) L η), independent of ζ."""
    return beta * (1 + 1 / p.helpers) / ((2 - beta) * p.smoothness * step_size)


def optimal_alpha_bc(p: CollaborationConstants, step_size: float, beta: float) -> float:
    """Return the α that minimizes the floor of BC for δ = 0: 1/(1 + 1/N + r), r as above."""
    return 1 / (1 + 1 / p.helpers + relative_bias_bc(p, step_size, beta)) if p.noise else 0.0


def optimal_beta(p: CollaborationConstants, steps: int) -> float:
    """Return the β that minimizes the bound of BC for δ = 0: 2/(1 + √(1 + 4V/a)), a = ζ²/T, V = σ² (1 + 1/N).

    This is about √(ζ²/(TV)), and 1 without noise. A small β keeps c_0 = 0 for long, a large one keeps the noise in c
    (docs/theory.md, Theorem 3).
    """
    observed, start = p.noise * (1 + 1 / p.helpers), p.bias / steps
    if start == 0:
        return 0.0 if observed else 1.0
    return 2 / (1 + math.sqrt(1 + 4 * observed / start))


def weighted_gradient(own: Tensor, helpers: Tensor, alpha: float | Tensor, bias: float | Tensor = 0.0) -> Tensor:
    """Return (1 - α) g_0 + α (g_avg - c): papers/004, Algorithm 2 (c = 0) and Algorithm 3.

    Parameters
    ----------
    own, helpers
        g_0 and g_avg, of the same shape.
    bias
        c, the estimate of g_avg - g_0 before this exchange.
    """
    return (1 - alpha) * own + alpha * (helpers - bias)


def next_bias(bias: Tensor, own: Tensor, helpers: Tensor, beta: float | Tensor) -> Tensor:
    """Return (1 - β) c + β b for the observed bias b = g_avg - g_0: papers/004, Algorithm 3, last two lines."""
    return (1 - beta) * bias + beta * (helpers - own)
