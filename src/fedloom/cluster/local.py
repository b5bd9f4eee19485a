"""Backend ``local``: a federation as processes of this machine, by ``fedloom run``; imports neither torch nor gRPC."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.core.processes import ChildReport, environment, python
from fedloom.errors import FedloomError, InterruptedRun, QuorumError, WorkerLostError, argument

_ENDS_WITH_ITS_PARENT = """
import ctypes, os, runpy, signal, sys
parent = int(sys.argv.pop(1))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
runpy.run_module("fedloom", run_name="__main__", alter_sys=True)
"""
"""Code for ``python -m fedloom`` in a process that ends when the launcher is killed.

The new process sets this up itself: a ``preexec_fn`` may crash in a process with threads.
"""

STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals by which a person or the system asks a process to stop; any other that ends it is a crash."""

AGAIN = "run it again to continue"

STOP_S = 60.0
"""Seconds that a run may take to stop: the current round, and a checkpoint."""


def run_locally(
    experiment: Path,
    partition: Path,
    out: Path,
    *,
    publish: str | None = None,
    deadline_s: float | None = None,
    say: Callable[[str], None],
) -> None:
    """Run an experiment on a partition in separate processes.

    Raise the error with which the run ended.

    Parameters
    ----------
    experiment
        The experiment file.
    partition
        The partition's folder; no partition is made.
    out
        The run's folder. An existing run of the same experiment is resumed.
    publish
        URL at which the run is published as it grows; a run that exists only there is resumed from it.
    deadline_s
        Maximum duration of the run.
    say
        Called with the run's lines of progress.
    """
    command = python("-c", _ENDS_WITH_ITS_PARENT, str(os.getpid()))
    command += ["run", str(experiment), "--partition", str(partition)]
    command += ["--out", str(out), *([] if publish is None else ["--publish", publish])]
    command += ["--resume"] if publish is not None or (out / "experiment.yaml").exists() else []
    late = threading.Event()
    last = ""
    temporary = tempfile.TemporaryDirectory(prefix="fedloom-run-")
    reports = Path(temporary.name) / "reports.jsonl"
    # New session: Ctrl-C reaches only this process, which passes it on once, so that the current round can finish.
    with (
        temporary,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
            env=environment(os.environ, reports),
        ) as process,
    ):

        def stop() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(deadline_s or 0.0, stop)
        timer.daemon = True
        if deadline_s is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip("\n"))
                last = line if line.strip() else last
            code = process.wait()
            failure = _failure(code, ChildReport(reports), last, late=late.is_set(), deadline_s=deadline_s)
        except BaseException:
            _end(process)
            raise
        finally:
            timer.cancel()
    if failure is not None:
        raise failure


class Stopped(InterruptedRun):
    """Request to stop this process but not the federation."""


@contextmanager
def terminable(say: Callable[[str], None], note: str) -> Iterator[None]:
    """Turn SIGTERM in the block into an exception, like Ctrl-C.

    Raise Stopped on SIGTERM.
    """

    def handle(number: int, frame: object) -> None:
        raise Stopped("the launcher was asked to stop", hint=note or None)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except KeyboardInterrupt:
        if note:
            say(note)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _failure(
    code: int, reports: ChildReport, last: str, *, late: bool, deadline_s: float | None
) -> FedloomError | None:
    if code == 0:
        return None
    if late:
        return QuorumError(
            f"the federation exceeded its limit of {deadline_s:g} s (cluster.deadline_s)",
            hint="run it again with the same folder to continue from its last checkpoint",
        )
    if reports.failure is not None:
        return reports.failure
    if -code in STOPPING:
        return InterruptedRun(f"fedloom run was ended by signal {-code}", hint=AGAIN)
    reason = f"fedloom run {reports.ended(code, last)}"
    if code == -signal.SIGKILL:
        return QuorumError(
            reason,
            hint="raise the memory limit (of a Kubeflow task: tasks.federate.limits.memory in the file of "
            f"{argument('pods')}), or lower runtime.workers; then {AGAIN}",
        )
    return WorkerLostError(reason, hint=AGAIN)
