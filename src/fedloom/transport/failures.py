"""Readable descriptions of connection failures; gRPC's own mention subchannels, address families and frame types."""

from __future__ import annotations

import grpc

from fedloom.core.words import REASON_CHARACTERS, printable

NOBODY = "nothing listens at this address"
STRANGER = "the server at this address is not a FedLoom aggregator"
BROKEN = "the connection broke"

RETRYABLE = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS)
"""Statuses with which a running aggregator refuses everyone temporarily."""

OUR_OWN = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    *RETRYABLE,
)
"""Statuses that the aggregator sends, with its reason."""

_HINTS = {
    grpc.StatusCode.UNIMPLEMENTED: "give the address of a `fedloom aggregator` of this version",
    grpc.StatusCode.UNAUTHENTICATED: "give a certificate or token that it accepts: tls.crt or token in the credentials",
    grpc.StatusCode.PERMISSION_DENIED: "permissions are set in its identity file (docs/security.md)",
}

REFUSALS = tuple(_HINTS)
"""Statuses after which reconnecting does not help; see :data:`FINAL` for the exception."""

FINAL = "fedloom-final"
"""Metadata key of ``UNAUTHENTICATED`` if a token is revoked or has expired.

Without this key, the credential is unknown to the aggregator, perhaps because only one side has new files yet.
"""

_DESCRIPTIONS = (
    (("resol", "name not found", "address lookup", "not known"), "the host does not exist"),
    (("refused",), NOBODY),
    (("http/2", "http1", "settings frame", "http status", "content-type", "handshake"), STRANGER),
    (("no route", "unreachable"), "the network is unreachable"),
    (("timed out", "timeout", "deadline", "fd shutdown", "keepalive", "ping"), "it does not answer"),
    (("reset", "closed", "goaway", "broken pipe", "shutting down", "cancelled"), BROKEN),
)
"""Parts of gRPC's messages and their descriptions; the first match applies."""


def connection_failure(code: grpc.StatusCode, details: str | None) -> str:
    """Return a short description of why there is no connection, or why a stream ended, given gRPC's status."""
    if code is grpc.StatusCode.OK:
        return "the stream ended"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return STRANGER
    words = printable(details or "", REASON_CHARACTERS)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return words
    if code in OUR_OWN:
        return f"the stream ended: {words}"
    text = (details or "").lower()
    for parts, words in _DESCRIPTIONS:
        if any(part in text for part in parts):
            return words
    return f"{BROKEN} (gRPC status {code.name})"


def hint(code: grpc.StatusCode) -> str:
    """Return the hint for one of :data:`REFUSALS`."""
    return _HINTS[code]
