"""Submitting a pipeline: a version is uploaded, a run is started, and waited for."""

from __future__ import annotations

import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.errors import FAILURES, FedloomError, InterruptedRun, QuorumError, RefusedError, StorageError
from fedloom.kubeflow import compiling
from fedloom.kubeflow.api import Conflict, Kubeflow

POLL_S = 5.0
PATIENCE_S = 300.0
"""How long the API may be out of reach while a run is waited for."""

ENDS = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
CODE = re.compile(r"exit (?:code|status):? (\d+)")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What is to be run.

    Attributes
    ----------
    pipeline
        Its name.
    arguments
        Its parameters.
    name
        Of the run; made unique.
    experiment
        Kubeflow experiment in which the run is shown; made if it is not there.
    service_account, root
        Service account of its pods, and where its artifacts go; None for what the installation says.
    """

    pipeline: str
    arguments: Mapping[str, Any]
    name: str
    experiment: str
    service_account: str | None = None
    root: str | None = None


class Started(NamedTuple):
    """A run: its id, and where it is shown."""

    run: str
    link: str


def submit(kubeflow: Kubeflow, order: Order, say: Say) -> Started:
    """Upload a pipeline's version if it is not there, and start a run of it.

    The version is named by its content, so that the same pipeline is uploaded once. If anything fails, or somebody
    interrupts, before the run is known to be started, all that was made is removed again.

    Raises
    ------
    FedloomError
        If the pipeline cannot be compiled, or Kubeflow refuses or fails.
    InterruptedRun
        On Ctrl-C.
    """
    try:
        return _submitted(kubeflow, order, say)
    except KeyboardInterrupt as error:
        raise InterruptedRun("interrupted before the run was started; nothing of it is left") from error


def _submitted(kubeflow: Kubeflow, order: Order, say: Say) -> Started:
    kubeflow.check()
    name = compiling.check_name(order.pipeline).replace("_", "-")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as made:
        file = Path(folder) / f"{name}.yaml"
        compiling.compile_to(order.pipeline, file)
        pipeline = _one(
            made,
            lambda: kubeflow.pipeline(name),
            lambda: kubeflow.make_pipeline(name, compiling.pipeline(order.pipeline).component_spec.description or ""),
            kubeflow.delete_pipeline,
            say,
        )
        called = compiling.version_of(file)
        version = _one(
            made,
            lambda: kubeflow.version(pipeline, called),
            lambda: kubeflow.upload(pipeline, called, file),
            lambda found: kubeflow.delete_version(pipeline, found),
            say,
        )
        experiment = _one(
            made,
            lambda: kubeflow.experiment(order.experiment),
            lambda: kubeflow.make_experiment(order.experiment),
            kubeflow.delete_experiment,
            say,
        )
        say(f"pipeline {name}, version {called}")
        unique = f"{order.name}-{uuid.uuid4().hex[:8]}"
        _undone(made, say, lambda: _withdraw(kubeflow, unique, experiment))
        run = kubeflow.start(
            unique, experiment, pipeline, version, dict(order.arguments), order.service_account, order.root
        )
        made.pop_all()
    return Started(run, kubeflow.link(run))


def _one(
    made: ExitStack,
    find: Callable[[], str | None],
    make: Callable[[], str],
    delete: Callable[[str], None],
    say: Say,
) -> str:
    """Find something or make it; what is made is deleted again if the block of the stack ends early."""
    if (before := find()) is not None:
        return before

    def undo() -> None:
        # By name: a request that was cut short may have been heard all the same.
        if (left := find()) is not None:
            delete(left)

    with ExitStack() as own:
        _undone(own, say, undo)
        try:
            found = make()
        except Conflict:  # somebody else made it meanwhile, and keeps it
            own.pop_all()
            if (theirs := find()) is None:
                raise
            return theirs
        made.enter_context(own.pop_all())
    return found


def _undone(made: ExitStack, say: Say, undo: Callable[[], None]) -> None:
    """Have something undone if the block of the stack ends early, which does not hide why it ends."""

    def attempt() -> None:
        try:
            undo()
        except FedloomError as error:
            say(f"something was left behind: {error}")

    made.callback(attempt)


def _withdraw(kubeflow: Kubeflow, name: str, experiment: str) -> None:
    for run in kubeflow.runs(name, experiment):
        kubeflow.terminate(run)
        kubeflow.delete_run(run)


def wait(kubeflow: Kubeflow, run: str, say: Say, *, poll_s: float = POLL_S) -> None:
    """Wait for a run's end, and tell what its tasks come to.

    Raises
    ------
    FedloomError
        If it failed: of the class of the task that failed, where its exit code is known, else ``QuorumError``.
    InterruptedRun
        If somebody stopped the run.
    RefusedError
        If the token expires meanwhile; the run goes on.
    StorageError
        If Kubeflow is out of reach for five minutes; the run goes on.
    """
    shown: dict[str, str] = {}
    reached = time.monotonic()
    while True:
        try:
            now = kubeflow.run(run)
        except StorageError as error:
            if time.monotonic() - reached > PATIENCE_S:
                raise StorageError(f"{error}\n  the run goes on: {kubeflow.link(run)}") from error
            time.sleep(poll_s)
            continue
        except RefusedError as error:
            raise RefusedError(f"{error}\n  the run goes on: {kubeflow.link(run)}") from error
        reached = time.monotonic()
        tasks = [task for task in (now.run_details and now.run_details.task_details) or () if _of_ours(task)]
        for task in tasks:
            if task.state and shown.get(task.task_id) != task.state:
                shown[task.task_id] = task.state
                say(f"{task.display_name}: {task.state.lower()}")
        if now.state in ENDS:
            break
        time.sleep(poll_s)
    if now.state == "CANCELED":
        raise InterruptedRun(f"the run was stopped: {kubeflow.link(run)}")
    if now.state != "SUCCEEDED":
        raise _failure(now, tasks, kubeflow.link(run))


def _of_ours(task: Any) -> bool:
    """Whether a task is one that a pipeline's author knows, and no driver or group of Kubeflow's own."""
    return not re.search(r"(^|-)driver$|^(root|executor|exit-handler-\d+|for-loop-\d+)$", task.display_name or "")


def _failure(run: Any, tasks: list[Any], link: str) -> FedloomError:
    failed = [task for task in tasks if task.state == "FAILED"]
    said = [task.error.message for task in failed if task.error and task.error.message]
    said += [run.error.message] if run.error and run.error.message else []
    codes = [int(code) for text in said for code in CODE.findall(text)]
    kind = next((FAILURES[code] for code in codes if code in FAILURES), QuorumError)
    names = ", ".join(dict.fromkeys(task.display_name for task in failed)) or "the run"
    why = f": {' '.join(said[0].split())[:500]}" if said else ""
    return kind(f"{names} failed{why}", hint=f"its log: {link}")


@contextmanager
def stopping(kubeflow: Kubeflow, started: Started, *, terminate: bool) -> Iterator[None]:
    """On Ctrl-C or SIGTERM in the block, stop the run or leave it, and say which.

    Raises
    ------
    InterruptedRun
        Then.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if terminate:
            kubeflow.terminate(started.run)
            raise InterruptedRun(f"stopped the run: {started.link}") from error
        raise InterruptedRun(
            f"the run goes on: {started.link}",
            hint=f"fedloom pipeline wait {started.run} waits for it, fedloom pipeline stop {started.run} stops it",
        ) from error
