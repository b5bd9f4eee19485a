"""Guesses about canaries of one training run, with abstention, and the bound on ε that follows.

T. Steinke, M. Nasr, M. Jagielski, Privacy auditing with one (1) training run, NeurIPS 2023, arXiv 2305.08846,
Algorithm 1: each canary is in or out of the training by a fair coin; the auditor sees what training releases, and
guesses "in" for the highest scores, "out" for the lowest, and nothing between.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.privacy.audit_bounds import normal_quantile, one_run_epsilon, or_null
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon

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
        found = one_run_epsilon(m, ins + outs, right, delta=delta, confidence=each)
        if found > best["epsilon"] or not best["right"]:
            best = {"epsilon": found, "guesses_in": ins, "guesses_out": outs, "right": right}
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
    found = {name: {"mean": float(some.mean()), "std": float(some.std(ddof=1))} for name, some in groups.items()}
    apart = abs(found["in"]["mean"] - found["out"]["mean"])
    weighted = sum((len(some) - 1) * found[name]["std"] ** 2 for name, some in groups.items())
    deviation = math.sqrt(weighted / (len(scores) - 2))
    mu = apart / deviation if deviation else math.inf
    error = normal_quantile(confidence) * math.sqrt(sum(1 / n for n in sizes) + mu**2 / (2 * len(scores)))
    epsilon, low, high = (
        or_null(gaussian_epsilon(1 / each, delta) if each > 0 else 0.0) for each in (mu, mu - error, mu + error)
    )
    return {"epsilon": epsilon, "interval": [low, high], **found}
