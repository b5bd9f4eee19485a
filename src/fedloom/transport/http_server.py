"""HTTP servers for ports without authentication: uvicorn, with limits on connections and on slow peers."""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedloom.core.address import split_address
from fedloom.errors import ExperimentError, argument
from fedloom.transport.limits import RateLimitFilter

REQUEST_BYTES = 1 << 14
"""Maximum size of a request's first line and headers."""

logging.getLogger("uvicorn.error").addFilter(RateLimitFilter())


@dataclass(frozen=True)
class HttpLimits:
    """Limits on the peers of a server.

    Attributes
    ----------
    connections
        Maximum number of open connections; one more closes the one whose peer has been waited for longest.
    peer_s
        Seconds in which a peer must send its next request, and in which it must read an answer. The time in which the
        application computes the answer is not limited.
    drain_s
        Seconds that open requests have to end when the server stops.
    """

    connections: int = 16
    peer_s: float = 10.0
    drain_s: float = 1.0


class _Connection(H11Protocol):
    """Connection that is closed when its peer is too slow, or has to make room for another."""

    def __init__(self, limits: HttpLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._waiting_since: float | None = None
        self._timer: Any = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; close the connection that has waited longest if there are too many."""
        super().connection_made(transport)
        # asyncio does this only for sockets that name their protocol; without it, answers wait for an acknowledgement.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait_for_peer()
        if len(self.connections) > self._limits.connections:
            waiting = [each for each in self.connections if isinstance(each, _Connection) and each._waiting_since]
            min(waiting, key=lambda each: each._waiting_since or 0.0)._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._compute()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Stop the timer once a request is complete: the application computes the answer."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self._compute()

    def pause_writing(self) -> None:
        """Begin to wait for the peer to read."""
        super().pause_writing()
        self._wait_for_peer()

    def on_response_complete(self) -> None:
        """Begin to wait for the peer to read the answer and to send its next request."""
        self._wait_for_peer()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Close the connection if it has no complete request; let the others be answered."""
        if self._waiting_since is not None:
            self.transport.close()
        super().shutdown()

    def _wait_for_peer(self) -> None:
        self._compute()
        self._waiting_since = time.monotonic()
        self._timer = self.loop.call_later(self._limits.peer_s, self._abort)

    def _compute(self) -> None:
        self._waiting_since = None
        if self._timer is not None:
            self._timer.cancel()

    def _abort(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


class HttpServer(uvicorn.Server):
    """Server of an ASGI application at ``host:port``; port 0 picks a free one, ``port`` says which.

    ``name`` is the argument that gives the address.

    Raise ExperimentError if the address is invalid or not of this machine, or the port is taken.
    """

    def __init__(self, name: str, address: str, application: Any, limits: HttpLimits | None = None) -> None:
        limits = limits or HttpLimits()
        host, port = split_address(address, what=argument(name), lowest=0)
        try:
            family, *_, bound = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            everywhere = host in ("0.0.0.0", "[::]") and socket.has_dualstack_ipv6()
            self.listener = (
                socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
                if everywhere
                else socket.create_server((str(bound[0]), port), family=family)
            )
        except OSError as error:
            raise ExperimentError(
                f"{argument(name)} cannot be served on {address}: the port is taken, or the address is not of this "
                "machine.",
                key=name,
                found=address,
            ) from error
        self.port = int(self.listener.getsockname()[1])
        self._waiting_connections = 4 * limits.connections
        super().__init__(
            uvicorn.Config(
                application,
                http=functools.partial(_Connection, limits),  # type: ignore[arg-type]  # uvicorn only calls it
                interface="asgi3",
                ws="none",
                loop="asyncio",
                log_config=None,
                log_level=logging.ERROR,  # anyone may send malformed requests
                access_log=False,
                proxy_headers=False,  # the audit log names the peer, not what the peer says of itself
                server_header=False,
                backlog=1,  # connections that asyncio accepts at once, before it counts them
                timeout_keep_alive=round(limits.peer_s) + 1,
                timeout_graceful_shutdown=limits.drain_s,  # type: ignore[arg-type]  # asyncio takes fractions
                h11_max_incomplete_event_size=REQUEST_BYTES,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; let many connections wait to be accepted, one by one."""
        await super().startup(sockets)
        self.listener.listen(self._waiting_connections)

    def capture_signals(self) -> Any:
        """Leave signals to the process."""
        return nullcontext()


@contextmanager
def http_served(name: str, address: str, application: Any, limits: HttpLimits | None = None) -> Iterator[int]:
    """Serve an application in a separate thread for the duration of the block; yield the port."""
    server = HttpServer(name, address, application, limits)
    thread = threading.Thread(target=server.run, args=([server.listener],), name=name, daemon=True)
    thread.start()
    try:
        yield server.port
    finally:
        server.should_exit = True
        thread.join()
