"""Aggregator's cost for 100 to 100,000 registered clients.

    .venv/bin/python research/benchmarks/registered_clients.py [--json FILE]

Two worker processes announce all clients; the manifest is synthetic (its clients have no shards). Measured are
joining, the parts of a round that could grow with the number of clients, a round of 20 clients that answer at once with
85,822 parameters (``echo.py``), and PeFLL's Algorithm 1 with the real server algorithm (its hypernetwork makes models)
and clients that answer at once with a fixed descriptor: personalized models per second, latency, memory. Each number of
clients has its own process, so that its memory is its own; ratios are to the smallest number in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from aggregator_overhead import Rounds, judge
from common import MIB, describe, machine, made_up_manifest, percentile, resident_bytes, table, write_json
from echo import CLASSES, ECHO, INSTANT_PEFLL, federation, names

from fedloom.data.federated import Manifest
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.cohort import RoundConfig
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.messages import Metrics, answer_shapes
from fedloom.runs.journal import Attempt
from fedloom.transport.aggregator import Aggregator

D = 85_822


def timed(work: Callable[[], Any], repetitions: int = 1) -> float:
    """Return the median seconds."""
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(clients: int, seconds: float) -> dict[str, float]:
    """Return all figures for one number of clients, measured in this process."""
    torch.set_num_threads(1)
    figures: dict[str, float] = {"rss_imports": resident_bytes(os.getpid())}
    manifest = made_up_manifest("made-up", names(clients), CLASSES, 10)
    figures["manifest_write_s"] = timed(manifest.to_json)
    text = manifest.to_json()
    figures["manifest_bytes"] = len(text)
    figures["manifest_read_s"] = timed(lambda: Manifest.from_json(text))
    figures["class_proportions_s"] = timed(manifest.class_proportions)
    roster = manifest.roster
    figures["rss_manifest"] = resident_bytes(os.getpid())
    sizes = {entry.id: entry.train for entry in manifest.clients}
    with federation(ECHO, clients, workers=2) as aggregator:
        figures["wait_for_s"] = timed(lambda: aggregator.wait_for(roster, 10))
        figures["rss_joined"] = resident_bytes(os.getpid())
        with tempfile.TemporaryDirectory() as scratch:
            rounds = Rounds(aggregator, clients, 20, D, Path(scratch))
            figures["round_s"] = statistics.median([rounds.make(t) for t in range(1, 16)][3:])
        figures["sample_s"] = timed(lambda: _session(aggregator, roster, sizes, {}, 1).sample(20), 5)
        figures["rss_rounds"] = resident_bytes(os.getpid())
    with federation(INSTANT_PEFLL, clients, workers=2) as aggregator:
        task: Any = None  # it makes its own
        server = INSTANT_PEFLL.server(None, task, torch.Generator().manual_seed(1))
        for size in (1, 20):
            latencies = _latencies(aggregator, server, roster, sizes, size, seconds)
            figures[f"p50_{size}_s"] = percentile(latencies, 0.5)
            figures[f"p95_{size}_s"] = percentile(latencies, 0.95)
            figures[f"models_per_s_{size}"] = size * len(latencies) / sum(latencies)
        figures["rss_personalized"] = resident_bytes(os.getpid())
        figures["rss_peak"] = resident_bytes(os.getpid(), "VmHWM")
    return figures


def _session(aggregator: Aggregator, roster: Any, sizes: Any, shapes: Any, number: int) -> RoundAttempt:
    rules = RoundConfig(1, 20, 60.0, 1, shapes, threading.Event(), judge)
    return RoundAttempt(Attempt(number, 0), "evaluate", roster, sizes, aggregator, rules, _HELPER)


_HELPER = ThreadPoolExecutor(1)


def _latencies(aggregator: Aggregator, server: Any, roster: Any, sizes: Any, size: int, seconds: float) -> list[float]:
    """Run conversations of Algorithm 1 one after another, each with other clients; return the seconds of each."""
    found: list[float] = []
    ends = time.perf_counter() + seconds
    number = size * 1_000_000
    shapes = {
        **answer_shapes(INSTANT_PEFLL.messages, server.sizes),
        Metrics: EvaluationPlan.of_classes(CLASSES).shapes(1),
    }
    while time.perf_counter() < ends or len(found) < 23:
        number += 1
        start = number * size % (len(roster) - size + 1)
        cohort = roster[start : start + size]
        started = time.perf_counter()
        session = _session(aggregator, roster, sizes, shapes, number)
        try:
            server.personalize(session.hold(cohort))
        finally:
            session.close()
        found.append(time.perf_counter() - started)
    return found[3:]


ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("manifest, MiB of JSON", "manifest_bytes", 1 / MIB, "{:.2f}"),
    ("manifest, write, ms", "manifest_write_s", 1e3, "{:.1f}"),
    ("manifest, read and check, ms", "manifest_read_s", 1e3, "{:.1f}"),
    ("class mixes π, ms", "class_proportions_s", 1e3, "{:.1f}"),
    ("is every client served? (once), ms", "wait_for_s", 1e3, "{:.2f}"),
    ("sampling 20 (each round), ms", "sample_s", 1e3, "{:.2f}"),
    ("round of 20 × 85,822, ms", "round_s", 1e3, "{:.1f}"),
    ("personalize 1: p50, ms", "p50_1_s", 1e3, "{:.1f}"),
    ("personalize 1: p95, ms", "p95_1_s", 1e3, "{:.1f}"),
    ("personalize 1: models/s", "models_per_s_1", 1, "{:.0f}"),
    ("personalize 20: p50, ms", "p50_20_s", 1e3, "{:.1f}"),
    ("personalize 20: p95, ms", "p95_20_s", 1e3, "{:.1f}"),
    ("personalize 20: models/s", "models_per_s_20", 1, "{:.0f}"),
    ("memory: imports, MiB", "rss_imports", 1 / MIB, "{:.0f}"),
    ("memory: with the manifest, MiB", "rss_manifest", 1 / MIB, "{:.0f}"),
    ("memory: workers joined, MiB", "rss_joined", 1 / MIB, "{:.0f}"),
    ("memory: after rounds, MiB", "rss_rounds", 1 / MIB, "{:.0f}"),
    ("memory: peak, MiB", "rss_peak", 1 / MIB, "{:.0f}"),
)


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="*", default=[100, 10_000, 100_000])
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of personalization for each cohort size")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.seconds)))
        return
    about = machine()
    print(describe(about))
    results = {}
    for clients in options.clients:
        command = [sys.executable, __file__, "--one", str(clients), "--seconds", str(options.seconds)]
        results[clients] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    head = ["", *(f"{clients:,}" for clients in results), "last / first"]
    rows = []
    for label, key, factor, form in ROWS:
        values = [result[key] * factor for result in results.values()]
        rows.append([label, *map(form.format, values), f"{values[-1] / values[0]:.2f}"])
    print(table(head, rows))
    write_json(options.json, about, results)


if __name__ == "__main__":
    main()
