"""Secure sums: CPU time of a member and of the aggregator, and bytes, beside plain float32.

    .venv/bin/python research/benchmarks/secure_sum.py [--parameters D] [--json FILE]

All members of a session run in this process, without a network. Times are CPU time. A member's are those of
its five steps with 20 neighbours in a cohort of 100 (the median member of the fastest of several sessions), its
signatures apart. The aggregator's are those of all its calls for a cohort of 1,000 with the default number of
neighbours, where 5 % of the members drop out once they have sent their shares, and of the same without dropouts.
Bytes are those of the arrays that a member sends and receives, where the bytes of a plain round are two float32
vectors: the model, and the update.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import describe, machine, table, write_json
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.security.signing import KeySigner, KeyVerifier, NoSigner, NoVerifier, RegisteredKey
from fedloom.sums.masks import from_integers, to_integers
from fedloom.sums.secure_sum import REVEALED_BYTES, SecureSumAggregator, SecureSumMember
from fedloom.sums.session import TAG_BYTES, SessionParameters, agree, default_degree, default_threshold

BOUND = 1.0
STEPS = ("advertise", "share", "mask", "confirm", "unmask")

_T = TypeVar("_T")


@dataclass
class Clock:
    """CPU seconds by name: a list of calls each."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, name: str, call: Callable[..., _T], *arguments: Any) -> _T:
        """Call, record the duration, and return the result."""
        started = time.process_time()
        answer = call(*arguments)
        self.seconds.setdefault(name, []).append(time.process_time() - started)
        return answer

    def total(self) -> float:
        """Return the seconds of all calls."""
        return sum(map(sum, self.seconds.values()))


@dataclass
class Outcome:
    """Figures of one session."""

    members: Clock
    aggregator: Clock
    error: float
    sent: int
    received: int


def hold(n: int, degree: int, d: int, dropped: int, *, signed: bool = False) -> Outcome:
    """Hold a session in which some members drop out before they send their vectors."""
    names = tuple(f"client-{i}" for i in range(n))
    parameters = SessionParameters(os.urandom(16), names, degree, default_threshold(degree))
    keys = [Ed25519PrivateKey.generate() for _ in names] if signed else []
    verifier = KeyVerifier(RegisteredKey(name, key.public_key()) for name, key in zip(names, keys, strict=False))
    signers = [KeySigner(key) for key in keys] if signed else [NoSigner()] * n
    rng = np.random.default_rng(1)
    out = {int(i) for i in rng.permutation(n)[:dropped]}
    alive = np.array([i not in out for i in range(n)])
    everybody = np.ones(n, np.bool_)
    members, aggregator = Clock(), Clock()

    def new(i: int) -> SecureSumMember:
        return SecureSumMember(parameters, names[i], signers[i], verifier if signed else NoVerifier())

    clients = [members("advertise", new, i) for i in range(n)]
    said = [members("advertise", client.advertise) for client in clients]
    server = SecureSumAggregator(parameters, d)
    roster = aggregator("roster", server.roster, np.stack([key for key, _ in said]), everybody)
    signatures = np.stack([signature for _, signature in said])
    near = [signatures[server.neighbours(i)] for i in range(n)]
    shared = np.stack(
        [members("share", client.share, roster, rows) for client, rows in zip(clients, near, strict=True)]
    )
    shares, present = aggregator("shares", server.forward_shares, shared, everybody)
    exact = np.zeros(d)
    for i in np.flatnonzero(alive).tolist():
        values = rng.uniform(-BOUND, BOUND, d).astype(np.float32)
        exact += values
        integers = members("encode", to_integers, values, BOUND, n, 32)
        masked = members("mask", clients[i].mask, integers, shares[i], present[i])
        aggregator("add", server.add, i, masked)
    survivors, receipts = aggregator("survivors", server.survivors)
    confirmed, revealed = (np.zeros((n, degree, size), np.uint8) for size in (TAG_BYTES, REVEALED_BYTES))
    for i in np.flatnonzero(alive).tolist():
        confirmed[i] = members("confirm", clients[i].confirm, survivors, receipts[i])
    confirmations = aggregator("confirmations", server.forward_confirmations, confirmed, alive)
    for i in np.flatnonzero(alive).tolist():
        revealed[i] = members("unmask", clients[i].unmask, confirmations[i])
    total = aggregator("sum", server.sum, revealed, alive)
    error = float(np.abs(from_integers(total, BOUND, n, 32) - exact).max())
    sent = sum(a.nbytes for a in (*said[0], shared[0], masked.values, masked.receipts, confirmed[0], revealed[0]))
    received = sum(a.nbytes for a in (roster, near[0], shares[0], present[0], survivors, receipts[0], confirmations[0]))
    return Outcome(members, aggregator, error, sent, received)


def member_ms(outcome: Outcome) -> dict[str, float]:
    """Return the CPU milliseconds of the median member by step."""
    found = {name: 1e3 * statistics.median(seconds) for name, seconds in outcome.members.seconds.items()}
    return found | {"advertise": 2 * found["advertise"]}  # making the keys, and signing them


def agreement_ms(neighbours: int) -> float:
    """Return the CPU milliseconds of agreeing on keys with this many neighbours, a part of ``share``."""
    private = X25519PrivateKey.generate()
    public = [X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(neighbours)]
    clock = Clock()
    for _ in range(50):
        clock("agree", lambda: [agree(private, key, bytes(32), 0, v) for v, key in enumerate(public, start=1)])
    return 1e3 * statistics.median(clock.seconds["agree"])


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000, help="length of the vector")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about, d = machine(), options.parameters
    print(describe(about))
    best = min((hold(100, 20, d, 5) for _ in range(10)), key=lambda outcome: sum(member_ms(outcome).values()))
    signed = min((hold(100, 20, 1000, 5, signed=True) for _ in range(5)), key=lambda o: member_ms(o)["share"])
    unsigned = min((hold(100, 20, 1000, 5) for _ in range(5)), key=lambda o: member_ms(o)["share"])
    ms, agreement = member_ms(best), min(agreement_ms(20) for _ in range(5))
    protocol = sum(ms[step] for step in STEPS)
    ed25519 = sum(member_ms(signed)[step] - member_ms(unsigned)[step] for step in ("advertise", "share"))
    print(f"\nA member, {d:,} parameters, 20 neighbours, cohort of 100: CPU ms")
    rows = [(step, f"{ms[step]:.2f}") for step in STEPS] + [("together", f"{protocol:.2f}")]
    rows += [("of which key agreement", f"{agreement:.2f}"), ("rounding to integers", f"{ms['encode']:.2f}")]
    print(table(("step", "ms"), [*rows, ("Ed25519: one signature, 20 checks", f"{ed25519:.2f}")]))
    model, plain = 4 * d, 8 * d
    more = (best.sent + best.received + model) / plain
    print(f"\nBytes: {best.sent:,} sent, {best.received:,} received beside the model; {more:.3f} times a plain round's")
    figures: dict[str, Any] = {"member_ms": ms, "agreement_ms": agreement, "ed25519_ms": ed25519, "bytes": more}
    degree = default_degree(1000)
    print(f"\nThe aggregator, {d:,} parameters, cohort of 1,000, {degree} neighbours: CPU s")
    held = []
    for dropped in (0, 50):
        outcome = hold(1000, degree, d, dropped)
        steps = {name: sum(seconds) for name, seconds in outcome.aggregator.seconds.items()}
        member = sum(member_ms(outcome)[step] for step in STEPS)
        sizes = (outcome.sent + outcome.received + model) / plain
        seconds = [f"{s:.2f}" for s in (outcome.aggregator.total(), steps["add"], steps["sum"])]
        held.append((str(dropped), *seconds, f"{member:.2f}", f"{sizes:.3f}", f"{outcome.error:.2g}"))
        figures[f"aggregator_s_{dropped}"] = steps
    print(table(("dropouts", "together", "adding", "unmasking", "a member, ms", "bytes", "largest error"), held))
    cohorts = (10, 30, 100, 300, 1000, 2001, 10_000)
    print("\nNeighbours by default:", ", ".join(f"{default_degree(n)} of {n:,}" for n in cohorts))
    write_json(options.json, about, figures)


if __name__ == "__main__":
    main()
