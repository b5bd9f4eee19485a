"""Settings of the tasks' pods, compared with functions and definitions of kfp; by default nothing changes."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from facts import refusing, tells
from google.protobuf.json_format import MessageToDict, ParseDict
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig
from kfp.pipeline_spec.pipeline_spec_pb2 import PipelineSpec
from typer.testing import CliRunner, Result

from fedloom.cli.main import app
from fedloom.errors import ExperimentError
from fedloom.kubeflow import catalog
from fedloom.kubeflow.pods import PodSettings

pytestmark = pytest.mark.group("components")

PIPELINES = Path(__file__).parents[2] / "pipelines"
ACCELERATOR = {"resource": "nvidia.com/mig-1g.5gb", "count": 2}
NODES = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a100", "h100"]}]}]
    }
}
EVERYTHING = {
    "requests": {"cpu": "750m", "memory": "2Gi"},
    "limits": {"cpu": 2, "memory": "4Gi"},
    "gpu": ACCELERATOR,
    "image_pull_secrets": ["registry", "mirror"],
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
    "node_selector": {"pool": "a100"},
    "affinity": {"nodeAffinity": NODES},
    "labels": {"team": "vision", "example.org/cost": ""},
    "annotations": {"example.org/note": "any text: at all"},
}


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], dict[str, Any]]]:
    """Compile a pipeline by the command, with settings of its pods and other options; return its two documents."""

    def run(
        settings: dict[str, Any] | None = None, *options: str, name: str = "personalized_federation"
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        result = command(tmp_path, settings, name, *options)
        assert result.exit_code == 0, (result.output, result.exception)
        spec, platform = yaml.safe_load_all((tmp_path / "out" / f"{name}.yaml").read_text())
        ParseDict(spec, PipelineSpec())  # fields unknown to Kubeflow are errors
        executors: dict[str, Any] = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        for config in executors.values():
            ParseDict(config, KubernetesExecutorConfig())
        return spec, executors

    return run


def command(folder: Path, settings: dict[str, Any] | None, name: str, *options: str) -> Result:
    """Run `fedloom pipeline compile` with a file of settings."""
    if settings is not None:
        (folder / "pods.yaml").write_text(yaml.safe_dump(settings))
        options = (*options, "--pods", str(folder / "pods.yaml"))
    return CliRunner().invoke(app, ["pipeline", "compile", name, "--out", str(folder / "out"), *options])


def tasks(spec: dict[str, Any]) -> dict[str, Any]:
    """Return every task of a pipeline, by name."""
    groups = (spec["root"], *spec["components"].values())
    return {name: task for group in groups for name, task in group.get("dag", {}).get("tasks", {}).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.NAMES)
def test_without_settings_the_pipeline_is_byte_identical(name: str, tmp_path: Path) -> None:
    catalog.compile_to(name, tmp_path / "by_kfp.yaml")
    expected = (tmp_path / "by_kfp.yaml").read_bytes()
    for settings in (None, {}, {"all": {}, "tasks": {}}):
        assert command(tmp_path, settings, name).exit_code == 0
        assert (tmp_path / "out" / f"{name}.yaml").read_bytes() == expected
    PodSettings().apply(tmp_path / "by_kfp.yaml", ["s3://bucket/x", None])
    assert (tmp_path / "by_kfp.yaml").read_bytes() == expected


@pytest.mark.slow
def test_pod_settings_equal_those_of_kfps_functions(compiled: Callable[..., Any]) -> None:
    from configured_pipelines import configured  # compiles pipelines

    spec, executors = compiled({"tasks": {"report": EVERYTHING}})
    container = configured.pipeline_spec.deployment_spec["executors"]["exec-report"]["container"]
    theirs = {key: value for key, value in dict(container["resources"]).items() if key.startswith("resource")}
    ours = spec["deploymentSpec"]["executors"]["exec-report"]["container"]["resources"]
    accelerator = dict(container["resources"]["accelerator"])
    assert {key: value for key, value in ours.items() if key != "accelerator"} == theirs
    assert ours["accelerator"] == {key: accelerator[key] for key in ("resourceType", "resourceCount")}
    platform = MessageToDict(configured.platform_spec)["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert ParseDict(executors["exec-report"], KubernetesExecutorConfig()) == ParseDict(
        platform["exec-report"], KubernetesExecutorConfig()
    )


def test_settings_of_a_task_override_those_of_all_tasks(compiled: Callable[..., Any]) -> None:
    everywhere = {"labels": {"team": "a", "x": "1"}, "tolerations": [{"key": "b"}], "requests": {"cpu": "1"}}
    own = {"labels": {"team": "c"}, "tolerations": [{"key": "d"}], "limits": {"memory": "8Gi"}}
    spec, executors = compiled({"all": everywhere, "tasks": {"evaluate": own}})
    containers = {k: e["container"] for k, e in spec["deploymentSpec"]["executors"].items()}
    assert {config["podMetadata"]["labels"]["x"] for config in executors.values()} == {"1"}
    assert executors["exec-evaluate"]["podMetadata"]["labels"]["team"] == "c"
    assert [one["key"] for one in executors["exec-evaluate"]["tolerations"]] == ["b", "d"]
    assert set(executors) == set(containers)
    assert {c["resources"]["resourceCpuRequest"] for c in containers.values()} == {"1"}
    # A limit replaces the pipeline's own request of 4Gi, which might be larger.
    assert "memory" not in str(containers["exec-evaluate"]["resources"]).replace("resourceMemoryLimit", "")
    assert containers["exec-partition"]["resources"]["resourceMemoryRequest"] == "4Gi"


def test_federation_settings_apply_only_to_its_pod(compiled: Callable[..., Any]) -> None:
    """With `--backend local` it trains; otherwise Kubeflow would pass them to the component (passthroughs)."""
    spec, _ = compiled({"tasks": {"federate": {"limits": {"cpu": "4", "memory": "8Gi"}, "gpu": {"count": 1}}}})
    assert "taskConfigPassthroughs" not in spec["components"]["comp-federate"]
    resources = spec["deploymentSpec"]["executors"]["exec-federate"]["container"]["resources"]
    assert (resources["resourceCpuLimit"], resources["accelerator"]["resourceType"]) == ("4", "nvidia.com/gpu")
    spec, _ = compiled({"all": {"labels": {"a": "b"}, "image_pull_secrets": ["registry"]}})
    assert len(spec["components"]["comp-federate"]["taskConfigPassthroughs"]) == 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", catalog.NAMES)
def test_no_task_reuses_results_without_cache(name: str, compiled: Callable[..., Any]) -> None:
    with_cache, _ = compiled(None, name=name)
    without, _ = compiled({"cache": False}, name=name)
    enabled = [task["cachingOptions"].get("enableCache", False) for task in tasks(without).values()]
    assert not any(enabled)
    for task in (*tasks(with_cache).values(), *tasks(without).values()):
        task["cachingOptions"] = None
    assert with_cache == without


def test_claims_are_mounted_by_the_tasks_with_access_to_storage(compiled: Callable[..., Any]) -> None:
    _, executors = compiled({"claims": ["shared", "models"]})
    mounted = {key: config["pvcMount"] for key, config in executors.items() if "pvcMount" in config}
    assert set(mounted) == {"exec-fetch", "exec-federate", "exec-evaluate"}
    for mounts in mounted.values():
        places = [
            (one["mountPath"], one["pvcNameParameter"]["runtimeValue"]["constant"], one["constant"]) for one in mounts
        ]
        assert places == [(f"/mnt/claims/{name}", name, name) for name in ("models", "shared")]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"tasks": {"evaluat": {}}}, ("personalized-federation", "evaluate", "partition")),
        ({"task": {}}, ("did you mean tasks?",)),
        ({"all": {"toleration": []}}, ("all.toleration", "tolerations")),
        ({"all": {"requests": {"cpu": "much"}}}, ("all.requests", "much")),
        ({"all": {"limits": {"nvidia.com/gpu": 1}}}, ("all.limits", "nvidia.com/gpu", "`gpu`")),
        ({"all": {"affinity": {"podAffinity": {}}}}, ("all.affinity", "nodeAffinity", "podAffinity")),
        ({"all": {"labels": {"a b": "c"}}}, ("all.labels", "a b")),
        ({"all": {"labels": {"a": "no spaces"}}}, ("all.labels", "no spaces")),
        ({"all": {"labels": {"pipeline/runid": "c"}}}, ("all.labels", "pipeline/runid")),
        ({"all": {"annotations": {"fedloom.dev/x": "c"}}}, ("all.annotations", "fedloom.dev/x")),
        ({"all": {"tolerations": [{"keys": "a"}]}}, ("pods", "keys")),
        ({"claims": ["Upper"]}, ("pvc://Upper", "lower-case")),
    ],
)
def test_invalid_settings_are_rejected_and_nothing_is_written(
    settings: dict[str, Any], facts: tuple[str, ...], tmp_path: Path
) -> None:
    result = command(tmp_path, settings, "personalized_federation")
    assert isinstance(result.exception, ExperimentError), result.output
    with refusing(ExperimentError, *facts):
        raise result.exception
    assert not (tmp_path / "out").exists()


def test_a_task_of_another_pipeline_is_reported(tmp_path: Path) -> None:
    result = command(tmp_path, {"tasks": {"federate": {"gpu": {"count": 1}}}}, "unseen_clients")
    assert tells(str(result.exception), "unseen-clients", "federate", "evaluate")


def test_the_table_of_keys_is_current() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "kubeflow.md").read_text()
    assert runpy.run_path(str(docs / "generate_keys.py"))["kubeflow_page"](page) == page, "make docs"
