"""Parallel runs: one process each, with its own share of the cores, none of which outlives the caller."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedloom.core.processes import ChildReport, command, environment
from fedloom.core.words import pluralize
from fedloom.errors import FedloomError, InterruptedRun, WorkerLostError, argument
from fedloom.experiment import Experiment
from fedloom.runner.options import RunOptions
from fedloom.runner.stop_request import StopRequest
from fedloom.storage.folder import write_atomically

POLL_INTERVAL_S = 0.05
"""Seconds between checks for ended processes."""

GRACE_S = 15.0
"""Seconds until a terminated process is killed."""


@dataclass(frozen=True)
class Job:
    """Run to execute: its name, experiment and options."""

    name: str
    experiment: Experiment
    options: RunOptions


@dataclass(frozen=True)
class JobEvents:
    """Callbacks by a run's name: on its start, on a message for the user, and on its end, with its error or None.

    ``enough`` is called often while the run is in progress, and returns True to stop it after its current round.
    """

    began: Callable[[str], None]
    notice: Callable[[str, str], None]
    over: Callable[[str, FedloomError | None], None]
    enough: Callable[[str], bool] = lambda name: False


@dataclass
class _Running:
    job: Job
    place: int
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    report: Path


def run_parallel(jobs: Iterable[Job], count: int, parallel: int, events: JobEvents, *, signals: bool) -> None:
    """Execute runs as ``fedloom run`` processes, at most ``parallel`` at a time.

    The ``count`` jobs are taken one by one, each when a process is free for it. A process stops when its standard input
    closes, which happens even if this process is killed. With ``signals``, SIGINT or SIGTERM stops all runs after their
    current round, and a second signal at once.

    Raise InterruptedRun if the runs were stopped; those in progress can be resumed.
    """
    stop = StopRequest()
    with tempfile.TemporaryDirectory(prefix="fedloom-sweep-") as temporary:
        pool = _Pool(jobs, parallel, events, Path(temporary))
        try:
            with stop.signals() if signals else nullcontext():
                while True:
                    if not stop.event.is_set():
                        pool.start()
                    if not pool.running:
                        break
                    time.sleep(POLL_INTERVAL_S)
                    if stop.event.is_set():
                        pool.ask_to_stop()
                    pool.reap(stopped=stop.event.is_set())
        finally:
            pool.end()
    if stop.event.is_set():
        raise InterruptedRun(
            f"stop requested: {pool.done} of {pluralize(count, 'run')} done; continue the others with "
            f"{argument('resume')}"
        )


class _Pool:
    """Pool of processes for a queue of runs."""

    def __init__(self, jobs: Iterable[Job], parallel: int, events: JobEvents, folder: Path) -> None:
        self._waiting: Iterator[Job] = iter(jobs)
        self.running: list[_Running] = []
        self.done = 0
        self._parallel, self._events, self._folder = parallel, events, folder

    def start(self) -> None:
        """Start queued runs while processes are free."""
        while len(self.running) < self._parallel and (job := next(self._waiting, None)) is not None:
            place = min(set(range(self._parallel)) - {one.place for one in self.running})
            self.running.append(_start(job, place, self._parallel, self._folder))
            self._events.began(job.name)

    def ask_to_stop(self) -> None:
        """Stop the running processes after their current round."""
        for one in self.running:
            _request_stop(one)

    def reap(self, *, stopped: bool) -> None:
        """Report the runs that have ended, except those interrupted by a stop."""
        for one in self.running:
            if self._events.enough(one.job.name):
                _request_stop(one)
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            error, notices = _outcome(one)
            for text in notices:
                self._events.notice(one.job.name, text)
            self.done += error is None
            if not (stopped and isinstance(error, InterruptedRun)):
                self._events.over(one.job.name, error)

    def end(self) -> None:
        """Terminate the running processes at once; their runs can be resumed from the last checkpoint."""
        for one in self.running:
            _request_stop(one)
            one.process.send_signal(signal.SIGTERM)
        for one in self.running:
            try:
                one.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            one.stderr.close()


def core_shares(parallel: int) -> list[set[int]]:
    """Return the cores for each of ``parallel`` processes; the shares are disjoint while there are enough cores.

    The sets are empty if the operating system does not support CPU affinity.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * parallel
    cores = sorted(os.sched_getaffinity(0))
    n = len(cores)
    return [
        set(cores[i * n // parallel : (i + 1) * n // parallel]) if n >= parallel else {cores[i % n]}
        for i in range(parallel)
    ]


def _start(job: Job, place: int, parallel: int, folder: Path) -> _Running:
    file = folder / f"{len(list(folder.glob('*.yaml')))}.yaml"
    report = file.with_suffix(".jsonl")
    write_atomically(file, job.experiment.resolved_yaml().encode(), durably=False)
    stderr = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed when the run is over)
    process = subprocess.Popen(
        command("run", str(file), *_arguments(job.options)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C reaches this process only
        env=environment(os.environ, report, job.experiment.code, ends_with_parent=True),
    )
    if share := core_shares(parallel)[place]:
        with suppress(ProcessLookupError):  # it has already ended and reports why
            os.sched_setaffinity(process.pid, share)
    return _Running(job, place, process, stderr, report)


def _arguments(options: RunOptions) -> list[str]:
    found = ["--out", str(options.out), "--report" if options.report else "--no-report"]
    found += ["--resume"] * options.resume
    for option, value in (("--partition", options.partition), ("--publish", options.publish)):
        found += [] if value is None else [option, value]
    for name in options.track:
        found += ["--track", name]
    return [*found, *options.serves]


def _request_stop(one: _Running) -> None:
    if one.process.stdin is not None and not one.process.stdin.closed:
        one.process.stdin.close()


def _outcome(one: _Running) -> tuple[FedloomError | None, list[str]]:
    """Return the error of a run (None if it finished) and its messages for the user."""
    _request_stop(one)
    with one.stderr as stderr:
        stderr.seek(0)
        text = stderr.read().decode(errors="replace")
    report, code = ChildReport(one.report), one.process.returncode
    if code == 0:
        return None, report.notices
    failure = report.failure or WorkerLostError(
        f"its process {report.ended(code, text)}", hint=f"continue with {argument('resume')}"
    )
    return failure, report.notices
