"""Reasons why tasks of a Kubeflow run fail or do not start.

Kubeflow's API reports neither the error of a task nor why a pod does not start. A task prints its error, which is in
the log of its pod; the rest is in the run's Workflow, for users with credentials of the cluster.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fedloom.cluster.api import Api
from fedloom.core.words import parsed_json
from fedloom.errors import FedloomError, InterruptedRun, QuorumError, WorkerLostError, argument, from_json
from fedloom.kubeflow.client import Kubeflow
from fedloom.kubeflow.steps import FAILURE_MARK

log = logging.getLogger("fedloom.kubeflow")

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
        if not INTERNAL.fullmatch(prepared := name.removesuffix("-driver")):
            return prepared
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
    """Return the error of a failed run: the one that the failed task recorded, else ``QuorumError``.

    Parameters
    ----------
    run, nodes
        The run, and its nodes.
    """
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
    why = "; ".join(list(dict.fromkeys(map(str, early)))[:REASONS]) or unknown
    return QuorumError(
        f"{', '.join(failed) or 'the run'} failed without a recorded reason ({why})",
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
