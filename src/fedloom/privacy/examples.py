"""Differential privacy of a message of a client, and of its examples, as its local steps apply it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedloom.errors import ExperimentError
from fedloom.privacy.settings import TrainingPrivacy


@dataclass(frozen=True)
class ExamplePrivacy:
    """Settings of noisy steps on clipped gradients of examples (DP-SGD).

    M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang, Deep learning with differential
    privacy, CCS 2016, arXiv 1607.00133, Algorithm 1.

    Attributes
    ----------
    clip
        C, the largest ℓ2 norm of the gradient of one example.
    noise_multiplier
        z: noise of standard deviation z · C on each coordinate of a sum of such gradients.
    sampling
        Draw of a mini-batch: ``poisson``, every example with the same probability, independently, or ``fixed``, a
        number of examples without replacement.
    """

    clip: float
    noise_multiplier: float
    sampling: Literal["poisson", "fixed"] = "poisson"

    @property
    def deviation(self) -> float:
        """Standard deviation z · C of the noise on a coordinate."""
        return self.noise_multiplier * self.clip

    @classmethod
    def from_settings(cls, settings: TrainingPrivacy | None) -> ExamplePrivacy | None:
        """Return the settings of ``federation.privacy``; None if it does not protect examples.

        Raises
        ------
        ExperimentError
            If it has no noise multiplier.
        """
        if settings is None or settings.of != "examples":
            return None
        if settings.noise_multiplier is None:
            raise ExperimentError(
                f"federation.privacy.noise_multiplier has not been found for ε = {settings.epsilon}; set it",
                key="federation.privacy.noise_multiplier",
            )
        return cls(settings.clip, settings.noise_multiplier, settings.sampling)


@dataclass(frozen=True)
class Privacy:
    """Guarantee of the Gaussian mechanism for one message of a client (``fedloom.privacy``).

    Attributes
    ----------
    covers
        Names of the covered message classes; a client's other messages are not protected.
    clip
        C: largest ℓ2 norm of one example's term in a sum over n examples, which the client sends divided by n.
    noise_multiplier
        z: noise of standard deviation z·2C/n on each coordinate, 2C/n being the effect of replacing one example.
    delta
        δ of the reported (ε, δ).
    """

    covers: tuple[str, ...]
    clip: float
    noise_multiplier: float
    delta: float


@dataclass(frozen=True)
class NoisySteps:
    """Noisy steps of one visit of a client, as a privacy accountant counts them.

    A batch is drawn anew for each step: every example with probability q = b/n, or b of n (``federation.privacy``);
    q = 1 for a client with n ≤ b. K noisy sums over one batch disclose no more than one with noise multiplier z/√K: as
    Gaussian mechanisms on the same examples, adaptively chosen, they compose to that (J. Dong, A. Roth, W. J. Su,
    Gaussian differential privacy, arXiv 1905.02383, Corollary 3.3), and the batch is drawn once.

    Attributes
    ----------
    batch_size
        Expected, or fixed, number of examples of a batch; a client with fewer uses them all.
    count
        Batches.
    uses
        Noisy gradients of each batch.
    """

    batch_size: int
    count: int
    uses: int = 1
