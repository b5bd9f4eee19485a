"""The port for probes: it answers in plaintext as long as the event loop runs, and serves nothing but health."""

from __future__ import annotations

import signal
import socket
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transport_support import make_aggregator

from fedloom.errors import ExperimentError
from fedloom.runner.stop_request import StopRequest
from fedloom.transport.stream import OBSERVATION, SERVICE, WATCH
from fedloom.transport.wire import federation_pb2 as wire


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_probes_are_answered_on_a_port_of_their_own_and_nothing_else_is() -> None:
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
                next(channel.unary_stream(f"/{OBSERVATION}/{WATCH}")(wire.WatchRequest().SerializeToString()))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        aggregator.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(address.rpartition(":")[2])))  # it is free


def test_a_taken_port_for_probes_is_said_before_anything_is_served() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ExperimentError) as refused:
            make_aggregator(health=f"127.0.0.1:{port}").start("127.0.0.1:0")
        assert f"port {port}" in str(refused.value)


def test_who_stays_waits_for_a_signal() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,)).start()
    stop.wait()
    assert stop.event.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
