"""Messages of a secure sum, between the answer of a method's clients and its sum (:mod:`fedloom.sums.secure_sum`).

They are sent like any other messages, in the conversation of the method: five more exchanges follow the message that
the clients answer.

An aggregator that lies can ask the members of a sum different questions, so that the answers of all but one are known
or vanish, and read the remaining one from the sum (D. Pasquini, D. Francati, G. Ateniese, Eluding secure aggregation in
federated learning via model inconsistency, CCS 2022). Each member therefore computes the digest of the
:class:`Question` from what it has received and from its own experiment. All keys and masks of the sum depend on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.digests import combined_digest, length_prefixed
from fedloom.messages import Message, Quantity, broadcast, rows


class AnswerReady(Message):
    """Answer that the client holds back until it can be masked."""

    ready: Tensor = rows(Quantity.OTHER, 1)  # [c, 1] uint8, 1


class ClipNotice(Message):
    """Clipping norm of answers that clients hold back, where it adapts; the clipped answer follows."""

    clip: Tensor = broadcast(Quantity.OTHER)  # [1] float64


class SumSession(Message):
    """Step 0 of a secure sum: its parameters."""

    session: Tensor = broadcast(Quantity.OTHER)  # [16] uint8
    members: Tensor = broadcast(Quantity.OTHER)  # [...] uint8, JSON list of client ids
    clip: Tensor = broadcast(Quantity.OTHER)  # [1] float64, the clipping norm; 0 without differential privacy
    question: Tensor = broadcast(Quantity.OTHER)  # [32] uint8, digest of what the aggregator has asked


class MemberKeys(Message):
    """Answer to step 0."""

    keys: Tensor = rows(Quantity.OTHER)  # [c, 64] uint8
    signature: Tensor = rows(Quantity.OTHER)  # [c, s] uint8


class KeyRoster(Message):
    """Step 1: the keys of all members, and the signatures of each member's neighbours."""

    keys: Tensor = broadcast(Quantity.OTHER)  # [n, 64] uint8
    signatures: Tensor = rows(Quantity.OTHER)  # [c, k, s] uint8


class EncryptedShares(Message):
    """Answer to step 1: shares for each neighbour."""

    shares: Tensor = rows(Quantity.OTHER)  # [c, k, 96] uint8


class ShareDelivery(Message):
    """Step 2: the neighbours' shares for each member."""

    shares: Tensor = rows(Quantity.OTHER)  # [c, k, 96] uint8
    present: Tensor = rows(Quantity.OTHER)  # [c, k] uint8


class MaskedAnswer(Message):
    """Answer to step 2: the vector under masks, and the proofs for the neighbours."""

    values: Tensor = rows(Quantity.OTHER)  # [c, nbytes] uint8
    receipts: Tensor = rows(Quantity.OTHER)  # [c, k, 16] uint8


class Survivors(Message):
    """Step 3: the members whose vectors have arrived, and for each member its neighbours' proofs."""

    survived: Tensor = broadcast(Quantity.OTHER)  # [n] uint8
    receipts: Tensor = rows(Quantity.OTHER)  # [c, k, 16] uint8


class Confirmations(Message):
    """Answer to step 3: for each neighbour, the authenticated set of survivors."""

    tags: Tensor = rows(Quantity.OTHER)  # [c, k, 16] uint8


class ConfirmationDelivery(Message):
    """Step 4: the neighbours' confirmations for each member."""

    tags: Tensor = rows(Quantity.OTHER)  # [c, k, 16] uint8


class RevealedShares(Message):
    """Answer to step 4: for each neighbour, its share of one of its two secrets."""

    shares: Tensor = rows(Quantity.OTHER)  # [c, k, 33] uint8


STEPS: tuple[type[Message], ...] = (
    ClipNotice, SumSession, KeyRoster, ShareDelivery, Survivors, ConfirmationDelivery,
)  # fmt: skip
"""Messages of the aggregator about answers that clients hold back."""

ANSWERS: tuple[type[Message], ...] = (
    AnswerReady, MemberKeys, EncryptedShares, MaskedAnswer, Confirmations, RevealedShares,
)  # fmt: skip
"""Answers of clients in a secure sum."""

VOCABULARY: Mapping[str, type[Message]] = {cls.__name__: cls for cls in (*STEPS, *ANSWERS)}


def names_as_bytes(names: Sequence[str]) -> Tensor:
    """Return client ids as bytes, ``[...]`` uint8."""
    return torch.frombuffer(bytearray(json.dumps(list(names)).encode()), dtype=torch.uint8)


def names_from_bytes(data: Tensor) -> tuple[str, ...]:
    """Return the client ids of :func:`names_as_bytes`.

    Raise ValueError if the bytes are not a JSON list of strings.
    """
    names = json.loads(data.numpy().tobytes())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("not a list of client ids")
    return tuple(names)


@dataclass(frozen=True)
class Question:
    """Messages that a conversation has sent to all of its clients so far.

    Attributes
    ----------
    digest
        SHA-256 over the classes and broadcasts of the messages, in order; empty before the first.
    is_shared
        False if a message had values for single clients, of which the others know nothing.
    """

    digest: bytes = b""
    is_shared: bool = True

    @classmethod
    def from_message(cls, message: Message) -> Question:
        """Return what one message asks."""
        fields, tensors = message.fields(), message.tensors()
        broadcasts = {field.name: tensors[field.name] for field in fields if not field.per_client}
        digest = combined_digest(type(message).__name__, digest_of_tensors(broadcasts))
        return cls(digest, all(not field.per_client for field in fields))

    def then(self, other: Question) -> Question:
        """Return this question followed by another."""
        return Question(combined_digest(self.digest, other.digest), self.is_shared and other.is_shared)


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 of named tensors: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(length_prefixed(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode()))
        digest.update(content)
    return digest.digest()
