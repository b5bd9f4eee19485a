"""Clients' side of sums: answers that are held back until they are masked, so that the aggregator learns only a sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.digests import combined_digest
from fedloom.data.federated import ClientData
from fedloom.errors import DataError, RefusedError
from fedloom.federation.private_sums import (
    Values,
    changes_of,
    clipped_answer,
    clipped_values,
    clipping_rule,
    noise_source,
)
from fedloom.federation.transport import TRAIN, ConversationKey, Guard
from fedloom.messages import Message
from fedloom.privacy.clipped_sum import ClippedSum
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.security.signing import Signing
from fedloom.sums.masks import Integers
from fedloom.sums.messages import (
    STEPS,
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
    digest_of_tensors,
    names_from_bytes,
)
from fedloom.sums.revealed_sums import RevealedSums, Subject
from fedloom.sums.secure_sum import SecureSumMember
from fedloom.sums.session import SessionParameters
from fedloom.sums.summation import Summation
from fedloom.sums.vector import PrivateVector, SumVector, graph_of, weaker_graph


@dataclass
class _Context:
    """Question that an answer replies to, and the state that its client started from."""

    start: bytes
    """Digest of the state that the client started from."""
    question: Question = field(default_factory=Question)


@dataclass(eq=False)
class _Held:
    """Answer of one client, and the client's part in its secure sum."""

    answer: Message
    request: Message
    values: Values
    examples: int
    context: _Context
    varies: bool
    """False if the answer is the same in every round in which the question is asked."""
    vector: SumVector | None = None
    member: SecureSumMember | None = None
    names: tuple[str, ...] = ()
    clip: float = 0.0


class HeldAnswers:
    """Answers of the clients of one process that wait for their secure sums.

    Parameters
    ----------
    summation
        The sums of the method's answers.
    signing
        Signature key of the clients of this process, and the public keys of the others.
    noise
        Seed of clients' noise in a simulation, or a secret of this process.
    revealed_sums
        Sums that this process has helped to reveal, also to earlier aggregators; None in a simulation, whose author has
        all data.
    run
        Digest of the settings that cannot change in a run: runs with equal digests have equal answers.
    guard
        Policy of the member, which may refuse a sum over too few members, or with a weak graph.
    """

    def __init__(
        self,
        summation: Summation,
        signing: Signing,
        noise: int | bytes = 0,
        revealed_sums: RevealedSums | None = None,
        run: str = "",
        *,
        guard: Guard | None = None,
    ) -> None:
        self._summation, self._noise, self._run = summation, noise, run
        self._signing, self._guard = signing, guard
        self._revealed = revealed_sums
        self._held: dict[ConversationKey, dict[int, _Held]] = {}
        self._contexts: dict[ConversationKey, dict[int, _Context]] = {}
        self._last: tuple[Message, Question] | None = None  # a message asks all clients the same: it is hashed once

    def begin(self, key: ConversationKey, rows: Sequence[int], states: Sequence[Mapping[str, Tensor] | None]) -> None:
        """Begin the conversation of some rows, each from a state of its client."""
        if self._summation.is_secure:
            starts = {row: digest_of_tensors(state or {}) for row, state in zip(rows, states, strict=True)}
            self._contexts.setdefault(key, {}).update({row: _Context(start) for row, start in starts.items()})

    def hear(self, key: ConversationKey, rows: Sequence[int], message: Message) -> None:
        """Note a message that these rows answer next; it becomes part of the question."""
        if not self._summation.is_secure:
            return
        if self._last is None or self._last[0] is not message:
            self._last = message, Question.from_message(message)
        for row in rows:
            context = self._contexts[key][row]
            context.question = context.question.then(self._last[1])

    def is_step(self, message: Message) -> bool:
        """Return whether a message is a step of a sum."""
        return isinstance(message, STEPS)

    def covers(self, answer: Message) -> bool:
        """Return whether the aggregator uses only the sum of answers of this class."""
        return type(answer) in self._summation.fields

    def hold(
        self,
        key: ConversationKey,
        row: int,
        client: ClientData,
        request: Message,
        answer: Message,
        *,
        varies: bool,
    ) -> Message:
        """Return the message to send in place of a one-row answer.

        Under secure aggregation, and with adaptive clipping (the aggregator sends the norm next), it is a notice that
        the answer is ready. With a constant clipping norm it is the clipped answer.

        Raise DataError if a value is not finite, or beyond its bound.
        """
        privacy, secure = self._privacy(key), self._summation.secure
        if privacy is None and secure is None:
            return answer
        fields = self._summation.fields[type(answer)]
        values = changes_of(answer, request, fields, exact=privacy is not None)
        if privacy is not None:
            _check_finite(values)
        if privacy is not None and secure is None and privacy.adaptive_clip is None:
            return clipped_answer(answer, request, fields, self._rule(privacy, privacy.clip))
        if secure is not None and privacy is None:
            SumVector(type(answer), fields, _shapes(values), secure).check(values)
        context = self._contexts[key][row] if secure is not None else _Context(b"")
        self._held.setdefault(key, {})[row] = _Held(answer, request, values, len(client.train), context, varies)
        return AnswerReady(torch.ones(1, 1, dtype=torch.uint8))

    def _privacy(self, key: ConversationKey) -> TrainingPrivacy | None:
        """Return the privacy of clients in a conversation; None if it does not cover the conversation."""
        return self._summation.privacy if key.purpose == TRAIN else None

    def _rule(self, privacy: TrainingPrivacy, clip: float) -> ClippedSum:
        """Return the clipping and the noise at a norm that the aggregator has sent.

        Raise RefusedError if the norm is not valid, or differs from the experiment's.
        """
        is_allowed = 0 < clip < math.inf if privacy.adaptive_clip is not None else clip == privacy.clip
        if not is_allowed:
            raise RefusedError(f"the aggregator clips to {clip:g}, and the experiment says {privacy.clip:g}")
        return clipping_rule(privacy, self._summation.clients_per_round, clip)

    def step(self, key: ConversationKey, row: int, client: str, message: Message) -> Message:
        """Return a client's answer to one step of the secure sum of its answer.

        Parameters
        ----------
        message
            The step, with the client's row alone.

        Raises
        ------
        RefusedError
            If an honest aggregator would not send this message.
        """
        held_answer = self._held.get(key, {}).get(row)
        if held_answer is None:
            raise RefusedError(f"client {client} has no answer to be summed here")
        if isinstance(message, ClipNotice):
            return self._clipped(key, held_answer, float(message.clip))
        if isinstance(message, SumSession):
            return self._join(key, held_answer, client, message)
        if held_answer.member is None or held_answer.vector is None:
            raise RefusedError(f"the secure sum of client {client} has not begun")
        match message:
            case KeyRoster():
                shares = held_answer.member.share(message.keys.numpy(), message.signatures[0].numpy())
                return EncryptedShares(_row(shares))
            case ShareDelivery():
                integers = self._encoded(key, client, held_answer, held_answer.vector)
                present = message.present[0].numpy().astype(np.bool_)
                masked = held_answer.member.mask(integers, message.shares[0].numpy(), present)
                return MaskedAnswer(held_answer.vector.as_bytes(masked.values), _row(masked.receipts))
            case Survivors():
                return self._confirm(key, held_answer, held_answer.member, client, message)
            case ConfirmationDelivery():
                return RevealedShares(_row(held_answer.member.unmask(message.tags[0].numpy())))
        raise RefusedError(f"{type(message).__name__} is not a step of a secure sum")

    def _confirm(
        self, key: ConversationKey, held_answer: _Held, member: SecureSumMember, client: str, message: Survivors
    ) -> Confirmations:
        """Return the client's confirmations of the survivors, if it may help to reveal the sum over them.

        The set is recorded after the protocol's own checks, so that an invented session leaves no trace.
        """
        survived = message.survived.numpy().astype(np.bool_)
        if self._guard is not None:
            self._guard.cohort(int(survived.sum()), None)
        tags = member.confirm(survived, message.receipts[0].numpy())
        if self._revealed is not None:
            names = [name for name, is_present in zip(held_answer.names, survived.tolist(), strict=True) if is_present]
            try:
                self._revealed.check(
                    client, self._subject(key, held_answer), combined_digest(self._own(held_answer), *names)
                )
            except RefusedError:
                held_answer.member = None  # it must not reveal its shares
                raise
        return Confirmations(_row(tags))

    def _subject(self, key: ConversationKey, held_answer: _Held) -> Subject:
        """Return what the client has answered, without the round if its answer would be the same in another one."""
        answer = type(held_answer.answer).__name__
        if self._summation.is_lasting:
            return Subject(None, combined_digest(answer))
        has_rounds = key.purpose == TRAIN and held_answer.varies
        question = combined_digest(
            self._run, key.purpose, key.round * has_rounds, held_answer.context.question.digest, answer
        )
        return Subject(key.round, question)

    def _own(self, held_answer: _Held) -> bytes:
        """Return a digest of all that shapes an answer beside the question and the client's data."""
        return combined_digest(self._summation.run, held_answer.context.start, held_answer.clip)

    def close(self, key: ConversationKey) -> None:
        """Forget the answers of a conversation."""
        self._held.pop(key, None)
        self._contexts.pop(key, None)

    def _clipped(self, key: ConversationKey, held_answer: _Held, clip: float) -> Message:
        """Return the answer, clipped to a norm that adapts."""
        privacy, fields = self._privacy(key), self._summation.fields[type(held_answer.answer)]
        if privacy is None or privacy.adaptive_clip is None or self._summation.secure is not None:
            raise RefusedError("the aggregator asks for a clipped answer, which this experiment does not allow")
        return clipped_answer(held_answer.answer, held_answer.request, fields, self._rule(privacy, clip))

    def _encoded(self, key: ConversationKey, client: str, held_answer: _Held, vector: SumVector) -> Integers:
        """Return the client's integers: of its weighted values, or of clipped ones with its share of the noise."""
        if not isinstance(vector, PrivateVector):
            fields, largest = vector.fields, self._summation.largest(held_answer.names)
            own = held_answer.examples
            weights = {name: field.weight(own) / field.weight(largest) for name, field in fields.items()}
            return vector.encode(held_answer.values, len(held_answer.names), weights)
        context: tuple[object, ...] = (
            client,
            key.round,
            key.attempt,
            key.conversation,
            type(held_answer.answer).__name__,
        )
        if isinstance(self._noise, bytes):  # a repeated sum must have the same noise, else repetitions average it out
            context = (client, combined_digest(self._own(held_answer), self._subject(key, held_answer).question).hex())
        source = noise_source(self._noise, "share", *context)
        return vector.noisy(clipped_values(held_answer.values, vector.learned, vector.rule), source)

    def _join(self, key: ConversationKey, held_answer: _Held, client: str, message: SumSession) -> MemberKeys:
        """Return the client's keys for a new sum; the same session asks for the same keys."""
        secure, privacy, clip = self._summation.secure, self._privacy(key), float(message.clip)
        if secure is None:
            raise RefusedError("federation.secure_aggregation is not set here, and the aggregator asks for a sum")
        if privacy is None and clip:
            raise RefusedError("federation.privacy does not cover this answer, and the aggregator clips it")
        try:
            members = names_from_bytes(message.members)
        except ValueError as error:
            raise RefusedError(f"the members of the secure sum cannot be read: {error}") from None
        rule = None if privacy is None else self._rule(privacy, clip)
        vector = self._summation.vector(
            type(held_answer.answer), _shapes(held_answer.values), secure, rule, len(members)
        )
        if self._guard is not None:
            self._guard.cohort(len(members), weaker_graph(secure, len(members)))
        largest, fields = self._summation.largest(members), self._summation.fields[type(held_answer.answer)]
        if held_answer.examples > largest and any(field.weighting == "examples" for field in fields.values()):
            raise RefusedError(
                f"client {client} has more training examples than federation.secure_aggregation.examples, {largest}: "
                "raise it"
            )
        question = self._summation.question(key, held_answer.context.question, type(held_answer.answer), clip, members)
        if message.question.numpy().tobytes() != question:
            raise RefusedError(
                "the aggregator sums the answers to another question than this client was asked: the experiment, the "
                "model, the round or the clipping norm differs"
            )
        session, graph = message.session.numpy().tobytes(), graph_of(secure, len(members))
        parameters = SessionParameters(session, members, *graph, vector.bits, question)
        if held_answer.vector is not None:
            raise RefusedError(f"the answer of client {client} is part of another secure sum")
        held_answer.member = SecureSumMember(parameters, client, self._signing.signer, self._signing.verifier)
        held_answer.vector, held_answer.names, held_answer.clip = vector, members, clip
        keys, signature = held_answer.member.advertise()
        return MemberKeys(_row(keys), _row(signature))


def _shapes(values: Values) -> Mapping[str, tuple[int, ...]]:
    return {name: value.shape for name, value in values.items()}


def _check_finite(values: Values) -> None:
    for name, value in values.items():
        if not np.isfinite(value).all():
            raise DataError(f"{name} has a value that is not finite")


def _row(values: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(values.copy())[None]
