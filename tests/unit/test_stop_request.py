"""Requests to stop a run: signals, and a run without watchers."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
from facts import tells

from fedloom.cli import main
from fedloom.engine import stop_request as stop_requests
from fedloom.engine.observer import RunObserver
from fedloom.engine.stop_request import StopRequest
from fedloom.errors import AbandonedError, ExitCode
from fedloom.federation.monitor import Monitor


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
