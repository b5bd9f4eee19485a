"""Traces of a real run over sockets, at an OTLP collector: each client's span is in its exchange."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from facts import tells
from forked import run
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from run_processes import experiment, fedloom, final, scores

from fedloom.core import tracing

CLIENTS = 4


@dataclass(frozen=True)
class Seen:
    """A received span."""

    service: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    about: Mapping[str, Any]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP receiver."""

    address: str = ""
    spans: list[Seen] = field(default_factory=list)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            reported = {each.key: each.value.string_value for each in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                about = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
                seen = Seen(
                    reported["service.name"], span.name, span.trace_id, span.span_id, span.parent_span_id, about
                )
                self.spans.append(seen)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    found.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield found
    server.stop(None).wait()


@pytest.mark.slow
def test_client_spans_are_children_of_their_rounds_exchange(
    collector: Collector, tmp_path: Path, fresh_root: Path
) -> None:
    """Results equal those of a run without tracing, also when the collector is absent."""
    reported = experiment(
        tmp_path, fresh_root, federation={"rounds": 2, "clients_per_round": CLIENTS, "checkpoint_every_s": 0}
    )

    def ran(name: str, **environment: str) -> Path:
        fedloom("run", reported, "--workers", 2, "--out", tmp_path / name, environment=environment)
        return tmp_path / name

    plain = ran("plain")
    traced = ran("traced", FEDLOOM_TRACING="true", OTEL_EXPORTER_OTLP_ENDPOINT=collector.address)
    lost = ran("lost", FEDLOOM_TRACING="1", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert final(plain) == final(traced) == final(lost)
    assert scores(plain) == scores(traced) == scores(lost)

    by_id = {span.id: span for span in collector.spans}
    work = [span for span in collector.spans if span.name.startswith("client ")]
    assert {span.service for span in work} == {"fedloom-worker"}
    for span in work:
        exchange = by_id[span.parent]
        root = by_id[exchange.parent]
        assert (exchange.service, root.service, root.parent) == ("fedloom-run", "fedloom-run", b"")
        assert span.trace == exchange.trace == root.trace
        assert exchange.name.split()[1] == span.name.split()[1]
        shared = [f"fedloom.{key}" for key in ("round", "attempt", "conversation", "exchange")]
        assert [span.about[key] for key in shared] == [exchange.about[key] for key in shared]
        assert root.name == ("round" if exchange.about["fedloom.attempt"] else "evaluation")
        assert root.about["fedloom.round"] == exchange.about["fedloom.round"]
    # PeFLL's round: three exchanges, each with every client of the cohort, once.
    rounds = [span for span in collector.spans if span.name == "round"]
    assert [span.about["fedloom.round"] for span in rounds] == [1, 2]
    for of in rounds:
        inside = [span for span in work if span.trace == of.trace]
        pairs = [(span.about["fedloom.exchange"], span.about["fedloom.client"]) for span in inside]
        assert len(pairs) == len({*pairs}) == 3 * CLIENTS


def test_disabled_tracing_imports_nothing_and_logs_nothing() -> None:
    """Without tracing there is no context and no attribute, and every span is one shared object."""
    assert tracing.here() == ""
    assert tracing.span("round", round=1) is tracing.span("exchange") is tracing.within("00-1-2-01")
    code = "import sys, fedloom.cli.main, fedloom.engine.worker; print('opentelemetry' in sys.modules)"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout == "False\n"


def test_another_trace_protocol_is_rejected(tmp_path: Path) -> None:
    environment = {"FEDLOOM_TRACING": "1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    output = fedloom("run", tmp_path, code=2, environment=environment)
    assert tells(output, "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf")
