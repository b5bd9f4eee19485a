"""The port for probes: it answers in plaintext as long as the event loop runs, and serves only health checks."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from ports import free_address
from transport_support import make_aggregator

from fedloom.engine.stop_request import StopRequest
from fedloom.errors import ExperimentError
from fedloom.transport.server import Health


def probe(address: str, path: str = "/healthz") -> int:
    """Probe as the kubelet does, with a separate connection."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_health_port_serves_only_probes() -> None:
    address = free_address()
    aggregator = make_aggregator(health=address)
    aggregator.start("127.0.0.1:0")
    try:
        assert (probe(address), probe(address, "/metrics")) == (200, 404)
    finally:
        aggregator.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(address.rpartition(":")[2])))  # the port is free again


@pytest.mark.parametrize("sent", [b"", b"GET /hea"], ids=["nothing", "half a request"])
def test_idle_connections_do_not_block_a_probe(sent: bytes) -> None:
    address = free_address()
    aggregator = make_aggregator(health=address)
    aggregator.start("127.0.0.1:0")
    idle = []
    try:
        for _ in range(100):
            idle.append(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5))
            idle[-1].sendall(sent)
        assert probe(address) == 200
    finally:
        for each in idle:
            each.close()
        aggregator.stop()


def test_probes_fail_once_the_server_shuts_down() -> None:
    health = Health("fedloom.v1.Federation")
    answers = []

    async def send(event: dict[str, Any]) -> None:
        answers.append(event.get("status"))

    asyncio.run(health.probe({"type": "http", "path": "/healthz"}, None, send))
    health.shut_down()
    asyncio.run(health.probe({"type": "http", "path": "/healthz"}, None, send))
    assert answers == [200, None, 503, None]


def test_a_taken_health_port_is_reported_before_serving() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ExperimentError) as refused:
            make_aggregator(health=f"127.0.0.1:{port}").start("127.0.0.1:0")
        assert (refused.value.key, refused.value.found) == ("health", f"127.0.0.1:{port}")


def test_a_lingering_process_waits_for_a_signal() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,)).start()
    stop.wait()
    assert stop.event.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
