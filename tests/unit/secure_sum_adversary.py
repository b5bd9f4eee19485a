"""Adversary of a secure sum: an aggregator that records everything, with members that share all their secrets with it.

Each masked vector is a client's vector plus masks. The adversary removes every mask whose seed it has or can recover
from shares. Each remaining mask belongs to two honest members, with opposite signs; so linear algebra can only
reveal the sum of each set of members that such masks connect, if no other masks remain in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from secure_sums import Session

from fedloom.errors import RefusedError
from fedloom.sums.masks import Integers, add_masks
from fedloom.sums.secure_sum import BOX_BYTES, OF_SEEDS, OF_SELF_MASK, Bytes, MaskedVector, SecureSumMember
from fedloom.sums.session import seed_pads, self_mask_seed, xor
from fedloom.sums.shamir import SHARE_BYTES, combine

Learned = list[tuple[frozenset[int], Integers]]


@dataclass
class Adversary:
    """View of the aggregator and of colluding members; rows are filled in as members answer."""

    session: Session
    colluders: frozenset[int]
    shared: dict[int, Bytes] = field(default_factory=dict)
    masked: dict[int, MaskedVector] = field(default_factory=dict)
    revealed: dict[int, Bytes] = field(default_factory=dict)

    @property
    def threshold(self) -> int:
        """Return the number of shares that reconstruct a secret."""
        return self.session.parameters.threshold

    def neighbours(self, row: int) -> list[int]:
        """Return a member's neighbours."""
        return self.session.aggregator.neighbours(row).tolist()

    def honest(self) -> list[int]:
        """Return the members with a masked vector that do not collude."""
        return sorted(set(self.masked) - self.colluders)

    def secret(self, owner: int, kind: int) -> bytes | None:
        """Return a secret if there are enough shares of it, revealed or known to colluding members."""
        found: dict[int, bytes] = {}
        neighbours = self.neighbours(owner)
        for a, holder in enumerate(neighbours):
            back = len(neighbours) - 1 - a
            if holder in self.revealed and self.revealed[holder][back, 0] == kind:
                found[a + 1] = self.revealed[holder][back, 1:].tobytes()
            elif holder in self.colluders and owner in self.shared:
                pair = self.session.members[holder]._pairs[back]
                opened = pair.decrypted(self.shared[owner][a, :BOX_BYTES].tobytes())
                found[a + 1] = opened[:SHARE_BYTES] if kind == OF_SELF_MASK else opened[SHARE_BYTES:]
        if len(found) < self.threshold:
            return None
        return combine(dict(list(found.items())[: self.threshold]))

    def seed(self, u: int, v: int) -> bytes | None:
        """Return the seed of two members if one of them colludes, or its sealed copy can be opened."""
        transcript = self.session.members[u]._transcript
        for one, other in ((u, v), (v, u)):
            at = self.neighbours(one).index(other)
            if one in self.colluders:
                return self.session.members[one]._pairs[at].seed
            e = self.secret(one, OF_SEEDS)
            if e is not None and one in self.shared:
                pads = seed_pads(e, transcript, len(self.neighbours(one)))
                return xor(self.shared[one][at, BOX_BYTES:].tobytes(), pads[at])
        return None

    def residual(self, row: int) -> tuple[Integers, set[int], bool]:
        """Return an honest member's vector without the known masks.

        Also return the neighbours with which it has unknown masks, and whether its self mask is known.
        """
        vector, others, known = self.masked[row].values.copy(), set(), []
        for a, v in enumerate(self.neighbours(row)):
            if not self.masked[row].receipts[a].any():
                continue
            seed = self.seed(row, v)
            if seed is None:
                others.add(v)
            else:
                known.append((seed, -1 if row < v else +1))
        b = self.secret(row, OF_SELF_MASK)
        if b is not None:
            known.append((self_mask_seed(b, self.session.members[row]._transcript), -1))
        add_masks(vector, known)
        return vector, others, b is not None

    @staticmethod
    def _cancel(row: int, found: Mapping[int, tuple[Integers, set[int], bool]], usable: set[int]) -> bool:
        """Return whether each unknown mask of a vector is in another that is usable."""
        return all(other in usable and row in found[other][1] for other in found[row][1])

    def learns(self) -> Learned:
        """Return the smallest sets of honest members whose sums the adversary learns, and the sums."""
        found = {row: self.residual(row) for row in self.honest()}
        usable = {row for row, (_, _, known) in found.items() if known}
        while useless := {row for row in usable if not self._cancel(row, found, usable)}:
            usable -= useless
        learned: Learned = []
        while usable:
            component, open_ = set(), {min(usable)}
            while open_:
                row = open_.pop()
                component.add(row)
                open_ |= found[row][1] - component
            usable -= component
            total = np.sum([found[row][0] for row in component], axis=0, dtype=self.session.values.dtype)
            learned.append((frozenset(component), total))
        return learned


@dataclass(frozen=True)
class Lies:
    """False claims of an aggregator, by the member that receives them; everything else is true.

    Attributes
    ----------
    absent
        Neighbours reported not to have sent shares.
    dropped
        Members reported to have dropped out.
    alive
        Members reported to survive.
    without_confirmations
        Leave out this part of the protocol: members get confirmations as if all their neighbours agreed with them.
    """

    absent: Mapping[int, Collection[int]] = field(default_factory=dict)
    dropped: Mapping[int, Collection[int]] = field(default_factory=dict)
    alive: Mapping[int, Collection[int]] = field(default_factory=dict)
    without_confirmations: bool = False


def attack(
    session: Session, colluders: Collection[int], lies: Lies | Callable[[list[int]], Lies] = Lies()
) -> Adversary:
    """Run a session with a lying aggregator, and return the adversary's view.

    Members that refuse an answer drop out. ``lies`` may depend on the members in the order of the graph's ring.
    """
    adversary = Adversary(session, frozenset(colluders))
    members, aggregator = session.members, session.aggregator
    keys, signatures = session.advertise()
    reported = lies if isinstance(lies, Lies) else lies(aggregator._graph._ring.tolist())
    for i in session.rows(1):
        adversary.shared[i] = members[i].share(keys, signatures)
    shares, present = aggregator.forward_shares(session.gather(1, adversary.shared), session.answering(1))
    for i in session.rows(2):
        hidden = np.isin(aggregator.neighbours(i), list(reported.absent.get(i, ())))
        with suppress(RefusedError):
            adversary.masked[i] = members[i].mask(session.values[i].copy(), shares[i], present[i] & ~hidden)
            aggregator.add(i, adversary.masked[i])
    survivors, receipts = np.isin(np.arange(len(members)), list(adversary.masked)), np.zeros((0,), np.uint8)
    if adversary.masked:
        receipts = aggregator._forward(aggregator._receipts, survivors)
    views = {i: survivors.copy() for i in adversary.masked}
    for i, view in views.items():
        view[list(reported.alive.get(i, ()))] = True
        view[list(reported.dropped.get(i, ()))] = False
    answers = {}
    for i in sorted(set(views) & set(session.rows(3))):
        with suppress(RefusedError):
            answers[i] = members[i].confirm(views[i], receipts[i])
    if not answers:
        return adversary
    confirmations = aggregator.forward_confirmations(session.gather(3, answers), survivors)
    for i in sorted(set(answers) & set(session.rows(4))):
        if reported.without_confirmations:
            confirmations[i] = _confirmations(members[i])
        with suppress(RefusedError):
            adversary.revealed[i] = members[i].unmask(confirmations[i])
    return adversary


def _confirmations(member: SecureSumMember) -> Bytes:
    pairs = zip(member._pairs, member._neighbours.tolist(), strict=True)
    return np.array([list(pair.confirmation(v, member._confirmed)) for pair, v in pairs], np.uint8)
