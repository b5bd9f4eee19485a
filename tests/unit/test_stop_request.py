"""Requests to stop or pause a run: signals, operators, and a run without watchers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import telling, tells
from federations import Silent, clients, federation, setup
from published_runs import aggregator, run_folder

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.cli import main
from fedloom.engine import stop_request as stop_requests
from fedloom.engine.observer import RunObserver
from fedloom.engine.stop_request import StopRequest
from fedloom.errors import AbandonedError, DataError, ExitCode, InterruptedRun, StorageError
from fedloom.federation.monitor import CONTROL, Control, Monitor, read_pause
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, Journal
from fedloom.storage import open_store


class Listener(RunObserver):
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def stopping(self, *, after_round: bool) -> None:
        self.said.append("after this round" if after_round else "at once")


@pytest.fixture
def said() -> list[str]:
    return []


def counted(stop_request: StopRequest) -> threading.Event:
    """Return the event that is set once the run is aborted."""
    aborted = threading.Event()
    stop_request.abort = aborted.set
    return aborted


def test_a_signal_during_a_wait_aborts_at_once(said: list[str]) -> None:
    stop_request = StopRequest(Listener(said))
    aborted = counted(stop_request)
    before = signal.getsignal(signal.SIGTERM)
    with stop_request.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert aborted.wait(30)
        assert stop_request.event.is_set()
    assert said == ["at once"]
    assert stop_request.reason is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_lets_the_current_round_end_and_a_second_one_aborts(said: list[str]) -> None:
    stop_request = StopRequest(Listener(said))
    aborted = counted(stop_request)
    stop_request.training = True
    with stop_request.signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_request.event.wait(30)
        assert not aborted.is_set()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it is raised between two of these lines
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        assert aborted.wait(30)
    assert said == ["after this round"]


def test_a_signal_whose_exception_was_swallowed_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import in progress can swallow the exception with which SIGTERM ends a command that has no handler yet."""
    requested = threading.Event()
    monkeypatch.setattr(stop_requests, "termination_requested", requested)
    monkeypatch.setattr(main, "termination_requested", requested)
    before = signal.signal(signal.SIGTERM, main._terminated)
    try:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        stop_request = StopRequest()
        with stop_request.signals():
            assert stop_request.event.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_round_that_ends_in_time_is_not_aborted_later(said: list[str]) -> None:
    stop_request = StopRequest(Listener(said))
    aborted = counted(stop_request)
    stop_request.training = True
    with stop_request.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_request.event.wait(30)
    assert all(timer.finished.is_set() for timer in threading.enumerate() if isinstance(timer, threading.Timer))
    assert not aborted.is_set()


def test_an_operator_stop_waits_for_the_current_round_unless_forced(said: list[str]) -> None:
    monitor = Monitor()
    stop_request = StopRequest(Listener(said), monitor)
    aborted = counted(stop_request)
    stop_request.training = True
    stop_request.operator(now=False)
    assert (stop_request.event.is_set(), stop_request._timers, monitor.now().phase) == (True, [], "stopping")
    stop_request.operator(now=False)
    assert aborted.wait(30)
    hasty = StopRequest(Listener(said))
    aborted = counted(hasty)
    hasty.training = True
    hasty.operator(now=True)
    assert aborted.wait(30)
    assert said == ["after this round", "after this round", "at once"]


def test_a_run_without_watchers_stops(said: list[str]) -> None:
    stop_request = StopRequest(Listener(said))
    aborted = counted(stop_request)
    unwatched = 0.0
    with stop_request.when_unwatched(lambda: unwatched, 0.2):
        assert not stop_request.event.wait(0.5)  # there is a watcher
        unwatched = 0.3
        assert stop_request.event.wait(30)
        assert aborted.wait(30)
    assert isinstance(stop_request.reason, AbandonedError)
    assert stop_request.reason.exit_code is ExitCode.ABANDONED
    assert tells(str(stop_request.reason), "0.2 s", "orphan_after")
    assert not any(thread.name == "orphan" for thread in threading.enumerate())


def test_a_run_that_needs_no_watcher(said: list[str]) -> None:
    stop_request = StopRequest(Listener(said))
    with stop_request.when_unwatched(lambda: 1e9, None):
        assert not any(thread.name == "orphan" for thread in threading.enumerate())
    assert not stop_request.event.is_set()


SETTINGS = FedAvgSettings.model_validate({"local": {"steps": 2, "batch_size": 4, "lr": 0.1}})


def no_stop(now: bool) -> None:
    raise AssertionError("nobody asked for it")


def control() -> Control:
    return Control(Monitor(), no_stop)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_pause_is_recorded_and_survives_a_restart(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = control()
    first.keep(folder)
    assert (read_pause(folder), (tmp_path / CONTROL).exists()) == (None, False)
    assert (first.pause("operator"), first.pause("another")) == (True, False)
    second = control()
    second.keep(folder)
    assert (second.paused.by, second.monitor.now().paused_by) == ("operator", "operator")
    assert (second.resume(), second.resume()) == (True, False)
    assert read_pause(folder) is None
    assert second.monitor.now().paused_by is None
    early = control()
    early.pause("another")  # before the folder exists
    early.keep(folder)
    assert read_pause(folder) == early.paused
    kept = control()  # a pause that cannot be recorded has no effect
    kept.keep(RunFolder(tmp_path / "gone"))
    with pytest.raises(StorageError):
        kept.pause("operator")
    assert (kept.paused, kept.monitor.now().paused_by) == (None, None)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2, "paused": null}', '{"version": 1}', '{"version": 1, "paused": {"by": 1}}']
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / CONTROL).write_text(text)
    with telling(DataError, CONTROL):
        control().keep(RunFolder(tmp_path))


class PauseAfter(Silent):
    """Observer that requests a pause as a round ends."""

    def __init__(self, kept: Control, round: int = 2) -> None:
        self.kept, self.round = kept, round

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        if attempt.round == self.round:
            self.kept.pause("operator")


def four_rounds(folder: Path, **more: Any) -> Any:
    return federation(folder, FEDAVG, SETTINGS, setup(n=4), clients([4, 6, 8, 5]), rounds=4, cohort=2, **more)


def paused_run(folder: Path, *, after: int = 2) -> tuple[Any, Control, threading.Thread, list[BaseException]]:
    kept = control()
    kept.keep(RunFolder(folder))
    held = four_rounds(folder, control=kept)
    held.loop.observer = PauseAfter(kept, after)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            held.run()
        except BaseException as error:
            failed.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    until(lambda: kept.monitor.now().phase == "paused")
    return held, kept, running, failed


@pytest.mark.parametrize("after", [2, 4])  # a round follows; an evaluation, and nothing after it
def test_a_pause_holds_between_rounds_with_the_last_one_durable_and_equal_results(tmp_path: Path, after: int) -> None:
    alone = four_rounds(tmp_path / "alone")
    alone.run()
    held, kept, running, failed = paused_run(tmp_path / "paused", after=after)
    now = kept.monitor.now()
    assert (now.round, now.durable_round, now.doing, now.paused_by) == (after, after, None, "operator")
    assert Journal.read(RunFolder(tmp_path / "paused")).whole == after
    kept.resume()
    running.join(60)
    assert failed == []
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, held.state[name])
    lines = list(RunFolder(tmp_path / "paused").objects("journal.jsonl"))
    ((at, line),) = ((i, line) for i, line in enumerate(lines) if "paused" in line)
    assert (at, line["outcome"]) == ((2, "done") if after == 2 else (4, "evaluated"))
    assert line["paused"]["by"] == "operator"
    assert line["paused"]["seconds"] > 0
    assert kept.monitor.now().totals.seconds < sum(kept.monitor.now().totals.phases.values())
    again = four_rounds(tmp_path / "again", repeated=RunFolder(tmp_path / "paused"))
    again.run()
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, again.state[name])


def test_a_stopped_paused_run_resumes_paused_and_ends_equally(tmp_path: Path) -> None:
    alone = four_rounds(tmp_path / "alone")
    alone.run()
    held, _, running, failed = paused_run(tmp_path / "paused")
    held.loop.stop.set()
    running.join(60)
    assert isinstance(failed[0], InterruptedRun)
    later = control()
    later.keep(RunFolder(tmp_path / "paused"))
    resumed = four_rounds(tmp_path / "paused", control=later)
    resumed.loop.resume()
    running = threading.Thread(target=resumed.run, daemon=True)
    running.start()
    until(lambda: later.monitor.now().phase == "paused")
    assert (later.monitor.now().round, later.monitor.now().durable_round) == (2, 2)
    later.resume()
    running.join(60)
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, resumed.state[name])


def test_a_published_run_shows_pause_and_resumption(tmp_path: Path) -> None:
    reported: list[tuple[int, bool]] = []
    kept = control()
    kept.keep(RunFolder(tmp_path))
    held = federation(
        tmp_path, FEDAVG, SETTINGS, setup(n=3), clients([4, 6, 8]), rounds=3, control=kept, checkpoint_every_s=0,
        after=lambda round: reported.append((round, read_pause(RunFolder(tmp_path)) is not None)),
    )  # fmt: skip
    held.loop.observer = PauseAfter(kept)
    running = threading.Thread(target=held.run, daemon=True)
    running.start()
    until(lambda: reported[-1:] == [(2, True)] and kept.monitor.now().phase == "paused")
    kept.resume()
    running.join(60)
    assert (2, False) in reported[reported.index((2, True)) :]
    assert reported[-1] == (3, False)


def test_another_aggregator_adopts_a_published_pause(tmp_path: Path) -> None:
    kept, store = control(), open_store(tmp_path / "store")
    mine = run_folder(tmp_path / "mine", 3)
    kept.keep(mine)
    kept.pause("operator")
    aggregator(mine.path, store, "life-1").publish(3)
    other = RunFolder(tmp_path / "other")
    assert aggregator(other.path, store, "life-2").restore()
    assert read_pause(other) == kept.paused
