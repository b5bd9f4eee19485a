"""Gradients of single examples, clipped and summed: of one client, or of a group of clients together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedloom.algorithms.client_group import Batch, StepProbe
from fedloom.data.inputs import Inputs, count, each, first
from fedloom.models.flat import FlatModel, Leaves, example_loss, masked, vmapped_gradients


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
            outputs_found = model.forward_together(w, x) if absent is None else None
            if outputs_found is None:
                outputs_found = vmap(outputs, in_dims=axes, randomness=randomness)(dict(w), w.buffers, x, absent)
            losses = model.task.loss(outputs_found.flatten(0, 1), y.flatten(0, 1)).view(weight.shape)
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


MOST_NUMBERS = 1 << 25
"""Numbers of the gradients of examples that are held at once."""


def clipped_sums(
    model: FlatModel,
    w: Leaves,
    names: Sequence[str],
    batch: Batch,
    clip: float,
    *,
    stacked: bool,
    probe: StepProbe | None = None,
) -> list[Tensor]:
    """Return Σ_j g_j · min(1, C/‖g_j‖) over the examples of a batch, for each leaf ``[*shape]`` or ``[g, *shape]``.

    g_j is the gradient of the loss of one example alone, and ‖g_j‖ its norm over all these leaves. An example of weight
    0 adds nothing, and neither does one whose gradient is not finite.

    Parameters
    ----------
    model
        Model in training mode. Its draws from torch's generator differ between examples.
    names
        Leaves to differentiate by.
    clip
        C.
    stacked
        True if leaves and examples have a first axis for clients.
    probe
        Audit that replaces the gradients of canaries before they are clipped; None without.
    """
    leaves = {name: leaf.detach() for name, leaf in w.items()}
    selected = {name: leaves.pop(name) for name in names}
    if model.vmaps_examples:
        gradients_of = vmapped_gradients(model, labelled=batch.y is not None, stacked=stacked)
    else:
        gradients_of = partial(_one_by_one, _differentiated(partial(example_loss, model)), stacked=stacked)
    first = 1 + stacked  # axes before those of a leaf
    total: list[Tensor] = []
    for part in _pieces(batch, sum(leaf.numel() for leaf in selected.values()), stacked=stacked):
        gradients = gradients_of(selected, leaves, part.x, part.y)
        flat = [gradients[name].reshape(*gradients[name].shape[:first], -1) for name in names]
        flat = flat if probe is None else probe.chosen(part, flat)
        sums = _clipped(flat, part.weight > 0, clip)
        total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
    return [one.reshape(selected[name].shape) for one, name in zip(total, names, strict=True)]


def _differentiated(loss: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """Return the gradient of a loss by its first argument, by autograd."""

    def gradient(variables: Mapping[str, Tensor], *rest: Any) -> dict[str, Tensor]:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in variables.items()}
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(leaves, *rest), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))

    return gradient


def _one_by_one(
    gradient: Callable[..., dict[str, Tensor]],
    variables: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    x: Inputs,
    y: Tensor | None,
    *,
    stacked: bool,
) -> dict[str, Tensor]:
    """Return gradients of each example ``[b, *shape]``, or of each client's ``[g, b, *shape]``, by a call each."""

    def row(i: int) -> dict[str, Tensor]:
        x_i, y_i = each(x, lambda t: t[i]), None if y is None else y[i]
        if not stacked:
            return gradient(variables, others, x_i, y_i)
        own, rest = ({name: leaf[i] for name, leaf in leaves.items()} for leaves in (variables, others))
        return _one_by_one(gradient, own, rest, x_i, y_i, stacked=False)

    rows = [row(i) for i in range(count(x))]
    return {name: torch.stack([one[name] for one in rows]) for name in variables}


def _clipped(flat: list[Tensor], weights: Tensor, clip: float) -> list[Tensor]:
    """Return sums of clipped gradients ``[..., d]`` of examples ``[..., b, d]``, over those counted ``[..., b]``."""
    norm = torch.stack([gradient.norm(dim=-1) for gradient in flat]).norm(dim=0)
    is_finite = norm.isfinite()
    if not is_finite.all():
        flat = [torch.where(is_finite[..., None], gradient, 0) for gradient in flat]
    factor = torch.where(is_finite & weights, (clip / norm).clamp(max=1), 0)[..., None, :]
    return [(factor @ gradient)[..., 0, :] for gradient in flat]


def _pieces(batch: Batch, numbers: int, *, stacked: bool) -> Iterator[Batch]:
    """Yield a batch in pieces of at most :data:`MOST_NUMBERS` numbers of gradients, or of one example per client."""
    length, axis = batch.weight.shape[-1], int(stacked)
    size = max(1, MOST_NUMBERS // max(1, numbers))
    for start in range(0, length, size):
        bounds = (axis, start, min(size, length - start))
        y = None if batch.y is None else batch.y.narrow(*bounds)
        rows = None if batch.rows is None else batch.rows.narrow(*bounds)
        x = each(batch.x, lambda t, offset=bounds: t.narrow(*offset))  # type: ignore[misc]
        yield Batch(x, y, batch.weight.narrow(*bounds), rows=rows)
