"""Session of one secure sum: its members, the graph between them, the thresholds, and the keys of its members.

Each member shares secrets and masks with k neighbours only (Bell et al., Secure single-server aggregation with
(poly)logarithmic overhead, CCS 2020). The graph is a ring of the members in random order, each joined to the k / 2
nearest on either side. The order is derived from a hash of everything that the members have advertised, so nobody
chooses it, and every member computes it itself.

The algorithms are X25519, HKDF-SHA256, AES-256-GCM and HMAC-SHA256. Every key depends on the transcript, a hash of the
session and of everything that its members have advertised: members that were sent different rosters share no key.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedloom.errors import ExperimentError, RefusedError
from fedloom.privacy.settings import SMALLEST_SUM, least_survivors
from fedloom.sums.masks import SEED_BYTES, Bits, key_stream

SESSION_BYTES = 16
"""Length of a session's name in bytes."""

PUBLIC_BYTES = 32
"""Length of a public key."""

TAG_BYTES = 16
"""Length of commitments, receipts, confirmations, and the tag that encryption adds."""

_ONCE = bytes(12)
"""Nonce of keys that encrypt one message."""

SMALLEST_DEGREE = 20
"""Number of neighbours up to which small cohorts are complete graphs."""

ADVERSE_FRACTION, SECURITY_BITS, FAILURE = 0.05, 64, 1e-3
"""Fraction of members that collude, or drop out, and bounds of :func:`default_degree`."""


@dataclass(frozen=True)
class SessionParameters:
    """Parameters of one secure sum, equal for the aggregator and all members.

    Raises
    ------
    ExperimentError
        If these numbers do not fit each other, or are insecure.
    """

    session: bytes
    """Name of the session: 16 random bytes, chosen by the aggregator, never used again."""
    members: tuple[str, ...]
    """Client ids; a member's position is its row in every array of the protocol."""
    degree: int
    """Number k of neighbours of each member: all others, or an even number."""
    threshold: int
    """Number t of neighbours whose shares reveal a secret, 2t > k. With up to c neighbours of a member that collude
    with the aggregator, nobody can reveal both secrets of the member, and so its value alone, while 2t > k + c. While
    2t > k + 2c, the aggregator learns one sum and no other, whatever it claims about dropouts. A member that loses more
    than k - t neighbours spoils the session."""
    bits: Bits = 32
    """Width of the integers, 32 or 64."""
    question: bytes = b""
    """Digest of what the members were asked, as each computes it: members that differ in it share no keys and masks."""

    def __post_init__(self) -> None:
        n, k, t = len(self.members), self.degree, self.threshold
        if n < SMALLEST_SUM:
            raise ExperimentError(
                f"A secure sum needs {SMALLEST_SUM} clients or more (got {n}): with fewer it reveals their values.",
                found=n,
            )
        if len(set(self.members)) < n:
            raise ExperimentError("A client is listed twice as a member of the secure sum.")
        if len(self.session) != SESSION_BYTES:
            raise ExperimentError(f"A session's name must have {SESSION_BYTES} bytes (got {len(self.session)}).")
        if not (k == n - 1 or (2 <= k < n - 1 and k % 2 == 0)):
            raise ExperimentError(
                f"The number of neighbours in a secure sum of {n} clients must be even and below {n}, or {n - 1} "
                f"(got {k}).",
                found=k,
            )
        if not k / 2 < t <= k:
            raise ExperimentError(
                f"The threshold of a secure sum must be more than half of the {k} neighbours, and at most all "
                f"(got {t}).",
                found=t,
                allowed=list(range(k // 2 + 1, k + 1)),
            )
        if self.bits not in (32, 64):
            raise ExperimentError(
                f"The integers of a secure sum have 32 or 64 bits (got {self.bits}).", found=self.bits
            )

    @property
    def minimum(self) -> int:
        """Smallest number of survivors (:func:`least_survivors`)."""
        return least_survivors(len(self.members))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all parameters."""
        numbers = (len(self.members), self.degree, self.threshold, self.bits)
        ids = [member.encode() for member in self.members]
        parts = [self.session, *(number.to_bytes(4, "big") for number in numbers)]
        parts += [part for id in (*ids, self.question) for part in (len(id).to_bytes(4, "big"), id)]
        return hashlib.sha256(b"fedloom secure sum 2" + b"".join(parts)).digest()


def default_threshold(degree: int) -> int:
    """Return the default number of neighbours that reveal a secret: two thirds, rounded down, plus one.

    A third of a member's neighbours may drop out, or a third may collude with the aggregator.
    """
    return 2 * degree // 3 + 1


@lru_cache(maxsize=64)
def default_degree(members: int) -> int:
    """Return the default number of neighbours: all others if there are at most 20, else by the bounds below.

    It is the smallest even k from 20 on such that, with the default threshold t (Bell et al. 2020, section 3; tails of
    the hypergeometric distribution, and the union bound over members),

    - the probability that some member has 2t - k or more colluding neighbours is at most 2^-64,
    - the probability that some member loses more than k - t neighbours is at most 0.001,

    if 5 % of the members collude with the aggregator, and 5 % drop out by chance.

    The aggregator can try many graphs: it decides who counts as absent, and colluding members can choose their keys
    last. An attack with 2²⁴ graphs succeeds with a probability of at most 2⁻⁴⁰.
    """
    others, adverse = members - 1, math.ceil(ADVERSE_FRACTION * members)
    for degree in range(SMALLEST_DEGREE, others, 2):
        threshold = default_threshold(degree)
        insecure = _log2_tail(others, adverse, degree, 2 * threshold - degree)
        failing = _log2_tail(others, adverse, degree, degree - threshold + 1)
        if math.log2(members) + insecure <= -SECURITY_BITS and math.log2(members) + failing <= math.log2(FAILURE):
            return degree
    return others


def _log2_tail(population: int, adverse: int, draws: int, at_least: int) -> float:
    """Return log2 of the probability that ``draws`` of a population include ``at_least`` of those marked, or more."""

    def log_choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    terms = [
        log_choose(adverse, hits) + log_choose(population - adverse, draws - hits) - log_choose(population, draws)
        for hits in range(max(at_least, draws + adverse - population), min(draws, adverse) + 1)
    ]
    if not terms:
        return -math.inf
    largest = max(terms)
    return (largest + math.log(sum(math.exp(term - largest) for term in terms))) / math.log(2)


class Graph:
    """Graph of a session's members, derived from a hash of all that they have advertised.

    Members that are present form a ring in random order; each is a neighbour of the k / 2 nearest on either side, or of
    all others if there are no more than k.

    Parameters
    ----------
    seed
        Hash of the roster, 32 bytes.
    present
        Members that have advertised keys, bool [n].
    degree
        Number k of neighbours.
    """

    def __init__(self, seed: bytes, present: NDArray[np.bool_], degree: int) -> None:
        rows = np.flatnonzero(present)
        order = np.frombuffer(key_stream(seed, 8 * len(rows)), "<u8").argsort(kind="stable")
        self._ring: NDArray[np.intp] = rows[order]
        self._place = np.full(len(present), -1)
        self._place[self._ring] = np.arange(len(rows))
        if len(rows) - 1 <= degree:
            self._offsets = np.arange(1, len(rows))
        else:
            near = np.arange(1, degree // 2 + 1)
            self._offsets = np.concatenate([near, len(rows) - near[::-1]])

    @property
    def degree(self) -> int:
        """Number of neighbours of each member that is present."""
        return len(self._offsets)

    def neighbours(self, row: int) -> NDArray[np.intp]:
        """Return the rows of a member's neighbours, in the order of the ring, shape [degree].

        Neighbours see each other from opposite ends: if v is number i in the list of u, then u is number
        ``degree - 1 - i`` in the list of v.
        """
        places: NDArray[np.intp] = (self._place[row] + self._offsets) % len(self._ring)
        return self._ring[places]


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
    recipient, since, confirm = (os.urandom(32) for _ in range(3))
    return PairSecrets(
        os.urandom(SEED_BYTES), +1, recipient, since, os.urandom(TAG_BYTES), os.urandom(TAG_BYTES), confirm
    )


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
