"""Noise from a cryptographic generator: Gaussian and discrete Gaussian numbers, in arrays.

Noise protects only if nobody can compute it. A source therefore reads the key stream of ChaCha20, with a key from the
operating system (:meth:`NoiseSource.secret`), and never a generator of torch or numpy, whose state can be found from
its output. A simulation can derive the key from its seed (:meth:`NoiseSource.seeded`): its results repeat, and its
noise protects nothing.
"""

from __future__ import annotations

import hashlib
import math
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

MAX_DEVIATION = 2.0**44
"""Largest standard deviation of a discrete Gaussian; above it float64 cannot hold every value of its tails."""


class NoiseSource:
    """Stream of independent random numbers. Not for use from several threads at once.

    Parameters
    ----------
    key
        32 bytes that determine the stream.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes (got {len(key)})")
        self._stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    @classmethod
    def secret(cls) -> NoiseSource:
        """Return a source that nobody can repeat: its key comes from the operating system and is kept nowhere."""
        return cls(os.urandom(32))

    @classmethod
    def seeded(cls, seed: bytes) -> NoiseSource:
        """Return the source of a seed, for simulations; anyone who knows the seed can subtract the noise."""
        return cls(hashlib.sha256(b"fedloom/noise/" + seed).digest())

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return this many independent 64-bit words."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return independent numbers, uniform in (0, 1]: multiples of 2⁻⁶⁴, rounded to 53 significant bits."""
        values: NDArray[np.float64] = (self.words(count).astype(np.float64) + 1) * 2.0**-64
        return values

    def gaussian(self, count: int, deviation: float = 1.0) -> NDArray[np.float64]:
        """Return independent numbers from N(0, deviation²), by Box and Muller.

        The last digits of a noisy sum can reveal its terms: round sums with
        :func:`fedloom.privacy.gaussian_mechanism.on_grid` before anyone sees them.
        """
        half = (count + 1) // 2
        radius = np.sqrt(-2 * np.log(self.uniform(half)))
        angle = 2 * math.pi * self.uniform(half)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
        return deviation * both

    def discrete_gaussian(self, count: int, deviation: float) -> NDArray[np.int64]:
        """Return independent integers with P(x) ∝ exp(−x² / 2σ²), σ > 0.

        C. Canonne, G. Kamath, T. Steinke, The discrete Gaussian for differential privacy, NeurIPS 2020, arXiv
        2004.00010, Algorithm 3: a discrete Laplace number y of scale t = ⌊σ⌋ + 1 is accepted with probability
        exp(−(|y| − σ²/t)² / 2σ²). The paper's coins are exact; here uniform numbers are compared with exponentials in
        float64, so that probabilities are exact to a few units in 10¹⁵.

        Raises
        ------
        ValueError
            If the standard deviation is not positive, or too large for exact integers in float64.
        """
        if not 0 < deviation <= MAX_DEVIATION:
            raise ValueError(f"σ must be positive and at most {MAX_DEVIATION:g} (got {deviation})")
        scale = math.floor(deviation) + 1
        accepted_parts: list[NDArray[np.int64]] = []
        missing = count
        while missing > 0:
            y = self._discrete_laplace(int(2.5 * missing) + 32, scale)
            odds = np.exp(-((np.abs(y) - deviation**2 / scale) ** 2) / (2 * deviation**2))
            accepted = y[self.uniform(len(y)) <= odds][:missing]
            accepted_parts.append(accepted)
            missing -= len(accepted)
        return np.concatenate(accepted_parts) if accepted_parts else np.empty(0, np.int64)

    def _discrete_laplace(self, most: int, scale: int) -> NDArray[np.int64]:
        """Return integers with P(x) ∝ exp(−|x| / t), fewer than ``most`` (Algorithm 2).

        |x| = u + t v, for u in 0 ... t − 1 with P(u) ∝ e^(−u/t) and a geometric v with P(v ≥ k) = e^(−k). Every second
        zero is dropped, since ±0 are one number.
        """
        words = self.words(most)
        words = words[words < np.uint64(2**64 // scale * scale)] if scale & (scale - 1) else words
        u = words % np.uint64(scale)
        u = u[self.uniform(len(u)) <= np.exp(-(u / scale))].astype(np.int64)
        v = np.floor(-np.log(self.uniform(len(u)))).astype(np.int64)
        negative = (self.words(len(u)) & np.uint64(1)).astype(bool)
        size = u + scale * v
        samples = np.where(negative, -size, size)
        accepted: NDArray[np.int64] = samples[~(negative & (size == 0))]
        return accepted
