"""Sessions of secure sums for tests: all members and the aggregator in one process, with dropouts at every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import QuorumError
from fedloom.security.signing import NoSigner, NoVerifier
from fedloom.sums.masks import Integers, integer_type
from fedloom.sums.secure_sum import Bytes, Flags, SecureSumAggregator, SecureSumMember
from fedloom.sums.session import SESSION_BYTES, SessionParameters

STEPS = ("advertise", "share", "mask", "confirm", "unmask")


def parameters(n: int, degree: int | None = None, threshold: int | None = None, bits: int = 32) -> SessionParameters:
    """Return parameters of a session of members m0, m1, ..., with a separate name for its shape."""
    k = n - 1 if degree is None else degree
    t = 2 * k // 3 + 1 if threshold is None else threshold
    names = tuple(f"m{i}" for i in range(n))
    return SessionParameters(bytes(range(SESSION_BYTES)), names, k, t, bits)  # type: ignore[arg-type]


def vectors(n: int, d: int = 5, bits: int = 32, seed: int = 0) -> Integers:
    """Return random vectors of n members, modulo 2^bits."""
    return np.random.default_rng(seed).integers(0, 2**bits, (n, d), dtype=integer_type(bits))


@dataclass
class Session:
    """One session; ``last`` maps a member to the last step that it answers (default: all), -1 for none."""

    parameters: SessionParameters
    values: Integers
    last: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.parameters.members
        self.members = [SecureSumMember(self.parameters, name, NoSigner(), NoVerifier()) for name in names]
        self.aggregator = SecureSumAggregator(self.parameters, self.values.shape[1])

    def answering(self, step: int) -> Flags:
        """Return the members that answer a step."""
        return np.array([self.last.get(i, len(STEPS)) >= step for i in range(len(self.members))])

    def rows(self, step: int) -> list[int]:
        """Return the rows of the members that answer a step."""
        return [int(i) for i in np.flatnonzero(self.answering(step))]

    def gather(self, step: int, answers: dict[int, Bytes]) -> Bytes:
        """Return answers as rows, zeros for those that are absent."""
        if not answers:
            raise QuorumError("Nobody answers.")
        width = next(iter(answers.values())).shape
        rows = np.zeros((len(self.members), *width), np.uint8)
        for i, answer in answers.items():
            rows[i] = answer
        return rows

    def advertise(self) -> tuple[Bytes, Bytes]:
        """Run step 0; return keys and signatures as all members see them."""
        output = {i: self.members[i].advertise() for i in self.rows(0)}
        signatures = self.gather(0, {i: signature for i, (_, signature) in output.items()})
        keys = self.aggregator.roster(self.gather(0, {i: key for i, (key, _) in output.items()}), self.answering(0))
        return keys, signatures

    def share(self, keys: Bytes, signatures: Bytes) -> tuple[Bytes, Flags]:
        """Run step 1; return the shares for each member."""
        shared = {i: self.members[i].share(keys, signatures) for i in self.rows(1)}
        return self.aggregator.forward_shares(self.gather(1, shared), self.answering(1))

    def mask(self, shares: Bytes, present: Flags) -> tuple[Flags, Bytes]:
        """Run step 2; return survivors and receipts."""
        for i in self.rows(2):
            self.aggregator.add(i, self.members[i].mask(self.values[i].copy(), shares[i], present[i]))
        return self.aggregator.survivors()

    def confirm(self, survivors: Flags, receipts: Bytes) -> Bytes:
        """Run step 3; return the confirmations for each member."""
        confirmed = {i: self.members[i].confirm(survivors, receipts[i]) for i in self.rows(3)}
        return self.aggregator.forward_confirmations(self.gather(3, confirmed), self.answering(3))

    def unmask(self, confirmations: Bytes) -> Integers:
        """Run step 4; return the sum."""
        revealed = {i: self.members[i].unmask(confirmations[i]) for i in self.rows(4)}
        return self.aggregator.sum(self.gather(4, revealed), self.answering(4))

    def hold(self) -> Integers:
        """Run all steps; return the sum."""
        shares, present = self.share(*self.advertise())
        return self.unmask(self.confirm(*self.mask(shares, present)))

    def expected(self) -> Integers:
        """Return the sum of the values of all members that answered step 2, modulo 2^bits."""
        return self.values[self.rows(2)].sum(axis=0, dtype=self.values.dtype)


def total(values: Integers, rows: Collection[int] | Sequence[int]) -> NDArray[np.unsignedinteger]:
    """Return the sum of rows, modulo 2^bits."""
    return values[list(rows)].sum(axis=0, dtype=values.dtype)
