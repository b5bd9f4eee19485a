"""The compiled pipelines: committed, up to date, pinned, equal from a wheel, and their requirements on a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
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

pytestmark = pytest.mark.group("components")

ROOT = Path(__file__).parents[2]
PIPELINES = ROOT / "pipelines"
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
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
    from configured_pipelines import own
    from google.protobuf.json_format import MessageToDict

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


# ---- from a wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the project's build backend puts into a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def test_no_repository_file_is_packaged_twice() -> None:
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [line for line in listed.splitlines() if line.startswith("120000")] == []  # symlinks
    assert catalog.ROOT == ROOT


def test_a_wheel_holds_fedloom_templates_components_and_pipelines_once(installed: Path) -> None:
    top = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"fedloom"}
    found = {path.relative_to(installed / "fedloom").as_posix() for path in (installed / "fedloom").rglob("*.*")}
    files = lambda folder: {  # noqa: E731
        f"kubeflow/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / folder).rglob("*.*")
        if "__pycache__" not in path.parts
    }
    assert files("components") | files("pipelines") <= found
    source = ROOT / "src" / "fedloom"
    templates = {path.relative_to(source).as_posix() for path in (source / "templates").rglob("*.*")}
    assert {"templates/comparison/compare.sh", "templates/module-table/network.py"} <= templates
    assert {path for path in templates if "__pycache__" not in path} <= found
    assert {"kubeflow/components/federate/rbac.yaml", "kubeflow/pipelines/unseen_clients.py"} <= found
    assert {"cli/main.py", "kubeflow/catalog.py", "transport/wire/federation_pb2.py", "py.typed"} <= found


@pytest.mark.slow
@pytest.mark.exhaustive
def test_pipelines_compile_from_a_wheel_as_from_a_checkout(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedloom", "pipeline", "compile", "unseen_clients", "--out"]
    for name, path in (("wheel", str(installed)), ("checkout", str(ROOT / "src"))):
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([*command, str(tmp_path / name)], check=True, env=environment, cwd=tmp_path)
    wheel, checkout = ((tmp_path / place / "unseen_clients.yaml").read_bytes() for place in ("wheel", "checkout"))
    assert wheel == checkout
    assert set(catalog.NAMES) == {path.stem for path in (installed / "fedloom/kubeflow/pipelines").glob("*.yaml")}
