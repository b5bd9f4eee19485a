"""HTTP/1.1 server for a port without authentication, with limits on the number of connections, and on requests."""

from __future__ import annotations

import io
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import LineTooLong
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.headers import Headers
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from fedloom.errors import ExperimentError, argument
from fedloom.transport.address import split_address

log = logging.getLogger(__name__)

CONNECTIONS = 16
"""Maximum number of open connections; a further one closes the one whose peer has been waited for longest."""

CONNECTION_S = 10.0
"""Seconds in which a peer must send its next request, and in which it must read the answer."""

REQUEST_BYTES = 1 << 14
"""Maximum size of a request with its headers; the standard library would accept six megabytes per connection."""

MOST_SKIPPED = 1 << 16
"""Number of bytes of a body that are skipped for the next request; after more, the connection is closed."""

PAUSE_S = 0.5
"""Pause after a failed accept, and interval between checks for old connections, in seconds."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Request(io.BufferedReader):
    """Input of a connection, limited to ``REQUEST_BYTES`` of lines per request."""

    _left = REQUEST_BYTES

    def begin(self) -> None:
        """Begin a request."""
        self._left = REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line; raise an error, which the handler answers with 431, after too many bytes."""
        most = self._left + 1
        line = super().readline(most if size is None or size < 0 else min(size, most))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line


class _Body(io.RawIOBase):
    """Body of a request; ``ended`` is called when it has been read."""

    def __init__(self, source: io.BufferedReader, size: int, ended: Callable[[], None]) -> None:
        self._source, self.left, self._ended, self.broken = source, size, ended, False
        if not size:
            ended()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes of the body, and none beyond it; none, too, once the peer takes too long or is gone."""
        try:
            count = self._source.readinto(memoryview(buffer)[: self.left]) if self.left else 0
        except OSError:
            self.broken = True
            return 0
        self.left -= count
        if count and not self.left:
            self._ended()
        return count


class _Response(ServerHandler):
    """Response of HTTP/1.1, after which the connection stays open if both sides know where it ends."""

    http_version = "1.1"
    request_handler: _Handler
    headers: Headers | None
    bytes_sent: int
    _keeps = False

    def cleanup_headers(self) -> None:
        """Announce whether the connection will be closed."""
        super().cleanup_headers()
        assert self.headers is not None, "they are about to be sent"
        self._keeps = self.request_handler.keeps() and "Content-Length" in self.headers
        if not self._keeps:
            self.headers["Connection"] = "close"

    def close(self) -> None:
        """End the response; keep the connection only if all announced bytes were sent."""
        if self._keeps and self.headers is not None:
            self.request_handler.close_connection = self.bytes_sent != int(str(self.headers["Content-Length"]))
        super().close()


class _Handler(WSGIRequestHandler):
    """Request handler that reads bounded requests, one after another, and logs nothing."""

    server: BoundedServer
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # a response is sent at once, with its headers
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Limit the bytes read from the connection."""
        super().setup()
        self.rfile: _Request = _Request(self.connection.makefile("rb", buffering=0))

    def handle(self) -> None:
        """Answer requests until one side closes the connection."""
        self.close_connection = False
        while not self.close_connection:
            self.rfile.begin()
            self.close_connection = True
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                self._answer()

    def handle_expect_100(self) -> bool:
        """Send 100 at once."""
        found = super().handle_expect_100()
        self.wfile.flush()
        return found

    def keeps(self) -> bool:
        """Return whether the connection can stay open after the current request."""
        skips = self._body.left <= MOST_SKIPPED and not self._body.broken
        return self._wants_more and self.server.keeps_connections and skips

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: anyone may connect, and could fill the log."""

    def _answer(self) -> None:
        sizes = self.headers.get_all("Content-Length", [])
        chunked = "Transfer-Encoding" in self.headers  # and without a length is left to the application, to refuse
        if len(sizes) > 1 or (sizes and chunked):
            self.send_error(400, "Ambiguous length")
            return
        known = bool(sizes) and re.fullmatch("[0-9]{1,18}", sizes[0]) is not None
        self._wants_more = not self.close_connection and self.request_version == "HTTP/1.1" and self.command != "HEAD"
        self._wants_more &= known or not (sizes or chunked)
        self.close_connection = True
        self._body = _Body(self.rfile, int(sizes[0]) if known else 0, lambda: self.server.compute(self.connection))
        body = io.BufferedReader(self._body)
        response = _Response(body, self.wfile, self.get_stderr(), self.get_environ(), multithread=True)  # type: ignore[arg-type]
        response.request_handler = self
        response.run(self._application)
        if not self.close_connection:
            body.read()
            self.close_connection = self._body.left > 0
        self.server.wait_for_peer(self.connection)

    def _application(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return self.server.get_app()(environ, start_response)  # type: ignore[misc]
        finally:
            self.server.wait_for_peer(self.connection)


class BoundedServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread per connection, and limits on their number and on peers. Port 0 picks a free port.

    The limits are :data:`CONNECTIONS` and :data:`CONNECTION_S` where others are not given. The time in which the
    application computes an answer is not limited: it has to limit that itself.

    Attributes
    ----------
    keeps_connections
        True while connections stay open after an answer.

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
        self._open: dict[socket.socket, float] = {}  # since when the peer is waited for; infinite while it waits
        self.keeps_connections = True
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
            if len(self._open) >= self._most:
                self._end(min(self._open, key=self._open.__getitem__))
            self._open[accepted] = time.monotonic()
        return accepted, peer

    def compute(self, connection: socket.socket) -> None:
        """Stop limiting a connection: its request has arrived, and the application computes the answer."""
        self._limit(connection, math.inf)

    def wait_for_peer(self, connection: socket.socket) -> None:
        """Limit a connection whose peer has to read an answer, or to send a request."""
        self._limit(connection, time.monotonic())

    def _limit(self, connection: socket.socket, since: float) -> None:
        with self._lock:
            if connection in self._open:
                self._open[connection] = since

    def service_actions(self) -> None:
        """Close connections whose peers have been waited for too long."""
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

    def server_close(self) -> None:
        """Close the port and all connections."""
        super().server_close()
        with self._lock:
            for each in list(self._open):
                self._end(each)

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
