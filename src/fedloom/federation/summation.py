"""Settings of sums of a cohort's answers, for methods whose servers use only these sums (:meth:`Algorithm.sums`).

The aggregator adds answers that it receives as they are. Under secure aggregation it receives masked vectors, and can
read only their sum. With differential privacy of clients, answers are clipped and sums have noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedloom.algorithms.sums import SummedFields, learned_fields
from fedloom.errors import ExperimentError, RefusedError
from fedloom.federation.private_vector import PrivateVector
from fedloom.federation.question import Question, combined_digest
from fedloom.federation.sum_vector import MOST_MEMBERS, SumVector
from fedloom.federation.transport import ConversationKey
from fedloom.messages import Message, Sums
from fedloom.privacy.clipped_sum import ClippedSum
from fedloom.privacy.settings import SecureAggregation, TrainingPrivacy, least_survivors


@dataclass(frozen=True)
class Summation:
    """Settings of sums, for both sides of a conversation."""

    fields: SummedFields
    secure: SecureAggregation | None = None
    """Secure aggregation; None if answers reach the aggregator as they are."""
    privacy: TrainingPrivacy | None = None
    """Differential privacy of clients, which covers training; None if clients are not private."""
    dtype: torch.dtype = torch.float32
    """Type of the run's floating-point numbers."""
    signature_bytes: int = 1
    """Length of the signatures of clients' keys."""
    clients_per_round: int = 1
    """``federation.clients_per_round``; only used with differential privacy."""
    is_lasting: bool = False
    """True if a client's answers are the same in every round of every run."""
    run: bytes = b""
    """Digest of all settings of the run that shape an answer, as this side knows them."""
    observe: Callable[[ConversationKey, Sequence[str], Sums[Any]], None] | None = None
    """Called with the clients of each cohort and the sums that the server receives."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Training examples of the clients of a partition, which both sides know; empty if clients bring their data."""

    def largest(self, members: Sequence[str]) -> int:
        """Return the bound on the training examples of these clients, by which weights are scaled.

        It is never the aggregator's word: with a bound that is much too large, small clients would vanish from a sum.
        """
        if self.secure is not None and self.secure.examples is not None:
            return self.secure.examples
        return max((self.sizes.get(member, 1) for member in members), default=1)

    def question(
        self, key: ConversationKey, asked: Question, answer: type[Message], clip: float, members: Sequence[str]
    ) -> bytes:
        """Return the digest of all that shapes the answers in a secure sum of these members.

        Raise RefusedError if a message had values for single clients, which the others cannot compare.
        """
        if not asked.is_shared:
            raise RefusedError(
                f"{answer.__name__} answers a message with values for single clients, and only answers to broadcasts "
                "can be summed securely"
            )
        numbers = (str(self.secure), str(self.privacy), self.clients_per_round, clip, self.largest(members))
        return combined_digest(self.run, key.purpose, key.round, asked.digest, answer.__name__, *numbers, *members)

    @property
    def scaled(self) -> tuple[str, ...]:
        """Names of the fields that clipping may scale down."""
        if self.privacy is None:
            return ()
        return tuple(name for answer, fields in self.fields.items() for name in learned_fields(answer, fields))

    def vector(
        self,
        answer: type[Message],
        shapes: Mapping[str, tuple[int, ...]],
        secure: SecureAggregation,
        rule: ClippedSum | None,
        members: int,
    ) -> SumVector:
        """Return the layout of an answer, with a ``rule`` a clipped one, in a secure sum of this number of members.

        Raise ExperimentError if there are too many members for sums of 32 bits, or the steps of the integers are too
        coarse for the noise.
        """
        fields = self.fields[answer]
        if rule is None:
            vector = SumVector(answer, fields, shapes, secure)
        else:
            assert self.privacy is not None
            shares = least_survivors(members) if self.privacy.noise == "distributed" else 0
            vector = PrivateVector.of(answer, fields, shapes, secure, rule, members, shares)
        if vector.bits == 32 and vector.statistics and members > MOST_MEMBERS:
            raise ExperimentError(
                f"federation.secure_aggregation.bits is 32, enough for sums over {MOST_MEMBERS:,} clients (got "
                f"{members:,}); set it to 64.",
                key="federation.secure_aggregation.bits",
                found=members,
            )
        return vector
