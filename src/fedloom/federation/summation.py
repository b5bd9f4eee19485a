"""Sums of a cohort's answers, for methods whose servers use only these sums (:meth:`Algorithm.sums`).

The aggregator adds answers that it receives as they are. Under secure aggregation it receives masked vectors, and can
read only their sum. With differential privacy of clients, answers are clipped and sums have noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedloom.algorithms.sums import STATISTICS, SummedFields, learned_fields
from fedloom.errors import ExperimentError, RefusedError
from fedloom.federation.clipping import BIT, Values, bit_of, changes_of, noisy_names, norm_of, slack_of
from fedloom.federation.private_sums import Draw, PrivateSums
from fedloom.federation.private_vector import PrivateVector
from fedloom.federation.question import Question, combined_digest
from fedloom.federation.secure_cohort import DecodedSums, SecureSum
from fedloom.federation.sum_messages import AnswerReady, ClipNotice
from fedloom.federation.sum_vector import MOST_MEMBERS, SumVector
from fedloom.messages import FieldSum, Message, Sums
from fedloom.privacy.clipped_sum import ClippedSum, clip_factor
from fedloom.privacy.settings import SecureAggregation, TrainingPrivacy, least_survivors

if TYPE_CHECKING:
    from fedloom.federation.cohort import RemoteCohort
    from fedloom.federation.transport import ConversationKey


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

    def gather(
        self,
        cohort: RemoteCohort,
        message: Message,
        answer: type[Message],
        meanwhile: Callable[[], None] | None,
        private: PrivateSums | None = None,
    ) -> Sums[Any]:
        """Deliver a message and return the sums of the answers of this class, with noise if they are ``private``.

        Raises
        ------
        TooFewReplies, InterruptedRun
            As in :meth:`RemoteCohort.send`.
        """
        rule, exchange = None if private is None else private.rule, cohort.exchanges
        if self.secure is not None:
            totals = SecureSum(self, self.secure, cohort, answer, rule).gather(message, meanwhile)
        elif rule is None:
            totals = self._added(cohort, message, answer, meanwhile)
        else:
            totals = self._clipped(cohort, message, answer, meanwhile, rule)
        if private is None or rule is None:
            return self._sums(cohort, answer, totals, None)
        learned: Values = {name: totals.values[name] for name in noisy_names(answer, self.fields[answer], rule)}
        if private.settings.noise == "central":
            vector = totals.vector
            deviation = vector.deviation if isinstance(vector, PrivateVector) else rule.deviation()
            learned = private.noisy(learned, deviation, cohort.key, exchange)
        private.adapt(learned, cohort.draw.expected)
        return self._sums(cohort, answer, DecodedSums({**totals.values, **learned}, totals.rows), cohort.draw)

    def _added(
        self, cohort: RemoteCohort, message: Message, answer: type[Message], meanwhile: Callable[[], None] | None
    ) -> DecodedSums:
        """Return the sums of answers that are received as they are, in cohort order."""
        answers = cohort.exchange(message, answer, cohort.shapes(answer), meanwhile)
        terms = {row: changes_of(answers[row], message, self.fields[answer]) for row in sorted(answers)}
        return DecodedSums(self._sum_of(terms, cohort, answer), terms.keys())

    def _clipped(
        self,
        cohort: RemoteCohort,
        message: Message,
        answer: type[Message],
        meanwhile: Callable[[], None] | None,
        rule: ClippedSum,
    ) -> DecodedSums:
        """Return the sums of answers that are received clipped; an answer beyond the clipping norm is refused."""
        fields, shapes = self.fields[answer], cohort.shapes(answer)
        if rule.count_noise is None:
            answers = cohort.exchange(message, answer, shapes, meanwhile)
        else:
            cohort.exchange(message, AnswerReady, {"ready": (1,)}, meanwhile)
            answers = cohort.exchange(ClipNotice(torch.tensor([rule.clip], dtype=torch.float64)), answer, shapes)
        names, terms = learned_fields(answer, fields), {}
        for row in sorted(answers):
            values = changes_of(answers[row], message, fields)
            norm, slack = norm_of(values, names), slack_of(answers[row], message, fields, rule)
            if norm > rule.clip + slack:
                cohort.refuse(row, f"the norm of its answer is {norm:g}; clipped answers have at most {rule.clip:g}")
                continue
            factor = clip_factor(norm, rule.clip)
            exact = {name: value * factor if name in names else value for name, value in values.items()}
            terms[row] = {**exact, **bit_of(norm < rule.clip - slack, rule)}
        cohort.check_replies(len(terms), message)
        return DecodedSums(self._sum_of(terms, cohort, answer), terms.keys())

    def _sum_of(self, terms: Mapping[int, Values], cohort: RemoteCohort, answer: type[Message]) -> Values:
        """Return the weighted sum of each field over rows in order, zeros without any."""
        fields, shapes = self.fields[answer], cohort.shapes(answer)
        found = {BIT: np.zeros(1), **{name: np.zeros(shapes[name]) for name in fields}}
        for row, values in terms.items():
            for name, value in values.items():
                weight = fields[name].weight(int(cohort.sizes[row])) if name in fields else 1.0
                found[name] += value * weight
        return found

    def _sums(self, cohort: RemoteCohort, answer: type[Message], totals: DecodedSums, draw: Draw | None) -> Sums[Any]:
        """Return the sums for the server; means of private sums divide by the expected size of the cohort."""
        rows, fields, sums = totals.rows, self.fields[answer], {}
        quantities = {field.name: field.quantity for field in answer.fields()}
        learned = learned_fields(answer, fields)
        for name, summed in fields.items():
            weight = float(sum(summed.weight(int(cohort.sizes[row])) for row in rows))
            if draw is not None and name in learned:
                weight = float(draw.expected)
            dtype = torch.float64 if quantities[name] in STATISTICS else self.dtype
            sums[name] = FieldSum(torch.from_numpy(totals.values[name]).to(dtype), weight, summed.weighting)
        count = len(rows) if draw is None else draw.expected
        return Sums(sums, cohort.flags(rows), cohort.sizes, count, is_noisy=draw is not None)
