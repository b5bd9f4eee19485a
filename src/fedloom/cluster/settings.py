"""Settings of a federation on Kubernetes: images, sizes, GPUs, credentials, timeouts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from fedloom.core.files import read_file
from fedloom.core.settings import Settings
from fedloom.core.words import parsed_json
from fedloom.errors import ExperimentError, without_secrets
from fedloom.experiment.validation_errors import abbreviated, explain, listing
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.storage.base import CREDENTIALS
from fedloom.storage.locations import claims_of

OWN = "fedloom.dev/"
"""Prefix of FedLoom's own labels and annotations."""

ALLOWED_IMAGE = "NAME:TAG or NAME@sha256:DIGEST, not :latest"
DEFAULT_REQUESTS: Mapping[str, str] = {"cpu": "500m", "memory": "1Gi"}
"""Default requests, where neither a request nor a limit is set."""


IMAGE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+(?=/))?(/[a-z0-9._-]+)*(:(?P<tag>\w[\w.-]*))?(@(?P<digest>[a-z0-9]+:[0-9a-f]+))?"
)


def check_image(image: str) -> str:
    """Return an image's name, if it is pinned by a tag or a digest.

    Raise ValueError if it has neither a tag nor a digest, or its tag is ``latest``: the image could change between two
    runs.
    """
    parts = IMAGE.fullmatch(image)
    if parts is None or (parts["digest"] is None and parts["tag"] in (None, "latest")):
        raise ValueError(f"give {ALLOWED_IMAGE} (got {abbreviated(image)})")
    return image


def _names_of_others(words: dict[str, str]) -> dict[str, str]:
    for word in words:
        if word.startswith((OWN, "app.kubernetes.io/")):
            raise ValueError(f"{abbreviated(word)} is set by FedLoom; use names outside {OWN} and app.kubernetes.io/")
    return words


def _without_password(text: str) -> str:
    if without_secrets(text) != text:
        raise ValueError("everyone who may read pods or runs sees it: give a URL with a password in a Secret")
    return text


QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")


def _are_quantities(quantities: dict[str, str | int]) -> dict[str, str | int]:
    for resource, quantity in quantities.items():
        if not QUANTITY.fullmatch(str(quantity)):
            raise ValueError(f"{resource}: give a quantity such as 2, 500m or 4Gi (got {abbreviated(quantity)})")
        if "/" in resource and not str(quantity).isdigit():
            raise ValueError(f"{resource}: devices are requested in whole numbers (got {abbreviated(quantity)})")
    return quantities


def is_gpu(resource: str) -> bool:
    """Return True for a GPU or a part of one, such as ``nvidia.com/mig-1g.10gb`` or ``amd.com/gpu``."""
    vendor, _, name = resource.rpartition("/")
    return vendor in ("nvidia.com", "amd.com") or (vendor != "" and "gpu" in name)


Quantities = Annotated[dict[str, str | int], AfterValidator(_are_quantities)]
Image = Annotated[str, AfterValidator(check_image)]
Public = Annotated[str, AfterValidator(_without_password)]
Words = Annotated[dict[str, str], AfterValidator(_names_of_others)]
KubernetesObject = dict[str, Any]
"""Kubernetes object passed on unchanged; the API server validates it."""


class Resources(Settings):
    """Resource requests and limits of a container, such as ``{"cpu": "2", "memory": "4Gi"}``."""

    requests: Quantities = Field(
        default={}, description="Requests; by default 500m CPU and 1Gi memory if there is no limit either."
    )
    limits: Quantities = Field(default={}, description="Limits.")


class AggregatorPod(Resources):
    """Resources, node placement and environment of the aggregator's container."""

    tolerations: tuple[KubernetesObject, ...] = Field(default=(), description="Tolerations.")
    node_selector: dict[str, str] = Field(default={}, description="Node selector.")
    env: dict[str, Public] = Field(
        default={}, description="Additional environment variables, such as `FEDLOOM_TRACK` and `MLFLOW_TRACKING_URI`."
    )
    env_secrets: tuple[str, ...] = Field(
        default=(), description="Secrets whose keys are variables of its environment, such as `WANDB_API_KEY`."
    )


class Gpu(Settings):
    """GPUs per worker, whole or shared (docs/cluster.md)."""

    resource: str = Field(
        default="nvidia.com/gpu",
        pattern=r"^[^/\s]+/[^/\s]+$",
        description="Name of the resource, such as nvidia.com/mig-1g.10gb, nvidia.com/gpu.shared or amd.com/gpu.",
    )
    count: int = Field(default=1, ge=1, description="GPUs per worker.")


class ClusterSettings(Settings):
    """Settings of a federation on Kubernetes, none of which changes its numeric results."""

    namespace: str | None = Field(
        default=None, min_length=1, description="Namespace; null: the launcher's own, else the kubeconfig's."
    )
    image: Image | None = Field(default=None, description="Image of aggregator and workers, with tag or digest.")
    worker_image: Image | None = Field(default=None, description="Image of the workers, if different (CUDA).")
    image_pull_secrets: tuple[str, ...] = Field(default=(), description="Names of Secrets for private registries.")
    workers: int = Field(default=2, ge=1, le=10_000, description="Worker pods; each may serve every client.")
    clients_per_worker: int | None = Field(
        default=None, ge=1, description="Clients per worker pod, each with its own block; determines `workers`."
    )
    worker: Resources = Field(default=Resources(), description="Resources of each worker.")
    aggregator: AggregatorPod = Field(
        default=AggregatorPod(), description="Resources, node placement and environment of the aggregator."
    )
    gpu: Gpu | None = Field(
        default=None,
        description='GPUs of each worker, as in `{"count": 1, "resource": "nvidia.com/gpu"}`; needs device: cuda.',
    )
    tolerations: tuple[KubernetesObject, ...] = Field(default=(), description="Tolerations of worker pods.")
    node_selector: dict[str, str] = Field(default={}, description="Node selector of worker pods.")
    affinity: KubernetesObject | None = Field(default=None, description="Affinity of worker pods.")
    topology_spread: tuple[KubernetesObject, ...] | None = Field(
        default=None,
        description="Topology spread constraints of worker pods, each for the federation's workers unless it has a "
        "`labelSelector`; null: prefer to spread over nodes, which does not prevent pods on one node; `[]`: none.",
    )
    runtime_class: str | None = Field(default=None, description="Runtime class of worker pods, such as `nvidia`.")
    env: dict[str, Public] = Field(
        default={}, description="Environment of aggregator and workers, such as proxies and SSL_CERT_FILE."
    )
    volumes: tuple[KubernetesObject, ...] = Field(
        default=(), description="Volumes of aggregator and workers, such as certificates."
    )
    volume_mounts: tuple[KubernetesObject, ...] = Field(
        default=(), description="Volume mounts of aggregator and workers."
    )
    service_account: str | None = Field(
        default=None, description="Service account of the pods; its token is not mounted."
    )
    priority_class: str | None = Field(default=None, description="Priority class of the pods.")
    storage_secret: str | None = Field(default=None, description="Secret with the credentials of `storage`.")
    worker_secret: str | None = Field(
        default=None,
        description="Secret with the workers' credentials of `storage`, which need only read `partitions/` and write "
        "`states/` (docs/storage.md); null is `storage_secret`.",
    )
    storage_secret_keys: dict[str, str] = Field(
        default={name: name for name in CREDENTIALS},
        min_length=1,
        description="Key of those Secrets for each environment variable.",
    )
    token_secret: str | None = Field(
        default=None,
        description=(
            "Secret whose key `token` holds a token (`fedloom token new`), which admits workers and watchers; null: "
            "no authentication."
        ),
    )
    s3_endpoint: Public | None = Field(
        default=None,
        description="Endpoint of the object store for pods; null: the launcher's own $FEDLOOM_S3_ENDPOINT, which takes "
        "precedence for the launcher itself.",
    )
    deadline_s: float = Field(default=86_400.0, ge=1, description="Maximum duration of the federation in seconds.")
    pending_timeout_s: float = Field(
        default=600.0, ge=1, description="Maximum seconds that a pod waits for a node, and a worker for its aggregator."
    )
    failing_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="Maximum seconds that a pod waits for a problem to be fixed by hand, such as an image or a Secret.",
    )
    orphan_after_s: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Seconds without a launcher after which the aggregator ends; null: 600 for a launcher in the cluster, "
            "and never for one outside, which may be unable to reach the aggregator."
        ),
    )
    ttl_s: int = Field(default=3600, ge=60, description="Seconds after which finished objects are removed.")
    retries: int = Field(default=2, ge=0, description="Maximum restarts of a failed aggregator, and of each worker.")
    max_failed_workers: int = Field(
        default=0, ge=0, description="Workers that may fail permanently without stopping the federation."
    )
    queue_name: str | None = Field(default=None, description="Kueue local queue.")
    labels: Words = Field(
        default={},
        description='Labels of all objects and pods; `sidecar.istio.io/inject: "true"` gives pods a sidecar of Istio, '
        "and by default they have none (docs/kubeflow.md).",
    )
    annotations: Words = Field(default={}, description="Annotations of all objects and pods.")
    delete_on_interrupt: bool = Field(
        default=False,
        description="Delete the federation if the launcher is interrupted; otherwise it keeps running.",
    )

    @classmethod
    def from_json(cls, text: str, *, source: str = "cluster settings") -> ClusterSettings:
        """Read settings from JSON, as pipelines pass them.

        Raise ExperimentError if it is not a JSON object, or a setting is invalid; lists every error with the values
        allowed.

        Parameters
        ----------
        text
            A JSON object; empty text gives the defaults.
        source
            Name of the text in messages.
        """
        return _read(cls, text or "{}", source)

    def with_claims(self, url: str) -> Self:
        """Return settings whose pods mount the PersistentVolumeClaim of a location (``pvc://CLAIM/PATH``)."""
        mounted = {mount.get("mountPath") for mount in self.volume_mounts}
        claims = [(claim, path) for claim, path in claims_of([url]).items() if path not in mounted]
        if not claims:
            return self
        volumes = [
            {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}} for i, (claim, _) in enumerate(claims)
        ]
        mounts = [{"name": f"claim-{i}", "mountPath": path} for i, (_, path) in enumerate(claims)]
        update = {"volumes": (*self.volumes, *volumes), "volume_mounts": (*self.volume_mounts, *mounts)}
        return self.model_copy(update=update)


class TaskConfig(Settings):
    """Settings of the launcher's Kubeflow task that apply to the workers (``kfp.dsl.TaskConfig``)."""

    resources: KubernetesObject | None = None
    tolerations: tuple[KubernetesObject, ...] | None = None
    node_selector: dict[str, str] | None = None
    affinity: KubernetesObject | None = None
    env: tuple[KubernetesObject, ...] | None = None
    volumes: tuple[KubernetesObject, ...] | None = None
    volume_mounts: tuple[KubernetesObject, ...] | None = None

    @classmethod
    def read(cls, value: Mapping[str, Any] | None) -> TaskConfig:
        """Validate Kubeflow's values; integers that it turned into floats become integers again.

        Raise ExperimentError if a field is unknown or has another type.
        """
        return _read(cls, json.dumps(_whole(dict(value or {}))), "task_config")


_S = TypeVar("_S", bound=Settings)


def settings_from_file(settings: type[_S], path: Path) -> _S:
    """Read settings from a YAML file; an empty file gives the defaults.

    Raise ExperimentError if the file cannot be read or is not YAML, or a setting is invalid.
    """
    try:
        value, _ = parse_yaml(read_file(path).decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path} is not a UTF-8 text file (byte {error.start})") from error
    except OSError as error:
        raise ExperimentError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    return _read(settings, json.dumps(value if value is not None else {}), str(path))


def _read(settings: type[_S], text: str, source: str) -> _S:
    try:
        value = parsed_json(text)
    except ValueError as error:
        raise ExperimentError(f"{source} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ExperimentError(f"{source} must hold an object (got {abbreviated(value)})", found=value)
    try:
        return settings.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        errors = explain(error, settings.model_json_schema(), value)
        raise ExperimentError(listing(source, errors, {})) from None


def _whole(value: Any) -> Any:
    """Return a value with integral floats as integers: Kubeflow passes floats, and Kubernetes rejects 3600.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list | tuple) else value
