"""Exact analysis of the Gaussian mechanism: the (ε, δ) of given noise, and the noise for a given (ε, δ).

Borja Balle and Yu-Xiang Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, arXiv 1805.06530,
Theorem 8; Jinshuo Dong, Aaron Roth and Weijie Su, "Gaussian Differential Privacy", JRSS-B 2022, arXiv 1905.02383, for
several releases. Noise is described by its multiplier z: the standard deviation of each coordinate divided by the ℓ2
sensitivity of the release. Releases of all data, as opposed to a random part, compose exactly: multipliers z₁, z₂, ...
are equivalent to one with 1/z² = Σ 1/zᵢ², and k releases with z to one with z/√k (Corollary 3.3 of the latter, also for
adaptively chosen releases). This involves no bound, so no numerical accountant is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

MAX_DELTA = 1e-2
"""Largest δ accepted: δ bounds the probability that ε does not hold."""


def gaussian_delta(epsilon: float, multiplier: float) -> float:
    """Return the smallest δ of noise with multiplier z at ε ≥ 0 (Balle and Wang, Theorem 8).

    δ(ε) = Φ(1/2z − εz) − e^ε Φ(−1/2z − εz).
    """
    if multiplier == 0:
        return 1.0
    if math.isinf(multiplier):
        return 0.0
    half, shift = 0.5 / multiplier, epsilon * multiplier
    # In logarithms: e^ε overflows where its product does not.
    log_lost, log_kept = _log_cdf(half - shift), epsilon + _log_cdf(-half - shift)
    return -math.exp(log_lost) * math.expm1(log_kept - log_lost) if log_kept < log_lost else 0.0


def gaussian_epsilon(multiplier: float, delta: float, releases: int = 1) -> float:
    """Return the smallest ε at δ in (0, 1) of this many releases, each with this multiplier; inf without noise.

    The result is at most 10⁻⁹ (relative) too large, never too small.
    """
    if releases == 0:
        return 0.0
    z = multiplier / math.sqrt(releases)
    if z == 0:
        return math.inf
    return _least(lambda epsilon: gaussian_delta(epsilon, z) <= delta, 0.0)


def noise_multiplier(epsilon: float, delta: float, releases: int = 1) -> float:
    """Return the smallest multiplier for which this many releases are jointly (ε, δ)-differentially private, ε > 0.

    The result is at most 10⁻⁹ (relative) too large, never too small; 0 for ε = inf.
    """
    if math.isinf(epsilon):
        return 0.0
    return math.sqrt(releases) * _least(lambda z: gaussian_delta(epsilon, z) <= delta, 0.0)


def compose(multipliers: Iterable[float]) -> float:
    """Return the multiplier of one release that discloses as much as all of these together; inf for none."""
    disclosed = sum(z**-2 for z in multipliers)
    return 1 / math.sqrt(disclosed) if disclosed else math.inf


def on_grid(values: Tensor, deviation: float) -> Tensor:
    """Round noisy numbers to a grid about 10⁶ times finer than the noise.

    The last digits of a floating-point sum can reveal its terms (Mironov, CCS 2012), so they are not released.
    """
    step = 2.0 ** (math.floor(math.log2(deviation)) - 20)
    return (values / step).round() * step


def _log_cdf(x: float) -> float:
    """Return log Φ(x) of the standard normal distribution."""
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))


def _least(enough: Callable[[float], bool], low: float) -> float:
    """Return the smallest x above ``low`` that satisfies a monotone condition, rounded up."""
    if enough(low):
        return low
    high = 1.0
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
