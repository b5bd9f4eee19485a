"""Metrics for Prometheus: what a federation is doing, as a port of its own tells it (docs/metrics.md).

They are made of :class:`~fedloom.federation.activity.Activity` when somebody asks, so that they say what ``fedloom
status`` says. Sums are of this process: Prometheus knows by itself when a counter begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import fedloom
from fedloom.errors import ExperimentError
from fedloom.federation.activity import Activity, Phase
from fedloom.transport.address import split_address
from fedloom.trust.options import Protection


@contextmanager
def metrics_served(address: str | None, activity: Callable[[], Activity], protection: Protection) -> Iterator[None]:
    """Serve metrics in the block, over HTTP and in a thread of their own.

    Parameters
    ----------
    address
        ``host:port``; None: nowhere.
    activity
        Is called by any thread, with each scrape; one that it fails is answered with 500.
    protection
        Whose certificate has an end.

    Raises
    ------
    ExperimentError
        If it is no address, the port is taken, the address cannot be bound, or what it takes is not installed.
    """
    if address is None:
        yield
        return
    host, port = split_address(address, what="--metrics", lowest=0)
    try:
        import prometheus_client as prometheus
    except ImportError as error:
        raise ExperimentError(
            "--metrics: found without prometheus-client", hint="pip install 'fedloom[metrics]'"
        ) from error
    registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=registry)
    prometheus.PlatformCollector(registry=registry)
    prometheus.GCCollector(registry=registry)
    registry.register(Metrics(activity, protection))
    try:
        server, thread = prometheus.start_http_server(port, host.strip("[]"), registry)
    except OSError as error:
        raise ExperimentError(
            f"--metrics: cannot serve on {address}: the port is taken or the address is not of this machine"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Metrics:
    """A collector, as ``prometheus_client`` knows them."""

    def __init__(self, activity: Callable[[], Activity], protection: Protection) -> None:
        self._activity = activity
        self._protection = protection

    def describe(self) -> Iterable[Any]:
        """Nothing is known before somebody asks."""
        return ()

    def collect(self) -> Iterator[Any]:
        """What the federation is doing now, family by family."""
        yield from families(self._activity(), self._certificate_end())

    def _certificate_end(self) -> float | None:
        tls = self._protection.tls
        return None if tls is None else tls.value.pair.certificate.ends.timestamp()


def families(now: Activity, certificate_end: float | None = None) -> Iterator[Any]:
    """Return an activity as families of metrics; what is not known is left out.

    Parameters
    ----------
    certificate_end
        Of the aggregator's certificate, in seconds since 1970; None without one.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    def gauge(name: str, said: str, value: float | None) -> Iterator[Any]:
        if value is not None:
            yield GaugeMetricFamily(f"fedloom_{name}", said, value=value)

    def counter(name: str, said: str, value: float | None) -> Iterator[Any]:
        if value is not None:
            yield CounterMetricFamily(f"fedloom_{name}", said, value=value)

    def labelled(family: Any, name: str, said: str, label: str, values: Mapping[str, float | None]) -> Any:
        found = family(f"fedloom_{name}", said, labels=[label])
        for key, value in sorted(values.items()):
            if value is not None:
                found.add_metric([key], value)
        return found

    about = {"run": now.run, "method": now.method, "version": fedloom.__version__}
    yield InfoMetricFamily("fedloom_federation", "What is run.", value=about)
    phases = {name: float(name == now.phase) for name in get_args(Phase)}
    yield labelled(GaugeMetricFamily, "phase", "1 for what is done now, 0 for the rest.", "phase", phases)
    yield from gauge("paused", "Whether somebody has asked for a pause.", float(now.paused_by is not None))
    yield from gauge("round", "The last round that is done.", now.round)
    yield from gauge("rounds_planned", "How many there are to be.", now.rounds)
    yield from gauge("durable_round", "The last round that a checkpoint holds.", now.durable_round)
    yield from gauge("durable_timestamp_seconds", "Since when it does.", now.durable_at)

    c = now.clients
    clients = {"roster": c.roster, "observing": c.observing, "connected": c.connected, "absent": c.absent}
    yield labelled(GaugeMetricFamily, "clients", "Clients by state; one may be in several.", "state", clients)
    yield from gauge("cohort_clients", "Clients that the last round asked.", c.cohort)
    yield from gauge("cohort_answered_clients", "Those of them that answered to its end.", c.answered)
    yield from gauge("awaited_clients", "Clients whose answers are awaited.", now.awaited)
    yield from gauge("late_clients", "Those of them that take longer than others do.", now.late)
    yield from gauge("workers", "Workers that are connected.", len(now.workers))

    t = now.totals
    yield from counter("rounds", "Rounds done.", t.rounds)
    yield from counter("failed_attempts", "Attempts at rounds that came to nothing.", t.failed_attempts)
    yield from counter("client_steps", "Local SGD steps of clients in rounds.", t.client_steps)
    yield from counter("round_seconds", "Wall time of attempts at rounds.", t.seconds)
    yield from counter("received_bytes", "Bytes from workers.", t.bytes_up)
    yield from counter("sent_bytes", "Bytes to workers.", t.bytes_down)
    said = "Wall time of attempts by the message that was sent; server: the rest."
    yield labelled(CounterMetricFamily, "exchange_seconds", said, "message", t.exchanges)
    yield labelled(CounterMetricFamily, "phase_seconds", "Wall time by what was done.", "phase", t.phases)
    yield labelled(CounterMetricFamily, "refusals", "What was refused or dropped.", "reason", t.refusals)

    yield from gauge("train_loss", "Training loss of the last round.", now.train_loss)
    if (measured := now.measured) is not None:
        yield from gauge("measured_round", "The round of the last evaluation.", measured.round)
        accuracy = GaugeMetricFamily("fedloom_accuracy", "Of the last evaluation.", labels=["group", "statistic"])
        for group, found in sorted(measured.groups.items()):
            for statistic in ("mean", "worst_decile", "pooled"):
                value = getattr(found, f"accuracy_{statistic}")
                if value is not None:
                    accuracy.add_metric([group, statistic], value)
        yield accuracy
        losses = {group: found.loss_mean for group, found in measured.groups.items()}
        yield labelled(GaugeMetricFamily, "loss", "Mean test loss of the last evaluation.", "group", losses)
    yield from gauge("certificate_end_timestamp_seconds", "When the aggregator's certificate ends.", certificate_end)
