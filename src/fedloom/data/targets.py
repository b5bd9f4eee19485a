"""Description of targets that are not classes, as part of a manifest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import named_twice
from fedloom.data.input_spec import NOTHING, Normalization
from fedloom.tasks.names import IGNORED, TaskName

SHAPES = {
    "multilabel": "[n, K], 0 or 1 for each of K labels",
    "regression": "[n] or [n, k], numbers, or [n, ...], a field of numbers",
    "segmentation": "[n, height, width] or [n, depth, height, width], the class of each pixel",
    "next_token": "[n, length], token ids",
}
"""Shapes of targets, for messages."""

RANKS = {"multilabel": range(1, 2), "regression": range(8), "segmentation": range(2, 4), "next_token": range(1, 2)}
"""Numbers of axes of one target."""


@dataclass(frozen=True)
class Targets:
    """Description of what is predicted, where it is not one class per example.

    Attributes
    ----------
    task
        Name of the task.
    shape
        Shape of one target: ``(K,)`` 0 or 1 for each label; ``()`` or ``(k,)`` numbers, or ``(...)`` a field of them;
        ``(height, width)`` or ``(depth, height, width)`` class indices; ``(length,)`` tokens.
    outputs
        K: labels, numbers, classes of a pixel, or tokens of the vocabulary.
    names
        Names of the K labels, numbers or classes; empty if they have none.
    mean, std
        Mean and standard deviation of each number over the training targets, for standardization in regression; one
        of each for a field; empty for other tasks.
    """

    task: TaskName
    shape: tuple[int, ...]
    outputs: int
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    scale: ClassVar[int] = 1
    """Divisor of raw values before normalization."""

    @property
    def numbers(self) -> int:
        """Length of the normalization: K for regression, 1 for a field of numbers, 0 for other tasks."""
        return 0 if self.task != "regression" else self.outputs if len(self.shape) < 2 else 1

    @property
    def values(self) -> int:
        """Values of one target that each mean covers."""
        return self.outputs // self.numbers if self.numbers else 1

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of each number; empty unless the task is regression."""
        return Normalization(self.mean, self.std)

    @property
    def stored(self) -> np.dtype[Any]:
        """Type in which shards hold targets."""
        small = self.task == "multilabel" or (self.task == "segmentation" and self.outputs <= 256)
        return np.dtype(np.float32 if self.task == "regression" else np.uint8 if small else np.int64)

    @property
    def ignored(self) -> int | None:
        """Value that marks a pixel without a class, or a place without a target, if there is one."""
        return None if self.task == "segmentation" and self.outputs > IGNORED[self.task] else IGNORED.get(self.task)

    def normalized(self, found: Normalization) -> Targets:
        """Return the targets with a normalization."""
        return replace(self, mean=found.mean, std=found.std)

    def raw(self) -> Targets:
        """Return the targets with the normalization that changes nothing."""
        return self.normalized(Normalization.identity(self.numbers))

    def plain(self) -> Targets:
        """Return the targets without a normalization, as cards and comparisons have them."""
        return self.normalized(NOTHING)

    def fault(self) -> str | None:
        """Return a contradiction within the description, or None; the normalization may be empty."""
        if self.task not in RANKS:
            return f"targets.task: {self.task} has classes, and no targets"
        if len(self.shape) not in RANKS[self.task] or min(self.shape, default=1) < 1:
            return f"targets.shape: {list(self.shape)}; {self.task} has targets {SHAPES[self.task]}"
        entries = math.prod(self.shape)
        if self.outputs < 1 or (self.task in ("multilabel", "regression") and self.outputs != entries):
            return f"targets.outputs: {self.outputs}; {self.task} of targets {list(self.shape)} has {entries}"
        if self.names and (len(self.names) != self.outputs or named_twice(self.names) is not None):
            return f"targets.names: {len(self.names)} names; there must be {self.outputs} different ones, or none"
        return self.normalization.fault(self.numbers)

    def values_fault(self, y: NDArray[Any], count: int) -> str | None:
        """Return why an array cannot hold the targets of ``count`` examples as a shard does, or None."""
        if y.dtype != self.stored or y.shape != (count, *self.shape):
            needed = [count, *self.shape]
            return f"the targets are {y.dtype} of shape {list(y.shape)}; they must be {self.stored} of shape {needed}"
        if not y.size:
            return None
        if self.task == "regression":
            wrong = ~np.isfinite(y)
            return f"a target is {y[wrong][0]}; targets must be finite" if wrong.any() else None
        most = 1 if self.task == "multilabel" else self.outputs - 1
        wrong = (y < 0) | (y > most)
        if self.ignored is not None:
            wrong &= y != self.ignored
        if wrong.any():
            also = "" if self.ignored is None else f", or {self.ignored} for no target"
            return f"a target is {int(y[wrong][0])}; targets must be 0 to {most}{also}"
        return None

    def rows(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return numbers ``[n, *shape]`` as ``[numbers, n * values]``."""
        return y.reshape(-1, self.numbers).T
