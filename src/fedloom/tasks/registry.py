"""Tasks that an experiment file can name."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from fedloom.errors import ExperimentError
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION, Classification
from fedloom.tasks.multilabel import Multilabel
from fedloom.tasks.names import TaskName
from fedloom.tasks.next_token import NextToken
from fedloom.tasks.own_loss import OWN_LOSS
from fedloom.tasks.regression import Regression
from fedloom.tasks.segmentation import Segmentation

TASKS: tuple[PredictionTask, ...] = (CLASSIFICATION, Multilabel(), Regression(), Segmentation(), NextToken())
"""All tasks with default settings."""

TaskSettings: TypeAlias = Annotated[
    Classification | Multilabel | Regression | Segmentation | NextToken, Field(discriminator="name")
]
"""The settings of any task, told apart by ``name``."""


def agreed_task(asked: PredictionTask | None, name: TaskName, outputs: int, dataset: str) -> PredictionTask:
    """Return the task of a data set, with an experiment's settings if it has some.

    Parameters
    ----------
    name, outputs
        Task of the data, and K; 0 if they have no targets.
    dataset
        Name of the data for errors.

    Raises
    ------
    ExperimentError
        If the data are of another task, or the settings do not fit their outputs.
    """
    if asked is not None and (asked.name != name or not outputs):
        found = name if outputs else "none, as they have no targets"
        raise ExperimentError(
            f"task.name is {asked.name}, but the task of the data {dataset} is {found}; leave `task` out, or pack the "
            "data with targets of that task",
            key="task.name",
            found=asked.name,
            allowed=[name],
        )
    task = task_of(name, outputs) if asked is None else asked
    if (fault := task.setting_fault(outputs)) is not None:
        raise ExperimentError(fault, key=fault.partition(" ")[0])
    return task


def task_of(name: TaskName, outputs: int = 1) -> PredictionTask:
    """Return a task with default settings; data without classes (0 outputs) have no task but the model's own loss."""
    if outputs == 0:
        return OWN_LOSS
    return next(task for task in TASKS if task.name == name)
