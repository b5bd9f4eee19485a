"""The compiled pipelines: committed, up to date, pinned, and their requirements on a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from facts import tells
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.errors import ExperimentError
from fedloom.kubeflow import catalog
from fedloom.kubeflow.catalog import IMAGE, component_image

pytestmark = pytest.mark.xdist_group("components")

PIPELINES = Path(__file__).parents[2] / "pipelines"
FIX = "fedloom pipeline compile --out pipelines"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all pipelines, just compiled."""
    out = tmp_path_factory.mktemp("compiled")
    result = CliRunner().invoke(app, ["pipeline", "compile", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out


def documents(path: Path) -> list[Any]:
    """Return the pipeline and platform documents without the version of kfp that wrote them."""
    found = list(yaml.safe_load_all(path.read_text()))
    found[0].pop("sdkVersion")
    return found


@pytest.mark.parametrize("name", catalog.NAMES)
def test_committed_pipelines_are_current(compiled: Path, name: str) -> None:
    assert documents(PIPELINES / f"{name}.yaml") == documents(compiled / f"{name}.yaml"), FIX


def test_all_committed_files_belong_to_a_pipeline() -> None:
    assert {path.stem for path in PIPELINES.glob("*.yaml")} == set(catalog.NAMES)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_every_task_is_pinned_bounded_and_in_the_image(name: str) -> None:
    spec, platform = yaml.safe_load_all((PIPELINES / f"{name}.yaml").read_text())
    executors = {key: e["container"] for key, e in spec["deploymentSpec"]["executors"].items() if "container" in e}
    assert {container["image"] for container in executors.values()} == {IMAGE}
    assert not any("pip install" in " ".join(container["command"]) for container in executors.values())
    of_kubernetes = platform["platforms"]["kubernetes"]
    assert of_kubernetes["pipelineConfig"]["activeDeadlineSeconds"] == 14 * 86400
    bounded = {k for k, e in of_kubernetes["deploymentSpec"]["executors"].items() if e.get("activeDeadlineSeconds")}
    assert set(executors) - bounded <= {"exec-federate"}  # its deadline is the federation's own
    secrets = {k for k, e in of_kubernetes["deploymentSpec"]["executors"].items() if "secretAsEnv" in e}
    assert secrets == {"exec-fetch", "exec-federate", "exec-evaluate"} & set(executors)


def test_federations_are_not_cached_and_leave_resources_to_client_pods() -> None:
    for name in ("personalized_federation", "compare_methods"):
        spec = next(yaml.safe_load_all((PIPELINES / f"{name}.yaml").read_text()))
        (task,) = [
            task
            for dag in (spec["root"], *spec["components"].values())
            for key, task in dag.get("dag", {}).get("tasks", {}).items()
            if key == "federate"
        ]
        assert not task.get("cachingOptions", {}).get("enableCache")
        passed = {p["field"] for p in spec["components"]["comp-federate"]["taskConfigPassthroughs"]}
        assert passed == {"RESOURCES", "KUBERNETES_TOLERATIONS", "KUBERNETES_NODE_SELECTOR", "KUBERNETES_AFFINITY"}
        assert "resources" not in spec["deploymentSpec"]["executors"]["exec-federate"]["container"]


def test_parameters_of_a_task_reach_the_launcher() -> None:
    """A user-defined pipeline may set GPUs, tolerations and placement on the task, like on any other of Kubeflow's."""
    from google.protobuf.json_format import MessageToDict
    from own_pipeline import own

    container = own.pipeline_spec.deployment_spec["executors"]["exec-federate"]["container"]
    assert container["resources"]["accelerator"]["resourceCount"] == "2"
    platform = MessageToDict(own.platform_spec)["platforms"]["kubernetes"]
    config = platform["deploymentSpec"]["executors"]["exec-federate"]
    assert config["tolerations"][0]["key"] == "gpu"
    assert config["nodeSelector"]["labels"] == {"pool": "a100"}


@pytest.mark.parametrize(
    "image", ["fedloom/components:latest", "fedloom/components", "registry:5000/components", "a b:1", ":1"]
)
def test_an_image_with_a_mutable_tag_is_rejected(image: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDLOOM_IMAGE", image)
    with pytest.raises(ExperimentError, match="not :latest"):
        component_image()
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump({"image": image}))
    command = ["pipeline", "compile", "--pods", str(tmp_path / "pods.yaml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ExperimentError)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_pipelines_with_another_image(tmp_path: Path) -> None:
    image = "registry.example:5000/components@sha256:" + "0" * 64
    command = [sys.executable, "-m", "fedloom", "pipeline", "compile", "unseen-clients", "--out", str(tmp_path / "out")]
    (tmp_path / "pods.yaml").write_text(f"image: {image}")
    subprocess.run([*command, "--pods", str(tmp_path / "pods.yaml")], check=True, stdout=subprocess.DEVNULL)
    spec, _ = yaml.safe_load_all((tmp_path / "out" / "unseen_clients.yaml").read_text())
    assert {e["container"]["image"] for e in spec["deploymentSpec"]["executors"].values() if "container" in e} == {
        image
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unseen_clients.yaml"]


def test_a_missing_pipeline() -> None:
    result = CliRunner().invoke(app, ["pipeline", "compile", "nothing"])
    assert tells(str(result.exception), "'nothing'", "personalized_federation")
