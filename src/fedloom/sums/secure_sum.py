"""Secure aggregation: an aggregator learns the sum of its clients' vectors, and nothing else about them.

The protocol of Bonawitz et al. (Practical secure aggregation for privacy-preserving machine learning, CCS 2017,
figure 4) on the sparse graph of Bell et al. (CCS 2020). u and v are members, N(u) the k neighbours of u:

====  ===========  ===============================================================  ==================================
step  call         member u                                                         aggregator
====  ===========  ===============================================================  ==================================
0     advertise    signs a public key X_u and commitments to two secrets b_u, e_u   sends the roster of all keys to all
1     share        agrees on a key with each v in N(u), encrypts for v its Shamir   sends each v what is for v
                   shares of b_u and e_u, and seals the seed s_uv under e_u
2     mask         adds PRG(b_u), ± PRG(s_uv) for all v in N(u) that have shared    adds up, and names the survivors
3     confirm      authenticates the set of survivors for each v                    sends each v what is for v
4     unmask       reveals for v in N(u) its share of b_v if v survived, of e_v     recovers b_u of survivors and e_u of
               if v dropped out, once t neighbours have confirmed the same set      the others, and removes all masks
====  ===========  ===============================================================  ==================================

Arrays are indexed by position: row i of an array belongs to member i of the session, and column a of a member's array
to its neighbour a. A row of zeros stands for an absent member. There is no I/O here; arrays are sent as dense tensors.

Differences from the papers:

- One key agreement per pair instead of two. In the papers, a second key pair is secret-shared, so that the aggregator
  can recompute the seeds of a member that has dropped out. Here, each member seals its seeds under e_u, which is
  secret-shared instead. No private key ever leaves a member, so keys replayed in another session reveal nothing.
- A member proves to its neighbour v, together with its masked vector, that its masks include s_uv (a *receipt*). v
  reveals its share of b_u only after a receipt. Together with the confirmations, and as long as 2t > k + 2c for c
  colluding neighbours of a member, this gives the aggregator a single sum, of the same survivors everywhere: on a ring,
  a set of members, each of which has more than half of its neighbours in the set, cannot be split.

A member's privacy does not depend on the honesty of others, within these bounds. The result does: a single member can
spoil it with wrong values.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedloom.core.memory import large_array
from fedloom.errors import QuorumError, RefusedError
from fedloom.sums.masks import SEED_BYTES, Integers, add_masks, integer_type
from fedloom.sums.session import (
    PUBLIC_BYTES,
    TAG_BYTES,
    Graph,
    PairSecrets,
    SessionParameters,
    advertisement,
    agree,
    commitment,
    is_public_key,
    seed_pads,
    self_mask_seed,
    stranger,
    transcript_of,
    xor,
)
from fedloom.sums.shamir import SHARE_BYTES, combine, correct, random_secret, split

if TYPE_CHECKING:
    from fedloom.security.signing import Signer, Verifier


Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

KEY_BYTES = PUBLIC_BYTES + 2 * TAG_BYTES
"""Length of what a member advertises: its public key, and commitments to b and e."""

BOX_BYTES = 2 * SHARE_BYTES + TAG_BYTES
"""Length of the encrypted shares for one neighbour."""

SHARED_BYTES = BOX_BYTES + SEED_BYTES
"""Length of a row in step 1: encrypted shares, and the sealed seed of the pair."""

REVEALED_BYTES = 1 + SHARE_BYTES
"""Length of a row in step 4: the kind of the share (0: none), and the share."""

OF_SELF_MASK, OF_SEEDS = 1, 2
"""Kinds of shares: of b, revealed if its owner survived, and of e, revealed if it dropped out."""

_A = TypeVar("_A")


@dataclass(frozen=True)
class MaskedVector:
    """Answer of a member in step 2."""

    values: Integers
    """Masked integers, shape [d]."""
    receipts: Bytes
    """For each neighbour whose mask they include, the proof of it; uint8 [k, 16]."""


class SecureSumMember:
    """Protocol state of one member in one session: its secrets, and what it has answered.

    Each step answers one question. The same question gets the same answer again; a different one is refused.

    Parameters
    ----------
    parameters
        The session.
    client
        Id of this member.
    signer, verifier
        Signature key, and those of the others.

    Raises
    ------
    RefusedError
        From every step, if an honest aggregator would not send this message.
    """

    def __init__(self, parameters: SessionParameters, client: str, signer: Signer, verifier: Verifier) -> None:
        if client not in parameters.members:
            raise RefusedError(f"{client} is not a member of this secure sum.")
        self._parameters = parameters
        self._row = parameters.members.index(client)
        self._signer, self._verifier = signer, verifier
        self._private = X25519PrivateKey.generate()
        self._secret_b, self._secret_e = random_secret(), random_secret()
        self._keys = np.frombuffer(
            self._private.public_key().public_bytes_raw() + commitment(self._secret_b) + commitment(self._secret_e),
            np.uint8,
        )
        self._transcript = b""
        self._shared: Bytes | None = None
        self._held: list[bytes] = []
        self._masked: MaskedVector | None = None
        self._proven: list[bool] = []
        self._confirmed = b""
        self._confirmations = np.zeros((parameters.degree, TAG_BYTES), np.uint8)

    def advertise(self) -> tuple[Bytes, Bytes]:
        """Return this member's keys, uint8 [64], and their signature, uint8 [s]."""
        signature = self._signer.sign(advertisement(self._parameters, self._row, self._keys))
        return self._keys, np.frombuffer(signature, np.uint8)

    def share(self, keys: Bytes, signatures: Bytes) -> Bytes:
        """Return the encrypted shares for each neighbour, uint8 [k, 96]; zeros for one whose keys cannot be verified.

        Parameters
        ----------
        keys
            Keys of all members, uint8 [n, 64]; zeros for those that have not advertised any.
        signatures
            Their signatures, uint8 [n, s], or those of this member's neighbours alone, [k, s].
        """
        p = self._parameters
        _check(keys, (len(p.members), KEY_BYTES))
        transcript = transcript_of(p, keys)
        if self._shared is not None:
            return self._again("roster", transcript == self._transcript, self._shared)
        present: Flags = np.any(keys, axis=1)
        if not np.array_equal(keys[self._row], self._keys):
            raise RefusedError("The roster of the secure sum does not have this client's own keys.")
        if present.sum() < p.minimum:
            raise RefusedError(f"The roster has {present.sum()} of {len(p.members)} members; {p.minimum} are required.")
        public = keys[present, :PUBLIC_BYTES].tobytes()
        if len({public[i : i + PUBLIC_BYTES] for i in range(0, len(public), PUBLIC_BYTES)}) < present.sum():
            raise RefusedError("Two members of the roster have the same key.")
        graph = Graph(transcript, present, p.degree)
        if graph.degree < p.threshold:
            raise RefusedError(f"{graph.degree} neighbours are left; the threshold is {p.threshold}.")
        if len(signatures) not in (p.degree, len(p.members)):
            raise RefusedError(f"{len(signatures)} signatures are not those of the members, or of the neighbours.")
        self._neighbours = graph.neighbours(self._row)
        own = signatures[: graph.degree] if len(signatures) == p.degree else signatures[self._neighbours]
        refusals = [self._refusal(v, keys[v], sig) for v, sig in zip(self._neighbours.tolist(), own, strict=True)]
        self._known = np.array([refusal is None for refusal in refusals])
        if self._known.sum() < p.threshold:
            raise RefusedError(
                f"{self._known.sum()} neighbours are known by their signatures; the threshold is {p.threshold}. "
                f"{next(refusal for refusal in refusals if refusal is not None)}"
            )
        self._present, self._transcript = present, transcript
        self._pairs = [
            agree(self._private, keys[v, :PUBLIC_BYTES].tobytes(), transcript, self._row, v)
            if received_key
            else stranger()
            for v, received_key in zip(self._neighbours.tolist(), self._known.tolist(), strict=True)
        ]
        shared = np.zeros((p.degree, SHARED_BYTES), np.uint8)
        shares_b = split(self._secret_b, p.threshold, graph.degree)
        shares_e = split(self._secret_e, p.threshold, graph.degree)
        pads = seed_pads(self._secret_e, transcript, graph.degree)
        contents = zip(self._pairs, self._known, shares_b, shares_e, pads, strict=True)
        for row, (pair, received_key, b, e, pad) in zip(shared, contents, strict=False):
            if received_key:  # a row of zeros means that nothing is shared with this neighbour
                row[:] = np.frombuffer(pair.encrypted(b + e) + xor(pair.seed, pad), np.uint8)
        self._shared = shared
        return shared

    def _refusal(self, v: int, keys: Bytes, signature: Bytes) -> str | None:
        """Return why the keys of row v cannot be verified; None if they are its own."""
        p = self._parameters
        try:
            self._verifier.verify(p.members[v], advertisement(p, v, keys), signature.tobytes())
        except RefusedError as error:
            return str(error)
        return None

    def mask(self, values: Integers, shares: Bytes, present: Flags) -> MaskedVector:
        """Return this member's vector under masks.

        Parameters
        ----------
        values
            uint32 or uint64, as the session's ``bits`` say, shape [d]. The masked vector replaces them: a copy would
            take as much memory again.
        shares
            Rows of the neighbours' answers to step 1 that are for this member, uint8 [k, 96].
        present
            Neighbours whose rows these are, bool [k].
        """
        p = self._parameters
        self._after(self._shared, "mask")
        _check(shares, (p.degree, SHARED_BYTES))
        _check(present, (p.degree,), np.bool_)
        _check(values, values.shape[:1], integer_type(p.bits))
        self._sent = present[: len(self._pairs)].copy()
        included = self._sent & self._known & shares[: len(self._pairs)].any(axis=1)
        held_shares = [
            pair.decrypted(row[:BOX_BYTES].tobytes()) if is_included else b""
            for (pair, row), is_included in zip(self._each(shares), included, strict=True)
        ]
        if sum(map(bool, held_shares)) < p.threshold:
            raise RefusedError(
                f"{sum(map(bool, held_shares))} neighbours have sent shares; the threshold is {p.threshold}."
            )
        masks = [(pair.seed, pair.sign) for pair, is_included in zip(self._pairs, included, strict=True) if is_included]
        add_masks(values, [*masks, (self_mask_seed(self._secret_b, self._transcript), +1)])
        receipts = np.zeros((p.degree, TAG_BYTES), np.uint8)
        for (pair, receipt), is_included in zip(self._each(receipts), included, strict=True):
            if is_included:
                receipt[:] = np.frombuffer(pair.receipt_to, np.uint8)
        if self._masked is not None:
            same = np.array_equal(values, self._masked.values) and held_shares == self._held
            return self._again("vector", same, self._masked)
        self._held = held_shares
        self._masked = MaskedVector(values, receipts)
        return self._masked

    def confirm(self, survivors: Flags, receipts: Bytes) -> Bytes:
        """Return this member's confirmation of the survivors for each neighbour, uint8 [k, 16].

        Parameters
        ----------
        survivors
            Members whose masked vectors are in the sum, bool [n].
        receipts
            Rows of the neighbours' answers to step 2 that are for this member, uint8 [k, 16].
        """
        p = self._parameters
        self._after(self._masked, "confirm")
        _check(survivors, (len(p.members),), np.bool_)
        _check(receipts, (p.degree, TAG_BYTES))
        alive = survivors[self._neighbours]
        if not survivors[self._row]:
            raise RefusedError("The survivors do not include this client, which has sent its vector.")
        if survivors.sum() < p.minimum:
            raise RefusedError(f"{survivors.sum()} of {len(p.members)} members survive; {p.minimum} are required.")
        if alive.sum() < p.threshold:
            raise RefusedError(f"{alive.sum()} neighbours survive; the threshold is {p.threshold}.")
        if (alive & ~self._sent).any() or (survivors & ~self._present).any():
            raise RefusedError("The survivors include a member that has not sent keys and shares.")
        digest = hashlib.sha256(self._transcript + survivors.tobytes()).digest()
        is_proven = [hmac.compare_digest(row.tobytes(), pair.receipt_from) for pair, row in self._each(receipts)]
        if self._confirmed:
            same = digest == self._confirmed and is_proven == self._proven
            return self._again("set of survivors", same, self._confirmations)
        self._confirmed, self._alive, self._proven = digest, alive, is_proven
        for pair, row in self._each(self._confirmations):
            row[:] = np.frombuffer(pair.confirmation(self._row, digest), np.uint8)
        return self._confirmations

    def unmask(self, confirmations: Bytes) -> Bytes:
        """Return one share of each neighbour, uint8 [k, 33]: of b if it survived, of e if it dropped out.

        Parameters
        ----------
        confirmations
            Rows of the neighbours' answers to step 3 that are for this member, uint8 [k, 16].
        """
        p = self._parameters
        self._after(self._confirmed or None, "unmask")
        _check(confirmations, (p.degree, TAG_BYTES))
        expected = (
            pair.confirmation(v, self._confirmed)
            for pair, v in zip(self._pairs, self._neighbours.tolist(), strict=True)
        )
        agreeing = [hmac.compare_digest(row.tobytes(), tag) for row, tag in zip(confirmations, expected, strict=False)]
        if sum(agreeing) < p.threshold:
            raise RefusedError(f"{sum(agreeing)} neighbours confirm the survivors; the threshold is {p.threshold}.")
        rows_revealed = np.zeros((p.degree, REVEALED_BYTES), np.uint8)
        for row, held_share, alive, is_proven in zip(
            rows_revealed, self._held, self._alive, self._proven, strict=False
        ):
            if held_share and alive and is_proven:
                row[:] = np.frombuffer(bytes([OF_SELF_MASK]) + held_share[:SHARE_BYTES], np.uint8)
            elif held_share and not alive:
                row[:] = np.frombuffer(bytes([OF_SEEDS]) + held_share[SHARE_BYTES:], np.uint8)
        return rows_revealed

    def _each(self, rows: Bytes) -> Iterator[tuple[PairSecrets, Bytes]]:
        """Return each neighbour's secrets and row; further rows are not used if members are missing."""
        return zip(self._pairs, rows, strict=False)

    def _again(self, question: str, same: bool, answer: _A) -> _A:
        """Return the earlier answer if the question is the same; raise RefusedError otherwise."""
        if not same:
            raise RefusedError(f"This client has already answered for another {question} of this secure sum.")
        return answer

    def _after(self, previous: object, step: str) -> None:
        if previous is None:
            raise RefusedError(f"Step {step!r} of the secure sum arrived before the step that it needs.")


class SecureSumAggregator:
    """Aggregator's state in one session: what has arrived, and the sum of masked vectors so far.

    Rows of members that have not answered are ignored.

    Parameters
    ----------
    parameters
        The session.
    size
        Length d of the vectors.

    Raises
    ------
    QuorumError
        From every step, if too few members are left. The session then fails, and nothing can be learned from it.
    """

    def __init__(self, parameters: SessionParameters, size: int) -> None:
        self._parameters = parameters
        self._total: Integers = np.zeros(size, integer_type(parameters.bits))
        self._survivors = np.zeros(len(parameters.members), np.bool_)

    def roster(self, keys: Bytes, present: Flags) -> Bytes:
        """Return the keys to send to all members, uint8 [n, 64], zeros for those that are absent (step 0).

        Keys that are not valid are left out, as if their members had not answered.
        """
        p = self._parameters
        valid = present & np.array([is_public_key(row[:PUBLIC_BYTES].tobytes()) for row in keys])
        _, first = np.unique(keys[:, :PUBLIC_BYTES], axis=0, return_index=True)
        valid &= np.isin(np.arange(len(keys)), first)  # a copy of another's key
        self._keys = np.where(valid[:, None], keys, 0).astype(np.uint8)
        self._enough(valid, "sent keys")
        self._transcript = transcript_of(p, self._keys)
        self._graph = Graph(self._transcript, valid, p.degree)
        if self._graph.degree < p.threshold:
            raise QuorumError(
                f"{valid.sum()} clients have sent keys for a secure sum, whose threshold is {p.threshold} neighbours."
            )
        self._rows = np.flatnonzero(valid)
        self._neighbours = np.array([self._graph.neighbours(row) for row in self._rows.tolist()])
        return self._keys

    def neighbours(self, row: int) -> NDArray[np.intp]:
        """Return the rows of a member's neighbours, to send it their signatures alone."""
        return self._graph.neighbours(row)

    def forward_shares(self, shared: Bytes, present: Flags) -> tuple[Bytes, Flags]:
        """Return the parts of step 1's answers for each member, uint8 [n, k, 96], and their presence, bool [n, k]."""
        self._sharers = present & self._keys.any(axis=1)
        self._enough(self._sharers, "sent shares")
        self._sealed = shared[:, : self._graph.degree, BOX_BYTES:].copy()
        flags = np.broadcast_to(self._sharers[:, None, None], (*shared.shape[:2], 1)).astype(np.uint8)
        return self._forward(shared, self._sharers), self._forward(flags, self._sharers)[..., 0] > 0

    def add(self, row: int, masked: MaskedVector) -> None:
        """Add a member's masked vector, once.

        Raise RefusedError if its form is wrong; the member then counts as dropped out.
        """
        p = self._parameters
        if not self._sharers[row] or self._survivors[row]:
            raise RefusedError(f"A masked vector of {p.members[row]} is not expected.")
        _check(masked.values, self._total.shape, self._total.dtype)
        _check(masked.receipts, (p.degree, TAG_BYTES))
        if not self._survivors.any():
            self._receipts = np.zeros((len(p.members), p.degree, TAG_BYTES), np.uint8)
        np.add(self._total, masked.values, out=self._total)
        self._receipts[row] = masked.receipts
        self._survivors[row] = True

    def survivors(self) -> tuple[Flags, Bytes]:
        """Return the members in the sum, bool [n], and the receipts for each member, uint8 [n, k, 16] (step 2)."""
        self._enough(self._survivors, "sent vectors")
        return self._survivors.copy(), self._forward(self._receipts, self._survivors)

    def forward_confirmations(self, confirmations: Bytes, present: Flags) -> Bytes:
        """Return the confirmations for each member, uint8 [n, k, 16] (step 3)."""
        return self._forward(confirmations, present & self._survivors)

    def sum(self, revealed: Bytes, present: Flags) -> Integers:
        """Return the sum of the survivors' vectors modulo 2^bits, shape [d].

        Wrong shares are corrected if there are enough correct ones. A member that has dropped out leaves masks only in
        the vectors of neighbours that could verify its keys, as their receipts show.

        Parameters
        ----------
        revealed
            Answers to step 4, uint8 [n, k, 33].
        present
            Members that have answered, bool [n].

        Raises
        ------
        QuorumError
            If the secret of a member cannot be recovered.
        """
        total: Integers = np.add(self._total, 0, out=large_array(self._total.size, self._total.dtype))
        add_masks(total, self._masks_left(self._forward(revealed, present & self._survivors)))
        return total

    def _masks_left(self, shares: Bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the seeds of the masks in the sum of the masked vectors, with the signs that remove them."""
        suspects = set[int]()
        for row, neighbours in zip(self._rows.tolist(), self._neighbours, strict=True):
            if self._survivors[row]:
                secret = self._recover(row, OF_SELF_MASK, shares[row], suspects)
                yield self_mask_seed(secret, self._transcript), -1
            elif self._sharers[row] and (masked := self._masked_with(neighbours)):
                secret = self._recover(row, OF_SEEDS, shares[row], suspects)
                pads = seed_pads(secret, self._transcript, self._graph.degree)
                for v, sealed, pad in zip(neighbours.tolist(), self._sealed[row], pads, strict=True):
                    if v in masked:
                        yield xor(sealed.tobytes(), pad), -1 if v < row else +1

    def _masked_with(self, neighbours: NDArray[np.intp]) -> set[int]:
        """Return the survivors among a member's neighbours whose vectors have a mask with it, as their receipts show.

        If v is number a in the list of u, u is number k - 1 - a in that of v (:class:`Graph`).
        """
        last = len(neighbours) - 1
        return {
            v for a, v in enumerate(neighbours.tolist()) if self._survivors[v] and self._receipts[v, last - a].any()
        }

    def _recover(self, row: int, kind: int, shares: Bytes, suspects: set[int]) -> bytes:
        """Return a secret of a member; add neighbours that have revealed wrong shares to the suspects, trusted last."""
        t, name = self._parameters.threshold, self._parameters.members[row]
        holders = self._graph.neighbours(row).tolist()
        shares_by_holder = {
            a + 1: share[1:].tobytes() for a, share in enumerate(shares[: len(holders)]) if share[0] == kind
        }
        committed = self._keys[row, PUBLIC_BYTES:][:TAG_BYTES] if kind == OF_SELF_MASK else self._keys[row, -TAG_BYTES:]
        if len(shares_by_holder) >= t:
            trusted = sorted(shares_by_holder, key=lambda x: holders[x - 1] in suspects)
            secret = combine({x: shares_by_holder[x] for x in trusted[:t]})
            if commitment(secret) == committed.tobytes():
                return secret
            corrected = correct(shares_by_holder, t)
            if corrected is not None and commitment(corrected[0]) == committed.tobytes():
                suspects.update(holders[x - 1] for x in corrected[1])
                return corrected[0]
        raise QuorumError(
            f"The secure sum cannot be unmasked: neighbours of {name} have revealed {len(shares_by_holder)} shares of "
            f"its secret; {t} correct ones are required."
        )

    def _forward(self, rows: Bytes, present: Flags) -> Bytes:
        """Return for each member what its neighbours have sent for it, [n, k, bytes]; zeros for absent senders."""
        degree = self._graph.degree
        forwarded = np.zeros((*rows.shape[:1], self._parameters.degree, *rows.shape[2:]), np.uint8)
        sent_rows = rows[self._neighbours, np.arange(degree)[::-1]]
        forwarded[self._rows, :degree] = np.where(present[self._neighbours][..., None], sent_rows, 0)
        return forwarded

    def _enough(self, is_left: Flags, step: str) -> None:
        p = self._parameters
        if is_left.sum() < p.minimum:
            raise QuorumError(
                f"{is_left.sum()} of {len(p.members)} clients have {step} for a secure sum; {p.minimum} are required.",
                found=int(is_left.sum()),
            )


def _check(array: NDArray[Any], shape: tuple[int, ...], dtype: Any = np.uint8) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise RefusedError(
            f"An array of a secure sum must be {np.dtype(dtype).name} {list(shape)} (got {array.dtype.name} "
            f"{list(array.shape)})."
        )
