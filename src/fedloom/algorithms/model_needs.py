"""Requirements of methods on the clients' model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel

Need: TypeAlias = Literal["head", "linear head", "features", "default loss", "no batch norm"]
"""Requirement of a method on the clients' model.

``head``: layers besides the last linear one. ``linear head``: that layer is not parametrized (no weight normalization).
``features``: it ends in a linear layer on features. ``default loss``: it does not define a loss. ``no batch norm``:
it does not normalize by the batch, because the method's local steps do not track running statistics.
"""


def check_needs(name: str, needs: Sequence[Need], model: FlatModel) -> None:
    """Raise ExperimentError unless a model meets the requirements of the method with this name."""
    for need in needs:
        if (problem := _problem(need, model)) is not None:
            key = "model.norm" if need == "no batch norm" else "model.name"
            raise ExperimentError(f"{key}: {name} {problem}", key=key)


def _problem(need: Need, model: FlatModel) -> str | None:
    """Return why a model does not meet a requirement, as the end of a sentence; None if it does."""
    if need == "head" and not model.layout.head:
        if model.layout.headless:
            return "needs a last linear layer, but the outputs of this model do not come from such a layer"
        return "needs layers before the last one, but this model has one layer"
    if need == "linear head" and not model.layout.head_is_linear:
        head = f"{model.layout.last!r} of this model is parametrized ({', '.join(model.layout.head)})"
        return f"adds the heads of clients, and the head {head}. Make it a plain linear layer"
    if need == "features" and not model.has_features:
        return "uses the input of the last linear layer, but the outputs of this model do not come from such a layer"
    if need == "default loss" and model.own_loss:
        return "trains with its own loss, but this model defines another; use a model without a loss"
    if need == "no batch norm" and model.needs_whole_batches:
        return "keeps no running statistics in its local steps, but this model normalizes by the batch; use norm: none"
    return None
