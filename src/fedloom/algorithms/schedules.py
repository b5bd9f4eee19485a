"""Schedules of a local learning rate over rounds: the factor on ``lr`` in round t = 1, 2, ...

With W warm-up rounds the factor is t / (W + 1) for t ≤ W. After them e = t - W - 1 counts rounds from 0, and each
schedule gives the factor of e.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from fedloom.core.settings import Settings


class _WarmUp(Settings):
    warmup_rounds: int = Field(default=0, ge=0, description="W: the factor of round t ≤ W is t / (W + 1)")

    def factor(self, round: int) -> float:
        """Return the factor of a round t = 1, 2, ..."""
        warm = self.warmup_rounds
        return round / (warm + 1) if round <= warm else self.after_warmup(round - warm - 1)

    @abstractmethod
    def after_warmup(self, e: int) -> float:
        """Return the factor e = 0, 1, ... rounds after the first one without warm-up."""


class ConstantRate(_WarmUp):
    """Factor 1 after the warm-up."""

    name: Literal["constant"]

    def after_warmup(self, e: int) -> float:
        """Return 1."""
        return 1.0


class CosineRate(_WarmUp):
    """Half a cosine from 1 towards ``floor`` (torch's CosineAnnealingLR), which later rounds do not leave."""

    name: Literal["cosine"]
    rounds: int = Field(
        ge=1, description="R, the rounds of the schedule, with warm-up; later rounds have the factor of round R"
    )
    floor: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="with T = R - W: the factor is floor + (1 - floor) (1 + cos(π e / T)) / 2, e = 0 ... T - 1",
    )

    @model_validator(mode="after")
    def _outlasts_warmup(self) -> Self:
        if self.warmup_rounds >= self.rounds:
            raise ValueError(f"warmup_rounds: must be below rounds, {self.rounds} (got {self.warmup_rounds})")
        return self

    def after_warmup(self, e: int) -> float:
        """Return floor + (1 - floor) (1 + cos(π e / T)) / 2."""
        length = self.rounds - self.warmup_rounds
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(e, length - 1) / length)) / 2


class StepRate(_WarmUp):
    """Decay by ``gamma`` after every ``every`` rounds (torch's StepLR; with ``every`` 1, ExponentialLR)."""

    name: Literal["step"]
    every: int = Field(ge=1, description="rounds between decays: the factor is gamma^⌊e / every⌋")
    gamma: float = Field(default=0.1, gt=0, le=1, description="factor of one decay")

    def after_warmup(self, e: int) -> float:
        """Return gamma^⌊e / every⌋."""
        return self.gamma ** (e // self.every)


RateSchedule: TypeAlias = Annotated[ConstantRate | CosineRate | StepRate, Field(discriminator="name")]
"""Schedule by its name."""
