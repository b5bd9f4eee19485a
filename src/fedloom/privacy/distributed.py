"""Arithmetic of noise in shares: each client adds discrete Gaussian noise to its update before the sums are secure.

Peter Kairouz, Ziyu Liu, Thomas Steinke, The distributed discrete Gaussian mechanism for federated learning with secure
aggregation, ICML 2021, arXiv 2102.06387. Updates are integers there, multiples of a step γ, and so are the shares. At
least m clients of a cohort answer; each adds a share of variance σ²/m, so a sum has variance σ² or more. With more than
m survivors the noise is larger than needed, by the factor √(survivors / m): the price of tolerating dropouts.
"""

from __future__ import annotations

import math


def rounded_sensitivity(clip: float, step: float, dimension: int) -> float:
    """Return the largest ℓ2 norm of a clipped update of d coordinates after rounding to multiples of a step.

    Rounding to the nearest multiple moves a coordinate by at most γ/2, and a vector by at most γ√d/2.
    """
    return clip + step * math.sqrt(dimension) / 2


def distributed_multiplier(
    share: float, survivors: int, clip: float, step: float, dimension: int, *, colluding: int = 0
) -> float:
    """Return the noise multiplier of a Gaussian mechanism that is as concentrated as a sum of noisy integer updates.

    Theorem 1 of Kairouz et al.: the sum satisfies ½ε²-concentrated differential privacy for
    ε = min(√(Δ²/(mσ²) + τd/2), Δ/(√m σ) + τ√d), with τ = 10 Σₖ exp(−2π² (σ/γ)² k/(k + 1)), k = 1 ... m − 1, and Δ of
    :func:`rounded_sensitivity`; a Gaussian mechanism with multiplier 1/ε satisfies the same. τ is 0 in float64 as soon
    as a share is more than seven steps.

    Parameters
    ----------
    share
        Standard deviation σ of a client's share, in the units of the clipping norm.
    survivors
        Number m of shares that are certainly in the sum.
    clip, step, dimension
        Clipping norm C, step γ of the integers, and number d of coordinates.
    colluding
        Number of those clients that disclose their shares to the observer.

    Raises
    ------
    ValueError
        If no share remains, or a share has no noise.
    """
    shares = survivors - colluding
    if shares < 1 or share <= 0:
        raise ValueError(f"no noise remains: {survivors} shares of deviation {share}, {colluding} of them known")
    rate = -2 * (math.pi * share / step) ** 2
    tau = 10 * sum(math.exp(rate * k / (k + 1)) for k in range(1, shares))
    disclosed = rounded_sensitivity(clip, step, dimension) / (math.sqrt(shares) * share)
    return 1 / min(math.sqrt(disclosed**2 + tau * dimension / 2), disclosed + tau * math.sqrt(dimension))
