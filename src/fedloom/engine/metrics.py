"""Prometheus metrics of a federation, served on their own port (docs/metrics.md).

They are computed from :class:`~fedloom.federation.activity.Activity` on each scrape, so they agree with ``fedloom
status``. Counters start at zero in each process; Prometheus detects such resets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import fedloom
from fedloom.errors import ExperimentError, argument
from fedloom.federation.activity import Activity, LastEvaluation, LivePhase
from fedloom.security.options import Protection
from fedloom.transport.http_server import http_served
from fedloom.transport.personalization import ServingLoad


@contextmanager
def metrics_served(address: str | None, families: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Serve metrics over HTTP, in a separate thread, for the duration of the block.

    ``address`` is ``host:port``; None: do not serve. ``families`` is called from any thread on each scrape; if it
    raises, the answer is 500.

    Raise ExperimentError if the address is invalid or cannot be bound, the port is taken, or prometheus-client is not
    installed.
    """
    if address is None:
        yield
        return
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
    with http_served("metrics", address, prometheus.make_asgi_app(registry)):
        yield


class _Collector:
    """Collector for ``prometheus_client``; it describes nothing before the first scrape."""

    def __init__(self, families: Callable[[], Iterable[Any]]) -> None:
        self.collect = families

    def describe(self) -> Iterable[Any]:
        return ()


def certificate_end(protection: Protection) -> float | None:
    """Return the expiry of the current server certificate, in seconds since 1970; None without one."""
    return None if protection.tls is None else protection.tls.value.pair.certificate.ends.timestamp()


def federation_families(
    now: Activity, models: ServingLoad | None = None, certificate_end: float | None = None
) -> Iterator[Any]:
    """Yield an activity, the load of a model service and the expiry of the server's certificate as metric families.

    ``certificate_end`` is in seconds since 1970. Unknown values are left out.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    labels = {"run": now.run, "method": now.method, "version": fedloom.__version__}
    yield InfoMetricFamily("fedloom_federation", "Run, method and version.", value=labels)
    phases = {name: float(name == now.phase) for name in get_args(LivePhase)}
    yield by_label(GaugeMetricFamily, "phase", "Current phase: 1, others: 0.", "phase", phases)
    yield from gauge("paused", "1 if a pause has been requested.", float(now.paused_by is not None))
    yield from gauge("round", "Last completed round.", now.round)
    yield from gauge("rounds_planned", "Planned number of rounds.", now.rounds)
    yield from gauge("durable_round", "Last round with a checkpoint.", now.durable_round)
    yield from gauge("durable_timestamp_seconds", "Time of the last checkpoint.", now.durable_at)

    c = now.clients
    clients = {"roster": c.roster, "observing": c.observing, "connected": c.connected, "absent": c.absent}
    yield by_label(GaugeMetricFamily, "clients", "Clients by state; one may be in several.", "state", clients)
    yield from gauge("cohort_clients", "Clients sampled in the last round.", c.cohort)
    yield from gauge("cohort_answered_clients", "Clients that completed the last round.", c.answered)
    yield from gauge("awaited_clients", "Clients whose answers are awaited.", now.awaited)
    yield from gauge("late_clients", "Awaited clients that take longer than usual.", now.late)
    yield from gauge("workers", "Connected workers.", len(now.workers))

    t = now.totals
    yield from _counter("rounds", "Completed rounds.", t.rounds)
    yield from _counter("failed_attempts", "Failed attempts at rounds.", t.failed_attempts)
    yield from _counter("client_steps", "Local SGD steps of clients in rounds.", t.client_steps)
    yield from _counter("round_seconds", "Wall time of attempts at rounds.", t.seconds)
    yield from _counter("received_bytes", "Bytes from workers.", t.bytes_up)
    yield from _counter("sent_bytes", "Bytes to workers.", t.bytes_down)
    text = "Wall time of attempts by message; server: the rest."
    yield by_label(CounterMetricFamily, "exchange_seconds", text, "message", t.exchanges)
    yield by_label(CounterMetricFamily, "phase_seconds", "Wall time by phase.", "phase", t.phases)
    yield by_label(CounterMetricFamily, "refusals", "Refused or dropped parts.", "reason", t.refusals)

    yield from gauge("train_loss", "Training loss of the last round.", now.train_loss)
    if (last_evaluation := now.measured) is not None:
        yield from gauge("measured_round", "Round of the last evaluation.", last_evaluation.round)
        yield from _of_evaluation(last_evaluation)
        losses = {group: group_figures.loss_mean for group, group_figures in last_evaluation.groups.items()}
        yield by_label(GaugeMetricFamily, "loss", "Mean test loss in the last evaluation.", "group", losses)
    if (spent := now.privacy) is not None:
        yield from gauge("privacy_epsilon", "ε of training so far, toward readers of the models.", spent.epsilon)
        yield from gauge("privacy_epsilon_members", "ε of training so far, toward members.", spent.epsilon_members)
        text = "ε of training so far, toward the aggregator."
        yield from gauge("privacy_epsilon_aggregator", text, spent.epsilon_aggregator)
        yield from gauge("privacy_delta", "δ of that ε.", spent.delta)
        yield from gauge("privacy_sums", "Noisy sums that the ε is about.", spent.sums)
        yield from gauge("privacy_budget", "Largest ε, before which training ends.", spent.budget)
    if models is not None:
        yield from serving_families(models)
    yield from gauge("certificate_end_timestamp_seconds", "Expiry of the server's certificate.", certificate_end)


def _of_evaluation(last_evaluation: LastEvaluation) -> Iterator[Any]:
    """Yield the accuracies of an evaluation, and its headline metric."""
    from prometheus_client.core import GaugeMetricFamily

    labels = ["group", "statistic"]
    accuracy = GaugeMetricFamily("fedloom_accuracy", "Accuracy in the last evaluation.", labels=labels)
    headline = GaugeMetricFamily(
        "fedloom_headline", "Headline metric in the last evaluation.", labels=["metric", "percent", *labels]
    )
    values = [last_evaluation.metric, str(last_evaluation.percent).lower()]
    for group, figures in sorted(last_evaluation.groups.items()):
        for statistic in ("mean", "worst_decile", "pooled"):
            if (value := getattr(figures, f"accuracy_{statistic}")) is not None:
                accuracy.add_metric([group, statistic], value)
            if (value := getattr(figures, statistic)) is not None:
                headline.add_metric([*values, group, statistic], value)
    yield accuracy
    yield headline


def serving_families(load: ServingLoad, certificate_end: float | None = None) -> Iterator[Any]:
    """Yield the load of the model service, and the expiry of its certificate if given, as metric families."""
    from prometheus_client.core import GaugeMetricFamily

    yield from gauge("served_round", "Round whose models are served.", load.round)
    yield from _counter("models_handed_out", "Models handed out.", load.handed_out)
    yield from _counter("models_refused", "Refused requests for models.", load.refused)
    yield from gauge("models_waiting_clients", "Clients waiting for their model to be computed.", load.waiting)
    yield from gauge("models_conversations", "Open conversations.", load.conversations)
    text = "Time from a client's last answer to its model, over the last models."
    yield by_label(GaugeMetricFamily, "models_latency_seconds", text, "quantile", load.latency_s)
    yield from gauge("certificate_end_timestamp_seconds", "Expiry of the server's certificate.", certificate_end)


def gauge(name: str, text: str, value: float | None) -> Iterator[Any]:
    """Yield a gauge, unless its value is unknown."""
    from prometheus_client.core import GaugeMetricFamily

    if value is not None:
        yield GaugeMetricFamily(f"fedloom_{name}", text, value=value)


def _counter(name: str, text: str, value: float | None) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    if value is not None:
        yield CounterMetricFamily(f"fedloom_{name}", text, value=value)


def by_label(family: Any, name: str, text: str, label: str, values: Mapping[str, float | None]) -> Any:
    """Return a family with a sample for each known value."""
    result = family(f"fedloom_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        if value is not None:
            result.add_metric([key], value)
    return result
