"""Admission of calls to an aggregator: every call is authorized here before any of its content is read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ParamSpec
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health
from pydantic import SecretStr

from fedloom.errors import FedloomError
from fedloom.security.access import SHARED, Access, Action, Admitted, Denied, Identity, PeerCredentials
from fedloom.security.audit import Audit, Value
from fedloom.security.certificates import parse_certificate
from fedloom.security.files import ReloadingFile
from fedloom.security.options import ServerFiles
from fedloom.transport.control import CLIENTS, CONTROL, PAUSE, RESUME, STATUS, STOP, WATCH
from fedloom.transport.dial import FINAL
from fedloom.transport.limits import TokenBucket
from fedloom.transport.stream import DESCRIBE, METHOD, MODELS, PERSONALIZE, SERVICE

log = logging.getLogger("fedloom.transport.aggregator")

CHECK_S = 1.0
"""Interval for checking files and for ending streams that have expired or whose identity is revoked."""

CERT_EXPIRY_WARNING = timedelta(days=3)
"""Time before expiry at which to warn about a server's certificate; shorter for short-lived certificates."""

CERTIFICATE_S = 60.0
"""Interval between checks of the server's certificate."""

LONGEST_S = 86_400.0
"""Maximum lifetime of a stream, reduced by up to a tenth so that streams do not all reconnect at the same time."""

GRACE_S = 600.0
"""Time that streams may continue once their connection has reached its maximum age; their own lifetime ends by then."""

TOKEN = "authorization"
"""Metadata key of a call's token, as ``Bearer TOKEN``."""

ACTIONS: Mapping[str, Action] = {
    f"/{SERVICE}/{METHOD}": Action.MEASURE,  # its Hello and its roles decide what a worker's clients may do
    f"/{CONTROL}/{WATCH}": Action.WATCH,
    f"/{CONTROL}/{STATUS}": Action.WATCH,
    f"/{CONTROL}/{CLIENTS}": Action.WATCH,
    f"/{CONTROL}/{PAUSE}": Action.CONTROL,
    f"/{CONTROL}/{RESUME}": Action.CONTROL,
    f"/{CONTROL}/{STOP}": Action.CONTROL,
    f"/{MODELS}/{DESCRIBE}": Action.PERSONALIZE,
    f"/{MODELS}/{PERSONALIZE}": Action.PERSONALIZE,
}
"""Action that each call requests. Any other call is refused, except health."""

CALLS, SHARED_CALLS = (100, 20), (1_000, 200)
"""Calls that an identity may make at once, and further calls per second. Many peers may use the shared token."""

WATCHING, SHARED_WATCHING = 16, 256
"""Calls that an identity may hold open to watch or control a run. Many peers may use the shared token."""

HEALTH = f"/{health.SERVICE_NAME}/"
"""Calls open to everyone: probes have no identity, and get no other information."""

_End = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
_Behaviour = Callable[[Any, Any], Awaitable[Any]]
_P = ParamSpec("_P")


@dataclass(eq=False)
class Peer:
    """Peer of an admitted call."""

    admitted: Admitted
    """Its identity, and the credential that admitted it."""
    host: str
    """Address that it calls from, without the port."""
    action: Action
    call: str
    ends: datetime
    ended: asyncio.Future[_End]
    _audit: Audit
    joined: dict[str, Value] = field(default_factory=dict)

    @property
    def identity(self) -> Identity:
        """Identity of the peer."""
        return self.admitted.identity

    @property
    def about(self) -> dict[str, Value]:
        """Description of the peer and its call for the audit log."""
        return {"identity": self.identity.name, "host": self.host, "call": self.call}

    def join(self, **details: Value) -> None:
        """Write to the audit log that the peer joins; its leaving is written when the call ends.

        Raise StorageError if the line cannot be written; the peer may not join then.
        """
        details_shown = {**self.about, **details}
        self._audit.write("join", **details_shown, credential=self.admitted.credential)
        self.joined = details_shown

    def control(self, request: str) -> None:
        """Write an operator's request to the audit log.

        Raise StorageError if the line cannot be written; the request must not be carried out then.
        """
        self._audit.write("control", **self.about, what=request, credential=self.admitted.credential)

    def refuse(self, kind: str, reason: str) -> None:
        """Write to the audit log that the peer's request was refused."""
        _log_to(self._audit.refused, self.host, kind, identity=self.identity.name, call=self.call, reason=reason)


PEER: ContextVar[Peer | None] = ContextVar("PEER", default=None)
"""Peer of the current call; None where no identity is required."""


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that admits calls by access rules, and ends them when they expire. Belongs to one event loop."""

    def __init__(self, access: Access, audit: Audit) -> None:
        self._access = access
        self._audit = audit
        self._peers: set[Peer] = set()
        self._budgets: dict[str, TokenBucket] = {}  # by name of an admitted identity
        self._versions = access.refresh()  # versions of the files when streams were last checked
        self._reading: asyncio.Task[dict[Path, int]] | None = None

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Wrap a call's handler with the admission check."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(HEALTH):
            return handler
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if not handler.request_streaming:
            behaviour = _with_request(handler.request_deserializer, behaviour)
        # Present each call as a stream of requests: gRPC would otherwise await and parse a single request before
        # calling us.
        streaming = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streaming else grpc.stream_unary_rpc_method_handler
        parse = handler.request_deserializer if handler.request_streaming else None
        return make(self._guarded(details.method, behaviour), parse, handler.response_serializer)

    async def watch(self) -> None:
        """Reload changed files and end expired streams, forever."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.check()

    async def check(self) -> None:
        """Reload changed files; end the streams of peers that would no longer be admitted."""
        if self._access.stale or self._reading is not None:
            await self._read()
        versions_before, self._versions = self._versions, self._access.versions
        changed_files = [path for path, version in self._versions.items() if version != versions_before[path]]
        for path in changed_files:
            log.info("%s has changed", path)
            _log_to(self._audit.write, "settings", file=str(path))
        now = datetime.now(UTC)
        for peer in [peer for peer in self._peers if changed_files or now >= peer.ends]:
            self._review(peer, now)

    async def _read(self) -> None:
        """Reload files in a thread, one at a time; streams continue while a long identity file is read."""
        if self._reading is None:
            self._reading = asyncio.create_task(asyncio.to_thread(self._access.refresh))
            self._reading.add_done_callback(self._have_read)
        await asyncio.shield(self._reading)

    def _have_read(self, _: Any) -> None:
        self._reading = None

    def _review(self, peer: Peer, now: datetime) -> None:
        if peer.ended.done():
            return
        try:
            self._access.check(peer.admitted, peer.action)
        except Denied as denied:
            if not denied.retries:
                log.warning("disconnected %s: %s", peer.identity.name, denied)
                _log_to(self._audit.write, "revoked", **peer.about, reason=str(denied))
            status = grpc.StatusCode.UNAVAILABLE if denied.retries else grpc.StatusCode.UNAUTHENTICATED
            peer.ended.set_result((status, str(denied), _final(denied)))
            return
        if now >= peer.ends:
            peer.ended.set_result((grpc.StatusCode.UNAVAILABLE, "stream lifetime exceeded; reconnect", ()))

    def _guarded(self, call: str, behaviour: _Behaviour) -> _Behaviour:
        async def guarded(request: Any, context: Any) -> Any:
            peer = await self._admit(call, context)
            PEER.set(peer)
            self._peers.add(peer)
            task = asyncio.ensure_future(behaviour(request, context))
            try:
                await asyncio.wait((task, peer.ended), return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    task.cancel()
                    await asyncio.wait((task,))
                    await context.abort(*peer.ended.result())
                return task.result()
            except FedloomError as error:  # the audit log failed: a peer that cannot be logged is not admitted
                log.error("%s was not admitted: %s", peer.identity.name, error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the aggregator cannot write its audit log")
            finally:
                self._peers.discard(peer)
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
                if peer.joined:
                    _log_to(self._audit.write, "leave", **peer.joined)

        return guarded

    async def _admit(self, call: str, context: Any) -> Peer:
        host = host_of(context.peer())
        action = ACTIONS.get(call)
        try:
            if action is None:
                raise Denied(f"{call} is not offered by this server")
            presented = presented_by(context)
            if self._access.stale or self._reading is not None:
                await self._read()  # a token may have been created or revoked a moment ago
            admission = self._access.admit(presented, action)
        except Denied as denied:
            identity = denied.identity
            kind = "unauthenticated" if identity is None else "forbidden"
            name = None if identity is None else identity.name
            _log_to(self._audit.refused, host, kind, identity=name, call=call, reason=str(denied))
            status = grpc.StatusCode.UNAUTHENTICATED if identity is None else grpc.StatusCode.PERMISSION_DENIED
            await context.abort(status, str(denied), _final(denied))
            raise AssertionError("abort raises") from None
        if (reason := self._rate_exceeded(admission.identity, action)) is not None:
            name = admission.identity.name
            _log_to(self._audit.refused, host, "rate", identity=name, call=call, reason=reason)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        ends = datetime.now(UTC) + timedelta(seconds=LONGEST_S * random.uniform(0.9, 1.0))
        ends = ends if admission.ends is None else min(ends, admission.ends)
        end: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        return Peer(admission, host, action, call, ends, end, self._audit)

    def _rate_exceeded(self, identity: Identity, action: Action) -> str | None:
        budget = self._budgets.setdefault(identity.name, TokenBucket(*(CALLS if identity != SHARED else SHARED_CALLS)))
        if not budget.spend():
            return f"too many calls of {identity.name}; retry later"
        long_lived = (Action.WATCH, Action.CONTROL)
        calls = sum(peer.identity.name == identity.name and peer.action in long_lived for peer in self._peers)
        if action in long_lived and calls >= (SHARED_WATCHING if identity == SHARED else WATCHING):
            return f"{identity.name} has too many open calls: close one first"
        return None


def _final(denied: Denied) -> tuple[tuple[str, str], ...]:
    """Return the metadata that states whether reconnecting with the same files can succeed."""
    return ((FINAL, "1"),) if denied.final else ()


def _with_request(parse: Callable[[bytes], Any], behaviour: _Behaviour) -> _Behaviour:
    """Wrap a handler so that the single request is read only after the call is admitted."""

    async def handler(_: Any, context: Any) -> Any:
        data, reason = await context.read(), "the call has no request message"
        if data is not grpc.aio.EOF:
            try:
                request = parse(data)
            except Exception:  # protobuf raises DecodeError, and other errors on some malformed input
                reason = f"its {len(data)} bytes are not a valid request"
            else:
                return await behaviour(request, context)
        if (peer := PEER.get()) is not None:
            peer.refuse("request", reason)
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)

    return handler


def _log_to(write: Callable[_P, None], *line: _P.args, **details: _P.kwargs) -> None:
    """Write a line about a past event to the audit log; a failure to write it is only logged."""
    try:
        write(*line, **details)
    except FedloomError as error:
        log.error("the audit log: %s", error)


def presented_by(context: Any) -> PeerCredentials:
    """Return the credentials that a peer presents.

    Raise Denied if there are several tokens, a token that is not a Bearer token, or a certificate that cannot be read.
    """
    pem = context.auth_context().get("x509_pem_cert")
    tokens = [value for key, value in context.invocation_metadata() or () if key == TOKEN]
    if len(tokens) > 1:
        raise Denied(f"the call has {len(tokens)} tokens; send one")
    token = None
    if tokens:
        kind, _, text = str(tokens[0]).partition(" ")
        if kind != "Bearer":
            raise Denied(f"{TOKEN} must be of the form Bearer TOKEN")
        token = SecretStr(text)
    try:
        certificate = None if not pem else parse_certificate(pem[0])
    except ValueError:
        raise Denied("the certificate cannot be read") from None
    return PeerCredentials(certificate, token)


def host_of(peer: str) -> str:
    """Return the host of a peer from gRPC's notation: ``ipv4:10.0.0.1:4711``, ``ipv6:%5B::1%5D:4711``."""
    return unquote(peer.partition(":")[2].rpartition(":")[0] or peer)


def server_credentials(files: ReloadingFile[ServerFiles]) -> grpc.ServerCredentials:
    """Return server TLS credentials that use the certificate and CA in the files at the start of each connection."""

    def configuration() -> Any:
        current = files.value
        return grpc.ssl_server_certificate_configuration([(current.pair.key, current.pair.chain)], current.ca)

    version = files.version

    def changed() -> Any:
        nonlocal version
        try:
            previous, version = version, files.refresh()
            return None if version == previous else configuration()
        except Exception:  # gRPC would end the handshake
            log.exception("the server's certificate")
            return None

    return grpc.dynamic_ssl_server_credentials(
        configuration(), changed, require_client_authentication=files.value.ca is not None
    )


def connection_age() -> tuple[tuple[str, int], ...]:
    """Return gRPC options that limit a TLS connection's age: its certificate is verified only at its start."""
    return (
        ("grpc.max_connection_age_ms", round(1_000 * LONGEST_S)),
        ("grpc.max_connection_age_grace_ms", round(1_000 * GRACE_S)),
    )


async def watch_certificate(files: ReloadingFile[ServerFiles], say: Callable[[str], None], audit: Audit) -> None:
    """Warn once per certificate when a server's certificate is about to expire, and log replacements; runs forever."""
    warned, version = None, files.version
    while True:
        previous, version = version, files.refresh()
        if version != previous:
            log.info("%s has changed", files.paths[0])
            _log_to(audit.write, "settings", file=str(files.paths[0]))
        certificate = files.value.pair.certificate
        soon = min(CERT_EXPIRY_WARNING, (certificate.ends - certificate.starts) / 4)
        if certificate != warned and datetime.now(UTC) > certificate.ends - soon:
            warned = certificate
            say(f"this aggregator's certificate expires at {certificate.ends:%Y-%m-%d %H:%M:%S} UTC: renew its files")
        await asyncio.sleep(CERTIFICATE_S)
