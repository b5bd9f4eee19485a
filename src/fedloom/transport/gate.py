"""Who is let in to an aggregator, and for how long: every call is refused here before anything of it is looked at."""

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
from typing import Any, Literal
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health
from pydantic import SecretStr

from fedloom.errors import FedloomError
from fedloom.transport import spoken
from fedloom.transport.control import CLIENTS, CONTROL, PAUSE, RESUME, STATUS, STOP
from fedloom.transport.failures import FINAL
from fedloom.transport.limits import Budget
from fedloom.transport.stream import METHOD, OBSERVATION, SERVICE, WATCH
from fedloom.trust.access import SHARED, Access, Admitted, Denied, Presented
from fedloom.trust.audit import Audit, Value
from fedloom.trust.credentials import parse_certificate
from fedloom.trust.files import Reread
from fedloom.trust.identities import Action, Identity
from fedloom.trust.options import ServerFiles

log = logging.getLogger("fedloom.transport.aggregator")

CHECK_S = 1.0
"""How often files are looked at, and streams whose time is over or whose identity is revoked are ended."""

SOON = timedelta(days=3)
"""How long before its end a server's certificate is spoken of, if it lives for long."""

CERTIFICATE_S = 60.0
"""How often that is looked at."""

LONGEST_S = 86_400.0
"""The most that a stream lives, less up to a tenth, so that not all come again at the same time."""

GRACE_S = 600.0
"""How long the streams of a connection may go on when its time is over; by then theirs is over, too."""

TOKEN = "authorization"
"""Metadata of a call that carries a token, as ``Bearer TOKEN``."""

ACTIONS: Mapping[str, Action] = {
    f"/{SERVICE}/{METHOD}": Action.MEASURE,  # what a worker's clients may do is said by its Hello and its roles
    f"/{OBSERVATION}/{WATCH}": Action.WATCH,
    f"/{CONTROL}/{STATUS}": Action.WATCH,
    f"/{CONTROL}/{CLIENTS}": Action.WATCH,
    f"/{CONTROL}/{PAUSE}": Action.CONTROL,
    f"/{CONTROL}/{RESUME}": Action.CONTROL,
    f"/{CONTROL}/{STOP}": Action.CONTROL,
    f"/{spoken.SERVICE}/{spoken.DESCRIBE}": Action.PERSONALIZE,
    f"/{spoken.SERVICE}/{spoken.PERSONALIZE}": Action.PERSONALIZE,
}
"""What each call asks to do. A call that is not here is refused, but for health."""

CALLS, SHARED_CALLS = (100, 20), (1_000, 200)
"""How many calls an identity has at once, and how many more each second; whoever has the shared token are many."""

WATCHING, SHARED_WATCHING = 16, 256
"""Calls that an identity may have open at one time to watch or control a run; whoever has the shared token are many."""

HEALTH = f"/{health.SERVICE_NAME}/"
"""What anybody may ask: probes have no identity, and are told nothing else."""

_End = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
_Behaviour = Callable[[Any, Any], Awaitable[Any]]


@dataclass(eq=False)
class Peer:
    """Who is at the other end of a call that was let in.

    Attributes
    ----------
    admitted
        Who it is, and by what it was let in.
    host
        Where it calls from, without the port.
    """

    admitted: Admitted
    host: str
    action: Action
    call: str
    ends: datetime
    ended: asyncio.Future[_End]
    _audit: Audit
    joined: dict[str, Value] = field(default_factory=dict)

    @property
    def identity(self) -> Identity:
        """Who it is."""
        return self.admitted.identity

    def join(self, **told: Value) -> None:
        """Write to the audit log that it takes part from now on; that it leaves is written when the call ends.

        Raises
        ------
        StorageError
            If it cannot be written: it may not take part then.
        """
        about = {"identity": self.identity.name, "host": self.host, "call": self.call, **told}
        self._audit.write("join", **about, credential=self.admitted.credential)
        self.joined = about

    def control(self, what: str) -> None:
        """Write to the audit log what it has done with the federation.

        Raises
        ------
        StorageError
            If it cannot be written: it may not be done then.
        """
        about = {"identity": self.identity.name, "host": self.host, "call": self.call, "what": what}
        self._audit.write("control", **about, credential=self.admitted.credential)

    def refuse(self, kind: str, reason: str) -> None:
        """Write to the audit log that it was refused what it asked."""
        refused(self._audit, self.host, kind, identity=self.identity.name, call=self.call, reason=reason)


PEER: ContextVar[Peer | None] = ContextVar("PEER", default=None)
"""The peer of the call that runs; None where nobody has to say who they are."""


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls in, and ends them when their time is over.

    Belongs to one event loop.

    Parameters
    ----------
    access
        Who is let in.
    audit
        Where it is written.
    """

    def __init__(self, access: Access, audit: Audit) -> None:
        self._access = access
        self._audit = audit
        self._peers: set[Peer] = set()
        self._budgets: dict[str, Budget] = {}  # of each identity that has been let in
        self._versions = access.refresh()  # of the files, when streams were reviewed last
        self._reading: asyncio.Task[dict[Path, int]] | None = None

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Put the gate before a call's handler."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(HEALTH):
            return handler
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if not handler.request_streaming:
            behaviour = _asked(handler.request_deserializer, behaviour)
        # Each as if a stream of requests came: gRPC waits for a single one, and parses it, before it calls a handler.
        streaming = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streaming else grpc.stream_unary_rpc_method_handler
        parse = handler.request_deserializer if handler.request_streaming else None
        return make(self._guarded(details.method, behaviour), parse, handler.response_serializer)

    async def watch(self) -> None:
        """Read files again that change, and end streams, for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.check()

    async def check(self) -> None:
        """Read files again that have changed; end the streams of those who would not be let in any more."""
        if self._access.stale or self._reading is not None:
            await self._read()
        before, self._versions = self._versions, self._access.versions
        changed = [path for path, version in self._versions.items() if version != before[path]]
        for path in changed:
            log.info("%s has changed", path)
            _write(self._audit, "settings", file=str(path))
        now = datetime.now(UTC)
        for peer in [peer for peer in self._peers if changed or now >= peer.ends]:
            self._review(peer, now)

    async def _read(self) -> None:
        """Read files again in a thread, one at a time: a long table takes a second, in which streams go on."""
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
            if not denied.again:
                log.warning("disconnected %s: %s", peer.identity.name, denied)
                told = {"identity": peer.identity.name, "host": peer.host, "call": peer.call}
                _write(self._audit, "revoked", **told, reason=str(denied))
            status = grpc.StatusCode.UNAVAILABLE if denied.again else grpc.StatusCode.UNAUTHENTICATED
            peer.ended.set_result((status, str(denied), _final(denied)))
            return
        if now >= peer.ends:
            peer.ended.set_result((grpc.StatusCode.UNAVAILABLE, "the stream has lived for long enough: come again", ()))

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
            except FedloomError as error:  # the audit log: whom nobody would know of is not let in
                log.error("%s was not admitted: %s", peer.identity.name, error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the aggregator cannot write its audit log")
            finally:
                self._peers.discard(peer)
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
                if peer.joined:
                    _write(self._audit, "leave", **peer.joined)

        return guarded

    async def _admit(self, call: str, context: Any) -> Peer:
        host = host_of(context.peer())
        action = ACTIONS.get(call)
        try:
            if action is None:
                raise Denied(f"{call} is for nobody here")
            presented = presented_by(context)
            if self._access.stale or self._reading is not None:
                await self._read()  # a token may have been made, or revoked, a moment ago
            admitted = self._access.admit(presented, action)
        except Denied as denied:
            known = denied.identity
            kind = "unauthenticated" if known is None else "forbidden"
            name = None if known is None else known.name
            refused(self._audit, host, kind, identity=name, call=call, reason=str(denied))
            status = grpc.StatusCode.UNAUTHENTICATED if known is None else grpc.StatusCode.PERMISSION_DENIED
            await context.abort(status, str(denied), _final(denied))
            raise AssertionError("abort raises") from None
        identity = admitted.identity
        budget = self._budgets.setdefault(identity.name, Budget(*(CALLS if identity != SHARED else SHARED_CALLS)))
        if not budget.spend():
            reason = f"too many calls of {identity.name}: come again"
            refused(self._audit, host, "rate", identity=identity.name, call=call, reason=reason)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        if action in (Action.WATCH, Action.CONTROL) and self._watches_too_much(identity):
            reason = f"{identity.name} has too many calls open: end one first"
            refused(self._audit, host, "rate", identity=identity.name, call=call, reason=reason)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        ends = datetime.now(UTC) + timedelta(seconds=LONGEST_S * random.uniform(0.9, 1.0))
        ends = ends if admitted.ends is None else min(ends, admitted.ends)
        ended: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        return Peer(admitted, host, action, call, ends, ended, self._audit)

    def _watches_too_much(self, identity: Identity) -> bool:
        open_calls = sum(
            peer.identity.name == identity.name and peer.action in (Action.WATCH, Action.CONTROL)
            for peer in self._peers
        )
        return open_calls >= (SHARED_WATCHING if identity == SHARED else WATCHING)


def _final(denied: Denied) -> tuple[tuple[str, str], ...]:
    """Return the metadata that tells a peer whether it is of use to come again with the same files."""
    return ((FINAL, "1"),) if denied.final else ()


def _asked(parse: Callable[[bytes], Any], behaviour: _Behaviour) -> _Behaviour:
    """Read the one request of a call that was let in."""

    async def asked(_: Any, context: Any) -> Any:
        data, reason = await context.read(), "found no message; allowed: one"
        if data is not grpc.aio.EOF:
            try:
                request = parse(data)
            except Exception:  # protobuf raises DecodeError, and others on some malformed input
                reason = f"found {len(data)} bytes that are no request"
            else:
                return await behaviour(request, context)
        if (peer := PEER.get()) is not None:
            peer.refuse("request", reason)
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)

    return asked


def _write(audit: Audit, event: Literal["settings", "revoked", "leave"], **told: Value) -> None:
    """Write what has happened already: that it cannot be written undoes nothing."""
    try:
        audit.write(event, **told)
    except FedloomError as error:
        log.error("the audit log: %s", error)


def refused(audit: Audit, host: str, kind: str, **told: Value) -> None:
    """Write a refusal to the audit log, and go on if that cannot be."""
    try:
        audit.refused(host, kind, **told)
    except FedloomError as error:
        log.error("the audit log: %s", error)


def presented_by(context: Any) -> Presented:
    """Return what a peer has shown of itself.

    Raises
    ------
    Denied
        If it has shown several tokens, or something else in a token's place.
    """
    pem = context.auth_context().get("x509_pem_cert")
    tokens = [value for key, value in context.invocation_metadata() or () if key == TOKEN]
    if len(tokens) > 1:
        raise Denied(f"found {len(tokens)} tokens; allowed: one")
    token = None
    if tokens:
        kind, _, text = str(tokens[0]).partition(" ")
        if kind != "Bearer":
            raise Denied(f"found {TOKEN} of another kind; allowed: Bearer TOKEN")
        token = SecretStr(text)
    try:
        certificate = None if not pem else parse_certificate(pem[0])
    except ValueError:
        raise Denied("the certificate cannot be read") from None
    return Presented(certificate, token)


def host_of(peer: str) -> str:
    """Return the host of a peer, as gRPC names it: ``ipv4:10.0.0.1:4711``, ``ipv6:%5B::1%5D:4711``."""
    return unquote(peer.partition(":")[2].rpartition(":")[0] or peer)


def server_credentials(files: Reread[ServerFiles]) -> grpc.ServerCredentials:
    """Return a server's TLS, with its certificate and CA as the files are when a connection begins."""

    def configuration() -> Any:
        found = files.value
        return grpc.ssl_server_certificate_configuration([(found.pair.key, found.pair.chain)], found.ca)

    given = files.version

    def changed() -> Any:
        nonlocal given
        try:
            before, given = given, files.refresh()
            return None if given == before else configuration()
        except Exception:  # gRPC would end the handshake
            log.exception("the server's certificate")
            return None

    return grpc.dynamic_ssl_server_credentials(
        configuration(), changed, require_client_authentication=files.value.ca is not None
    )


def connection_age() -> tuple[tuple[str, int], ...]:
    """Return gRPC's options that end a TLS connection in time: its certificate was verified once, when it began."""
    return (
        ("grpc.max_connection_age_ms", round(1_000 * LONGEST_S)),
        ("grpc.max_connection_age_grace_ms", round(1_000 * GRACE_S)),
    )


async def watch_certificate(files: Reread[ServerFiles], say: Callable[[str], None], audit: Audit) -> None:
    """Say, for ever, when a server's certificate is about to end, once for each; and when another takes its place."""
    said, version = None, files.version
    while True:
        before, version = version, files.refresh()
        if version != before:
            log.info("%s has changed", files.paths[0])
            _write(audit, "settings", file=str(files.paths[0]))
        certificate = files.value.pair.certificate
        soon = min(SOON, (certificate.ends - certificate.starts) / 4)
        if certificate != said and datetime.now(UTC) > certificate.ends - soon:
            said = certificate
            say(f"this aggregator's certificate ends at {certificate.ends:%Y-%m-%d %H:%M:%S} UTC: renew its files")
        await asyncio.sleep(CERTIFICATE_S)
