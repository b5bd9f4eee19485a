"""Recurring runs, options of a submission, and old versions, against the Kubeflow Pipelines API over a socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import kfp_recurring
import pytest
import yaml
from facts import refusing, tells
from kfp_api import Fault, KubeflowApi, serving
from run_processes import EXPERIMENT
from typer.testing import CliRunner, Result

from fedloom.cli.main import app
from fedloom.errors import ExperimentError, FedloomError, RefusedError, StorageError
from fedloom.kubeflow import submit as submitting
from fedloom.kubeflow.schedules import cron_with_seconds, interval_seconds
from fedloom.kubeflow.steps import FAILURE_MARK

pytestmark = pytest.mark.xdist_group("components")

CLUSTER = {"image": "fedloom/worker:0.1.0", "labels": {"team": "vision"}}
NIGHTLY = ("--cron", "0 2 * * *")


@pytest.fixture
def api() -> Iterator[KubeflowApi]:
    with serving(KubeflowApi()) as one:
        yield one


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(submitting.wait_for_run, "__kwdefaults__", {"poll_s": 0.02})
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KF_PIPELINES_ENDPOINT", "FEDLOOM_KUBEFLOW_TOKEN", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pipeline(api: KubeflowApi, tmp_path: Path) -> Callable[..., Result]:
    """Run `fedloom pipeline COMMAND personalized_federation` in this process, with a file for client pods."""
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump({**EXPERIMENT, "storage": "s3://bucket/fedloom"}))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))

    def run(command: str, *options: str, kubeflow: str = "") -> Result:
        files = ("personalized_federation", str(tmp_path / "experiment.yaml"))
        where = ("--cluster", str(tmp_path / "cluster.yaml"), "--kubeflow", kubeflow or api.host)
        return CliRunner().invoke(app, ["pipeline", command, *files, *where, *options])

    return run


def done(result: Result) -> str:
    """Return the output of a command that succeeded."""
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def failed(result: Result, kind: type[FedloomError], *facts: object) -> None:
    """Check that a command failed with an error that contains these facts."""
    assert isinstance(result.exception, kind), (result.output, result.exception)
    with refusing(kind, *facts):
        raise result.exception


def schedules(api: KubeflowApi, command: str, *arguments: str) -> Result:
    """Run `fedloom pipeline schedules COMMAND`."""
    return CliRunner().invoke(app, ["pipeline", "schedules", command, *arguments, "--kubeflow", api.host])


# --- recurring runs ---------------------------------------------------------------------------------------------------


def test_a_schedule_has_the_requested_parameters(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    output = done(pipeline("submit", *NIGHTLY, "--set", "seed=7", "--max-concurrency", "2", "--checkpoint", "best"))
    (one,) = api.recurring.values()
    assert tells(output, one["recurring_run_id"], "cron 0 0 2 * * *", f"{api.host}/#/recurringrun/details/")
    fields = kfp_recurring.parsed(one["trigger"]["cron_schedule"]["cron"])
    assert fields == {"second": "0", "minute": "0", "hour": "2", "day": "*", "month": "*", "weekday": "*"}
    assert (one["display_name"], one["max_concurrency"], one["no_catchup"]) == ("small", "2", True)
    parameters = one["runtime_config"]["parameters"]
    assert (parameters["overrides"], parameters["checkpoint"]) == (["seed=7"], "best")
    assert api.counts() == (1, 1, 1, 0)
    (version,) = api.versions
    assert one["pipeline_version_reference"]["pipeline_version_id"] == version


def test_an_interval_and_missed_runs(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    done(pipeline("submit", "--every", "6h", "--catch-up", "--name", "often"))
    (one,) = api.recurring.values()
    assert one["trigger"] == {"periodic_schedule": {"interval_second": str(6 * 3600)}}
    assert (one["display_name"], one["no_catchup"]) == ("often", False)


def test_kfps_client_and_ours_read_each_others_schedules(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    import kfp

    done(pipeline("submit", *NIGHTLY))
    client = kfp.Client(host=api.host)
    (found,) = client.list_recurring_runs(experiment_id=client.get_experiment(experiment_name="fedloom").experiment_id
    ).recurring_runs  # fmt: skip
    assert client.get_recurring_run(found.recurring_run_id).trigger.cron_schedule.cron == "0 0 2 * * *"
    reference = found.pipeline_version_reference
    theirs = client.create_recurring_run(
        found.experiment_id,
        "by hand",
        cron_expression="0 30 4 * * 1-5",
        pipeline_id=reference.pipeline_id,
        version_id=reference.pipeline_version_id,
        params=found.runtime_config.parameters,
    )
    client.disable_recurring_run(theirs.recurring_run_id)
    lines = done(schedules(api, "list")).splitlines()
    assert lines == [
        f"{found.recurring_run_id}  active  small: cron 0 0 2 * * *",
        f"{theirs.recurring_run_id}  paused  by hand: cron 0 30 4 * * 1-5",
    ]
    client.delete_recurring_run(theirs.recurring_run_id)
    assert len(done(schedules(api, "list")).splitlines()) == 1


def test_pause_resume_and_delete(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    done(pipeline("submit", *NIGHTLY))
    ((run, one),) = api.recurring.items()
    done(schedules(api, "pause", run))
    assert one["status"] == "DISABLED"
    done(schedules(api, "resume", run))
    assert one["status"] == "ENABLED"
    started = kfp_recurring.trigger_now(api, run)
    done(schedules(api, "delete", run))
    assert api.recurring == {}
    assert started["state"] == "RUNNING"  # otherwise Kubernetes would remove the workflow with its owner
    for command in ("pause", "resume", "delete"):
        failed(schedules(api, command, run), ExperimentError, run)


def test_a_namespace_without_schedules(api: KubeflowApi) -> None:
    assert done(schedules(api, "list")) == ""


def test_schedules_beyond_one_page_are_listed(
    api: KubeflowApi, pipeline: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    done(pipeline("submit", *NIGHTLY))
    (one,) = api.recurring.values()
    for number in range(1, 250):
        api.kept(api.recurring, "recurring_run_id", {**one, "recurring_run_id": f"{number:036x}"})
    assert len(done(schedules(api, "list")).splitlines()) == len(api.recurring) >= 201


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("POST /recurringruns", status=500), StorageError),
        (Fault("POST /recurringruns", drop="after"), StorageError),
        (Fault("POST /recurringruns", status=403), RefusedError),
    ],
)
def test_a_failed_schedule_leaves_nothing_behind(
    fault: Fault, kind: type[FedloomError], api: KubeflowApi, pipeline: Callable[..., Result]
) -> None:
    """Not even one that Kubeflow created without an answer."""
    api.faults = [fault]
    failed(pipeline("submit", *NIGHTLY), kind)
    assert (api.counts(), api.recurring) == ((0, 0, 0, 0), {})


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (("--max-concurrency", "2"), ("--max-concurrency", "cron", "every")),
        (("--catch-up",), ("--catch-up", "cron", "every")),
        ((*NIGHTLY, "--wait"), ("--wait",)),
        ((*NIGHTLY, "--every", "1h"), ("cron", "every")),
        (("--cron", "61 2 * * *"), ("cron", "minute", "61")),
        (("--every", "often"), ("every", "often", "6h")),
        ((*NIGHTLY, "--set", "federation.rounds=-1"), ("federation.rounds",)),
        ((*NIGHTLY, "--label", "team"), ("--label", "KEY=VALUE")),
    ],
)
def test_errors_are_reported_before_any_request(
    options: tuple[str, ...], facts: tuple[str, ...], api: KubeflowApi, pipeline: Callable[..., Result]
) -> None:
    failed(pipeline("submit", *options), ExperimentError, *facts)
    assert api.asked == []


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("0 2 * * *", "0 0 2 * * *"),
        ("*/15 8-18 * * mon-FRI", "0 */15 8-18 * * mon-FRI"),
        ("30 0 2 1,15 jan ?", "30 0 2 1,15 jan ?"),
        ("5/10 * 31 12 0", "0 5/10 * 31 12 0"),
    ],
)
def test_the_second_is_prepended_to_five_cron_fields(given: str, sent: str) -> None:
    """Kubeflow would read five fields as second to month."""
    assert cron_with_seconds(given) == sent
    kfp_recurring.parsed(sent)


@pytest.mark.parametrize(
    ("cron", "facts"),
    [
        ("", ("5 fields",)),
        ("@daily", ("5 fields",)),
        ("* * * *", ("5 fields", "4")),
        ("0 0 2 * * * 2027", ("5 fields", "7")),
        ("60 * * * *", ("minute", "60", "59")),
        ("* 24 * * *", ("hour", "24", "23")),
        ("* * 0 * *", ("day of month", "0")),
        ("* * * 13 *", ("month", "13", "12")),
        ("* * * * 7", ("day of week", "7", "6")),
        ("* * * * mo", ("day of week", "mo", "mon")),
        ("* 18-8 * * *", ("hour", "18-8")),
        ("*/0 * * * *", ("minute", "*/0")),
        ("1,,2 * * * *", ("minute",)),
        ("1-2-3 * * * *", ("minute", "1-2-3")),
        ("-1 * * * *", ("minute", "-1")),
        ("* * L * *", ("day of month", "L")),
    ],
)
def test_bad_cron_expressions_name_the_field(cron: str, facts: tuple[str, ...]) -> None:
    with refusing(ExperimentError, repr(cron), *facts):
        cron_with_seconds(cron)


def test_intervals() -> None:
    assert [interval_seconds(text) for text in ("1s", "90m", "6h", "2d")] == [1, 5400, 21_600, 172_800]
    for text in ("", "0h", "-1h", "1.5h", "1w", "60", "h"):
        with refusing(ExperimentError, repr(text)):
            interval_seconds(text)


# --- options of a submission ------------------------------------------------------------------------------------------


def test_name_labels_pods_and_cache(api: KubeflowApi, pipeline: Callable[..., Result], tmp_path: Path) -> None:
    pods = tmp_path / "pods.yaml"
    pods.write_text(yaml.safe_dump({"all": {"labels": {"a": "1", "b": "1"}}}))
    done(
        pipeline("submit", "--name", "Tuesday's", "--label", "b=2", "--label", "c=3", "--pods", str(pods), "--no-cache")
    )
    (run,), (version,) = api.runs.values(), api.versions.values()
    assert run["display_name"] == "Tuesday's"
    executors = version["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for config in executors.values():
        assert config["podMetadata"] == {"labels": {"a": "1", "b": "2", "c": "3"}}
    of_clients = json.loads(run["runtime_config"]["parameters"]["cluster"])["labels"]
    assert of_clients == {"team": "vision", "b": "2", "c": "3"}
    spec = version["pipeline_spec"]["pipeline_spec"]
    inner = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert not any(task["cachingOptions"].get("enableCache") for task in inner.values())


def test_the_claim_of_the_storage_is_mounted(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    done(pipeline("submit", "--set", "storage=pvc://shared/fedloom", "--source", "pvc://datasets/emnist"))
    (version,) = api.versions.values()
    platform = version["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]
    mounts = platform["deploymentSpec"]["executors"]["exec-federate"]["pvcMount"]
    assert [one["mountPath"] for one in mounts] == ["/mnt/claims/datasets", "/mnt/claims/shared"]


def test_withdrawing_a_run_keeps_another_with_the_same_name(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    done(pipeline("submit", "--name", "same"))
    api.faults = [Fault("POST /runs", drop="after")]
    failed(pipeline("submit", "--name", "same"), StorageError)
    (run,) = api.runs.values()
    assert (run["display_name"], run["state"]) == ("same", "PENDING")


def test_a_failure_is_found_in_the_log_of_a_pod_with_labels(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    """Argo names the pod after its template, and Kubeflow the template after the numbers of labels and annotations."""
    printed = f"{FAILURE_MARK}{json.dumps(RefusedError('partition: no rights').as_json())}\n"
    api.script = [("FAILED", [("partition", "FAILED", printed)])]
    failed(pipeline("submit", "--label", "a=b", "--wait"), RefusedError, "no rights")


# --- old versions -----------------------------------------------------------------------------------------------------


def names(api: KubeflowApi) -> list[str]:
    """Return the names of the versions, oldest first."""
    return [one["display_name"] for one in api.versions.values()]


def submitted(api: KubeflowApi, pipeline: Callable[..., Result], label: str, *more: str) -> str:
    """Submit a new version, let its run end, and return the version's name."""
    done(pipeline("submit", "--label", f"version={label}", *more))
    next(reversed(api.runs.values()))["state"] = "SUCCEEDED"
    return next(reversed(names(api)))


def test_the_newest_versions_and_all_in_use_are_kept(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    first = submitted(api, pipeline, "1")
    next(iter(api.runs.values()))["state"] = "RUNNING"
    done(pipeline("submit", *NIGHTLY, "--label", "version=2"))
    second = names(api)[-1]
    (schedule,) = api.recurring
    done(schedules(api, "pause", schedule))  # a paused one may be resumed
    (made,) = (p["pipeline_id"] for p in api.pipelines.values())
    third = submitted(api, pipeline, "3")
    by_hand = {"pipeline_id": made, "display_name": "0.1.0-by-hand", "description": "mine", "pipeline_spec": {}}
    api.kept(api.versions, "pipeline_version_id", by_hand)
    assert names(api) == [first, second, third, "0.1.0-by-hand"]
    fourth = submitted(api, pipeline, "4", "--keep-versions", "1")
    assert names(api) == [first, second, "0.1.0-by-hand", fourth]
    next(iter(api.runs.values()))["state"] = "FAILED"
    done(schedules(api, "delete", schedule))
    output = done(pipeline("submit", "--label", "version=4", "--keep-versions", "1"))
    assert names(api) == ["0.1.0-by-hand", fourth]
    assert tells(output, second, first)


def test_the_version_of_a_run_just_started_is_in_use(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    """An old version, of which a run was started, is not removed."""
    old = submitted(api, pipeline, "old")
    new = submitted(api, pipeline, "new")
    done(pipeline("submit", "--label", "version=old", "--keep-versions", "1"))
    assert names(api) == [old, new]


def test_without_the_option_no_version_is_listed_or_removed(api: KubeflowApi, pipeline: Callable[..., Result]) -> None:
    for label in ("1", "2", "3"):
        submitted(api, pipeline, label)
    assert len(api.versions) == 3
    assert "GET /runs" not in api.asked


def test_old_versions_that_cannot_be_removed_do_not_hide_the_run(
    api: KubeflowApi, pipeline: Callable[..., Result]
) -> None:
    submitted(api, pipeline, "1")
    api.faults = [Fault("DELETE /pipelines/.*/versions/.*", status=403)]
    output = done(pipeline("submit", "--label", "version=2", "--keep-versions", "1"))
    assert tells(output, next(reversed(api.runs)), "old versions were not removed", "403")
    assert len(api.versions) == 2


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "CANCELING", "PAUSED", "RUNTIME_STATE_UNSPECIFIED"])
def test_a_version_is_in_use_until_its_runs_have_ended(
    state: str, api: KubeflowApi, pipeline: Callable[..., Result]
) -> None:
    old = submitted(api, pipeline, "old")
    next(iter(api.runs.values()))["state"] = state
    new = submitted(api, pipeline, "new", "--keep-versions", "1")
    assert names(api) == [old, new]
