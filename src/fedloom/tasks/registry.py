"""Tasks that an experiment file can name."""

from __future__ import annotations

import functools
import operator
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, TypeAlias, get_args

from pydantic import Field

from fedloom.core.plugins import plugins
from fedloom.errors import ExperimentError
from fedloom.tasks.base import OWN_LOSS, PredictionTask
from fedloom.tasks.names import TaskName

GROUP = "fedloom.tasks"
"""Entry points of other packages' tasks."""

_MODULES = [import_module(f"{__package__}.{name}") for name in get_args(TaskName)]
OWN_TASKS: tuple[PredictionTask, ...] = tuple(module.TASK for module in _MODULES)
"""FedLoom's own tasks with default settings: one for each kind of targets, in the module of its name."""


def task_plugins() -> list[PredictionTask]:
    """Return the tasks of other packages with default settings, sorted by name.

    Raise ExperimentError if one cannot be loaded, has a name that is taken, or has no valid kind of targets.
    """
    tasks: list[PredictionTask] = plugins(GROUP, PredictionTask)  # type: ignore[type-abstract]  # only for comparison
    names = [task.name for task in (*OWN_TASKS, OWN_LOSS)]
    for task in tasks:
        if task.name in names:
            raise ExperimentError(f"{GROUP}: two tasks are called {task.name}; rename one", found=task.name)
        if getattr(task, "target_kind", None) not in get_args(TaskName):
            raise ExperimentError(
                f"{GROUP}: the task {task.name} does not state the kind of its targets; set target_kind to one of "
                f"{', '.join(get_args(TaskName))}",
                found=task.name,
                allowed=get_args(TaskName),
            )
        names.append(task.name)
    return tasks


TASKS: tuple[PredictionTask, ...] = (*OWN_TASKS, *task_plugins())
"""All tasks with default settings; other packages register theirs under the entry point ``fedloom.tasks``."""

if TYPE_CHECKING:
    TaskSettings: TypeAlias = PredictionTask
else:
    TaskSettings = Annotated[
        functools.reduce(operator.or_, [type(task) for task in TASKS]), Field(discriminator="name")
    ]
    """Settings of any task, discriminated by ``name``."""


def agreed_task(requested: PredictionTask | None, kind: TaskName, outputs: int, dataset: str) -> PredictionTask:
    """Return the task of a data set, with an experiment's settings if it has any.

    The data, which errors call ``dataset``, have targets of this kind and K outputs, 0 without targets.

    Raise ExperimentError if the data are for another task, or the settings do not fit their outputs.
    """
    if requested is not None and (requested.target_kind != kind or not outputs):
        actual = kind if outputs else "none, as they have no targets"
        raise ExperimentError(
            f"task.name is {requested.name}, but the task of the data {dataset} is {actual}; leave `task` out, or pack "
            "the data with targets of that task",
            key="task.name",
            found=requested.name,
            allowed=[kind],
        )
    task = task_of(kind, outputs) if requested is None else requested
    if (fault := task.setting_fault(outputs)) is not None:
        raise ExperimentError(fault, key=fault.partition(" ")[0])
    return task


def task_of(kind: TaskName, outputs: int = 1) -> PredictionTask:
    """Return FedLoom's task for a kind of targets, with default settings; with 0 outputs, the model's own loss."""
    if outputs == 0:
        return OWN_LOSS
    return next(task for task in OWN_TASKS if task.name == kind)
