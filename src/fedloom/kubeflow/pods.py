"""Settings of the pods of a pipeline's tasks, applied to its compiled form (``fedloom pipeline submit --pods FILE``).

Fields of the compiled form: ``pipeline_spec.proto`` (``ResourceSpec``, ``CachingOptions``) and
``kubernetes_executor_config.proto`` (``KubernetesExecutorConfig``) of kubeflow/pipelines 2.17.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fedloom.cluster.settings import Gpu, KubernetesObject, Quantities, Words
from fedloom.core.settings import Settings
from fedloom.errors import ExperimentError, argument
from fedloom.experiment.validation_errors import abbreviated, closest
from fedloom.kubeflow.catalog import edited
from fedloom.storage.locations import claims_of

EXECUTOR = "exec-"
"""Prefix of a task's executor in the compiled form; our pipelines use each component once, so it names one task."""

RESOURCES = ("cpu", "memory")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
OF_KUBEFLOW = ("pipelines.kubeflow.org/", "pipeline/", "workflows.argoproj.io/")
"""Prefixes of labels that Kubeflow Pipelines and Argo set on pods."""


def _checked(labels: dict[str, str], *, values: bool = True) -> dict[str, str]:
    """Return labels, or with ``values=False`` annotations; raise ValueError unless a user may set them."""
    for key, value in labels.items():
        domain, slash, name = key.rpartition("/")
        if not NAME.fullmatch(name) or (slash and not DOMAIN.fullmatch(domain)):
            raise ValueError(f"{abbreviated(key)} must be NAME or DOMAIN/NAME, each of letters, digits, '-', '_', '.'")
        if key.startswith(OF_KUBEFLOW):
            raise ValueError(f"{abbreviated(key)} is set by Kubeflow; use names outside {', '.join(OF_KUBEFLOW)}")
        if values and value and not NAME.fullmatch(value):
            raise ValueError(
                f"{key}: the value must be at most 63 letters, digits, '-', '_' and '.', with a letter or digit at "
                f"both ends (got {abbreviated(value)})"
            )
    return labels


def _for_tasks(quantities: dict[str, str | int]) -> dict[str, str | int]:
    for resource in quantities:
        if resource not in RESOURCES:
            raise ValueError(f"Kubeflow sets cpu and memory here, and GPUs by `gpu` (got {abbreviated(resource)})")
    return quantities


def _of_nodes(affinity: KubernetesObject) -> KubernetesObject:
    if set(affinity) != {"nodeAffinity"}:
        raise ValueError(f"Kubeflow sets nodeAffinity alone on a task (got {', '.join(map(str, affinity)) or 'none'})")
    return affinity


Sizes = Annotated[Quantities, AfterValidator(_for_tasks)]


class TaskPod(Settings):
    """Settings of a task's pod."""

    requests: Sizes = Field(
        default={}, description="CPU and memory requests; by default the pipeline's, unless there is a limit."
    )
    limits: Sizes = Field(default={}, description="CPU and memory limits.")
    gpu: Gpu | None = Field(default=None, description="Accelerators of the pod: resource and count.")
    image_pull_secrets: tuple[str, ...] = Field(
        default=(), description="Names of Secrets for private registries; added to those of `all`."
    )
    tolerations: tuple[KubernetesObject, ...] = Field(default=(), description="Tolerations; added to those of `all`.")
    node_selector: dict[str, str] = Field(default={}, description="Node selector.")
    affinity: Annotated[KubernetesObject, AfterValidator(_of_nodes)] | None = Field(
        default=None, description="Affinity to nodes, `{nodeAffinity: {...}}`."
    )
    labels: Annotated[Words, AfterValidator(_checked)] = Field(default={}, description="Labels of the pod.")
    annotations: Annotated[Words, AfterValidator(lambda labels: _checked(labels, values=False))] = Field(
        default={}, description="Annotations of the pod."
    )

    def updated(self, other: TaskPod) -> TaskPod:
        """Return these settings, changed by others: mappings are merged, lists joined, other values replaced."""
        update: dict[str, Any] = {}
        for key in type(self).model_fields:
            mine, theirs = getattr(self, key), getattr(other, key)
            if isinstance(mine, Mapping) and key != "affinity":
                update[key] = {**mine, **theirs}
            elif isinstance(mine, tuple):
                update[key] = (*mine, *(one for one in theirs if one not in mine))
            else:
                update[key] = mine if theirs is None else theirs
        return TaskPod.model_construct(**update)


class PodSettings(Settings):
    """Settings of a pipeline's tasks and their pods; client pods have their own (``--cluster FILE``)."""

    image: str | None = Field(
        default=None,
        description="Image of the components, with tag or digest; by default `$FEDLOOM_IMAGE`, else this version's.",
    )
    cache: bool = Field(
        default=True, description="False runs every task, even if Kubeflow has its result from an earlier run."
    )
    all: TaskPod = Field(default=TaskPod(), description="Settings of every task.")
    tasks: dict[str, TaskPod] = Field(
        default={}, description="Settings of single tasks by name, such as `federate`, which take precedence."
    )
    claims: tuple[str, ...] = Field(
        default=(),
        description="PersistentVolumeClaims that the tasks with access to storage mount at /mnt/claims/NAME, beside "
        "those of `storage` and `source`.",
    )

    def apply(self, path: Path, locations: Iterable[str | None] = ()) -> None:
        """Change a compiled pipeline in place; without settings the file is not touched.

        Raise ExperimentError if a task does not exist, or Kubeflow cannot represent a setting.

        Parameters
        ----------
        locations
            Places that the tasks read and write; they mount the claims among them.
        """
        claims = claims_of([*locations, *(f"pvc://{name}" for name in self.claims)])
        if self == PodSettings(image=self.image) and not claims:
            return
        with edited(path) as (spec, platform):
            if not self.cache:
                for task in _tasks(spec):
                    task["cachingOptions"] = {}
            executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
            for name, pod in self._pods(spec):
                _set_resources(spec["deploymentSpec"]["executors"][EXECUTOR + name]["container"], pod)
                _set_platform(executors.setdefault(EXECUTOR + name, {}), pod)
                # On the task's own pod; otherwise Kubeflow hands it to the component.
                if pod.requests or pod.limits or pod.gpu or pod.tolerations or pod.node_selector or pod.affinity:
                    spec["components"][f"comp-{name}"].pop("taskConfigPassthroughs", None)
            for config in executors.values():
                if "secretAsEnv" in config and claims:
                    config["pvcMount"] = [
                        {"constant": claim, "pvcNameParameter": _constant(claim), "mountPath": mount}
                        for claim, mount in claims.items()
                    ]
            _check(executors)

    def _pods(self, spec: Mapping[str, Any]) -> Iterator[tuple[str, TaskPod]]:
        executors = spec["deploymentSpec"]["executors"]
        names = [key.removeprefix(EXECUTOR) for key, executor in executors.items() if "container" in executor]
        for name in self.tasks:
            if name not in names:
                meant = closest(name, names)
                raise ExperimentError(
                    f"{argument('pods')}: {spec['pipelineInfo']['name']} has no task {abbreviated(name)}"
                    f"{f'; did you mean {meant}?' if meant else ';'} its tasks are {', '.join(names)}",
                    key=f"pods.tasks.{name}",
                    found=name,
                    allowed=names,
                )
        for name in names:
            yield name, self.all.updated(self.tasks.get(name, TaskPod()))


def _tasks(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every task of a pipeline, in all its groups."""
    for group in (spec["root"], *spec["components"].values()):
        yield from group.get("dag", {}).get("tasks", {}).values()


def _set_resources(container: dict[str, Any], pod: TaskPod) -> None:
    """Set requests, limits and accelerators; a limit without a request replaces the pipeline's own request."""
    resources = dict(container.get("resources", {}))
    for resource in RESOURCES:
        limit, request = pod.limits.get(resource), pod.requests.get(resource)
        for kind, quantity in (("Request", request), ("Limit", limit)):
            new, old = f"resource{resource.title()}{kind}", f"{resource}{kind}"
            if quantity is not None:
                resources[new] = str(quantity)
                resources.pop(old, None)  # the deprecated form, as a number
            elif kind == "Request" and limit is not None:
                resources.pop(new, None)
                resources.pop(old, None)
    if pod.gpu is not None:
        resources["accelerator"] = {"resourceType": pod.gpu.resource, "resourceCount": str(pod.gpu.count)}
    if resources:
        container["resources"] = resources


def _set_platform(config: dict[str, Any], pod: TaskPod) -> None:
    """Set what only Kubernetes has, in the executor's part of the platform's document."""
    if pod.image_pull_secrets:
        config["imagePullSecret"] = [
            {"secretName": name, "secretNameParameter": _constant(name)} for name in pod.image_pull_secrets
        ]
    if pod.tolerations:
        config["tolerations"] = [dict(one) for one in pod.tolerations]
    if pod.node_selector:
        config["nodeSelector"] = {"labels": dict(pod.node_selector)}
    if pod.affinity is not None:
        config["nodeAffinity"] = [{"nodeAffinityJson": _constant(pod.affinity["nodeAffinity"])}]
    metadata = {"labels": dict(pod.labels), "annotations": dict(pod.annotations)}
    if any(metadata.values()):
        config["podMetadata"] = {key: words for key, words in metadata.items() if words}


def _constant(value: Any) -> dict[str, Any]:
    return {"runtimeValue": {"constant": value}}


def _check(executors: Mapping[str, Any]) -> None:
    """Check the platform's part of every executor against Kubeflow's definition.

    Raise ExperimentError if a Kubernetes object of the user, such as a toleration, has an unknown key or a value of the
    wrong type.
    """
    from google.protobuf.json_format import ParseDict, ParseError
    from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig

    for name, config in executors.items():
        try:
            ParseDict(config, KubernetesExecutorConfig())
        except ParseError as error:
            raise ExperimentError(
                f"{argument('pods')}: Kubeflow cannot represent a setting of {name.removeprefix(EXECUTOR)}: {error}",
                key="pods",
            ) from error
