"""Arithmetic of adaptive clipping: the clipping norm follows a quantile of the norms of the updates.

Galen Andrew, Om Thakkar, H. Brendan McMahan, Swaroop Ramaswamy, Differentially private learning with adaptive clipping,
NeurIPS 2021, arXiv 1905.03871. With its update, a client sends b − ½, where b = 1 if the norm of the update is at most
C, else 0; one client then changes the sum of these by ½. Both sums get noise. The claim is that of the multiplier z for
a sum of updates alone: the noise on the updates is increased to compensate for what the bits reveal.
"""

from __future__ import annotations

import math

from fedloom.errors import ExperimentError

KEY = "federation.privacy.adaptive_clip.count_noise"


def update_multiplier(noise_multiplier: float, count_noise: float) -> float:
    """Return the multiplier z_Δ of the noise on updates: (z⁻² − (2σ_b)⁻²)^(−½) (Theorem 1 of Andrew et al.).

    Raises
    ------
    ExperimentError
        If the noise σ_b on the number of unclipped updates is too small: the bits alone would cost more than z allows.
    """
    rest = noise_multiplier**-2 - (2 * count_noise) ** -2
    if rest <= 0:
        least = noise_multiplier / 2
        raise ExperimentError(
            f"{KEY} is {count_noise:g}; with a noise multiplier of {noise_multiplier:g} it must be above {least:g}.",
            key=KEY,
            found=count_noise,
            hint="Set it higher, lower the noise multiplier, or draw more clients per round.",
        )
    return 1 / math.sqrt(rest)


def default_count_noise(clients_per_round: float) -> float:
    """Return σ_b = m/20 for an expected cohort of m clients (section 4 of Andrew et al.)."""
    return clients_per_round / 20


def next_clip(clip: float, noisy_bits: float, expected_cohort: float, quantile: float, lr: float) -> float:
    """Return the clipping norm of the next round: C exp(−η (b̄ − γ)).

    Parameters
    ----------
    noisy_bits
        Sum over the cohort of b − ½, with noise.
    expected_cohort
        Expected number of clients in a cohort, the divisor of the sum; b̄ is this mean plus ½, within [0, 1].
    quantile, lr
        The quantile γ and the learning rate η.
    """
    fraction = min(1.0, max(0.0, noisy_bits / expected_cohort + 0.5))
    return clip * math.exp(-lr * (fraction - quantile))
