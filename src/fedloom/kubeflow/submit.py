"""Submission of a pipeline: upload a version, start a run, and wait for it."""

from __future__ import annotations

import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import fedloom
from fedloom.core.words import parsed_json
from fedloom.errors import (
    ExperimentError,
    FedloomError,
    InterruptedRun,
    QuorumError,
    RefusedError,
    StorageError,
    from_json,
)
from fedloom.kubeflow import compiling
from fedloom.kubeflow.api import Conflict, Kubeflow
from fedloom.kubeflow.pods import PipelineChanges
from fedloom.kubeflow.run_diagnosis import cluster_reasons, diagnostic_command
from fedloom.kubeflow.steps import FAILURE_MARK
from fedloom.kubeflow.store_secret import StoreSecret

POLL_S = 5.0
PATIENCE_S = 300.0
"""Seconds that the API may be unreachable while waiting for a run."""

ENDS = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
STOPPED = ("CANCELING", "CANCELED")
OMITTED = "RUNTIME_STATE_UNSPECIFIED"
"""State of a task that is not run because one before it has failed."""
PODS_NAMESPACE = "kubeflow"
"""Namespace of the runs' pods on a single-user installation."""
PENDING_S = 60.0
"""Seconds that a pod may be pending before a hint is shown."""

INTERNAL = re.compile(
    r".*-driver|root|executor|iteration-item|iteration-iterations(\(\d+:\d+\))?"
    r"|(exit-handler|for-loop|condition|condition-branches)-\d+(\.onExit)?"
)
"""Pattern of the names of nodes that Kubeflow adds, except the workflow; all others are the author's tasks."""

ATTEMPT = re.compile(r"(.+?)\((\d+)\)")
"""Pattern of an attempt's name: a node that Argo may retry has a child for each attempt, numbered from 0."""

EXECUTOR_TEMPLATES = ("system-container-impl", "retry-system-container-impl")
"""Templates of the pods that run components; a pod is named after its workflow, template and node.

The names of pods with annotations or labels begin with ``metadata-ANNOTATIONS-LABELS-``, the numbers of each.
"""

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
    """Started run, or created schedule: its id, the URL of its page, and the id of its pipeline."""

    run: str
    link: str
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
    return Started(run, kubeflow.link(run), found.pipeline)


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
    raise _failure(kubeflow, now, nodes)


class _Progress:
    """Reporter of the tasks of a run as they change, by the names that the pipeline's author gave them."""

    def __init__(self, kubeflow: Kubeflow, run: str, say: Say) -> None:
        self._run, self._namespace = run, kubeflow.namespace or PODS_NAMESPACE
        self._say = say
        self._shown: dict[str, str] = {}
        self._pending_since: float | None = None

    def update(self, nodes: Sequence[Any]) -> None:
        """Report changes, and a command to diagnose a pod that has been pending for long."""
        for node, name, attempt in _author_tasks(nodes):
            if attempt == 0 or node.state in (None, OMITTED) or self._shown.get(node.task_id) == node.state:
                continue
            self._shown[node.task_id] = node.state
            self._say(f"{name}{f', attempt {attempt + 1}' if attempt else ''}: {node.state.lower()}")
        if not any(node.state == "PENDING" for node in nodes):
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = time.monotonic()
        elif time.monotonic() - self._pending_since > PENDING_S:
            self._pending_since = float("inf")  # once is enough
            why = "; ".join(cluster_reasons(self._namespace, self._run)) or "its image or resources may be missing"
            where = diagnostic_command(self._namespace, self._run)
            self._say(f"a pod has not started for {PENDING_S:g} s: {why} ({where})")


def _author_tasks(nodes: Sequence[Any]) -> Iterator[tuple[Any, str, int | None]]:
    """Yield the nodes of the author's tasks, with the author's name and the attempt (None: of all)."""
    # Ids of nodes are the workflow's name and a number; the workflow is a node, too.
    ids = [child.pod_name for node in nodes for child in node.child_tasks or () if child.pod_name]
    workflows = {one.rpartition("-")[0] for one in ids}
    for node in nodes:
        attempt = ATTEMPT.fullmatch(node.display_name or "")
        name = attempt[1] if attempt else node.display_name or ""
        if not INTERNAL.fullmatch(name) and name not in workflows:
            yield node, name, int(attempt[2]) if attempt else None


def _failure(kubeflow: Kubeflow, ended: Any, nodes: Sequence[Any]) -> FedloomError:
    run = ended.run_id
    ends: dict[str, set[str]] = {}  # end states by task
    for node, name, attempt in _author_tasks(nodes):
        if attempt is None:
            ends.setdefault(name, set()).add(node.state)
    failed = [name for name, states in ends.items() if "FAILED" in states]
    records = list(_records(kubeflow, run, nodes, _executor_templates(kubeflow, ended)))
    # A task that succeeded when it was retried also has records of failures.
    last = [record for record in records if "SUCCEEDED" not in ends.get(record.message.partition(": ")[0], ())]
    if records:
        first = (last or records)[0]
        return type(first)(str(first), hint=f"its log: {kubeflow.link(run)}")
    names = ", ".join(failed) or "the run"
    namespace = kubeflow.namespace or PODS_NAMESPACE
    unknown = "possibly a missing image, service account or quota, lack of memory, or a deadline"
    why = "; ".join(cluster_reasons(namespace, run)) or unknown
    return QuorumError(
        f"{names} failed without a recorded reason ({why})",
        hint=f"{kubeflow.link(run)}, or {diagnostic_command(namespace, run)}",
    )


def _executor_templates(kubeflow: Kubeflow, run: Any) -> list[str]:
    """Return the templates of the pods that run components in a run (``container.go`` of Kubeflow's compiler)."""
    reference, found = run.pipeline_version_reference, set()
    if reference is not None and reference.pipeline_version_id:
        with suppress(FedloomError):  # its version was deleted, or cannot be read
            for pod in _executors(kubeflow.version_spec(reference.pipeline_id, reference.pipeline_version_id)):
                if metadata := pod.get("podMetadata"):
                    counts = (len(metadata.get(key, ())) for key in ("annotations", "labels"))
                    found.add("-".join(("metadata", *map(str, counts), "")))
    return [f"{prefix}{template}" for prefix in ("", *sorted(found)) for template in EXECUTOR_TEMPLATES]


def _executors(spec: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of the pods of a version's tasks."""
    platform = (spec or {}).get("platform_spec") or {}
    of_kubernetes = (platform.get("platforms") or {}).get("kubernetes") or {}
    yield from ((of_kubernetes.get("deploymentSpec") or {}).get("executors") or {}).values()


def _records(kubeflow: Kubeflow, run: str, nodes: Sequence[Any], templates: Sequence[str]) -> Iterator[FedloomError]:
    """Yield the failures that the pods of failed tasks have recorded (:func:`fedloom.kubeflow.steps.step`).

    Kubeflow's launcher exits with 1 whatever a component's exit code is, and the API does not report a task's error.
    """
    failed = [node for node in nodes if node.state == "FAILED"]
    children = dict.fromkeys(child.pod_name for node in failed for child in node.child_tasks or () if child.pod_name)
    for child in children:
        workflow, _, number = child.rpartition("-")
        for template in templates:
            for line in kubeflow.log(run, f"{workflow}-{template}-{number}").splitlines():
                if line.startswith(FAILURE_MARK):
                    with suppress(ValueError, KeyError, TypeError):
                        yield from_json(parsed_json(line.removeprefix(FAILURE_MARK)))


def stop_run(kubeflow: Kubeflow, run: str) -> bool:
    """Stop a run; return False if it has already ended or is being stopped.

    Raises
    ------
    FedloomError
        If there is no such run, or Kubeflow rejects the request or fails.
    """
    if kubeflow.run(run).state in (*ENDS, *STOPPED):
        return False
    try:
        kubeflow.terminate(run)
    except ExperimentError:  # it ended meanwhile
        if kubeflow.run(run).state not in (*ENDS, *STOPPED):
            raise
        return False
    return True


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
