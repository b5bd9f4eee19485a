"""`fedloom pipeline submit` and `schedules`, and logins, against the Kubeflow Pipelines API over a socket."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kfp_api
import kfp_recurring
import kubernetes_schemas
import pytest
import yaml
from facts import failed, mentions, tells
from forked import Popen
from kfp_api import Fault, KubeflowApi, serving
from run_processes import EXPERIMENT, FEDLOOM, WAIT_S, until
from typer.testing import CliRunner, Result

from fedloom.cli.main import app
from fedloom.errors import ExperimentError, FedloomError, RefusedError, StorageError
from fedloom.kubeflow import client
from fedloom.kubeflow import submit as submitting
from fedloom.kubeflow.client import Kubeflow, KubeflowSettings, TokenCommand

pytestmark = pytest.mark.group("components")

PROFILE = "team-a"
Submit = Callable[..., Result]


def done(result: Result) -> str:
    """Return the output of a command that succeeded."""
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


# --- submission -------------------------------------------------------------------------------------------------------


def test_a_run_starts_with_the_requested_parameters(api: KubeflowApi, submit: Submit, files: tuple[str, str]) -> None:
    settings = {"storage_secret": "keys", "service_account": "runner", "pipeline_root": "s3://bucket/artifacts"}
    output = done(submit("--set", "seed=7", "--param", "checkpoint=best", **settings))
    (run,) = api.runs.values()
    assert f"run {run['run_id']}: {api.host}/#/runs/details/{run['run_id']}" in output
    parameters = run["runtime_config"]["parameters"]
    assert yaml.safe_load(parameters["experiment"]) == EXPERIMENT
    assert parameters["overrides"] == ["storage=s3://bucket/fedloom", "seed=7"]
    assert json.loads(parameters["cluster"]) == yaml.safe_load(Path(files[1]).read_text())
    assert (parameters["storage_secret"], parameters["checkpoint"]) == ("keys", "best")
    assert (run["service_account"], run["runtime_config"]["pipeline_root"]) == ("runner", "s3://bucket/artifacts")
    assert re.fullmatch(r"small-[0-9a-f]{8}", run["display_name"])
    (pipeline,), (version,) = api.pipelines.values(), api.versions.values()
    assert pipeline["display_name"] == "personalized-federation"
    assert version["display_name"].startswith("0.1.0-")
    assert version["pipeline_spec"]["pipeline_spec"]["pipelineInfo"]["name"] == "personalized-federation"


def test_a_pipeline_is_uploaded_once(api: KubeflowApi, submit: Submit) -> None:
    for _ in range(2):
        done(submit())
    assert api.counts() == (1, 1, 1, 2)


@pytest.mark.slow
def test_every_pipeline_can_be_submitted(api: KubeflowApi, submit: Submit) -> None:
    methods = ("", "algorithm={name: local, local: {steps: 3}}; federation.rounds=0")
    words = [word for method in methods for word in ("--param", f"methods={method}")]
    done(submit(*words, "--param", "seeds=1-2", name="compare_methods"))
    model, serve = "s3://bucket/v2/artifacts/model", "fed-serve.fl.svc:7734"
    words = ["--param", f"model={model}", "--param", f"serve={serve}"]
    done(submit(*words, name="unseen_clients", store="", serve_secret="members"))
    compare, unseen = (run["runtime_config"]["parameters"] for run in api.runs.values())
    assert (compare["methods"], compare["seeds"]) == ([*methods], [1, 2])
    assert (unseen["model"], unseen["serve"], unseen["serve_secret"]) == (model, serve, "members")
    assert {"backend", "cluster"}.isdisjoint(unseen)


def test_the_kfp_stand_in_supports_kfps_client(api: KubeflowApi, submit: Submit, tmp_path: Path) -> None:
    """Read the stand-in's replies by Kubeflow's own client: otherwise our tests would prove nothing."""
    import kfp

    done(submit())
    theirs = kfp.Client(host=api.host)
    pipeline = theirs.get_pipeline_id("personalized-federation")
    assert pipeline in api.pipelines
    assert theirs.list_pipeline_versions(pipeline).pipeline_versions[0].pipeline_version_id in api.versions
    assert theirs.get_experiment(experiment_name="fedloom").experiment_id in api.experiments
    (run,) = api.runs
    api.script = [("SUCCEEDED", [("plan", "SUCCEEDED", "")])]
    assert theirs.wait_for_run_completion(run, timeout=10, sleep_duration=0).state == "SUCCEEDED"
    (version,) = api.versions.values()
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump_all(version["pipeline_spec"].values()))
    again = theirs.upload_pipeline_version(str(file), "by-hand", pipeline_id=pipeline)
    assert again.pipeline_version_id in api.versions


@pytest.mark.parametrize(
    ("store", "arguments", "facts"),
    [
        ("", (), ("storage is not set",)),
        ("s3://bucket/fedloom", ("--set", "federation.rouns=3"), ("federation.rouns",)),
        ("s3://bucket/fedloom", ("--set", "runtime.device=cuda"), ("cluster.gpu is not set",)),
        ("s3://bucket/fedloom", ("--param", "backend=slurm"), ("backend", "kubernetes", "local", "slurm")),
        ("s3://bucket/fedloom", ("--param", "seeds=1-3"), ("personalized_federation", "seeds", "checkpoint")),
        ("s3://bucket/fedloom", ("--param", "checkpoint"), ("--param", "checkpoint", "KEY=VALUE")),
        ("s3://bucket/fedloom", ("--param", "source=a", "--param", "source=b"), ("--param", "source=b", "twice")),
        ("s3://bucket/fedloom", ("--param", "experiment=x"), ("--param", "experiment=x")),
        ("s3://bucket/fedloom", ("--schedule", "1h", "--wait"), ("--wait",)),
        ("s3://bucket/fedloom", ("--schedule", "often"), ("--schedule", "6h", "often")),
        ("s3://bucket/fedloom", ("--schedule", "* * * *"), ("--schedule", "5 fields", "* * * *")),
    ],
)
def test_invalid_runs_are_rejected_before_anything_is_uploaded(
    api: KubeflowApi, submit: Submit, store: str, arguments: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    assert tells(failed(submit(*arguments, store=store), ExperimentError), *facts)
    assert api.asked == []


def test_invalid_files_are_rejected_before_anything_is_uploaded(
    api: KubeflowApi, submit: Submit, files: tuple[str, str]
) -> None:
    Path(files[1]).write_text("image: fedloom/worker:latest\nworker: 3\n")
    assert mentions(failed(submit(), ExperimentError), files[1], "fedloom/worker:latest")
    failed(submit(max_concurrency=11), ExperimentError)
    Path(files[1]).write_text("image: [")
    assert "not YAML" in failed(submit(), ExperimentError)
    assert api.asked == []


def test_a_request_whose_response_was_lost_is_repeated(api: KubeflowApi, submit: Submit) -> None:
    api.faults = [Fault("GET /pipelines", status=503, times=2), Fault("GET /experiments", drop="before", times=1)]
    done(submit())
    assert api.counts() == (1, 1, 1, 1)


def test_a_server_that_restarts_ends_no_submission(api: KubeflowApi, submit: Submit) -> None:
    """A port-forward may restart: meanwhile nobody listens on its port."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]

    def restart() -> None:
        time.sleep(2)
        with serving(api, port):
            assert ended.wait(WAIT_S)

    ended, host = threading.Event(), f"http://127.0.0.1:{port}"
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        done(submit(host=host))
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("schedule", [(), ("--schedule", "6h")])
@pytest.mark.parametrize("fault", [{"status": 500}, {"drop": "before"}, {"drop": "after"}, {"status": 403}])
def test_a_failed_submission_starts_nothing(
    api: KubeflowApi, submit: Submit, schedule: tuple[str, ...], fault: dict[str, Any]
) -> None:
    """Not even if Kubeflow has started it without an answer; a run with another name is not touched."""
    done(submit(*schedule))
    before = (api.counts(), [*api.runs], [*api.recurring])
    api.faults = [Fault("POST /(runs|recurringruns)", **fault)]
    failed(submit(*schedule), RefusedError if "status" in fault and fault["status"] == 403 else StorageError)
    assert (api.counts(), [*api.runs], [*api.recurring]) == before


def test_a_run_that_may_have_been_started_is_named(api: KubeflowApi, submit: Submit) -> None:
    api.faults = [Fault("POST /runs", drop="after"), Fault("GET /runs", status=500)]
    result = submit()
    failed(result, StorageError)
    (run,) = api.runs.values()
    assert tells(result.output, run["display_name"], "may have been created")


def test_two_simultaneous_submissions(api: KubeflowApi, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other submission creates the pipeline between our check and our request."""
    look, made = api.list_pipelines, []

    def late(self: KubeflowApi, query: dict[str, Any], body: Any) -> dict[str, Any]:
        answer = look(query, body)
        if not made:
            made.append(api.create_pipeline({}, {"display_name": "personalized-federation"}))
        return answer

    routes = [("GET", "/pipelines", late) if r[:2] == ("GET", "/pipelines") else r for r in kfp_api.ROUTES]
    monkeypatch.setattr(kfp_api, "ROUTES", routes)
    done(submit())
    assert api.counts() == (1, 1, 1, 1)


@pytest.mark.slow
def test_an_interrupted_submission_starts_nothing(
    api: KubeflowApi, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the request that starts the run was received, and only its answer is missing."""
    answer, received = KubeflowApi.create_run, []

    def slow(self: KubeflowApi, query: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        made = answer(self, query, body)
        received.append(made)
        process.send_signal(signal.SIGTERM)
        return made

    monkeypatch.setattr(kfp_api, "ROUTES", [(m, p, slow if a is answer else a) for m, p, a in kfp_api.ROUTES])
    api.faults = [Fault("POST /runs", drop="after", times=1)]
    process = started(api, files)
    message, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode in (6, 130), message  # 6: the lost answer was noticed before the signal
    assert (len(received), api.runs) == (1, {}), message


def started(api: KubeflowApi, files: tuple[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [*FEDLOOM, "pipeline", "--kubeflow", api.host, "submit", "personalized_federation", files[0]]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; a child would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return Popen(
        [*command, "--cluster", files[1], "--set", "storage=s3://bucket/fedloom", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_templates_script_submits_and_waits(api: KubeflowApi, tmp_path: Path) -> None:
    """`fedloom new pipeline` writes it; its README names the arguments."""
    (folder := tmp_path / "mine").mkdir()
    assert done(CliRunner().invoke(app, ["new", "pipeline", str(folder)]))
    api.script = [("RUNNING", [("federate", "RUNNING", "")]), ("SUCCEEDED", [("federate", "SUCCEEDED", "")])]
    command = ["sh", "submit.sh", api.host, "s3://bucket/fedloom"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,), (version,) = api.runs.values(), api.versions.values()
    assert run["state"] == "SUCCEEDED"
    parameters = run["runtime_config"]["parameters"]
    assert yaml.safe_load(parameters["experiment"]) == yaml.safe_load((folder / "experiment.yaml").read_text())
    assert parameters["overrides"] == ["storage=s3://bucket/fedloom"]
    assert json.loads(parameters["cluster"]) == yaml.safe_load((folder / "cluster.yaml").read_text())
    executors = version["pipeline_spec"]["pipeline_spec"]["deploymentSpec"]["executors"]
    assert executors["exec-federate"]["container"]["resources"]["resourceMemoryLimit"] == "4Gi"


@pytest.mark.slow
def test_ctrl_c_during_the_wait(api: KubeflowApi, files: tuple[str, str]) -> None:
    api.script = [("RUNNING", [("federate", "RUNNING", "")])]
    process = started(api, files, "--wait")
    until(lambda: any(request.startswith("GET /runs/") for request in api.asked), "the command waits")
    process.send_signal(signal.SIGINT)
    message, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, message
    (run,) = api.runs.values()
    assert run["state"] == "RUNNING"
    assert tells(message, "the run continues: ", f"fedloom pipeline stop {run['run_id']}")


def test_settings_of_tasks_and_claims_of_the_storage(api: KubeflowApi, submit: Submit, tmp_path: Path) -> None:
    pods = tmp_path / "pods.yaml"
    pods.write_text(yaml.safe_dump({"all": {"labels": {"a": "1"}}, "cache": False}))
    done(submit("--pods", str(pods), "--param", "source=pvc://datasets/emnist", store="pvc://shared/fedloom"))
    (version,) = api.versions.values()
    executors = version["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert all(config["podMetadata"] == {"labels": {"a": "1"}} for config in executors.values())
    mounts = executors["exec-federate"]["pvcMount"]
    assert [one["mountPath"] for one in mounts] == ["/mnt/claims/datasets", "/mnt/claims/shared"]
    inner = version["pipeline_spec"]["pipeline_spec"]["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert not any(task["cachingOptions"].get("enableCache") for task in inner.values())


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "trigger", "shown"),
    [
        ("0 2 * * *", {"cron_schedule": {"cron": "0 0 2 * * *"}}, "cron 0 0 2 * * *"),
        ("30 0 2 1,15 jan ?", {"cron_schedule": {"cron": "30 0 2 1,15 jan ?"}}, "cron 30 0 2"),
        ("6h", {"periodic_schedule": {"interval_second": "21600"}}, "every 21600 s"),
    ],
)
def test_a_schedule_has_the_requested_times_and_parameters(
    api: KubeflowApi, submit: Submit, given: str, trigger: dict[str, Any], shown: str
) -> None:
    """Kubeflow would read five fields as second to month: they get the second 0."""
    settings = {"max_concurrency": 2, "catch_up": True}
    output = done(submit("--schedule", given, "--set", "seed=7", "--param", "checkpoint=best", **settings))
    (one,) = api.recurring.values()
    assert tells(output, one["recurring_run_id"], shown, f"{api.host}/#/recurringrun/details/")
    assert one["trigger"] == trigger
    assert (one["max_concurrency"], one["no_catchup"]) == ("2", False)
    parameters = one["runtime_config"]["parameters"]
    assert (parameters["overrides"], parameters["checkpoint"]) == (["storage=s3://bucket/fedloom", "seed=7"], "best")
    assert api.counts() == (1, 1, 1, 0)
    (version,) = api.versions
    assert one["pipeline_version_reference"]["pipeline_version_id"] == version


def test_kubeflow_checks_the_fields_of_a_cron_expression(api: KubeflowApi, submit: Submit) -> None:
    assert "61" in failed(submit("--schedule", "61 2 * * *"), ExperimentError)
    assert api.recurring == {}


def test_kfps_client_and_ours_read_each_others_schedules(
    api: KubeflowApi, submit: Submit, pipeline: Callable[..., Result]
) -> None:
    import kfp

    done(submit("--schedule", "0 2 * * *"))
    theirs = kfp.Client(host=api.host)
    experiment = theirs.get_experiment(experiment_name="fedloom").experiment_id
    (ours,) = theirs.list_recurring_runs(experiment_id=experiment).recurring_runs
    assert theirs.get_recurring_run(ours.recurring_run_id).trigger.cron_schedule.cron == "0 0 2 * * *"
    reference = ours.pipeline_version_reference
    other = theirs.create_recurring_run(
        experiment,
        "by hand",
        cron_expression="0 30 4 * * 1-5",
        pipeline_id=reference.pipeline_id,
        version_id=reference.pipeline_version_id,
        params=ours.runtime_config.parameters,
    )
    theirs.disable_recurring_run(other.recurring_run_id)
    assert done(pipeline("schedules", "list")).splitlines() == [
        f"{ours.recurring_run_id}  active  {ours.display_name}: cron 0 0 2 * * *",
        f"{other.recurring_run_id}  paused  by hand: cron 0 30 4 * * 1-5",
    ]


def test_pause_resume_and_delete(api: KubeflowApi, submit: Submit, pipeline: Callable[..., Result]) -> None:
    assert done(pipeline("schedules", "list")) == ""
    done(submit("--schedule", "1d"))
    ((run, one),) = api.recurring.items()
    assert done(pipeline("schedules", "pause", run)) == f"paused {run}\n"
    assert one["status"] == "DISABLED"
    assert done(pipeline("schedules", "resume", run)) == f"resumed {run}\n"
    assert one["status"] == "ENABLED"
    in_progress = kfp_recurring.trigger_now(api, run)
    assert done(pipeline("schedules", "delete", run)) == f"deleted {run}\n"
    assert api.recurring == {}
    assert in_progress["state"] == "RUNNING"  # otherwise Kubernetes would remove the workflow with its owner
    for action in ("pause", "resume", "delete"):
        assert run in failed(pipeline("schedules", action, run), ExperimentError)
        failed(pipeline("schedules", action), ExperimentError)
    failed(pipeline("schedules", "list", run), ExperimentError)


def test_schedules_beyond_one_page_are_listed(
    api: KubeflowApi, submit: Submit, pipeline: Callable[..., Result]
) -> None:
    done(submit("--schedule", "1d"))
    (one,) = api.recurring.values()
    for number in range(1, 250):
        api.kept(api.recurring, "recurring_run_id", {**one, "recurring_run_id": f"{number:036x}"})
    assert len(done(pipeline("schedules", "list")).splitlines()) == len(api.recurring) >= 201


# --- installations and logins -----------------------------------------------------------------------------------------


def test_several_users_with_a_namespace_each(api: KubeflowApi, submit: Submit, pipeline: Callable[..., Result]) -> None:
    api.namespaces, api.token = (PROFILE,), "secret"
    done(submit(namespace=PROFILE, token="secret"))
    assert next(iter(api.experiments.values()))["namespace"] == PROFILE
    assert tells(failed(submit(token="secret"), ExperimentError), "namespace", "--kubeflow")
    message = failed(submit(namespace="team-b", token="secret"), RefusedError)
    assert tells(message, "namespace team-b: cannot look for pipeline", "default-editor", "list", "pipelines")
    (run,) = api.runs
    next(iter(api.experiments.values()))["namespace"] = "team-b"
    for command in ("wait", "stop"):
        message = failed(pipeline(command, run, namespace=PROFILE, token="secret"), RefusedError)
        assert tells(message, "team-b", "get", "runs")


def test_a_single_user_has_no_namespace(api: KubeflowApi, submit: Submit) -> None:
    assert tells(failed(submit(namespace=PROFILE), ExperimentError), "--kubeflow", PROFILE)
    assert api.counts() == (0, 0, 0, 0)


def test_tokens(api: KubeflowApi, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.token = "of-today"
    message = failed(submit(token="of-yesterday"), RefusedError)
    assert tells(message, "401", "token_command", "kubectl create token", "--audience=pipelines.kubeflow.org")
    assert "of-yesterday" not in message
    assert "valid token" in failed(submit(), RefusedError)
    (tmp_path / "token").write_text("of-today\n")
    done(submit(token=f"@{tmp_path / 'token'}"))
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(client, "IN_CLUSTER_HOST", api.host)
    done(submit(host="in-cluster"))
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "none"))
    assert tells(failed(submit(host="in-cluster"), RefusedError), tmp_path / "none", "docs/kubeflow.md")
    monkeypatch.setenv("FEDLOOM_KUBEFLOW_TOKEN", "of-today")
    done(submit())
    assert len(api.runs) == 3


def test_a_token_that_changes_during_a_wait(api: KubeflowApi, tmp_path: Path) -> None:
    """Tokens last an hour, runs longer: one from a file is read again."""
    token, api.token = tmp_path / "token", "first"
    token.write_text("first")
    kubeflow = Kubeflow(KubeflowSettings(host=api.host, token=f"@{token}"))
    for value in ("first", "second"):
        api.token = value
        token.write_text(value)
        kubeflow.call("list", "pipeline_service_list_pipelines")  # the API's health asks for no token


def test_a_command_prints_tokens(api: KubeflowApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs again when its token has served for a while; a failure is then one that may pass."""
    number = tmp_path / "number"
    number.write_text("0")
    script = f"import pathlib; p = pathlib.Path({str(number)!r}); n = int(p.read_text()); p.write_text(str(n + 1));"
    source = TokenCommand(shlex.join([sys.executable, "-S", "-c", f"{script} print(f'token-{{n}}')"]))
    assert [source(), source()] == ["token-0", "token-0"]
    monkeypatch.setattr(client.time, "monotonic", lambda: source._until)
    assert source() == "token-1"
    number.write_text("no number")
    with pytest.raises(StorageError):
        source()


@pytest.mark.parametrize(
    ("settings", "kind", "facts"),
    [
        ({"token": "x", "token_command": "y"}, ExperimentError, ("token", "token_command")),
        ({"token_command": "kubectl 'create"}, ExperimentError, ("token_command",)),
        ({"token_command": "   "}, ExperimentError, ("token_command",)),
        ({"token_command": "no-such-program-here --x"}, RefusedError, ("token_command", "no-such-program-here")),
        ({"token_command": f"{sys.executable} -S -c 'import sys; sys.exit(\"no such account\")'"}, RefusedError,
         ("token_command", "no such account")),
        ({"token_command": f"{sys.executable} -S -c 'print()'"}, RefusedError, ("token_command",)),
        ({"token_command": f"{sys.executable} -S -c 'print(1); print(2)'"}, RefusedError, ("token_command",)),
        ({"token": "@/no/such/file"}, RefusedError, ("/no/such/file",)),
        ({"token": "secret\nHost: c"}, RefusedError, ("token",)),
    ],
)  # fmt: skip
def test_invalid_logins(
    api: KubeflowApi, submit: Submit, settings: dict[str, Any], kind: type[FedloomError], facts: tuple[str, ...]
) -> None:
    message = failed(submit(**settings), kind)
    assert tells(message, *facts)
    assert "secret" not in message
    assert api.asked == []


def test_a_token_command_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "COMMAND_S", 0.2)
    with pytest.raises(RefusedError):
        TokenCommand("sleep 60")


@pytest.mark.parametrize(
    "answer",
    [
        {"login_page": True},
        {"faults": [Fault("GET /healthz", status=302, location="/dex/auth?client_id=kubeflow")]},
        {"faults": [Fault("GET /healthz", status=401)]},
    ],
)
def test_a_page_to_log_in_is_not_taken_for_an_answer(api: KubeflowApi, submit: Submit, answer: dict[str, Any]) -> None:
    vars(api).update(answer)
    message = failed(submit(token="x"), RefusedError)
    assert tells(message, api.host, "valid token", "token_command")
    assert "client_id" not in message
    assert api.counts() == (0, 0, 0, 0)


def test_servers_that_are_not_kubeflow(api: KubeflowApi, submit: Submit, files: tuple[str, str]) -> None:
    assert "/pipeline" in failed(submit(host=f"{api.host}/pipelin"), ExperimentError)
    assert tells(failed(submit(host="ftp://kubeflow"), ExperimentError), "--kubeflow", "ftp://kubeflow")
    assert tells(failed(submit(host="http://ann:secret@kubeflow"), ExperimentError), "without a user name")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        message = failed(submit(host=f"http://127.0.0.1:{nobody.getsockname()[1]}"), StorageError)
    assert "cannot be reached" in message
    for option, facts in (((), ("--kubeflow", "in-cluster")), (("--kubeflow", "kubeflow"), ("kubeflow", "no such"))):
        command = ["pipeline", *option, "submit", "personalized_federation", files[0], "--param", "backend=local"]
        assert tells(failed(CliRunner().invoke(app, command), ExperimentError), *facts)


def test_examples_on_the_page_are_valid() -> None:
    """Check the file of an installation, and the object that gives pods a token, as a pod has it."""
    page = (Path(__file__).parents[2] / "docs" / "kubeflow.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (settings,) = [block for block in blocks if "token_command" in block]
    KubeflowSettings.model_validate(settings, strict=True)
    (default,) = [block["spec"] for block in blocks if block.get("kind") == "PodDefault"]
    container = {"name": "c", "image": "i:1", "env": default["env"], "volumeMounts": default["volumeMounts"]}
    spec = {"containers": [container], "volumes": default["volumes"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    kubernetes_schemas.check(pod)
    ((source,),) = ([*volume["projected"]["sources"]] for volume in default["volumes"])
    assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org"
    path = f"{container['volumeMounts'][0]['mountPath']}/{source['serviceAccountToken']['path']}"
    assert path == default["env"][0]["value"] == client.TOKEN_FILE


def test_a_parameter_of_seeds_may_be_empty() -> None:
    assert submitting.parameters_from(["seeds=", "methods=", "methods=a=1"]) == {"seeds": [], "methods": ["", "a=1"]}
