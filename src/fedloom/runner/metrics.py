"""Prometheus metrics of a federation, served on their own port (docs/metrics.md).

They are computed from :class:`~fedloom.federation.activity.Activity` on each scrape, so they agree with ``fedloom
status``. Counters start at zero with each process; Prometheus detects such resets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import fedloom
from fedloom.errors import ExperimentError, argument
from fedloom.federation.activity import Activity, LivePhase
from fedloom.runner.bounded_http import BoundedServer
from fedloom.transport.address import split_address
from fedloom.transport.personalization import ServingLoad
from fedloom.trust.options import Protection


@contextmanager
def metrics_served(address: str | None, families: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Serve metrics over HTTP, in a separate thread, for the duration of the block.

    Parameters
    ----------
    address
        ``host:port``; None: do not serve.
    families
        Called from any thread on each scrape; if it raises, the answer is 500.

    Raise ExperimentError if the address is invalid or cannot be bound, the port is taken, or prometheus-client is not
    installed.
    """
    if address is None:
        yield
        return
    host, port = split_address(address, what=argument("metrics"), lowest=0)
    try:
        import prometheus_client as prometheus
    except ImportError as error:
        raise ExperimentError(
            f"{argument('metrics')} needs prometheus-client, which is not installed.",
            hint="pip install 'fedloom[metrics]'",
            key="metrics",
        ) from error
    registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=registry)
    prometheus.PlatformCollector(registry=registry)
    prometheus.GCCollector(registry=registry)
    registry.register(_Collector(families))
    try:
        server = BoundedServer(host.strip("[]"), port, prometheus.make_wsgi_app(registry))
    except OSError as error:
        raise ExperimentError(
            f"{argument('metrics')} cannot be served on {address}: the port is taken, or the address is not of this "
            "machine.",
            key="metrics",
            found=address,
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    """Collector for ``prometheus_client``; it describes nothing before the first scrape."""

    def __init__(self, families: Callable[[], Iterable[Any]]) -> None:
        self.collect = families

    def describe(self) -> Iterable[Any]:
        return ()


def certificate_end(protection: Protection) -> float | None:
    """Return when the current server certificate expires, in seconds since 1970; None without one."""
    return None if protection.tls is None else protection.tls.value.pair.certificate.ends.timestamp()


def federation_families(
    now: Activity, models: ServingLoad | None = None, certificate_end: float | None = None
) -> Iterator[Any]:
    """Yield an activity as metric families; unknown values are left out.

    Parameters
    ----------
    models
        Load of the model service, if there is one.
    certificate_end
        Expiry of the aggregator's certificate, in seconds since 1970; None without one.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    about = {"run": now.run, "method": now.method, "version": fedloom.__version__}
    yield InfoMetricFamily("fedloom_federation", "What is run.", value=about)
    phases = {name: float(name == now.phase) for name in get_args(LivePhase)}
    yield _labelled(GaugeMetricFamily, "phase", "1 for what is done now, 0 for the rest.", "phase", phases)
    yield from _gauge("paused", "Whether somebody has asked for a pause.", float(now.paused_by is not None))
    yield from _gauge("round", "The last round that is done.", now.round)
    yield from _gauge("rounds_planned", "How many there are to be.", now.rounds)
    yield from _gauge("durable_round", "The last round that a checkpoint holds.", now.durable_round)
    yield from _gauge("durable_timestamp_seconds", "Since when it does.", now.durable_at)

    c = now.clients
    clients = {"roster": c.roster, "observing": c.observing, "connected": c.connected, "absent": c.absent}
    yield _labelled(GaugeMetricFamily, "clients", "Clients by state; one may be in several.", "state", clients)
    yield from _gauge("cohort_clients", "Clients that the last round asked.", c.cohort)
    yield from _gauge("cohort_answered_clients", "Those of them that answered to its end.", c.answered)
    yield from _gauge("awaited_clients", "Clients whose answers are awaited.", now.awaited)
    yield from _gauge("late_clients", "Those of them that take longer than others do.", now.late)
    yield from _gauge("workers", "Workers that are connected.", len(now.workers))

    t = now.totals
    yield from _counter("rounds", "Rounds done.", t.rounds)
    yield from _counter("failed_attempts", "Attempts at rounds that came to nothing.", t.failed_attempts)
    yield from _counter("client_steps", "Local SGD steps of clients in rounds.", t.client_steps)
    yield from _counter("round_seconds", "Wall time of attempts at rounds.", t.seconds)
    yield from _counter("received_bytes", "Bytes from workers.", t.bytes_up)
    yield from _counter("sent_bytes", "Bytes to workers.", t.bytes_down)
    said = "Wall time of attempts by the message that was sent; server: the rest."
    yield _labelled(CounterMetricFamily, "exchange_seconds", said, "message", t.exchanges)
    yield _labelled(CounterMetricFamily, "phase_seconds", "Wall time by what was done.", "phase", t.phases)
    yield _labelled(CounterMetricFamily, "refusals", "What was refused or dropped.", "reason", t.refusals)

    yield from _gauge("train_loss", "Training loss of the last round.", now.train_loss)
    if (measured := now.measured) is not None:
        yield from _gauge("measured_round", "The round of the last evaluation.", measured.round)
        accuracy = GaugeMetricFamily("fedloom_accuracy", "Of the last evaluation.", labels=["group", "statistic"])
        for group, found in sorted(measured.groups.items()):
            for statistic in ("mean", "worst_decile", "pooled"):
                value = getattr(found, f"accuracy_{statistic}")
                if value is not None:
                    accuracy.add_metric([group, statistic], value)
        yield accuracy
        losses = {group: found.loss_mean for group, found in measured.groups.items()}
        yield _labelled(GaugeMetricFamily, "loss", "Mean test loss of the last evaluation.", "group", losses)
    if models is not None:
        yield from serving_families(models)
    yield from _gauge("certificate_end_timestamp_seconds", "When our certificate ends.", certificate_end)


def serving_families(load: ServingLoad, certificate_end: float | None = None) -> Iterator[Any]:
    """Yield the load of the model service as metric families.

    Parameters
    ----------
    certificate_end
        Expiry of the server's certificate, in seconds since 1970; None if reported already, or without one.
    """
    from prometheus_client.core import GaugeMetricFamily

    yield from _gauge("served_round", "The round whose models are handed out.", load.round)
    yield from _counter("models_handed_out", "Models handed out.", load.handed_out)
    yield from _counter("models_refused", "Requests for models that were refused.", load.refused)
    yield from _gauge("models_waiting_clients", "Clients that wait for a tile.", load.waiting)
    yield from _gauge("models_conversations", "Conversations that are open.", load.conversations)
    said = "Of the last models, from a client's last answer to when its model is sent."
    yield _labelled(GaugeMetricFamily, "models_latency_seconds", said, "quantile", load.latency_s)
    yield from _gauge("certificate_end_timestamp_seconds", "When our certificate ends.", certificate_end)


def _gauge(name: str, said: str, value: float | None) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    if value is not None:
        yield GaugeMetricFamily(f"fedloom_{name}", said, value=value)


def _counter(name: str, said: str, value: float | None) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    if value is not None:
        yield CounterMetricFamily(f"fedloom_{name}", said, value=value)


def _labelled(family: Any, name: str, said: str, label: str, values: Mapping[str, float | None]) -> Any:
    found = family(f"fedloom_{name}", said, labels=[label])
    for key, value in sorted(values.items()):
        if value is not None:
            found.add_metric([key], value)
    return found
