"""Settings of mini-batch SGD on a client."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fedloom.core.settings import Settings


def check_overshoot(key: str, value: float, other: str, rate: float, *, factor: float = 1) -> None:
    """Raise ValueError if gradient steps of a rate on a quadratic term overshoot: both keys' product is 1 or more."""
    if factor * value * rate >= 1:
        product = f"{key} · {other}" if factor == 1 else f"{factor:g} · {key} · {other}"
        raise ValueError(
            f"{key}: {product} must be below 1, or steps overshoot (got {value:g} with {other} {rate:g}); lower one"
        )


class PlainSGD(Settings):
    """Settings of mini-batch SGD without momentum and clipping; exactly one of ``steps`` and ``epochs`` is set."""

    steps: int | None = Field(default=None, ge=1, description="local SGD steps k (exactly one of steps and epochs)")
    epochs: int | None = Field(default=None, ge=1, description="passes over the train split, short batches dropped")
    batch_size: int = Field(default=32, ge=1, description="batch size b; a client with fewer examples uses them all")
    lr: float = Field(default=0.01, gt=0, description="learning rate")
    lambda_theta: float = Field(default=0.0, ge=0, description="λ_θ of the term λ_θ‖θ‖² (papers/001, eq. 1)")
    mask_absent: bool = Field(default=False, description="set logits of labels absent from the train split to -inf")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"set exactly one of steps and epochs (got steps={self.steps}, epochs={self.epochs})")
        return self

    @model_validator(mode="after")
    def _shrinking(self) -> Self:
        check_overshoot("lambda_theta", self.lambda_theta, "lr", self.lr, factor=2)
        return self

    def count(self, examples: int) -> int:
        """Return the steps that a client with this many train examples makes in one visit."""
        if examples == 0:
            return 0
        return self.steps or (self.epochs or 0) * (examples // min(self.batch_size, examples))

    @property
    def sgd(self) -> LocalSGD:
        """Settings of these steps for :func:`fedloom.algorithms.client.train`."""
        return LocalSGD.model_validate({**self.model_dump(), "momentum": 0.0})


class LocalSGD(PlainSGD):
    """Settings of mini-batch SGD on a client."""

    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum, fresh at every visit")
    clip: float | None = Field(default=None, gt=0, description="largest gradient norm; null does not clip")

    def update_bounds(self, examples: int) -> dict[str, float]:
        """Return bounds of ``steps`` and, if gradients are clipped, of ``delta_theta``.

        A step moves θ by lr times the momentum, whose norm is at most clip / (1 - momentum); a margin covers rounding.
        See :meth:`ServerAlgorithm.update_bounds`.
        """
        steps = self.count(examples)
        if self.clip is None:
            return {"steps": steps}
        return {"steps": steps, "delta_theta": 1 + 1.1 * steps * self.lr * self.clip / (1 - self.momentum)}

    def with_steps(self, *, steps: int | None = None, epochs: int | None = None) -> Self:
        """Return these settings with another number of steps or epochs."""
        return self.model_copy(update={"steps": steps, "epochs": epochs})
