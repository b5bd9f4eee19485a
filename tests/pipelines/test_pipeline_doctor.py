"""``fedloom doctor --kubeflow`` against an installation, and its failures."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from facts import mentions
from kfp_api import Fault, KubeflowApi
from ports import free_address
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.kubeflow import client


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDLOOM_IMAGE", raising=False)
    monkeypatch.setattr(client, "TIMEOUT_S", (2, 10))


def findings(folder: Path, code: int, **settings: Any) -> dict[str, dict[str, Any]]:
    """Return the findings about an installation by subject; those that are no error have no remedy unless they warn."""
    (folder / "kubeflow.yaml").write_text(yaml.safe_dump(settings))
    words = ["doctor", "--kubeflow", str(folder / "kubeflow.yaml")]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == code, done.output
    found = [each for each in json.loads(done.stdout) if each["subject"].startswith("kubeflow")]
    assert all(bool(each["remedy"]) == (each["state"] != "ok") for each in found)
    return {each["subject"]: each for each in found}


def test_a_healthy_installation(api: KubeflowApi, tmp_path: Path) -> None:
    api.tag = version("kfp")
    root = tmp_path / "artifacts"
    found = findings(tmp_path, 0, host=api.host, pipeline_root=str(root))
    assert {each["state"] for each in found.values()} == {"ok"}
    assert mentions(found["kubeflow"]["detail"], api.host, "single user")
    assert mentions(found["kubeflow, version"]["detail"], version("kfp"))
    assert str(root) in found["kubeflow, store"]["detail"]
    assert fedloom.__version__ in found["kubeflow, image"]["detail"]
    assert api.counts() == (0, 0, 0, 0)  # nothing is created


def test_versions_and_images_that_differ(api: KubeflowApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_IMAGE", "registry.example/fedloom/components:0.0.1")
    api.tag = "2.0.5"
    found = findings(tmp_path, 0, host=api.host)
    assert found["kubeflow, version"]["state"] == found["kubeflow, image"]["state"] == "warning"
    assert "kfp==2.0.5" in found["kubeflow, version"]["remedy"]
    api.tag = ""
    assert findings(tmp_path, 0, host=api.host)["kubeflow, version"]["state"] == "ok"


def test_namespaces_and_tokens(api: KubeflowApi, tmp_path: Path) -> None:
    api.namespaces, api.token = ("team-a",), "right"
    found = findings(tmp_path, 2, host=api.host, token="right")
    assert set(found) == {"kubeflow", "kubeflow, image"}
    assert "namespace" in found["kubeflow"]["detail"]
    mine = {"host": api.host, "namespace": "team-a"}
    assert findings(tmp_path, 0, **mine, token="right")["kubeflow, rights"]["state"] == "ok"
    refused = findings(tmp_path, 4, **mine, token="wrong")["kubeflow, rights"]  # status 401
    assert "token_command" in refused["remedy"]
    other = findings(tmp_path, 4, host=api.host, namespace="team-b", token="right")["kubeflow, rights"]
    assert mentions(other["detail"], "pipelines", "runs", "schedules", "team-b")
    api.faults.append(Fault(r"GET /recurringruns.*", status=403))
    partly = findings(tmp_path, 4, **mine, token="right")["kubeflow, rights"]
    assert "schedules" in partly["detail"]
    assert "experiments" not in partly["detail"]


def test_an_installation_that_cannot_be_reached(api: KubeflowApi, tmp_path: Path) -> None:
    nobody = f"http://{free_address()}"
    found = findings(tmp_path, 6, host=nobody)
    assert mentions(found["kubeflow"]["detail"], nobody)
    api.login_page = True
    assert findings(tmp_path, 4, host=api.host)["kubeflow"]["state"] == "error"


def test_a_store_that_cannot_be_written(api: KubeflowApi, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder\n")
    found = findings(tmp_path, 6, host=api.host, pipeline_root=str(tmp_path / "file" / "x"))
    assert found["kubeflow, store"]["state"] == "error"
