"""The port for probes: it answers in plaintext as long as the event loop runs, and serves only health checks."""

from __future__ import annotations

import signal
import socket
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transport_support import make_aggregator

from fedloom.errors import ExperimentError
from fedloom.runner.stop_request import StopRequest
from fedloom.transport.control import CONTROL, WATCH
from fedloom.transport.stream import SERVICE
from fedloom.transport.wire import control_pb2 as wire


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_the_health_port_serves_only_probes() -> None:
    address = f"127.0.0.1:{free_port()}"
    aggregator = make_aggregator(health=address)
    aggregator.start("127.0.0.1:0")
    try:
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as refused:
                next(channel.unary_stream(f"/{CONTROL}/{WATCH}")(wire.WatchRequest().SerializeToString()))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        aggregator.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(address.rpartition(":")[2])))  # the port is free again


def probe(address: str, service: str = "") -> float:
    """Probe as the kubelet does, with a separate connection; return the seconds it took."""
    started = time.monotonic()
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    return time.monotonic() - started


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and an empty settings frame


@pytest.mark.parametrize("sent", [b"", b"PRI * HT", PREFACE], ids=["nothing", "half a greeting", "a greeting"])
def test_idle_connections_do_not_block_a_probe(sent: bytes) -> None:
    address = f"127.0.0.1:{free_port()}"
    aggregator = make_aggregator(health=address)
    aggregator.start("127.0.0.1:0")
    idle = []
    try:
        for _ in range(100):
            idle.append(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5))
            idle[-1].sendall(sent)
        assert probe(address) < 3
        assert probe(address, SERVICE) < 3
    finally:
        for each in idle:
            each.close()
        aggregator.stop()


def test_health_watchers_are_notified_of_a_shutdown() -> None:
    """Also after another watcher has left, which once consumed the notification."""
    address = f"127.0.0.1:{free_port()}"
    aggregator = make_aggregator(health=address)
    aggregator.start("127.0.0.1:0")
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        stays, leaves = health.Watch(asked, timeout=20), health.Watch(asked, timeout=20)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert [next(stays).status, next(leaves).status] == [serving, serving]
        leaves.cancel()
        time.sleep(0.2)
        threading.Timer(0.1, aggregator.stop).start()
        assert next(stays).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_taken_health_port_is_reported_before_serving() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ExperimentError) as refused:
            make_aggregator(health=f"127.0.0.1:{port}").start("127.0.0.1:0")
        assert f"port {port}" in str(refused.value)


def test_a_lingering_process_waits_for_a_signal() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,)).start()
    stop.wait()
    assert stop.event.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
