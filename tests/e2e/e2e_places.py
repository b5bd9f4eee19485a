"""Clusters for end-to-end tests: a real one named by the environment, or one of processes (``fake_cluster``).

Both are used through the API with the real client; they differ only in how a pod is crashed.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fake_cluster import FakeCluster
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from s3_support import S3Server

from fedloom.cluster.manifests import identity
from fedloom.storage import Absent, Store, open_store

ROOT = Path(__file__).parents[2]
SCRIPT = (Path(__file__).parent / "launch_script.py").read_text()
RBAC = ROOT / "components" / "federate" / "rbac.yaml"
MARK = "fedloom.dev/e2e"
GONE_S = 120.0
UNREPORTED = {"FEDLOOM_REPORT": "0"}
"""Environment of aggregators in most tests: a report takes longer than their rounds."""
SECRET = {"apiVersion": "v1", "kind": "Secret"}


def until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Wait until a condition holds that takes a request: the longer it has not held, the rarer the requests."""
    start = time.monotonic()
    while not condition():
        elapsed_s = time.monotonic() - start
        assert elapsed_s < timeout_s, f"never happened: {what}"
        time.sleep(min(max(elapsed_s / 40, 0.02), 0.5))


@dataclass
class Place:
    """A namespace of a cluster, and a store that its pods and these tests can access.

    Attributes
    ----------
    image
        Image with all of FedLoom: its pods launch, aggregate and work.
    secret, s3_endpoint
        Access of pods to the store.
    crash
        Kills a pod without warning.
    kubeconfig
        Access to the cluster.
    store_environment
        Access to the store from this process.
    launcher
        Environment of launcher pods; ``service_account`` theirs.
    patience_s
        Maximum time for a pod to start or end; on a real cluster images are pulled and nodes are added.
    """

    api: client.ApiClient
    namespace: str
    image: str
    storage: str
    store: Store
    secret: str
    s3_endpoint: str
    crash: Callable[[str], object]
    kubeconfig: str
    store_environment: Mapping[str, str]
    service_account: str
    patience_s: float
    launcher: dict[str, str] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(3))

    def __post_init__(self) -> None:
        self.core, self.batch = client.CoreV1Api(self.api), client.BatchV1Api(self.api)

    def start(self, name: str, command: list[str], environment: Mapping[str, str]) -> str:
        """Start a pod of our own, and return its name."""
        plain = {"HOME": "/work", "AWS_REGION": "us-east-1", "FEDLOOM_S3_ENDPOINT": self.s3_endpoint, **environment}
        env: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in plain.items()]
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            env.append({"name": key, "valueFrom": {"secretKeyRef": {"name": self.secret, "key": key}}})
        container = {
            "name": "main", "image": self.image, "command": command, "env": env, "workingDir": "/work",
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [{"name": "work", "mountPath": "/work"}, {"name": "tmp", "mountPath": "/tmp"}],
        }  # fmt: skip
        user = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
        spec = {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "serviceAccountName": self.service_account,
            "containers": [container], "volumes": [{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
            "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        }  # fmt: skip
        named = f"e2e-{self.token}-{name}"
        metadata = {"name": named, "labels": {MARK: self.token}}
        self.core.create_namespaced_pod(
            self.namespace, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        )
        return named

    def evict(self, pod: str) -> None:
        """Ask a pod to leave its node, as a drain does: again until its disruption budget, if any, allows it."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.namespace}}

        def asked() -> bool:
            try:
                self.core.create_namespaced_pod_eviction(pod, self.namespace, body)
            except ApiException as error:
                if error.status != 429:
                    raise
                return False
            return True

        until(asked, f"{pod} may be evicted", self.patience_s)

    def ended(self, pod: str) -> tuple[int, str]:
        """Wait for one of our pods to end; return its exit code and output."""
        until(
            lambda: self._phase(pod) in ("Succeeded", "Failed"),
            f"{pod} ends; it says: {self._try_log(pod)}",
            self.patience_s,
        )
        status = self.pod(pod)["status"]["containerStatuses"][0]
        return status["state"]["terminated"]["exitCode"], self.log(pod)

    def pod(self, name: str) -> dict[str, Any]:
        """Return a pod as JSON: tests wait for pods, and making the client's models takes longer than the request."""
        answer = self.core.read_namespaced_pod(name, self.namespace, _preload_content=False)
        return dict(json.loads(answer.data))

    def selected(self, selector: str) -> list[dict[str, Any]]:
        """Return the pods with these labels, oldest first."""
        answer = self.core.list_namespaced_pod(self.namespace, label_selector=selector, _preload_content=False)
        made = lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"])  # noqa: E731
        return sorted(json.loads(answer.data)["items"], key=made)

    def log(self, pod: str) -> str:
        """Return the log of a pod."""
        return str(self.core.read_namespaced_pod_log(pod, self.namespace))

    def secret_with(self, name: str, **values: str | bytes) -> str:
        """Create or replace a Secret and return its name."""
        metadata = {"name": f"{self.token}-{name}", "labels": {MARK: self.token}}
        encoded = {key: value.encode() if isinstance(value, str) else value for key, value in values.items()}
        data = {key: b64encode(value).decode() for key, value in encoded.items()}
        body = {**SECRET, "metadata": metadata, "data": data}
        with suppress(ApiException):
            self.core.delete_namespaced_secret(metadata["name"], self.namespace)
        self.core.create_namespaced_secret(self.namespace, body)
        return str(metadata["name"])

    def pods(self, run_id: str, component: str) -> list[dict[str, Any]]:
        """Return the pods of a component of a federation."""
        return self.selected(f"{self.selector(run_id)},app.kubernetes.io/component={component}")

    def left(self, run_id: str) -> list[str]:
        """Return every object of a federation that the cluster still has."""
        chosen: dict[str, str] = {"label_selector": self.selector(run_id)}
        return [
            f"{type(item).__name__} {item.metadata.name}"
            for listed in (
                self.core.list_namespaced_service,
                self.batch.list_namespaced_job,
                self.core.list_namespaced_pod,
            )
            for item in listed(self.namespace, **chosen).items
        ]

    def assert_all_gone(self, run_id: str) -> None:
        """Check that no object of a federation is left."""
        until(lambda: not self.left(run_id), f"{run_id} is gone; left: {self.left(run_id)}", GONE_S)

    def launch(
        self, run_id: str, experiment: str, fingerprint: str, attempt: int = 1, token: str = "", **settings: Any
    ) -> str:
        """Start a pod that launches a federation, with a token in its environment, and return its name."""
        cluster = {"image": self.image, "storage_secret": self.secret, "s3_endpoint": self.s3_endpoint}
        cluster |= {"orphan_after_s": 120, "namespace": self.namespace, "aggregator": {"env": UNREPORTED}, **settings}
        reported = {
            "RUN_ID": self.run_id(run_id), "EXPERIMENT": experiment, "STORAGE": self.storage,
            "FINGERPRINT": fingerprint, "CLUSTER": json.dumps(cluster),
        }  # fmt: skip
        reported |= {"FEDLOOM_TOKEN": token} if token else {}
        return self.start(f"{run_id}-{attempt}", ["python", "-u", "-c", SCRIPT], {**self.launcher, **reported})

    def run_id(self, name: str) -> str:
        """Return a run id that no other test session uses."""
        return f"{self.token}-{name}"

    def selector(self, run_id: str) -> str:
        """Return the selector of every object of a federation."""
        return f"app.kubernetes.io/instance=fl-{identity(self.run_id(run_id), 'federate')}"

    def published_round(self, run_id: str, name: str = "e2e") -> int:
        """Return the last round that a federation has published; -1 before the first."""
        run = self.store.under(f"runs/{name}-{identity(self.run_id(run_id), 'federate')}")
        records = [entry.name for entry in run.entries("published/")]
        return int(json.loads(run.read(records[-1]))["round"]) if records else -1

    def fetch(self, prefix: str, folder: Path) -> Path:
        """Download a folder of the store; a run may still remove files that it no longer needs."""
        part = self.store.under(prefix)
        for entry in part.entries():
            try:
                part.download(entry.name, folder / entry.name)
            except Absent:
                if entry in part.entries():
                    raise
                return self.fetch(prefix, folder)
        return folder

    def clear(self) -> None:
        """Remove all our pods and all our objects in the store."""
        for pod in self.selected(f"{MARK}={self.token}"):
            self.core.delete_namespaced_pod(pod["metadata"]["name"], self.namespace, grace_period_seconds=0)
        for secret in self.core.list_namespaced_secret(self.namespace, label_selector=f"{MARK}={self.token}").items:
            self.core.delete_namespaced_secret(secret.metadata.name, self.namespace)
        self.store.remove([entry.name for entry in self.store.entries()])

    def _phase(self, pod: str) -> str:
        return str(self.pod(pod)["status"].get("phase"))

    def _try_log(self, pod: str) -> str:
        try:
            return self.log(pod)
        except ApiException:
            return "nothing"


@dataclass(frozen=True)
class Case:
    """An experiment on a place.

    Attributes
    ----------
    experiment
        Text of its file.
    fingerprint
        Fingerprint of its partition, which is in the store.
    reference
        Folder of its run in one pod of the same image, without a federation.
    """

    experiment: str
    fingerprint: str
    reference: Path

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(yaml.safe_load(self.experiment)["federation"]["rounds"])


@contextmanager
def processes(root: Path, s3: S3Server) -> Iterator[Place]:
    """Start the fake cluster; its launcher has exactly the rights of the Role that we ship."""
    rules = next(item for item in yaml.safe_load_all(RBAC.read_text()) if item["kind"] == "Role")["rules"]
    storage = f"s3://{s3.new_bucket()}/e2e"
    with FakeCluster(root, images={"fedloom:e2e": []}) as cluster:
        keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
        cluster.add_secret("storage", keys)

        def crash(pod: str) -> None:
            cluster.kill(pod, signal.SIGKILL)

        place = Place(
            api=config.new_client_from_config(str(cluster.kubeconfig)),
            namespace=cluster.namespace,
            image="fedloom:e2e",
            storage=storage,
            store=open_store(storage, s3.environment),
            secret="storage",
            s3_endpoint=s3.endpoint,
            crash=crash,
            kubeconfig=str(cluster.kubeconfig),
            store_environment=s3.environment,
            service_account="launcher",
            patience_s=240.0,
            launcher={"KUBECONFIG": str(cluster.kubeconfig_for(rules))},
        )
        yield place


@contextmanager
def real() -> Iterator[Place]:
    """Return the cluster named by the environment (docs/e2e.md)."""
    env = {name.removeprefix("FEDLOOM_E2E_"): value for name, value in os.environ.items() if "FEDLOOM_E2E_" in name}
    api = config.new_client_from_config(env["KUBECONFIG"])
    namespace = env["NAMESPACE"]
    token = secrets.token_hex(3)
    storage = f"{env.get('STORAGE', 's3://fedloom/e2e').rstrip('/')}/{token}"
    outside = {**os.environ, "FEDLOOM_S3_ENDPOINT": env["S3_ENDPOINT"]}

    def crash(pod: str) -> None:
        client.CoreV1Api(api).delete_namespaced_pod(pod, namespace, grace_period_seconds=0)

    place = Place(
        api=api,
        namespace=namespace,
        image=env["IMAGE"],
        storage=storage,
        store=open_store(storage, outside),
        secret=env.get("SECRET", "fedloom-storage"),
        s3_endpoint=env.get("POD_S3_ENDPOINT", env["S3_ENDPOINT"]),
        crash=crash,
        kubeconfig=env["KUBECONFIG"],
        store_environment={"FEDLOOM_S3_ENDPOINT": env["S3_ENDPOINT"]},
        service_account=env.get("SERVICE_ACCOUNT", "fedloom-launcher"),
        patience_s=900.0,
        token=token,
    )
    try:
        yield place
    finally:
        place.clear()
