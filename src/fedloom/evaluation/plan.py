"""Evaluation of a task: the shapes of measurements, the measurements of all clients, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedloom.data.spec import Targets
from fedloom.errors import ExperimentError
from fedloom.evaluation.spread import SKETCH
from fedloom.evaluation.uncertainty import BINS
from fedloom.messages import Metrics
from fedloom.tasks.base import Counts, MetricSums, PredictionTask, TargetShape
from fedloom.tasks.names import ALIASES, METRICS, Headline
from fedloom.tasks.registry import task_of

SPLITS = ("validation", "test")
"""Second axis of counts and sums."""

READINGS = ("unmasked", "masked")
"""Third axis of counts: over all C classes, or only those of the client's train split."""

KEY = "evaluation.metrics"


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Task of a run, its targets, and what clients measure of it.

    ``sums`` are in the order in which they lie in ``Metrics.sums``. With ``sketches``, clients also answer with
    sketches of their models (:mod:`fedloom.evaluation.spread`).
    """

    task: PredictionTask
    targets: Targets
    sums: tuple[MetricSums, ...]
    sketches: bool = False

    @classmethod
    def from_targets(
        cls,
        targets: Targets,
        task: PredictionTask | None = None,
        asked: Collection[str] = (),
        own: Sequence[MetricSums] = (),
        *,
        sketches: bool = False,
    ) -> EvaluationPlan:
        """Make the plan of a task (None: of the targets, with defaults).

        ``asked`` are names of FedLoom's metrics that an experiment requests, ``own`` the user's metrics. Raise
        ExperimentError if the task has no metric of a name, or two metrics have one name.
        """
        task = task_of(targets.task, targets.outputs) if task is None else task
        requested = {name: ALIASES.get(name, name) for name in asked}
        shape = TargetShape(targets.outputs, targets.shape, targets.std)
        plan = cls(task, targets, (*task.metric_sums(shape, set(requested.values())), *own), sketches)
        names = [metric.name for metric in plan.metrics]
        allowed = [*dict.fromkeys([*names, *task.optional])]
        if unknown := next((name for name, metric in requested.items() if metric not in allowed), None):
            message = f"{KEY}: {task.name} has no metric {unknown}; choose from {', '.join(allowed)}"
            raise ExperimentError(message, key=KEY, found=unknown, allowed=allowed)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ExperimentError(f"{KEY}: two metrics are called {twice}; rename one", key=KEY, found=twice)
        return plan

    @classmethod
    def of_classes(cls, classes: int) -> EvaluationPlan:
        """Make the plan of classification with default settings; 0 classes: of data without targets."""
        return cls.from_targets(Targets("classification", (), classes))

    @property
    def classes(self) -> int:
        """Number C of classes; 0 for other tasks."""
        return self.targets.outputs if self.task.kind.is_class else 0

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
        values = self.task.metrics_of_counts(counts)
        for part, columns in zip(self.sums, self._split(sums), strict=True):
            values |= part.values(columns, pooled=pooled)
        return values

    def implausible(self, sums: Tensor, examples: Sequence[int]) -> str | None:
        """Return why a client cannot have measured the sums ``[S, K]`` on splits of these sizes; None if it can."""
        for row, n in zip(sums, examples, strict=True):
            for part, values in zip(self.sums, self._split(row), strict=True):
                if (fault := part.implausible(values, n)) is not None:
                    return fault
        return None

    def _split(self, sums: Tensor) -> tuple[Tensor, ...]:
        return torch.split(sums, [part.size for part in self.sums], dim=-1) if self.sums else ()


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Measurements of the clients after a round.

    Attributes
    ----------
    round
        Number of rounds trained before it.
    clients
        n ids, in manifest order.
    seen, present
        ``[n]`` bool: takes part in training; answered this evaluation.
    predictors
        P names, ``personal`` first, and ``global`` if the method has one.
    counts
        ``[n, P, S, R, 3]`` float64, see ``measure``; zero in the rows of absent clients.
    confusion
        ``[n, P, C, C]`` int64, see ``measure``.
    calibration, uncertainty
        ``[n, P, BINS, 3]`` and ``[n, P, 3]`` float64, see ``measure``; zero in the rows of absent clients.
    sums
        ``[n, P, S, K]`` float64, see ``measure``; zero in the rows of absent clients.
    plan
        Task, and the meaning of the sums.
    records
        Values that the server algorithm recorded, one row per client: ``[n, ...]``.
    moments
        ``[n, P, R, 2 + M, 3]`` float64, see :mod:`fedloom.evaluation.group_statistics`, if metrics are summed securely:
        a row is then not a client, but all clients of a group, seen or unseen. None if each client's metrics are known.
    members
        ``[n, 2]``, the numbers of clients asked, and in the sums of these rows.
    models
        ``[n, 1 + SKETCH]`` float64, see :mod:`fedloom.evaluation.spread`; ``[n, 0]`` or None if not measured.
    """

    round: int
    clients: tuple[str, ...]
    seen: Tensor
    present: Tensor
    predictors: tuple[str, ...]
    counts: Tensor
    confusion: Tensor
    calibration: Tensor
    uncertainty: Tensor
    sums: Tensor
    plan: EvaluationPlan
    records: dict[str, Tensor] = field(default_factory=dict)
    moments: Tensor | None = None
    members: Tensor | None = None
    models: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if shapes do not agree, or there is no ``personal`` predictor."""
        if "personal" not in self.predictors:
            raise ValueError(f"predictors must have 'personal' (got {', '.join(self.predictors)})")
        n = len(self.clients)
        shapes = self.plan.shapes(len(self.predictors))
        if self.models is None:
            del shapes["models"]
        for name, trailing in {"seen": (), "present": (), **shapes}.items():
            shape, expected = tuple(getattr(self, name).shape), (n, *trailing)
            if shape != expected:
                raise ValueError(f"{name} must have shape {expected} (got {shape})")
        for name, tensor in self.records.items():
            if tensor.shape[:1] != (n,):
                raise ValueError(f"record {name!r} must have shape ({n}, ...) (got {tuple(tensor.shape)})")

    @property
    def asked(self) -> int:
        """Number of clients that were asked."""
        return len(self.clients) if self.members is None else int(self.members[:, 0].sum())

    @property
    def measured(self) -> int:
        """Number of clients that are measured."""
        return int(self.present.sum()) if self.members is None else int(self.members[:, 1].sum())

    @property
    def classes(self) -> int:
        """Number C of classes; 0 for other tasks."""
        return self.plan.classes

    def of(self, predictor: str, split: str, reading: str) -> Tensor:
        """Return counts ``[n, 3]`` of one predictor, split and reading; zero for absent clients."""
        p = self.predictors.index(predictor)
        counts = self.counts[:, p, SPLITS.index(split), READINGS.index(reading)]
        return counts * self.present[:, None]

    def metrics(
        self, predictor: str, split: str, group: Tensor, *, reading: str = "unmasked", pooled: bool = False
    ) -> dict[str, Tensor]:
        """Return the metrics of one predictor on a split, ``[m]`` each, NaN where undefined.

        ``group`` is ``[n]`` bool: the m clients, of which absent ones have no metrics; ``pooled``: of all their
        examples together, m = 1. Accuracy and log loss of classes are of the ``reading``, all else is unmasked.
        Validation data have only the metrics that follow from counts and sums.
        """
        members, p, s = group & self.present, self.predictors.index(predictor), SPLITS.index(split)
        confusion, calibration = self.confusion[members, p], self.calibration[members, p]
        if split != "test":
            confusion, calibration = torch.zeros_like(confusion), torch.zeros_like(calibration)
        rows = (self.of(predictor, split, reading)[members], confusion, calibration, self.sums[members, p, s])
        if pooled:
            rows = tuple(tensor.sum(0, keepdim=True) for tensor in rows)  # type: ignore[assignment]
        counts, confusion, calibration, sums = rows
        return self.plan.values(Counts(counts, confusion, calibration), sums, pooled=pooled)

    def by_group(self, function: Callable[[int, Tensor], Any]) -> dict[str, Any]:
        """Return, for each predictor, results of ``seen`` and ``unseen``; ``global`` is None for a method without it.

        ``function`` is called with the position of a predictor, and the present clients of a group, ``[n]`` bool.
        """
        groups = {"seen": self.seen & self.present, "unseen": ~self.seen & self.present}
        results: dict[str, Any] = {"personal": None, "global": None}
        for p, predictor in enumerate(self.predictors):
            results[predictor] = {name: function(p, members) for name, members in groups.items()}
        return results
