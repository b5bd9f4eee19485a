"""Submission of a pipeline: upload a version, start a run, and wait for it."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import fedloom
from fedloom.errors import (
    ExperimentError,
    FedloomError,
    InterruptedRun,
    RefusedError,
    StorageError,
)
from fedloom.kubeflow import compiling
from fedloom.kubeflow.api import Conflict, Kubeflow
from fedloom.kubeflow.pods import PipelineChanges
from fedloom.kubeflow.run_diagnosis import (
    PODS_NAMESPACE,
    author_tasks,
    diagnostic_command,
    failure_of,
    workflow_pods,
)
from fedloom.kubeflow.store_secret import StoreSecret

POLL_S = 5.0
PATIENCE_S = 300.0
"""Seconds that the API may be unreachable while waiting for a run."""

ENDS = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
STOPPED = ("CANCELING", "CANCELED")
OMITTED = "RUNTIME_STATE_UNSPECIFIED"
"""State of a task that is not run because one before it has failed."""
PENDING_S = 60.0
"""Seconds that a pod may be pending before a hint is shown."""

UPLOADED = "Uploaded by fedloom."
"""Description of the versions that FedLoom uploads; it removes no others."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """Run to submit.

    Attributes
    ----------
    pipeline
        Name of the pipeline.
    arguments
        Its parameters.
    name
        Name of the run.
    experiment
        Kubeflow experiment in which the run is shown; created if it does not exist.
    service_account, root
        Service account of its pods, and location of its artifacts; None for the installation's defaults.
    changes
        Changes of the compiled pipeline, which make another version of it.
    store
        Keys of the Secret with the store's credentials, and the store's endpoint.
    """

    pipeline: str
    arguments: Mapping[str, Any]
    name: str
    experiment: str
    service_account: str | None = None
    root: str | None = None
    changes: PipelineChanges = field(default_factory=PipelineChanges)
    store: StoreSecret = field(default_factory=StoreSecret)


class Uploaded(NamedTuple):
    """Ids of a pipeline, its version, and the Kubeflow experiment for its runs."""

    pipeline: str
    version: str
    experiment: str


class Started(NamedTuple):
    """Started run, or created schedule: its id, the URL of its page if there is one, and the id of its pipeline."""

    run: str
    page: str | None
    pipeline: str


def submit_pipeline(kubeflow: Kubeflow, order: Order, say: Say) -> Started:
    """Upload a pipeline's version if it does not exist, and start a run of it.

    The version is named by its content, so that the same pipeline is uploaded once. If anything fails or is interrupted
    before the run is known to be started, everything created is removed again.

    Raises
    ------
    FedloomError
        If the pipeline cannot be compiled, or Kubeflow rejects a request or fails.
    InterruptedRun
        On Ctrl-C.
    """
    try:
        with ExitStack() as made:
            found = upload_pipeline(kubeflow, order, made, say)
            mark = submission_mark()
            on_failure(made, say, lambda: _withdraw(kubeflow, order.name, found.experiment, mark))
            run = kubeflow.start(
                order.name,
                found.experiment,
                found.pipeline,
                found.version,
                dict(order.arguments),
                order.service_account,
                order.root,
                mark,
            )
            made.pop_all()
    except KeyboardInterrupt as error:
        raise InterruptedRun("interrupted before the run was started; everything created was removed") from error
    return Started(run, kubeflow.page(run), found.pipeline)


def submission_mark() -> str:
    """Return a description that identifies what one call created, even if its name is taken."""
    return f"Submitted by fedloom {fedloom.__version__}, {uuid.uuid4().hex}."


def upload_pipeline(kubeflow: Kubeflow, order: Order, made: ExitStack, say: Say) -> Uploaded:
    """Find or create a pipeline, its version, and the Kubeflow experiment; what is created is deleted by the stack.

    Raises
    ------
    FedloomError
        If the pipeline cannot be compiled, or Kubeflow rejects a request or fails.
    """
    kubeflow.check()
    name = compiling.check_name(order.pipeline).replace("_", "-")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.yaml"
        compiling.compile_to(order.pipeline, file)
        order.changes.apply(file)
        order.store.apply(file)
        pipeline = _one(
            made,
            lambda: kubeflow.pipeline(name),
            lambda: kubeflow.make_pipeline(
                name, compiling.load_pipeline(order.pipeline).component_spec.description or ""
            ),
            kubeflow.delete_pipeline,
            say,
        )
        called = compiling.version_of(file)
        version = _one(
            made,
            lambda: kubeflow.version(pipeline, called),
            lambda: kubeflow.upload(pipeline, called, file, UPLOADED),
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
    return Uploaded(pipeline, version, experiment)


def _one(
    made: ExitStack,
    find: Callable[[], str | None],
    make: Callable[[], str],
    delete: Callable[[str], None],
    say: Say,
) -> str:
    """Find an object or create it; a created object is deleted again if the block of the stack ends early."""
    if (before := find()) is not None:
        return before

    def undo() -> None:
        # By name: an interrupted request may have been received.
        if (left := find()) is not None:
            delete(left)

    with ExitStack() as own:
        on_failure(own, say, undo)
        try:
            found = make()
        except Conflict:  # another process created it meanwhile, and keeps it
            own.pop_all()
            if (theirs := find()) is None:
                raise
            return theirs
        made.enter_context(own.pop_all())
    return found


def on_failure(made: ExitStack, say: Say, undo: Callable[[], None]) -> None:
    """Register an undo for when the block of the stack ends early; a failing undo does not hide why it ended."""

    def attempt() -> None:
        try:
            undo()
        except FedloomError as error:
            say(f"cleanup was incomplete: {error}")

    made.callback(attempt)


def _withdraw(kubeflow: Kubeflow, name: str, experiment: str, mark: str) -> None:
    for run in kubeflow.runs(name, experiment, mark):
        stop_run(kubeflow, run)
        kubeflow.delete_run(run)


def wait_for_run(kubeflow: Kubeflow, run: str, say: Say, *, poll_s: float = POLL_S) -> None:
    """Wait for a run to end, and report the progress of its tasks.

    Raises
    ------
    FedloomError
        If it failed: the error that the failed task recorded, else ``QuorumError``.
    InterruptedRun
        If the run was stopped.
    RefusedError
        If the token expires meanwhile; the run continues.
    StorageError
        If Kubeflow is unreachable for five minutes; the run continues.
    """
    progress, stopped = _Progress(kubeflow, run, say), False
    reached = time.monotonic()
    while True:
        try:
            now = kubeflow.run(run)
        except StorageError as error:
            if time.monotonic() - reached > PATIENCE_S:
                raise StorageError(f"{error}\n  the run continues: {kubeflow.link(run)}") from error
            time.sleep(poll_s)
            continue
        except RefusedError as error:
            raise RefusedError(f"{error}\n  the run continues: {kubeflow.link(run)}") from error
        reached = time.monotonic()
        nodes = (now.run_details and now.run_details.task_details) or []
        progress.update(nodes)
        stopped = stopped or now.state in STOPPED
        if now.state in ENDS:
            break
        time.sleep(poll_s)
    if now.state == "SUCCEEDED":
        return
    if stopped:  # Kubeflow ends a stopped run as FAILED
        raise InterruptedRun(f"the run was stopped: {kubeflow.link(run)}")
    raise failure_of(kubeflow, now, nodes)


class _Progress:
    """Reporter of the tasks of a run as they change, by the names that the pipeline's author gave them."""

    def __init__(self, kubeflow: Kubeflow, run: str, say: Say) -> None:
        self._run, self._namespace = run, kubeflow.namespace or PODS_NAMESPACE
        self._say = say
        self._shown: dict[str, str] = {}
        self._pending_since: dict[str, float] = {}
        self._told: set[str] = set()

    def update(self, nodes: Sequence[Any]) -> None:
        """Report changes, and once for each pod that it has been pending for long."""
        for node, name, attempt in author_tasks(nodes):
            if attempt == 0 or node.state in (None, OMITTED) or self._shown.get(node.task_id) == node.state:
                continue
            self._shown[node.task_id] = node.state
            self._say(f"{name}{f', attempt {attempt + 1}' if attempt else ''}: {node.state.lower()}")
        now, pending = time.monotonic(), [node for node in nodes if node.state == "PENDING" and not node.child_tasks]
        self._pending_since = {node.task_id: self._pending_since.get(node.task_id, now) for node in pending}
        late = [node for node in pending if now - self._pending_since[node.task_id] > PENDING_S]
        if late := [node for node in late if node.task_id not in self._told]:
            self._told |= {node.task_id for node in late}
            self._report_pending(late, nodes)

    def _report_pending(self, late: Sequence[Any], nodes: Sequence[Any]) -> None:
        """Report pods that have been pending for long, with the Workflow's reasons if they can be read."""
        where = diagnostic_command(self._namespace, self._run)
        pods = workflow_pods(self._namespace, self._run, ("Pending",))
        for node in late:
            if pods is None:
                running = {name: None for one, name, _ in author_tasks(nodes) if one.state in ("PENDING", "RUNNING")}
                driver = (node.display_name or "").partition("-driver(")
                task, why = driver[0] if driver[1] else " or ".join(running), ""
            else:  # only the Workflow tells which task a pod belongs to
                pod = next((pod for pod in pods if pod.name == node.display_name and pod.node not in self._told), None)
                if pod is None:  # it has started meanwhile
                    continue
                self._told.add(pod.node)
                task, why = pod.task, str(pod).removeprefix(f"{pod.task}: ")
            why = why or "its image or resources may be missing"
            self._say(f"{task}: a pod has not started for {PENDING_S:g} s: {why} ({where})")


def stop_run(kubeflow: Kubeflow, run: str) -> str | None:
    """Stop a run; return its state if it has already ended or is being stopped, else None.

    Raises
    ------
    FedloomError
        If there is no such run, or Kubeflow rejects the request or fails.
    """
    if (state := str(kubeflow.run(run).state)) in (*ENDS, *STOPPED):
        return state
    try:
        kubeflow.terminate(run)
    except ExperimentError:  # it ended meanwhile
        if (state := str(kubeflow.run(run).state)) not in (*ENDS, *STOPPED):
            raise
        return state
    return None


@contextmanager
def stopping(kubeflow: Kubeflow, run: str, *, terminate: bool) -> Iterator[None]:
    """Stop the run or leave it running on Ctrl-C or SIGTERM in the block, and report which.

    Raises
    ------
    InterruptedRun
        On Ctrl-C or SIGTERM.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if terminate:
            stop_run(kubeflow, run)
            raise InterruptedRun(f"stopped the run: {kubeflow.link(run)}") from error
        raise InterruptedRun(
            f"the run continues: {kubeflow.link(run)}",
            hint=f"fedloom pipeline wait {run} waits for it, fedloom pipeline stop {run} stops it",
        ) from error
