"""Runs in progress on Kubeflow: wait for one, stop one, and explain why its tasks fail or do not start.

Kubeflow's API reports neither the error of a task nor why a pod does not start. A task prints its error, which is in
the log of its pod; the rest is in the run's Workflow, for users with credentials of the cluster.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fedloom.cluster.api import Api
from fedloom.core.words import parsed_json
from fedloom.errors import (
    ExperimentError,
    FedloomError,
    InterruptedRun,
    QuorumError,
    RefusedError,
    StorageError,
    WorkerLostError,
    argument,
    from_json,
)
from fedloom.kubeflow.client import Kubeflow
from fedloom.kubeflow.steps import FAILURE_MARK

log = logging.getLogger("fedloom.kubeflow")

POLL_S = 5.0
PATIENCE_S = 300.0
"""Seconds that the API may be unreachable while waiting for a run."""

ENDS = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
STOPPED = ("CANCELING", "CANCELED")
OMITTED = "RUNTIME_STATE_UNSPECIFIED"
"""State of a task that is not run because one before it has failed."""
PENDING_S = 60.0
"""Seconds that a pod may be pending before a hint is shown."""


def wait_for_run(kubeflow: Kubeflow, run: str, say: Callable[[str], None]) -> None:
    """Wait for a run to end, and report the progress of its tasks.

    Raise the error that the failed task recorded, else QuorumError, if it failed; InterruptedRun if it was stopped. The
    run continues after the others: InterruptedRun on Ctrl-C or SIGTERM, RefusedError if the token expires, StorageError
    if Kubeflow is unreachable for five minutes.
    """
    progress, is_stopped, reached_at = _Progress(kubeflow, run, say), False, time.monotonic()
    with _continuing(kubeflow, run):
        while True:
            try:
                now = kubeflow.run(run)
                reached_at = time.monotonic()
                nodes = (now.run_details and now.run_details.task_details) or []
                progress.update(nodes)
                is_stopped = is_stopped or now.state in STOPPED
                if now.state in ENDS:
                    break
            except StorageError as error:
                if time.monotonic() - reached_at > PATIENCE_S:
                    raise StorageError(f"{error}\n  the run continues: {kubeflow.link(run)}") from error
            except RefusedError as error:
                raise RefusedError(f"{error}\n  the run continues: {kubeflow.link(run)}") from error
            time.sleep(POLL_S)
    if now.state == "SUCCEEDED":
        return
    if is_stopped:  # Kubeflow ends a stopped run as FAILED
        raise InterruptedRun(f"the run was stopped: {kubeflow.link(run)}")
    raise failure_of(kubeflow, now, nodes)


@contextmanager
def _continuing(kubeflow: Kubeflow, run: str) -> Iterator[None]:
    """On Ctrl-C or SIGTERM in the block, tell that the run continues."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise InterruptedRun(
            f"the run continues: {kubeflow.link(run)}",
            hint=f"fedloom pipeline wait {run} waits for it, fedloom pipeline stop {run} stops it",
        ) from error


class _Progress:
    """Reporter of the tasks of a run as they change, by the names that the pipeline's author gave them."""

    def __init__(self, kubeflow: Kubeflow, run: str, say: Callable[[str], None]) -> None:
        self._run, self._namespace = run, kubeflow.namespace or PODS_NAMESPACE
        self._say = say
        self._shown: dict[str, str] = {}  # state by task
        self._pending_since: dict[str, float] = {}
        self._reported: set[str] = set()  # tasks and pods of which it was said that they are pending

    def update(self, nodes: Sequence[Any]) -> None:
        """Report changes, and once for each pod that it has been pending for long."""
        for node, name, attempt in author_tasks(nodes):
            if attempt == 0 or node.state in (None, OMITTED) or self._shown.get(node.task_id) == node.state:
                continue
            self._shown[node.task_id] = node.state
            self._say(f"{name}{f', attempt {attempt + 1}' if attempt else ''}: {node.state.lower()}")
        now, pending_nodes = (
            time.monotonic(),
            [node for node in nodes if node.state == "PENDING" and not node.child_tasks],
        )
        self._pending_since = {node.task_id: self._pending_since.get(node.task_id, now) for node in pending_nodes}
        late = {node.task_id for node in pending_nodes if now - self._pending_since[node.task_id] > PENDING_S}
        if late - self._reported:
            self._reported |= late
            self._report_pending(nodes)

    def _report_pending(self, nodes: Sequence[Any]) -> None:
        """Report pods that have not started, with the Workflow's reasons if they can be read."""
        lines = [str(pod) for pod in workflow_pods(self._namespace, self._run, ("Pending",))]
        if not lines:
            lines = list(dict.fromkeys(name for node, name, _ in author_tasks(nodes) if node.state == "PENDING"))
        for line in lines or ["a task"]:
            if line not in self._reported:
                self._reported.add(line)
                command = diagnostic_command(self._namespace, self._run)
                self._say(f"{line}: a pod has not started for {PENDING_S:g} s ({command})")


def stop_run(kubeflow: Kubeflow, run: str) -> str | None:
    """Stop a run; return its state if it has already ended or is being stopped, else None.

    Raise FedloomError if there is no such run, or Kubeflow rejects the request or fails.
    """
    if (state := str(kubeflow.run(run).state)) in (*ENDS, *STOPPED):
        return state
    try:
        kubeflow.call(f"stop run {run}", "run_service_terminate_run", run)
    except ExperimentError:  # it ended meanwhile
        if (state := str(kubeflow.run(run).state)) not in (*ENDS, *STOPPED):
            raise
        return state
    return None


RUN_LABEL = "pipeline/runid"
"""Label of a run's Workflow and pods (kubeflow/pipelines, ``backend/src/apiserver/template/v2_template.go``)."""
PODS_NAMESPACE = "kubeflow"
"""Namespace of the runs' pods on a single-user installation."""
ENDED_EARLY = ("Failed", "Error")
"""Phases of nodes that ended early (argo-workflows, ``workflow/controller/operator.go``)."""
OUT_OF_MEMORY = "OOMKilled"
REASONS = 3
LENGTH = 400

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

CONSEQUENCES = (InterruptedRun, QuorumError, WorkerLostError)
"""Errors that a task may record if the kernel kills one of its processes for lack of memory."""


class WorkflowPod(NamedTuple):
    """Pod of a run's Workflow: the author's task that it belongs to, and Argo's message."""

    task: str
    message: str

    def __str__(self) -> str:
        """Return task and message in one line."""
        return f"{self.task}: {' '.join(self.message.split())}"[:LENGTH]


def diagnostic_command(namespace: str, run: str) -> str:
    """Return the command that shows why pods of a run do not start."""
    return f"kubectl describe workflows,pods -n {namespace} -l {RUN_LABEL}={run}"


def workflow_pods(namespace: str, run: str, phases: Sequence[str]) -> list[WorkflowPod]:
    """Return the pods of a run that are in one of these phases and have a message, the oldest first.

    Its Workflow is read with the credentials of ``fedloom cluster``; without any, or without such a Workflow in the
    namespace, there are none.
    """
    try:
        workflows = Api(namespace, patience_s=0.0).select("Workflow", f"{RUN_LABEL}={run}")[0]
    except FedloomError as error:
        log.debug("cannot read the workflow of run %s: %s", run, error)
        return []
    nodes = {
        name: node
        for workflow in workflows
        for name, node in ((workflow.get("status") or {}).get("nodes") or {}).items()
    }
    return [
        WorkflowPod(_author_task(nodes, node), str(node["message"]))
        for node in sorted(nodes.values(), key=lambda node: str(node.get("startedAt") or ""))
        if node.get("type") == "Pod" and node.get("phase") in phases and node.get("message")
    ]


def _author_task(nodes: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Return the author's name of the task that a node of a Workflow belongs to; the node's own if there is none."""
    own = name = _attempt(node.get("displayName"))[0]
    while INTERNAL.fullmatch(name):
        if not INTERNAL.fullmatch(task := name.removesuffix("-driver")):
            return task
        node = nodes.get(str(node.get("boundaryID")), {})  # the group that the node is in
        name = _attempt(node.get("displayName"))[0]
    return name or own


def _attempt(name: Any) -> tuple[str, int | None]:
    """Return the name of a node without its attempt, and the attempt."""
    attempt = ATTEMPT.fullmatch(str(name or ""))
    return (attempt[1], int(attempt[2])) if attempt else (str(name or ""), None)


def author_tasks(nodes: Sequence[Any]) -> Iterator[tuple[Any, str, int | None]]:
    """Yield the API's nodes of the author's tasks, with the author's name and the attempt (None: of all)."""
    # Ids of nodes are the workflow's name and a number; the workflow is a node, too.
    workflows = {child.pod_name.rpartition("-")[0] for node in nodes for child in _children(node)}
    for node in nodes:
        name, attempt = _attempt(node.display_name)
        if not INTERNAL.fullmatch(name) and name not in workflows:
            yield node, name, attempt


def _children(node: Any) -> list[Any]:
    return [child for child in node.child_tasks or () if child.pod_name]


def failure_of(kubeflow: Kubeflow, run: Any, nodes: Sequence[Any]) -> FedloomError:
    """Return the error of a failed run: the one that the failed task recorded, else ``QuorumError``."""
    namespace, link = kubeflow.namespace or PODS_NAMESPACE, kubeflow.link(run.run_id)
    ends: dict[str, set[str]] = {}  # end states by task
    for node, name, attempt in author_tasks(nodes):
        if attempt is None:
            ends.setdefault(name, set()).add(node.state)
    failed = [name for name, states in ends.items() if "FAILED" in states]
    pods = list(_executor_pods(kubeflow, run, nodes))
    records = list(_records(lambda pod: kubeflow.log(run.run_id, pod), pods))
    records = records or list(_records(lambda pod: _log_of_pod(namespace, pod), pods))
    # A task that succeeded when it was retried also has records of failures.
    last = [record for record in records if "SUCCEEDED" not in ends.get(_task_of(record), ())]
    first = next(iter(last or records), None)
    early = workflow_pods(namespace, run.run_id, ENDED_EARLY)
    for pod in early:
        killed = pod.task in failed and pod.message.startswith(OUT_OF_MEMORY)
        if killed and (first is None or (_task_of(first) == pod.task and isinstance(first, CONSEQUENCES))):
            setting = f"tasks.{pod.task}.limits.memory in the file of {argument('pods')}"
            return QuorumError(f"{pod}: the pod exceeded its memory limit", hint=f"raise {setting}; its log: {link}")
    if first is not None:
        return type(first)(str(first), hint=f"its log: {link}")
    unknown = "possibly a missing image, service account or quota, lack of memory, or a deadline"
    reason = "; ".join(list(dict.fromkeys(map(str, early)))[:REASONS]) or unknown
    return QuorumError(
        f"{', '.join(failed) or 'the run'} failed without a recorded reason ({reason})",
        hint=f"{link}, or {diagnostic_command(namespace, run.run_id)}",
    )


def _task_of(record: FedloomError) -> str:
    return record.message.partition(": ")[0]


def _executor_pods(kubeflow: Kubeflow, run: Any, nodes: Sequence[Any]) -> Iterator[str]:
    """Yield the names that the pods of failed tasks may have (``container.go`` of Kubeflow's compiler)."""
    reference, prefixes = run.pipeline_version_reference, {""}
    with suppress(FedloomError, AttributeError, KeyError, TypeError):  # its version was deleted, or cannot be read
        method = "pipeline_service_get_pipeline_version"
        version = kubeflow.call("read a version", method, reference.pipeline_id, reference.pipeline_version_id)
        platform = version.pipeline_spec["platform_spec"]["platforms"]["kubernetes"]
        for pod in platform["deploymentSpec"]["executors"].values():
            if metadata := pod.get("podMetadata"):
                counts = (len(metadata.get(key, ())) for key in ("annotations", "labels"))
                prefixes.add("-".join(("metadata", *map(str, counts), "")))
    failed = [child.pod_name for node in nodes if node.state == "FAILED" for child in _children(node)]
    for child in dict.fromkeys(failed):
        workflow, _, number = child.rpartition("-")
        for prefix in sorted(prefixes):
            yield from (f"{workflow}-{prefix}{template}-{number}" for template in EXECUTOR_TEMPLATES)


def _records(log_of: Callable[[str], str], pods: Iterable[str]) -> Iterator[FedloomError]:
    """Yield the failures that pods have recorded in their logs (:func:`fedloom.kubeflow.steps.step`).

    Kubeflow's launcher exits with 1 whatever a component's exit code is, and the API does not report a task's error.
    """
    for pod in pods:
        for line in log_of(pod).splitlines():
            if line.startswith(FAILURE_MARK):
                with suppress(ValueError, KeyError, TypeError):
                    yield from_json(parsed_json(line.removeprefix(FAILURE_MARK)))


def _log_of_pod(namespace: str, pod: str) -> str:
    """Return a pod's log from the cluster; empty if it cannot be read.

    A single-user Kubeflow reads only logs that Argo has archived: it looks for the pod in a namespace without a name
    (kubeflow/pipelines 2.17, ``backend/src/apiserver/resource/resource_manager.go``, ``readRunLogFromPod``).
    """
    try:
        return Api(namespace, patience_s=0.0).log(pod, "main")
    except FedloomError as error:
        log.debug("cannot read the log of %s: %s", pod, error)
        return ""
