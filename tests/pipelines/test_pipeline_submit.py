"""`fedloom pipeline submit|wait|stop` against the Kubeflow Pipelines API over a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import kfp_api
import pytest
import yaml
from facts import tells
from fake_cluster import FakeCluster
from forked import Popen
from kfp_api import Fault, KubeflowApi, serving
from port_forward import PortForward
from run_processes import EXPERIMENT, FEDLOOM, WAIT_S, until
from s3_support import S3Server
from typer.testing import CliRunner, Result

from fedloom.cli.main import app
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
from fedloom.kubeflow import api as api_module
from fedloom.kubeflow import submit as submitting
from fedloom.kubeflow.api import Kubeflow
from fedloom.kubeflow.authentication import api_credential
from fedloom.kubeflow.steps import FAILURE_MARK, step

pytestmark = pytest.mark.xdist_group("components")

CLUSTER = {"image": "fedloom/worker:0.1.0", "workers": 3, "gpu": None, "node_selector": {"pool": "gpu"}}
STORE = ("--set", "storage=s3://bucket/fedloom")


@pytest.fixture
def api() -> Iterator[KubeflowApi]:
    with serving(KubeflowApi()) as one:
        yield one


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(submitting, "POLL_S", 0.02)
    monkeypatch.setattr(submitting.wait_for_run, "__kwdefaults__", {"poll_s": 0.02})
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KF_PIPELINES_ENDPOINT", "FEDLOOM_KUBEFLOW_TOKEN", "SSL_CERT_FILE", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Write an experiment file, and one of cluster settings."""
    experiment, cluster = tmp_path / "experiment.yaml", tmp_path / "cluster.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    return experiment, cluster


@pytest.fixture
def described(tmp_path: Path) -> Callable[..., str]:
    """Write a file that describes a Kubeflow installation."""

    def write(**settings: Any) -> str:
        (tmp_path / "kubeflow.yaml").write_text(yaml.safe_dump(settings))
        return str(tmp_path / "kubeflow.yaml")

    return write


@pytest.fixture
def fedloom(files: tuple[Path, Path]) -> Callable[..., Result]:
    """Run `fedloom pipeline submit personalized_federation` in this process, with additional arguments."""

    def run(*arguments: str, name: str = "personalized_federation", where: tuple[str, ...] = STORE) -> Result:
        cluster = () if name == "unseen_clients" else ("--cluster", str(files[1]))
        return CliRunner().invoke(app, ["pipeline", "submit", name, str(files[0]), *cluster, *where, *arguments])

    return run


def failed(result: Result, kind: type[FedloomError]) -> str:
    """Return the message of a command that failed with an error of a class."""
    assert isinstance(result.exception, kind), (result.output, result.exception)
    return str(result.exception)


def test_a_run_starts_with_the_requested_parameters(
    api: KubeflowApi, fedloom: Callable[..., Result], described: Callable[..., str]
) -> None:
    kubeflow = described(host=api.host, storage_secret="keys")
    result = fedloom("--kubeflow", kubeflow, "--set", "seed=7", "--checkpoint", "best")
    assert result.exit_code == 0, result.output
    (run,) = api.runs.values()
    assert f"run {run['run_id']}: {api.host}/#/runs/details/{run['run_id']}" in result.output
    parameters = run["runtime_config"]["parameters"]
    assert yaml.safe_load(parameters["experiment"]) == EXPERIMENT
    assert parameters["overrides"] == ["storage=s3://bucket/fedloom", "seed=7"]
    assert json.loads(parameters["cluster"]) == CLUSTER
    assert (parameters["storage_secret"], parameters["checkpoint"]) == ("keys", "best")
    assert run["display_name"].startswith("small-")
    (pipeline,), (version,) = api.pipelines.values(), api.versions.values()
    assert pipeline["display_name"] == "personalized-federation"
    assert version["display_name"].startswith("0.1.0-")
    assert version["pipeline_spec"]["pipeline_spec"]["pipelineInfo"]["name"] == "personalized-federation"


def test_a_pipeline_is_uploaded_once(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    for _ in range(2):
        assert fedloom("--kubeflow", api.host).exit_code == 0
    assert api.counts() == (1, 1, 1, 2)


def test_every_pipeline_can_be_submitted(
    api: KubeflowApi, fedloom: Callable[..., Result], described: Callable[..., str]
) -> None:
    methods = ("--method", "", "--method", "algorithm={name: local, local: {steps: 3}}; federation.rounds=0")
    assert fedloom("--kubeflow", api.host, *methods, "--seeds", "1-2", name="compare_methods").exit_code == 0
    model = ("--model", "s3://bucket/v2/artifacts/model", "--serve", "fed-serve.fl.svc:7734")
    kubeflow = described(host=api.host, serve_secret="members")
    assert fedloom("--kubeflow", kubeflow, *model, name="unseen_clients", where=()).exit_code == 0
    compare, unseen = (run["runtime_config"]["parameters"] for run in api.runs.values())
    assert compare["methods"] == [methods[1], methods[3]]
    assert compare["seeds"] == [1, 2]
    assert (unseen["model"], unseen["serve"], unseen["serve_secret"]) == (model[1], model[3], "members")
    assert {"backend", "cluster"}.isdisjoint(unseen)


def test_the_kfp_stand_in_supports_kfps_client(
    api: KubeflowApi, fedloom: Callable[..., Result], tmp_path: Path
) -> None:
    """Read the stand-in's replies by Kubeflow's own client: otherwise our tests would prove nothing."""
    import kfp

    assert fedloom("--kubeflow", api.host).exit_code == 0
    client = kfp.Client(host=api.host)
    pipeline = client.get_pipeline_id("personalized-federation")
    assert pipeline in api.pipelines
    assert client.list_pipeline_versions(pipeline).pipeline_versions[0].pipeline_version_id in api.versions
    assert client.get_experiment(experiment_name="fedloom").experiment_id in api.experiments
    (run,) = api.runs
    api.script = [("SUCCEEDED", [("plan", "SUCCEEDED", "")])]
    assert client.wait_for_run_completion(run, timeout=10, sleep_duration=0).state == "SUCCEEDED"
    (version,) = api.versions.values()
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump_all(version["pipeline_spec"].values()))
    again = client.upload_pipeline_version(str(file), "by-hand", pipeline_id=pipeline)
    assert again.pipeline_version_id in api.versions


def test_several_users_with_a_namespace_each(fedloom: Callable[..., Result], described: Callable[..., str]) -> None:
    with serving(KubeflowApi(namespaces=("team-a",), token="secret")) as api:

        def of(**more: str) -> Result:
            return fedloom("--kubeflow", described(host=api.host, token="secret", **more))

        assert of(namespace="team-a").exit_code == 0
        assert next(iter(api.experiments.values()))["namespace"] == "team-a"
        assert tells(failed(of(), ExperimentError), "namespace", "kubeflow")
        message = failed(of(namespace="team-b"), RefusedError)
        assert "namespace team-b: not allowed to look for the pipeline" in message
        assert "is not authorized" in message
        assert len(api.runs) == 1


def test_a_single_user_has_no_namespace(
    api: KubeflowApi, fedloom: Callable[..., Result], described: Callable[..., str]
) -> None:
    message = failed(fedloom("--kubeflow", described(host=api.host, namespace="team-a")), ExperimentError)
    assert tells(message, "namespace", "team-a")
    assert api.counts() == (0, 0, 0, 0)


def test_tokens(
    fedloom: Callable[..., Result],
    described: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(KubeflowApi(token="of today")) as api:
        message = failed(fedloom("--kubeflow", described(host=api.host, token="of yesterday")), RefusedError)
        assert "the token is not accepted" in message
        assert "of yesterday" not in message
        assert "not accepted" in failed(fedloom("--kubeflow", api.host), RefusedError)
        (tmp_path / "token").write_text("of today\n")
        assert fedloom("--kubeflow", described(host=api.host, token=f"@{tmp_path / 'token'}")).exit_code == 0
        monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
        assert fedloom("--kubeflow", described(host=api.host, in_cluster=True)).exit_code == 0
        monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "none"))
        assert "PodDefault" in failed(fedloom("--kubeflow", described(host=api.host, in_cluster=True)), RefusedError)
        assert len(api.runs) == 2


def test_a_token_that_changes_during_a_wait(api: KubeflowApi, tmp_path: Path) -> None:
    """Tokens last an hour, runs longer: one from a file is read again."""
    token = tmp_path / "token"
    token.write_text("first")
    api.token = "first"
    api.runs["r"] = {"run_id": "r", "state": "RUNNING", "looks": 0}
    kubeflow = Kubeflow(api.host, credential=api_credential(f"@{token}"))
    kubeflow.check()
    kubeflow.pipeline("x")  # the API's health asks for no token
    token.write_text("second")
    api.token = "second"
    kubeflow.check()
    kubeflow.pipeline("x")


def test_servers_that_are_not_kubeflow(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    assert "has no such page" in failed(fedloom("--kubeflow", f"{api.host}/pipelin"), ExperimentError)
    api.login_page = True
    assert "a page of type text/html" in failed(fedloom("--kubeflow", api.host), ExperimentError)
    assert tells(failed(fedloom("--kubeflow", "ftp://kubeflow"), ExperimentError), "--kubeflow", "ftp://kubeflow")
    assert tells(failed(fedloom("--kubeflow", "kubeflow"), ExperimentError), "kubeflow", "no such file")
    assert tells(failed(fedloom(), ExperimentError), "--kubeflow", "in-cluster")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        message = failed(fedloom("--kubeflow", f"http://127.0.0.1:{nobody.getsockname()[1]}"), StorageError)
    assert "cannot be reached" in message


@pytest.mark.parametrize(
    ("where", "arguments", "key", "facts"),
    [
        ((), (), None, ("storage is not set",)),
        (STORE, ("--set", "federation.rouns=3"), None, ("federation.rouns",)),
        (STORE, ("--backend", "slurm"), "backend", ("--backend", "kubernetes", "local", "slurm")),
        (STORE, ("--seeds", "1-3"), "seeds", ("--seeds", "compare_methods", "personalized_federation")),
        (STORE, ("--serve", "x:1"), "serve", ("--serve", "unseen_clients", "personalized_federation")),
        (STORE, ("--model", "x"), "model", ("--model", "unseen_clients", "personalized_federation")),
        (STORE, ("--set", "runtime.device=cuda"), None, ("cluster.gpu is not set",)),
    ],
)
def test_invalid_runs_are_rejected_before_anything_is_uploaded(
    api: KubeflowApi,
    fedloom: Callable[..., Result],
    where: tuple[str, ...],
    arguments: tuple[str, ...],
    key: str | None,
    facts: tuple[str, ...],
) -> None:
    result = fedloom("--kubeflow", api.host, *arguments, where=where)
    assert tells(failed(result, ExperimentError), *facts)
    assert isinstance(result.exception, FedloomError)
    assert key is None or result.exception.key == key
    assert api.asked == []


def test_invalid_cluster_settings(api: KubeflowApi, fedloom: Callable[..., Result], files: tuple[Path, Path]) -> None:
    files[1].write_text("image: fedloom/worker:latest\nworker: 3\n")
    message = failed(fedloom("--kubeflow", api.host), ExperimentError)
    assert str(files[1]) in message
    assert "fedloom/worker:latest" in message
    files[1].write_text("image: [")
    assert "not YAML" in failed(fedloom("--kubeflow", api.host), ExperimentError)
    assert api.asked == []


def test_a_request_whose_response_was_lost_is_repeated(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    api.faults = [Fault("GET /pipelines", status=503, times=2), Fault("GET /experiments", drop="before", times=1)]
    assert fedloom("--kubeflow", api.host).exit_code == 0
    assert api.counts() == (1, 1, 1, 1)


@pytest.mark.parametrize(
    "request_", ["POST /pipelines", "POST /pipelines/upload_version", "POST /experiments", "POST /runs"]
)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"status": 500}, marks=pytest.mark.exhaustive),
        pytest.param({"drop": "before"}, marks=pytest.mark.exhaustive),
        {"drop": "after"},
    ],
)
def test_a_failed_submission_leaves_nothing_behind(
    api: KubeflowApi, fedloom: Callable[..., Result], request_: str, fault: dict[str, Any]
) -> None:
    api.faults = [Fault(request_, **fault)]
    failed(fedloom("--kubeflow", api.host), StorageError)
    assert api.counts() == (0, 0, 0, 0)
    api.faults = []
    assert fedloom("--kubeflow", api.host).exit_code == 0
    assert api.counts() == (1, 1, 1, 1)


def test_a_port_forward_that_restarts_ends_no_submission(
    api: KubeflowApi, fedloom: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    forwarded = PortForward(("127.0.0.1", int(api.host.rpartition(":")[2])))
    listed = api.hears("GET /experiments")

    def restart() -> None:
        assert listed.wait(WAIT_S)
        forwarded.stop()
        time.sleep(6)
        forwarded.start()

    thread = threading.Thread(target=restart)
    thread.start()
    result = fedloom("--kubeflow", f"http://127.0.0.1:{forwarded.port}")
    thread.join()
    assert result.exit_code == 0, result.output
    assert api.counts() == (1, 1, 1, 1)
    forwarded.stop()
    monkeypatch.setattr(api_module, "OUTAGE_S", 0.5)
    failed(fedloom("--kubeflow", f"http://127.0.0.1:{forwarded.port}"), StorageError)


def test_existing_objects_are_kept(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    assert fedloom("--kubeflow", api.host).exit_code == 0
    api.faults = [Fault("POST /runs", status=500)]
    failed(fedloom("--kubeflow", api.host), StorageError)
    assert api.counts() == (1, 1, 1, 1)


def test_two_simultaneous_submissions(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    """The other submission creates the pipeline between our check and our request."""
    look, made = api.list_pipelines, []

    def late(self: KubeflowApi, query: dict[str, Any], body: Any) -> dict[str, Any]:
        answer = look(query, body)
        if not made:
            made.append(api.create_pipeline({}, {"display_name": "personalized-federation"}))
        return answer

    routes = [("GET", "/pipelines", late) if r[1] == "/pipelines" and r[0] == "GET" else r for r in kfp_api.ROUTES]
    before, kfp_api.ROUTES = kfp_api.ROUTES, routes
    try:
        assert fedloom("--kubeflow", api.host).exit_code == 0
    finally:
        kfp_api.ROUTES = before
    assert api.counts() == (1, 1, 1, 1)


def started(api: KubeflowApi, files: tuple[Path, Path], *arguments: str) -> subprocess.Popen[str]:
    command = [*FEDLOOM, "pipeline", "submit", "personalized_federation", str(files[0]), "--cluster", str(files[1])]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; a child would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return Popen(
        [*command, *STORE, "--kubeflow", api.host, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("request_", [pytest.param("GET /experiments", marks=pytest.mark.exhaustive), "POST /runs"])
def test_an_interrupted_submission_leaves_nothing_behind(
    api: KubeflowApi, files: tuple[Path, Path], request_: str
) -> None:
    """Also if the request that starts the run was received, and only its answer is missing."""
    api.faults = [Fault(request_, delay_s=3.0 if request_.startswith("GET") else 0.0, times=1)]
    if request_ == "POST /runs":
        answer = KubeflowApi.create_run

        def slow(self: KubeflowApi, query: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
            made = answer(self, query, body)
            process.send_signal(signal.SIGINT)
            return made

        before = kfp_api.ROUTES
        kfp_api.ROUTES = [(m, p, slow if a is answer else a) for m, p, a in before]
        api.faults = [Fault(request_, drop="after", times=1)]
    process = started(api, files)
    try:
        if request_ != "POST /runs":
            until(lambda: request_ in api.asked, request_)
            process.send_signal(signal.SIGTERM)
        message, _ = process.communicate(timeout=WAIT_S)
    finally:
        if request_ == "POST /runs":
            kfp_api.ROUTES = before
    assert process.returncode in (6, 130), message  # 6: the lost answer was noticed before the signal
    assert api.counts() == (0, 0, 0, 0), message


def test_waiting_reports_progress(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    """Report the author's tasks and further attempts, of the 30 nodes of the workflow, and none of Argo's own."""
    api.script = [
        ("PENDING", []),
        ("RUNNING", [("plan", "RUNNING", "")]),
        ("RUNNING", [("plan", "SUCCEEDED", ""), ("federate", "RUNNING", "")]),
        ("RUNNING", [("plan", "SUCCEEDED", ""), ("federate(1)", "RUNNING", "")]),
        ("SUCCEEDED", [("plan", "SUCCEEDED", ""), ("federate(1)", "SUCCEEDED", "")]),
    ]
    api.faults = [Fault("GET /runs/.*", status=503, times=2, skip=1)]
    result = fedloom("--kubeflow", api.host, "--wait")
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
    api: KubeflowApi, fedloom: Callable[..., Result], printed: str, kind: type[FedloomError], message: str
) -> None:
    """Kubeflow reports no error of a task: the record is in the output of the task."""
    api.script = [("RUNNING", []), ("FAILED", [("plan", "SUCCEEDED", ""), ("federate", "FAILED", printed)])]
    found = failed(fedloom("--kubeflow", api.host, "--wait"), kind)
    assert next(iter(api.runs)) in found
    assert message in found
    assert "federate" in found or "plan" in found


def test_a_retried_attempt_is_not_reported_as_the_cause(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    lost, few = recorded(StorageError("fetch: no network")), recorded(QuorumError("federate: few"))
    fetched = [("fetch", "FAILED", lost), ("fetch(1)", "SUCCEEDED", "")]
    api.script = [("FAILED", [*fetched, ("federate", "FAILED", few)])]
    assert "federate: few" in failed(fedloom("--kubeflow", api.host, "--wait"), QuorumError)
    api.script = [("FAILED", [("fetch", "FAILED", lost)])]
    assert "fetch: no network" in failed(fedloom("--kubeflow", api.host, "--wait"), StorageError)


@pytest.mark.parametrize("fault", [{"status": 403}, {"status": 404}, {"status": 500}, {"drop": "before"}])
def test_an_unreadable_log_does_not_hide_the_failure(
    api: KubeflowApi, fedloom: Callable[..., Result], fault: dict[str, Any]
) -> None:
    api.script = [("FAILED", [("federate", "FAILED", recorded(RefusedError("no")))])]
    api.faults = [Fault("GET /apis/v1alpha1/.*/log", **fault)]
    assert "kubectl describe workflows,pods" in failed(fedloom("--kubeflow", api.host, "--wait"), QuorumError)


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


def test_a_run_stopped_during_the_wait_is_reported_as_stopped(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    """Kubeflow ends it as FAILED, after CANCELING."""
    api.script = [("RUNNING", []), ("CANCELING", []), ("FAILED", [("federate", "FAILED", "")])]
    assert "was stopped" in failed(fedloom("--kubeflow", api.host, "--wait"), InterruptedRun)


def test_a_pod_that_does_not_start_is_reported_once(
    api: KubeflowApi, fedloom: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "PENDING_S", 0.0)
    api.script = [("RUNNING", [("plan", "PENDING", "")])] * 4 + [("SUCCEEDED", [("plan", "SUCCEEDED", "")])]
    output = fedloom("--kubeflow", api.host, "--wait").output
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
    api: KubeflowApi,
    fedloom: Callable[..., Result],
    watched: Callable[..., FakeCluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submitting, "PENDING_S", 0.0)
    failed_before = ("Failed", "Error (exit code 1)")
    watched(
        plan=(DONE, failed_before),
        fetch=(DONE, ("Pending", "ImagePullBackOff: no such image")),
        grid=(DONE, ("Pending", "Unschedulable: 0/2 nodes are available")),
    )
    tasks = [("plan", "SUCCEEDED", ""), ("fetch", "PENDING", ""), ("grid", "PENDING", "")]
    api.script = [("RUNNING", tasks)] * 4 + [("SUCCEEDED", [])]
    lines = [line for line in fedloom("--kubeflow", api.host, "--wait").output.splitlines() if "not started" in line]
    assert len(lines) == 2
    assert tells(lines[0], "fetch: ", "ImagePullBackOff: no such image")
    assert tells(lines[1], "grid: ", "Unschedulable: 0/2 nodes are available")


@pytest.mark.cluster
def test_a_chain_of_healthy_drivers_is_not_reported_and_a_pod_that_is_stuck_after_it_is(
    api: KubeflowApi,
    fedloom: Callable[..., Result],
    watched: Callable[..., FakeCluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod of some task is pending all the time, but no single one for long, except the last."""
    monkeypatch.setattr(submitting, "PENDING_S", 0.15)
    watched(last=(DONE, ("Pending", "ImagePullBackOff: no such image")))
    names = [f"task-{i}" for i in range(20)]
    api.script = [
        ("RUNNING", [*((n, "SUCCEEDED", "") for n in names[:i]), (names[i], "PENDING", "")]) for i in range(20)
    ]
    done = [(name, "SUCCEEDED", "") for name in names]
    api.script += [("RUNNING", [*done, ("last", "PENDING", "")])] * 30 + [("SUCCEEDED", done)]
    lines = [line for line in fedloom("--kubeflow", api.host, "--wait").output.splitlines() if "not started" in line]
    assert len(lines) == 1
    assert tells(lines[0], "last: ", "ImagePullBackOff: no such image")


@pytest.mark.cluster
def test_the_workflow_explains_why_pods_were_not_created(
    api: KubeflowApi, fedloom: Callable[..., Result], watched: Callable[..., FakeCluster], monkeypatch: Any
) -> None:
    account = 'pods "x" is forbidden: error looking up service account kubeflow/pipeline-runner: not found'
    cluster = watched(plan=(("Error", account), WAITING), fetch=(DONE, ("Failed", "Error (exit code 1)")))
    api.script = [("FAILED", [("plan", "FAILED", ""), ("grid", submitting.OMITTED, "")])]
    result = fedloom("--kubeflow", api.host, "--wait")
    assert tells(failed(result, QuorumError), f"plan: {account}", "fetch: Error (exit code 1)")
    assert "grid" not in result.output
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for([])))
    again = CliRunner().invoke(app, ["pipeline", "wait", *api.runs, "--kubeflow", api.host])
    assert account not in failed(again, QuorumError)


@pytest.mark.cluster
@pytest.mark.parametrize("printed", [None, InterruptedRun, WorkerLostError])
def test_a_lack_of_memory_is_told_with_the_setting_to_raise(
    api: KubeflowApi,
    fedloom: Callable[..., Result],
    watched: Callable[..., FakeCluster],
    printed: type[FedloomError] | None,
) -> None:
    """A task whose process was killed by the kernel records only a consequence; the cause is in the Workflow."""
    watched(federate=(DONE, ("Failed", "OOMKilled (exit code 137)")))
    record = "" if printed is None else recorded(printed("federate: a process was killed by signal 9"))
    api.script = [("FAILED", [("federate", "FAILED", record)])]
    message = failed(fedloom("--kubeflow", api.host, "--wait"), QuorumError)
    assert tells(message, "federate", "OOMKilled", "tasks.federate.limits.memory", "--pods")


@pytest.mark.cluster
def test_another_reason_of_the_task_is_kept_if_an_earlier_attempt_lacked_memory(
    api: KubeflowApi, fedloom: Callable[..., Result], watched: Callable[..., FakeCluster]
) -> None:
    watched(federate=(DONE, ("Failed", "OOMKilled (exit code 137)")))
    api.script = [("FAILED", [("federate", "FAILED", recorded(RefusedError("federate: not admitted")))])]
    assert "not admitted" in failed(fedloom("--kubeflow", api.host, "--wait"), RefusedError)


@pytest.mark.cluster
def test_the_record_of_a_failure_is_read_from_the_pod_if_argo_archives_no_logs(
    api: KubeflowApi, fedloom: Callable[..., Result], watched: Callable[..., FakeCluster], monkeypatch: Any
) -> None:
    """A Kubeflow for one user then reads no log at all. The error is one that only the task's process knows."""
    cluster = watched(federate=(DONE, ("Failed", "Error (exit code 1)")))
    api.archives = False
    record = recorded(Unreachable("federate: the API does not answer", hint="look"))
    api.script = [("FAILED", [("federate", "FAILED", record)])]
    assert "without a recorded reason" in failed(fedloom("--kubeflow", api.host, "--wait"), QuorumError)
    name = next(pod for pod, printed in api.logs.items() if printed)
    command = ["sh", "-c", f"echo '{record}'; exit 1"]
    containers = [{"name": "main", "image": "component:1", "command": command}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    Api("kubeflow").create({**pod, "spec": {"restartPolicy": "Never", "containers": containers}})
    until(lambda: cluster.pods()[0]["status"]["phase"] == "Failed", "the pod ends")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for([LISTING, READING])))
    again = CliRunner().invoke(app, ["pipeline", "wait", *api.runs, "--kubeflow", api.host])
    assert "the API does not answer" in failed(again, WorkerLostError)


def test_an_address_without_a_user_interface_gets_no_link(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    api.interface = False
    output = fedloom("--kubeflow", api.host).output
    assert "#/runs/details" not in output
    assert output.count(next(iter(api.runs))) == 1
    output = fedloom("--kubeflow", api.host, "--every", "6h").output
    assert "run" not in next(line for line in output.splitlines() if next(iter(api.recurring)) in line)
    assert output.count(next(iter(api.recurring))) == 1


def test_other_services_are_recognized(fedloom: Callable[..., Result], s3_server: S3Server) -> None:
    assert "object store" in failed(fedloom("--kubeflow", s3_server.endpoint), ExperimentError)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "gRPC port" in failed(fedloom("--kubeflow", f"http://127.0.0.1:{port}"), ExperimentError)
    finally:
        server.stop(None)


def test_an_expired_token_leaves_the_run_alone(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    api.script = [("RUNNING", [])]
    api.faults = [Fault("GET /runs/.*", status=401, skip=1)]
    assert "the run continues: " in failed(fedloom("--kubeflow", api.host, "--wait"), RefusedError)
    assert next(iter(api.runs.values()))["state"] == "RUNNING"


@pytest.mark.slow
@pytest.mark.parametrize("terminate", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_ctrl_c_during_the_wait(api: KubeflowApi, files: tuple[Path, Path], terminate: bool) -> None:
    api.script = [("RUNNING", [("federate", "RUNNING", "")])]
    looked = api.hears("GET /runs/.*")
    process = started(api, files, "--wait", *(["--terminate-on-interrupt"] if terminate else []))
    assert looked.wait(WAIT_S)
    process.send_signal(signal.SIGINT)
    message, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, message
    (run,) = api.runs.values()
    assert run["state"] == ("CANCELING" if terminate else "RUNNING")
    assert ("stopped the run: " if terminate else "the run continues: ") in message
    assert terminate or f"fedloom pipeline stop {run['run_id']}" in message


def test_waiting_for_and_stopping_a_run_by_id(api: KubeflowApi, fedloom: Callable[..., Result]) -> None:
    assert fedloom("--kubeflow", api.host).exit_code == 0
    (run,) = api.runs
    assert CliRunner().invoke(app, ["pipeline", "stop", run, "--kubeflow", api.host]).exit_code == 0
    assert api.runs[run]["state"] == "CANCELING"
    again = CliRunner().invoke(app, ["pipeline", "stop", run, "--kubeflow", api.host])
    assert (again.exit_code, tells(again.output, "being stopped", run)) == (0, True)
    api.runs[run]["state"] = "CANCELING"
    result = CliRunner().invoke(app, ["pipeline", "wait", run, "--kubeflow", api.host])
    assert "was stopped" in failed(result, InterruptedRun)
    again = CliRunner().invoke(app, ["pipeline", "stop", run, "--kubeflow", api.host])
    assert (again.exit_code, tells(again.output, "ended", run)) == (0, True)
    api.runs[run] |= {"state": "RUNNING", "looks": 0}
    api.script = [("RUNNING", []), ("SUCCEEDED", [])]
    assert CliRunner().invoke(app, ["pipeline", "wait", run, "--kubeflow", api.host]).output.endswith("succeeded\n")
    nobody = "00000000-0000-0000-0000-000000000000"
    result = CliRunner().invoke(app, ["pipeline", "wait", nobody, "--kubeflow", api.host])
    assert "not found" in failed(result, ExperimentError)
