"""Signals of canaries in every noisy sum of a training, and what follows about its noise and its sampling.

A canary that takes part in a sum R adds a random direction v of the clipping norm C; one that is out adds zeros. If R
does not depend on v, √d ⟨v, R⟩/‖R‖ is standard normal to a good approximation, whatever else R consists of, because v
is uniform on the sphere of d dimensions. If R has the canary, and noise of multiplier z, its mean is at most 1/z. Sums
over such signals are normal (A. Agrawal et al., Let's ask Gauss: improved one-run privacy auditing, 2026, arXiv
2606.12733).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.keyed import make_rng
from fedloom.privacy.audit_bounds import binomial_p_value, normal_quantile, or_null

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Draws:
    """Canaries and sums that could contain them, an entry for each pair, in the order of the sums.

    Attributes
    ----------
    canary
        ``[n]`` position of the canary.
    x
        ``[n]`` √d ⟨v, R⟩/‖R‖.
    taken
        ``[n]`` True if the canary was drawn for the sum, whether it is in or out.
    rate
        ``[n]`` probability q of this that the accountant assumes.
    signal
        ``[n]`` mean 1/z of ``x`` of canaries in the sum, for the noise multiplier z that the accountant assumes.
    """

    canary: NDArray[np.int64]
    x: Floats
    taken: Flags
    rate: Floats
    signal: Floats

    def __len__(self) -> int:
        return len(self.canary)

    def scores(self, canaries: int) -> Floats:
        """Return the log likelihood ratio of "in" to "out" of each canary over all its sums, ``[m]``.

        It uses neither the coins nor who was drawn. The mean of all signals, half of whose canaries are in, shows
        signals that are stronger than the accountant's.
        """
        expected = self.rate * self.signal / 2
        power = float(np.square(expected).sum())
        strength = max(1.0, float((expected * self.x).sum()) / power) if power else 1.0
        ratios = log_ratios(self.x, self.rate, strength * self.signal)
        total: Floats = np.bincount(self.canary, weights=ratios, minlength=canaries).astype(np.float64)
        return total

    def information(self, coins: Flags) -> float:
        """Return Σ 1/z² over the sums that contain a canary: the precision of the estimate of the noise."""
        return float(np.square(self.signal[self.taken & coins[self.canary]]).sum())


class DrawLog:
    """Recorder of :class:`Draws`."""

    def __init__(self) -> None:
        self._parts: list[Draws] = []
        self._sums = 1

    def add(self, canary: NDArray[np.int64], x: Floats, taken: Flags, rate: float, signal: float) -> None:
        """Record the signals ``x`` of some canaries in a sum over a new draw."""
        n = len(canary)
        self._parts.append(Draws(canary, x, taken, np.full(n, rate), np.full(n, signal)))
        self._sums = 1

    def add_again(self, x: Floats) -> None:
        """Record another sum over the last draw: k sums disclose as much as one whose signal is √k times as strong."""
        last, k = self._parts[-1], self._sums
        together = (last.x * math.sqrt(k) + x) / math.sqrt(k + 1)
        self._parts[-1] = Draws(last.canary, together, last.taken, last.rate, last.signal)
        self._sums = k + 1

    def draws(self) -> Draws:
        """Return all records."""
        if not self._parts:
            nothing = np.zeros(0)
            return Draws(nothing.astype(np.int64), nothing, nothing.astype(np.bool_), nothing, nothing)
        return Draws(*(np.concatenate([getattr(part, f.name) for part in self._parts]) for f in fields(Draws)))


def random_direction(seed: int, i: int, size: int) -> Tensor:
    """Return the i-th canary's direction, ``[size]`` float32 of norm 1."""
    drawn = make_rng(seed, "audit", "direction", i).standard_normal(size)
    return torch.from_numpy(drawn / np.linalg.norm(drawn)).float()


def random_directions(seed: int, canaries: NDArray[np.int64], size: int) -> Tensor:
    """Return the directions of some canaries, ``[m, size]``."""
    return torch.stack([random_direction(seed, i, size) for i in canaries.tolist()])


def signals(directions: Tensor, released: Tensor) -> Floats:
    """Return √d ⟨v, R⟩/‖R‖ for directions v ``[m, d]`` of norm 1 and a sum R ``[d]``, ``[m]``; 0 if R is 0."""
    released = released.double()
    norm = float(released.norm())
    products: Floats = (directions @ released.to(directions)).double().numpy()
    return products * (math.sqrt(len(released)) / norm if norm else 0.0)


def log_ratios(x: Floats, rate: Floats, signal: Floats) -> Floats:
    """Return log(1 − q + q e^(s x − s²/2)): the ratio of the densities of (1 − q) N(0, 1) + q N(s, 1) and N(0, 1)."""
    with np.errstate(divide="ignore"):  # q is 1 if all take part
        found: Floats = np.logaddexp(np.log1p(-rate), np.log(rate) + signal * x - signal**2 / 2)
    return found


def noise_estimate(
    draws: Draws, coins: Flags, *, confidence: float, epsilon_at: Callable[[float], float]
) -> dict[str, Any] | None:
    """Return the noise that the signals of canaries show, as a fraction of the accountant's, and its ε.

    The mean of ``x`` over the sums that contain a canary is k/z, where 1/k is this fraction. Other terms of the sums
    only make it look larger. Each bound of the interval holds with this ``confidence``, if signals are normal.

    Parameters
    ----------
    epsilon_at
        Function of a fraction of the noise that returns the ε of the training with such noise.
    """
    information = draws.information(coins)
    if not information:
        return None
    chosen = draws.taken & coins[draws.canary]
    strength = float((draws.signal[chosen] * draws.x[chosen]).sum()) / information
    error = normal_quantile(confidence) / math.sqrt(information)
    noise = [_inverse(strength + side * error) for side in (0, 1, -1)]
    epsilon = [epsilon_at(fraction) if math.isfinite(fraction) else 0.0 for fraction in noise]
    return {
        "epsilon": or_null(epsilon[0]),
        "interval": [or_null(epsilon[2]), or_null(epsilon[1])],
        "noise": or_null(noise[0]),
        "noise_interval": [or_null(noise[1]), or_null(noise[2])],
        "confidence": confidence,
    }


def _inverse(strength: float) -> float:
    """Return 1/k; infinity if there is no signal."""
    return 1 / strength if strength > 0 else math.inf


def sampling_check(draws: Draws) -> dict[str, Any]:
    """Return the p-value of the draws of canaries under the accountant's rates, by exact binomial tests.

    For each rate, a test counts how often canaries were drawn, and another how often one that was drawn for the first
    sum of a pair of consecutive sums was drawn for the second one, too: always, if a cohort or a batch is fixed. The
    least p-value counts, times the number of tests.
    """
    repeated, second = _consecutive(draws)
    p_values: list[float] = []
    expected = 0.0
    for rate in np.unique(draws.rate):
        group = draws.rate == rate
        p_values.append(binomial_p_value(int(draws.taken[group].sum()), int(group.sum()), float(rate)))
        again = repeated[draws.rate[second] == rate]
        p_values.append(binomial_p_value(int(again.sum()), len(again), float(rate)))
        expected += float(rate) * len(again)
    return {
        "p_value": min(1.0, min(p_values) * len(p_values)) if p_values else 1.0,
        "draws": len(draws),
        "drawn": int(draws.taken.sum()),
        "drawn_expected": float(draws.rate.sum()),
        "repeats": int(repeated.sum()),
        "repeats_expected": expected,
    }


def _consecutive(draws: Draws) -> tuple[Flags, NDArray[np.int64]]:
    """Return for each disjoint pair of consecutive sums, with a canary drawn for the first, if it was for the second.

    The second array has the entry of the second sum. Disjoint pairs are independent.
    """
    order = np.argsort(draws.canary, kind="stable")
    canary = draws.canary[order]
    starts = np.flatnonzero(np.append(True, canary[1:] != canary[:-1]))
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    firsts = np.flatnonzero((place[:-1] % 2 == 0) & (place[1:] == place[:-1] + 1))
    firsts = firsts[draws.taken[order[firsts]]]
    second = order[firsts + 1]
    return draws.taken[second], second
