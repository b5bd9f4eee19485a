"""Content of the wheel; pipelines compile from it as from a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedloom.kubeflow import catalog

pytestmark = pytest.mark.xdist_group("components")

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


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


def test_a_wheel_holds_fedloom_components_and_pipelines_once(installed: Path) -> None:
    top = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"fedloom"}
    found = {path.relative_to(installed / "fedloom").as_posix() for path in (installed / "fedloom").rglob("*.*")}
    files = lambda folder: {  # noqa: E731
        f"kubeflow/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / folder).rglob("*.*")
        if "__pycache__" not in path.parts
    }
    assert files("components") | files("pipelines") <= found
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
