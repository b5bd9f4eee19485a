"""gRPC health checks, on every server and on a plaintext port for probes, at a bounded cost to the process.

Health checks are not authenticated, so no cost grows with what a peer sends: only the server's own services can be
watched, a request is limited to a few bytes, and the newest calls and connections replace the oldest.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from fedloom.errors import ExperimentError, argument
from fedloom.transport.address import split_address

CONNECTIONS = 32
"""Connections to the port for probes; one more ends the oldest."""

REQUEST_BYTES = 256
"""Maximum size of a request: the name of a service."""

REQUEST_S = 1.0
"""Seconds a peer has to send its request."""

REQUESTS = 32
"""Maximum number of calls waiting for their request; one more ends the oldest."""

WATCHERS = 64
"""Open Watch streams; one more ends the oldest."""

PROBES_OPTIONS = (
    ("grpc.max_receive_message_length", 4 * REQUEST_BYTES),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.server_handshake_timeout_ms", round(1_000 * REQUEST_S)),
    ("grpc.max_connection_idle_ms", 10_000),
)

_STATUS = health_pb2.HealthCheckResponse


class _Newest:
    """Bounded set of open calls: one more ends the oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[asyncio.Future[None], None] = {}  # in order of arrival

    @contextmanager
    def room(self) -> Iterator[asyncio.Future[None]]:
        """Make room for a call; the future is done when the call has to end."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[ended] = None
        while len(self._open) > self._most:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.set_result(None)
        try:
            yield ended
        finally:
            self._open.pop(ended, None)


class Health:
    """Servicer of ``grpc.health.v1.Health``; belongs to one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _STATUS.SERVING}
        self._changed = asyncio.Event()  # replaced by another event at each change
        self._reading = _Newest(REQUESTS)
        self._watching = _Newest(WATCHERS)

    @property
    def handlers(self) -> Any:
        """gRPC's handlers. Requests are streams, because gRPC reads a single request before it calls a handler."""
        answer = _STATUS.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, None, answer),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, None, answer),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    def serve(self, *services: str) -> None:
        """Report these services as serving."""
        self._become(dict.fromkeys(services, _STATUS.SERVING))

    def shut_down(self) -> None:
        """Report all services as not serving from now on."""
        self._become(dict.fromkeys(self._statuses, _STATUS.NOT_SERVING))

    def _become(self, statuses: dict[str, int]) -> None:
        self._statuses |= statuses
        self._changed.set()
        self._changed = asyncio.Event()

    async def _service(self, context: Any) -> str:
        """Return the service name that a call asks for, or end the call."""
        with self._reading.room() as ended:
            reading = asyncio.ensure_future(context.read())
            try:
                await asyncio.wait((reading, ended), timeout=REQUEST_S, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
                data = reading.result()
            finally:
                reading.cancel()
        if data is grpc.aio.EOF or len(data) > REQUEST_BYTES:
            reason = f"send one request of at most {REQUEST_BYTES} bytes"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            return str(health_pb2.HealthCheckRequest.FromString(data).service)
        except Exception:  # protobuf raises DecodeError, and other errors on some malformed input
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a HealthCheckRequest")
            raise AssertionError("abort raises") from None

    async def _check(self, _: Any, context: Any) -> Any:
        service = await self._service(context)
        if service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        return _STATUS(status=self._statuses[service])

    async def _watch(self, _: Any, context: Any) -> None:
        service = await self._service(context)
        if service not in self._statuses:  # it will never exist: services are set before the port opens
            await context.write(_STATUS(status=_STATUS.SERVICE_UNKNOWN))
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        sent: int | None = None
        with self._watching.room() as ended:
            while not ended.done():
                changed, status = asyncio.ensure_future(self._changed.wait()), self._statuses[service]
                try:
                    if status != sent:
                        await context.write(_STATUS(status=status))
                        sent = status
                    await asyncio.wait((changed, ended), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "replaced by a newer watcher; retry")


@dataclass(frozen=True)
class Probes:
    """Running port for probes."""

    _relay: asyncio.Server
    _server: Any
    _folder: Path

    async def stop(self) -> None:
        """End all connections and free the port."""
        self._relay.close()
        await self._server.stop(None)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


async def probed(address: str, state: Health) -> Probes:
    """Serve health on ``host:port``, on this event loop, so that it answers as long as the loop runs.

    gRPC closes a new connection when there are too many. Here the oldest is closed instead: a relay accepts the
    connections, and gRPC itself listens on a socket file that only this user can open.

    Raises
    ------
    ExperimentError
        If the address is invalid, the port is taken or the address cannot be bound.
    """
    host, port = split_address(address, what=argument("health"), lowest=0)
    server = grpc.aio.server(options=PROBES_OPTIONS)
    server.add_generic_rpc_handlers([state.handlers])
    folder = await asyncio.to_thread(_private_folder)
    path = folder / "probes"
    try:
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        serve = _relaying(path, _Newest(CONNECTIONS))
        if (listener := _every_address(host.strip("[]"), port)) is not None:
            relay = await asyncio.start_server(serve, sock=listener, limit=_PIECE)
        else:
            relay = await asyncio.start_server(serve, host.strip("[]"), port, limit=_PIECE)
    except (OSError, RuntimeError) as error:
        await server.stop(None)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise ExperimentError(
            f"cannot serve on {address}: port {port} is taken or the address is not of this machine",
            hint=f"choose another one with {argument('health')} HOST:PORT",
        ) from error
    return Probes(relay, server, folder)


def _every_address(host: str, port: int) -> socket.socket | None:
    """Listen on IPv6 and IPv4 for a wildcard address, as gRPC does; return None for another host, or without IPv6.

    Raise OSError if the port is taken.
    """
    if host not in ("0.0.0.0", "::") or not socket.has_dualstack_ipv6():
        return None
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4 * CONNECTIONS)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return None


def _private_folder() -> Path:
    """Create a private folder with a short path: a socket's path is limited to about a hundred characters."""
    with suppress(OSError):
        return Path(tempfile.mkdtemp(prefix="fedloom-", dir="/tmp"))
    return Path(tempfile.mkdtemp(prefix="fedloom-"))


_PIECE = 1 << 12


def _relaying(path: Path, peers: _Newest) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    """Return a handler that relays a connection to a socket and back, until newer connections displace it."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with peers.room() as ended, suppress(OSError):
            try:
                inner_reader, inner_writer = await asyncio.open_unix_connection(str(path), limit=_PIECE)
                ways = [_copy(reader, inner_writer), _copy(inner_reader, writer)]
                tasks = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait((*tasks, ended), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    inner_writer.transport.abort()
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                writer.transport.abort() if ended.done() else writer.close()

    return relay


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
