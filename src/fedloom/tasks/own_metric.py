"""Metrics that users define."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import ExperimentError
from fedloom.tasks.base import MetricSums
from fedloom.tasks.names import METRICS, Headline

KEY = "evaluation.metrics"

MEMORY = "memory:"
"""Prefix of the name of a metric that exists only in this process."""

LIMIT = 1e40
"""Largest absolute sum of a client, so that sums over clients stay finite."""

_log = logging.getLogger("fedloom.evaluation")

_IN_MEMORY: dict[str, Any] = {}


def remember_metric(function: Any) -> str:
    """Register a metric for experiments of this process, and return its name.

    It replaces a metric of the same name, since a notebook's cell may run again. Experiments reject a metric that has
    no name, such as a lambda.
    """
    name = getattr(function, "__name__", type(function).__name__)
    _IN_MEMORY[name] = function
    return f"{MEMORY}{name}"


def remembered_metric(name: str) -> Any:
    """Return a metric registered by :func:`remember_metric`; raise ExperimentError if another process registered it."""
    metric = _IN_MEMORY.get(name.removeprefix(MEMORY))
    if metric is None:
        raise ExperimentError(
            f"{KEY}: {name} exists only in another process. Name it as package:function", key=KEY, found=name
        )
    return metric


class OwnMetric(MetricSums):
    """Metric that an experiment names as ``package:function``, or that Python gives as an object.

    A function ``f(outputs, y)`` returns one number for each example, ``[b]``; the metric is the mean of those that are
    finite. An object with ``sums(outputs, y) -> [m]``, which are added over batches and clients, and
    ``value(sums) -> number`` computes any other metric. A class whose instances have these methods is allowed, too.
    ``higher_is_better`` and ``percent`` may be attributes of any of them (True and False by default). ``outputs`` are
    predictions as the task's loss takes them (log-probabilities, logits of labels, numbers); numbers are in the
    targets' own units.

    Parameters
    ----------
    name
        ``package:function``, or a name returned by :func:`remember_metric`.
    trial
        Predictions and targets of a few examples, to try it on; raise ExperimentError if it fails.
    mean, std
        Mean and standard deviation of each number; empty if targets are not standardized.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        trial: tuple[Tensor, Tensor],
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
    ) -> None:
        self._name = name.rpartition(":")[2].rpartition(".")[2]
        if isinstance(function, type):
            try:
                function = function()
            except Exception as error:
                raise self._error(
                    f"is a class that cannot be called without arguments ({error}); give an instance, or a class whose "
                    "arguments have defaults"
                ) from error
        self._function = function
        self._mean, self._std = tuple(mean), tuple(std)
        self._sums: Callable[[Tensor, Tensor], Any] = getattr(function, "sums", self._mean_sums)
        self._value: Callable[[Tensor], Any] = getattr(function, "value", lambda sums: sums[1] / sums[0])
        if hasattr(function, "sums") != hasattr(function, "value"):
            raise self._error("must have both sums(outputs, y) and value(sums), or be a function of (outputs, y)")
        if self._name in METRICS:
            raise self._error("has the name of a metric of FedLoom; rename it")
        try:
            sums = self.of(*trial)
            value = self.values(sums[None])[self._name]
        except ExperimentError:
            raise
        except Exception as error:
            raise self._error(f"failed on {len(trial[1])} examples ({type(error).__name__}: {error})") from error
        self.size = len(sums)
        if value.shape != (1,):
            raise self._error("must return one number from value(sums)")

    @property
    def metrics(self) -> tuple[Headline, ...]:
        """Metric that follows from the sums."""
        higher = bool(getattr(self._function, "higher_is_better", True))
        return (Headline(self._name, higher, bool(getattr(self._function, "percent", False))),)

    def of(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Return the sums of a batch; raise ExperimentError if the function returns anything else."""
        sums = self._sums(self._own_units(predictions), self._own_units(y))
        if not isinstance(sums, Tensor) or sums.dim() != 1 or not len(sums):
            raise self._error(f"must return sums [m] (got {_described(sums)})")
        sums = sums.detach().double()
        if not bool((sums.abs() <= LIMIT).all()):
            _log.warning("metric %s: sums of %d examples are not finite, and are left out", self._name, len(y))
            return torch.zeros_like(sums)
        return sums

    def values(self, sums: Tensor, *, pooled: bool = False) -> dict[str, Tensor]:
        """Return the metric of each row of sums, NaN where it is undefined."""
        return {self._name: torch.tensor([self._number(row) for row in sums], dtype=torch.float64)}

    def implausible(self, sums: Tensor, examples: int) -> str | None:
        """Return why the sums are out of range; None if they are in range."""
        worst = float(sums.abs().max())
        return f"a sum of {worst:g} for the metric {self._name}" if worst > LIMIT else None

    def _mean_sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        each = self._function(outputs, y)
        if not isinstance(each, Tensor) or each.shape != (len(y),):
            raise self._error(f"must return one number for each example, [{len(y)}] (got {_described(each)})")
        each = each.double()
        each = each[each.isfinite()]
        return torch.stack([each.new_tensor(len(each)), each.sum()])

    def _number(self, sums: Tensor) -> float:
        if not bool(sums.any()):
            return math.nan  # no example was measured
        try:
            value = float(self._value(sums))
        except ZeroDivisionError:
            return math.nan
        return value if math.isfinite(value) else math.nan

    def _own_units(self, values: Tensor) -> Tensor:
        if not self._std:
            return values
        std, mean = (values.new_tensor(each) for each in (self._std, self._mean))
        return values * std + mean if values.dim() > 1 and len(std) > 1 else values * std[0] + mean[0]

    def _error(self, reason: str) -> ExperimentError:
        return ExperimentError(f"{KEY}: {self._name} {reason}", key=KEY, found=self._name)


def _described(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
