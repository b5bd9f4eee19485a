"""Waiting for a run on Kubeflow, its failures explained, and stopping it, against the API over a socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kfp_api
import pytest
from facts import failed, tells
from fake_cluster import FakeCluster
from kfp_api import Fault, KubeflowApi
from run_processes import until
from typer.testing import Result

from fedloom.cluster.api import Api, Unreachable
from fedloom.errors import (
    ExperimentError,
    FedloomError,
    InterruptedRun,
    QuorumError,
    RefusedError,
    StorageError,
    WorkerLostError,
    from_json,
)
from fedloom.kubeflow import runs
from fedloom.kubeflow.steps import FAILURE_MARK, step

pytestmark = pytest.mark.group("components")

Command = Callable[..., Result]


def test_waiting_reports_progress(api: KubeflowApi, submit: Command) -> None:
    """Report the author's tasks and further attempts, of the 30 nodes of the workflow, and none of Argo's own."""
    api.script = [
        ("PENDING", []),
        ("RUNNING", [("plan", "RUNNING", "")]),
        ("RUNNING", [("plan", "SUCCEEDED", ""), ("federate", "RUNNING", "")]),
        ("RUNNING", [("plan", "SUCCEEDED", ""), ("federate(1)", "RUNNING", "")]),
        ("SUCCEEDED", [("plan", "SUCCEEDED", ""), ("federate(1)", "SUCCEEDED", "")]),
    ]
    api.faults = [Fault("GET /runs/.*", status=503, times=2, skip=1)]
    result = submit("--wait")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("run "))
    assert lines[first + 1 : first + 4] == ["plan: running", "plan: succeeded", "federate: running"]
    assert sorted(lines[first + 4 :]) == [
        "federate, attempt 2: running", "federate, attempt 2: succeeded", "federate: succeeded", "succeeded"
    ]  # fmt: skip


def recorded(error: FedloomError) -> str:
    return f"{FAILURE_MARK}{json.dumps(error.as_json())}"


@pytest.mark.parametrize(
    ("printed", "kind", "message"),
    [
        (recorded(ExperimentError("plan: no such key", key="federation.rounds")), ExperimentError, "no such key"),
        (f"noise\n{recorded(RefusedError('federate: no', hint='ask'))}\nI0101", RefusedError, "federate: no\n  ask"),
        (recorded(QuorumError("federate: few")), QuorumError, "few"),
        (f"{FAILURE_MARK}not JSON", QuorumError, "kubectl describe workflows,pods"),
        (f'{FAILURE_MARK}{{"class": "KeyError"}}', QuorumError, "kubectl describe workflows,pods"),
        pytest.param(f"{FAILURE_MARK}{'[' * 100_000}", QuorumError, "kubectl describe workflows,pods", id="nested"),
        (recorded(QuorumError("few")).replace('"few"', "5"), QuorumError, "kubectl describe workflows,pods"),
        ("", QuorumError, "kubectl describe workflows,pods -n kubeflow -l pipeline/runid="),
    ],
)
def test_the_exit_code_gives_the_outcome(
    api: KubeflowApi, submit: Command, printed: str, kind: type[FedloomError], message: str
) -> None:
    """Kubeflow reports no error of a task: the record is in the output of the task."""
    api.script = [("RUNNING", []), ("FAILED", [("plan", "SUCCEEDED", ""), ("federate", "FAILED", printed)])]
    found = failed(submit("--wait"), kind)
    assert next(iter(api.runs)) in found
    assert message in found
    assert "federate" in found or "plan" in found


def test_a_retried_attempt_is_not_reported_as_the_cause(api: KubeflowApi, submit: Command) -> None:
    lost, few = recorded(StorageError("fetch: no network")), recorded(QuorumError("federate: few"))
    fetched = [("fetch", "FAILED", lost), ("fetch(1)", "SUCCEEDED", "")]
    api.script = [("FAILED", [*fetched, ("federate", "FAILED", few)])]
    assert "federate: few" in failed(submit("--wait"), QuorumError)
    api.script = [("FAILED", [("fetch", "FAILED", lost)])]
    assert "fetch: no network" in failed(submit("--wait"), StorageError)


@pytest.mark.parametrize("fault", [{"status": 403}, {"status": 404}, {"status": 500}, {"drop": "before"}])
def test_an_unreadable_log_does_not_hide_the_failure(api: KubeflowApi, submit: Command, fault: dict[str, Any]) -> None:
    api.script = [("FAILED", [("federate", "FAILED", recorded(RefusedError("no")))])]
    api.faults = [Fault("GET /apis/v1alpha1/.*/log", **fault)]
    assert "kubectl describe workflows,pods" in failed(submit("--wait"), QuorumError)


def test_a_failing_component_leaves_the_record_that_waiting_reads(capfd: pytest.CaptureFixture[str]) -> None:
    @step
    def federate() -> None:
        raise RefusedError("the token is not known", hint="ask for another")

    with pytest.raises(SystemExit) as ended:
        federate()
    assert ended.value.code == 4
    (record,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith(FAILURE_MARK)]
    found = from_json(json.loads(record.removeprefix(FAILURE_MARK)))
    assert isinstance(found, RefusedError)
    assert str(found) == "federate: the token is not known\n  ask for another"


def test_a_run_stopped_during_the_wait_is_reported_as_stopped(api: KubeflowApi, submit: Command) -> None:
    """Kubeflow ends it as FAILED, after CANCELING."""
    api.script = [("RUNNING", []), ("CANCELING", []), ("FAILED", [("federate", "FAILED", "")])]
    assert "was stopped" in failed(submit("--wait"), InterruptedRun)


def test_a_pod_that_does_not_start_is_reported_once(
    api: KubeflowApi, submit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PENDING_S", 0.0)
    api.script = [("RUNNING", [("plan", "PENDING", "")])] * 4 + [("SUCCEEDED", [("plan", "SUCCEEDED", "")])]
    output = submit("--wait").output
    where = f"kubectl describe workflows,pods -n kubeflow -l pipeline/runid={next(iter(api.runs))}"
    assert [line for line in output.splitlines() if where in line and line.startswith("plan: ")] == [
        line for line in output.splitlines() if "kubectl" in line
    ]
    assert output.count(where) == 1


LISTING = {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["list"]}
READING = {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, api: KubeflowApi) -> Iterator[Callable[..., FakeCluster]]:
    """Return a function that gives a run its Workflow, and the user rights to list Workflows and read logs."""
    with FakeCluster(images={"component:1": []}, namespace="kubeflow") as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for([LISTING, READING])))
        create = api.create_run

        def watch(**tasks: tuple[tuple[str, str], tuple[str, str]]) -> FakeCluster:
            def started(self: KubeflowApi, query: Any, body: Any) -> Any:
                made = create(query, body)
                cluster.add_workflow(kfp_api.WORKFLOW, {"pipeline/runid": made["run_id"]}, argo_nodes(tasks))
                return made

            monkeypatch.setattr(kfp_api, "ROUTES", [
                ("POST", "/runs", started) if route[:2] == ("POST", "/runs") else route for route in kfp_api.ROUTES
            ])  # fmt: skip
            return cluster

        yield watch


def argo_nodes(tasks: Mapping[str, tuple[tuple[str, str], tuple[str, str]]]) -> dict[str, dict[str, Any]]:
    """Return the nodes of a Workflow, given phase and message of the driver and the executor of each task.

    A node's boundary is the group that it is in, an attempt's that of all attempts (argo-workflows,
    ``workflow/controller/operator.go``, ``initializeNode``; ``dag.go``, ``executeDAGTask``).
    """
    nodes: dict[str, dict[str, Any]] = {}

    def add(name: str, kind: str, boundary: str, phase: str = "Running", message: str = "") -> str:
        identity = f"{kfp_api.WORKFLOW}-{len(nodes) + 1}"
        about = {"id": identity, "displayName": name, "type": kind, "phase": phase, "boundaryID": boundary}
        nodes[identity] = about | {"startedAt": f"2026-01-01T00:00:{len(nodes):02}Z"} | (
            {"message": message} if message else {}
        )  # fmt: skip
        return identity

    def attempt(name: str, kind: str, boundary: str, phase: str = "Running", message: str = "") -> str:
        add(name, "Retry", boundary, phase, message)
        return add(f"{name}(0)", kind, boundary, phase, message)

    root = attempt("root", "DAG", add(kfp_api.WORKFLOW, "DAG", ""))
    for name, (driver, executor) in tasks.items():
        attempt(f"{name}-driver", "Pod", root, *driver)
        attempt("executor", "Pod", attempt(name, "DAG", root), *executor)
    return nodes


DONE, WAITING = ("Succeeded", "done"), ("Omitted", "")


@pytest.mark.cluster
def test_the_workflow_tells_why_each_pod_does_not_start_and_which_task_it_belongs_to(
    api: KubeflowApi, submit: Command, watched: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PENDING_S", 0.0)
    failed_before = ("Failed", "Error (exit code 1)")
    watched(
        plan=(DONE, failed_before),
        fetch=(DONE, ("Pending", "ImagePullBackOff: no such image")),
        grid=(DONE, ("Pending", "Unschedulable: 0/2 nodes are available")),
    )
    tasks = [("plan", "SUCCEEDED", ""), ("fetch", "PENDING", ""), ("grid", "PENDING", "")]
    api.script = [("RUNNING", tasks)] * 4 + [("SUCCEEDED", [])]
    lines = [line for line in submit("--wait").output.splitlines() if "not started" in line]
    assert len(lines) == 2
    assert tells(lines[0], "fetch: ", "ImagePullBackOff: no such image")
    assert tells(lines[1], "grid: ", "Unschedulable: 0/2 nodes are available")


@pytest.mark.cluster
def test_a_chain_of_healthy_drivers_is_not_reported_and_a_pod_that_is_stuck_after_it_is(
    api: KubeflowApi, submit: Command, watched: Callable[..., FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of some task is pending all the time, but no single one for long, except the last."""
    monkeypatch.setattr(runs, "PENDING_S", 0.15)
    watched(last=(DONE, ("Pending", "ImagePullBackOff: no such image")))
    names = [f"task-{i}" for i in range(20)]
    api.script = [
        ("RUNNING", [*((n, "SUCCEEDED", "") for n in names[:i]), (names[i], "PENDING", "")]) for i in range(20)
    ]
    done = [(name, "SUCCEEDED", "") for name in names]
    api.script += [("RUNNING", [*done, ("last", "PENDING", "")])] * 30 + [("SUCCEEDED", done)]
    lines = [line for line in submit("--wait").output.splitlines() if "not started" in line]
    assert len(lines) == 1
    assert tells(lines[0], "last: ", "ImagePullBackOff: no such image")


@pytest.mark.cluster
def test_the_workflow_explains_why_pods_were_not_created(
    api: KubeflowApi, submit: Command, pipeline: Command, watched: Callable[..., FakeCluster], monkeypatch: Any
) -> None:
    account = 'pods "x" is forbidden: error looking up service account kubeflow/pipeline-runner: not found'
    cluster = watched(plan=(("Error", account), WAITING), fetch=(DONE, ("Failed", "Error (exit code 1)")))
    api.script = [("FAILED", [("plan", "FAILED", ""), ("grid", runs.OMITTED, "")])]
    result = submit("--wait")
    assert tells(failed(result, QuorumError), f"plan: {account}", "fetch: Error (exit code 1)")
    assert "grid" not in result.output
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for([])))
    again = pipeline("wait", *api.runs)
    assert account not in failed(again, QuorumError)


@pytest.mark.cluster
@pytest.mark.parametrize("printed", [None, InterruptedRun, WorkerLostError])
def test_a_lack_of_memory_is_told_with_the_setting_to_raise(
    api: KubeflowApi, submit: Command, watched: Callable[..., FakeCluster], printed: type[FedloomError] | None
) -> None:
    """A task whose process was killed by the kernel records only a consequence; the cause is in the Workflow."""
    watched(federate=(DONE, ("Failed", "OOMKilled (exit code 137)")))
    record = "" if printed is None else recorded(printed("federate: a process was killed by signal 9"))
    api.script = [("FAILED", [("federate", "FAILED", record)])]
    message = failed(submit("--wait"), QuorumError)
    assert tells(message, "federate", "OOMKilled", "tasks.federate.limits.memory", "--pods")


@pytest.mark.cluster
def test_another_reason_of_the_task_is_kept_if_an_earlier_attempt_lacked_memory(
    api: KubeflowApi, submit: Command, watched: Callable[..., FakeCluster]
) -> None:
    watched(federate=(DONE, ("Failed", "OOMKilled (exit code 137)")))
    api.script = [("FAILED", [("federate", "FAILED", recorded(RefusedError("federate: not admitted")))])]
    assert "not admitted" in failed(submit("--wait"), RefusedError)


@pytest.mark.cluster
def test_the_record_of_a_failure_is_read_from_the_pod_if_argo_archives_no_logs(
    api: KubeflowApi, submit: Command, pipeline: Command, watched: Callable[..., FakeCluster], monkeypatch: Any
) -> None:
    """A Kubeflow for one user then reads no log at all. The error is one that only the task's process knows."""
    cluster = watched(federate=(DONE, ("Failed", "Error (exit code 1)")))
    api.archives = False
    record = recorded(Unreachable("federate: the API does not answer", hint="look"))
    api.script = [("FAILED", [("federate", "FAILED", record)])]
    assert "without a recorded reason" in failed(submit("--wait"), QuorumError)
    name = next(pod for pod, printed in api.logs.items() if printed)
    command = ["sh", "-c", f"echo '{record}'; exit 1"]
    containers = [{"name": "main", "image": "component:1", "command": command}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    Api("kubeflow").create({**pod, "spec": {"restartPolicy": "Never", "containers": containers}})
    until(lambda: cluster.pods()[0]["status"]["phase"] == "Failed", "the pod ends")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for([LISTING, READING])))
    again = pipeline("wait", *api.runs)
    assert "the API does not answer" in failed(again, WorkerLostError)


def test_an_expired_token_leaves_the_run_alone(api: KubeflowApi, submit: Command) -> None:
    api.script = [("RUNNING", [])]
    api.faults = [Fault("GET /runs/.*", status=401, skip=1)]
    assert "the run continues: " in failed(submit("--wait"), RefusedError)
    assert next(iter(api.runs.values()))["state"] == "RUNNING"


def test_waiting_for_and_stopping_a_run_by_id(api: KubeflowApi, submit: Command, pipeline: Command) -> None:
    assert submit().exit_code == 0
    (run,) = api.runs
    assert pipeline("stop", run).exit_code == 0
    assert api.runs[run]["state"] == "CANCELING"
    again = pipeline("stop", run)
    assert (again.exit_code, tells(again.output, "being stopped", run)) == (0, True)
    api.runs[run]["state"] = "CANCELING"
    result = pipeline("wait", run)
    assert "was stopped" in failed(result, InterruptedRun)
    again = pipeline("stop", run)
    assert (again.exit_code, tells(again.output, "ended", run)) == (0, True)
    api.runs[run] |= {"state": "RUNNING", "looks": 0}
    api.script = [("RUNNING", []), ("SUCCEEDED", [])]
    assert pipeline("wait", run).output.endswith("succeeded\n")
    nobody = "00000000-0000-0000-0000-000000000000"
    result = pipeline("wait", nobody)
    assert "not found" in failed(result, ExperimentError)
