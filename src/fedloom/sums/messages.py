"""Messages of a secure sum, between the answer of a method's clients and its sum (:mod:`fedloom.security.secure_sum`).

They are sent like any other messages, in the conversation of the method: five more exchanges follow the message that
the clients answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
