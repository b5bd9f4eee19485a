"""The Gaussian mechanism, exactly: what (ε, δ) some noise gives, and what noise some (ε, δ) needs.

Borja Balle and Yu-Xiang Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, arXiv 1805.06530,
Theorem 8; Jinshuo Dong, Aaron Roth and Weijie Su, "Gaussian Differential Privacy", JRSS-B 2022, arXiv 1905.02383, for
several releases. Noise is told by its multiplier z: the deviation of each coordinate over the ℓ2 sensitivity of what is
released. Releases of all data, and not of a random part of them, compose exactly: those with multipliers z₁, z₂, ...
are one with 1/z² = Σ 1/zᵢ², k with z one with z/√k (Corollary 3.3 of the latter, also where each is chosen by what the
others gave), so that no bound is involved, and no accountant that computes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

MAX_DELTA = 1e-2
"""Largest δ that is accepted: δ bounds the probability that ε does not hold."""


def gaussian_delta(epsilon: float, multiplier: float) -> float:
    """The smallest δ of noise with this multiplier z at ε ≥ 0 (Balle and Wang, Theorem 8).

    δ(ε) = Φ(1/2z − εz) − e^ε Φ(−1/2z − εz).
    """
    if multiplier == 0:
        return 1.0
    if math.isinf(multiplier):
        return 0.0
    half, shift = 0.5 / multiplier, epsilon * multiplier
    # Of logarithms: e^ε overflows where its product does not.
    lost, kept = _log_cdf(half - shift), epsilon + _log_cdf(-half - shift)
    return -math.exp(lost) * math.expm1(kept - lost) if kept < lost else 0.0


def gaussian_epsilon(multiplier: float, delta: float, releases: int = 1) -> float:
    """The smallest ε at δ in (0, 1) of so many releases, each with this multiplier; inf without noise.

    At most 10⁻⁹ (relative) too large, never too small.
    """
    if releases == 0:
        return 0.0
    z = multiplier / math.sqrt(releases)
    if z == 0:
        return math.inf
    return _least(lambda epsilon: gaussian_delta(epsilon, z) <= delta, 0.0)


def noise_multiplier(epsilon: float, delta: float, releases: int = 1) -> float:
    """The smallest multiplier with which so many releases together are (ε, δ)-differentially private, ε > 0.

    At most 10⁻⁹ (relative) too large, never too small; 0 for ε = inf.
    """
    if math.isinf(epsilon):
        return 0.0
    return math.sqrt(releases) * _least(lambda z: gaussian_delta(epsilon, z) <= delta, 0.0)


def together(multipliers: Iterable[float]) -> float:
    """The multiplier of one release that tells as much as these do together; inf of none."""
    told = sum(z**-2 for z in multipliers)
    return 1 / math.sqrt(told) if told else math.inf


def on_grid(values: Tensor, deviation: float) -> Tensor:
    """Round noisy numbers to a grid some 10⁶ times finer than the noise.

    The last digits of a sum of floating-point numbers can tell which were added (Mironov, CCS 2012): they do not leave.
    """
    step = 2.0 ** (math.floor(math.log2(deviation)) - 20)
    return (values / step).round() * step


def _log_cdf(x: float) -> float:
    """log Φ(x), of the standard normal distribution."""
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))


def _least(enough: Callable[[float], bool], low: float) -> float:
    """The smallest x above ``low`` that is enough, where all larger ones are; rounded up."""
    if enough(low):
        return low
    high = 1.0
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
