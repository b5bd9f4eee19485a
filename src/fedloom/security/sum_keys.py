"""Keys of a secure sum, which the members of a session derive from the roster and each other's public keys.

The algorithms are X25519, HKDF-SHA256, AES-256-GCM and HMAC-SHA256. Every key depends on the transcript, a hash of the
session and of everything that its members have advertised: members that were sent different rosters share no key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedloom.errors import RefusedError
from fedloom.security.masks import SEED_BYTES, key_stream
from fedloom.security.sum_session import SessionParameters

PUBLIC_BYTES = 32
"""Length of a public key."""

TAG_BYTES = 16
"""Length of commitments, receipts, confirmations, and the tag that encryption adds."""

_ONCE = bytes(12)
"""Nonce of keys that encrypt one message."""


@dataclass(frozen=True)
class PairSecrets:
    """Secrets of two neighbours, from the side of one of them, u; the other is v."""

    seed: bytes
    """Seed of their mask."""
    sign: int
    """Sign of the mask in the vector of u: + for the lower of the two rows."""
    key_to: bytes
    """Key that encrypts the shares from u to v."""
    key_from: bytes
    """Key that encrypts the shares from v to u."""
    receipt_to: bytes
    """Proof that the masks of u include this one; unknown to others until it is sent."""
    receipt_from: bytes
    """Proof that the masks of v include this one; unknown to others until it is sent."""
    confirm_key: bytes
    """Key that authenticates a set of survivors."""

    def encrypted(self, shares: bytes) -> bytes:
        """Return shares encrypted for v; called once, since the nonce is fixed."""
        return AESGCM(self.key_to).encrypt(_ONCE, shares, None)

    def decrypted(self, box: bytes) -> bytes:
        """Return the shares that v has encrypted; empty if the box is not from v."""
        try:
            return AESGCM(self.key_from).decrypt(_ONCE, box, None)
        except InvalidTag:
            return b""

    def confirmation(self, sender: int, survivors: bytes) -> bytes:
        """Return the sender's confirmation, 16 bytes, of the set of survivors with this digest."""
        return hmac.digest(self.confirm_key, sender.to_bytes(4, "big") + survivors, "sha256")[:TAG_BYTES]


def agree(private: X25519PrivateKey, public: bytes, transcript: bytes, u: int, v: int) -> PairSecrets:
    """Return the secrets that row u, the owner of the private key, shares with row v.

    Raise RefusedError if the public key is not valid.
    """
    try:
        agreed = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise RefusedError(f"The key of member {v} is not a valid public key.") from None
    lower, upper = min(u, v), max(u, v)
    keys = _derive(agreed, transcript, b"pair" + lower.to_bytes(4, "big") + upper.to_bytes(4, "big"), 144)
    confirm, up, down = (keys[i : i + 32] for i in range(0, 96, 32))  # up: from the lower row to the upper
    seed, receipt_up, receipt_down = (keys[i : i + 16] for i in range(96, 144, 16))
    if u == lower:
        return PairSecrets(seed, +1, up, down, receipt_up, receipt_down, confirm)
    return PairSecrets(seed, -1, down, up, receipt_down, receipt_up, confirm)


def stranger() -> PairSecrets:
    """Return secrets shared with nobody, for a neighbour whose keys cannot be verified."""
    to, since, confirm = (os.urandom(32) for _ in range(3))
    return PairSecrets(os.urandom(SEED_BYTES), +1, to, since, os.urandom(TAG_BYTES), os.urandom(TAG_BYTES), confirm)


def is_public_key(public: bytes) -> bool:
    """Return whether members can agree on keys with the owner of this public key."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def transcript_of(parameters: SessionParameters, keys: NDArray[np.uint8]) -> bytes:
    """Return the hash of the session and its roster, uint8 [n, 64], from which the graph and all keys are derived."""
    return hashlib.sha256(b"roster" + parameters.digest + keys.tobytes()).digest()


def advertisement(parameters: SessionParameters, row: int, keys: NDArray[np.uint8]) -> bytes:
    """Return the message that a member signs: the session, its row, and its keys, uint8 [64]."""
    return b"fedloom secure sum keys" + parameters.digest + row.to_bytes(4, "big") + keys.tobytes()


def commitment(secret: bytes) -> bytes:
    """Return a digest of a random secret, 16 bytes, that reveals nothing about it."""
    return hashlib.sha256(b"commitment" + secret).digest()[:TAG_BYTES]


def self_mask_seed(secret: bytes, transcript: bytes) -> bytes:
    """Return the seed of PRG(b)."""
    return _derive(secret, transcript, b"self mask", SEED_BYTES)


def seed_pads(secret: bytes, transcript: bytes, count: int) -> list[bytes]:
    """Return the one-time pads, from e, under which a member seals the seeds of its pairs."""
    pads = key_stream(_derive(secret, transcript, b"seal", SEED_BYTES), SEED_BYTES * count)
    return [pads[i : i + SEED_BYTES] for i in range(0, len(pads), SEED_BYTES)]


def xor(a: bytes, b: bytes) -> bytes:
    """Return the bitwise exclusive or of two byte strings of equal length."""
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).to_bytes(len(a), "big")


def _derive(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    return HKDF(SHA256(), length, salt, info).derive(secret)
