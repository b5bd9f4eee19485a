"""Objects of KServe that serve a run's models: a ServingRuntime for ``fedloom serve``, and an InferenceService.

Sources, of github.com/kserve/kserve, release 0.19.0: ``config/crd/full`` (fields), ``pkg/apis/serving/v1beta1``
(names), ``pkg/controller/v1beta1/inferenceservice`` (ports of the Service, placeholders, URIs, and conditions on a
runtime), ``pkg/constants`` (``/mnt/models``, deployment modes), and ``config/runtimes`` (stock runtimes).
"""

from __future__ import annotations

import re
from typing import Any

from fedloom.cluster.manifests import (
    COMPONENT,
    INSTANCE,
    MANAGED_BY,
    NAME,
    STARTUP_S,
    WORKER_GRACE_S,
    Manifest,
    check_short_name,
    container_spec,
    pod_spec,
    resources,
)
from fedloom.cluster.settings import ClusterSettings
from fedloom.core.words import shortened
from fedloom.errors import ExperimentError, argument

CONTAINER = "kserve-container"
"""Name of the container that KServe merges with the model, and mounts the storage into."""

MOUNTED = "/mnt/models"
"""Folder where KServe puts the content of a storage URI."""

REST_PORT, GRPC_PORT = 8080, 7734
SCHEMES = ("s3", "gs", "pvc", "https", "http", "hdfs", "webhdfs", "hf", "oci", "file")
"""Schemes of the storage URIs that KServe takes."""

STANDARD = {"serving.kserve.io/deploymentMode": "Standard"}
"""Annotation for a Deployment and a Service; Knative allows a pod one port."""

FORMATS = {"fedloom": "1", "onnx": "1"}
"""Model formats, and their versions: a run's folder for our runtime, and exported models for Triton."""

TRITON = "kserve-tritonserver"
"""Stock runtime for exported models: it serves each folder ``ID/1/model.onnx`` as the model ID."""

_OF_RUNTIME = ("containers", "volumes", "nodeSelector", "tolerations", "affinity", "imagePullSecrets")


def kserve_objects(uri: str, name: str, settings: ClusterSettings, model_format: str = "fedloom") -> list[Manifest]:
    """Return the objects that serve models.

    Parameters
    ----------
    uri
        Storage URI of the models: a run's folder with its ``models``, or a repository of Triton.
    name
        Name of the objects; for ``fedloom`` also the name of the model in requests.
    settings
        Image, and settings of the pods as of an aggregator.
    model_format
        A key of :data:`FORMATS`.

    Raises
    ------
    ExperimentError
        If the name, the URI or the format is not one of KServe's, or the settings have no image.
    """
    if model_format not in FORMATS:
        allowed = [*FORMATS]
        raise ExperimentError(
            f"{argument('format')} must be {' or '.join(allowed)} (got {model_format}).",
            key="format",
            found=model_format,
            allowed=allowed,
        )
    check_short_name(name)
    if not re.fullmatch(rf"({'|'.join(SCHEMES)})://\S+", uri):
        raise ExperimentError(
            f"The storage URI must be one that KServe reads, such as s3://BUCKET/PREFIX or pvc://CLAIM/PATH "
            f"(got {shortened(uri)}).",
            hint="minio://BUCKET/PREFIX of Kubeflow's artifact store is s3://BUCKET/PREFIX" if "minio" in uri else None,
            key="uri",
            found=uri,
            allowed=[*SCHEMES],
        )
    if model_format == "onnx":
        return [_service(uri, name, settings, "onnx", TRITON, {})]
    if settings.image is None:
        raise ExperimentError(f"Give the image of the server as image in {argument('cluster')}.", key="image")
    pod = _pod(settings)
    runtime = {
        "supportedModelFormats": [{"name": "fedloom", "version": FORMATS["fedloom"], "autoSelect": False}],
        "protocolVersions": ["v2"],
        "labels": _labels(name, settings),
        "annotations": {**settings.annotations},
        **{key: pod.pop(key) for key in _OF_RUNTIME if key in pod},
    }
    del pod["restartPolicy"]  # a Deployment only allows Always
    serving: Manifest = {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "ServingRuntime"}
    serving |= {"metadata": _metadata(name, settings), "spec": runtime}
    return [serving, _service(uri, name, settings, "fedloom", name, pod)]


def _pod(settings: ClusterSettings) -> Manifest:
    arguments = ["serve", MOUNTED, "--listen", f"0.0.0.0:{GRPC_PORT}", "--rest", f"0.0.0.0:{REST_PORT}", "--insecure"]
    arguments += ["--set", "model_name={{.Name}}"]  # KServe fills in the name of the InferenceService
    if settings.token_secret is not None:
        arguments += ["--audit", "/work/audit.jsonl"]  # the run's folder is read-only
    own = settings.model_copy(update={"storage_secret": None, "worker_secret": None})  # KServe fetches the models
    container = container_spec(own, {}, CONTAINER, own.image, arguments, resources(own.aggregator))
    ready = {"httpGet": {"path": "/v2/health/ready", "port": REST_PORT}}
    live = {"httpGet": {"path": "/v2/health/live", "port": REST_PORT}}
    container |= {
        "ports": [  # the first one is the Service's port 80
            {"name": "http", "containerPort": REST_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"},
        ],
        "startupProbe": {**live, "periodSeconds": 2, "failureThreshold": STARTUP_S // 2},
        "readinessProbe": {**ready, "periodSeconds": 5},
        "livenessProbe": {**live, "periodSeconds": 20, "timeoutSeconds": 10},
    }
    return pod_spec(own, container, WORKER_GRACE_S, own.aggregator, own.affinity)


def _service(
    uri: str, name: str, settings: ClusterSettings, model_format: str, runtime: str, pod: Manifest
) -> Manifest:
    account = {} if settings.service_account is None else {"serviceAccountName": settings.service_account}
    model = {"modelFormat": {"name": model_format, "version": FORMATS[model_format]}, "protocolVersion": "v2"}
    model |= {"runtime": runtime, "storageUri": uri}
    metadata = _metadata(name, settings)
    metadata["annotations"] = {**STANDARD, **metadata["annotations"]}
    kind = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService"}
    return {**kind, "metadata": metadata, "spec": {"predictor": {**pod, **account, "model": model}}}


def _labels(name: str, settings: ClusterSettings) -> dict[str, str]:
    own = {NAME: "serving", INSTANCE: name, COMPONENT: "server", MANAGED_BY: "fedloom"}
    return {**settings.labels, **own}


def _metadata(name: str, settings: ClusterSettings) -> dict[str, Any]:
    place = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {
        "name": name,
        **place,
        "labels": _labels(name, settings),
        "annotations": {**settings.annotations},
    }
