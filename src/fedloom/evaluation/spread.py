"""Spread of the clients' models: how far their parameters lie from their mean.

A client's answer has no room for θ, so it has a sketch: the signed sums of the parameters in random groups, which are
the same for all clients (M. Charikar, K. Chen, M. Farach-Colton, Finding frequent items in data streams, ICALP 2002).
The sketch is linear. Over the draw of the signs, the squared distance of two sketches has the squared distance of the
models as its mean, with a relative deviation of at most √(2 / SKETCH) = 6 %. Models of up to SKETCH parameters have
exact distances, and equal models the distance 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.core.keyed import signed_grouping
from fedloom.messages import VALUE_LIMIT

if TYPE_CHECKING:
    from fedloom.models.predictors import Predictor

SKETCH = 512
"""Number of groups."""

_SEED = 0

_BLOCK = 1 << 20  # parameters that are converted at a time


def add_sketches(sketches: Tensor, predictors: Sequence[Mapping[str, Predictor]]) -> None:
    """Write the number of parameters of each client's own model, and its sketch, to ``[g, 1 + SKETCH]`` float64.

    The rows of clients whose own predictor is missing, or not one vector of values up to ``VALUE_LIMIT``, stay 0.
    """
    for row, predictor_set in zip(sketches, predictors, strict=True):
        tensors = predictor_set["personal"].tensors() if "personal" in predictor_set else {}
        if tensors.keys() != {"theta"}:
            continue
        theta = tensors["theta"].detach().cpu()
        if all(bool((block.double().abs() <= VALUE_LIMIT).all()) for block in torch.split(theta, _BLOCK)):
            groups, signs = _grouping(len(theta))
            row[0] = len(theta)
            for block, group, sign in zip(*(torch.split(each, _BLOCK) for each in (theta, groups, signs)), strict=True):
                row[1:].index_add_(0, group.long(), sign.double().mul_(2).sub_(1) * block.double())


@functools.lru_cache(maxsize=4)
def _grouping(parameters: int) -> tuple[Tensor, Tensor]:
    """Return the group of each parameter, and whether its sign is positive, ``[d]`` each."""
    groups, positive = signed_grouping(_SEED, "spread", count=parameters, groups=min(SKETCH, parameters))
    return torch.from_numpy(groups), torch.from_numpy(positive)


def implausible_sketch(sketch: Tensor) -> str | None:
    """Return why a client cannot have measured the sketch ``[1 + SKETCH]`` of a model; None if it can."""
    if len(sketch):
        parameters, largest = float(sketch[0]), float(sketch[1:].abs().max())
        if not 0 <= parameters <= VALUE_LIMIT or largest > VALUE_LIMIT * parameters:
            return f"sums up to {largest:g} over groups of the {parameters:g} parameters of a model"
    return None


def spread(models: Tensor) -> dict[str, Any] | None:
    """Return the spread of the models of m clients, ``[m, 1 + SKETCH]``.

    ``clients``, their number; ``distance``, the root mean square distance of their parameters from the mean of them;
    and ``relative``, that distance divided by the norm of the mean (None if the norm is 0). None if fewer than two
    clients have a sketch, or if models differ in their number of parameters.
    """
    models = models[models[:, 0] > 0]
    if len(models) < 2 or bool((models[:, 0] != models[0, 0]).any()):
        return None
    first, apart = models[0, 1:], models[:, 1:] - models[0, 1:]  # exactly 0 for equal models
    mean = apart.mean(0)
    distance, norm = math.sqrt(float((apart - mean).square().sum(1).mean())), float((first + mean).norm())
    return {"clients": len(models), "distance": distance, "relative": distance / norm if norm else None}
