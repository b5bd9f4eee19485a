"""Targets for trying a model before a run, and detection of outputs that are not logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.tasks.base import PredictionTask


def trial_targets(
    task: PredictionTask, rows: int, outputs: int, target_shape: tuple[int, ...], *, raw: bool = False
) -> Tensor:
    """Return targets that a data set of the task with K outputs could have, ``[rows, *target_shape]``.

    Numbers are standardized, or ``raw``: 0 or 1, which counts, events and measurements can be.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (rows, *target_shape)
    if task.target_kind == "classification":
        return torch.arange(rows) % outputs
    if task.target_kind == "regression" and not raw:
        return torch.randn(shape, generator=generator)
    if task.target_kind in ("multilabel", "regression"):
        return torch.randint(2, shape, generator=generator).float()
    return torch.randint(outputs, shape, generator=generator)


def has_binary_form(task: PredictionTask, outputs: int) -> bool:
    """Return True if one logit z may stand for the two logits [0, z], whose cross-entropy is that of a sigmoid."""
    return outputs == 2 and task.target_kind in ("classification", "segmentation")


def sums_to_one(task: PredictionTask, outputs: Tensor) -> bool:
    """Return True if outputs are nonnegative and sum to one over the classes, as after a softmax."""
    axis = task.class_axis
    if axis is None or outputs.shape[axis] < 2:
        return False
    return bool((outputs >= 0).all() and ((outputs.sum(axis) - 1).abs() < 1e-4).all())


def takes_logits_of_one(task: PredictionTask) -> bool:
    """Return True if the loss applies a sigmoid to each output."""
    return task.target_kind == "multilabel"
