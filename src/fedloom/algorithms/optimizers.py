"""Server optimizers, whose memory is part of the server's state, and Adam in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShrinkAndAdd:
    """Update η ← (1 - 2βλ) η + mean Δη (Scott et al., PeFLL, arXiv 2306.05515, Algorithm 2, lines 17-18)."""

    beta: float
    decay: float

    def start(self, eta: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return an empty memory."""
        return {}

    @torch.no_grad()
    def apply(self, eta: list[Tensor], updates: list[Tensor], memory: Mapping[str, Tensor], factor: float) -> None:
        """Make one step along ``factor * updates``, in place."""
        if (shrink := 1 - 2 * self.beta * self.decay) != 1:
            torch._foreach_mul_(eta, shrink)
        torch._foreach_add_(eta, updates, alpha=factor)


@dataclass(frozen=True)
class AdamAscent:
    """Adam on -mean Δη with the decoupled shrink (1 - 2·lr·λ), which is AdamW's decay.

    With ``inside``, Adam on 2λη - mean Δη, which includes the gradient of λ‖η‖²: torch.optim.Adam, weight_decay 2λ.
    """

    lr: float
    decay: float
    inside: bool = False

    def start(self, eta: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the moments and the number of steps of each parameter."""
        memory: dict[str, Tensor] = {}
        for i, p in enumerate(eta):
            memory |= {f"{i}.first": torch.zeros_like(p), f"{i}.second": torch.zeros_like(p)}
            memory[f"{i}.steps"] = torch.zeros(())
        return memory

    def apply(self, eta: list[Tensor], updates: list[Tensor], memory: Mapping[str, Tensor], factor: float) -> None:
        """Make one step along ``factor * updates``, in place; overwrites the updates."""
        torch._foreach_mul_(updates, -factor)
        first, second, steps = (
            [memory[f"{i}.{name}"] for i in range(len(eta))] for name in ("first", "second", "steps")
        )
        adam_(eta, updates, first, second, steps, self.lr, 2 * self.decay, inside=self.inside)


@dataclass(frozen=True)
class MomentumAscent:
    """Update m ← momentum · m + Δη - decay · η, then η ← η + lr · m: PyTorch's SGD along -Δη."""

    lr: float
    momentum: float
    decay: float

    def start(self, eta: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the momentum of each parameter."""
        return {f"{i}.momentum": torch.zeros_like(p) for i, p in enumerate(eta)}

    @torch.no_grad()
    def apply(self, eta: list[Tensor], updates: list[Tensor], memory: Mapping[str, Tensor], factor: float) -> None:
        """Make one step along ``factor * updates``, in place."""
        momentum = [memory[f"{i}.momentum"] for i in range(len(eta))]
        torch._foreach_mul_(momentum, self.momentum)
        torch._foreach_add_(momentum, updates, alpha=factor)
        torch._foreach_add_(momentum, eta, alpha=-self.decay)
        torch._foreach_add_(eta, momentum, alpha=self.lr)


@torch.no_grad()
def adam_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    lr: float,
    decay: float = 0.0,
    *,
    inside: bool = False,
) -> None:
    """Make one step of Adam in place, in one pass over memory.

    The decay is p ← (1 - lr · decay) p before the step (AdamW), or, if ``inside``, a term decay · p of the gradient.

    D. Kingma, J. Ba, Adam, ICLR 2015, arXiv 1412.6980, Algorithm 1; β = (0.9, 0.999), ε = 1e-8. ``first`` and
    ``second`` are the moments; ``steps`` has one scalar per parameter, the number of steps made, which is incremented.
    """
    torch._foreach_add_(steps, 1)
    fused = torch._fused_adam_ if inside else torch._fused_adamw_
    fused(
        parameters, gradients, first, second, [], steps, lr=lr, beta1=0.9, beta2=0.999, weight_decay=decay, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def adam_direction(gradient: Tensor, first: Tensor, second: Tensor, step: int) -> Tensor:
    """Return the direction of Adam's step number ``step`` (from 1); the moments change in place.

    This is the rule of :func:`adam_` for one row of a tensor whose rows have made different numbers of steps.
    """
    first.copy_(0.9 * first + 0.1 * gradient)
    second.copy_(0.999 * second + 0.001 * gradient.square())
    return (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
