"""An installation of Kubeflow Pipelines, and `fedloom pipeline` against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp_api import KubeflowApi, serving
from run_processes import EXPERIMENT
from typer.testing import CliRunner, Result

CLUSTER = {"image": "fedloom/worker:0.1.0", "workers": 3, "labels": {"team": "vision"}}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KubeflowApi]:
    """Serve an installation for one user whose runs are polled without waiting."""
    from fedloom.kubeflow import runs

    monkeypatch.setattr(runs, "POLL_S", 0.02)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KF_PIPELINES_ENDPOINT", "FEDLOOM_KUBEFLOW_TOKEN", "SSL_CERT_FILE", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    with serving(KubeflowApi()) as one:
        yield one


@pytest.fixture
def pipeline(api: KubeflowApi, tmp_path: Path) -> Callable[..., Result]:
    """Run `fedloom pipeline` in this process, with settings of the installation."""
    from fedloom.cli.main import app

    def run(*arguments: str, **settings: Any) -> Result:
        (tmp_path / "kubeflow.yaml").write_text(yaml.safe_dump({"host": api.host, **settings}))
        return CliRunner().invoke(app, ["pipeline", "--kubeflow", str(tmp_path / "kubeflow.yaml"), *arguments])

    return run


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Write an experiment file, and one of cluster settings."""
    for name, content in (("experiment", EXPERIMENT), ("cluster", CLUSTER)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return str(tmp_path / "experiment.yaml"), str(tmp_path / "cluster.yaml")


@pytest.fixture
def submit(pipeline: Callable[..., Result], files: tuple[str, str]) -> Callable[..., Result]:
    """Run `fedloom pipeline submit` with an experiment that has a store, and settings of the installation."""

    def run(
        *arguments: str, name: str = "personalized_federation", store: str = "s3://bucket/fedloom", **more: Any
    ) -> Result:
        cluster = () if name == "unseen_clients" else ("--cluster", files[1])
        storage = ("--set", f"storage={store}") if store else ()
        return pipeline("submit", name, files[0], *cluster, *storage, *arguments, **more)

    return run
