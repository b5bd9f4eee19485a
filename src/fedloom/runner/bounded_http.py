"""HTTP server for a port without authentication, with limits on the number and duration of connections."""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import LineTooLong
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from fedloom.errors import ExperimentError, argument
from fedloom.transport.address import split_address

log = logging.getLogger(__name__)

CONNECTIONS = 16
"""Maximum number of open connections; a further one closes the oldest, so that idle connections cannot block others."""

CONNECTION_S = 10.0
"""Maximum duration of a connection, from accept to the last byte of the answer, in seconds."""

REQUEST_BYTES = 1 << 14
"""Maximum size of a request with its headers; the standard library would accept six megabytes per connection."""

PAUSE_S = 0.5
"""Pause after a failed accept, and interval between checks for old connections, in seconds."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Request(io.BufferedReader):
    """Input of a connection, limited to ``REQUEST_BYTES``."""

    _left = REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line; raise an error, which the handler answers with 431, after too many bytes."""
        most = self._left + 1
        line = super().readline(most if size is None or size < 0 else min(size, most))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line


class _Handler(WSGIRequestHandler):
    """Request handler that reads a bounded request and logs nothing."""

    def setup(self) -> None:
        """Limit the bytes read from the connection."""
        super().setup()
        self.rfile = _Request(self.connection.makefile("rb", buffering=0))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: anyone may connect, and could fill the log."""


class BoundedServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread per connection, and limits on their number and duration. Port 0 picks a free port.

    The limits are :data:`CONNECTIONS` and :data:`CONNECTION_S` where others are not given.

    Raise OSError if the port is taken or the address is not one of this machine's.
    """

    daemon_threads = True
    request_queue_size = 4 * CONNECTIONS

    def __init__(
        self,
        host: str,
        port: int,
        application: Application,
        connections: int | None = None,
        connection_s: float | None = None,
    ) -> None:
        self._most = CONNECTIONS if connections is None else connections
        self._longest_s = CONNECTION_S if connection_s is None else connection_s
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # start times, oldest first
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Bind without resolving this machine's name, which can be slow."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "fedloom", int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; close the oldest if there are too many."""
        try:
            accepted, peer = super().get_request()
        except OSError as error:  # when out of descriptors, an immediate retry would fail in a busy loop
            log.warning("cannot accept a connection: %s", error)
            time.sleep(PAUSE_S)
            raise
        accepted.settimeout(self._longest_s)
        with self._lock:
            self._open[accepted] = time.monotonic()
            for oldest in list(self._open)[: max(0, len(self._open) - self._most)]:
                self._end(oldest)
        return accepted, peer

    def service_actions(self) -> None:
        """Close connections that have lasted too long."""
        before = time.monotonic() - self._longest_s
        with self._lock:
            for each in [each for each, since in self._open.items() if since < before]:
                self._end(each)

    def _end(self, connection: socket.socket) -> None:
        """Shut a connection down, so that its thread reads end-of-file and closes the socket."""
        del self._open[connection]
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("already closed by the peer: %s", error)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has been answered."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a connection broke."""
        log.debug("a connection from %s broke", client_address, exc_info=True)


@contextmanager
def http_served(
    name: str,
    address: str,
    application: Application,
    connections: int | None = None,
    connection_s: float | None = None,
) -> Iterator[BoundedServer]:
    """Serve an application at ``host:port``, in separate threads, for the duration of the block.

    ``name`` is the argument that gives the address; the limits are those of :class:`BoundedServer`.

    Raise ExperimentError if the address is invalid or not of this machine, or the port is taken.
    """
    host, port = split_address(address, what=argument(name), lowest=0)
    try:
        server = BoundedServer(host.strip("[]"), port, application, connections, connection_s)
    except OSError as error:
        raise ExperimentError(
            f"{argument(name)} cannot be served on {address}: the port is taken, or the address is not of this "
            "machine.",
            key=name,
            found=address,
        ) from error
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
