"""Lower bounds on ε from attacks: from rates of a membership inference, and from guesses about canaries of one run.

M. Jagielski, J. Ullman, A. Oprea, Auditing differentially private machine learning, NeurIPS 2020, arXiv 2006.07709;
T. Steinke, M. Nasr, M. Jagielski, Privacy auditing with one (1) training run, NeurIPS 2023, arXiv 2305.08846.
A bound that exceeds a claim refutes it; one below proves nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

LARGEST = 700.0
"""ε above which a bound is infinite: e^ε overflows soon after."""


def log_binomial(n: int, p: float) -> NDArray[np.float64]:
    """Return log P[X = k] for k = 0 ... n and X binomial with n trials of probability p in [0, 1], ``[n + 1]``."""
    k, ways = _log_choices(n)
    x, y = torch.tensor(p, dtype=torch.float64), torch.tensor(1 - p, dtype=torch.float64)
    log_terms: NDArray[np.float64] = (ways + torch.xlogy(k, x) + torch.xlogy(n - k, y)).numpy()
    return log_terms


@functools.lru_cache(maxsize=16)  # a bound needs many probabilities for the same n
def _log_choices(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k = 0 ... n and log (n choose k), each ``[n + 1]``."""
    k = torch.arange(n + 1, dtype=torch.float64)
    return k, math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def binomial_tail(k: int, n: int, p: float) -> float:
    """Return P[X ≥ k] for X binomial with n trials of probability p."""
    return min(1.0, float(np.exp(log_binomial(n, p)[max(k, 0) :]).sum()))


def binomial_p_value(k: int, n: int, p: float) -> float:
    """Return the two-sided p-value of k successes in n trials of probability p: twice the smaller tail, at most 1."""
    return min(1.0, 2 * min(binomial_tail(k, n, p), binomial_tail(n - k, n, 1 - p)))


def normal_quantile(level: float) -> float:
    """Return the quantile of the standard normal distribution."""
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def or_null(number: float) -> float | None:
    """Return a number as documents have it: null if it is infinite."""
    return number if math.isfinite(number) else None


def rate_bounds(count: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return the Clopper-Pearson bounds of a rate, given successes of independent trials.

    Each bound holds with this confidence on its own. Without trials they are 0 and 1.
    """
    miss = 1 - confidence
    low, high = 0.0, 1.0
    if count > 0:
        low = _largest(lambda p: binomial_tail(count, trials, p) <= miss)
    if count < trials:
        high = 1 - _largest(lambda p: binomial_tail(trials - count, trials, p) <= miss)
    return low, high


def epsilon_of_rates(
    true_positives: int, members: int, false_positives: int, others: int, *, delta: float, confidence: float
) -> float:
    """Return a lower bound on ε from an attack's decisions about members and others; 0 if there is none.

    (ε, δ)-differential privacy implies TPR ≤ e^ε FPR + δ, and 1 - FPR ≤ e^ε (1 - TPR) + δ. The Clopper-Pearson bounds
    of both rates hold together with this confidence. The decisions must be independent, and the rule that makes them
    chosen without these examples.
    """
    each = (1 + confidence) / 2
    tpr, _ = rate_bounds(true_positives, members, each)
    _, fpr = rate_bounds(false_positives, others, each)
    return max(_log_ratio(tpr - delta, fpr), _log_ratio(1 - fpr - delta, 1 - tpr))


def _log_ratio(above: float, below: float) -> float:
    if above <= 0 or above <= below:
        return 0.0
    return math.log(above / below) if below > 0 else math.inf


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of this many correct guesses about an (ε, δ)-differentially private training.

    Steinke et al., Theorem 5.2 and Appendix D: with W binomial of r guesses and probability e^ε/(1 + e^ε), it is at
    most P[W ≥ v] + 2 m δ max over i of P[v > W ≥ v - i]/i. A separate fair coin decides whether each of the m canaries
    is in. The auditor guesses about r of them; the choice may depend on the outcome, but not on the coins.
    """
    p = 1 / (1 + math.exp(-min(epsilon, LARGEST)))
    each = np.exp(log_binomial(guesses, p))
    p_value = float(each[correct:].sum())
    if correct and delta:
        below = np.cumsum(each[:correct][::-1])  # P[v > W ≥ v - i], i = 1 ... v
        p_value += 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max())
    return min(p_value, 1.0)


def one_run_epsilon(canaries: int, guesses: int, correct: int, *, delta: float, confidence: float) -> float:
    """Return a lower bound on ε from correct guesses about canaries of one run (:func:`one_run_p_value`).

    It is 0 if the guesses are no better than chance allows.
    """
    miss = 1 - confidence
    if one_run_p_value(canaries, guesses, correct, 0.0, delta) > miss:
        return 0.0
    high = 1.0
    while one_run_p_value(canaries, guesses, correct, high, delta) <= miss:
        high *= 2
        if high > LARGEST:
            return math.inf
    return high * _largest(lambda part: one_run_p_value(canaries, guesses, correct, part * high, delta) <= miss)


def _largest(holds: Callable[[float], bool]) -> float:
    """Return the largest number in [0, 1], rounded down, up to which a monotone condition holds."""
    low, high = 0.0, 1.0
    if holds(high):
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
