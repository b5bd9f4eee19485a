"""The fake cluster behaves as Kubernetes does, tested with the real client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster
from run_processes import alive, until
from urllib3 import PoolManager
from urllib3.exceptions import HTTPError

kubernetes = pytest.importorskip("kubernetes")
from kubernetes import client, config, watch  # noqa: E402
from kubernetes.client.exceptions import ApiException  # noqa: E402

pytestmark = pytest.mark.cluster

NS = "federations"
SLEEP = "exec sleep 600"
BUDGET = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
LOOP = "while :; do sleep 0.05; done"


class Cluster:
    """A fake cluster and the real client's view of it."""

    def __init__(self, fake: FakeCluster, kubeconfig: Path | None = None) -> None:
        self.fake = fake
        api = config.new_client_from_config(str(kubeconfig or fake.kubeconfig))
        self.core, self.batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self.access = client.AuthorizationV1Api(api)

    def job(self, name: str, script: str, *, spec: dict[str, Any] | None = None, **container: Any) -> None:
        """Create a Job whose container runs a shell script."""
        self.batch.create_namespaced_job(NS, manifest(name, script, spec=spec, **container))

    def status(self, name: str) -> Any:
        """Return the status of a Job."""
        return self.batch.read_namespaced_job(name, NS).status

    def ended(self, name: str) -> Any:
        """Wait for a Job's last condition."""
        until(lambda: conditions(self.status(name)) & {"Complete", "Failed"}, f"{name} ends", 60)
        return self.status(name)

    def pods(self, job: str) -> list[Any]:
        """Return the pods of a Job, oldest first."""
        found = self.core.list_namespaced_pod(NS, label_selector=f"batch.kubernetes.io/job-name={job}").items
        return sorted(found, key=lambda pod: int(pod.metadata.resource_version))

    def running(self, job: str, count: int = 1) -> list[str]:
        """Wait until some pods of a Job run and are ready; return their names."""

        def ready() -> list[str]:
            return [
                pod.metadata.name
                for pod in self.pods(job)
                if pod.status.container_statuses and pod.status.container_statuses[0].ready
            ]

        until(lambda: len(ready()) == count, f"{count} pods of {job} run", 60)
        return ready()

    def waiting(self, job: str) -> tuple[str, str]:
        """Return reason and message of the waiting state of a Job's first container."""
        for pod in self.pods(job):
            for status in pod.status.container_statuses or []:
                if status.state.waiting:
                    return status.state.waiting.reason, status.state.waiting.message or ""
        return "", ""


def manifest(name: str, script: str, *, spec: dict[str, Any] | None = None, **container: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "image:1", "command": ["sh", "-c", script], **container}
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [main], "terminationGracePeriodSeconds": 5}
    for key in ("volumes", "nodeSelector"):
        if key in main:
            pod[key] = main.pop(key)
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    return {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name}, "spec": {"template": template, **(spec or {})},
    }  # fmt: skip


def conditions(status: Any) -> set[str]:
    return {found.type for found in status.conditions or [] if found.status == "True"}


def last(status: Any) -> tuple[str, str, str]:
    found = status.conditions[-1]
    return found.type, found.reason, found.message


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with FakeCluster(tmp_path, images={"image:1": [], "echo:1": ["echo", "entrypoint"]}, backoff_s=0.1) as fake:
        yield Cluster(fake)


def refused(code: int, call: Callable[[], object]) -> str:
    """Return the message of an API error with this code."""
    with pytest.raises(ApiException) as error:
        call()
    assert error.value.status == code
    return str(error.value.body)


def test_containers_follow_their_manifest(cluster: Cluster) -> None:
    cluster.fake.add_secret("login", {"KEY": "hush"})
    cluster.job(
        "job", 'echo "$KEY $WHO $0 $1 $(cat)"; echo kept > "$0/file"; ls "$HOME"; echo "$TMPDIR"',
        args=["/work", "s3://bucket/work/x:$(WHO):$$(WHO):$(NONE)"],
        env=[
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "login", "key": "KEY"}}},
            {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "HOME", "value": "/work"},
        ],
        volumes=[{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        volumeMounts=[{"name": "work", "mountPath": "/work"}, {"name": "tmp", "mountPath": "/tmp"}],
    )  # fmt: skip
    assert last(cluster.ended("job"))[0] == "Complete"
    (pod,) = cluster.pods("job")
    first, second, third = cluster.core.read_namespaced_pod_log(pod.metadata.name, NS).splitlines()
    key, who, work, argument = first.split()
    assert (key, who, argument) == ("hush", "job", "s3://bucket/work/x:job:$(WHO):$(NONE)")
    assert Path(work).is_dir()
    assert work.startswith(str(cluster.fake.root))
    assert (second, third) == ("file", str(Path(work).with_name("tmp")))
    cluster.job("entry", "", command=None, image="echo:1", args=["and more"])
    cluster.ended("entry")
    assert cluster.core.read_namespaced_pod_log(cluster.pods("entry")[0].metadata.name, NS) == "entrypoint and more\n"


def test_a_service_routes_to_ready_pods(cluster: Cluster) -> None:
    ports = [{"port": 80, "targetPort": 8080}]
    service = {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": ports}}
    made = cluster.core.create_namespaced_service(NS, {"apiVersion": "v1", "kind": "Service", **service})
    url = f"http://{made.spec.cluster_ip}/here"
    with PoolManager(retries=False) as http:
        with pytest.raises(HTTPError):
            http.request("GET", url, timeout=5)
        cluster.job(
            "web", f"echo hello > here; exec {sys.executable} -m http.server --bind 0.0.0.0 8080",
        )  # fmt: skip
        cluster.running("web")

        def answered() -> bool:
            try:
                return http.request("GET", url, timeout=5).data == b"hello\n"
            except HTTPError:
                return False

        until(answered, "the web server answers", 60)
    asking = f"import urllib.request as u; print(u.urlopen('http://web.{NS}.svc/here', timeout=9).read())"
    cluster.job("ask", f'exec {sys.executable} -c "{asking}"')
    assert last(cluster.ended("ask"))[0] == "Complete"
    assert cluster.core.read_namespaced_pod_log(cluster.pods("ask")[0].metadata.name, NS) == "b'hello\\n'\n"


FAIL_INDEX = {"action": "FailIndex", "onExitCodes": {"containerName": "main", "operator": "In", "values": [3]}}
INDEXED = {"completionMode": "Indexed", "completions": 3, "parallelism": 3, "backoffLimitPerIndex": 1}


def test_an_index_is_retried_independently(cluster: Cluster) -> None:
    cluster.job(
        "job", 'test "$JOB_COMPLETION_INDEX" = 0 || exit $(( JOB_COMPLETION_INDEX + 1 ))',
        spec={**INDEXED, "podFailurePolicy": {"rules": [FAIL_INDEX]}},
    )  # fmt: skip
    status = cluster.ended("job")
    assert last(status) == ("Failed", "FailedIndexes", "Job has failed indexes")
    assert (status.completed_indexes, status.failed_indexes) == ("0", "1,2")
    tries = [pod.metadata.annotations["batch.kubernetes.io/job-completion-index"] for pod in cluster.pods("job")]
    assert sorted(tries) == ["0", "1", "1", "2"]  # index 1 again, index 2 not, because of its exit code
    assert (status.succeeded, status.failed, status.active) == (1, 3, None)


def test_a_disruption_budget_refuses_evictions_until_the_replacement_is_ready(cluster: Cluster) -> None:
    slow = f"trap 'sleep 3; exit 1' TERM; {LOOP}"
    cluster.job("served", slow, spec={"completions": 2, "parallelism": 2, "podReplacementPolicy": "Failed"})
    first, second = cluster.running("served", 2)
    selector = {"matchLabels": {"batch.kubernetes.io/job-name": "served"}}
    policy = client.PolicyV1Api(cluster.core.api_client)

    def allow(**rule: Any) -> None:
        spec = {**rule, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}
        policy.create_namespaced_pod_disruption_budget(NS, {"metadata": {"name": "one"}, "spec": spec, **BUDGET})

    def reason() -> str:
        (budget,) = cluster.fake.objects("poddisruptionbudgets")
        return str((budget.get("status") or {}).get("conditions", [{}])[0].get("reason", ""))

    def evict(pod: str) -> int:
        try:
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NS}}
            cluster.core.create_namespaced_pod_eviction(pod, NS, body)
        except ApiException as error:
            return int(error.status)
        return 201

    for uncounted in ({"maxUnavailable": 1}, {"minAvailable": "50%"}):  # a Job does not say how many pods are expected
        allow(**uncounted)
        until(lambda: reason() == "SyncFailed", "its controller cannot count", 60)
        assert evict(first) == 429
        policy.delete_namespaced_pod_disruption_budget("one", NS)
    allow(minAvailable=1)
    until(lambda: reason() == "SufficientPods", "its controller has counted", 60)
    assert evict(first) == 201
    assert evict(second) == 429
    until(lambda: evict(second) == 201, "the first is replaced", 60)
    policy.delete_namespaced_pod_disruption_budget("one", NS)
    for pod in cluster.running("served", 2):
        assert evict(pod) == 201


def test_an_exit_code_ends_a_job_and_an_eviction_does_not(cluster: Cluster) -> None:
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [4]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    policy = {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    cluster.job("code", "echo no way >&2; exit 4", spec=policy, terminationMessagePolicy="FallbackToLogsOnError")
    kind, reason, message = last(cluster.ended("code"))
    (pod,) = cluster.pods("code")
    assert (kind, reason) == ("Failed", "PodFailurePolicy")
    assert message == (
        f"Container main for pod {NS}/{pod.metadata.name} failed with exit code 4 matching FailJob rule at index 0"
    )
    assert pod.status.container_statuses[0].state.terminated.message == "no way\n"
    cluster.job("moved", SLEEP, spec=policy)
    (first,) = cluster.running("moved")
    cluster.core.create_namespaced_pod_eviction(
        first, NS, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": first}}
    )
    until(lambda: [p for p in cluster.pods("moved") if p.metadata.name != first], "another pod", 60)
    assert not conditions(cluster.status("moved"))
    (second,) = cluster.running("moved")
    cluster.fake.kill(second, reason="OOMKilled")
    assert last(cluster.ended("moved"))[1] == "BackoffLimitExceeded"
    (pod,) = cluster.pods("moved")
    ended = pod.status.container_statuses[0].state.terminated
    assert (ended.exit_code, ended.reason) == (137, "OOMKilled")


def test_time_limits(cluster: Cluster) -> None:
    cluster.job("late", SLEEP, spec={"activeDeadlineSeconds": 1})
    cluster.job("short", "true", spec={"ttlSecondsAfterFinished": 1})
    assert last(cluster.ended("late")) == (
        "Failed", "DeadlineExceeded", "Job was active longer than specified deadline",
    )  # fmt: skip
    until(lambda: not cluster.pods("short"), "the pods go", 60)
    assert "not found" in refused(404, lambda: cluster.status("short"))


def test_deletion(cluster: Cluster) -> None:
    for name in ("background", "foreground"):
        cluster.job(name, f"trap 'echo told; exit 0' TERM; echo up; {LOOP}")
    names = {name: cluster.running(name)[0] for name in ("background", "foreground")}
    until(lambda: all(cluster.fake.log(pod, "main") for pod in names.values()), "all have their trap", 60)
    pids = {name: cluster.fake.pid(pod) for name, pod in names.items()}
    for name in names:
        cluster.batch.delete_namespaced_job(name, NS, propagation_policy=name.title())
    until(lambda: not cluster.fake.pods(), "both are gone", 60)
    assert not any(alive(pid) for pid in pids.values())
    assert cluster.fake.log(names["background"], "main") == "up\ntold\n"


def test_a_namespace_stays_until_its_indexed_job_is_deleted(cluster: Cluster) -> None:
    """Its failed pods wait for replacements, which can no longer be created."""
    indexed = {"completions": 1, "completionMode": "Indexed", "backoffLimitPerIndex": 3}
    cluster.job("indexed", SLEEP, spec={**indexed, "podReplacementPolicy": "Failed"})
    cluster.job("plain", SLEEP)
    cluster.fake.add_secret("login", {"KEY": "hush"})
    (pod,), _ = cluster.running("indexed"), cluster.running("plain")
    assert cluster.core.read_namespace(NS).status.phase == "Active"
    cluster.core.delete_namespace(NS)
    until(
        lambda: [left["metadata"]["name"] for left in cluster.fake.pods()] == [pod], "the other Job's pod is gone", 60
    )
    until(lambda: cluster.fake.pods()[0]["status"]["phase"] == "Failed", "the pod ends", 60)
    assert "because it is being terminated" in refused(403, lambda: cluster.job("another", "true"))
    assert cluster.core.read_namespace(NS).status.phase == "Terminating"
    assert {job["metadata"]["name"] for job in cluster.fake.objects("jobs")} == {"indexed", "plain"}  # pods first
    assert cluster.fake.pods()[0]["metadata"]["finalizers"] == ["batch.kubernetes.io/job-tracking"]
    cluster.batch.delete_namespaced_job("indexed", NS, propagation_policy="Background")
    until(lambda: not cluster.fake.objects("namespaces"), "the namespace is gone", 60)
    assert not cluster.fake.objects("jobs")
    assert not cluster.fake.objects("secrets")


def test_mounted_secrets_are_updated_one_by_one_and_each_atomically(cluster: Cluster) -> None:
    cluster.fake.add_secret("a", {"x": "1", "y": "1"})
    cluster.fake.add_secret("b", {"z": "1"})
    cluster.job(
        "job", SLEEP,
        volumes=[{"name": name, "secret": {"secretName": name}} for name in "ab"],
        volumeMounts=[{"name": name, "mountPath": f"/{name}"} for name in "ab"],
    )  # fmt: skip
    (pod,) = cluster.running("job")
    volumes = cluster.fake.kubelet.run_of(pod).folder / "volumes"
    assert {path.name for path in (volumes / "a").iterdir() if path.name[:2] != ".."} == {"x", "y"}
    for secret, values in (("a", {"x": "2", "w": "2"}), ("b", {"z": "2"})):
        cluster.core.delete_namespaced_secret(secret, NS)
        cluster.fake.add_secret(secret, values)

    def read(path: str) -> str:
        return (volumes / path).read_text() if (volumes / path).exists() else ""

    until(lambda: (read("a/x"), read("a/w"), read("b/z")) == ("2", "2", "2"), "both volumes follow", 60)
    assert {path.name for path in (volumes / "a").iterdir() if path.name[:2] != ".."} == {"x", "w"}


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(cluster: Cluster) -> None:
    cluster.job("deaf", f"trap '' TERM; echo up; {LOOP}")
    (pod,) = cluster.running("deaf")
    until(lambda: cluster.fake.log(pod), "it has its trap", 60)
    pid = cluster.fake.pid(pod)
    cluster.core.delete_namespaced_pod(pod, NS, grace_period_seconds=1)
    until(lambda: not alive(pid), "it is killed", 60)
    until(lambda: cluster.status("deaf").failed == 1, "its Job counts it", 60)
    assert cluster.running("deaf") != [pod]


def test_pods_that_cannot_start_give_the_reason(cluster: Cluster) -> None:
    cluster.job("image", "true", image="registry.example/none:1")
    cluster.job("secret", "true", env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "A"}}}])
    cluster.job("program", "", command=["no-such-program"])
    cluster.job("gpu", "true", resources={"limits": {"nvidia.com/gpu": "1"}})
    cluster.job("claim", "true", volumes=[{"name": "kept", "persistentVolumeClaim": {"claimName": "none"}}])
    until(lambda: cluster.pods("claim")[0].status.conditions, "the scheduler's words", 60)
    (scheduled,) = cluster.pods("claim")[0].status.conditions
    assert (scheduled.status, scheduled.reason) == ("False", "Unschedulable")
    assert 'persistentvolumeclaim "none" not found' in scheduled.message
    until(lambda: cluster.waiting("image")[0] == "ImagePullBackOff", "ImagePullBackOff", 60)
    assert "registry.example/none:1" in cluster.waiting("image")[1]
    until(lambda: cluster.waiting("secret")[0], "a reason", 60)
    assert cluster.waiting("secret") == ("CreateContainerConfigError", 'secret "none" not found')
    until(lambda: cluster.pods("gpu")[0].status.conditions, "the scheduler's words", 60)
    (pod,) = cluster.pods("gpu")
    (scheduled,) = pod.status.conditions
    assert (scheduled.status, scheduled.reason) == ("False", "Unschedulable")
    assert scheduled.message.startswith("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert cluster.core.read_namespaced_pod_log(pod.metadata.name, NS) == ""
    events = cluster.core.list_namespaced_event(NS, field_selector=f"involvedObject.name={pod.metadata.name}").items
    assert [(event.reason, event.message) for event in events] == [("FailedScheduling", scheduled.message)]
    assert cluster.pods("program")[0].status.container_statuses[0].state.terminated.exit_code == 128
    cluster.fake.node.capacity["nvidia.com/gpu"] = "1"
    cluster.fake.images["registry.example/none:1"] = []
    cluster.fake.add_secret("none", {"A": "b"})
    for name in ("gpu", "image", "secret"):
        assert last(cluster.ended(name))[0] == "Complete"


def test_requests_that_are_rejected(cluster: Cluster, tmp_path: Path) -> None:
    cluster.job("job", SLEEP)
    assert "already exists" in refused(409, lambda: cluster.job("job", SLEEP))
    assert 'jobs.batch \\"none\\" not found' in refused(404, lambda: cluster.status("none"))
    cluster.fake.fail("create", "jobs", 403, "Forbidden", "exceeded quota: small")
    assert "exceeded quota" in refused(403, lambda: cluster.job("other", "true"))
    cluster.job("other", "true")
    misspelled = manifest("misspelled", "true", spec={"completion": 1})
    made = cluster.batch.create_namespaced_job(NS, misspelled)  # the field is dropped
    assert made.spec.completions == 1
    misspelled["metadata"]["name"] = "again"
    output = refused(400, lambda: cluster.batch.create_namespaced_job(NS, misspelled, field_validation="Strict"))
    assert 'strict decoding error: unknown field \\"spec.completion\\"' in output
    output = refused(400, lambda: cluster.job("typed", "true", spec={"completions": "two"}))
    assert 'Job in version \\"v1\\" cannot be handled as a Job: json: cannot unmarshal' in output
    assert "spec.completions" in output
    rules = [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list"]}]
    launcher = Cluster(cluster.fake, cluster.fake.kubeconfig_for(rules))
    assert launcher.status("job")
    output = refused(403, lambda: launcher.job("more", "true"))
    assert f"system:serviceaccount:{NS}:launcher" in output
    assert 'cannot create resource \\"jobs\\"' in output
    for verb, allowed in (("list", True), ("create", False)):
        attributes = {"namespace": NS, "verb": verb, "group": "batch", "resource": "jobs"}
        review = {"spec": {"resourceAttributes": attributes}}
        assert launcher.access.create_self_subject_access_review(review).status.allowed is allowed
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(re.sub(r"token: .*", "token: wrong", cluster.fake.kubeconfig.read_text()))
    stranger = Cluster(cluster.fake, wrong)
    assert "Unauthorized" in refused(401, lambda: stranger.status("job"))


def test_quotas_are_checked_before_names_and_charged_for_rejected_requests(cluster: Cluster) -> None:
    cluster.fake.add_quota("few", **{"count/jobs.batch": "3", "limits.memory": "1Gi"})
    limits = {"resources": {"limits": {"memory": "512Mi"}}}
    cluster.job("a", SLEEP, **limits)
    assert "already exists" in refused(409, lambda: cluster.job("a", SLEEP, **limits))
    cluster.job("b", SLEEP, **limits)
    output = refused(403, lambda: cluster.job("a", SLEEP, **limits))  # not 409; and the earlier 409 was charged, too
    assert "exceeded quota: few, requested: count/jobs.batch=1, used: count/jobs.batch=3" in output
    cluster.running("a")
    cluster.running("b")
    cluster.batch.delete_namespaced_job("b", NS, propagation_policy="Foreground")
    until(lambda: len(cluster.fake.objects("jobs")) == 1, "one Job is left", 60)
    cluster.job("c", SLEEP)  # counted again; but its pod states no memory
    words = lambda: [event.message for event in cluster.core.list_namespaced_event(NS).items]  # noqa: E731
    until(
        lambda: any("failed quota: few: must specify limits.memory for: main" in text for text in words()), "words", 60
    )


def test_watches(cluster: Cluster) -> None:
    listed = cluster.batch.list_namespaced_job(NS)
    cluster.job("job", "true")
    seen = []
    for event in watch.Watch().stream(
        cluster.batch.list_namespaced_job, NS, resource_version=listed.metadata.resource_version, timeout_seconds=60
    ):
        seen.append(event["type"])
        if event["type"] == "DELETED":
            break
        if conditions(event["object"].status) & {"Complete"}:
            cluster.batch.delete_namespaced_job("job", NS, propagation_policy="Background")
    assert seen[0] == "ADDED"
    assert set(seen[1:-1]) == {"MODIFIED"}
    stream = watch.Watch().stream(cluster.batch.list_namespaced_job, NS, timeout_seconds=60)
    cluster.fake.expire()
    with pytest.raises(ApiException) as error:
        list(
            watch.Watch().stream(
                cluster.batch.list_namespaced_job,
                NS,
                resource_version=listed.metadata.resource_version,
                timeout_seconds=9,
            )
        )
    assert error.value.status == 410
    cluster.job("again", "true")
    assert next(iter(stream))["object"].metadata.name == "again"


def test_closing_leaves_no_processes(tmp_path: Path) -> None:
    with FakeCluster(tmp_path, images={"image:1": []}) as fake:
        inside = Cluster(fake)
        inside.job("job", "sleep 600 & exec sleep 600")
        pid = fake.pid(*inside.running("job"))
    assert not alive(pid)
    script = (
        "import sys, time, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from fake_cluster import FakeCluster\n"
        "from kubernetes import client, config\n"
        "with FakeCluster(images={'image:1': []}) as fake:\n"
        "    config.load_kube_config(str(fake.kubeconfig))\n"
        "    main = {'name': 'a', 'image': 'image:1', 'command': ['sleep', '600']}\n"
        "    pod = {'restartPolicy': 'Never', 'containers': [main]}\n"
        "    body = {'apiVersion': 'v1', 'kind': 'Pod', 'metadata': {'name': 'pod'}, 'spec': pod}\n"
        "    client.CoreV1Api().create_namespaced_pod('federations', body)\n"
        "    while fake.pods()[0]['status']['phase'] != 'Running': time.sleep(0.05)\n"
        "    print(fake.pid('pod'), fake.root, flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parents[1])], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid_, folder = process.stdout.readline().split()
    assert alive(int(pid_))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    until(lambda: not alive(int(pid_)), "the container dies with its cluster", 60)
    subprocess.run(["rm", "-r", folder], check=True)
