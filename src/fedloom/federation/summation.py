"""Sums of a cohort's answers, for methods whose servers use nothing else of them (:meth:`Algorithm.sums`).

Where each answer is received as it is, the aggregator adds them; under secure aggregation it receives masked vectors,
of which only the sum can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.algorithms.sums import Summed, SummedFields
from fedloom.federation.secure_cohort import SecureSum
from fedloom.messages import FieldSum, Message, Sums
from fedloom.privacy.settings import SecureAggregation, TrainingPrivacy

if TYPE_CHECKING:
    from fedloom.federation.cohort import RemoteCohort


@dataclass(frozen=True)
class Summation:
    """Settings of sums, for both sides of a conversation.

    Attributes
    ----------
    fields
        The sums of the method's answers.
    secure
        Secure aggregation; None if answers reach the aggregator as they are.
    privacy
        Differential privacy of clients; None without.
    dtype
        Type of the run's floating-point numbers.
    signature_bytes
        Length of the signatures of clients' keys.
    """

    fields: SummedFields
    secure: SecureAggregation | None = None
    privacy: TrainingPrivacy | None = None
    dtype: torch.dtype = torch.float32
    signature_bytes: int = 1

    def gather(
        self,
        cohort: RemoteCohort,
        message: Message,
        answer: type[Message],
        meanwhile: Callable[[], None] | None,
    ) -> Sums[Any]:
        """Deliver a message and return the sums of the answers of this class.

        Raises
        ------
        TooFewReplies, InterruptedRun
            As in :meth:`RemoteCohort.send`.
        """
        if self.secure is not None:
            return SecureSum(self, self.secure, cohort, answer).gather(message, meanwhile)
        answers = cohort.exchange(message, answer, cohort.shapes(answer), meanwhile)
        sums = {name: self._sum(cohort, message, answers, name, summed) for name, summed in self.fields[answer].items()}
        present = cohort.flags(answers)
        return Sums(sums, present, cohort.sizes, int(present.sum()))

    def _sum(
        self, cohort: RemoteCohort, message: Message, answers: Mapping[int, Message], name: str, summed: Summed
    ) -> FieldSum:
        """Return the sum of a field over answers that are known, in cohort order."""
        since = None if summed.since is None else message.tensors()[summed.since]
        weights = {row: summed.weight(int(cohort.sizes[row])) for row in answers}
        total: Tensor | None = None
        for row in sorted(answers):
            value = answers[row].tensors()[name][0].double()
            value = (value if since is None else value - since.double()) * weights[row]
            total = value if total is None else total + value
        assert total is not None  # at least one client has answered
        dtype = next(iter(answers.values())).tensors()[name].dtype
        return FieldSum(total.to(dtype), float(sum(weights.values())), summed.weighting)
