"""A small Kubernetes for tests: the API over HTTP, the Job controller, and containers that are local processes.

    with FakeCluster(tmp_path, images={"fedloom:test": ["fedloom"]}) as cluster:
        cluster.add_secret("storage", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
        kubernetes.config.load_kube_config(str(cluster.kubeconfig))

What it covers is what a launcher of FedLoom uses. Services, Pods (their logs, evictions and forwarded ports), Jobs,
Secrets, Events, PodDisruptionBudgets, Workflows that nothing runs, one namespace and its deletion; quotas of objects
and of pods' resources, default limits; create, read, list, watch, delete, with 401, 403, 404, 409, 410, 422 and 429 as
the API gives them; the second after the API server's start in which it knows no roles; manifests are checked strictly
against the schemas of Kubernetes. Jobs: completions, parallelism, Indexed, backoff limits (of the Job and per index),
``maxFailedIndexes``, pod failure policy, pod replacement policy, deadline, TTL. Garbage collection by owner:
background, foreground. Pods: one node with a capacity, unknown images, missing Secrets and volumes, environment from
Secrets and fields, emptyDir, PersistentVolumeClaims, grace, termination messages.

How a process is made to feel like a container: mount paths in its arguments and environment become temporary folders,
``0.0.0.0`` becomes the pod's own loopback address, ``NAME.NAMESPACE.svc`` the Service's, and each Service's address
forwards to its ready pods. So a program that follows its arguments runs unchanged.

Where behaviour is not in Kubernetes' documentation, the modules name the source file that shows it: ``disruptions``
(budgets), ``jobs`` (finalizers of pods), ``kubelet`` (containers, volumes), ``namespaces`` (deletion), ``quotas``
(default limits), ``server`` (admission, a start of the API server).

It speaks plain HTTP. It needs Linux, where all of 127.0.0.0/8 is the machine's own.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from fake_cluster.disruptions import Disruptions
from fake_cluster.jobs import JobController
from fake_cluster.kubelet import Kubelet, Scheduler
from fake_cluster.namespaces import NamespaceController, namespace_object
from fake_cluster.network import Forwarder, Network
from fake_cluster.quotas import Quota, Quotas
from fake_cluster.resources import RESOURCES, selects
from fake_cluster.server import Api, Failure, Identity, Server
from fake_cluster.store import ApiError, Object, Store

__all__ = ["FakeCluster"]


class FakeCluster:
    """A cluster that exists until the end of its ``with`` block and leaves nothing behind.

    Parameters
    ----------
    root
        Folder for kubeconfigs and the pods' files; by default a temporary one.
    images
        Image -> command in place of its entrypoint, as ``{"fedloom:1": ["fedloom"]}``; ``[]`` if it has none.
        Programs are first looked up beside this Python. Other images cannot be pulled. May be changed while the
        cluster runs.
    namespace
        Name of the only namespace.
    environment
        Environment of every image; of this process' environment a container only gets PATH.
    capacity
        Capacity of the node, in addition to or in place of plenty of cpu, memory and pods.
    backoff_s
        Wait before a failed pod is replaced and a failed pull is retried: 10 s in Kubernetes.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        images: Mapping[str, list[str]],
        namespace: str = "federations",
        environment: Mapping[str, str] | None = None,
        capacity: Mapping[str, str] | None = None,
        backoff_s: float = 0.3,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="cluster-") if root is None else None
        self.root = Path(self._temporary.name) if self._temporary else Path(root or "")
        self.namespace = namespace
        self.images = dict(images)
        self._network = Network()
        self._store = Store()
        plenty = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "1Ti"}
        self.node = Scheduler(self._store, {**plenty, **(capacity or {})}, self.root / "claims")
        """Its ``capacity`` may be changed while the cluster runs."""
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(environment or {})}
        self.kubelet = Kubelet(
            self._store, self._network, self.root / "pods", self.images, environment, self._resolve, backoff_s
        )
        self._quotas = Quotas(self._store)
        self._jobs = JobController(self._store, self._quotas, backoff_s)
        self._forwarders: dict[tuple[str, int], tuple[str, Forwarder]] = {}
        self._disruptions = Disruptions(self._store)
        self.api = Api(self._store, self.kubelet, self._network, self._quotas, self._disruptions)
        self._server = Server(self.api)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True),
            threading.Thread(target=self._control, daemon=True),
        ]
        self._namespaces = NamespaceController(self._store)
        self._store.create(RESOURCES["namespaces"], namespace_object(namespace))
        self.root.mkdir(parents=True, exist_ok=True)
        self.kubeconfig = self.kubeconfig_for(None, user="admin")
        """Of somebody who may do everything."""

    @property
    def url(self) -> str:
        """URL of the API server."""
        host, port = self._network.api.getsockname()
        return f"http://{host}:{port}"

    def __enter__(self) -> Self:
        """Start serving."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill running processes and close sockets."""
        self.kubelet.stop()
        with self._store.changed:
            self._store.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(30)
        for _, forwarder in self._forwarders.values():
            forwarder.close()
        if self._temporary:
            self._temporary.cleanup()

    def kubeconfig_for(self, rules: list[Object] | None, *, user: str = "launcher") -> Path:
        """Return a kubeconfig for a user with the rules of a Role (None: unrestricted)."""
        token = secrets.token_hex(8)
        name = user if rules is None else f"system:serviceaccount:{self.namespace}:{user}"
        self.api.identities[token] = Identity(name, rules)
        path = self.root / f"kubeconfig-{user}-{token[:4]}.yaml"
        tree = {
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": user, "namespace": self.namespace}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(tree))
        return path

    def add_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Create a Secret."""
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        manifest = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": data}
        self._store.create(RESOURCES["secrets"], {**manifest, "metadata": {"name": name, "namespace": self.namespace}})

    def add_claim(self, name: str) -> Path:
        """Create a PersistentVolumeClaim and return its folder, which all pods that mount it share."""
        folder = self.kubelet.claims / name
        folder.mkdir(parents=True)
        return folder

    def add_workflow(self, name: str, labels: Mapping[str, str], nodes: Mapping[str, Object]) -> None:
        """Create a Workflow of Argo, which is not executed."""
        manifest = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "status": {"nodes": dict(nodes)}}
        meta = {"name": name, "namespace": self.namespace, "labels": dict(labels)}
        self._store.create(RESOURCES["workflows"], {**manifest, "metadata": meta})

    def add_quota(self, name: str, **hard: str) -> None:
        """Limit objects and resources: ``add_quota("few", **{"count/jobs.batch": "2"})``."""
        self._quotas.all.append(Quota(name, hard))

    def add_limit_range(self, **limits: str) -> None:
        """Give containers of Jobs default limits: ``add_limit_range(memory="512Mi")``."""
        self._quotas.default_limits.update(limits)

    def objects(self, plural: str, selector: str = "") -> list[Object]:
        """Return every object of a kind, as ``"jobs"``."""
        return [item for item in self._store.list(RESOURCES[plural])[0] if selects(selector, None, item)]

    def pods(self, selector: str = "") -> list[Object]:
        """Return every pod as the API represents it, oldest first."""
        return self.objects("pods", selector)

    def log(self, pod: str, container: str | None = None) -> str:
        """Return the log of a container, also of a deleted pod (if ``container`` is given)."""
        ended = self.kubelet.ended_logs.get(f"{pod}/{container}")
        return ended if ended is not None else self.kubelet.run_of(pod).container(container).said()

    def pid(self, pod: str, container: str | None = None) -> int:
        """Return the process id of a running container."""
        process = self.kubelet.run_of(pod).container(container).process
        if process is None:
            raise ApiError(400, "BadRequest", f"{pod} does not run")
        return process.pid

    def kill(self, pod: str, number: int = signal.SIGKILL, *, reason: str | None = None) -> None:
        """Signal a pod's first process, as the kernel does (``reason="OOMKilled"``) or a bug."""
        self.kubelet.run_of(pod).container(None).killed_for = reason
        os.kill(self.pid(pod), number)

    def fail(self, verb: str, resource: str, code: int, reason: str, message: str, times: int = 1) -> None:
        """Answer the next requests of a kind with an error: ``fail("create", "jobs", 403, "Forbidden", "quota")``."""
        self.api.failures.append(Failure(verb, resource, ApiError(code, reason, message), times))

    def restart_api(self, seconds: float = 1.0, code: int = 403) -> None:
        """Restart the API server: it refuses every user of roles for a while, with 403 or 401, and ends every watch."""
        self.api.started, self.api.starts_with = time.monotonic() + seconds, code
        self.expire()

    def expire(self) -> None:
        """Expire the history: every open watch, and every one from an older version, is answered with 410."""
        self._store.compact()

    def _control(self) -> None:
        while not self.kubelet.stopping.is_set():
            with self._store.changed:
                self._store.collect_garbage()
                self._namespaces.tick()
                self._jobs.tick()
                self._disruptions.tick()
                self.node.tick()
                self.kubelet.tick()
                self._forward()
                self._store.changed.wait(0.1)

    def _forward(self) -> None:
        """Start a forwarder for each port of each Service."""
        wanted = {}
        for service in self._store.list(RESOURCES["services"])[0]:
            for port in service["spec"]["ports"]:
                wanted[service["metadata"]["uid"], port["port"]] = (service, port)
        for key in self._forwarders.keys() - wanted.keys():
            address, forwarder = self._forwarders.pop(key)
            forwarder.close()
            self._network.release(address)
        for key in wanted.keys() - self._forwarders.keys():
            service, port = wanted[key]
            address = service["spec"]["clusterIP"]
            backends = lambda service=service, port=port: self._backends(service, port)  # noqa: E731
            self._forwarders[key] = (address, Forwarder(address, port["port"], backends))

    def _backends(self, service: Object, port: Object) -> list[tuple[str, int]]:
        found = []
        for pod in self.pods(",".join(f"{key}={value}" for key, value in service["spec"]["selector"].items())):
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
            if (ready and "deletionTimestamp" not in pod["metadata"]) or (
                service["spec"].get("publishNotReadyAddresses") and pod["status"].get("podIP")
            ):
                found.append((pod["status"]["podIP"], port["targetPort"]))
        return found

    def _resolve(self, text: str) -> str:
        """Replace names of Services in a text by their addresses."""

        def address(found: re.Match[str]) -> str:
            try:
                return str(self._store.get(RESOURCES["services"], self.namespace, found[1])["spec"]["clusterIP"])
            except ApiError:
                return found[0]

        name = rf"(?<![\w.-])([a-z0-9-]+)\.{re.escape(self.namespace)}\.svc(?:\.cluster\.local)?(?![\w.-])"
        return re.sub(name, address, text)
