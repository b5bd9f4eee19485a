"""Parallel runs: one process each, with its own share of the cores, none of which outlives the caller."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedloom.errors import FedloomError, InterruptedRun, WorkerLostError, argument
from fedloom.experiment import Experiment
from fedloom.processes import Told, command, environment
from fedloom.runner.options import RunOptions
from fedloom.runner.stop_request import StopRequest
from fedloom.words import pluralize

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


@dataclass
class _Running:
    job: Job
    place: int
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    told: Path


def run_side_by_side(
    jobs: Sequence[Job],
    parallel: int,
    began: Callable[[str], None],
    over: Callable[[str, FedloomError | None], None],
    notice: Callable[[str, str], None],
    *,
    signals: bool,
) -> None:
    """Execute runs as ``fedloom run`` processes, at most ``parallel`` at a time.

    A process stops when its standard input closes, which happens even if this process is killed.

    Parameters
    ----------
    began, over
        Called with the name of a run when it begins, and when it is over together with its error, or None.
    notice
        Called before ``over`` with the name of a run and a message for the user, e.g. that a tracker failed.
    signals
        Stop all runs after their current round on SIGINT or SIGTERM; a second signal stops them at once.

    Raises
    ------
    InterruptedRun
        If the runs were stopped; those in progress can be resumed.
    """
    stop = StopRequest()
    waiting = list(reversed(jobs))
    running: list[_Running] = []
    done, told = 0, False
    with tempfile.TemporaryDirectory(prefix="fedloom-sweep-") as temporary:
        try:
            with stop.signals() if signals else nullcontext():
                while running or (waiting and not stop.event.is_set()):
                    while waiting and len(running) < parallel and not stop.event.is_set():
                        job = waiting.pop()
                        place = min(set(range(parallel)) - {one.place for one in running})
                        running.append(_start(job, place, parallel, Path(temporary)))
                        began(job.name)
                    time.sleep(POLL_INTERVAL_S)
                    if stop.event.is_set() and not told:
                        told = True
                        for one in running:
                            _leave(one)
                    for one in [one for one in running if one.process.poll() is not None]:
                        running.remove(one)
                        error, notices = _outcome(one)
                        for text in notices:
                            notice(one.job.name, text)
                        done += error is None
                        if not (stop.event.is_set() and isinstance(error, InterruptedRun)):
                            over(one.job.name, error)
        finally:
            _end(running)
    if stop.event.is_set():
        raise InterruptedRun(
            f"asked to stop: {done} of {pluralize(len(jobs), 'run')} done; the others can go on with "
            f"{argument('resume')}"
        )


def shares(parallel: int) -> list[set[int]]:
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
    told = file.with_suffix(".jsonl")
    file.write_text(job.experiment.resolved_yaml(), encoding="utf-8")
    said = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed when the run is over)
    process = subprocess.Popen(
        command("run", str(file), "--until-eof", *_arguments(job.options)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=said,
        start_new_session=True,  # Ctrl-C reaches this process only
        env=environment(os.environ, told, getattr(job.experiment.model, "factory", None)),
    )
    if share := shares(parallel)[place]:
        with suppress(ProcessLookupError):  # it has already ended and reports why
            os.sched_setaffinity(process.pid, share)
    return _Running(job, place, process, said, told)


def _arguments(options: RunOptions) -> list[str]:
    found = ["--out", str(options.out), "--report" if options.report else "--no-report"]
    found += ["--resume"] * options.resume
    for option, value in (("--partition", options.partition), ("--publish", options.publish)):
        found += [] if value is None else [option, value]
    for name in options.track:
        found += ["--track", name]
    return [*found, *options.serves]


def _leave(one: _Running) -> None:
    if one.process.stdin is not None and not one.process.stdin.closed:
        one.process.stdin.close()


def _outcome(one: _Running) -> tuple[FedloomError | None, list[str]]:
    """Return the error of a run (None if it finished) and its messages for the user."""
    _leave(one)
    with one.said as said:
        said.seek(0)
        words = said.read().decode(errors="replace")
    told, code = Told(one.told), one.process.returncode
    if code == 0:
        return None, told.notices
    failure = told.failure or WorkerLostError(
        f"its process {told.ended(code, words)}", hint=f"go on with {argument('resume')}"
    )
    return failure, told.notices


def _end(running: Sequence[_Running]) -> None:
    """Terminate the running processes at once; their runs can be resumed from the last checkpoint."""
    for one in running:
        _leave(one)
        one.process.send_signal(signal.SIGTERM)
    for one in running:
        try:
            one.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.said.close()
