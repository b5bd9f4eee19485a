"""The HTTP server keeps connections, limits slow peers but not slow answers, and closes the oldest of too many."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from fedloom.transport.http_server import REQUEST_BYTES, HttpLimits, http_served

WAIT_S = 30
HOST = b"Host: a\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body, or do what the path says."""
    assert scope["type"] == "http"
    path, body, more = scope["path"], b"", True
    while path == "/echo" and more:
        event = await receive()
        body, more = body + event.get("body", b""), event.get("more_body", False)
    if path == "/slow":
        await asyncio.sleep(1.5)
    body = {"/large": bytes(32 << 20)}.get(path, body or path.encode())
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port() -> Iterator[int]:
    with http_served("rest", "127.0.0.1:0", application, HttpLimits(4, 0.6)) as port:
        yield port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def read_to_end(raw: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    found = b""
    try:
        while piece := raw.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_a_connection_carries_several_requests(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        sockets = set()
        for path, body in (("/echo", b"one"), ("/echo", b"two"), ("/a", None)):
            connection.request("POST", path, body)
            answer = connection.getresponse()
            sockets.add(id(connection.sock))
            assert (answer.version, answer.read()) == (11, body if path == "/echo" else path.encode())
        assert len(sockets) == 1
        connection.request("POST", "/echo", b"x" * 9, {"Expect": "100-continue"})
        assert connection.getresponse().read() == b"x" * 9


def test_answers_are_not_delayed(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        spent = []
        for _ in range(20):
            began = time.monotonic()
            connection.request("GET", "/a")
            connection.getresponse().read()
            spent.append(time.monotonic() - began)
    assert sorted(spent)[10] < 0.03  # by Nagle's algorithm it would be 0.04 s


@pytest.mark.parametrize(
    "more",
    [b"Content-Length: 3\r\nContent-Length: 4\r\n", b"Content-Length: -1\r\n", b"x" * (REQUEST_BYTES + 1)],
)
def test_ambiguous_lengths_and_large_headers_are_refused(port: int, more: bytes) -> None:
    with connected(port) as raw:
        raw.sendall(b"POST /echo HTTP/1.1\r\n" + HOST + more + b"\r\nabcd")
        assert read_to_end(raw).split()[1] == b"400"


def test_a_slow_peer_is_cut_and_a_slow_answer_is_not(port: int) -> None:
    with connected(port) as idle, connected(port) as slow, connected(port) as computing, connected(port) as deaf:
        slow.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab")
        computing.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_to_end(idle) == read_to_end(slow) == b""
        assert computing.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert 0 < len(read_to_end(deaf)) < 32 << 20


def test_new_connections_replace_none_that_is_being_answered(port: int) -> None:
    answers: list[bytes] = []
    with connected(port) as computing:
        computing.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.2)
        others = [connected(port) for _ in range(10)]  # four may be open
        reading = threading.Thread(target=lambda: answers.append(computing.recv(100)))
        reading.start()
        reading.join(WAIT_S)
    for other in others:
        other.close()
    assert answers[0].startswith(b"HTTP/1.1 200 OK")


def test_the_end_of_the_server_closes_connections_and_frees_the_port() -> None:
    with http_served("rest", "127.0.0.1:0", application, HttpLimits(4, WAIT_S)) as port:
        idle, partial = connected(port), connected(port)
        partial.sendall(b"GET")
        time.sleep(0.2)
    assert read_to_end(idle) == read_to_end(partial) == b""
    with http_served("rest", f"127.0.0.1:{port}", application):
        pass
