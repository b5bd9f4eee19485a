"""What became of a connection, in words: gRPC's own account names subchannels, address families and frame types."""

from __future__ import annotations

import grpc

NOBODY = "nothing listens there"
STRANGER = "what answers there is not a FedLoom aggregator"
BROKEN = "the connection broke"

OUR_OWN = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DATA_LOSS)
"""Statuses that the aggregator gives, with its reason."""

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
    if code in OUR_OWN:
        return f"the stream ended: {details}"  # the aggregator's own words
    said = (details or "").lower()
    for parts, words in _SAID:
        if any(part in said for part in parts):
            return words
    return f"{BROKEN} (gRPC status {code.name})"
