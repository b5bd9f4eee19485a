"""What became of a connection, in words: gRPC's own account names subchannels, address families and frame types."""

from __future__ import annotations

import grpc

from fedloom.errors import argument
from fedloom.words import REASON_CHARACTERS, printable

NOBODY = "nothing listens there"
STRANGER = "what answers there is not a FedLoom aggregator"
BROKEN = "the connection broke"

COME_AGAIN = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS)
"""Statuses with which an aggregator that is there lets nobody in for now."""

OUR_OWN = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    *COME_AGAIN,
)
"""Statuses that the aggregator gives, with its reason."""

_HINTS = {
    grpc.StatusCode.UNIMPLEMENTED: "give the address of a `fedloom aggregator` of this version",
    grpc.StatusCode.UNAUTHENTICATED: (
        f"show a certificate or a token that it knows: {argument('tls_certificate')}, {argument('token_file')}"
    ),
    grpc.StatusCode.PERMISSION_DENIED: "its table of identities says who may do what (docs/security.md)",
}

REFUSALS = tuple(_HINTS)
"""Statuses after which coming again is of no use, but see :data:`FINAL`."""

FINAL = "fedloom-final"
"""Metadata of ``UNAUTHENTICATED`` where a token is revoked or has expired. Without it a credential is not known,
perhaps because the aggregator's files change after the peer's, or before."""

_SAID = (
    (("resol", "name not found", "address lookup", "not known"), "there is no such host"),
    (("refused",), NOBODY),
    (("http/2", "http1", "settings frame", "http status", "content-type", "handshake"), STRANGER),
    (("no route", "unreachable"), "the network does not reach it"),
    (("timed out", "timeout", "deadline", "fd shutdown", "keepalive", "ping"), "it does not answer"),
    (("reset", "closed", "goaway", "broken pipe", "shutting down", "cancelled"), BROKEN),
)
"""Parts of gRPC's account, and what they come to; the first that fits."""


def described(code: grpc.StatusCode, details: str | None) -> str:
    """Say in a few words why there is no connection, or why a stream ended.

    Parameters
    ----------
    code, details
        What gRPC says.
    """
    if code is grpc.StatusCode.OK:
        return "the stream ended"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return STRANGER
    words = printable(details or "", REASON_CHARACTERS)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return words
    if code in OUR_OWN:
        return f"the stream ended: {words}"
    said = (details or "").lower()
    for parts, words in _SAID:
        if any(part in said for part in parts):
            return words
    return f"{BROKEN} (gRPC status {code.name})"


def hint(code: grpc.StatusCode) -> str:
    """Say what helps after one of :data:`REFUSALS`."""
    return _HINTS[code]
