"""Kubernetes objects of a federation: a Service, the aggregator's Job, the workers' Job.

Pure functions from settings to dictionaries. The aggregator's Job is the root and owns the Service and the workers'
Job, so that whatever deletes it (time to live, the workflow that owns it, a person) deletes them too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from fedloom.cluster.settings import DEFAULT_REQUESTS, OWN, AggregatorPod, ClusterSettings, Resources, TaskConfig
from fedloom.core.processes import TELL_PARENT
from fedloom.errors import ExitCode
from fedloom.security.options import TOKEN

Manifest: TypeAlias = dict[str, Any]

COMMON: Manifest = yaml.safe_load(Path(__file__).with_name("objects.yaml").read_text(encoding="utf-8"))
"""Parts of the objects that are the same for every federation."""
PORT = int(COMMON["service"]["ports"][0]["port"])
USER = int(COMMON["pod"]["securityContext"]["runAsUser"])
RUN_ID, TASK, DIGEST, ATTEMPT = (f"{OWN}{word}" for word in ("run-id", "task", "spec-digest", "attempt"))
NAME, INSTANCE, COMPONENT, MANAGED_BY = (
    f"app.kubernetes.io/{word}" for word in ("name", "instance", "component", "managed-by")
)
INJECT = "sidecar.istio.io/inject"
AGGREGATOR, WORKER = "aggregator", "worker"
FINAL = (int(ExitCode.EXPERIMENT), int(ExitCode.DATA), int(ExitCode.REFUSED))
"""Exit codes that another attempt would only repeat."""
UNRETRIED = (*FINAL, int(ExitCode.ABANDONED))
"""Exit codes after which Kubernetes does not restart a pod; the last one means that the peer is lost."""

CHECKPOINT_GRACE_S = 60
WORKER_GRACE_S = 15

SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
"""Default topology spread constraint of workers. It has no zone: a node without the label of one constraint is ignored
by all of them (Kubernetes, pkg/scheduler/framework/plugins/podtopologyspread/scoring.go), and many have no zone."""


def identity(run_id: str, task: str) -> str:
    """Return 12 hex digits that identify the federation of one task of one pipeline run, across retries."""
    return hashlib.sha256(f"{run_id}/{task}".encode()).hexdigest()[:12]


def run_path(name: str, run_id: str, task: str) -> str:
    """Return the path below the storage at which the run of an experiment of this name is published."""
    return f"runs/{name}-{identity(run_id, task)}"


def label(text: str) -> str:
    """Return text as a label value: unchanged if it is valid, else its hash."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@dataclass(frozen=True)
class FederationSpec:
    """Complete input for the objects of one federation.

    Attributes
    ----------
    run_id, task
        Run id and task of the pipeline; together they identify the federation.
    namespace
        Namespace of the objects.
    settings, task_config
        The user's cluster settings.
    experiment
        The resolved experiment file, stored at ``run_url/experiment.yaml``.
    run_url, partition_url
        URLs of the run and its partition in the store.
    clients
        Number of clients, seen and unseen.
    device, threads, clients_at_once, save_every_s
        The experiment's ``runtime``.
    storage_environment
        Variables about the store that pods get in plain text (endpoint, region).
    orphan_after_s
        Seconds without a launcher after which the aggregator ends; None is never.
    """

    run_id: str
    task: str
    namespace: str
    settings: ClusterSettings
    task_config: TaskConfig
    experiment: str
    run_url: str
    partition_url: str
    clients: int
    device: str
    threads: int
    clients_at_once: int
    save_every_s: float | None
    storage_environment: Mapping[str, str]
    orphan_after_s: float | None

    @property
    def name(self) -> str:
        """Name of the Service, and prefix of the Jobs' names."""
        return f"fl-{identity(self.run_id, self.task)}"

    @property
    def workers(self) -> int:
        """Number of worker pods."""
        per_worker = self.settings.clients_per_worker
        return self.settings.workers if per_worker is None else math.ceil(self.clients / per_worker)

    @property
    def selector(self) -> str:
        """Selector for every object and pod of the federation."""
        return f"{INSTANCE}={self.name}"

    def labels(self, component: str | None = None) -> dict[str, str]:
        """Return the labels of all its objects or, with ``component``, of one of its two components."""
        own = {NAME: "federation", INSTANCE: self.name, MANAGED_BY: "fedloom", RUN_ID: label(self.run_id)}
        own |= {TASK: label(self.task)} | ({} if component is None else {COMPONENT: component})
        return {**self.settings.labels, **own}

    def digest(self) -> str:
        """Return the SHA-256 of all objects and the experiment: equal specifications have equal digests."""
        parts = [aggregator_job(self), service(self), worker_job(self), self.experiment]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def service(federation: FederationSpec) -> Manifest:
    """Return the Service through which workers and the launcher reach the aggregator, whichever pod it runs in."""
    spec = {"selector": {INSTANCE: federation.name, COMPONENT: AGGREGATOR}, **deepcopy(COMMON["service"])}
    return _object(federation, "v1", "Service", federation.name, AGGREGATOR, spec)


def aggregator_job(federation: FederationSpec) -> Manifest:
    """Return the Job of one aggregator, which is restarted from its published state if it or its node fails."""
    f, s = federation, federation.settings
    command = ["aggregator", f"{f.run_url}/experiment.yaml", "--partition", f.partition_url, "--out", "/work/run"]
    command += ["--publish", f.run_url, "--resume", "--listen", f"0.0.0.0:{PORT}", "--wait", _seconds(s.deadline_s)]
    command += ["--insecure"]  # access is up to the cluster's network policies
    if f.orphan_after_s is not None:
        command += ["--orphan-after", _seconds(f.orphan_after_s)]
    container = _container_spec(s, f.storage_environment, AGGREGATOR, s.image, command, resources(s.aggregator))
    own = s.aggregator.env
    container["env"] = [entry for entry in container["env"] if entry["name"] not in own]
    container["env"] += [{"name": key, "value": value} for key, value in own.items()]
    if s.aggregator.env_secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in s.aggregator.env_secrets]
    container |= deepcopy(COMMON["aggregator"])
    pod = _pod_spec(s, container, CHECKPOINT_GRACE_S, s.aggregator, None)
    spec = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": s.retries,
        **_patience(s),
        "podFailurePolicy": _failure_policy("FailJob", AGGREGATOR),
        "template": _pod_template(s, f.labels(AGGREGATOR), pod),
    }
    return _job(f, AGGREGATOR, spec)


def worker_job(federation: FederationSpec) -> Manifest:
    """Return the Job of all workers, each with its own index and retries."""
    f, s, task = federation, federation.settings, federation.task_config
    command = ["worker", "--aggregator", f"{f.name}.{f.namespace}.svc:{PORT}"]
    command += ["--name", "worker-$(JOB_COMPLETION_INDEX)", "--partition", f.partition_url]
    command += ["--states", f"{f.run_url}/states", "--reconnect", _seconds(s.pending_timeout_s)]
    for key in ("device", "threads", "clients_at_once"):
        command += ["--set", f"runtime.{key}={getattr(f, key)}"]
    command += ["--set", f"runtime.save_every_s={'null' if f.save_every_s is None else f'{f.save_every_s:g}'}"]
    if s.token_secret is not None:
        command += ["--insecure"]
    if s.clients_per_worker is not None:
        command += ["--clients", f"$(JOB_COMPLETION_INDEX)/{f.workers}"]
    gpu = {} if s.gpu is None else {s.gpu.resource: s.gpu.count}
    image, needs = s.worker_image or s.image, resources(s.worker, gpu, task.resources)
    container = _container_spec(s, f.storage_environment, WORKER, image, command, needs)
    of_task = {entry["name"] for entry in task.env or ()}
    container["env"] = [entry for entry in container["env"] if entry["name"] not in of_task] + [*(task.env or ())]
    container["volumeMounts"] += [*(task.volume_mounts or ())]
    placement = AggregatorPod(
        tolerations=(*s.tolerations, *(task.tolerations or ())),
        node_selector={**s.node_selector, **(task.node_selector or {})},
    )
    pod = _pod_spec(s, container, WORKER_GRACE_S, placement, task.affinity or s.affinity)
    pod["volumes"] += [*(task.volumes or ())]
    if s.runtime_class is not None:
        pod["runtimeClassName"] = s.runtime_class
    ours = {"labelSelector": {"matchLabels": {INSTANCE: f.name, COMPONENT: WORKER}}}
    if spread := (SPREAD,) if s.topology_spread is None else s.topology_spread:
        pod["topologySpreadConstraints"] = [{**ours, **constraint} for constraint in spread]
    spec = {
        "completionMode": "Indexed",
        "completions": f.workers,
        "parallelism": f.workers,
        "backoffLimitPerIndex": s.retries,
        "maxFailedIndexes": min(s.max_failed_workers, f.workers),
        **_patience(s),
        "podFailurePolicy": _failure_policy("FailIndex", WORKER),
        "template": _pod_template(s, f.labels(WORKER), pod),
    }
    return _job(f, WORKER, spec)


def completed(
    manifest: Manifest, digest: str, owners: Sequence[Mapping[str, Any]], attempt: int | None = None
) -> Manifest:
    """Return a manifest with its metadata: digest, owners and attempt."""
    metadata = manifest["metadata"]
    annotations = {**metadata["annotations"], DIGEST: digest} | ({} if attempt is None else {ATTEMPT: str(attempt)})
    owned = {"ownerReferences": [*owners]} if owners else {}
    return {**manifest, "metadata": {**metadata, "annotations": annotations, **owned}}


def owner(job: Mapping[str, Any]) -> Manifest:
    """Return an owner reference to an existing Job."""
    return _reference({"apiVersion": "batch/v1", "kind": "Job", **job["metadata"]})


def owners_of_pod(pod: Mapping[str, Any]) -> list[Manifest]:
    """Return a reference to the controller of a pod, such as a pipeline's workflow; empty if there is none."""
    references = pod["metadata"].get("ownerReferences") or []
    controlling = [reference for reference in references if reference.get("controller")] or references
    return [_reference(reference) for reference in controlling[:1]]


def _reference(owning: Mapping[str, Any]) -> Manifest:
    reference = {key: owning[key] for key in ("apiVersion", "kind", "name", "uid")}
    # blockOwnerDeletion would require rights on the owner's finalizers.
    return {**reference, "controller": False, "blockOwnerDeletion": False}


def get_label(item: Mapping[str, Any], key: str) -> str:
    """Return a label of an object; empty if it has none of that name."""
    return str((item["metadata"].get("labels") or {}).get(key, ""))


def attempt_number(aggregator: Mapping[str, Any]) -> int:
    """Return the number of a federation's attempt, from 1, given the aggregator's Job."""
    return int((aggregator["metadata"].get("annotations") or {}).get(ATTEMPT, "1"))


def phase_of(pod: Mapping[str, Any]) -> str:
    """Return the phase of a pod, such as ``Running``."""
    return str((pod.get("status") or {}).get("phase", "Pending"))


def resources(
    own: Resources, gpu: Mapping[str, int] | None = None, task: Mapping[str, Any] | None = None
) -> dict[str, dict[str, str]]:
    """Return the resource requests and limits of a container.

    Parameters
    ----------
    own
        From the settings.
    gpu
        Resource and count of GPUs, if requested.
    task
        From the task of the pipeline, with ``requests`` and ``limits``; it takes precedence.
    """
    task = task or {}
    limits = {**own.limits, **(gpu or {}), **(task.get("limits") or {})}
    requests: dict[str, Any] = {k: v for k, v in DEFAULT_REQUESTS.items() if k not in limits}
    requests |= {**own.requests, **(task.get("requests") or {})}
    both = {"requests": requests, "limits": limits}
    return {name: {k: str(v) for k, v in values.items()} for name, values in both.items() if values}


def _object(federation: FederationSpec, version: str, kind: str, name: str, component: str, spec: Manifest) -> Manifest:
    metadata = {
        "name": name,
        "namespace": federation.namespace,
        "labels": federation.labels(component),
        "annotations": {**federation.settings.annotations},
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _job(federation: FederationSpec, component: str, spec: Manifest) -> Manifest:
    job = _object(federation, "batch/v1", "Job", f"{federation.name}-{component}", component, spec)
    if federation.settings.queue_name is not None:
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = federation.settings.queue_name
    return job


def _patience(settings: ClusterSettings) -> Manifest:
    return {
        "activeDeadlineSeconds": math.ceil(settings.deadline_s),
        "ttlSecondsAfterFinished": settings.ttl_s,
        "podReplacementPolicy": "Failed",  # never two pods with one index
    }


def _failure_policy(action: str, container: str) -> Manifest:
    """Return a Job's policy that takes an action at the codes of ``UNRETRIED``, and ignores disruptions."""
    exits = {"containerName": container, "operator": "In", "values": [*UNRETRIED]}
    disruption = [{"type": "DisruptionTarget", "status": "True"}]
    return {"rules": [{"action": action, "onExitCodes": exits}, {"action": "Ignore", "onPodConditions": disruption}]}


def _pod_template(settings: ClusterSettings, labels: Mapping[str, str], pod: Manifest) -> Manifest:
    """Return a Job's template of a pod, which gets a sidecar of Istio only if the settings request it.

    A sidecar that is not a native one keeps a Job from ending, and breaks calls before it is ready.
    """
    injected = {INJECT: settings.labels.get(INJECT, "false")}  # a label; an annotation for older releases of Istio
    metadata = {"labels": {**labels, **injected}, "annotations": {**settings.annotations, **injected}}
    return {"metadata": metadata, "spec": pod}


def _pod_spec(
    settings: ClusterSettings, container: Manifest, grace_s: int, placement: AggregatorPod, affinity: Manifest | None
) -> Manifest:
    """Return the ``spec`` of a pod with one container, without privileges or a service account token."""
    optional = {
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "nodeSelector": placement.node_selector,
        "tolerations": [*placement.tolerations],
        "affinity": affinity,
    }
    spec = deepcopy(COMMON["pod"])
    spec["volumes"] += settings.volumes
    added = {"terminationGracePeriodSeconds": grace_s, "containers": [container]}
    return {**spec, **added, **{key: value for key, value in optional.items() if value}}


def _container_spec(
    s: ClusterSettings,
    storage_environment: Mapping[str, str],
    name: str,
    image: str | None,
    arguments: list[str],
    needs: Mapping[str, Any],
) -> Manifest:
    """Return a container that runs ``fedloom`` with these arguments, and the credentials of a worker or of storage."""
    spec = deepcopy(COMMON["container"])
    plain = {"HOME": "/work", TELL_PARENT: spec["terminationMessagePath"], **storage_environment, **s.env}
    env: list[Manifest] = [{"name": key, "value": value} for key, value in plain.items()]
    secret = s.worker_secret or s.storage_secret if name == WORKER else s.storage_secret
    if secret is not None:
        env += [
            {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": in_secret}}}
            for key, in_secret in s.storage_secret_keys.items()
        ]
    if s.token_secret is not None:
        env.append({"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": s.token_secret, "key": "token"}}})
    spec["volumeMounts"] += s.volume_mounts
    return {"name": name, "image": image, "args": arguments, "env": env, "resources": {**needs}, **spec}


def _seconds(seconds: float) -> str:
    return f"{seconds:g}" if seconds < 1e5 else f"{seconds:.0f}"
