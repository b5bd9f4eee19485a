"""Tracing of a run by OpenTelemetry, off by default (docs/metrics.md).

A trace is a round or an evaluation. The children of the aggregator's span of an exchange are the workers' spans for
each client: a request carries the context of its exchange in W3C format. While tracing is off, nothing of
OpenTelemetry is imported, a span costs one check of a variable, and requests carry no context.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import fedloom
from fedloom.errors import ExperimentError, argument

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
ATTEMPT_S = 5.0
"""Default seconds to try a collector that does not answer, unless the environment sets a timeout."""

_provider: TracerProvider | None = None
_tracer: Tracer | None = None
_OFF: AbstractContextManager[None] = nullcontext()


def start_tracing(service: str) -> None:
    """Trace until :func:`stop_tracing`, to the collector that OpenTelemetry's environment variables name.

    If the collector is slow or absent, spans are lost; there is no other effect.

    Raise ExperimentError if OpenTelemetry is not installed, or the environment selects a protocol other than OTLP over
    gRPC.

    Parameters
    ----------
    service
        Name of the process, unless ``OTEL_SERVICE_NAME`` sets one.
    """
    global _provider, _tracer
    for name in PROTOCOLS:
        if os.environ.get(name, "grpc") != "grpc":
            raise ExperimentError(f"{name} must be grpc (got {os.environ[name]}).")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ExperimentError(
            f"{argument('tracing')} needs OpenTelemetry, which is not installed.",
            hint="pip install 'fedloom[tracing]'",
            key="tracing",
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME") or service
    attributes = {"service.name": service, "service.version": fedloom.__version__}
    is_configured = any(
        os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
    )
    _provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=None if is_configured else ATTEMPT_S)))
    _tracer = _provider.get_tracer("fedloom", fedloom.__version__)


def stop_tracing() -> None:
    """Send the remaining spans and stop tracing."""
    global _provider, _tracer
    if _provider is not None:
        _provider.shutdown()
    _provider = _tracer = None


def span(name: str, **attributes: str | int | float) -> AbstractContextManager[Span | None]:
    """Time a block as a child of the current span. Yields None while tracing is off.

    Parameters
    ----------
    name
        One of a small set of names.
    attributes
        Further attributes, each recorded as ``fedloom.KEY``.
    """
    if _tracer is None:
        return _OFF
    return _tracer.start_as_current_span(
        name, attributes={f"fedloom.{key}": value for key, value in attributes.items()}
    )


def here() -> str:
    """Return the context of the current span as W3C ``traceparent``; empty while tracing is off."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def within(parent: str) -> AbstractContextManager[None]:
    """Make spans children of another process's span, given its :func:`here`; an invalid context is ignored."""
    return _OFF if _tracer is None or not parent else _within(parent)


@contextmanager
def _within(parent: str) -> Iterator[None]:
    from opentelemetry.context import attach, detach
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = attach(TraceContextTextMapPropagator().extract({"traceparent": parent}))
    try:
        yield
    finally:
        detach(token)
