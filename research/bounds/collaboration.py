"""Personalized collaborative learning (papers/004): bounds for WGA and Bias Correction, the best weight, the speedup.

Our copy of papers/004 lacks its formulas. This module follows the form of its Theorems 1-3, but the derivation and the
constants are ours; docs/theory.md, "Collaboration", gives every step.

User 0 minimizes f_0 with N helpers. A1: f_0 is L-smooth. A2: ‖∇f_0(x)‖² ≥ 2μ F(x), with F = f_0 - min f_0. A3:
‖B(x) - B(y)‖ ≤ δ‖x - y‖ with B = ∇f_avg - ∇f_0. A4: ‖B(x)‖² ≤ m‖∇f_0(x)‖² + ζ². A5: every user's gradient has variance
at most σ² + M‖∇f_0(x)‖² (Appendix A; M = 0 in the main text), independently of the others'. ``excess`` is F at the
start.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fedloom.algorithms.collaboration import CollaborationConstants as Constants


def weighted_variance(alpha: float, noise: float, helpers: float, oracle: float = 0.0) -> float:
    """Return the variance of (1 - α) g_0 + α (g_avg - c): (1 - α)² σ² + α² (σ² + v²)/N.

    Parameters
    ----------
    oracle
        v², the variance of a bias oracle for one helper (papers/004, Theorem 2).
    """
    return (1 - alpha) ** 2 * noise + alpha**2 * (noise + oracle) / helpers


# --- the best weight and what it brings -------------------------------------------------------------------------------


def relative_bias(p: Constants, step_size: float) -> float:
    """Return r = ζ²/(L η σ²), the ratio of bias to noise in :func:`wga_floor`; infinite without noise.

    With η = 1/(μT), which up to a factor ln T is the step size at which T steps forget the start, it is μ T ζ²/(L σ²):
    bias accumulates over the rounds.
    """
    if p.bias == 0:
        return 0.0
    return p.bias / (p.smoothness * step_size * p.noise) if p.noise else math.inf


def mean_estimation_loss(p: Constants, alpha: float, samples: int) -> float:
    """Return E F of (1 - α) x̄_0 + α x̄_avg: ((1 - α)² σ²/T + α² (σ²/(N T) + ζ²))/2.

    T is the number of samples per user (papers/004, §4). f_i(x) = E(x - s_i)²/2, so F is half the squared error of m_0.
    This is model averaging as studied by Grimberg et al. (arXiv 2110.12946), and the result of WGA with
    η_t = 1/(t + 1). Its best weight, for known σ and ζ, is :func:`optimal_alpha` at η = 1/T.
    """
    return (weighted_variance(alpha, p.noise, p.helpers) / samples + alpha**2 * p.bias) / 2


def speedup(helpers: float, relative: float) -> float:
    """Return the ratio of :func:`wga_floor` alone to that with the best α, for m = M = 0: 1 + N/(1 + N r).

    It is N + 1 without bias (linear speedup); with bias it stays below 1 + 1/r for any number of helpers (papers/004,
    Figure 1). It is a ratio of bounds. Without bias it is also the ratio of the losses, which with bias may be half of
    it (docs/theory.md).
    """
    return 1 + helpers / (1 + helpers * relative) if math.isfinite(relative) else 1.0


# --- Theorem 1 and 2 --------------------------------------------------------------------------------------------------


def descent(p: Constants, alpha: float, step_size: float) -> float:
    """Return 1 - α² m - L η M ((1 - α)² + α²/N), the share of a step's descent left by the growing bias and noise.

    Raises
    ------
    ValueError
        If it is not positive: no bound is known in that case.
    """
    if alpha**2 * p.scaling >= 1:
        raise ValueError(f"alpha must be below {1 / math.sqrt(p.scaling):g} = 1/√m (got {alpha})")
    left = 1 - alpha**2 * p.scaling
    growing = p.smoothness * weighted_variance(alpha, p.growth, p.helpers)
    if step_size * growing >= left:
        raise ValueError(f"step_size must be below {left / growing:g} (got {step_size:g})")
    return left - step_size * growing


def wga_floor(p: Constants, alpha: float, step_size: float, oracle: float = 0.0) -> float:
    """Return (α² ζ² + L η σ²(α)) / :func:`descent`: 2μ times the loss at which WGA stalls (Theorem 1, PL case)."""
    left = descent(p, alpha, step_size)
    noise = p.smoothness * step_size * weighted_variance(alpha, p.noise, p.helpers, oracle)
    return (alpha**2 * p.bias + noise) / left


def wga_bound(p: Constants, alpha: float, step_size: float, steps: int, excess: float) -> float:
    """Return the bound on (1/T) Σ E‖∇f_0(x_t)‖², t < T, for η ≤ 1/L (form of Theorem 1, nonconvex case)."""
    _check_step(p, step_size)
    return 2 * excess / (step_size * steps * descent(p, alpha, step_size)) + wga_floor(p, alpha, step_size)


def wga_bound_pl(p: Constants, alpha: float, step_size: float, steps: int, excess: float) -> float:
    """Return the bound on E F(x_T) for η ≤ 1/L under A2 (form of Theorem 1, PL case)."""
    _check_step(p, step_size)
    contraction = 1 - step_size * p.pl * descent(p, alpha, step_size)
    return float(contraction**steps * excess + wga_floor(p, alpha, step_size) / (2 * p.pl))


def oracle_bound_pl(p: Constants, alpha: float, step_size: float, steps: int, excess: float, oracle: float) -> float:
    """Return the bound on E F(x_T) with an unbiased oracle of the mean bias, of variance v²/N (Theorem 2, PL case).

    It depends on neither ζ nor m.
    """
    unbiased = replace(p, bias=0.0, scaling=0.0)
    _check_step(p, step_size)
    contraction = 1 - step_size * p.pl * descent(unbiased, alpha, step_size)
    return float(contraction**steps * excess + wga_floor(unbiased, alpha, step_size, oracle) / (2 * p.pl))


# --- Theorem 3 --------------------------------------------------------------------------------------------------------


def bc_step_size(p: Constants, alpha: float, beta: float) -> float:
    """Return the largest η for which :func:`bc_bound` holds; for δ > 0 the PL case also needs η ≤ β/(2μ)."""
    slow = math.inf if alpha * p.dissimilarity == 0 else beta / (4 * math.sqrt(2) * alpha * p.dissimilarity)
    return min(1 / p.smoothness, slow)


def bc_bound(
    p: Constants, alpha: float, beta: float, step_size: float, steps: int, excess: float, bias: float
) -> float:
    """Return the bound on (1/T) Σ E‖∇f_0(x_t)‖², t < T (form of Theorem 3, nonconvex case).

    Parameters
    ----------
    bias
        ‖B(x_0)‖², the squared error of c_0 = 0; it is divided by T.

    Raises
    ------
    ValueError
        If η is above :func:`bc_step_size`, or M is too large for it.
    """
    _check_step(p, step_size, bc_step_size(p, alpha, beta))

    def of(noise: float) -> float:  # contribution of noise of this variance
        variance, observed = weighted_variance(alpha, noise, p.helpers), noise * (1 + 1 / p.helpers)
        if p.dissimilarity == 0:
            return p.smoothness * step_size * variance + alpha**2 * beta * observed / (2 - beta)
        drift = 16 * (alpha * p.dissimilarity * step_size / beta) ** 2 * variance
        return 2 * p.smoothness * step_size * variance + 16 * alpha**2 * beta * observed + drift

    left = 1 - of(p.growth)
    if left <= 0:
        raise ValueError(f"growth must be below {1 / of(1.0):g} at this α, β and η (got {p.growth:g})")
    if p.dissimilarity == 0:
        start = 2 * excess / step_size + alpha**2 * bias / (beta * (2 - beta))
    else:
        start = 4 * excess / step_size + 8 * alpha**2 * bias / beta
    return (start / steps + of(p.noise)) / left


def bc_bound_pl(
    p: Constants, alpha: float, beta: float, step_size: float, steps: int, excess: float, bias: float
) -> float:
    """Return the bound on E F(x_T) under A2 (form of Theorem 3, PL case); arguments as in :func:`bc_bound`.

    The part that does not vanish with T depends on neither ζ nor m. Only for M = 0.

    Raises
    ------
    ValueError
        If η is too large, or M is not 0.
    """
    if p.growth:
        raise ValueError(f"growth must be 0 (got {p.growth:g})")
    allowed = bc_step_size(p, alpha, beta)
    variance = weighted_variance(alpha, p.noise, p.helpers)
    observed = p.noise * (1 + 1 / p.helpers)
    if p.dissimilarity == 0:
        _check_step(p, step_size, allowed)
        slow, fast = 1 - step_size * p.pl, (1 - beta) ** 2
        # Σ_k slow^(T-1-k) fast^k, the remaining effect of the wrong initial c
        left = (slow**steps - fast**steps) / (slow - fast) if slow != fast else steps * slow ** (steps - 1)
        floor = p.smoothness * step_size * variance + alpha**2 * beta * observed / (2 - beta)
        return float(slow**steps * excess + step_size / 2 * alpha**2 * bias * left + floor / (2 * p.pl))
    _check_step(p, step_size, min(allowed, beta / (2 * p.pl)))
    start = excess + 2 * step_size * alpha**2 * bias / beta
    floor = (
        p.smoothness * step_size * variance
        + 8 * alpha**2 * beta * observed
        + 8 * (alpha * p.dissimilarity * step_size / beta) ** 2 * variance
    )
    return float((1 - step_size * p.pl / 2) ** steps * start + floor / p.pl)


def _check_step(p: Constants, step_size: float, allowed: float | None = None) -> None:
    allowed = 1 / p.smoothness if allowed is None else allowed
    if not 0 < step_size <= allowed * (1 + 1e-12):
        raise ValueError(f"step_size must be above 0 and at most {allowed:g} (got {step_size:g})")


# --- exact losses on a quadratic --------------------------------------------------------------------------------------


def quadratic_losses(
    p: Constants,
    curvature: float,
    alpha: float,
    beta: float | None,
    step_size: float,
    steps: int,
    start: float,
) -> list[float]:
    """Return the exact E F(x_t), t = 0 ... T, on the one-dimensional noisy quadratic model (papers/004, §6).

    f_i(x) = h (x - m_i)²/2 with gradient noise of variance σ², and B = h (m_0 - m_avg) constant, ζ² = B². With
    z = x - m_0 and e = c - B,

        z⁺ = (1 - ηh) z + η α e - η ((1 - α) n_0 + α n_avg),    e⁺ = (1 - β) e + β (n_avg - n_0),

    so first and second moments follow a linear recursion. With M > 0 every user's noise has the variance σ² + M h² z²,
    which is also linear in the moments.

    Parameters
    ----------
    curvature
        h.
    beta
        β of BC, which starts at c_0 = 0; None for WGA, whose c stays 0 (α = 0 is Alone).
    start
        z_0.
    """
    helpers, noise = p.helpers, p.noise
    beta = 0.0 if beta is None else beta
    keep, pull = 1 - step_size * curvature, step_size * alpha
    z_noise = step_size**2 * weighted_variance(alpha, noise, helpers)
    e_noise = beta**2 * noise * (1 + 1 / helpers)
    shared = step_size * beta * noise * ((1 - alpha) - alpha / helpers)
    growth = p.growth * curvature**2
    z_growth = step_size**2 * weighted_variance(alpha, growth, helpers)
    e_growth = beta**2 * growth * (1 + 1 / helpers)
    both_grow = step_size * beta * growth * ((1 - alpha) - alpha / helpers)
    bias = math.sqrt(p.bias)
    zz, ze, ee = start * start, -start * bias, bias * bias
    losses = [curvature * zz / 2]
    for _ in range(steps):
        zz, ze, ee = (
            keep * keep * zz + 2 * keep * pull * ze + pull * pull * ee + z_noise + z_growth * zz,
            keep * (1 - beta) * ze + pull * (1 - beta) * ee + shared + both_grow * zz,
            (1 - beta) ** 2 * ee + e_noise + e_growth * zz,
        )
        losses.append(curvature * zz / 2)
    return losses
