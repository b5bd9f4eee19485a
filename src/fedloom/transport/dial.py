"""Connections to an aggregator with our credentials, and readable reasons for their failures.

They are over TLS or in plaintext. gRPC's own messages mention subchannels, address families and frame types.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import grpc

from fedloom.core.address import split_address
from fedloom.core.words import REASON_CHARACTERS, printable
from fedloom.security.options import Credentials

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


# Detects within time + timeout that the other side has disappeared without closing its connection.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (
    *KEEPALIVE,
    ("grpc.use_local_subchannel_pool", 1),  # a new connection for each attempt: our backoff applies
    ("grpc.enable_http_proxy", 0),
)
LIMITED = (
    ("grpc.http2.bdp_probe", 0),  # would enlarge the flow-control window on a slow line
    ("grpc.http2.lookahead_bytes", 1 << 16),
)
"""Options of a bandwidth-limited channel: unread data stay with the sender."""


class ServerConnection:
    """Channel to a server with our credentials, of ``grpc.aio`` or synchronous, and readable reasons for its failures.

    Parameters
    ----------
    address
        ``host:port`` of the server.
    credentials
        Credentials to connect with; without them, the connection is plaintext and anonymous.
    service
        Name of the server in errors.

    Raises
    ------
    ExperimentError
        If the address is invalid, or a token would be sent in plaintext to another machine.
    RefusedError
        If our certificate is not valid now.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None,
        options: Any = CHANNEL_OPTIONS,
        *,
        service: str = "the aggregator",
        sync: bool = False,
    ) -> None:
        self.address = address
        self._host, _ = split_address(address, what=service, lowest=1)
        self.shown = shown = (credentials or Credentials()).show(self._host)
        self.metadata = () if shown.token is None else (("authorization", f"Bearer {shown.token.get_secret_value()}"),)
        """Metadata of each call: the token, if we have one."""
        kind: Any = grpc if sync else grpc.aio
        if shown.ca is None:
            self.channel = kind.insecure_channel(address, options=options)
        else:
            own = (None, None) if shown.pair is None else (shown.pair.key, shown.pair.chain)
            ssl = grpc.ssl_channel_credentials(shown.ca, *own)
            self.channel = kind.secure_channel(address, ssl, options=options)

    def distrust(self, code: grpc.StatusCode, details: str | None) -> str | None:
        """Return why one side rejected the other in the TLS handshake, given a call's status; None if it did not."""
        if self.shown.ca is None or code is not grpc.StatusCode.UNAVAILABLE:
            return None
        text = (details or "").lower()
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        reasons = (
            ("has expired", f"its certificate has expired, by this machine's clock: {now}"),
            ("not yet valid", f"its certificate is not valid yet, by this machine's clock: {now}"),
            ("hostname verification", f"its certificate is not for {self._host}: connect to a name in the certificate"),
            ("certificate_verify_failed", "its certificate is not signed by an authority in ca.crt"),
            ("wrong_version_number", "it does not use TLS: connect without ca.crt"),
        )
        return next((reason for part, reason in reasons if part in text), None)

    def perhaps_tls(self, code: grpc.StatusCode, details: str | None) -> str | None:
        """Return the likely reason why a plaintext connection closed before any data; None for other failures."""
        text = (details or "").lower()
        closed = ("socket closed" in text or "connection reset" in text) and "failed to connect" in text
        if self.shown.ca is not None or code is not grpc.StatusCode.UNAVAILABLE or not closed:
            return None
        return f"{BROKEN} before any data arrived: the server may use TLS, which needs ca.crt in the credentials"

    def closed_after_handshake(self, code: grpc.StatusCode, details: str | None) -> str | None:
        """Return the likely reason why the server closed a TLS connection without an error; None for other failures."""
        shown, closed = self.shown, "socket closed" in (details or "").lower()
        if shown.ca is None or code is not grpc.StatusCode.UNAVAILABLE or not closed:
            return None
        if shown.pair is None:
            return "it closed the connection: it may require a certificate (tls.crt in the credentials)"
        own = shown.pair.certificate
        ends = f"{own.ends:%Y-%m-%d %H:%M:%S} UTC"
        return f"it closed the connection: it may reject {own}, valid until {ends}; check its CA and its clock"
