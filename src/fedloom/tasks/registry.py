"""Tasks that an experiment file can name."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

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


def task_of(name: TaskName, outputs: int = 1) -> PredictionTask:
    """Return a task with default settings; data without classes (0 outputs) have no task but the model's own loss."""
    if outputs == 0:
        return OWN_LOSS
    return next(task for task in TASKS if task.name == name)
