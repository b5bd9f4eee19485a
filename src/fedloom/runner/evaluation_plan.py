"""Task of an experiment, and its metrics, for the targets of a manifest."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
from torch import Tensor

from fedloom.data.manifest import Manifest
from fedloom.data.targets import Targets
from fedloom.errors import ExperimentError
from fedloom.evaluation.plan import KEY, EvaluationPlan
from fedloom.experiment import Experiment, OwnData
from fedloom.models.factories import check_permitted
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.own_metric import MEMORY, OwnMetric, remembered_metric
from fedloom.tasks.registry import agreed_task
from fedloom.tasks.trial import trial_targets

TRIAL = 4
"""Examples on which a metric is tried."""


def evaluation_plan(experiment: Experiment, manifest: Manifest) -> EvaluationPlan:
    """Return the task of an experiment with its settings, and the metrics that clients measure.

    Raise ExperimentError if the data are of another task, its settings do not fit their outputs, or a metric is
    unknown, fails, or may not be called in this process.
    """
    targets = manifest.spec.targets or Targets("classification", (), manifest.spec.classes, manifest.spec.class_names)
    task = agreed_task(experiment.task, targets.task, targets.outputs, manifest.dataset)
    own = [name for name in experiment.evaluation.metrics if ":" in name]
    asked = [name for name in experiment.evaluation.metrics if ":" not in name]
    if own and not targets.outputs:
        raise ExperimentError(f"{KEY}: data without targets have no metrics but the model's loss", key=KEY)
    metrics = [_own_metric(name, task, targets) for name in own]
    # A sketch tells something of a member's own model, so only simulations measure it.
    simulated = not isinstance(experiment.data, OwnData) and experiment.federation.secure_aggregation is None
    return EvaluationPlan.of(targets, task, asked, metrics, sketches=simulated)


def _own_metric(name: str, task: PredictionTask, targets: Targets) -> OwnMetric:
    """Return a metric of the user's own, after trying it on outputs of zeros."""
    function: Any = remembered_metric(name) if name.startswith(MEMORY) else _imported(name)
    return OwnMetric(name, function, _trial(task, targets), targets.mean, targets.std)


def _trial(task: PredictionTask, targets: Targets) -> tuple[Tensor, Tensor]:
    shape = task.output_shape(targets.outputs, targets.shape)
    predictions = task.predictions(torch.zeros(TRIAL, *shape))
    return predictions, trial_targets(task, TRIAL, targets.outputs, targets.shape)


def _imported(name: str) -> Any:
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
