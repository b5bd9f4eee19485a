"""Losses of several clients in one computation, each of its own model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedloom.data.inputs import each, first
from fedloom.models.flat import FlatModel, Leaves, masked


def stacked_losses(
    model: FlatModel, w: Leaves, x: Any, y: Tensor | None, weight: Tensor, absent: Tensor | None
) -> Tensor:
    """Return the weighted losses of g clients, ``[g]``, differentiable; a model in training mode moves its buffers.

    Parameters
    ----------
    w
        Leaves ``[g, *shape]``.
    x, y, weight
        Examples ``[g, b, ...]``, their targets, and their weights ``[g, b]``.
    absent
        Classes ``[g, C]`` whose logits are -inf for a client; None for no mask.
    """

    def outputs(w: dict[str, Tensor], buffers: dict[str, Tensor], x: Any, absent: Tensor | None) -> Tensor:
        return (model if absent is None else masked(model, absent)).forward(Leaves(w, buffers), x)

    def loss(
        w: dict[str, Tensor], buffers: dict[str, Tensor], x: Any, absent: Tensor | None, y: Tensor | None
    ) -> Tensor:
        return (model if absent is None else masked(model, absent)).loss(Leaves(w, buffers), x, y)

    weight = model.batch_weights(y, weight)
    if len(weight) == 1:  # as a client alone: vmap takes as long as a small model
        # The gradient of leaf[0] would be copied into zeros.
        leaves = Leaves({name: leaf.squeeze(0) for name, leaf in w.items()}, {n: b[0] for n, b in w.buffers.items()})
        alone = loss(
            leaves, leaves.buffers, each(x, lambda t: t[0]), *(None if t is None else t[0] for t in (absent, y))
        )
        return (alone * weight[0]).sum(0, keepdim=True)
    axes: tuple[int | None, ...] = (0, 0, 0, None if absent is None else 0)
    randomness = "different" if model.draws else "error"
    with _products(x):
        if y is None or not model.has_task_loss:
            axes = (*axes, None if y is None else 0)
            losses: Tensor = vmap(loss, in_dims=axes, randomness=randomness)(dict(w), w.buffers, x, absent, y)
        else:  # that of a task is of each example, so it needs no vmap
            found = model.forward_together(w, x) if absent is None else None
            if found is None:
                found = vmap(outputs, in_dims=axes, randomness=randomness)(dict(w), w.buffers, x, absent)
            losses = model.task.loss(found.flatten(0, 1), y.flatten(0, 1)).view(weight.shape)
    return (losses * weight).sum(1)


def _products(x: Any) -> AbstractContextManager[object]:
    return _ContiguousGradients() if first(x).device.type == "cpu" else nullcontext()


class _ContiguousGradients(TorchFunctionMode):
    """Linear layers in float32 computed as W xᵀ, whose gradient has the memory layout of W.

    The gradient of x Wᵀ is transposed when clients are stacked, and a step along it takes twice as long on a CPU. In
    float64, which is for exactness, products stay those of a client alone.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and args[0].dim() == 2 and args[0].dtype == torch.float32:
            x, weight, *bias = args
            product = torch.matmul(weight, x.t()).t()
            return product if not bias or bias[0] is None else product + bias[0]
        return func(*args, **(kwargs or {}))
