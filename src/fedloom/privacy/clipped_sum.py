"""Noisy sum of clipped terms, one from each client: its sensitivity, its noise, and the probability of a small cohort.

With adaptive clipping (Andrew et al. 2021) a term has one more coordinate, w (b - 1/2), where b is 1 if the term was
not clipped. Its weight w is chosen so that all coordinates get the same noise: the term's norm is at most
S = sqrt(C² + w²/4), and noise of deviation z S is z_Δ C on an update, and σ_b on the number of bits, for the z_Δ of
:func:`fedloom.privacy.adaptive_clip.update_multiplier`. So the sum is one Gaussian mechanism of multiplier z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedloom.errors import ExperimentError
from fedloom.privacy.adaptive_clip import update_multiplier
from fedloom.privacy.distributed import rounded_sensitivity
from fedloom.privacy.settings import SMALLEST_SUM

SMALL_ODDS = 1e-6
"""Largest probability of :func:`small_cohort_odds`, as a fraction of δ; 10,000 rounds then add a hundredth of δ."""

SLACK = 1e-5
"""Relative error of the norm of a clipped term that arrives as floating-point numbers."""


@dataclass(frozen=True)
class ClippedSum:
    """Bounds and noise of a sum.

    Attributes
    ----------
    clip
        Clipping norm C of a client's update.
    noise_multiplier
        Multiplier z of the whole sum.
    count_noise
        Standard deviation σ_b of the noise on the number of updates that are not clipped; None without that number.
    """

    clip: float
    noise_multiplier: float
    count_noise: float | None = None

    @property
    def bit_weight(self) -> float:
        """Weight w of the coordinate w (b - 1/2); 0 without it."""
        if self.count_noise is None:
            return 0.0
        return update_multiplier(self.noise_multiplier, self.count_noise) * self.clip / self.count_noise

    @property
    def norm(self) -> float:
        """Largest ℓ2 norm S of a client's term."""
        return math.hypot(self.clip, self.bit_weight / 2)

    def deviation(self, step: float = 0.0, dimension: int = 0) -> float:
        """Return the standard deviation of the noise on each coordinate of the sum: z S.

        For terms of d coordinates that are rounded to multiples of a ``step``, S is by at most step √d / 2 larger.
        """
        return self.noise_multiplier * rounded_sensitivity(self.norm, step, dimension)


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor by which a term of this norm is scaled down, 1 if its norm is at most C."""
    return 1.0 if norm <= clip else clip / norm


def small_cohort_odds(population: int, expected: int, least: int = SMALLEST_SUM) -> float:
    """Return the probability that a client is drawn into a cohort that would be too small for a secure sum without it.

    Each client is drawn independently with probability q = expected / population. A cohort of fewer than ``least``
    clients ends the attempt, which can show that a client is absent: a part of δ, q P(least - 1 of the others drawn).
    """
    q, others = min(1.0, expected / population), population - 1
    return q * math.comb(others, least - 1) * q ** (least - 1) * (1 - q) ** max(0, others - least + 1)


def check_cohorts(population: int, expected: int, delta: float) -> None:
    """Check that independent draws rarely give cohorts too small for secure sums: with a probability far below δ.

    Raises
    ------
    ExperimentError
        If cohorts are too small.
    """
    if expected < population and (odds := small_cohort_odds(population, expected)) > SMALL_ODDS * delta:
        raise ExperimentError(
            f"cohorts of {expected} of {population} clients are too small for secure_aggregation with sampling: "
            f"poisson, because a round would have fewer than {SMALLEST_SUM} clients too often ({odds:.1g} per client "
            f"and round, at most {SMALL_ODDS:g} δ)",
            key="federation.clients_per_round",
            found=expected,
            hint="Draw more clients, about 30, or all of them, or set federation.privacy.sampling to fixed.",
        )
