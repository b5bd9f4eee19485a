"""Run tests in several processes, forked from the one that collected them: ``pytest --processes 4``.

Importing torch and collecting ten thousand tests takes longer than running half of them. Each worker of pytest-xdist
repeats both; forks share the result, and its memory.

A process requests more work when it starts its last test. A unit of work is all tests with the same
``pytest.mark.group``, or a single test.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the number of processes."""
    parser.addoption("--processes", type=int, default=1, metavar="N", help="run tests in N processes at once")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in processes, if there is more than one."""
    options = session.config.option
    if options.processes < 2 or options.collectonly or options.usepdb:
        return None  # pytest's own loop
    if session.testsfailed and not options.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    Controller(session).run(options.processes)
    return True


def units_of_work(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Return units of work as indices of tests, the longest first."""
    units: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        mark = item.get_closest_marker("group")
        units.setdefault(f"group {mark.args[0]}" if mark else item.nodeid, []).append(i)
    return sorted(units.values(), key=lambda unit: sum(_weight(items[i]) for i in unit), reverse=True)


def _weight(item: pytest.Item) -> int:
    """Return a rough estimate of the duration of a test, so that short ones come last."""
    return 20 if any(item.get_closest_marker(name) for name in ("slow", "exhaustive", "cluster")) else 1


@dataclass
class Worker:
    """Worker process.

    Attributes
    ----------
    pid
        Its process id.
    running
        Index of its current test.
    assigned
        Indices of the tests that were sent to it and that it has not started.
    """

    pid: int
    running: int | None = None
    assigned: deque[int] = field(default_factory=deque)


class Controller:
    """Distributes a session's tests to workers, and reports the results."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._units = deque(units_of_work(session.items))
        self._workers: dict[Connection, Worker] = {}
        self._started = 0

    def run(self, processes: int) -> None:
        """Run all tests; interrupt the workers if the session ends early."""
        config = self._session.config
        if (terminal := config.pluginmanager.get_plugin("terminalreporter")) is not None:
            terminal.showfspath = False  # tests of different files alternate
        config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for _ in range(min(processes, len(self._units))):
                self._start()
            while self._workers:
                for channel in wait(list(self._workers)):
                    assert isinstance(channel, Connection)
                    self._receive(channel)
                for reason, error in (
                    (self._session.shouldfail, self._session.Failed),
                    (self._session.shouldstop, self._session.Interrupted),
                ):
                    if reason:
                        raise error(reason)
        finally:
            for channel, worker in self._workers.items():
                channel.close()
                os.kill(worker.pid, signal.SIGINT)  # it tears down its fixtures and exits
            for worker in self._workers.values():
                os.waitpid(worker.pid, 0)

    def _start(self, first: Sequence[int] = ()) -> None:
        """Fork a worker, which runs these tests first."""
        ours, its = Pipe()
        self._started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            for channel in (ours, *self._workers):
                channel.close()
            _work(self._session, its, self._started)
        its.close()
        self._workers[ours] = Worker(pid)
        self._send(ours, first or self._units.popleft())

    def _send(self, channel: Connection, unit: Sequence[int]) -> None:
        self._workers[channel].assigned.extend(unit)
        with contextlib.suppress(BrokenPipeError):  # it has ended; the next message says so
            channel.send(unit)

    def _receive(self, channel: Connection) -> None:
        worker, hook = self._workers[channel], self._session.config.hook
        try:
            kind, content = channel.recv()
        except (EOFError, ConnectionResetError):
            self._end(channel)
            return
        if kind == "start":
            worker.running = worker.assigned.popleft()
        elif kind == "next":
            self._send(channel, self._units.popleft() if self._units else ())
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            worker.running = None
            hook.pytest_runtest_logfinish(**content)
        else:
            hook.pytest_warning_recorded.call_historic(kwargs=content)

    def _end(self, channel: Connection) -> None:
        """Reap a worker; if it had tests left, fail its current one and start another worker for the rest."""
        worker = self._workers.pop(channel)
        channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        ended = f"signal {-code}" if code < 0 else f"code {code}"
        if worker.running is None and not worker.assigned:
            if code:
                raise RuntimeError(f"a process ended with {ended} after its last test")
            return
        item = self._session.items[worker.assigned.popleft() if worker.running is None else worker.running]
        why = f"the process of this test ended with {ended}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if worker.assigned or self._units:
            self._start(list(worker.assigned))


class Relay:
    """Plugin of a worker that sends reports to the controller."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config = config
        self._channel = channel
        self.registered = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        hook = self._config.hook
        self._channel.send(("report", hook.pytest_report_to_serializable(config=self._config, report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Send the end of a test."""
        self._channel.send(("finish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Send a warning; the controller has those that pytest repeats when this object is registered."""
        if self.registered:
            copy = warnings.WarningMessage(
                str(warning_message.message), warning_message.category, warning_message.filename, warning_message.lineno
            )  # without the objects that caused it, which cannot be sent
            content = {"warning_message": copy, "when": when, "nodeid": nodeid, "location": location}
            self._channel.send(("warning", content))


def _work(session: pytest.Session, channel: Connection, number: int) -> NoReturn:
    """Run the tests that the controller sends, then exit."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
        config = session.config
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(relay := Relay(config, channel))
        relay.registered = True
        if (capture := config.pluginmanager.get_plugin("capturemanager")) is not None:
            capture.stop_global_capturing()  # its files are the controller's
            capture.start_global_capturing()
            capture.suspend_global_capture()
        folders = config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp = folders.getbasetemp() / f"process-{number}"
        folders._basetemp.mkdir(mode=0o700)
        tests = _tests(session, channel)
        item = next(tests)
        while item is not None:
            following = next(tests, None)
            channel.send(("start", None))
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        code = 0
    except (KeyboardInterrupt, ConnectionError, EOFError):  # the controller has ended the run, or has ended
        session._setupstate.teardown_exact(None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _tests(session: pytest.Session, channel: Connection) -> Iterator[pytest.Item]:
    """Yield the tests that the controller sends."""
    unit = channel.recv()
    while unit:
        for index in unit[:-1]:
            yield session.items[index]
        channel.send(("next", None))
        yield session.items[unit[-1]]
        unit = channel.recv()
