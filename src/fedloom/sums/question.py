"""Question that an aggregator asks of a cohort: everything that shapes the answers, as each side knows it by itself.

An aggregator that lies can ask the members of a secure sum different questions, so that the answers of all but one are
known or vanish, and read the remaining one from the sum (D. Pasquini, D. Francati, G. Ateniese, Eluding secure
aggregation in federated learning via model inconsistency, CCS 2022). Each member therefore computes the digest of the
question from what it has received and from its own experiment. All keys and masks of the sum depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.messages import Message


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
        asked = combined_digest(type(message).__name__, digest_of_tensors(broadcasts))
        return cls(asked, all(not field.per_client for field in fields))

    def then(self, other: Question) -> Question:
        """Return this question followed by another."""
        return Question(combined_digest(self.digest, other.digest), self.is_shared and other.is_shared)


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 of named tensors: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(_framed(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode()))
        digest.update(content)
    return digest.digest()


def combined_digest(*parts: bytes | str | float) -> bytes:
    """Return the SHA-256 of a sequence of values; equal digests mean equal sequences."""
    encoded = (part if isinstance(part, bytes) else repr(part).encode() for part in parts)
    return hashlib.sha256(b"fedloom question 1" + b"".join(map(_framed, encoded))).digest()


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part
