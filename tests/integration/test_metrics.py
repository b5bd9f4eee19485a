"""Metrics for Prometheus: all fields of a federation's activity, over HTTP, in Prometheus' format."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from transport_support import make_aggregator

from fedloom.engine.metrics import federation_families, metrics_served
from fedloom.errors import ExperimentError
from fedloom.federation.activity import Activity, ClientCounts, Group, LastEvaluation, PrivacySpent, Totals
from fedloom.federation.standing import Standing
from fedloom.federation.worker_record import WorkerState
from fedloom.member.cockpit import worker_families
from fedloom.tasks.names import ACCURACY
from fedloom.transport.http_server import REQUEST_BYTES
from fedloom.transport.personalization import ServingLoad

ROOT = Path(__file__).parents[2]
NOW = Activity(
    run="hospitals",
    method="pefll",
    phase="training",
    time=1000.0,
    since=990.0,
    round=12,
    rounds=None,
    durable_round=10,
    durable_at=970.0,
    paused_by="operator",
    clients=ClientCounts(roster=9, observing=2, connected=8, absent=1, cohort=5, answered=4),
    awaited=3,
    late=1,
    measured=LastEvaluation(
        10, {"seen": Group(7, 0.8, 0.6, 0.81, 0.5, 0.8, 0.6, 0.81), "unseen": Group(2, None, None, None, 0.7)}
    ),
    train_loss=0.25,
    privacy=PrivacySpent(1e-5, 40, 3.5, 8.0),
    totals=Totals(12, 1, 240.0, 33.5, 4096, 8192, {"Start": 20.0, "server": 13.5}, {"training": 33.5}, {"garbage": 2}),
)

LOAD = ServingLoad(10, 70, 2, 3, 4, {"0.5": 0.01, "0.99": 0.2})


def samples(activity: Activity, certificate_end: float | None = None) -> dict[tuple[str, str], float]:
    class Told:
        def collect(self) -> Any:
            return federation_families(activity, LOAD, certificate_end)

        def describe(self) -> tuple[()]:
            return ()

    registry = CollectorRegistry()
    registry.register(Told())
    text = generate_latest(registry).decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_part_of_an_activity_is_exported_as_a_metric() -> None:
    end = (datetime.now(UTC) + timedelta(days=1)).timestamp()
    found = samples(NOW, end)
    expected = {
        ("fedloom_phase", "training"): 1, ("fedloom_phase", "waiting"): 0, ("fedloom_paused", ""): 1,
        ("fedloom_round", ""): 12, ("fedloom_durable_round", ""): 10, ("fedloom_durable_timestamp_seconds", ""): 970,
        ("fedloom_clients", "connected"): 8, ("fedloom_clients", "absent"): 1,
        ("fedloom_cohort_answered_clients", ""): 4,
        ("fedloom_awaited_clients", ""): 3, ("fedloom_late_clients", ""): 1, ("fedloom_workers", ""): 0,
        ("fedloom_rounds_total", ""): 12, ("fedloom_failed_attempts_total", ""): 1,
        ("fedloom_client_steps_total", ""): 240, ("fedloom_received_bytes_total", ""): 4096,
        ("fedloom_sent_bytes_total", ""): 8192, ("fedloom_exchange_seconds_total", "server"): 13.5,
        ("fedloom_phase_seconds_total", "training"): 33.5, ("fedloom_refusals_total", "garbage"): 2,
        ("fedloom_accuracy", "seen,worst_decile"): 0.6, ("fedloom_loss", "unseen"): 0.7,
        ("fedloom_privacy_epsilon", ""): 3.5, ("fedloom_privacy_delta", ""): 1e-5,
        ("fedloom_privacy_sums", ""): 40, ("fedloom_privacy_budget", ""): 8,
        ("fedloom_train_loss", ""): 0.25, ("fedloom_measured_round", ""): 10,
        ("fedloom_served_round", ""): 10, ("fedloom_models_handed_out_total", ""): 70,
        ("fedloom_models_latency_seconds", "0.99"): 0.2, ("fedloom_models_waiting_clients", ""): 3,
        ("fedloom_certificate_end_timestamp_seconds", ""): end,
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)
    assert {phase for name, phase in found if name == "fedloom_phase"} == {
        "waiting", "training", "evaluating", "saving", "paused", "stopping", "finished", "failed",
    }  # fmt: skip
    assert ("fedloom_rounds_planned", "") not in found
    assert ("fedloom_accuracy", "unseen,mean") not in found


def test_headline_metric_of_another_task_is_exported() -> None:
    values = {"mean": 3.5, "std": 0.5, "worst": 5.0, "worst_decile": 4.75, "pooled": 3.75}
    group = {
        "clients": 3,
        "accuracy_mean": None,
        "accuracy_pooled": None,
        "loss_mean": 0.4,
        "metrics": {"rmse": values},
    }
    headline = {"name": "rmse", "higher_is_better": False, "percent": False}
    line = {"round": 8, "seen": group, "unseen": None, "global": None, "headline": headline}
    found = samples(replace(NOW, measured=LastEvaluation.from_line(line)))
    measured = {labels: value for (name, labels), value in found.items() if name == "fedloom_headline"}
    assert measured == {
        f"seen,rmse,false,{statistic}": values[statistic] for statistic in ("mean", "worst_decile", "pooled")
    }
    assert not any(name == "fedloom_accuracy" for name, _ in found)


def test_unknown_values_are_not_exported() -> None:
    found = {name for name, _ in samples(Activity("a", "fedavg", "waiting", 1.0, 1.0))}
    assert "fedloom_round" in found
    assert not found & {"fedloom_durable_round", "fedloom_accuracy", "fedloom_certificate_end_timestamp_seconds"}


def test_page_dashboard_and_alerts_name_existing_metrics() -> None:
    there = {name for name, _ in samples(replace(NOW, rounds=20), 1.0)}
    results = {"personal": {5: 0.9, 10: 0.8}}
    state = WorkerState(standing=Standing("training", 3, 10, 4, 2), round_at=1.0, results=results)
    state.sent["updates"] = state.received["models"] = 1
    state.headline = ACCURACY
    there |= {sample.name for family in worker_families(state, (1.0, 1e-6)) for sample in family.samples}
    there |= {"fedloom_worker_gpu_memory_bytes", "fedloom_worker_gpu_utilization"}  # where torch sees a GPU
    page = (ROOT / "docs" / "metrics.md").read_text()
    for path in (ROOT / "charts/fedloom/templates/monitoring.yaml", ROOT / "charts/fedloom/files/dashboard.json"):
        named = set(re.findall(r"fedloom_[a-z_]+", path.read_text()))
        assert named
        assert named <= there, path
    assert [name for name in there if f"`{name}`" not in page] == []


def test_metrics_are_served_while_the_aggregator_runs() -> None:
    aggregator = make_aggregator()
    aggregator.start("127.0.0.1:0")
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    reported = lambda: federation_families(aggregator.activity())  # noqa: E731
    with metrics_served(f"127.0.0.1:{port}", reported):
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        assert 'fedloom_phase{phase="waiting"} 1.0' in text
        assert "process_resident_memory_bytes" in text
        assert "process_start_time_seconds" in text  # an alert counts its changes
        with pytest.raises(ExperimentError), metrics_served(f"127.0.0.1:{port}", reported):
            pass
        aggregator.stop()
        with pytest.raises(urllib.error.HTTPError) as failed:
            urllib.request.urlopen(url, timeout=10)
        assert failed.value.code == 500
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


CROWDED = """
import resource, socket, sys, threading, time, urllib.request
from fedloom.engine.metrics import metrics_served
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
port = int(sys.argv[1])
with metrics_served(f"127.0.0.1:{port}", lambda: ()):
    opened = [open(__file__) for _ in range(40)]
    print("ready", flush=True)
    input()
    opened += [open(__file__) for _ in range(20)]  # what a journal and checkpoints need
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        print(answer.status, threading.active_count() < 40, flush=True)
    rest = []
    try:
        while True:
            rest.append(open(__file__))
    except OSError:
        pass
    print("full", flush=True)
    input()
    started = time.process_time()
    time.sleep(1)  # connections come that cannot be accepted
    assert time.process_time() - started < 0.5
    del rest
    time.sleep(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        print(answer.status, flush=True)
"""


@pytest.mark.slow
def test_idle_connections_block_neither_descriptors_nor_a_scrape(tmp_path: Path) -> None:
    """Open three times as many connections as the process may have files, many at once, then use up the files."""
    program = tmp_path / "crowded.py"
    program.write_text(CROWDED)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, program, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    idle: list[socket.socket] = []
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)  # a busy machine: the first connections arrive all at once
        idle = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(60)]
        process.send_signal(signal.SIGCONT)
        idle += [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(340)]
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "200 True\n"
        assert process.stdout.readline() == "full\n"
        for _ in range(40):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        output, _ = process.communicate("\n", timeout=120)
    finally:
        process.kill()
        process.wait()
        for each in idle:
            each.close()
    assert (process.returncode, output) == (0, "200\n")


@pytest.mark.parametrize("line", [b"x-a: " + b"a" * 65_000, b"x-a: b"], ids=["long lines", "many lines"])
def test_a_request_with_large_headers_is_rejected_before_it_is_read(line: bytes) -> None:
    """The standard library reads a hundred headers of 64 KiB: 460 MB for sixteen connections."""
    port = free_port()
    with (
        metrics_served(f"127.0.0.1:{port}", lambda: ()),
        socket.create_connection(("127.0.0.1", port), timeout=10) as peer,
    ):
        peer.sendall(b"GET /metrics HTTP/1.1\r\n")
        with contextlib.suppress(OSError):  # the server closes the connection meanwhile
            for _ in range(REQUEST_BYTES // len(line) + 1):
                peer.sendall(line + b"\r\n")
        assert peer.recv(1 << 10).split()[1] == b"400"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as scraped:
            assert scraped.status == 200
