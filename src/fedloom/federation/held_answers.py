"""Clients' side of sums: answers that are held back until they are masked, so that the aggregator learns only a sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.federated import ClientData
from fedloom.errors import RefusedError
from fedloom.federation.revealed_sums import RevealedSums
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
    names_from_bytes,
)
from fedloom.federation.sum_vector import SumVector, graph_of
from fedloom.federation.summation import Summation
from fedloom.federation.transport import ConversationKey
from fedloom.messages import Message
from fedloom.security.secure_sum import SecureSumMember
from fedloom.security.signing import Signing
from fedloom.security.sum_session import SessionParameters


@dataclass(eq=False)
class _Held:
    """Answer of one client, and its part in the secure sum of it."""

    vector: SumVector
    values: Mapping[str, NDArray[np.float64]]
    examples: int
    member: SecureSumMember | None = None
    names: tuple[str, ...] = ()
    largest: int = 0


class HeldAnswers:
    """Answers of the clients of one process that wait for their secure sums.

    Parameters
    ----------
    summation
        The sums of the method's answers.
    signing
        Signature key of the clients of this process, and knowledge of the others' keys.
    """

    def __init__(self, summation: Summation, signing: Signing) -> None:
        self._summation = summation
        self._signing = signing
        self._revealed = RevealedSums()
        self._held: dict[ConversationKey, dict[int, _Held]] = {}

    def covers(self, answer: Message) -> bool:
        """Return whether the aggregator uses only the sum of answers of this class."""
        return type(answer) in self._summation.fields

    def hold(self, key: ConversationKey, row: int, client: ClientData, request: Message, answer: Message) -> Message:
        """Return what the aggregator receives of a one-row answer: a sign that it is held, under secure aggregation.

        Raises
        ------
        DataError
            If a value is not finite, or beyond its bound.
        """
        secure = self._summation.secure
        if secure is None:
            return answer
        fields, found = self._summation.fields[type(answer)], answer.tensors()
        values = {}
        for name, summed in fields.items():
            value = found[name][0]
            values[name] = _numbers(value if summed.since is None else value - request.tensors()[summed.since])
        shapes = {name: value.shape for name, value in values.items()}
        vector = SumVector(type(answer), fields, shapes, secure)
        vector.check(values)
        self._held.setdefault(key, {})[row] = _Held(vector, values, len(client.train))
        return AnswerReady(torch.ones(1, 1, dtype=torch.uint8))

    def step(self, key: ConversationKey, row: int, client: str, message: Message) -> Message:
        """Return a client's answer to one step of the secure sum of its answer.

        Parameters
        ----------
        message
            The step, with the client's row alone.

        Raises
        ------
        RefusedError
            If what the aggregator sends is not what an honest one would send.
        """
        held = self._held.get(key, {}).get(row)
        if held is None:
            raise RefusedError(f"client {client} holds no answer to be summed here")
        if isinstance(message, SumSession):
            return self._join(held, client, message)
        if held.member is None:
            raise RefusedError(f"the secure sum of client {client} has not begun")
        match message:
            case KeyRoster():
                shares = held.member.share(message.keys.numpy(), message.signatures[0].numpy())
                return EncryptedShares(_row(shares))
            case ShareDelivery():
                integers = held.vector.encode(self._weighted(held), len(held.names))
                there = message.present[0].numpy().astype(np.bool_)
                masked = held.member.mask(integers, message.shares[0].numpy(), there)
                return MaskedAnswer(held.vector.as_bytes(masked.values), _row(masked.receipts))
            case Survivors():
                survived = message.survived.numpy().astype(np.bool_)
                names = [name for name, there in zip(held.names, survived.tolist(), strict=False) if there]
                self._revealed.check(client, (key.round, key.purpose, held.vector.answer.__name__), names)
                return Confirmations(_row(held.member.confirm(survived, message.receipts[0].numpy())))
            case ConfirmationDelivery():
                return RevealedShares(_row(held.member.unmask(message.tags[0].numpy())))
        raise RefusedError(f"{type(message).__name__} is no step of a secure sum")

    def close(self, key: ConversationKey) -> None:
        """Forget the answers of a conversation."""
        self._held.pop(key, None)

    def _join(self, held: _Held, client: str, message: SumSession) -> MemberKeys:
        """Return the client's keys for a new sum; the same session asks for the same keys."""
        secure = self._summation.secure
        assert secure is not None
        neighbours, threshold, bits, largest = message.numbers.tolist()
        try:
            members = names_from_bytes(message.members)
        except ValueError as error:
            raise RefusedError(f"the members of the secure sum cannot be read: {error}") from None
        expected = (*graph_of(secure, len(members)), held.vector.bits)
        if (neighbours, threshold, bits) != expected:
            raise RefusedError(
                f"the aggregator asks for a secure sum with {neighbours} neighbours, threshold {threshold} and {bits} "
                f"bits; the experiment has {expected[0]}, {expected[1]} and {expected[2]}"
            )
        if held.examples > largest:
            raise RefusedError(f"the largest client has {largest} examples, says the aggregator; this has more")
        parameters = SessionParameters(
            message.session.numpy().tobytes(), members, neighbours, threshold, held.vector.bits
        )
        if held.member is not None:
            raise RefusedError(f"the answer of client {client} is part of another secure sum")
        held.member = SecureSumMember(parameters, client, self._signing.signer, self._signing.verifier)
        held.names, held.largest = members, largest
        keys, signature = held.member.advertise()
        return MemberKeys(_row(keys), _row(signature))

    def _weighted(self, held: _Held) -> Mapping[str, NDArray[np.float64]]:
        fields = held.vector.fields
        return {
            name: value * (fields[name].weight(held.examples) / fields[name].weight(held.largest))
            for name, value in held.values.items()
        }


def _numbers(value: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = value.double().numpy()
    return found


def _row(values: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(values.copy())[None]
