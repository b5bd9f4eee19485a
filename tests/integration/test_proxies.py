"""Conversations through a real nginx and Envoy, configured as in docs/running-a-federation.md, lose no client."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from proxies import ReverseProxy
from transport_support import Proxy, Worker, expected, make_aggregator, start_call, step_call, until

from fedloom.federation.monitor import Monitor
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.options import ClientOptions, Credentials, Protection, ServerOptions
from fedloom.security.tokens import add_token
from fedloom.transport import stream
from fedloom.transport.absence import DISCONNECTED
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.control import follow
from fedloom.transport.control_service import ProgressPublisher
from fedloom.transport.frames import Refusal

CLIENTS = ("a-1", "a-2", "b-1")
ENDED, PASSED = "TLS termination", "TLS passthrough"
PLAIN = {"443 ssl": "443", "ssl_certificate     fl/tls.crt;": "", "ssl_certificate_key fl/tls.key;": ""}
"""Changes of nginx's file by which it speaks plaintext."""


class Way:
    """An aggregator behind a proxy, and the settings a member needs to reach it."""

    def __init__(self, stack: ExitStack, folder: Path, section: str, changes: dict[str, str] | None = None) -> None:
        certified, plain = section.endswith(PASSED), changes is not None and PLAIN.items() <= changes.items()
        ca = folder / "ca"
        make_ca(ca)
        made = make_certificate("fl", folder, ca, hosts=["127.0.0.1"])
        own = (folder / "proxy" / "fl" / "tls.crt", folder / "proxy" / "fl" / "tls.key")
        own[0].parent.mkdir(parents=True)
        for source, target in zip((made.certificate, made.key), own, strict=True):
            shutil.copyfile(source, target)
        if certified:
            member = make_certificate("north", folder, ca)
            protection = ServerOptions(ca=ca / "ca.crt", certificate=own[0], key=own[1])
            self.credentials = Credentials(
                ClientOptions(ca=ca / "ca.crt", certificate=member.certificate, key=member.key)
            )
        else:
            token = folder / "north.token"
            token.write_text(add_token(folder / "tokens.json", "north")[0].get_secret_value())
            protection = ServerOptions(tokens=folder / "tokens.json")
            self.credentials = Credentials(ClientOptions(ca=None if plain else ca / "ca.crt", token_file=token))
        self.notices = ProgressPublisher(Monitor("run-1", "toy", 1))
        self.aggregator: Aggregator = make_aggregator(protection=Protection(protection), notices=self.notices)
        self._stack = stack
        target = self.aggregator.start("127.0.0.1:0")
        stack.callback(self.aggregator.stop)
        self.proxy = ReverseProxy(section, folder / "proxy", target, changes)
        stack.callback(self.proxy.end)

    def worker(self, name: str = "w", clients: tuple[str, ...] = CLIENTS, address: str | None = None) -> Worker:
        worker = Worker(address or self.proxy.address, name, clients, 60.0, credentials=self.credentials)
        self._stack.callback(worker.leave)
        return worker


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Callable[..., Way]]:
    with ExitStack() as stack:
        yield lambda section, changes=None: Way(stack, tmp_path, section, changes)


def right(answers: list, *calls) -> None:
    for row, answer in enumerate(answers):
        assert torch.equal(answer.x, expected(calls, row)), answer


SECTIONS = [f"{proxy}, {how}" for proxy in ("nginx", "Envoy") for how in (ENDED, PASSED)]


@pytest.mark.parametrize(("section", "changes"), [*((section, None) for section in SECTIONS), (SECTIONS[0], PLAIN)])
def test_exchanging_several_megabytes_in_both_directions(way, section: str, changes) -> None:
    """Exchange more than the megabyte that nginx allows for a request by default."""
    there = way(section, changes)
    worker = there.worker()
    there.aggregator.wait_for(CLIENTS, 20)
    calls = [start_call(CLIENTS), step_call(CLIENTS, 1)]
    for i in range(len(calls)):
        right(there.aggregator.exchange(calls[i]), *calls[: i + 1])
    assert worker.session.computed == 6
    assert there.aggregator.traffic.up > 6 * 1_200_000
    reported = follow(there.proxy.address, connect_s=10, credentials=there.credentials)
    assert len(next(reported).workers) == 1
    there.aggregator.stop(finished=True)
    worker.thread.join(20)
    assert worker.over is True


def test_nginxs_default_body_size_cuts_larger_replies(way, caplog: pytest.LogCaptureFixture) -> None:
    """Show that the setting is needed: each stream is cut after a megabyte, and a reply takes as many as it has."""
    there = way(SECTIONS[0], {"client_max_body_size 0;": ""})
    worker = there.worker()
    there.aggregator.wait_for(CLIENTS, 20)
    call = start_call(CLIENTS[:1], deadline_s=300, d=1_000_000)
    with caplog.at_level("INFO", "fedloom.transport"):
        right(there.aggregator.exchange(call), call)
    assert worker.session.computed == 1
    assert sum(getattr(record, "data", {}) == DISCONNECTED["data"] for record in caplog.records) > 2


@pytest.mark.parametrize("section", SECTIONS)
def test_more_workers_than_streams_per_connection(way, section: str) -> None:
    there = way(section)
    workers = [there.worker(f"w{i}", (CLIENTS[i % 3],)) for i in range(9)]
    there.aggregator.wait_for(CLIENTS, 20, workers=9)
    call = start_call(CLIENTS, d=10)
    right(there.aggregator.exchange(call), call)
    for worker in workers:
        worker.stop.set()


IDLE = {
    "nginx, TLS termination": ("client_body_timeout ", "grpc_read_timeout ", "grpc_send_timeout "),
    "nginx, TLS passthrough": ("proxy_timeout ",),
    "Envoy, TLS termination": ("stream_idle_timeout: ",),
    "Envoy, TLS passthrough": ("idle_timeout: ",),
}
"""Settings that allow a stream to be idle, for 60 seconds on the page."""


def allowing(section: str, seconds: int) -> dict[str, str]:
    """Return changes that allow a stream to be idle for so long."""
    return {f"{key}60s": f"{key}{seconds}s" for key in IDLE[section]}


def joins(caplog: pytest.LogCaptureFixture) -> int:
    return sum("joined run" in record.getMessage() for record in caplog.records)


def long_exchange(there: Way, over: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> Worker:
    """Run an exchange without an answer before ``over``, and check its result."""
    worker, asked, go_on = there.worker(), threading.Event(), threading.Event()

    def before(client: str, exchange: int) -> None:
        asked.set()
        go_on.wait(60)

    worker.before = before
    there.aggregator.wait_for(CLIENTS, 20)
    call = start_call(CLIENTS, deadline_s=60.0, d=10)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(there.aggregator.exchange, call)
        try:
            assert asked.wait(20)
            meanwhile()
            until(over, 30)
        finally:
            go_on.set()
        right(answers.result(60), call)
    assert worker.session.computed == 3
    return worker


@pytest.mark.parametrize("section", SECTIONS)
def test_heartbeats_keep_an_idle_stream_open_beyond_the_proxys_timeout(
    way, section: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.5)
    there = way(section, allowing(section, 5))  # longer than pauses of a busy machine
    with caplog.at_level(logging.INFO):
        long_exchange(there, lambda: there.aggregator.traffic.up > 220)  # a Hello, and a dozen heartbeats
    assert joins(caplog) == 1


@pytest.mark.parametrize("section", [f"{proxy}, {ENDED}" for proxy in ("nginx", "Envoy")])
def test_without_heartbeats_an_idle_stream_is_cut_and_nothing_is_lost(
    way, section: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 3600.0)
    there = way(section, allowing(section, 1))
    with caplog.at_level(logging.INFO):
        long_exchange(there, lambda: joins(caplog) >= 2)


@pytest.mark.parametrize(("section", "how"), [*((section, "restart") for section in SECTIONS), (SECTIONS[0], "reload")])
def test_restarting_a_proxy_during_a_round(way, section: str, how: str, caplog) -> None:
    there = way(section, {"shutdown_timeout 30s": "shutdown_timeout 1s"} if how == "reload" else None)
    with caplog.at_level(logging.INFO):
        long_exchange(there, lambda: joins(caplog) == 2, meanwhile=lambda: getattr(there.proxy, how)())


def test_a_vanished_worker_behind_a_proxy_is_detected(way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy answers the aggregator's pings even when the worker behind it has vanished."""
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(stream, "SILENCE_S", 1.5)
    there = way("nginx, TLS termination")
    with closing(Proxy(there.proxy.address)) as line:
        there.worker("gone", address=line.address)
        there.aggregator.wait_for(CLIENTS, 20)
        line.freeze()
        until(lambda: not there.aggregator.workers(), 20)
        assert there.aggregator.refusals.counts[Refusal.SILENT] == 1
