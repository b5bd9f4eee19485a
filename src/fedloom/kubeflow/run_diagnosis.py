"""Reasons why tasks of a Kubeflow run fail or do not start.

Kubeflow's API reports neither the error of a task nor why a pod does not start. A task prints its error, which is in
the log of its pod; the rest is in the run's Workflow, for users with credentials of the cluster.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from fedloom.cluster.api import Api
from fedloom.core.words import parsed_json
from fedloom.errors import FedloomError, InterruptedRun, QuorumError, WorkerLostError, argument, from_json
from fedloom.kubeflow.api import Kubeflow
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


class WorkflowPod(NamedTuple):
    """Pod of a run's Workflow: the node's id and name, the author's task that it belongs to, and Argo's message."""

    node: str
    name: str
    task: str
    message: str

    def __str__(self) -> str:
        """Return task and message in one line."""
        return f"{self.task}: {' '.join(self.message.split())}"[:LENGTH]


def diagnostic_command(namespace: str, run: str) -> str:
    """Return the command that shows why pods of a run do not start."""
    return f"kubectl describe workflows,pods -n {namespace} -l {RUN_LABEL}={run}"


def workflow_pods(namespace: str, run: str, phases: Sequence[str]) -> list[WorkflowPod] | None:
    """Return the pods of a run that are in one of these phases according to its Workflow, the oldest first.

    It uses the credentials of ``fedloom cluster``. Returns None without any, or if they show no Workflow of the run.

    Parameters
    ----------
    namespace
        Namespace of the run's pods.
    run
        Id of the run.
    """
    try:
        workflows = Api(namespace, patience_s=0.0).select("Workflow", f"{RUN_LABEL}={run}")[0]
    except FedloomError as error:
        log.debug("cannot read the workflow of run %s: %s", run, error)
        return None
    if not workflows:  # the pods may be in another namespace
        return None
    nodes = {
        name: node
        for workflow in workflows
        for name, node in ((workflow.get("status") or {}).get("nodes") or {}).items()
    }
    return [
        WorkflowPod(name, str(node.get("displayName") or name), _author_task(nodes, node), str(node.get("message", "")))
        for name, node in sorted(nodes.items(), key=lambda item: str(item[1].get("startedAt") or ""))
        if node.get("type") == "Pod" and node.get("phase") in phases
    ]


def _author_task(nodes: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Return the author's name of the task that a node of a Workflow belongs to; the node's own if there is none."""
    own = name = _without_attempt(node.get("displayName"))
    while INTERNAL.fullmatch(name):
        if not INTERNAL.fullmatch(prepared := name.removesuffix("-driver")):
            return prepared
        node = nodes.get(str(node.get("boundaryID")), {})  # the group that the node is in
        name = _without_attempt(node.get("displayName"))
    return name or own


def _without_attempt(name: Any) -> str:
    attempt = ATTEMPT.fullmatch(str(name or ""))
    return attempt[1] if attempt else str(name or "")


def author_tasks(nodes: Sequence[Any]) -> Iterator[tuple[Any, str, int | None]]:
    """Yield the API's nodes of the author's tasks, with the author's name and the attempt (None: of all)."""
    # Ids of nodes are the workflow's name and a number; the workflow is a node, too.
    ids = [child.pod_name for node in nodes for child in node.child_tasks or () if child.pod_name]
    workflows = {one.rpartition("-")[0] for one in ids}
    for node in nodes:
        attempt = ATTEMPT.fullmatch(node.display_name or "")
        name = attempt[1] if attempt else node.display_name or ""
        if not INTERNAL.fullmatch(name) and name not in workflows:
            yield node, name, int(attempt[2]) if attempt else None


def failure_of(kubeflow: Kubeflow, ended: Any, nodes: Sequence[Any]) -> FedloomError:
    """Return the error of a failed run: the one that the failed task recorded, else ``QuorumError``.

    Parameters
    ----------
    ended
        The run.
    nodes
        Its nodes.
    """
    run, namespace = ended.run_id, kubeflow.namespace or PODS_NAMESPACE
    ends: dict[str, set[str]] = {}  # end states by task
    for node, name, attempt in author_tasks(nodes):
        if attempt is None:
            ends.setdefault(name, set()).add(node.state)
    failed = [name for name, states in ends.items() if "FAILED" in states]
    pods = list(_executor_pods(nodes, _executor_templates(kubeflow, ended)))
    records = list(_records(partial(kubeflow.log, run), pods)) or list(_records(_log_of_pod(namespace), pods))
    # A task that succeeded when it was retried also has records of failures.
    last = [record for record in records if "SUCCEEDED" not in ends.get(_task_of(record), ())]
    first = next(iter(last or records), None)
    early = [pod for pod in workflow_pods(namespace, run, ENDED_EARLY) or () if pod.message]
    for pod in early:
        killed = pod.task in failed and pod.message.startswith(OUT_OF_MEMORY)
        if killed and (first is None or (_task_of(first) == pod.task and isinstance(first, CONSEQUENCES))):
            return QuorumError(
                f"{pod}: the pod exceeded its memory limit",
                hint=f"raise tasks.{pod.task}.limits.memory in the file of {argument('pods')}; its log: "
                f"{kubeflow.link(run)}",
            )
    if first is not None:
        return type(first)(str(first), hint=f"its log: {kubeflow.link(run)}")
    names = ", ".join(failed) or "the run"
    unknown = "possibly a missing image, service account or quota, lack of memory, or a deadline"
    why = "; ".join(list(dict.fromkeys(map(str, early)))[:REASONS]) or unknown
    return QuorumError(
        f"{names} failed without a recorded reason ({why})",
        hint=f"{kubeflow.link(run)}, or {diagnostic_command(namespace, run)}",
    )


CONSEQUENCES = (InterruptedRun, QuorumError, WorkerLostError)
"""Errors that a task may record if the kernel kills one of its processes for lack of memory."""


def _task_of(record: FedloomError) -> str:
    return record.message.partition(": ")[0]


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


def _executor_pods(nodes: Sequence[Any], templates: Sequence[str]) -> Iterator[str]:
    """Yield the names that the pods of failed tasks may have."""
    failed = [node for node in nodes if node.state == "FAILED"]
    for child in dict.fromkeys(child.pod_name for node in failed for child in node.child_tasks or () if child.pod_name):
        workflow, _, number = child.rpartition("-")
        yield from (f"{workflow}-{template}-{number}" for template in templates)


def _records(log_of: Callable[[str], str], pods: Iterable[str]) -> Iterator[FedloomError]:
    """Yield the failures that pods have recorded in their logs (:func:`fedloom.kubeflow.steps.step`).

    Kubeflow's launcher exits with 1 whatever a component's exit code is, and the API does not report a task's error.
    """
    for pod in pods:
        for line in log_of(pod).splitlines():
            if line.startswith(FAILURE_MARK):
                with suppress(ValueError, KeyError, TypeError):
                    yield from_json(parsed_json(line.removeprefix(FAILURE_MARK)))


def _log_of_pod(namespace: str) -> Callable[[str], str]:
    """Return a function that reads a pod's log from the cluster.

    A single-user Kubeflow reads only logs that Argo has archived: it looks for the pod in a namespace without a name
    (kubeflow/pipelines 2.17, ``backend/src/apiserver/resource/resource_manager.go``, ``readRunLogFromPod``).
    """

    def read(pod: str) -> str:
        try:
            return Api(namespace, patience_s=0.0).log(pod, "main")
        except FedloomError as error:
            log.debug("cannot read the log of %s: %s", pod, error)
            return ""

    return read
