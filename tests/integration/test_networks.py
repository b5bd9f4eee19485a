"""Network use of a worker: one connection, no port, and no more bandwidth than allowed."""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from facts import tells
from run_processes import experiment, fedloom, rounds, started, until
from transport_support import Proxy, Worker, expected, make_aggregator, start_call

from fedloom.errors import ExperimentError
from fedloom.transport import stream
from fedloom.transport.frames import FRAME_BYTES
from fedloom.transport.limits import Bandwidth, BandwidthLimiter, parse_bandwidth

CLIENTS = ("anna", "bo", "carla", "dai", "emil")


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("10Mbit/s", 1.25e6, 1.25e6),
        ("2Mbit/s,20Mbit/s", 2.5e5, 2.5e6),
        ("0.5 MB/s, 1 GB/s", 5e5, 1e9),
        ("256kbit/s", 32e3, 32e3),
        ("1Gbit/s,256kB/s", 1.25e8, 2.56e5),
    ],
)
def test_valid_rates(text: str, up: float, down: float) -> None:
    assert parse_bandwidth(text) == Bandwidth(up, down)


@pytest.mark.parametrize(
    "text", ["", "10", "10Mbit", "10 mbit/s", "255kbit/s", "1MB/s,", "1MB/s,1MB/s,1MB/s", "-1MB/s", "nanMB/s"]
)
def test_invalid_rates(text: str) -> None:
    with pytest.raises(ExperimentError) as error:
        parse_bandwidth(text)
    assert tells(str(error.value), "bandwidth", "256kbit/s", repr(text), "Mbit/s")


def test_a_limiter_without_a_rate_never_delays() -> None:
    line = BandwidthLimiter(None)
    line.charge(1 << 40)
    assert line._free_at == 0.0


@pytest.mark.parametrize("limited", ["up", "down"])
def test_a_worker_stays_below_its_bandwidth_limit(limited: str) -> None:
    """Transfer two megabytes each way; a busy machine may be slower than the rate, never faster."""
    rate, passed = 2e6, {"up": 0, "down": 0}
    began, faster = time.monotonic(), []

    def count(data: bytes, up: bool) -> bytes:
        way = "up" if up else "down"
        passed[way] += len(data)
        allowed = rate * (time.monotonic() - began) * 1.05 + FRAME_BYTES + (1 << 18)
        if way == limited and passed[way] > allowed:
            faster.append(passed[way] - allowed)
        return data

    aggregator = make_aggregator()
    with closing(Proxy(aggregator.start("127.0.0.1:0"), damage=count)) as line:
        bandwidth = Bandwidth(rate, 1e9) if limited == "up" else Bandwidth(1e9, rate)
        worker = Worker(line.address, "w", CLIENTS, bandwidth=bandwidth)
        aggregator.wait_for(CLIENTS, 10)
        call = start_call(CLIENTS, d=100_000)
        asked = time.monotonic()
        answers = aggregator.exchange(call)
        took_s = time.monotonic() - asked
        for row, answer in enumerate(answers):
            assert torch.equal(answer.x, expected([call], row))
        aggregator.stop(finished=True)
        worker.leave()
    assert not faster
    assert passed[limited] > 2e6
    assert took_s >= (2e6 - FRAME_BYTES - (1 << 18)) / rate


def test_a_worker_reconnects_when_its_network_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnect long before HTTP/2's pings fail, which end at a proxy anyway."""
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(stream, "SILENCE_S", 1.0)
    monkeypatch.setattr(
        "fedloom.transport.worker_connection.WELCOME_TIMEOUT_S", 1.0
    )  # a reconnection may meet a frozen line
    aggregator = make_aggregator()
    with closing(Proxy(aggregator.start("127.0.0.1:0"))) as line:
        member = Worker(line.address, "w", CLIENTS)
        aggregator.wait_for(CLIENTS, 10)
        (before,) = aggregator.workers()
        line.freeze()
        until(lambda: aggregator.workers() != (before,), "the silence is noticed", 20)
        line.frozen = False  # for connections made from now on
        aggregator.wait_for(CLIENTS, 20)
        call = start_call(CLIENTS, d=10)
        for row, answer in enumerate(aggregator.exchange(call)):
            assert torch.equal(answer.x, expected([call], row))
        assert len(member.sessions) == 1
        aggregator.stop(finished=True)
        member.leave()


def test_a_worker_reconnects_if_its_connection_gets_no_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the Hello is delivered; gRPC alone would wait for 20 s."""
    monkeypatch.setattr("fedloom.transport.worker_connection.WELCOME_TIMEOUT_S", 1.0)
    aggregator = make_aggregator()
    with closing(Proxy(aggregator.start("127.0.0.1:0"))) as line:
        line.freeze()
        member = Worker(line.address, "w", CLIENTS)
        until(lambda: len(line.open) > 2, "it dials again", 10)  # two ends of each connection
        line.frozen = False
        aggregator.wait_for(CLIENTS, 10)
        aggregator.stop(finished=True)
        member.leave()


def test_rows_of_an_inactive_worker_are_reassigned_despite_its_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reassign the rows of a worker that sends heartbeats but no answers."""
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.1)
    aggregator = make_aggregator()
    address = aggregator.start("127.0.0.1:0")
    go_on = threading.Event()
    hung, other = Worker(address, "hung", CLIENTS), Worker(address, "other", CLIENTS)
    hung.before = lambda client, exchange: go_on.wait(60) and None
    aggregator.wait_for(CLIENTS, 10, workers=2)
    call = start_call(CLIENTS, d=10, deadline_s=12.0)
    answers = aggregator.exchange(call)
    go_on.set()
    for row, answer in enumerate(answers):
        assert torch.equal(answer.x, expected([call], row)), answer
    assert other.session.computed == len(CLIENTS)
    aggregator.stop(finished=True)
    for worker in (hung, other):
        worker.leave()


def sockets(pid: int, state: str) -> list[tuple[int, int]]:
    """Return local and remote port of a process's TCP sockets by state in /proc/net/tcp: 01 established, 0A listen."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # the descriptor of the folder itself
            own.add(str(entry.readlink()))
    lines = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    ports = [(words[1], words[2]) for words in lines if words[3] == state and f"socket:[{words[9]}]" in own]
    return [(int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)) for local, remote in ports]


@pytest.mark.slow
def test_a_worker_has_one_connection_and_no_port(tmp_path: Path, fashion_mnist_root: Path) -> None:
    path = experiment(tmp_path, fashion_mnist_root, model={"name": "logistic"}, algorithm={"name": "fedavg"})
    fedloom("partition", path, "--out", tmp_path / "partition")
    out = tmp_path / "run"
    endless = ["--set", "federation.rounds=100000", "--set", "evaluation.every=100000"]
    with started("aggregator", path, "--listen", "127.0.0.1:0", "--out", out, *endless) as aggregator:
        until(lambda: sockets(aggregator.pid, "0A"), "a port")
        ((port, _),) = sockets(aggregator.pid, "0A")
        dials = ["worker", "--aggregator", f"127.0.0.1:{port}", "--partition", tmp_path / "partition"]
        with started(*dials, "--set", "bandwidth=1GB/s", "--reconnect", "inf") as worker:
            until(lambda: (out / "journal.jsonl").exists() and rounds(out) > 1, "rounds")
            assert sockets(worker.pid, "0A") == []
            assert [remote for _, remote in sockets(worker.pid, "01")] == [port]
