"""Search as a Katib Experiment: accepted by its webhook, with the same values as ``fedloom search``."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from facts import refusing
from fake_cluster.kubelet import expand
from katib_stand_in import Suggestions, collected, refusals, settings_of, trial_job, wrap
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.cluster.settings import ClusterSettings
from fedloom.errors import ExperimentError
from fedloom.experiment.search_space import Parameter, read_space
from fedloom.kubeflow.katib import KatibSearch, known_headline, plan_katib_search, search_objects
from fedloom.tasks.names import METRICS
from fedloom.trackers.katib import METRICS_PATH, Katib, katib_lines, objective_name
from fedloom.tuning.trials import Schedule, Trials

FILE = Path(__file__).parents[2] / "experiments" / "vowel.yaml"
STORED = ("storage=s3://bucket/fedloom", "evaluation.every=10")
PLAIN = ClusterSettings(image="fedloom:0.1.0", storage_secret="store")
FULL = ClusterSettings.from_json(
    """{
    "image": "fedloom:0.1.0", "namespace": "team-a", "image_pull_secrets": ["pull"], "storage_secret": "store",
    "worker": {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}}, "node_selector": {"disk": "fast"},
    "tolerations": [{"key": "spot", "operator": "Exists"}], "env": {"SSL_CERT_FILE": "/ca/ca.crt"},
    "volumes": [{"name": "ca", "configMap": {"name": "ca"}}], "volume_mounts": [{"name": "ca", "mountPath": "/ca"}],
    "service_account": "trials", "queue_name": "team", "labels": {"team": "a"}, "annotations": {"why": "not"},
    "s3_endpoint": "http://s3:8333"
    }"""
)
SPACE: dict[str, Any] = {
    "algorithm.local.lr": {"min": 0.001, "max": 1, "log": True},
    "algorithm.local.epochs": {"min": 1, "max": 4},
    "algorithm.local.batch_size": {"min": 4, "max": 16, "step": 4},
    "model.hidden": {"choices": [[16], [8, 8]]},
    "algorithm.weighting": {"choices": ["examples", "uniform"]},
}
GRID = {key: SPACE[key] for key in [*SPACE][1:]} | {"algorithm.local.lr": {"min": 0.1, "max": 0.5, "step": 0.1}}
DRAWN = {key: values for key, values in SPACE.items() if "step" not in values}
PARTITION = "s3://bucket/fedloom/partitions/vowel"
PRIVATE = ("algorithm.weighting=uniform", "federation.privacy={clip: 1.0, noise_multiplier: 1.0, delta: 1.0e-3}")


def planned(
    parameters: Mapping[str, Any] = SPACE,
    *changes: str,
    cluster: ClusterSettings = PLAIN,
    partition: str = PARTITION,
    parallel: int | None = None,
    **settings: Any,
) -> KatibSearch:
    space = read_space({"parameters": dict(parameters), **settings})
    return plan_katib_search(FILE.read_text(), (*STORED, *changes), space, cluster, partition, parallel)


def made(search: KatibSearch) -> tuple[dict[str, Any], dict[str, Any]]:
    file, experiment = search_objects(search)
    return file, experiment


@pytest.mark.parametrize("cluster", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        (SPACE, {"sampler": "tpe", "early_stopping": "median"}),
        (SPACE, {"sampler": "random", "trials": 2}),
        (GRID, {"sampler": "grid"}),
    ],
)
def test_katib_and_kubernetes_accept_the_objects(
    parameters: dict[str, Any], settings: dict[str, Any], cluster: ClusterSettings
) -> None:
    search = planned(parameters, cluster=cluster, **settings)
    file, experiment = made(search)
    assert refusals(experiment) == []
    assert file["data"] == {"experiment.yaml": FILE.read_text()}
    assert file["metadata"] == experiment["metadata"]
    assignments = {p["name"]: (p["feasibleSpace"].get("list") or ["1"])[0] for p in experiment["spec"]["parameters"]}
    job = trial_job(experiment["spec"], "vowel-1-abcde", assignments)
    kubernetes_schemas.check(file, job)
    wrap(job, experiment["spec"], stops=True)
    kubernetes_schemas.check(job)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]


def test_pod_settings_apply_to_katib_trials() -> None:
    job = made(planned(cluster=FULL))[1]["spec"]["trialTemplate"]["trialSpec"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["metadata"]["labels"].items() >= {"team": "a", "kueue.x-k8s.io/queue-name": "team"}.items()
    assert job["metadata"]["annotations"] == {"why": "not"}
    assert pod["serviceAccountName"] == "trials"
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert pod["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert container["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}}
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["FEDLOOM_S3_ENDPOINT"] == "http://s3:8333"
    assert values["SSL_CERT_FILE"] == "/ca/ca.crt"
    assert values["FEDLOOM_KATIB_FILE"] == METRICS_PATH


def test_objective_and_early_stopping_follow_the_experiment() -> None:
    spec = made(planned(early_stopping="median", seed=7))[1]["spec"]
    assert spec["objective"]["type"] == "maximize"
    assert spec["objective"]["objectiveMetricName"] == "validation_accuracy"
    assert settings_of(spec["algorithm"]) == {"random_state": "7"}
    assert settings_of(spec["earlyStopping"]) == {"min_trials_required": "5", "start_step": "5"}  # of 15 evaluations
    assert (spec["maxTrialCount"], spec["parallelTrialCount"]) == (20, 3)
    private = made(planned({"algorithm.local.lr": SPACE["algorithm.local.lr"]}, *PRIVATE, epsilon=2.0))[1]["spec"]
    assert private["objective"]["additionalMetricNames"] == ["epsilon"]
    (command,) = private["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--set federation.privacy.budget=2.0" in command
    assert known_headline(planned().base) == METRICS["accuracy"]


@pytest.mark.slow
def test_names_of_searches() -> None:
    first, second = planned().title, planned(seed=1).title
    assert first != second
    assert first == planned().title
    assert planned(SPACE, f"name=Long_{'x' * 90}").title.startswith("long-xxx")
    assert len(planned(SPACE, f"name=Long_{'x' * 90}").title) == 40
    assert planned(SPACE, "name=7up").title.startswith("search-7up-")


@pytest.mark.slow
def test_the_trials_of_a_grid_equal_those_of_a_search_without_a_cluster(tmp_path: Path) -> None:
    """With equal versions of Optuna the order is equal, too."""
    search = planned(GRID, sampler="grid", seed=11)
    spec = made(search)[1]["spec"]
    trials = Trials(search.plan, tmp_path, "e", Schedule(150, 10))
    ours = [dict(trials.draw().texts) for _ in range(search.plan.trials)]
    katib = Suggestions(spec)
    assert [katib.ask() for _ in range(spec["maxTrialCount"])] == ours
    assert len({tuple(texts.items()) for texts in ours}) == 4 * 4 * 2 * 2 * 5
    assert {texts["algorithm.local.lr"] for texts in ours} == {"0.1", "0.2", "0.3", "0.4", "0.5"}


def test_searches_unsupported_by_katib_are_rejected() -> None:
    with refusing(ExperimentError, "early_stopping", "hyperband", "median"):
        planned({"algorithm.local.momentum": {"min": 0, "max": 0.9}}, early_stopping="hyperband", trials=90)
    search = planned()
    quoted = dataclasses.replace(search.plan, parameters=(Parameter("a.b", choices=('"tab\\t"',)),))
    with refusing(ExperimentError, "parameters.a.b"):
        search_objects(dataclasses.replace(search, plan=quoted))
    with refusing(ExperimentError, "partition", "s3://"):
        planned(partition="/data/partition")
    with refusing(ExperimentError, "storage"):
        plan_katib_search(FILE.read_text(), (), read_space({"parameters": SPACE}), PLAIN, PARTITION)
    with refusing(ExperimentError, "cluster.image"):
        planned(cluster=ClusterSettings(storage_secret="store"))
    with refusing(ExperimentError, "data.root=${trialSpec.Name}"):
        planned(DRAWN, "data.root=${trialSpec.Name}")


def test_overrides_reach_the_trial_unchanged() -> None:
    """Kubernetes expands $(NAME) and halves $$ in a container's arguments, and a shell processes the rest."""
    override = 'data.root=/d$$$/$(TRIAL)/$(date)/it\'s "$HOME"'
    spec = made(planned(DRAWN, override))[1]["spec"]
    values = {parameter["name"]: "v" for parameter in spec["parameters"]}
    (container,) = trial_job(spec, "vowel-a", values)["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    command = expand(container["args"][0], given)
    words = ["sh", "-c", f"fedloom() {{ printf '%s\\0' \"$@\"; }}; {command}"]
    heard = subprocess.run(words, env={**os.environ, **given}, capture_output=True, text=True, check=True).stdout
    assert heard.split("\0").count(override) == 1
    assert "algorithm.local.lr=v" in heard.split("\0")
    assert "runs/vowel-a" in heard.split("\0")


def test_katibs_collector_reads_the_metric_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headline = {"headline": {"name": "rmse", "higher_is_better": False, "percent": False}}
    values = [0.5, 1e-7, 123456789.0, 3e22, 1.0]
    lines = [
        {
            "round": round,
            "validation_pooled": value,
            "validation_loss": 9.0,
            "privacy": {"epsilon": value / 2},
            **headline,
        }
        for round, value in enumerate(values)
    ]
    assert objective_name(METRICS["rmse"]) == "validation_rmse"
    text = "".join(each for line in lines for each in katib_lines(line))
    found = collected(text, ["validation_rmse", "epsilon"])
    assert [metric.value for metric in found if metric.name == "validation_rmse"] == values
    assert [metric.value for metric in found if metric.name == "epsilon"] == [value / 2 for value in values]
    assert sorted(metric.time for metric in found) == [metric.time for metric in found]
    unknown = {"round": 3, "validation_pooled": None, "validation_loss": None, "privacy": {"epsilon": None}, **headline}
    assert list(katib_lines(unknown)) == []
    # The tracker omits the evaluation before training, and always omits test results.
    monkeypatch.setenv("FEDLOOM_KATIB_FILE", str(tmp_path / "katib" / "metrics.log"))
    tracker = Katib(tmp_path)
    for line in lines:
        tracker.evaluated({**line, "seen": {"accuracy_mean": 0.77}})
    written = (tmp_path / "katib" / "metrics.log").read_text()
    assert [metric.value for metric in collected(written, ["validation_rmse"])] == values[1:]
    assert "0.77" not in written


def test_the_command_writes_objects_for_kubectl(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(json.dumps({"parameters": SPACE, "trials": 6}))
    (tmp_path / "cluster.yaml").write_text("image: fedloom:0.1.0\nstorage_secret: store\n")
    words = ["pipeline", "search", str(FILE), "--space", str(tmp_path / "space.yaml")]
    words += ["--cluster", str(tmp_path / "cluster.yaml"), *(word for change in STORED for word in ("--set", change))]
    words += ["--parallel", "2", "--partition", PARTITION]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    search = planned(trials=6, parallel=2)
    assert list(yaml.safe_load_all(shown.output)) == search_objects(search)
