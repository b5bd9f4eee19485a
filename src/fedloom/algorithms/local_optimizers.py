"""Steps of local training: clipping, then SGD, Adam or AdamW, with the bits of ``torch.nn.utils`` and ``torch.optim``.

The state of an optimizer is fresh at every visit of a client. Elementwise functions on lists of leaves serve one client
(leaves ``[*shape]``) as well as a stack of g clients (``[g, *shape]``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedloom.algorithms.local_sgd import LocalSGD

LocalStep: TypeAlias = Callable[[list[Tensor], Tensor | None], None]
"""Function ``(gradients, active) -> None``; see :func:`local_step`."""

_Move: TypeAlias = Callable[[list[Tensor], bool], None]
"""Step in place along gradients, one for each leaf.

If the flag is set, SGD rounds lr · step before subtracting it, whereas torch rounds once. ComFedL, which passes the
active clients of each step, has always done so, and its results stay the same to the bit.
"""

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


def local_step(w: list[Tensor], s: LocalSGD, lr: float, *, stacked: bool, decay: bool) -> LocalStep:
    """Return ``(gradients, active) -> None``, a step of active clients in place, with a fresh optimizer.

    A step adds the gradient of λ_θ's term if ``decay``, clips, and moves w by the optimizer at this rate; it may
    overwrite the gradients. ``active`` is ``[g]`` bool; None for all clients. Gradients of only the first k clients
    move only these; later gradients must then be of at most k clients.
    """
    move = _sgd(w, s, lr) if s.optimizer == "sgd" else _adam(w, s, lr, decoupled=s.optimizer == "adamw")

    @torch.no_grad()
    def step(gradients: list[Tensor], active: Tensor | None) -> None:
        if active is not None and not stacked and not active:
            return
        if decay and s.lambda_theta:
            gradients = list(torch._foreach_add(gradients, first_rows(w, gradients), alpha=2 * s.lambda_theta))
        if s.clip is not None or s.clip_value is not None:
            gradients = _separate(gradients)
        if s.clip is not None:
            clip_norm(gradients, s.clip, stacked=stacked)
        if s.clip_value is not None:
            clip_value(gradients, s.clip_value)
        before = [leaf.clone() for leaf in w] if active is not None and stacked else []
        move(gradients, active is not None)
        for leaf, old in zip(w, before, strict=False):
            # A zero step would not do: for a client that is done, zero times an overflowed value is NaN.
            leaf.copy_(torch.where(_per_client(active, leaf), leaf, old))  # type: ignore[arg-type]

    return step


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


def _sgd(w: list[Tensor], s: LocalSGD, lr: float) -> _Move:
    """Return the step of torch.optim.SGD."""
    momentum: list[Tensor] = []

    def step(gradients: list[Tensor], rounded: bool) -> None:
        moved = first_rows(w, gradients)
        if s.weight_decay:
            gradients = list(torch._foreach_add(gradients, moved, alpha=s.weight_decay))
        if s.momentum:
            kept = first_rows(momentum, gradients)
            if momentum:
                torch._foreach_mul_(kept, s.momentum)
                torch._foreach_add_(kept, gradients)
            else:
                momentum.extend(torch.empty_like(leaf).copy_(g) for leaf, g in zip(moved, gradients, strict=True))
                kept = momentum
            gradients = list(torch._foreach_add(gradients, kept, alpha=s.momentum)) if s.nesterov else kept
        if rounded:
            torch._foreach_sub_(moved, torch._foreach_mul(gradients, lr))
        else:
            torch._foreach_add_(moved, gradients, alpha=-lr)

    return step


def _adam(w: list[Tensor], s: LocalSGD, lr: float, *, decoupled: bool) -> _Move:
    """Return the step of torch.optim.Adam, or of torch.optim.AdamW if the decay is decoupled from the gradient.

    D. Kingma, J. Ba, Adam, ICLR 2015, arXiv 1412.6980, Algorithm 1; I. Loshchilov, F. Hutter, Decoupled weight decay
    regularization, ICLR 2019, arXiv 1711.05101, Algorithm 2.
    """
    (beta1, beta2), eps = s.betas or BETAS, s.eps or EPS
    everyone = w, *([torch.zeros_like(leaf) for leaf in w] for _ in range(2))
    made = 0

    def step(gradients: list[Tensor], rounded: bool) -> None:
        nonlocal made
        made += 1
        w, first, second = (first_rows(tensors, gradients) for tensors in everyone)
        if s.weight_decay and decoupled:
            torch._foreach_mul_(w, 1 - lr * s.weight_decay)
        elif s.weight_decay:
            gradients = list(torch._foreach_add(gradients, w, alpha=s.weight_decay))
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, (1 - beta2**made) ** 0.5)
        torch._foreach_add_(scale, eps)
        torch._foreach_addcdiv_(w, first, scale, -lr / (1 - beta1**made))

    return step
