"""The chart, installed by Helm on a real cluster, or as Helm renders it on the fake cluster of processes.

On processes, the relevant objects are created as rendered, and pods are made one by one from the templates of
StatefulSets and Deployments: a pod that ends or is deleted is recreated, one with a changed template is terminated
first. A headless Service has an address here. Nothing of FedLoom is replaced. Features of real clusters are left
out: certificates of cert-manager, network policies, probes, autoscaling, volumes.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import helm
import yaml
from e2e_places import MARK, Place, until
from kubernetes.client import PolicyV1Api
from kubernetes.client.exceptions import ApiException

TICK_S = 0.1


class Installed(Protocol):
    """Release of the chart; ``name`` is that of its objects, ``instance`` their label."""

    name: str
    instance: str

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """Install the release, or upgrade it to these values."""

    def rollback(self) -> None:
        """Roll back to the previous values."""

    def test(self, *words: str) -> None:
        """Run the chart's own test and check its output where it is readable: Helm removes a pod that passed."""

    def uninstall(self) -> None:
        """Remove the release."""


class OnProcesses:
    """Output of Helm, applied to the cluster of processes."""

    def __init__(self, place: Place, folder: Path, name: str) -> None:
        self.name, self._place, self._folder = name, place, folder
        self.instance = "fed"
        self._policy = PolicyV1Api(place.api)
        self._history: list[Mapping[str, Any]] = []
        self._wanted: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._control, daemon=True)
        self._thread.start()

    def upgrade(self, values: Mapping[str, Any]) -> None:
        rendered = self._rendered(values)
        self._history.append(values)
        wanted: dict[str, Any] = {}
        core, namespace = self._place.core, self._place.namespace
        for item in rendered:
            name = item["metadata"]["name"]
            if item["kind"] == "ConfigMap":
                with suppress(ApiException):
                    core.delete_namespaced_config_map(name, namespace)
                core.create_namespaced_config_map(namespace, item)
            elif item["kind"] == "PodDisruptionBudget":
                with suppress(ApiException):
                    self._policy.delete_namespaced_pod_disruption_budget(name, namespace)
                self._policy.create_namespaced_pod_disruption_budget(namespace, item)
            elif item["kind"] == "Service" and item["spec"].get("ports"):
                for port in item["spec"]["ports"]:
                    port["targetPort"] = port["port"]  # as the containers' ports are by default
                with suppress(ApiException):
                    core.create_namespaced_service(namespace, item)
            elif item["kind"] in ("StatefulSet", "Deployment"):
                for i in range(item["spec"].get("replicas", 1)):
                    wanted[f"{name}-{i}"] = self._pod(f"{name}-{i}", item["spec"]["template"], i)
        with self._lock:
            self._wanted = wanted

    def rollback(self) -> None:
        self.upgrade(self._history[-2])

    def test(self, *words: str) -> None:
        (item,) = [
            item for item in self._rendered(self._history[-1], "--show-only", "templates/tests/status.yaml")
            if item["kind"] == "Pod"
        ]  # fmt: skip
        pod = self._pod(item["metadata"]["name"], item, 0)
        self._place.core.create_namespaced_pod(self._place.namespace, pod)
        self._place.ended(pod["metadata"]["name"])
        containers = [container["name"] for container in pod["spec"]["containers"]]
        core, name = self._place.core, pod["metadata"]["name"]
        output = "".join(
            core.read_namespaced_pod_log(name, self._place.namespace, container=container) for container in containers
        )
        assert self._place.pod(name)["status"]["phase"] == "Succeeded", output
        assert all(word in output for word in words), output
        core.delete_namespaced_pod(name, self._place.namespace)  # its hook-delete-policy
        until(lambda: name not in self._pods(), f"{name} is gone", self._place.patience_s)

    def uninstall(self) -> None:
        with self._lock:
            self._wanted = {}
        core, namespace = self._place.core, self._place.namespace
        until(lambda: not self._pods(), f"pods of {self.name} are gone", self._place.patience_s)
        self._over.set()
        self._thread.join()
        ours = {item["metadata"]["name"] for values in self._history[-1:] for item in self._rendered(values)}
        for name in ours:
            with suppress(ApiException):
                core.delete_namespaced_config_map(name, namespace)
            with suppress(ApiException):
                core.delete_namespaced_service(name, namespace)
            with suppress(ApiException):
                self._policy.delete_namespaced_pod_disruption_budget(name, namespace)
        assert not self._pods()

    def _rendered(self, values: Mapping[str, Any], *arguments: str) -> list[dict[str, Any]]:
        path = self._folder / "values.yaml"
        path.write_text(yaml.safe_dump({**values, "fullnameOverride": self.name}))
        done = helm.run("template", "fed", helm.CHART, "-n", self._place.namespace, "-f", path, *arguments)
        assert done.returncode == 0, done.stderr
        return copy.deepcopy(helm.objects(done.stdout))

    def _pod(self, name: str, template: dict[str, Any], index: int) -> dict[str, Any]:
        template = copy.deepcopy(template)
        marks = {MARK: f"{self._place.token}-chart", "apps.kubernetes.io/pod-index": str(index)}
        labels = {**template["metadata"]["labels"], **marks}
        metadata = {"name": name, "labels": labels, "annotations": template["metadata"].get("annotations", {})}
        spec = {**template["spec"], "restartPolicy": "Never"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _pods(self) -> dict[str, Any]:
        return {pod["metadata"]["name"]: pod for pod in self._place.selected(f"{MARK}={self._place.token}-chart")}

    def _control(self) -> None:
        made: dict[str, Any] = {}
        while not self._over.wait(TICK_S):
            with self._lock:
                wanted = dict(self._wanted)
            there = self._pods()
            for name, pod in there.items():
                tested = name.endswith("-test")
                ended = pod["status"]["phase"] in ("Succeeded", "Failed") and not tested
                if (not tested and made.get(name) != wanted.get(name)) or ended or (tested and not wanted):
                    with suppress(ApiException):
                        self._place.core.delete_namespaced_pod(name, self._place.namespace)
            for name in wanted.keys() - there.keys():
                with suppress(ApiException):
                    self._place.core.create_namespaced_pod(self._place.namespace, wanted[name])
                    made[name] = wanted[name]


class ByHelm:
    """Release on the real cluster named by the environment."""

    def __init__(self, place: Place, folder: Path, name: str) -> None:
        self.name, self._place, self._path = name, place, folder / "values.yaml"
        self.instance = self.name
        self._where = ["--kubeconfig", os.environ["FEDLOOM_E2E_KUBECONFIG"], "-n", place.namespace]

    def _helm(self, *arguments: object) -> str:
        done = helm.run(*arguments, *self._where, timeout_s=self._place.patience_s)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def upgrade(self, values: Mapping[str, Any]) -> None:
        self._path.write_text(yaml.safe_dump({**values, "fullnameOverride": self.name}))
        self._helm("upgrade", "--install", self.name, helm.CHART, "-f", self._path)

    def rollback(self) -> None:
        self._helm("rollback", self.name)

    def test(self, *words: str) -> None:
        self._helm("test", self.name)

    def uninstall(self) -> None:
        self._helm("uninstall", self.name, "--wait")  # returns while pods are still terminating
        pods = partial(self._place.selected, f"app.kubernetes.io/instance={self.name}")
        until(lambda: not pods(), f"pods of {self.name} are gone", self._place.patience_s)


@contextmanager
def release(place: Place, folder: Path, name: str) -> Iterator[Installed]:
    """Return a name for a release of the chart and its run; remove what is installed under it at the end."""
    real = bool(os.environ.get("FEDLOOM_E2E_KUBECONFIG"))
    made: Installed = (ByHelm if real else OnProcesses)(place, folder, f"chart-{place.token}-{name}")
    try:
        yield made
    finally:
        made.uninstall()
