"""Execution of several runs: one after another in this process, or beside one another, each in a process of its own.

Processes share the cores, and none of them outlives the caller.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from fedloom.core.files import write_atomically
from fedloom.core.forks import Child
from fedloom.core.options import as_words
from fedloom.core.processes import ChildReport, environment
from fedloom.core.words import pluralize
from fedloom.engine.jobs import Job, JobObserver
from fedloom.engine.observer import RunObserver
from fedloom.engine.run_experiment import run_experiment
from fedloom.engine.stop_request import StopRequest
from fedloom.errors import FedloomError, InterruptedRun, WorkerLostError, argument
from fedloom.runs.files import METRICS

POLL_INTERVAL_S = 0.05
"""Seconds between checks for ended processes."""

GRACE_S = 15.0
"""Seconds until a terminated process is killed."""


class EarlyStop(InterruptedRun):
    """End of a run that was stopped because of an evaluation."""


class Jobs(ABC):
    """Runs to execute, which are yielded one by one, each when it can start, and what becomes of them."""

    count: int
    observer: JobObserver

    @abstractmethod
    def __iter__(self) -> Iterator[Job]:
        """Yield the runs."""

    @abstractmethod
    def ended(self, job: Job, error: FedloomError | None) -> None:
        """Handle the end of a run; an exception ends the others."""

    def evaluated(self, job: Job, line: Mapping[str, Any]) -> bool:
        """Handle an evaluation, possibly for the second time; return True to stop the run."""
        return False


def run_jobs(jobs: Jobs, parallel: int, *, signals: bool) -> None:
    """Execute runs, at most ``parallel`` at a time; with 1 in this process, otherwise as ``fedloom run`` processes.

    A process stops when its standard input closes, which happens even if this process is killed. With ``signals``,
    SIGINT or SIGTERM stops all runs after their current round, and a second signal at once.

    Raise InterruptedRun if the runs were stopped; those in progress can be resumed.
    """
    if parallel == 1:
        _one_by_one(jobs)
        return
    stop = StopRequest()
    with tempfile.TemporaryDirectory(prefix="fedloom-sweep-") as temporary:
        pool = _Pool(jobs, parallel, Path(temporary))
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
            f"stop requested: {pool.done} of {pluralize(jobs.count, 'run')} done; continue the others with "
            f"{argument('resume')}"
        )


def _one_by_one(jobs: Jobs) -> None:
    done_count = 0
    for job in jobs:
        error: FedloomError | None = None
        observer = jobs.observer.begins(job, beside=False)
        try:
            run_experiment(job.experiment, replace(job.options, watcher=_EvaluationWatcher(jobs, job)), observer)
        except EarlyStop as stopped:
            error = stopped
        except InterruptedRun as stopped:
            place = f"run {job.number} of {job.count}, {job.name}; {done_count} done"
            raise InterruptedRun(f"{stopped} ({place})") from stopped
        except FedloomError as failure:
            error = failure
        done_count += error is None
        _end(jobs, job, error)
        gc.collect()  # a run's objects form cycles; uncollected, they would grow to gigabytes over dozens of runs


class _EvaluationWatcher(RunObserver):
    """Observer that stops a run because of an evaluation."""

    def __init__(self, jobs: Jobs, job: Job) -> None:
        self._jobs, self._job = jobs, job

    def evaluated(self, line: dict[str, Any]) -> None:
        """Hand on the evaluation; raise EarlyStop if it stops the run."""
        if self._jobs.evaluated(self._job, line):
            raise EarlyStop(f"{self._job.name} was stopped after round {line['round']}")


def _evaluations_stop(jobs: Jobs, job: Job) -> bool:
    """Hand on the evaluations in a run's folder; return whether the last one stops the run."""
    return any([jobs.evaluated(job, line) for line in job.folder.evaluations()][-1:])


def _end(jobs: Jobs, job: Job, error: FedloomError | None) -> None:
    if error is None:
        _evaluations_stop(jobs, job)  # an earlier process may have ended before it handed them on
    jobs.ended(job, error)


@dataclass
class _Running:
    job: Job
    place: int
    process: Child
    stderr: IO[bytes]
    report: Path
    metrics_bytes: int = 0
    is_stopped: bool = False

    def request_stop(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def outcome(self) -> tuple[FedloomError | None, list[str]]:
        """Return the error of a run that has ended (None if it finished), and its messages for the user."""
        self.request_stop()
        with self.stderr as stderr:
            stderr.seek(0)
            text = stderr.read().decode(errors="replace")
        report, code = ChildReport(self.report), self.process.returncode
        if code == 0:
            return None, report.notices
        failure = report.failure or WorkerLostError(
            f"its process {report.ended(code, text)}", hint=f"continue with {argument('resume')}"
        )
        if self.is_stopped and isinstance(failure, InterruptedRun):
            failure = EarlyStop(failure.message)
        return failure, report.notices


class _Pool:
    """Pool of processes for runs."""

    def __init__(self, jobs: Jobs, parallel: int, folder: Path) -> None:
        self._jobs, self._waiting = jobs, iter(jobs)
        self.running: list[_Running] = []
        self.done = 0
        self._parallel, self._folder = parallel, folder

    def start(self) -> None:
        """Start runs while processes are free."""
        while len(self.running) < self._parallel and (job := next(self._waiting, None)) is not None:
            place = min(set(range(self._parallel)) - {one.place for one in self.running})
            self.running.append(_start(job, place, self._parallel, self._folder))
            self._jobs.observer.begins(job, beside=True)

    def ask_to_stop(self) -> None:
        """Stop the running processes after their current round."""
        for one in self.running:
            one.request_stop()

    def reap(self, *, stopped: bool) -> None:
        """Report the runs that have ended, except those interrupted by a stop."""
        for one in self.running:
            metrics = one.job.folder.path / METRICS
            size = metrics.stat().st_size if metrics.exists() else 0
            if size != one.metrics_bytes:
                one.metrics_bytes = size
                if _evaluations_stop(self._jobs, one.job):
                    one.is_stopped = True
                    one.request_stop()
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(one)
            error, notices = one.outcome()
            for text in notices:
                self._jobs.observer.notice(one.job, text)
            self.done += error is None
            if not (stopped and isinstance(error, InterruptedRun)):
                _end(self._jobs, one.job, error)
            if error is None:
                self._jobs.observer.ended(one.job, "done")

    def end(self) -> None:
        """Terminate the running processes at once; their runs can be resumed from the last checkpoint."""
        for one in self.running:
            one.request_stop()
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
    process = Child(
        ["run", str(file), *as_words(job.options)],
        stderr,
        environment(os.environ, report, job.experiment.code, ends_with_parent=True),
        core_shares(parallel)[place],
    )
    return _Running(job, place, process, stderr, report)
