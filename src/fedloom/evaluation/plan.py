"""Evaluation of a task: the shapes of measurements, and the metrics that follow from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedloom.data.targets import Targets
from fedloom.errors import ExperimentError
from fedloom.evaluation.spread import SKETCH
from fedloom.evaluation.uncertainty import BINS
from fedloom.messages import Metrics
from fedloom.tasks.base import Counts, PredictionTask, TargetShape
from fedloom.tasks.names import ALIASES, METRICS, Headline
from fedloom.tasks.registry import task_of
from fedloom.tasks.sums import MetricSums

SPLITS = ("validation", "test")
"""Second axis of counts and sums."""

READINGS = ("unmasked", "masked")
"""Third axis of counts: over all C classes, or only those of the client's train split."""

KEY = "evaluation.metrics"


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Task of a run, its targets, and what clients measure of it.

    Attributes
    ----------
    task
        The task, with its settings.
    targets
        Description of the targets.
    sums
        Sums that clients compute, in the order in which they lie in ``Metrics.sums``.
    sketches
        True if clients also answer with sketches of their models (:mod:`fedloom.evaluation.spread`).
    """

    task: PredictionTask
    targets: Targets
    sums: tuple[MetricSums, ...]
    sketches: bool = False

    @classmethod
    def of(
        cls,
        targets: Targets,
        task: PredictionTask | None = None,
        asked: Collection[str] = (),
        own: Sequence[MetricSums] = (),
        *,
        sketches: bool = False,
    ) -> EvaluationPlan:
        """Make the plan of a task.

        Parameters
        ----------
        task
            Settings of the task; None: the defaults.
        asked
            Names of FedLoom's metrics that an experiment requests.
        own
            The user's own metrics.
        sketches
            True to measure the spread of the clients' models.

        Raises
        ------
        ExperimentError
            If the task has no metric of a name, or two metrics have one name.
        """
        found = task_of(targets.task, targets.outputs) if task is None else task
        wanted = {ALIASES.get(name, name) for name in asked}
        shape = TargetShape(targets.outputs, targets.shape, targets.std)
        plan = cls(found, targets, (*found.metric_sums(shape, wanted), *own), sketches)
        names = [metric.name for metric in plan.metrics]
        allowed = [*dict.fromkeys([*names, *found.optional])]
        for name in asked:
            if ALIASES.get(name, name) not in allowed:
                raise ExperimentError(
                    f"{KEY}: {found.name} has no metric {name}; choose from {', '.join(allowed)}",
                    key=KEY,
                    found=name,
                    allowed=allowed,
                )
        for name in names:
            if names.count(name) > 1:
                raise ExperimentError(f"{KEY}: two metrics are called {name}; rename one", key=KEY, found=name)
        return plan

    @classmethod
    def of_classes(cls, classes: int) -> EvaluationPlan:
        """Make the plan of classification with default settings; 0 classes: of data without targets."""
        return cls.of(Targets("classification", (), classes))

    @property
    def classes(self) -> int:
        """Number C of classes; 0 for other tasks."""
        return self.targets.outputs if self.task.target_kind == "classification" else 0

    @cached_property
    def size(self) -> int:
        """Number K of sums."""
        return sum(part.size for part in self.sums)

    @cached_property
    def metrics(self) -> tuple[Headline, ...]:
        """All metrics; the headline is the task's."""
        ready = tuple(METRICS[name] for name in self.task.metrics)
        return (*ready, *(metric for part in self.sums for metric in part.metrics))

    def shapes(self, predictors: int) -> dict[str, tuple[int, ...]]:
        """Return the trailing shapes of the :class:`~fedloom.messages.Metrics` fields, for P predictors."""
        return {
            "counts": (predictors, len(SPLITS), len(READINGS), 3),
            "confusion": (predictors, self.classes, self.classes),
            "calibration": (predictors, BINS, 3),
            "uncertainty": (predictors, 3),
            "sums": (predictors, len(SPLITS), self.size),
            "models": (1 + SKETCH if self.sketches else 0,),
        }

    def nothing(self, clients: int, predictors: int) -> Metrics:
        """Return the answer of clients that received predictors but measured nothing."""
        zeros = {
            name: torch.zeros(clients, *shape, dtype=torch.int64 if name == "confusion" else torch.float64)
            for name, shape in self.shapes(predictors).items()
        }
        return Metrics(**zeros)

    def values(self, counts: Counts, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return the metrics of m clients by name, ``[m]`` each, NaN where undefined; ``sums`` is ``[m, K]``.

        ``pooled``: the rows are sums over clients.
        """
        found = self.task.metrics_of_counts(counts)
        for part, columns in zip(self.sums, self._split(sums), strict=True):
            found |= part.values(columns, pooled=pooled)
        return found

    def implausible(self, sums: Tensor, examples: Sequence[int]) -> str | None:
        """Return why a client cannot have measured the sums ``[S, K]`` on splits of these sizes; None if it can."""
        for row, n in zip(sums, examples, strict=True):
            for part, values in zip(self.sums, self._split(row), strict=True):
                if (fault := part.implausible(values, n)) is not None:
                    return fault
        return None

    def _split(self, sums: Tensor) -> tuple[Tensor, ...]:
        return torch.split(sums, [part.size for part in self.sums], dim=-1) if self.sums else ()
