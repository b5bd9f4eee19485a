"""Measurements of an evaluation whose metrics are summed securely, group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.evaluation.moments import moments_shape
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.evaluation.summary import EvaluationResult
from fedloom.messages import Replies
from fedloom.privacy.settings import SMALLEST_SUM

GROUPS = ("seen", "unseen")
"""Rows of an evaluation in sums."""


def in_sums(clients: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield cohorts of about this size, none too small for a secure sum, of three clients or more."""
    parts = max(1, min(-(-len(clients) // size), len(clients) // SMALLEST_SUM)) if clients else 0
    for i in range(parts):
        yield clients[i * len(clients) // parts : (i + 1) * len(clients) // parts]


class SummedMeasurements:
    """Sums of the clients' metrics, filled cohort by cohort."""

    def __init__(self, plan: EvaluationPlan, predictors: int) -> None:
        self._plan = plan
        self._metrics: dict[str, Tensor] = plan.nothing(len(GROUPS), predictors).tensors()
        self._moments = torch.zeros(len(GROUPS), *moments_shape(plan, predictors), dtype=torch.float64)
        self._members = torch.zeros(len(GROUPS), 2, dtype=torch.int64)

    def ask(self, group: int, clients: int) -> None:
        """Count the clients of a group, measured or not."""
        self._members[group, 0] += clients

    def add(self, group: int, replies: Replies[Any] | None) -> None:
        """Add the sums of a cohort of one group; None if it had no result."""
        if replies is None:
            return
        for name, total in {**self._metrics, "moments": self._moments}.items():
            found: Tensor = replies.sum(getattr(replies, name))
            total[group] += found if total.is_floating_point() else found.round().to(total.dtype)
        self._members[group, 1] += int(replies.present.sum())

    def result(self, round: int, predictors: tuple[str, ...]) -> EvaluationResult:
        """Return the evaluation, with a row for each group."""
        return EvaluationResult(
            round=round,
            clients=GROUPS,
            seen=torch.tensor([True, False]),
            present=(self._members[:, 1] > 0) | (self._members[:, 0] == 0),
            predictors=predictors,
            records={},
            **self._metrics,
            plan=self._plan,
            moments=self._moments,
            members=self._members,
        )
