"""Metrics of a worker for Prometheus (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch

import fedloom
from fedloom.engine.metrics import by_label, gauge
from fedloom.federation.activity import LivePhase
from fedloom.federation.worker_record import WorkerState


def worker_families(state: WorkerState, spent: tuple[float, float] | None) -> Iterator[Any]:
    """Yield a worker's state and the (ε, δ) that it has spent as metric families. Unknown values are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    known = {"run": state.run, "version": fedloom.__version__}
    yield InfoMetricFamily("fedloom_worker", "Run and version.", value=known)
    yield from gauge("worker_connected", "1 if the worker is connected.", float(state.connected))
    yield from gauge("worker_allowed", "0 if the member's policy keeps it disconnected.", float(state.allowed))
    if (standing := state.standing) is not None:
        phases = {name: float(name == standing.phase) for name in get_args(LivePhase)}
        yield by_label(GaugeMetricFamily, "worker_federation_phase", "Phase: 1, others: 0.", "phase", phases)
        yield from gauge("worker_round", "Last round that the federation has completed.", standing.round)
        yield from gauge("worker_rounds_planned", "Planned number of rounds.", standing.rounds)
        yield from gauge("worker_best_round", "Best evaluated round.", standing.best_round)
    yield from gauge("worker_round_timestamp_seconds", "Time of the round's last change.", state.round_at)
    text = "Wall time by phase."
    yield by_label(CounterMetricFamily, "worker_seconds", text, "phase", state.seconds)
    yield by_label(CounterMetricFamily, "worker_sent_bytes", "Bytes to the aggregator.", "kind", state.sent)
    yield by_label(CounterMetricFamily, "worker_received_bytes", "Bytes from the aggregator.", "kind", state.received)
    yield CounterMetricFamily("fedloom_worker_unanswered", "Questions that a client did not answer.", value=state.lost)
    if state.headline is not None:
        labels, values = ["metric", "percent", "model", "statistic"], {"last": "value", "best": "best"}
        family = GaugeMetricFamily("fedloom_worker_headline", "Mean of the own clients, test examples.", labels=labels)
        about = state.headline.name, str(state.headline.percent).lower()
        for name in sorted(state.results):
            for statistic, key in values.items():
                family.add_metric([*about, name, statistic], state.own(name)[key])
        yield family
    if spent is not None:
        yield from gauge("worker_privacy_epsilon", "Largest ε that a client has spent in this run.", spent[0])
        yield from gauge("worker_privacy_delta", "δ of that ε.", spent[1])
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        used = {str(i): float(torch.cuda.memory_reserved(i)) for i in devices}
        yield by_label(GaugeMetricFamily, "worker_gpu_memory_bytes", "Memory that torch holds.", "device", used)
        try:
            load = {str(i): torch.cuda.utilization(i) / 100 for i in devices}
        except (ModuleNotFoundError, RuntimeError):  # the driver's library is not installed, or does not know
            return
        yield by_label(GaugeMetricFamily, "worker_gpu_utilization", "Share of time in use.", "device", load)
