"""Description of targets that are not classes, as part of a manifest."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.tasks.names import TaskName


@dataclass(frozen=True)
class Targets:
    """Description of what is predicted, where it is not one class per example.

    Attributes
    ----------
    task
        Name of the task.
    shape
        Shape of one target: ``(K,)`` 0 or 1 for each label; ``()`` or ``(k,)`` numbers; ``(height, width)`` class
        indices; ``(length,)`` tokens.
    outputs
        K: labels, numbers, classes of a pixel, or tokens of the vocabulary.
    names
        Names of the K labels, numbers or classes; empty if they have none.
    mean, std
        Mean and standard deviation of each number over the training targets, with which regression standardizes;
        empty for other tasks.
    """

    task: TaskName
    shape: tuple[int, ...]
    outputs: int
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
