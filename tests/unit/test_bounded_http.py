"""The HTTP server keeps connections where both sides know where a message ends, and limits peers, not answers."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest

from fedloom.runner.bounded_http import MOST_SKIPPED, BoundedServer, http_served

WAIT_S = 30


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer with the body, or do what the path says."""
    path, body = environ["PATH_INFO"], b""
    if path == "/echo":
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    if path == "/slow":
        time.sleep(1.5)
    start_response("200 OK", [("Content-Type", "text/plain")])
    if path == "/short":
        return iter([b"a", b"b"])  # of unknown length
    return [body or path.encode()]


@pytest.fixture
def server() -> Iterator[BoundedServer]:
    with http_served("rest", "127.0.0.1:0", application, 4, 0.6) as served:
        yield served


def connected(server: BoundedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=WAIT_S)


def asked(server: BoundedServer, request: bytes) -> bytes:
    """Return all that the server sends until it closes the connection."""
    found = b""
    with connected(server) as raw:
        raw.sendall(request)
        while piece := raw.recv(1 << 16):
            found += piece
    return found


def test_a_connection_carries_several_requests(server: BoundedServer) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT_S)) as connection:
        sockets = set()
        for path, body in (("/echo", b"one"), ("/unread", b"x" * 1000), ("/echo", b"two"), ("/a", None)):
            connection.request("POST", path, body)
            answer = connection.getresponse()
            sockets.add(id(connection.sock))
            assert (answer.version, answer.read()) == (11, body if path == "/echo" else path.encode())
        assert len(sockets) == 1
        connection.request("POST", "/echo", b"x" * 9, {"Expect": "100-continue"})
        assert connection.getresponse().read() == b"x" * 9


def test_answers_are_not_delayed(server: BoundedServer) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT_S)) as connection:
        spent = []
        for _ in range(20):
            began = time.monotonic()
            connection.request("GET", "/a")
            connection.getresponse().read()
            spent.append(time.monotonic() - began)
    assert sorted(spent)[10] < 0.03  # by Nagle's algorithm it would be 0.04 s


@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n",
        b"GET /a HTTP/1.1\r\nConnection: close\r\n",
        b"GET /short HTTP/1.1\r\n",
        b"HEAD /a HTTP/1.1\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: -1\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n" % (MOST_SKIPPED + 1),
    ],
)
def test_a_connection_is_closed_where_it_would_be_unclear_what_follows(server: BoundedServer, head: bytes) -> None:
    found = asked(server, head + b"\r\nGET /smuggled HTTP/1.1\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Connection: close\r\n" in found
    assert b"smuggled" not in found


@pytest.mark.parametrize("lengths", [("3", "4"), ("3", "3")])
def test_ambiguous_lengths_are_refused(server: BoundedServer, lengths: tuple[str, str]) -> None:
    first, second = (f"Content-Length: {length}\r\n" for length in lengths)
    chunked = "Transfer-Encoding: chunked\r\n"
    for more in (second, chunked):
        found = asked(server, f"POST /echo HTTP/1.1\r\n{first}{more}\r\nabcd".encode())
        assert found.split()[1] == b"400"


def test_a_slow_peer_is_cut_and_a_slow_answer_is_not(server: BoundedServer) -> None:
    with connected(server) as idle, connected(server) as slow, connected(server) as computing:
        slow.sendall(b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nab")
        computing.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        began = time.monotonic()
        assert idle.recv(1) == b""
        assert time.monotonic() - began < 5
        answer = slow.recv(1 << 10)  # to the part that has arrived
        assert not answer or b"Connection: close" in answer
        assert slow.recv(1) == b""
        assert computing.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert time.monotonic() - began > 1


def test_new_connections_replace_none_that_is_being_answered(server: BoundedServer) -> None:
    answers: list[bytes] = []
    with connected(server) as computing:
        computing.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        time.sleep(0.2)
        others = [connected(server) for _ in range(10)]  # four may be open
        reading = threading.Thread(target=lambda: answers.append(computing.recv(100)))
        reading.start()
        reading.join(WAIT_S)
    for other in others:
        other.close()
    assert answers[0].startswith(b"HTTP/1.1 200 OK")


def test_the_end_of_the_server_closes_connections() -> None:
    with http_served("rest", "127.0.0.1:0", application, 4, WAIT_S) as server:
        raw = connected(server)
        raw.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        assert raw.recv(1 << 10).startswith(b"HTTP/1.1 200")
        server.keeps_connections = False
        raw.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        assert b"Connection: close" in raw.recv(1 << 10)
        idle = connected(server)
        idle.sendall(b"GET")
        time.sleep(0.2)
    assert idle.recv(1) == b""
    raw.close()
    idle.close()
