"""Common base of FedLoom's gRPC servers: address, TLS, admission of calls, health and reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from fedloom.core.address import split_address
from fedloom.errors import ExperimentError, argument
from fedloom.security.audit import Audit
from fedloom.security.options import Protection
from fedloom.transport.dial import KEEPALIVE
from fedloom.transport.frames import FRAME_BYTES
from fedloom.transport.gate import AuthInterceptor, connection_age, server_credentials, watch_certificate
from fedloom.transport.http_server import HttpLimits, HttpServer
from fedloom.transport.limits import RateLimitFilter

# Pings are allowed twice as often as clients send them, so that none receives "too_many_pings". No limit is raised.
SERVER_OPTIONS = (
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Bounds the cost of an unknown connection: it must speak HTTP/2 within 10 s, is closed after 30 s without a stream,
    # and has room for one frame in each of the streams that it may hold.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_receive_message_length", FRAME_BYTES),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared by a second server
)

logging.getLogger("grpc._cython.cygrpc").addFilter(RateLimitFilter())
"""Rate limit on gRPC's own log, which shows a traceback of each malformed health check or ungated call."""

HEALTH_REQUEST_BYTES = 256
"""Maximum size of a gRPC request: the name of a service."""

HEALTH_REQUEST_S = 1.0
"""Seconds a peer has to send its gRPC request."""

HEALTH_PATH, READY_PATH = "/healthz", "/readyz"

_HealthResponse = health_pb2.HealthCheckResponse


@dataclass(frozen=True)
class Listening:
    """A running server, its address, and its health state."""

    server: Any
    health: Health
    address: str
    probes: Probes | None
    watching: Sequence[asyncio.Task[None]]
    """Tasks that reload the files of access and TLS."""

    async def stop(self, grace_s: float) -> None:
        """Report not serving, accept no more calls, and end those that are open after ``grace_s`` seconds."""
        for task in self.watching:
            task.cancel()
        self.health.shut_down()
        await self.server.stop(grace_s)
        if self.probes is not None:
            await self.probes.stop()


async def listening(
    address: str,
    services: Mapping[str, Mapping[str, Any]],
    protection: Protection,
    audit: Audit,
    options: Sequence[tuple[str, Any]],
    say: Callable[[str], None],
    health_address: str | None = None,
) -> Listening:
    """Serve on ``host:port`` (port 0: any free port); without access rules, everyone may call, and use reflection.

    Parameters
    ----------
    services
        Handlers of each service, by method.
    say
        Shows one line to the user, when the certificate is about to expire.
    health_address
        ``host:port`` on which only health is served, in plaintext; None disables it.

    Raises
    ------
    ExperimentError
        If the address is invalid, the port is taken, the address cannot be bound, or an unprotected server would be
        reachable from other machines.
    """
    host, port = split_address(address, what="the address to serve on", lowest=0)
    protection.check(host)
    gate = None if protection.access is None else AuthInterceptor(protection.access, audit)
    age = () if protection.tls is None else connection_age()
    server = grpc.aio.server(options=(*options, *age), interceptors=[] if gate is None else [gate])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
    )
    state = Health(*services)
    server.add_generic_rpc_handlers([state.handlers])
    if gate is None:  # known peers do not need reflection
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if protection.tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, server_credentials(protection.tls))
    except RuntimeError:
        bound = 0
    if bound == 0:
        await server.stop(None)
        raise ExperimentError(
            f"cannot serve on {address}: port {port} is taken or the address is not of this machine",
            hint=f"choose another one with {argument('listen')} HOST:PORT (port 0: any free one)",
        )
    await server.start()
    try:
        probes = None if health_address is None else Probes.start(health_address, state)
    except ExperimentError:
        await server.stop(None)
        raise
    watchers = [] if gate is None else [asyncio.create_task(gate.watch())]
    if protection.tls is not None:
        watchers.append(asyncio.create_task(watch_certificate(protection.tls, say, audit)))
    return Listening(server, state, f"{host}:{bound}", probes, watchers)


class Health:
    """Health of a server's services; belongs to one event loop."""

    def __init__(self, *services: str, ready: Callable[[], bool] = lambda: True) -> None:
        self._ready = ready
        self._services = {"", *services}
        self._serving = True

    @property
    def handlers(self) -> Any:
        """Handlers of ``grpc.health.v1.Health``; its ``Check`` reads bytes, as gRPC would read any size before it."""
        check = grpc.stream_unary_rpc_method_handler(self._check, None, _HealthResponse.SerializeToString)
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})

    def shut_down(self) -> None:
        """Report all services as not serving from now on."""
        self._serving = False

    async def _check(self, _: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(HEALTH_REQUEST_S):
                data = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
        if data is grpc.aio.EOF or len(data) > HEALTH_REQUEST_BYTES:
            reason = f"send one request of at most {HEALTH_REQUEST_BYTES} bytes"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            service = health_pb2.HealthCheckRequest.FromString(data).service
        except Exception:  # protobuf raises DecodeError, and other errors on some malformed input
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a HealthCheckRequest")
        if service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        return _HealthResponse(status=_HealthResponse.SERVING if self._serving else _HealthResponse.NOT_SERVING)

    async def probe(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a probe of health or readiness by HTTP: 200, 503 if it is not so, or 404."""
        assert scope["type"] == "http"
        states = {HEALTH_PATH: self._serving, READY_PATH: self._serving and self._ready()}
        status = 404 if (state := states.get(scope["path"])) is None else 200 if state else 503
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@dataclass(frozen=True)
class Probes:
    """Running port for probes, on this event loop, so that it answers as long as the loop runs."""

    _server: HttpServer
    _task: asyncio.Task[None]

    @classmethod
    def start(cls, address: str, state: Health) -> Probes:
        """Serve health on ``host:port``; raise ExperimentError if the address is invalid or cannot be bound."""
        server = HttpServer("health", address, state.probe, HttpLimits(connections=32))
        return cls(server, asyncio.create_task(server.serve([server.listener])))

    async def stop(self) -> None:
        """End all connections and free the port."""
        self._server.should_exit = True
        await self._task
