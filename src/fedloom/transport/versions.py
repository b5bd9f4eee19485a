"""Versions with which an aggregator and a worker of different releases work together (docs/wire.md, "Versions").

- Each side speaks the protocols from :data:`OLDEST` to :data:`PROTOCOL`: those of this release and of the one before.
  Hello names both, the aggregator chooses the newest in common, and Welcome names it.
- The method's version must be the run's, because results depend on it. The package's version is shown, and decides
  nothing.
- A worker that is newer than the aggregator waits until that is upgraded. One that is older can never work, and ends.
- Protocol 9 has no choice: its sides name one number, and require the package of their own release. A worker that is
  refused by such an aggregator introduces itself again as a worker of that release.

A new protocol raises :data:`PROTOCOL` and :data:`OLDEST` by one. Code that depends on it compares the protocol of the
stream: ``link.protocol >= 10``.

A hostile aggregator, or whoever can change bytes of a stream without TLS, may choose an old protocol, or refuse the
newest. That may cost speed, and must never cost safety: a protocol's number decides only how bytes travel. Nothing that
a member checks, signs, masks or agrees to depends on it. If a protocol is found to be unsafe, raise :data:`OLDEST`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fedloom
from fedloom.core.words import REASON_CHARACTERS, printable
from fedloom.transport.frames import Refusal, WireError
from fedloom.transport.wire import federation_pb2 as wire

PROTOCOL = 10
"""Newest protocol that this release speaks."""

OLDEST = 9
"""Oldest protocol that this release speaks."""

_VERSION_CHARACTERS = 80


@dataclass(frozen=True)
class Protocols:
    """Protocols that a side speaks, and the release that it belongs to."""

    newest: int
    oldest: int
    package: str = fedloom.__version__

    def choose(self, other: Protocols) -> int | None:
        """Return the newest protocol that both sides speak; None if there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


SPOKEN = Protocols(PROTOCOL, OLDEST)
"""Protocols of this release."""

FIXED = Protocols(9, 9, "0.1.0")
"""Protocol without negotiation, and the only release that speaks it alone."""


def package_for(protocol: int) -> str:
    """Return the package's version to name where this protocol is used: protocol 9 requires that of its own release."""
    return FIXED.package if protocol == FIXED.newest else fedloom.__version__


class NotAdmitted(Exception):
    """Refusal of a worker. ``too_new`` is True if the worker can join once this aggregator has been upgraded."""

    def __init__(
        self, reason: str, code: wire.RefusalCode = wire.REFUSAL_CODE_HELLO, *, too_new: bool = False, **needed: Any
    ) -> None:
        super().__init__(reason)
        self.too_new = too_new
        self.part = wire.Refused(code=code, reason=reason, **needed)


class PredecessorError(ConnectionError):
    """The aggregator speaks only :data:`FIXED`: the worker must introduce itself so."""


class UpgradeAwaitedError(ConnectionError):
    """The aggregator must be upgraded before this worker can join."""


def negotiate(hello: wire.Hello, algorithm: str, version: int) -> int:
    """Return the protocol for a worker's stream.

    Raise NotAdmitted if there is none in common, or the worker has another version of the run's algorithm.
    """
    package = f"the worker has fedloom {printable(hello.package, _VERSION_CHARACTERS)}"
    theirs = Protocols(hello.protocol, hello.oldest_protocol or hello.protocol)
    if not 0 < theirs.oldest <= theirs.newest:
        raise NotAdmitted(f"{package}, and names the protocols {theirs.oldest} to {theirs.newest}: they are no range")
    too_new = theirs.oldest > PROTOCOL
    if (protocol := SPOKEN.choose(theirs)) is None:
        limits = f"needs protocol {theirs.oldest} or newer" if too_new else f"speaks protocol {theirs.newest} at most"
        reason = f"{package}, which {limits}, and this aggregator speaks {OLDEST} to {PROTOCOL}"
        reason, code = f"{reason}: {_remedy(too_new)}", wire.REFUSAL_CODE_PROTOCOL
        raise NotAdmitted(reason, code, too_new=too_new, protocol=PROTOCOL, oldest_protocol=OLDEST)
    installed = hello.algorithms.get(algorithm)
    if installed != version:
        too_new = installed is not None and installed > version
        state = "not installed" if installed is None else f"version {installed}"
        reason = f"{package}, where algorithm {algorithm} is {state}, and the run needs version {version}"
        reason, code = f"{reason}: {_remedy(too_new)}, or the algorithm's package", wire.REFUSAL_CODE_ALGORITHM
        raise NotAdmitted(reason, code, too_new=too_new, algorithm=algorithm, algorithm_version=version)
    return protocol


def _remedy(too_new: bool) -> str:
    """Return what to do about a worker that is too new or too old."""
    return "upgrade the aggregator" if too_new else f"install fedloom {fedloom.__version__} on the worker"


def remedy(refused: wire.Refused, spoken: Protocols, algorithms: Mapping[str, int]) -> ConnectionError | None:
    """Return how a worker continues after a refusal of its Hello, which named these; None if it can never work."""
    reason = printable(refused.reason, REASON_CHARACTERS)
    if refused.code == wire.REFUSAL_CODE_PROTOCOL:
        if not refused.protocol and spoken.newest > FIXED.newest >= spoken.oldest:
            return PredecessorError(reason)
        if refused.protocol < spoken.oldest:
            return UpgradeAwaitedError(reason)
    newer = 0 < refused.algorithm_version < algorithms.get(refused.algorithm, 0)
    return UpgradeAwaitedError(reason) if newer and refused.code == wire.REFUSAL_CODE_ALGORITHM else None


def chosen(welcome: wire.Welcome, spoken: Protocols) -> int:
    """Return the protocol that an aggregator has chosen; raise WireError if the worker's Hello did not offer it."""
    protocol: int = welcome.protocol or FIXED.newest
    if not spoken.oldest <= protocol <= spoken.newest:
        raise WireError(Refusal.GARBAGE, f"a Welcome with protocol {protocol}, which our Hello did not offer")
    return protocol
