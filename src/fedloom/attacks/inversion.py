"""Gradient inversion: reconstruct inputs from one update of a client, a step of FedAvg.

L. Zhu, Z. Liu, S. Han, Deep leakage from gradients, NeurIPS 2019, arXiv 1906.08935; B. Zhao, K. R. Mopuri, H. Bilen,
iDLG, 2020, arXiv 2001.02610 (the label); J. Geiping, H. Bauermeister, H. Dröge, M. Moeller, Inverting gradients,
NeurIPS 2020, arXiv 2003.14053 (the cosine, and Proposition 3.1 for a linear layer).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.models.flat import FlatModel, Layout
from fedloom.privacy.examples import ExamplePrivacy

LR = 0.1
"""Learning rate of the attacked step; the attacker knows it, and divides the update by it."""

STEPS, ITERATIONS, RESTARTS = 800, 300, 2
"""Steps by direction and iterations by distance for one example, and number of starts; the closest result counts."""

MATCHED, EXPLAINED = 1e-5, 1e-2
"""Cosine distances that end the search, and below which the input found by a linear layer is accepted."""

STEPS_OF_MANY = 200
"""Steps of gradient matching for several examples, from one start."""

STEP_SIZE = 0.1
"""Step size of gradient matching, in standard deviations of inputs; divided by 10 after 3/8, 5/8 and 7/8 of it."""

SMOOTHNESS = 0.02
"""Weight of the total variation of images."""

LARGEST_PSNR = 120.0
"""Maximum peak signal-to-noise ratio, dB: identical pictures would have an infinite one."""


@dataclass(frozen=True, eq=False)
class Target:
    """Update under attack, and the other information that the attacker has.

    Attributes
    ----------
    model, theta
        The model, and θ ``[d]`` that the client was sent.
    gradient
        Mean gradient ``[d]`` that the update reveals.
    shape
        Shape of one input.
    y
        Targets of the examples to reconstruct ``[b, ...]``, or None.
    """

    model: FlatModel
    theta: Tensor
    gradient: Tensor
    shape: tuple[int, ...]
    y: Tensor | None


def gradient_of_step(
    model: FlatModel, theta: Tensor, examples: Split, client: ClientData, privacy: ExamplePrivacy | None = None
) -> Tensor:
    """Return the gradient ``[d]`` that a client's update reveals: one step of FedAvg on all of these examples.

    With ``privacy`` of examples the step is noisy, as in training.
    """
    held = ClientData(client.id, examples, client.validation, client.test, client.classes)
    group = ClientGroup([held], _generator, round=1, examples=privacy)
    step = LocalSGD(steps=1, batch_size=len(examples), lr=LR, momentum=0.0)
    return (theta - train(model, group, theta[None], step).theta[0]) / LR


def _generator(client: str, purpose: str) -> torch.Generator:
    key = hashlib.blake2b(f"{client}/{purpose}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little"))


def linear_layer(layout: Layout, inputs: int) -> tuple[str, str] | None:
    """Return the weight and the bias of a linear layer that takes the flattened input; None if there is none."""
    shapes = dict(layout.entries)
    for name, shape in layout.entries:
        bias = f"{name.rpartition('.')[0]}.bias"
        if len(shape) == 2 and shape[1] == inputs and shapes.get(bias) == shape[:1]:
            return name, bias
    return None


def invert_linear_layer(target: Target) -> Tensor | None:
    """Return inputs that the gradient of a first linear layer contains, ``[k, *shape]``; None without such a layer.

    With outputs a = W x + b of each example, row i of the gradient is ∂L/∂W_i = Σ ∂L/∂a_i xᵀ, and ∂L/∂b_i = Σ ∂L/∂a_i:
    their ratio is x itself for one example, and a weighted mean of several; of those that activate unit i, only. Rows
    with larger gradients, which are more reliable, come first.
    """
    found = linear_layer(target.model.layout, math.prod(target.shape))
    if found is None:
        return None
    parts = target.model.layout.split(target.gradient)
    weight, bias = (parts[name].double() for name in found)
    order = bias.abs().argsort(descending=True)
    rows = order[bias[order].abs() > 1e-9 * bias.abs().max().clamp(min=1e-300)]
    return (weight[rows] / bias[rows, None]).float().view(-1, *target.shape)


def reconstruct(target: Target, low: float, high: float, *, alone: bool) -> tuple[Tensor, str]:
    """Return inputs ``[k, *shape]`` and the attack that found them, by a first linear layer if there is one.

    Parameters
    ----------
    low, high
        Limits of inputs.
    alone
        True if the update is of a single example: the most reliable unit of the layer then contains it.
    """
    found = invert_linear_layer(target)
    if found is not None and not alone:
        return found, "linear layer"
    if found is not None and explains(target, found[:1]):
        return found[:1], "linear layer"
    return match_gradient(target, low, high), "gradient matching"


def explains(target: Target, x: Tensor) -> bool:
    """Return whether the gradient at an input ``[1, *shape]`` has the target's direction, which an attacker can test.

    A layer can have the size of a first layer, but another input.
    """
    return float(_cosine_distance(target)(x).detach()) < EXPLAINED


def label_of(target: Target) -> int | None:
    """Return the class of the single example behind a gradient; None if the model has no bias at its outputs.

    The gradient of the cross-entropy with respect to the logits is p - e_y, so that only the entry of the class is
    negative (Zhao et al., eq. 4).
    """
    layout = target.model.layout
    if not layout.head_is_linear or target.model.task.name != "classification" or not target.model.has_task_loss:
        return None
    name, shape = layout.entries[-1]
    return int(layout.split(target.gradient)[name].argmin()) if len(shape) == 1 else None


def match_gradient(target: Target, low: float, high: float) -> Tensor:
    """Return inputs ``[b, *shape]`` whose gradient is the target's; b is the length of ``target.y``, or 1.

    For one example first by its Euclidean distance (Zhu et al., Algorithm 1), which finds inputs of smooth networks
    exactly, then by its direction (Geiping et al., eq. 4), which approximates inputs of others. Inputs stay between
    ``low`` and ``high``. The result with the closest direction is returned.
    """
    distance = _cosine_distance(target)
    if target.y is not None and len(target.y) > 1:
        return _by_direction(target, distance, low, high, STEPS_OF_MANY, 0)
    found: list[tuple[float, Tensor]] = []
    for seed in range(RESTARTS):
        for search in (_by_distance(target, low, high, seed), _by_direction(target, distance, low, high, STEPS, seed)):
            found.append((float(distance(search).detach().nan_to_num(nan=2.0)), search))
            if found[-1][0] < MATCHED:
                return search
    return min(found, key=lambda end: end[0])[1]


def _start(target: Target, low: float, high: float, seed: int) -> Tensor:
    count = 1 if target.y is None else len(target.y)
    x = torch.randn(count, *target.shape, generator=torch.Generator().manual_seed(seed))
    return x.clamp(low, high).requires_grad_()


def _by_distance(target: Target, low: float, high: float, seed: int) -> Tensor:
    """Minimize ‖∇(x) - ∇*‖² / ‖∇*‖² by L-BFGS."""
    x, gradients = _start(target, low, high, seed), _gradients(target)
    size = target.gradient.square().sum().clamp(min=1e-30)
    optimizer = torch.optim.LBFGS([x], max_iter=ITERATIONS, history_size=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        loss = torch.stack([(found - wanted).square().sum() for found, wanted in gradients(x)]).sum() / size
        (gradient,) = torch.autograd.grad(loss, [x])
        x.grad = gradient.contiguous()
        return loss.detach()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return x.detach().nan_to_num().clamp(low, high)


def _by_direction(
    target: Target, distance: Callable[[Tensor], Tensor], low: float, high: float, steps: int, seed: int
) -> Tensor:
    """Minimize 1 - cos(∇(x), ∇*) and, for images, the total variation, by signed steps of Adam."""
    x = _start(target, low, high, seed)
    optimizer = torch.optim.Adam([x], lr=STEP_SIZE)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * part // 8 for part in (3, 5, 7)], 0.1)
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(distance(x) + SMOOTHNESS * total_variation(x), [x])
        x.grad = gradient.nan_to_num().sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()


def _gradients(target: Target) -> Callable[[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return pairs of (∇, ∇*) by leaf as a differentiable function of inputs x.

    If training draws random numbers, which an attacker does not know, the model is in evaluation mode.
    """
    model = target.model if target.model.draws else target.model.in_training()
    leaves = model.layout.divided(model.layout.leaves(target.theta, requires_grad=True))
    known = model.layout.divided(model.layout.leaves(target.gradient))
    wanted = [known[name] for name in leaves]

    def gradients(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        loss = model.loss(leaves, x, target.y).mean()
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        return [(f, w) for f, w in zip(found, wanted, strict=True) if f is not None]

    return gradients


def _cosine_distance(target: Target) -> Callable[[Tensor], Tensor]:
    """Return 1 - cos(∇(x), ∇*) as a differentiable function of inputs x."""
    gradients, size = _gradients(target), target.gradient.norm()

    def distance(x: Tensor) -> Tensor:
        pairs = gradients(x)
        product = torch.stack([(found * wanted).sum() for found, wanted in pairs]).sum()
        norm = torch.stack([found.square().sum() for found, _ in pairs]).sum().clamp(min=1e-30).sqrt()
        away: Tensor = 1 - product / (norm * size).clamp(min=1e-30)
        return away

    return distance


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels of images ``[b, c, h, w]``; 0 for other inputs."""
    if x.dim() != 4:
        return x.new_zeros(())
    return x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()


def psnr(original: Tensor, found: Tensor, peak: float) -> float:
    """Return the peak signal-to-noise ratio of a reconstruction, dB, at most :data:`LARGEST_PSNR`."""
    error = float((original.double() - found.double()).square().mean())
    return min(LARGEST_PSNR, 10 * math.log10(peak**2 / error)) if error else LARGEST_PSNR


def best_matches(originals: Tensor, found: Tensor, peak: float) -> list[tuple[float, int]]:
    """Return the PSNR and the position of the closest reconstruction ``[k, ...]`` to each original ``[n, ...]``."""
    errors = torch.cdist(originals.flatten(1).double(), found.flatten(1).double())
    places = errors.argmin(1).tolist()
    return [(psnr(originals[i], found[place], peak), place) for i, place in enumerate(places)]
