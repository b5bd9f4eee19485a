"""Differential privacy of a client's examples, as its local steps apply it."""

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
    def of(cls, settings: TrainingPrivacy | None) -> ExamplePrivacy | None:
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
