"""Settings of a federation on Kubernetes: allowed values and errors."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from facts import refusing

from fedloom.cluster.settings import ClusterSettings, TaskConfig, check_image, is_gpu
from fedloom.errors import ExperimentError


def test_empty_settings_are_the_defaults() -> None:
    settings = ClusterSettings.from_json("")
    assert settings == ClusterSettings() == ClusterSettings.from_json("{}")
    assert (settings.workers, settings.retries, settings.max_failed_workers) == (2, 2, 0)


def test_settings_survive_json() -> None:
    settings = ClusterSettings.from_json(
        '{"image": "reg.example:5000/fedloom:0.1.0", "clients_per_worker": 10, "gpu": {"count": 2},'
        ' "worker": {"limits": {"cpu": 2, "memory": "4Gi"}}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}'
    )
    assert ClusterSettings.from_json(settings.model_dump_json()) == settings
    assert settings.worker.limits == {"cpu": 2, "memory": "4Gi"}
    assert settings.gpu is not None
    assert settings.gpu.resource == "nvidia.com/gpu"


def test_mutable_images_are_rejected() -> None:
    for image in ("fedloom:0.1.0", "localhost:5000/a/fedloom:1", f"ghcr.io/a/b@sha256:{64 * '0'}", "a:latest@sha256:0"):
        assert check_image(image) == image
    for image in ("", "fedloom", "fedloom:latest", "localhost:5000/fedloom", "a b:1", ":1@"):
        with pytest.raises(ValueError, match="latest"):
            check_image(image)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("{", ["JSON"]),
        ("[1]", ["[1]"]),
        ('{"worker": 3}', ["worker: ", "3", "mapping"]),
        ('{"workes": 3}', ["workes: ", "workers?"]),
        ('{"workers": 0}', ["workers: ", "0", "1"]),
        ('{"workers": "2"}', ["workers: ", '"2"', "integer"]),
        ('{"image": "fedloom:latest"}', ["image: ", "NAME:TAG", "NAME@sha256:DIGEST"]),
        ('{"gpu": {"resource": "gpu"}}', ["gpu.resource: ", '"gpu"']),
        ('{"worker": {"limits": {"cpu": "two"}}}', ["cpu: ", "500m", '"two"']),
        ('{"worker": {"limits": {"nvidia.com/gpu": "500m"}}}', ["nvidia.com/gpu: ", '"500m"']),
        ('{"deadline_s": 0}', ["deadline_s: ", "0", "1"]),
        ('{"labels": {"fedloom.dev/run-id": "x"}}', ["labels: ", "fedloom.dev/run-id"]),
    ],
)  # fmt: skip
def test_errors_name_the_key_and_the_allowed_values(text: str, output: list[str]) -> None:
    with refusing(ExperimentError, *output):
        ClusterSettings.from_json(text)


def test_all_errors_are_reported_together() -> None:
    with refusing(ExperimentError, "workers: ", "image: ", "retries: "):
        ClusterSettings.from_json('{"workers": 0, "image": "x", "retries": -1}')


def test_integers_that_kubeflow_passes_as_floats_are_restored() -> None:
    # Kubeflow passes numbers as floats; an API server rejects 3600.0 seconds.
    reported = json.loads('{"tolerations": [{"key": "a", "tolerationSeconds": 3600.0}], "resources": {}, "env": null}')
    read = TaskConfig.read(reported)
    assert json.dumps(read.tolerations) == '[{"key": "a", "tolerationSeconds": 3600}]'
    assert TaskConfig.read(None) == TaskConfig()
    with pytest.raises(ExperimentError, match="task_config"):
        TaskConfig.read({"tolerations": "all"})


def test_the_page_of_keys_matches_the_code() -> None:
    docs = Path(__file__).parents[2] / "docs"
    made = runpy.run_path(str(docs / "generate_keys.py"))["cluster_page"]()
    assert (docs / "cluster-keys.md").read_text(encoding="utf-8") == made, "run: make docs"


def test_fractional_gpus_are_recognized() -> None:
    gpus = {"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "amd.com/gpu", "aliyun.com/gpu-mem"}
    assert {resource for resource in (*gpus, "rdma/hca", "memory", "gpu") if is_gpu(resource)} == gpus
