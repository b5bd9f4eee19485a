"""Sums of a cohort's answers, for methods whose servers use only these sums (:meth:`Algorithm.sums`).

The aggregator adds answers that it receives as they are. Under secure aggregation it receives masked vectors, and can
read only their sum. With differential privacy of clients, answers are clipped and sums have noise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.sums import STATISTICS, Summed, SummedFields, learned_fields
from fedloom.core.digests import combined_digest
from fedloom.errors import ExperimentError, QuorumError, RefusedError
from fedloom.federation.cohort import RemoteCohort
from fedloom.federation.private_sums import (
    BIT,
    Draw,
    PrivateSums,
    Values,
    bit_of,
    changes_of,
    noisy_names,
    norm_of,
    slack_of,
)
from fedloom.federation.transport import TRAIN, ConversationKey
from fedloom.messages import FieldSum, Message, Metrics, Replies, SummedMetrics, Sums
from fedloom.privacy.clipped_sum import ClippedSum, clip_factor
from fedloom.privacy.settings import SMALLEST_SUM, SecureAggregation, TrainingPrivacy, least_survivors
from fedloom.sums.masks import Integers
from fedloom.sums.messages import (
    STEPS,
    VOCABULARY,
    AnswerReady,
    ClipNotice,
    ConfirmationDelivery,
    Confirmations,
    EncryptedShares,
    KeyRoster,
    MaskedAnswer,
    MemberKeys,
    Question,
    RevealedShares,
    ShareDelivery,
    SumSession,
    Survivors,
    names_as_bytes,
)
from fedloom.sums.secure_sum import (
    KEY_BYTES,
    REVEALED_BYTES,
    SHARED_BYTES,
    MaskedVector,
    SecureSumAggregator,
)
from fedloom.sums.session import SESSION_BYTES, TAG_BYTES, SessionParameters
from fedloom.sums.vector import MOST_MEMBERS, PrivateVector, SumVector, graph_of


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
        self, key: ConversationKey, opening: Question, answer: type[Message], clip: float, members: Sequence[str]
    ) -> bytes:
        """Return the digest of all that shapes the answers in a secure sum of these members.

        Raise RefusedError if a message had values for single clients, which the others cannot compare.
        """
        if not opening.is_shared:
            raise RefusedError(
                f"{answer.__name__} answers a message with values for single clients, and only answers to broadcasts "
                "can be summed securely"
            )
        numbers = (str(self.secure), str(self.privacy), self.clients_per_round, clip, self.largest(members))
        return combined_digest(self.run, key.purpose, key.round, opening.digest, answer.__name__, *numbers, *members)

    def observed_by(self, observe: Callable[[ConversationKey, Sequence[str], Sums[Any]], None]) -> Summation:
        """Return the same sums, each of which is also given to a function."""
        return replace(self, observe=observe)

    @property
    def vocabulary(self) -> Mapping[str, type[Message]]:
        """Messages that conversations have for sums, beside those of the method."""
        return VOCABULARY

    @property
    def is_secure(self) -> bool:
        """True under secure aggregation."""
        return self.secure is not None

    def covers(self, answer: type[Message]) -> bool:
        """Return whether answers of this class are summed."""
        return answer in self.fields

    def in_process(self) -> Summation:
        """Return the same sums of clients in this process, which sign nothing."""
        return replace(self, signature_bytes=1)

    def cohort(self, *args: Any, **options: Any) -> SummingCohort:
        """Return a cohort of these sums."""
        return SummingCohort(self, *args, **options)

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
            vector = PrivateVector.create(answer, fields, shapes, secure, rule, members, shares)
        if vector.bits == 32 and vector.statistics and members > MOST_MEMBERS:
            raise ExperimentError(
                f"federation.secure_aggregation.bits is 32, enough for sums over {MOST_MEMBERS:,} clients (got "
                f"{members:,}); set it to 64.",
                key="federation.secure_aggregation.bits",
                found=members,
            )
        return vector


@dataclass(frozen=True)
class DecodedSums:
    """Sums over a cohort."""

    values: Values
    """Weighted sum of each field."""
    rows: Collection[int]
    """Rows of the clients whose answers are in the sums."""
    vector: SumVector | None = None
    """Layout of the secure sum; None if the aggregator has received and added the answers."""


class SummingCohort(RemoteCohort):
    """Cohort that returns sums where the server uses only the sum of an answer.

    Parameters
    ----------
    draw
        Random choice of the cohort.
    reveal
        Called once members may reveal a sum.
    """

    def __init__(
        self,
        summation: Summation,
        key: ConversationKey,
        clients: Sequence[str],
        sizes: Tensor,
        *,
        draw: Draw,
        reveal: Callable[[], None],
        **conversation: Any,
    ) -> None:
        super().__init__(key, clients, sizes, **conversation)
        self._summation = summation
        self.draw, self.reveal = draw, reveal
        self.question = Question()

    def send(
        self, message: Message, answer: type[Message] = Metrics, meanwhile: Callable[[], None] | None = None
    ) -> Replies[Any]:
        """Deliver a message to every client still present and return their replies, or the sums of them.

        Raise as :meth:`RemoteCohort.send`.
        """
        if answer is Metrics and self.config.sums_metrics:
            answer = SummedMetrics
        summation = self._summation
        if not summation.covers(answer):
            return super().send(message, answer, meanwhile)
        private = self.config.private if self.key.purpose == TRAIN else None
        if private is not None and self.config.releases is not None:
            self.config.releases.tell_sum(self.key, private.release(self.draw), self.clients)
        sums = self._gather(message, answer, meanwhile, private)
        if summation.observe is not None:
            summation.observe(self.key, self.clients, sums)
        return sums

    def exchange(self, message: Message, *args: Any, **options: Any) -> dict[int, Message]:
        """Make one exchange (:meth:`RemoteCohort.exchange`), which becomes part of the question."""
        if self._summation.is_secure and not isinstance(message, STEPS):
            self.question = self.question.then(Question.from_message(message))
        return super().exchange(message, *args, **options)

    def _gather(
        self,
        message: Message,
        answer: type[Message],
        meanwhile: Callable[[], None] | None,
        private: PrivateSums | None,
    ) -> Sums[Any]:
        """Deliver a message and return the sums of the answers of this class, with noise if they are ``private``."""
        rule, exchange = None if private is None else private.rule, self.exchanges
        summation = self._summation
        fields = summation.fields[answer]
        if summation.secure is not None:
            totals = SecureSum(summation, summation.secure, self, answer, rule).gather(message, meanwhile)
        elif rule is None:
            totals = self._added(message, answer, meanwhile, fields)
        else:
            totals = self._clipped(message, answer, meanwhile, fields, rule)
        if private is None or rule is None:
            return self._sums(answer, totals, None)
        values_learned: Values = {name: totals.values[name] for name in noisy_names(answer, fields, rule)}
        if private.settings.noise == "central":
            vector = totals.vector
            deviation = vector.deviation if isinstance(vector, PrivateVector) else rule.deviation()
            values_learned = private.noisy(values_learned, deviation, self.key, exchange)
        private.adapt(values_learned, self.draw.expected)
        return self._sums(answer, DecodedSums({**totals.values, **values_learned}, totals.rows), self.draw)

    def _added(
        self,
        message: Message,
        answer: type[Message],
        meanwhile: Callable[[], None] | None,
        fields: Mapping[str, Summed],
    ) -> DecodedSums:
        """Return the sums of answers that are received as they are, in cohort order."""
        answers = self.exchange(message, answer, self.shapes(answer), meanwhile)
        terms = {row: changes_of(answers[row], message, fields) for row in sorted(answers)}
        return DecodedSums(self._sum_of(terms, fields, self.shapes(answer)), terms.keys())

    def _clipped(
        self,
        message: Message,
        answer: type[Message],
        meanwhile: Callable[[], None] | None,
        fields: Mapping[str, Summed],
        rule: ClippedSum,
    ) -> DecodedSums:
        """Return the sums of answers that are received clipped; an answer beyond the clipping norm is refused."""
        shapes = self.shapes(answer)
        if rule.count_noise is None:
            answers = self.exchange(message, answer, shapes, meanwhile)
        else:
            self.exchange(message, AnswerReady, {"ready": (1,)}, meanwhile)
            answers = self.exchange(ClipNotice(torch.tensor([rule.clip], dtype=torch.float64)), answer, shapes)
        names, terms = learned_fields(answer, fields), {}
        for row in sorted(answers):
            values = changes_of(answers[row], message, fields)
            norm, slack = norm_of(values, names), slack_of(answers[row], message, fields, rule)
            if norm > rule.clip + slack:
                self.refuse(row, f"the norm of its answer is {norm:g}; clipped answers have at most {rule.clip:g}")
                continue
            factor = clip_factor(norm, rule.clip)
            exact = {name: value * factor if name in names else value for name, value in values.items()}
            terms[row] = {**exact, **bit_of(norm < rule.clip - slack, rule)}
        self.check_replies(len(terms), message)
        return DecodedSums(self._sum_of(terms, fields, shapes), terms.keys())

    def _sum_of(
        self, terms: Mapping[int, Values], fields: Mapping[str, Summed], shapes: Mapping[str, tuple[int, ...]]
    ) -> Values:
        """Return the weighted sum of each field over rows in order, zeros without any."""
        total = {BIT: np.zeros(1), **{name: np.zeros(shapes[name]) for name in fields}}
        for row, values in terms.items():
            for name, value in values.items():
                weight = fields[name].weight(int(self.sizes[row])) if name in fields else 1.0
                total[name] += value * weight
        return total

    def _sums(self, answer: type[Message], totals: DecodedSums, draw: Draw | None) -> Sums[Any]:
        """Return the sums for the server; means of private sums divide by the expected size of the cohort."""
        rows, fields, sums = totals.rows, self._summation.fields[answer], {}
        quantities = {field.name: field.quantity for field in answer.fields()}
        fields_learned = learned_fields(answer, fields)
        for name, summed_field in fields.items():
            weight = float(sum(summed_field.weight(int(self.sizes[row])) for row in rows))
            if draw is not None and name in fields_learned:
                weight = float(draw.expected)
            dtype = torch.float64 if quantities[name] in STATISTICS else self._summation.dtype
            sums[name] = FieldSum(torch.from_numpy(totals.values[name]).to(dtype), weight, summed_field.weighting)
        count = len(rows) if draw is None else draw.expected
        return Sums(sums, self.flags(rows), self.sizes, count, is_noisy=draw is not None)


class SecureSum:
    """Secure sum of one answer of a cohort.

    Members are the clients whose answers are ready; member i is row ``self._rows[i]`` of the cohort.
    """

    def __init__(
        self,
        summation: Summation,
        settings: SecureAggregation,
        cohort: SummingCohort,
        answer: type[Message],
        rule: ClippedSum | None = None,
    ) -> None:
        self._summation, self._settings, self._cohort, self._answer = summation, settings, cohort, answer
        self._rule, self._ask = rule, cohort.exchange
        self._fields = summation.fields[answer]
        self._signature_bytes = summation.signature_bytes
        self._vector: SumVector

    def gather(self, message: Message, meanwhile: Callable[[], None] | None) -> DecodedSums:
        """Deliver a message, and return the sums of the hidden answers; with a ``rule``, clients clip their answers.

        Raises
        ------
        TooFewReplies
            If too few clients stay until the end; then nothing is learned about any answer.
        InterruptedRun
            As in :meth:`SummingCohort.send`.
        """
        try:
            return self._gather(message, meanwhile)
        except QuorumError as error:
            raise self._cohort.ended_by(error) from error

    def _gather(self, message: Message, meanwhile: Callable[[], None] | None) -> DecodedSums:
        ready = self._ask(message, AnswerReady, {"ready": (1,)}, meanwhile)
        self._rows = sorted(ready)
        members = tuple(self._cohort.clients[row] for row in self._rows)
        if len(members) < SMALLEST_SUM:
            raise QuorumError(f"{len(members)} clients are ready for a secure sum; {SMALLEST_SUM} are required")
        shapes = self._cohort.shapes(self._answer)
        self._vector = self._summation.vector(self._answer, shapes, self._settings, self._rule, len(members))
        total, largest = self._sum(members), self._summation.largest(members)
        weights = {name: field.weight(largest) for name, field in self._fields.items()}
        is_wide = self._rule is not None or self._summation.dtype == torch.float64
        sums = self._vector.decode(total, len(members), weights, np.float64 if is_wide else np.float32)
        rows = [row for row, is_present in zip(self._rows, self._survived.tolist(), strict=True) if is_present]
        return DecodedSums(sums, rows, self._vector)

    def _sum(self, members: tuple[str, ...]) -> Integers:
        """Make the steps of the protocol, each one exchange; return the sum."""
        clip = 0.0 if self._rule is None else self._rule.clip
        question = self._summation.question(self._cohort.key, self._cohort.question, self._answer, clip, members)
        graph = graph_of(self._settings, len(members))
        p = SessionParameters(os.urandom(SESSION_BYTES), members, *graph, self._vector.bits, question)
        aggregator = SecureSumAggregator(p, self._vector.size)
        k, s = p.degree, self._signature_bytes
        opening = SumSession(
            torch.frombuffer(bytearray(p.session), dtype=torch.uint8),
            names_as_bytes(p.members),
            torch.tensor([clip], dtype=torch.float64),
            torch.frombuffer(bytearray(question), dtype=torch.uint8),
        )
        messages = self._ask(opening, MemberKeys, {"keys": (KEY_BYTES,), "signature": (s,)})
        signatures = self._stacked(messages, "signature", s)
        keys = aggregator.roster(self._stacked(messages, "keys", KEY_BYTES), self._flags(messages))
        near = np.zeros((len(p.members), k, s), np.uint8)
        for i in np.flatnonzero(keys.any(axis=1)).tolist():
            neighbours = aggregator.neighbours(i)
            near[i, : len(neighbours)] = signatures[neighbours]
        messages = self._ask(
            KeyRoster(_tensor(keys), self._spread(near)), EncryptedShares, {"shares": (k, SHARED_BYTES)}
        )
        shares, present = aggregator.forward_shares(
            self._stacked(messages, "shares", k, SHARED_BYTES), self._flags(messages)
        )
        delivery = ShareDelivery(self._spread(shares), self._spread(present.astype(np.uint8)))
        shapes = {"values": (self._vector.nbytes,), "receipts": (k, TAG_BYTES)}
        self._add(aggregator, self._ask(delivery, MaskedAnswer, shapes))
        self._survived, receipts = aggregator.survivors()
        survivors = Survivors(_tensor(self._survived.astype(np.uint8)), self._spread(receipts))
        self._cohort.reveal()  # members answer this question over no other set from now on
        # From here on a client's answer is in the sum, so the client is not lost if it disconnects.
        messages = self._ask(survivors, Confirmations, {"tags": (k, TAG_BYTES)}, may_fail=True)
        tags = aggregator.forward_confirmations(self._stacked(messages, "tags", k, TAG_BYTES), self._flags(messages))
        confirmed = ConfirmationDelivery(self._spread(tags))
        messages = self._ask(confirmed, RevealedShares, {"shares": (k, REVEALED_BYTES)}, may_fail=True)
        return aggregator.sum(self._stacked(messages, "shares", k, REVEALED_BYTES), self._flags(messages))

    def _add(self, aggregator: SecureSumAggregator, messages: Mapping[int, Message]) -> None:
        for row in self._rows:
            if isinstance(answer := messages.get(row), MaskedAnswer):
                masked = MaskedVector(self._vector.from_bytes(answer.values), answer.receipts[0].numpy())
                try:
                    aggregator.add(self._rows.index(row), masked)
                except RefusedError as error:
                    self._cohort.lose(row, str(error))

    def _flags(self, messages: Collection[int]) -> NDArray[np.bool_]:
        """Return the members among these rows of the cohort, bool [n]."""
        return np.array([row in messages for row in self._rows], np.bool_)

    def _stacked(self, messages: Mapping[int, Message], name: str, *shape: int) -> NDArray[np.uint8]:
        """Return a field of the members' answers, uint8 [n, *shape], zeros for those that are absent."""
        rows = np.zeros((len(self._rows), *shape), np.uint8)
        for i, row in enumerate(self._rows):
            if row in messages:
                rows[i] = messages[row].tensors()[name][0].numpy()
        return rows

    def _spread(self, values: NDArray[np.uint8]) -> Tensor:
        """Return values of members [n, ...] as rows of the cohort [c, ...]."""
        spread = torch.zeros(len(self._cohort.clients), *values.shape[1:], dtype=torch.uint8)
        spread[self._rows] = _tensor(values)
        return spread


def _tensor(values: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
