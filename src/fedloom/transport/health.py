"""Health checks: by gRPC on every server, and by HTTP on a plaintext port for probes, at a bounded cost to the process.

Health checks are not authenticated, so no cost grows with what a peer sends: a request is limited to a few bytes and to
a second, and the port for probes has the limits of :mod:`fedloom.transport.http_server`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from fedloom.transport.http_server import HttpLimits, HttpServer

REQUEST_BYTES = 256
"""Maximum size of a gRPC request: the name of a service."""

REQUEST_S = 1.0
"""Seconds a peer has to send its gRPC request."""

PATH = "/healthz"

_STATUS = health_pb2.HealthCheckResponse


class Health:
    """Health of a server's services; belongs to one event loop."""

    def __init__(self, *services: str) -> None:
        self._services = {"", *services}
        self._serving = True

    @property
    def handlers(self) -> Any:
        """Handlers of ``grpc.health.v1.Health``; its ``Check`` reads bytes, as gRPC would read any size before it."""
        check = grpc.stream_unary_rpc_method_handler(self._check, None, _STATUS.SerializeToString)
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})

    def shut_down(self) -> None:
        """Report all services as not serving from now on."""
        self._serving = False

    async def _check(self, _: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(REQUEST_S):
                data = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
        if data is grpc.aio.EOF or len(data) > REQUEST_BYTES:
            reason = f"send one request of at most {REQUEST_BYTES} bytes"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            service = health_pb2.HealthCheckRequest.FromString(data).service
        except Exception:  # protobuf raises DecodeError, and other errors on some malformed input
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a HealthCheckRequest")
        if service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        return _STATUS(status=_STATUS.SERVING if self._serving else _STATUS.NOT_SERVING)

    async def probe(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a probe by HTTP with 200 while the server is serving, and with 503 otherwise."""
        assert scope["type"] == "http"
        status = 404 if scope["path"] != PATH else 200 if self._serving else 503
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
