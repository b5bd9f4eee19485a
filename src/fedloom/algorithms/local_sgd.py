"""Settings of mini-batch training on a client."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from fedloom.core.settings import Settings
from fedloom.privacy.examples import NoisySteps


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

    def update_bounds(self, examples: int) -> dict[str, float]:
        """Return the bound of ``steps``; see :meth:`ServerAlgorithm.update_bounds`."""
        return {"steps": self.count(examples)}

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


def adaptation_of(s: Any) -> LocalSGD:
    """Return the local steps from the received model to ``personal``.

    They are those of ``adaptation`` in a method's settings, or of ``local`` for ``personalize_steps`` or
    ``personalize_epochs``.
    """
    if hasattr(s, "adaptation"):
        found: LocalSGD = s.adaptation
    elif hasattr(s, "personalize_epochs"):
        found = s.local.with_steps(epochs=s.personalize_epochs)
    else:
        found = s.local.with_steps(steps=s.personalize_steps)
    return found


BETAS, EPS = (0.9, 0.999), 1e-8
"""Defaults of Adam, as in torch."""


def clip_norm(gradients: list[Tensor], largest: float, *, stacked: bool) -> None:
    """Scale each client's gradient in place so that its norm over all leaves is at most ``largest``."""
    if stacked:
        norm = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factor = (largest / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, [_per_client(factor, gradient) for gradient in gradients])
        return
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    factor = (largest / (norm + 1e-6)).clamp(max=1)
    if factor != 1:
        torch._foreach_mul_(gradients, factor)


def clip_value(gradients: list[Tensor], largest: float) -> None:
    """Limit every entry of the gradients, in place, to -largest ... largest."""
    torch._foreach_clamp_min_(gradients, -largest)
    torch._foreach_clamp_max_(gradients, largest)


def first_rows(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Return views of the first rows of stacked tensors, as many as ``like`` has, or the tensors if that is all."""
    whole = not tensors or tensors[0].shape == like[0].shape
    return tensors if whole else [tensor[: len(like[0])] for tensor in tensors]


class _Optimizer(ABC):
    """Moves parameters in place along gradients, one for each of them."""

    def __init__(self, w: list[Tensor], s: LocalSGD, lr: float) -> None:
        self.w, self.s, self.lr = w, s, lr
        self.moments: list[list[Tensor]] = []
        """Lists of tensors like the parameters; SGD's momentum from the first step on, or Adam's two moments."""
        self.made = 0  # steps

    @abstractmethod
    def step(self, gradients: list[Tensor], rounded: bool) -> None:
        """Make a step.

        With ``rounded``, SGD rounds lr · step before subtracting it, whereas torch rounds once. ComFedL, which passes
        the active clients of each step, has always done so, and its results stay the same to the bit.
        """


class LocalStep:
    """Step ``(gradients, active) -> None`` of active clients in place, with an optimizer that is fresh at first.

    A step adds the gradient of λ_θ's term if ``decay``, clips, and moves w by the optimizer at the rate ``lr``; it may
    overwrite the gradients. ``active`` is ``[g]`` bool; None for all clients. Gradients of only the first k clients
    move only these; later gradients must then be of at most k clients.
    """

    def __init__(self, w: list[Tensor], s: LocalSGD, lr: float, *, stacked: bool, decay: bool) -> None:
        self._w, self._s, self._stacked, self._decay = w, s, stacked, decay
        self._optimizer = (_SGD if s.optimizer == "sgd" else _Adam)(w, s, lr)

    @torch.no_grad()
    def __call__(self, gradients: list[Tensor], active: Tensor | None) -> None:
        """Make a step."""
        w, s, stacked = self._w, self._s, self._stacked
        if active is not None and not stacked and not active:
            return
        if self._decay and s.lambda_theta:
            gradients = list(torch._foreach_add(gradients, first_rows(w, gradients), alpha=2 * s.lambda_theta))
        if s.clip is not None or s.clip_value is not None:
            gradients = _separate(gradients)
        if s.clip is not None:
            clip_norm(gradients, s.clip, stacked=stacked)
        if s.clip_value is not None:
            clip_value(gradients, s.clip_value)
        before = [leaf.clone() for leaf in w] if active is not None and stacked else []
        self._optimizer.step(gradients, active is not None)
        for leaf, old in zip(w, before, strict=False):
            # A zero step would not do: for a client that is done, zero times an overflowed value is NaN.
            leaf.copy_(torch.where(_per_client(active, leaf), leaf, old))  # type: ignore[arg-type]

    def memory(self) -> list[Tensor]:
        """Return the optimizer's number of steps, and its moments, which later steps change in place."""
        return [torch.tensor(self._optimizer.made), *(moment for list in self._optimizer.moments for moment in list)]

    def remember(self, memory: Sequence[Tensor]) -> None:
        """Continue from the :meth:`memory` of another optimizer of the same kind."""
        if not memory:  # the training had finished
            return
        made, *moments = memory
        self._optimizer.made, count = int(made), len(self._w)
        self._optimizer.moments = [
            [torch.empty_like(leaf).copy_(moment) for leaf, moment in zip(self._w, moments[i : i + count], strict=True)]
            for i in range(0, len(moments), count)
        ]


def _separate(gradients: list[Tensor]) -> list[Tensor]:
    """Return gradients that can be changed in place.

    Autograd may return one tensor for two leaves that are only used as a sum, or a tensor whose entries share memory.
    """
    seen: set[int] = set()
    found = []
    for gradient in gradients:
        shared = gradient.data_ptr() in seen or (0 in gradient.stride() and gradient.numel() > 1)
        seen.add(gradient.data_ptr())
        found.append(gradient.clone(memory_format=torch.contiguous_format) if shared else gradient)
    return found


def _per_client(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per client ``[g]`` to broadcast against a stacked leaf."""
    return values.view(-1, *[1] * (like.dim() - 1))


class _SGD(_Optimizer):
    """Steps of torch.optim.SGD."""

    def step(self, gradients: list[Tensor], rounded: bool) -> None:
        s, moved = self.s, first_rows(self.w, gradients)
        if s.weight_decay:
            gradients = list(torch._foreach_add(gradients, moved, alpha=s.weight_decay))
        if s.momentum:
            if self.moments:
                kept = first_rows(self.moments[0], gradients)
                torch._foreach_mul_(kept, s.momentum)
                torch._foreach_add_(kept, gradients)
            else:
                kept = [torch.empty_like(leaf).copy_(g) for leaf, g in zip(moved, gradients, strict=True)]
                self.moments = [kept]
            gradients = list(torch._foreach_add(gradients, kept, alpha=s.momentum)) if s.nesterov else kept
        if rounded:
            torch._foreach_sub_(moved, torch._foreach_mul(gradients, self.lr))
        else:
            torch._foreach_add_(moved, gradients, alpha=-self.lr)


class _Adam(_Optimizer):
    """Steps of torch.optim.Adam, or of torch.optim.AdamW, whose decay is decoupled from the gradient.

    D. Kingma, J. Ba, Adam, ICLR 2015, arXiv 1412.6980, Algorithm 1; I. Loshchilov, F. Hutter, Decoupled weight decay
    regularization, ICLR 2019, arXiv 1711.05101, Algorithm 2.
    """

    def __init__(self, w: list[Tensor], s: LocalSGD, lr: float) -> None:
        super().__init__(w, s, lr)
        self.moments = [[torch.zeros_like(leaf) for leaf in w] for _ in range(2)]

    def step(self, gradients: list[Tensor], rounded: bool) -> None:
        s, lr = self.s, self.lr
        (beta1, beta2), eps = s.betas or BETAS, s.eps or EPS
        self.made += 1
        w, first, second = (first_rows(tensors, gradients) for tensors in (self.w, *self.moments))
        if s.weight_decay and s.optimizer == "adamw":
            torch._foreach_mul_(w, 1 - lr * s.weight_decay)
        elif s.weight_decay:
            gradients = list(torch._foreach_add(gradients, w, alpha=s.weight_decay))
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, (1 - beta2**self.made) ** 0.5)
        torch._foreach_add_(scale, eps)
        torch._foreach_addcdiv_(w, first, scale, -lr / (1 - beta1**self.made))
