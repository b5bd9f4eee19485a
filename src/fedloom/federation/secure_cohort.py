"""Aggregator's side of a secure sum over a cohort: five exchanges after the one that the clients answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import QuorumError, RefusedError
from fedloom.federation.clipping import Values
from fedloom.federation.sum_messages import (
    AnswerReady,
    ConfirmationDelivery,
    Confirmations,
    EncryptedShares,
    KeyRoster,
    MaskedAnswer,
    MemberKeys,
    RevealedShares,
    ShareDelivery,
    SumSession,
    Survivors,
    names_as_bytes,
)
from fedloom.federation.sum_vector import SumVector, graph_of
from fedloom.messages import Message
from fedloom.privacy.clipped_sum import ClippedSum
from fedloom.privacy.settings import SMALLEST_SUM, SecureAggregation
from fedloom.security.masks import Integers
from fedloom.security.secure_sum import (
    KEY_BYTES,
    REVEALED_BYTES,
    SHARED_BYTES,
    MaskedVector,
    SecureSumAggregator,
)
from fedloom.security.sum_keys import TAG_BYTES
from fedloom.security.sum_session import SESSION_BYTES, SessionParameters

if TYPE_CHECKING:
    from fedloom.federation.cohort import RemoteCohort
    from fedloom.federation.summation import Summation


@dataclass(frozen=True)
class DecodedSums:
    """Sums over a cohort."""

    values: Values
    """Weighted sum of each field."""
    rows: Collection[int]
    """Rows of the clients whose answers are in the sums."""
    vector: SumVector | None = None
    """Layout of the secure sum; None if the aggregator has received and added the answers."""


class SecureSum:
    """Secure sum of one answer of a cohort.

    Members are the clients whose answers are ready; member i is row ``self._rows[i]`` of the cohort.
    """

    def __init__(
        self,
        summation: Summation,
        settings: SecureAggregation,
        cohort: RemoteCohort,
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
            As in :meth:`RemoteCohort.send`.
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
        total = self._sum(members)
        return self._totals(self._vector.decode(total, len(members)), self._summation.largest(members))

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
        sent = self._ask(opening, MemberKeys, {"keys": (KEY_BYTES,), "signature": (s,)})
        signatures = self._stacked(sent, "signature", s)
        keys = aggregator.roster(self._stacked(sent, "keys", KEY_BYTES), self._flags(sent))
        near = np.zeros((len(p.members), k, s), np.uint8)
        for i in np.flatnonzero(keys.any(axis=1)).tolist():
            neighbours = aggregator.neighbours(i)
            near[i, : len(neighbours)] = signatures[neighbours]
        sent = self._ask(KeyRoster(_tensor(keys), self._spread(near)), EncryptedShares, {"shares": (k, SHARED_BYTES)})
        shares, present = aggregator.forward_shares(self._stacked(sent, "shares", k, SHARED_BYTES), self._flags(sent))
        delivery = ShareDelivery(self._spread(shares), self._spread(present.astype(np.uint8)))
        shapes = {"values": (self._vector.nbytes,), "receipts": (k, TAG_BYTES)}
        self._add(aggregator, self._ask(delivery, MaskedAnswer, shapes))
        self._survived, receipts = aggregator.survivors()
        survivors = Survivors(_tensor(self._survived.astype(np.uint8)), self._spread(receipts))
        self._cohort.reveal()  # members answer this question over no other set from now on
        # From here on a client's answer is in the sum, so the client is not lost if it disconnects.
        sent = self._ask(survivors, Confirmations, {"tags": (k, TAG_BYTES)}, may_fail=True)
        tags = aggregator.forward_confirmations(self._stacked(sent, "tags", k, TAG_BYTES), self._flags(sent))
        confirmed = ConfirmationDelivery(self._spread(tags))
        sent = self._ask(confirmed, RevealedShares, {"shares": (k, REVEALED_BYTES)}, may_fail=True)
        return aggregator.sum(self._stacked(sent, "shares", k, REVEALED_BYTES), self._flags(sent))

    def _add(self, aggregator: SecureSumAggregator, sent: Mapping[int, Message]) -> None:
        for row in self._rows:
            if isinstance(answer := sent.get(row), MaskedAnswer):
                masked = MaskedVector(self._vector.from_bytes(answer.values), answer.receipts[0].numpy())
                try:
                    aggregator.add(self._rows.index(row), masked)
                except RefusedError as error:
                    self._cohort.lose(row, str(error))

    def _totals(self, found: Values, largest: int) -> DecodedSums:
        rows = [row for row, there in zip(self._rows, self._survived.tolist(), strict=True) if there]
        weighted = {name: found[name] * summed.weight(largest) for name, summed in self._fields.items()}
        return DecodedSums({**found, **weighted}, rows, self._vector)

    def _flags(self, sent: Collection[int]) -> NDArray[np.bool_]:
        """Return the members among these rows of the cohort, bool [n]."""
        return np.array([row in sent for row in self._rows], np.bool_)

    def _stacked(self, sent: Mapping[int, Message], name: str, *shape: int) -> NDArray[np.uint8]:
        """Return a field of the members' answers, uint8 [n, *shape], zeros for those that are absent."""
        found = np.zeros((len(self._rows), *shape), np.uint8)
        for i, row in enumerate(self._rows):
            if row in sent:
                found[i] = sent[row].tensors()[name][0].numpy()
        return found

    def _spread(self, values: NDArray[np.uint8]) -> Tensor:
        """Return values of members [n, ...] as rows of the cohort [c, ...]."""
        found = torch.zeros(len(self._cohort.clients), *values.shape[1:], dtype=torch.uint8)
        found[self._rows] = _tensor(values)
        return found


def _tensor(values: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
