"""Settings of mini-batch training on a client."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fedloom.algorithms.example_privacy import NoisySteps
from fedloom.algorithms.schedules import RateSchedule
from fedloom.core.settings import Settings

_Beta = Annotated[float, Field(ge=0, lt=1)]
_AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

Betas = Annotated[tuple[_Beta, ...], Field(min_length=2, max_length=2), _AS_TUPLE]
"""Two decay rates of an optimizer."""


def check_overshoot(key: str, value: float, other: str, rate: float, *, factor: float = 1) -> None:
    """Raise ValueError if gradient steps of a rate on a quadratic term overshoot: both keys' product is 1 or more."""
    if factor * value * rate >= 1:
        product = f"{key} · {other}" if factor == 1 else f"{factor:g} · {key} · {other}"
        raise ValueError(
            f"{key}: {product} must be below 1, or steps overshoot (got {value:g} with {other} {rate:g}); lower one"
        )


def check_one_batch(local: PlainSGD, why: str) -> None:
    """Raise ValueError if steps average several mini-batches; ``why`` is the reason not to allow that."""
    if local.accumulate > 1:
        raise ValueError(f"local.accumulate: must be 1, because {why} (got {local.accumulate}); raise local.batch_size")


class PlainSGD(Settings):
    """Settings of mini-batch SGD without momentum and clipping; exactly one of ``steps`` and ``epochs`` is set."""

    steps: int | None = Field(default=None, ge=1, description="local SGD steps k (exactly one of steps and epochs)")
    epochs: int | None = Field(default=None, ge=1, description="passes over the train split, short batches dropped")
    batch_size: int = Field(default=32, ge=1, description="batch size b; a client with fewer examples uses them all")
    accumulate: int = Field(
        default=1,
        ge=1,
        description="mini-batches per step, whose gradients are averaged; steps count optimizer steps, and epochs are "
        "rounded up to whole steps",
    )
    lr: float = Field(default=0.01, gt=0, description="learning rate")
    schedule: RateSchedule | None = Field(
        default=None,
        description="factor on lr by round in training, such as {name: cosine, rounds: 100}; personalization uses lr; "
        "null: 1",
    )
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
        """Return the optimizer steps that a client with this many train examples makes in one visit."""
        if examples == 0:
            return 0
        batches = (self.epochs or 0) * (examples // min(self.batch_size, examples))
        return self.steps or math.ceil(batches / self.accumulate)

    def noisy(self, examples: int) -> NoisySteps:
        """Return the noisy steps of a visit of a client with this many train examples."""
        return NoisySteps(self.batch_size * self.accumulate, self.count(examples))

    def rate(self, round: int | None) -> float:
        """Return the learning rate in a training round t = 1, 2, ...; outside training (None), ``lr``."""
        return self.lr if self.schedule is None or round is None else self.lr * self.schedule.factor(round)

    @property
    def sgd(self) -> LocalSGD:
        """Settings of these steps for :func:`fedloom.algorithms.client.train`."""
        kept = {name: getattr(self, name) for name in PlainSGD.model_fields}
        return LocalSGD.model_validate({**kept, "momentum": 0.0})

    def with_steps(self, *, steps: int | None = None, epochs: int | None = None) -> Self:
        """Return these settings with another number of steps or epochs."""
        return self.model_copy(update={"steps": steps, "epochs": epochs})


class LocalSGD(PlainSGD):
    """Settings of mini-batch steps on a client, by SGD or another optimizer."""

    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        default="sgd", description="optimizer, as in torch.optim; its state is fresh at every visit"
    )
    momentum: float | None = Field(
        default=0.9, ge=0, lt=1, description="momentum of sgd, fresh at every visit; null with adam and adamw"
    )
    nesterov: bool = Field(default=False, description="use Nesterov's momentum (sgd)")
    betas: Betas | None = Field(
        default=None, description="decay rates of Adam's moments; null: those of torch, [0.9, 0.999]"
    )
    eps: float | None = Field(default=None, gt=0, description="ε of adam and adamw; null: that of torch, 1e-8")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="weight decay, as in torch.optim: for sgd and adam a term weight_decay · θ of the gradient, after "
        "clipping; for adamw decoupled from it",
    )
    clip: float | None = Field(default=None, gt=0, description="largest gradient norm; null does not clip")
    clip_value: float | None = Field(
        default=None, gt=0, description="largest magnitude of a gradient's entry; null does not clip"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_momentum(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("optimizer") in ("adam", "adamw"):
            return {"momentum": None, **value}
        return value

    @model_validator(mode="after")
    def _fits_the_optimizer(self) -> Self:
        if self.optimizer == "sgd":
            for name in ("betas", "eps"):
                if (found := getattr(self, name)) is not None:
                    raise ValueError(f"{name}: sgd has no {name} (got {found}); leave it out, or set optimizer: adam")
            if self.momentum is None:
                raise ValueError("momentum: must be a number with optimizer: sgd (got null); 0 is none")
        elif self.momentum is not None:
            raise ValueError(
                f"momentum: {self.optimizer} has betas in its place (got {self.momentum:g}); leave it out, or set betas"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: needs optimizer: sgd with a momentum above 0")
        if self.clip is not None and self.clip_value is not None:
            raise ValueError("clip_value: cannot be combined with clip; leave one out")
        if self.optimizer != "adam":
            check_overshoot("weight_decay", self.weight_decay, "lr", self.lr)
        return self

    def update_bounds(self, examples: int) -> dict[str, float]:
        """Return bounds of ``steps`` and, for SGD on clipped gradients, of ``delta_theta``.

        A step moves θ by lr times the momentum (Nesterov's: clip + momentum · clip / (1 - momentum), which is the
        same), whose norm is at most clip / (1 - momentum); no factor of a schedule exceeds 1; a margin covers rounding.
        Weight decay acts after clipping, and Adam's steps do not follow the norm, so neither has a bound. See
        :meth:`ServerAlgorithm.update_bounds`.
        """
        steps = self.count(examples)
        if self.clip is None or self.momentum is None or self.weight_decay:
            return {"steps": steps}
        return {"steps": steps, "delta_theta": 1 + 1.1 * steps * self.lr * self.clip / (1 - self.momentum)}

    def plain(self, lr: float) -> LocalSGD:
        """Return plain SGD of this many steps or epochs on the same batches, with another rate and the loss alone."""
        kept = {name: getattr(self, name) for name in ("steps", "epochs", "batch_size", "mask_absent")}
        return LocalSGD.model_validate({**kept, "lr": lr, "momentum": 0.0})
