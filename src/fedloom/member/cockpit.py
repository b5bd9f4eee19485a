"""Views of a worker: a screen that repaints, lines of its log, and metrics for Prometheus."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any, get_args

import torch
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

import fedloom
from fedloom.core.logs import structured
from fedloom.core.words import duration, pluralize, rounded_up
from fedloom.engine.metrics import by_label, gauge, metrics_served
from fedloom.federation.activity import LivePhase
from fedloom.federation.worker_record import WorkerRecord, WorkerState

log = logging.getLogger("fedloom.member.cockpit")

REPAINT_S = 0.5
"""Seconds between two looks at the state."""

ROUNDS_EVERY_S = 60.0
"""Minimum interval between lines about rounds."""

TITLES = {"personal": "personal model", "global": "shared model"}
"""Names of models in sentences."""


class Cockpit(WorkerRecord):
    """Record of a worker that is shown (docs/member.md).

    Parameters
    ----------
    worker
        Name of the worker.
    metrics
        ``host:port`` for Prometheus; None: no metrics.
    """

    def __init__(self, worker: str, metrics: str | None = None) -> None:
        super().__init__(in_detail=True)
        self._worker, self._metrics = worker, metrics
        self._evaluated: int | None = None  # rounds of the last lines, and the time of the last one about a round
        self._round, self._said = 0, -ROUNDS_EVERY_S
        self._ended = threading.Event()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the state for the duration of the block: on a screen if standard output is a terminal, and as lines.

        Raise ExperimentError as :func:`~fedloom.engine.metrics.metrics_served`.
        """
        with ExitStack() as stack:
            stack.enter_context(metrics_served(self._metrics, lambda: worker_families(self.state(), self.spent())))
            live = stack.enter_context(self._screen()) if has_screen() else None
            looking = threading.Thread(target=self._look, args=(live,), name="cockpit", daemon=True)
            looking.start()
            try:
                yield
            finally:
                self._ended.set()
                looking.join()

    def _look(self, live: Live | None) -> None:
        while not self._ended.wait(REPAINT_S):
            self._say(self.state())
            if live is not None:
                live.refresh()
        state = self.state()
        self._say(state)
        log.info("the worker ends, %s", _sums_up(state), extra=self._extra("ended", state))

    @contextmanager
    def _screen(self) -> Iterator[Live]:
        """Show a screen; lines of the log appear above it."""
        console = Console(highlight=False, markup=False, emoji=False)
        shared = sys.stderr.isatty()
        shown = [each for each in logging.getLogger().handlers if type(each) is logging.StreamHandler]
        with Live(
            get_renderable=lambda: Group(*screen_lines(self.state(), self._worker, self.spent())),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=shared,
        ) as live:
            before = [each.setStream(sys.stderr) for each in shown] if shared else []
            try:
                yield live
            finally:
                for handler, stream in zip(shown, before, strict=False):
                    handler.setStream(stream)

    def _say(self, state: WorkerState) -> None:
        """Log what has happened since the last lines: evaluations, and rounds at intervals."""
        evaluated = max((max(rounds) for rounds in state.results.values()), default=None)
        if evaluated != self._evaluated and state.asked is None:
            self._evaluated = evaluated
            log.info("evaluated; %s", "; ".join(_results(state)), extra=self._extra("evaluated", state))
        if state.round != self._round and time.monotonic() - self._said >= ROUNDS_EVERY_S:
            self._round, self._said = state.round, time.monotonic()
            log.info("%s; %s", _peer(state), _sums_up(state), extra=self._extra("round", state))

    def _extra(self, event: str, state: WorkerState) -> dict[str, Any]:
        """Return the context of a log line (docs/member.md)."""
        standing, spent = state.standing, self.spent()
        data: dict[str, Any] = {
            "event": event,
            "rounds": None if standing is None else standing.rounds,
            "best_round": None if standing is None else standing.best_round,
            "seconds": {phase: round(seconds, 3) for phase, seconds in state.seconds.items()},
            "sent_bytes": dict(state.sent),
            "received_bytes": dict(state.received),
            "epsilon": None if spent is None else spent[0],
            "delta": None if spent is None else spent[1],
            "unanswered": state.lost,
            "metric": None if state.headline is None else state.headline.name,
            "results": {name: state.own(name) for name in state.results},
        }
        return {"run": state.run, "round": state.round, "data": data}


def has_screen() -> bool:
    """Return whether standard output is a terminal that can repaint, whose user has not asked for JSON."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return terminal and not structured() and "KUBERNETES_SERVICE_HOST" not in os.environ


# --- text


def screen_lines(state: WorkerState, worker: str, spent: tuple[float, float] | None) -> list[Text]:
    """Return the lines of the screen."""
    facts = [("aggregator", _peer(state)), ("clients", _asked(state))]
    facts += [("result", text) for text in _results(state)]
    facts += [("time", _times(state)), ("sent", _bytes(state.sent)), ("received", _bytes(state.received))]
    if spent is not None:
        facts.append(("privacy", f"ε ≤ {rounded_up(spent[0])} at δ = {spent[1]:g}"))
    if state.lost:
        facts.append(("unanswered", f"{pluralize(state.lost, 'question')}; last {state.lost_reason}"))
    heading = Text(f"{worker} · {state.run or 'no run yet'}", "bold")
    return [heading, *(Text(f"{name:<12}{text}", overflow="fold") for name, text in facts)]


def _peer(state: WorkerState) -> str:
    """Return the state of the aggregator, in words."""
    if not state.connected:
        since = f"connection lost since {datetime.fromtimestamp(state.since):%H:%M}, retrying"
        return f"{since if state.run and state.allowed else 'not connected'}: {state.reason}"
    return "connected" if state.standing is None else state.standing.in_words(state.standing_at)


def _asked(state: WorkerState) -> str:
    if state.asked is None:
        return "waiting for a question"
    return f"{'training' if state.asked.purpose == 'train' else 'evaluating'}, round {state.asked.round}"


def _results(state: WorkerState) -> Iterator[str]:
    """Yield the own results of the last evaluation, the personal model's first."""
    shown = state.headline
    for name in sorted(state.results, key=lambda name: name != "personal"):
        assert shown is not None
        own = state.own(name)
        best = f"best {shown.exact(own['best'])} after round {own['best_round']}"
        yield f"{TITLES.get(name, name)}: {shown.title} {shown.exact(own['value'])} after round {own['round']}, {best}"


def _times(state: WorkerState) -> str:
    return ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in state.seconds.items() if seconds)


def _bytes(counts: Any) -> str:
    parts = ", ".join(f"{kind} {decimal(size)}" for kind, size in sorted(counts.items(), key=lambda each: -each[1]))
    return f"{decimal(sum(counts.values()))} ({parts})" if counts else "nothing"


def _sums_up(state: WorkerState) -> str:
    return f"{_times(state)}; sent {_bytes(state.sent)}; received {_bytes(state.received)}"


def worker_families(state: WorkerState, spent: tuple[float, float] | None) -> Iterator[Any]:
    """Yield a worker's state and the (ε, δ) that it has spent as metric families (docs/metrics.md), if known."""
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
