"""Plan of an evaluation, with metrics that users bring as functions."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.data.spec import Targets
from fedloom.errors import ExperimentError
from fedloom.evaluation.plan import KEY, EvaluationPlan
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.own_metric import MEMORY, OwnMetric, remembered_metric
from fedloom.tasks.registry import agreed_task

TRIAL_EXAMPLES = 4
"""Examples on which a metric is tried."""


def make_plan(
    settings: PredictionTask | None,
    targets: Targets,
    dataset: str,
    names: Sequence[str],
    check_permitted: Callable[[str, str], None],
    *,
    sketches: bool,
) -> EvaluationPlan:
    """Return the evaluation of a task.

    Parameters
    ----------
    settings
        The task with an experiment's settings; None: that of the targets, with defaults.
    targets, dataset
        Description of the targets, and the data set's name for errors.
    names
        Metrics: names, or ``package:function``.
    check_permitted
        Raises ExperimentError if a function, named at a key, may not be imported by this process.
    sketches
        True if clients also answer with sketches of their models.

    Raise ExperimentError if the data are of another task, its settings do not fit their outputs, or a metric is
    unknown, fails, or may not be called in this process.
    """
    task = agreed_task(settings, targets.task, targets.outputs, dataset)
    own = [name for name in names if ":" in name]
    if own and not targets.outputs:
        raise ExperimentError(f"{KEY}: data without targets have no metrics but the model's loss", key=KEY)
    metrics = [_own_metric(name, task, targets, check_permitted) for name in own]
    return EvaluationPlan.from_targets(
        targets, task, [name for name in names if ":" not in name], metrics, sketches=sketches
    )


def _own_metric(
    name: str, task: PredictionTask, targets: Targets, check_permitted: Callable[[str, str], None]
) -> OwnMetric:
    """Return a metric of the user's own, after trying it on outputs of zeros."""
    function: Any = remembered_metric(name) if name.startswith(MEMORY) else _imported(name, check_permitted)
    return OwnMetric(name, function, _trial(task, targets), targets.mean, targets.std)


def _trial(task: PredictionTask, targets: Targets) -> tuple[Tensor, Tensor]:
    shape = task.output_shape(targets.outputs, targets.shape)
    predictions = task.predictions(torch.zeros(TRIAL_EXAMPLES, *shape))
    return predictions, task.trial_targets(TRIAL_EXAMPLES, targets.outputs, targets.shape)


def _imported(name: str, check_permitted: Callable[[str, str], None]) -> Any:
    """Import a metric named as ``package:function``."""
    check_permitted(name, KEY)
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:
        raise ExperimentError(
            f"{KEY}: {name!r} cannot be imported as package:function ({type(error).__name__}: {error})",
            hint="install its package, or name its folder in PYTHONPATH",
            key=KEY,
            found=name,
        ) from error
