"""Runs in progress on Kubeflow: wait for one, and stop one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedloom.errors import ExperimentError, InterruptedRun, RefusedError, StorageError
from fedloom.kubeflow.client import Kubeflow
from fedloom.kubeflow.diagnosis import PODS_NAMESPACE, author_tasks, diagnostic_command, failure_of, workflow_pods

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

    Raises
    ------
    FedloomError
        If it failed: the error that the failed task recorded, else ``QuorumError``.
    InterruptedRun
        If the run was stopped; on Ctrl-C or SIGTERM, where it continues.
    RefusedError
        If the token expires meanwhile; the run continues.
    StorageError
        If Kubeflow is unreachable for five minutes; the run continues.
    """
    progress, stopped, reached = _Progress(kubeflow, run, say), False, time.monotonic()
    with _continuing(kubeflow, run):
        while True:
            try:
                now = kubeflow.run(run)
                reached = time.monotonic()
                nodes = (now.run_details and now.run_details.task_details) or []
                progress.update(nodes)
                stopped = stopped or now.state in STOPPED
                if now.state in ENDS:
                    break
            except StorageError as error:
                if time.monotonic() - reached > PATIENCE_S:
                    raise StorageError(f"{error}\n  the run continues: {kubeflow.link(run)}") from error
            except RefusedError as error:
                raise RefusedError(f"{error}\n  the run continues: {kubeflow.link(run)}") from error
            time.sleep(POLL_S)
    if now.state == "SUCCEEDED":
        return
    if stopped:  # Kubeflow ends a stopped run as FAILED
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
        now, pending = time.monotonic(), [node for node in nodes if node.state == "PENDING" and not node.child_tasks]
        self._pending_since = {node.task_id: self._pending_since.get(node.task_id, now) for node in pending}
        late = {node.task_id for node in pending if now - self._pending_since[node.task_id] > PENDING_S}
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

    Raises
    ------
    FedloomError
        If there is no such run, or Kubeflow rejects the request or fails.
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
