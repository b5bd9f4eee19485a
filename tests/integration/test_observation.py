"""Watching a run over real sockets: the messages, the end of the stream, and the count of watchers."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from forked import Popen
from transport_support import Proxy, Worker, make_aggregator, until

from fedloom.data.manifest import ClientEntry
from fedloom.errors import AbandonedError, RefusedError
from fedloom.federation.activity import Activity, Group, LastEvaluation
from fedloom.federation.monitor import Monitor
from fedloom.runs.journal import Attempt
from fedloom.transport.control import CONTROL, WATCH, follow, from_wire, to_wire
from fedloom.transport.control_service import ProgressPublisher
from fedloom.transport.dial import CHANNEL_OPTIONS
from fedloom.transport.wire import control_pb2 as wire

CLIENTS = ("anna", "bo", "carla")


class Watcher:
    """``follow`` in a thread."""

    def __init__(self, address: str) -> None:
        self.told: queue.SimpleQueue[Activity] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.leaving = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(address,), daemon=True)
        self.thread.start()

    def _run(self, address: str) -> None:
        try:
            for progress in follow(address, connect_s=10):
                self.told.put(progress)
                if self.leaving.is_set():
                    return
        except (AbandonedError, RefusedError) as error:
            self.error = error

    def until(self, **values: object) -> list[Activity]:
        """Return the statuses that a watcher receives, up to one with these values."""
        reported = []
        while True:
            reported.append(self.told.get(timeout=10))
            if all(getattr(reported[-1], name) == value for name, value in values.items()):
                return reported

    def ended(self) -> BaseException | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def notices() -> ProgressPublisher:
    return ProgressPublisher(Monitor("run-1", "toy", 7))


@pytest.fixture
def address(notices: ProgressPublisher) -> Iterator[str]:
    notices.monitor.know(ClientEntry(name, True, 10, 2, 2, {}, "0" * 64) for name in CLIENTS)
    aggregator = make_aggregator(notices=notices, clients=CLIENTS)
    yield aggregator.start("127.0.0.1:0")
    aggregator.stop()


def line(round: int) -> dict[str, object]:
    return {"round": round, "seen": {"clients": 2, "accuracy_mean": 0.5, "accuracy_pooled": 0.5}, "unseen": None}


def measured(round: int) -> LastEvaluation:
    return LastEvaluation(round, {"seen": Group(2, accuracy_mean=0.5, accuracy_pooled=0.5, mean=0.5, pooled=0.5)})


def round_done(notices: ProgressPublisher, round: int, of: int = 7) -> None:
    """End a round, as the loop reports it to the monitor and to its observers."""
    attempt = Attempt(round, 1, statistics={"client_steps": 1.0})
    notices.monitor.attempted(attempt, counts=True)
    notices.round_done(attempt, of)


def test_a_watcher_follows_a_run_from_its_workers_to_its_end(notices: ProgressPublisher, address: str) -> None:
    watcher = Watcher(address)
    notices.tell("waiting", "waiting for workers")
    (*_, waiting) = watcher.until(message="waiting for workers")
    assert (waiting.run, waiting.method, waiting.phase, waiting.round, waiting.rounds, waiting.workers) == (
        "run-1", "toy", "waiting", 0, 7, (),
    )  # fmt: skip
    assert (waiting.clients.roster, waiting.clients.absent, waiting.measured) == (3, 3, None)
    worker = Worker(address, "w1", ("anna", "bo"))
    while not (reported := watcher.told.get(timeout=10)).workers:
        pass
    assert ([each.name for each in reported.workers], reported.clients.absent) == (["w1"], 1)
    notices.tell("evaluating")
    notices.evaluating(0, 2, 3)
    watcher.until(phase="evaluating", message="2 of 3 clients measured")
    notices.tell("training")
    for round in range(1, 4):
        round_done(notices, round)
    notices.monitor.evaluated(line(3))
    notices.evaluated(line(3))
    (*_, evaluated) = watcher.until(measured=measured(3))
    assert evaluated.round == 3
    notices.attempt_failed(Attempt(4, 2, outcome="nobody answered"), 3)
    notices.monitor.enter("training", doing=4, attempt=3)  # the next attempt keeps the reason of the last failure
    watcher.until(phase="training", attempt=3, message="round 4: attempt 2 of 3 failed: nobody answered")
    notices.tell("finished")
    notices.tell("failed", "too late to fail")
    (*_, last) = watcher.until(phase="finished")
    assert (last.round, last.message, last.measured) == (3, "", measured(3))
    assert watcher.ended() is None
    worker.leave()
    assert worker.over is False  # it was dismissed, the run was not over


def test_quick_rounds_are_merged_and_no_evaluation_is_left_out(notices: ProgressPublisher, address: str) -> None:
    watcher = Watcher(address)
    watcher.until(phase="waiting")
    for round in range(1, 2001):
        round_done(notices, round, 2000)
        if round % 500 == 0:
            notices.monitor.evaluated(line(round))
            notices.evaluated(line(round))
    notices.tell("finished")
    reported = watcher.until(phase="finished")
    assert [*dict.fromkeys(now.measured.round for now in reported if now.measured)] == [500, 1000, 1500, 2000]
    assert len(reported) < 100
    assert watcher.ended() is None


def test_a_late_watcher_gets_the_newest_evaluation_and_the_end(notices: ProgressPublisher, address: str) -> None:
    for round in (1, 2):
        notices.monitor.evaluated(line(round))
        notices.evaluated(line(round))
    notices.tell("failed", "the disk is full")
    (reported,) = follow(address, connect_s=10)
    assert (reported.phase, reported.message, reported.measured) == ("failed", "the disk is full", measured(2))


def test_watching_a_broken_stream_ends_as_abandoned(notices: ProgressPublisher, address: str) -> None:
    proxy = Proxy(address)
    watcher = Watcher(proxy.address)
    watcher.until(phase="waiting")
    proxy.cut()
    assert isinstance(watcher.ended(), AbandonedError)
    proxy.close()


def test_watching_an_aggregator_that_stops_early_ends_as_abandoned(notices: ProgressPublisher) -> None:
    aggregator = make_aggregator(notices=notices, clients=CLIENTS)
    watcher = Watcher(aggregator.start("127.0.0.1:0"))
    watcher.until(phase="waiting")
    aggregator.stop()
    assert isinstance(watcher.ended(), AbandonedError)


def test_watching_without_an_aggregator_ends_as_abandoned() -> None:
    proxy = Proxy("127.0.0.1:1")
    address = proxy.address
    proxy.close()
    with pytest.raises(AbandonedError, match="no aggregator"):
        next(follow(address, connect_s=0.3))


def test_watching_can_be_refused() -> None:
    aggregator = make_aggregator()
    with pytest.raises(RefusedError, match="not a FedLoom aggregator"):
        next(follow(aggregator.start("127.0.0.1:0"), connect_s=10))
    aggregator.stop()


def test_text_from_the_aggregator_cannot_control_the_terminal() -> None:
    reported = from_wire(to_wire(Activity("a\x1b[2J", "toy", "training", 0.0, 0.0, message="one\ntwo\x07")))
    assert reported.run.isprintable()
    assert reported.message.replace("\n", "").isprintable()
    assert reported.message.count("\n") == 1


def test_watchers_and_the_time_without_them_are_tracked(notices: ProgressPublisher, address: str) -> None:
    until(lambda: notices.unwatched_s > 0.05)
    watcher = Watcher(address)
    watcher.until(phase="waiting")
    assert notices.unwatched_s == 0.0
    second = Watcher(address)
    second.until(phase="waiting")
    watcher.leaving.set()
    notices.tell("training")
    watcher.ended()
    until(lambda: notices._watchers == 1)
    assert notices.unwatched_s == 0.0
    second.leaving.set()
    notices.tell("training", "once more")
    second.ended()
    until(lambda: notices.unwatched_s > 0)


def test_the_end_waits_for_watchers_for_a_limited_time(notices: ProgressPublisher, address: str) -> None:
    started = time.monotonic()
    notices.read_within(60)
    assert time.monotonic() - started < 30  # without watchers
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_stream(f"/{CONTROL}/{WATCH}")(wire.WatchRequest().SerializeToString())
        next(call)
        notices.read_within(0.1)  # watched, and the run continues
        notices.tell("finished")
        notices.read_within(60)
        phases = [from_wire(wire.WatchResponse.FromString(reported).activity).phase for reported in call]
        assert phases == ["finished"]
    assert time.monotonic() - started < 30


def test_workers_that_connect_after_the_end_are_dismissed(notices: ProgressPublisher) -> None:
    aggregator = make_aggregator(notices=notices, clients=CLIENTS)
    address = aggregator.start("127.0.0.1:0")
    early = Worker(address, "early", CLIENTS)
    until(lambda: aggregator.workers())
    watcher = Watcher(address)
    watcher.until(phase="waiting")
    aggregator.shutdown_workers(finished=True)
    late = Worker(address, "late", CLIENTS)
    for worker in (early, late):
        worker.thread.join(10)
        assert not worker.thread.is_alive()
        assert worker.error is None
        assert worker.over
    notices.tell("finished")  # watchers are served to the end
    watcher.until(phase="finished")
    assert watcher.ended() is None
    aggregator.stop(finished=True)


VANISHING = """
import sys
sys.path.insert(0, sys.argv[2])
from transport_support import Worker
from fedloom.transport.control import follow
worker = Worker(sys.argv[1], "w1", ("anna",))
for progress in follow(sys.argv[1], connect_s=60):
    pass
"""


@pytest.mark.slow
@pytest.mark.exhaustive  # waits for half a minute
def test_a_vanished_worker_and_watcher_are_detected(notices: ProgressPublisher) -> None:
    """A stopped process answers no pings, like a disconnected machine: 20 s to the ping, 10 s for its answer."""
    aggregator = make_aggregator(notices=notices, clients=CLIENTS)
    address = aggregator.start("127.0.0.1:0")
    process = Popen([sys.executable, "-c", VANISHING, address, str(Path(__file__).parent)])
    try:
        until(lambda: aggregator.workers() and notices.unwatched_s == 0.0, 120)
        process.send_signal(signal.SIGSTOP)
        until(lambda: not aggregator.workers() and notices.unwatched_s > 0.0, 60)
    finally:
        process.kill()
        process.wait(30)
        aggregator.stop()
