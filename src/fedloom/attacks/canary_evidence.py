"""Evidence of canaries about a training: the noise and sampling that their signals show, and guesses that bound ε."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.keyed import make_rng
from fedloom.privacy.accounting import Release
from fedloom.privacy.audit_bounds import binomial_p_value, normal_quantile, one_run_epsilon, or_null
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon

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

    def add(self, canary: NDArray[np.int64], x: Floats, is_taken: Flags, rate: float, signal: float) -> None:
        """Record the signals ``x`` of some canaries in a sum over a new draw."""
        n = len(canary)
        self._parts.append(Draws(canary, x, is_taken, np.full(n, rate), np.full(n, signal)))
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
            empty = np.zeros(0)
            return Draws(empty.astype(np.int64), empty, empty.astype(np.bool_), empty, empty)
        return Draws(*(np.concatenate([getattr(part, f.name) for part in self._parts]) for f in fields(Draws)))


def random_direction(seed: int, i: int, size: int) -> Tensor:
    """Return the i-th canary's direction, ``[size]`` float32 of norm 1."""
    direction = make_rng(seed, "audit", "direction", i).standard_normal(size)
    return torch.from_numpy(direction / np.linalg.norm(direction)).float()


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
        ratios: Floats = np.logaddexp(np.log1p(-rate), np.log(rate) + signal * x - signal**2 / 2)
    return ratios


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
    selected = draws.taken & coins[draws.canary]
    strength = float((draws.signal[selected] * draws.x[selected]).sum()) / information
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
    is_repeated, second = _consecutive(draws)
    p_values: list[float] = []
    expected = 0.0
    for rate in np.unique(draws.rate):
        group = draws.rate == rate
        p_values.append(binomial_p_value(int(draws.taken[group].sum()), int(group.sum()), float(rate)))
        repeated_at_rate = is_repeated[draws.rate[second] == rate]
        p_values.append(binomial_p_value(int(repeated_at_rate.sum()), len(repeated_at_rate), float(rate)))
        expected += float(rate) * len(repeated_at_rate)
    return {
        "p_value": min(1.0, min(p_values) * len(p_values)) if p_values else 1.0,
        "draws": len(draws),
        "drawn": int(draws.taken.sum()),
        "drawn_expected": float(draws.rate.sum()),
        "repeats": int(is_repeated.sum()),
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


SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the canaries that an auditor guesses about."""

LEAST = 8
"""Minimum number of guesses."""


def guess_counts(canaries: int) -> list[tuple[int, int]]:
    """Return the numbers of guesses "in" and "out" to try: equally many of each, or half as many guesses, all "in".

    A canary that is in has a high score only if it was sampled, so guesses "in" are more reliable.
    """
    sizes = [round(canaries * share) for share in SHARES]
    counts = [(size // 2, size - size // 2) for size in sizes] + [(size // 2, 0) for size in sizes]
    return list(dict.fromkeys(pair for pair in counts if sum(pair) >= LEAST))


def right_guesses(scores: NDArray[np.float64], coins: NDArray[np.bool_], ins: int, outs: int) -> int:
    """Return the number of right guesses: "in" for the highest scores, "out" for the lowest.

    Parameters
    ----------
    scores, coins
        ``[m]``: score of each canary, and True if it is in. Equal scores are ordered by position.
    """
    order = np.argsort(scores, kind="stable")
    return int(coins[order[len(order) - ins :]].sum()) + int((~coins[order[:outs]]).sum())


def confidence_of_each(confidence: float, counts: int) -> float:
    """Return the confidence of each of several bounds that makes all hold together with ``confidence``."""
    return 1 - (1 - confidence) / max(1, counts)


def canary_document(
    scores: NDArray[np.float64], coins: NDArray[np.bool_], *, delta: float, confidence: float
) -> dict[str, Any]:
    """Return the lower bound on ε from guesses about canaries, and the largest that their number allows.

    The largest bound over :func:`guess_counts` counts; each holds with a higher confidence, so that all hold together.
    Infinite values are null.
    """
    m, counts = len(scores), guess_counts(len(scores))
    each = confidence_of_each(confidence, len(counts))
    best = {"epsilon": 0.0, "guesses_in": 0, "guesses_out": 0, "right": 0}
    for ins, outs in counts:
        right = right_guesses(scores, coins, ins, outs)
        bound = one_run_epsilon(m, ins + outs, right, delta=delta, confidence=each)
        if bound > best["epsilon"] or not best["right"]:
            best = {"epsilon": bound, "guesses_in": ins, "guesses_out": outs, "right": right}
    most = max((one_run_epsilon(m, r, r, delta=delta, confidence=each) for r in map(sum, counts)), default=0.0)
    return {
        "canaries": m,
        "in": int(coins.sum()),
        **best,
        "epsilon": or_null(best["epsilon"]),
        "largest_bound": or_null(most),
        "delta": delta,
        "confidence": confidence,
    }


def normal_estimate(
    scores: NDArray[np.float64], coins: NDArray[np.bool_], *, delta: float, confidence: float
) -> dict[str, Any] | None:
    """Return means and deviations of the scores of canaries, and the ε at δ of normal scores with such means.

    Two normal distributions with the same deviation are those of a Gaussian mechanism with this noise, and with the
    difference of the means as its sensitivity. G. Andrew et al., ICLR 2024, arXiv 2302.03098, Algorithm 2, estimate ε
    like this. Each bound of the interval holds with this ``confidence`` if scores are normal. None if fewer than two
    canaries are in, or out.
    """
    groups = {"in": scores[coins], "out": scores[~coins]}
    sizes = [len(some) for some in groups.values()]
    if min(sizes) < 2:
        return None
    estimates = {name: {"mean": float(some.mean()), "std": float(some.std(ddof=1))} for name, some in groups.items()}
    apart = abs(estimates["in"]["mean"] - estimates["out"]["mean"])
    weighted = sum((len(some) - 1) * estimates[name]["std"] ** 2 for name, some in groups.items())
    deviation = math.sqrt(weighted / (len(scores) - 2))
    mu = apart / deviation if deviation else math.inf
    error = normal_quantile(confidence) * math.sqrt(sum(1 / n for n in sizes) + mu**2 / (2 * len(scores)))
    epsilon, low, high = (
        or_null(gaussian_epsilon(1 / each, delta) if each > 0 else 0.0) for each in (mu, mu - error, mu + error)
    )
    return {"epsilon": epsilon, "interval": [low, high], **estimates}


PROBABILITY = 0.9
"""Probability with which an audit finds what it is said to find."""

GUESSES, NOISE, SAMPLING = 0.97, 0.99, 0.99
"""Confidence of each of the three tests: a correct training fails one of them with a probability of at most 0.05."""

TOLERANCE = 0.01
"""Relative error of the noise that is ignored: signals are only nearly normal."""

WANTED = 1 / 3
"""Fraction of the noise that an audit must be able to find: otherwise its verdict is that it has no power."""

MOST_CANARIES = 10_000
"""Largest number of canaries that is proposed."""


@dataclass(frozen=True)
class PlannedAudit:
    """Canaries of a training that is planned.

    Attributes
    ----------
    canaries
        Their number M, half of which are in.
    sums
        Noisy sums that may contain a given canary, with the number of each kind.
    others
        Expected number of other units in a sum, besides canaries.
    groups
        Number of groups of canaries that share no sum: clients, if canaries are their examples; else 1.
    dimension
        Number of coordinates of a sum.
    most
        Largest possible number of canaries.
    reach
        Norm of a canary's term after clipping, as a fraction of the clipping norm.
    """

    canaries: int
    sums: Mapping[Release, int]
    others: float
    groups: int
    dimension: int
    most: int = MOST_CANARIES
    reach: float = 1.0

    def information(self) -> float:
        """Return the expected Σ 1/z² over the sums that contain a canary."""
        return self.canaries / 2 * sum(n * r.rate / r.noise_multiplier**2 for r, n in self.sums.items())

    def strength(self, noise: float) -> float:
        """Return the signal with this fraction of the noise, relative to that with all of it and no other terms.

        The terms of a sum hide a canary as noise does. Directions of other canaries are orthogonal; the other units are
        assumed to agree entirely, which hides most.
        """
        total = sum(self.sums.values())
        rate = sum(n * r.rate for r, n in self.sums.items()) / total
        terms = rate * self.canaries / self.groups / 2 + self.others**2
        z = sum(n * r.noise_multiplier for r, n in self.sums.items()) / total
        return self.reach / math.sqrt(noise**2 + max(terms, 1.0) / self.dimension / z**2)

    def noise_found(self, information: float | None = None) -> float | None:
        """Return the largest fraction of the noise that is found to be too little; None if not even its absence is.

        ``information`` is that of a training that has ended; None: the expected one.
        """
        information = self.information() if information is None else information
        if not information:
            return None
        margin = (normal_quantile(NOISE) + normal_quantile(PROBABILITY)) / math.sqrt(information)
        squared = self.reach**2 * ((1 + margin) ** -2 - self.strength(0.0) ** -2)
        return math.sqrt(squared) if squared > 0 else None


def power_document(plan: PlannedAudit, *, epsilon_at: Callable[[float], float]) -> dict[str, Any]:
    """Return what an audit finds, and what it takes to find more.

    ``epsilon_at`` is a function of a fraction of the noise that returns the ε of the training with such noise.
    """
    noise = plan.noise_found()
    larger = (replace(plan, canaries=m) for m in _larger(plan.canaries, plan.most))
    enough = next((p.canaries for p in larger if has_power(p.noise_found())), None)
    return {
        "probability": PROBABILITY,
        "noise": noise,
        "epsilon": None if noise is None else or_null(epsilon_at(noise)),
        "canaries": None if has_power(noise) else enough,
    }


def verdict(document: Mapping[str, Any], claim: float | None) -> dict[str, Any]:
    """Return the verdict on a claimed ε, and the tests that it has failed; the verdict is null without a claim.

    ``document`` has the keys of ``canaries`` in ``audit.json``. A correct training fails with a probability of at most
    0.05, the sum over the tests (:data:`GUESSES`).
    """
    if claim is None:
        return {"verdict": None}
    estimate = document["normal_estimate"]
    tests = {
        "guesses": document["epsilon"] is None or document["epsilon"] > claim,
        "noise": estimate is not None and (estimate["noise_interval"][1] or math.inf) < 1 - TOLERANCE,
        "sampling": document["sampling"]["p_value"] <= 1 - SAMPLING,
    }
    failed = [test for test, is_failed in tests.items() if is_failed]
    has_passed = estimate is not None and has_power(document["power"]["noise"])
    return {"verdict": "failed" if failed else "passed" if has_passed else "no power", "failed_by": failed}


def has_power(noise: float | None) -> bool:
    """Return whether an audit that finds this fraction of the noise has power."""
    return noise is not None and noise >= WANTED


def _larger(canaries: int, most: int) -> Iterator[int]:
    """Yield larger numbers of canaries: each half as many again, with two digits, rounded up."""
    while True:
        scale = 10 ** max(0, math.floor(math.log10(1.5 * canaries)) - 1)
        canaries = math.ceil(1.5 * canaries / scale) * scale
        if canaries > most:
            return
        yield canaries
