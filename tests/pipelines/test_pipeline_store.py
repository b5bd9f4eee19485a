"""Secrets of a profile as credentials of the store: keys of tasks and client pods in a submission."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.json_format import ParseDict
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig
from kfp_api import KubeflowApi, serving
from run_processes import EXPERIMENT
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.kubeflow import compiling
from fedloom.kubeflow.store_secret import StoreSecret

pytestmark = pytest.mark.xdist_group("components")

PROFILE = {"AWS_ACCESS_KEY_ID": "accesskey", "AWS_SECRET_ACCESS_KEY": "secretkey"}
"""Keys of ``mlpipeline-minio-artifact`` (kubeflow/pipelines, ``pipelines-profile-controller/sync.py``)."""
STORE = "http://seaweedfs.kubeflow:8333"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KubeflowApi]:
    monkeypatch.setenv("HOME", str(tmp_path))
    with serving(KubeflowApi(namespaces=("team-a",))) as one:
        yield one


@pytest.fixture
def submitted(api: KubeflowApi, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Submit with these settings of the installation and of the cluster, and return the run's parameters."""

    def submit(cluster: dict[str, Any], **settings: Any) -> dict[str, Any]:
        files = {"experiment": EXPERIMENT, "cluster": {"image": "fedloom/worker:0.1.0", **cluster}}
        files["kubeflow"] = {"host": api.host, "namespace": "team-a", **settings}
        for name, content in files.items():
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
        command = ["pipeline", "submit", "personalized_federation", str(tmp_path / "experiment.yaml")]
        command += ["--set", "storage=s3://mlpipeline/private/team-a/fedloom"]
        command += ["--cluster", str(tmp_path / "cluster.yaml"), "--kubeflow", str(tmp_path / "kubeflow.yaml")]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (result.output, result.exception)
        found: dict[str, Any] = [*api.runs.values()][-1]["runtime_config"]["parameters"]
        return found

    return submit


def test_a_profiles_secret_serves_tasks_and_client_pods(
    api: KubeflowApi, submitted: Callable[..., dict[str, Any]]
) -> None:
    secret = {"storage_secret": "mlpipeline-minio-artifact", "storage_secret_keys": PROFILE, "s3_endpoint": STORE}
    found = submitted({"workers": 3}, **secret)
    assert found["storage_secret"] == "mlpipeline-minio-artifact"
    pods = json.loads(found["cluster"])
    assert (pods["storage_secret_keys"], pods["s3_endpoint"], pods["workers"]) == (PROFILE, STORE, 3)
    own = {"storage_secret_keys": {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "s3_endpoint": "http://x:1"}
    assert json.loads(submitted(own, **secret)["cluster"]).items() >= own.items()  # own settings take precedence
    assert len(api.versions) == 1
    assert set(json.loads(submitted({})["cluster"])) == {"image"}
    assert len(api.versions) == 2  # other keys are other content


def executors_of(platform: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return found


@pytest.mark.parametrize("name", compiling.NAMES)
def test_the_tasks_with_access_read_these_keys(tmp_path: Path, name: str) -> None:
    before, after = tmp_path / "before.yaml", tmp_path / "after.yaml"
    for path in (before, after):
        compiling.compile_to(name, path)
    StoreSecret().apply(after)
    assert before.read_bytes() == after.read_bytes()
    StoreSecret(PROFILE, STORE).apply(after)
    (spec, platform), (spec_before, platform_before) = (yaml.safe_load_all(p.read_text()) for p in (after, before))
    changed = set()
    for task, config in executors_of(platform).items():
        ParseDict(config, KubernetesExecutorConfig())
        container = spec["deploymentSpec"]["executors"][task]["container"]
        for secret in config.get("secretAsEnv", ()):
            changed.add(task)
            variables = {one["envVar"]: one["secretKey"] for one in secret["keyToEnv"]}
            assert variables.items() >= PROFILE.items()
            assert variables["AWS_REGION"] == "AWS_REGION"
            # Kubernetes rejects a variable with both a value and a source.
            assert "FEDLOOM_S3_ENDPOINT" not in variables
            assert container.pop("env") == [{"name": "FEDLOOM_S3_ENDPOINT", "value": STORE}]
            secret["keyToEnv"] = next(
                was["keyToEnv"]
                for was in platform_before["platforms"]["kubernetes"]["deploymentSpec"]["executors"][task][
                    "secretAsEnv"
                ]
            )
    assert {"exec-fetch", "exec-evaluate" if name != "compare_methods" else "exec-federate"} <= changed
    assert (spec, platform) == (spec_before, platform_before)
