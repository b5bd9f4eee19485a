"""The Job that checks a GPU (docs/cluster.md): valid, restricted, and run on the fake cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import torch
import yaml
from fake_cluster import FakeCluster
from kubernetes import client, config
from run_processes import until

import fedloom
from fedloom.cluster.diagnosis import end_of

JOB = Path(__file__).parents[2] / "docs" / "examples" / "kubernetes" / "device-job.yaml"
IMAGE = f"fedloom/worker-cuda:{fedloom.__version__}"


def job() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(JOB.read_text())
    return made


def test_the_job_is_valid_and_requests_its_gpu_as_a_limit() -> None:
    kubernetes_schemas.check(job())
    (container,) = job()["spec"]["template"]["spec"]["containers"]
    assert container["image"] == IMAGE
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in container["resources"]["requests"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("device", "code"),
    [
        ("cpu", 0),
        pytest.param("cuda", 2, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")),
    ],
)
def test_the_job_ends_with_the_outcome_of_the_check(device: str, code: int, tmp_path: Path) -> None:
    """A node advertises a GPU that it does not have: the Job fails at once, with the reason in the pod's status."""
    manifest = job()
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    container["args"] = ["device", device, "--clients", "2"]
    with FakeCluster(tmp_path, images={IMAGE: []}, capacity={"nvidia.com/gpu": "1"}) as cluster:
        api = client.BatchV1Api(config.new_client_from_config(str(cluster.kubeconfig)))
        api.create_namespaced_job(cluster.namespace, manifest)
        until(lambda: end_of(cluster.objects("jobs")[0]), "the Job has ended", 240)
        end = end_of(cluster.objects("jobs")[0])
        assert end is not None
        assert end.complete is (code == 0)
        (pod,) = cluster.pods()
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == code
    if code:
        assert "runtime.device is cuda" in ended["message"]
