"""The launcher against a Kubernetes API over HTTP, with the real client and the rights of our Role.

The pods here run a few lines of shell: Kubernetes only observes when a program ends, its exit code, and its
output. Whole federations are in ``test_cluster_federate.py`` and in ``tests/e2e``.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from facts import failing, mentions
from fake_cluster import FakeCluster
from run_processes import until

from fedloom.cluster import federations
from fedloom.cluster.api import Api, Unreachable
from fedloom.cluster.federate import _owners, cleanup
from fedloom.cluster.launcher import Launcher, aggregator_pod
from fedloom.cluster.manifests import ATTEMPT, PORT, FederationSpec, aggregator_job, completed
from fedloom.cluster.progress_client import Tunnel
from fedloom.cluster.settings import ClusterSettings, TaskConfig
from fedloom.errors import (
    AbandonedError,
    DataError,
    ExperimentError,
    FedloomError,
    QuorumError,
    RefusedError,
    StorageError,
    WorkerLostError,
)

pytestmark = pytest.mark.cluster

RULES = next(yaml.safe_load_all((Path(__file__).parents[2] / "components/federate/rbac.yaml").read_text()))["rules"]
WAIT_S = 60.0


class World:
    """A cluster, a program for its pods, and launchers."""

    def __init__(self, folder: Path, cluster: FakeCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.said: list[str] = []
        (folder / "bin").mkdir()
        cluster.add_secret("store", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
        self.program()

    def program(self, aggregator: str = "sleep 1; echo done", worker: str = "exec sleep 60") -> None:
        """Set the pods' scripts; ``$INDEX`` is the worker's index, ``$HERE`` a folder that outlives them."""
        text = f"#!/bin/sh\nHERE={self.folder}\nINDEX=$JOB_COMPLETION_INDEX\ncase $1 in\n"
        text += f"aggregator) {aggregator};;\nworker) {worker};;\nesac\n"
        path = self.folder / "bin" / "fedloom"
        path.write_text(text)
        path.chmod(0o755)

    def federation(self, run_id: str = "run-1", **changes: Any) -> FederationSpec:
        settings = {
            "image": "fedloom:1", "storage_secret": "store", "retries": 0, "failing_timeout_s": 0.5,
            **changes,
        }  # fmt: skip
        return FederationSpec(
            run_id=run_id,
            task="federate",
            namespace=self.cluster.namespace,
            settings=ClusterSettings(**settings),
            task_config=TaskConfig(),
            experiment="name: small\n",
            run_url="s3://bucket/runs/small",
            partition_url="s3://bucket/partitions/ff",
            clients=10,
            device="cpu",
            threads=1,
            clients_at_once=1,
            save_every_s=60.0,
            storage_environment={},
            orphan_after_s=None,
        )

    def launcher(self, federation: FederationSpec | None = None, **options: Any) -> Launcher:
        api = Api(patience_s=2.0, say=self.said.append)
        return Launcher(federation or self.federation(), api, self.said.append, **options)

    def names(self, plural: str) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.cluster.objects(plural))

    def job(self, component: str = "aggregator") -> dict[str, Any]:
        (found,) = (job for job in self.cluster.objects("jobs") if job["metadata"]["name"].endswith(component))
        return found

    def nothing_left(self) -> bool:
        return not any(self.cluster.objects(plural) for plural in ("jobs", "services", "pods"))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    with FakeCluster(tmp_path / "cluster", images={"fedloom:1": []}, environment=path, backoff_s=0.05) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for(RULES)))
        yield World(tmp_path, cluster)


def kubeconfig_with(world: World, monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    """Use another token, or another server, than those of the cluster."""
    tree = yaml.safe_load(world.cluster.kubeconfig.read_text())
    place = tree["users"][0]["user"] if key == "token" else tree["clusters"][0]["cluster"]
    place[key] = value
    path = world.folder / "kubeconfig"
    path.write_text(yaml.safe_dump(tree))
    monkeypatch.setenv("KUBECONFIG", str(path))


def in_background(run: Callable[[], None]) -> Callable[[], FedloomError | None]:
    """Run a function in a thread; the result waits for its end and returns its error."""
    failure: list[FedloomError] = []

    def guarded() -> None:
        try:
            run()
        except FedloomError as error:
            failure.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()

    def ended() -> FedloomError | None:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return failure[0] if failure else None

    return ended


def test_a_federation_is_created_and_removed_at_its_end(world: World) -> None:
    launcher = world.launcher()
    launcher.run()
    name = world.federation().name
    assert world.said[:3] == [f"created Job {name}-aggregator", f"created Service {name}", f"created Job {name}-worker"]
    assert world.names("jobs") == [f"{name}-aggregator", f"{name}-worker"]
    root = world.job()["metadata"]
    assert root.get("ownerReferences") is None
    for owned in (world.job("worker"), *world.cluster.objects("services")):
        assert [reference["uid"] for reference in owned["metadata"]["ownerReferences"]] == [root["uid"]]
    launcher.save_logs(world.folder / "logs")
    (log,) = (world.folder / "logs").iterdir()  # the aggregator's; no worker failed
    assert log.read_text() == "done\n"
    launcher.remove(wait=True)
    assert world.nothing_left()
    launcher.remove(wait=True)  # does nothing the second time


def test_objects_of_an_earlier_launcher_are_adopted(world: World) -> None:
    world.program(aggregator=f"until test -e {world.folder}/go; do sleep 0.05; done")
    world.launcher().ensure()  # this launcher is killed
    before = {job["metadata"]["uid"] for job in world.cluster.objects("jobs")}
    world.said.clear()
    ended = in_background(world.launcher().run)
    until(lambda: len(world.said) >= 3, "adoption")
    (world.folder / "go").touch()
    assert ended() is None
    assert [line.split()[0] for line in world.said[:3]] == ["adopted"] * 3
    assert {job["metadata"]["uid"] for job in world.cluster.objects("jobs")} == before
    world.said.clear()
    world.launcher().run()  # a third launcher finds it finished
    assert world.said == [f"adopted Job {world.federation().name}-aggregator"]


def test_objects_missing_from_an_earlier_launch_are_created(world: World) -> None:
    federation = world.federation()
    Api().create(completed(aggregator_job(federation), federation.digest(), [], 1))
    world.launcher().ensure()
    assert [line.split()[0] for line in world.said] == ["adopted", "created", "created"]


def test_a_different_specification_is_rejected_and_its_objects_are_left_alone(world: World) -> None:
    world.launcher().ensure()
    before = world.cluster.objects("jobs")
    for other in (world.federation(workers=3), dataclasses.replace(world.federation(), experiment="name: other\n")):
        with pytest.raises(ExperimentError, match="with another specification") as error:
            world.launcher(other).run()
        assert "run-1" in str(error.value)
        assert "kubectl delete" in str(error.value)
    uids = [job["metadata"]["uid"] for job in before]
    assert [job["metadata"]["uid"] for job in world.cluster.objects("jobs")] == uids


def test_deleted_services_and_workers_of_an_attempt_are_recreated(world: World) -> None:
    world.launcher().ensure()
    first = world.job("worker")["metadata"]["uid"]
    Api().delete("Job", f"{world.federation().name}-aggregator")
    world.launcher().ensure()
    until(lambda: len(world.names("jobs")) == 2, "two Jobs")
    assert world.job("worker")["metadata"]["uid"] != first
    root = world.job()["metadata"]["uid"]
    for owned in (world.job("worker"), *world.cluster.objects("services")):
        assert [reference["uid"] for reference in owned["metadata"]["ownerReferences"]] == [root]


def test_a_watch_with_an_expired_history_is_restarted(world: World) -> None:
    world.program(aggregator=f"until test -e {world.folder}/go; do sleep 0.05; done")
    world.cluster.fail("watch", "jobs", 410, "Expired", "too old resource version: 1 (9)")  # before the watch begins
    ended = in_background(world.launcher().run)
    requests = world.cluster.api.requests
    until(lambda: requests.count(("watch", "jobs")) >= 2, "a second watch")
    lists = requests.count(("list", "jobs"))
    world.cluster.expire()  # and while it runs
    until(lambda: requests.count(("list", "jobs")) > lists, "a list after the history was forgotten")
    (world.folder / "go").touch()
    assert ended() is None


@pytest.mark.parametrize("component", ["aggregator", "worker"])
def test_deleting_a_job_ends_the_federation(world: World, component: str) -> None:
    world.program(aggregator="exec sleep 60")
    ended = in_background(world.launcher().run)
    until(lambda: ("watch", "jobs") in world.cluster.api.requests, "a watch")
    Api().delete("Job", f"{world.federation().name}-{component}")
    error = ended()
    assert isinstance(error, WorkerLostError)
    assert f"{component} was deleted while the federation ran" in str(error)


def test_the_job_of_finished_workers_may_be_deleted(world: World) -> None:
    """Collect the Job, as after ``ttl_s``, while the aggregator is still at work."""
    world.program(aggregator=f"until test -e {world.folder}/go; do sleep 0.05; done", worker="exit 0")
    ended = in_background(world.launcher().run)
    until(lambda: world.names("jobs")[1:] and world.job("worker")["status"].get("conditions"), "the workers' end")
    requests = world.cluster.api.requests
    looks = requests.count(("list", "pods"))
    until(lambda: requests.count(("list", "pods")) >= looks + 2, "the launcher to have seen it")
    Api().delete("Job", f"{world.federation().name}-worker")
    until(lambda: len(world.names("jobs")) == 1, "the Job's removal")
    looks = requests.count(("list", "pods"))
    until(lambda: requests.count(("list", "pods")) >= looks + 2, "the launcher to have seen that, too")
    (world.folder / "go").touch()
    assert ended() is None


def test_too_many_failed_workers_end_the_federation(world: World) -> None:
    world.program(aggregator="exec sleep 60", worker="test $INDEX = 1 && exec sleep 60; echo no memory; exit 7")
    launcher = world.launcher(world.federation(retries=1))
    with pytest.raises(WorkerLostError, match=r"1 of 2 .*index 0.*cluster\.max_failed_workers.* 0") as error:
        launcher.run()
    assert "no memory" in str(error.value)
    failed = [pod for pod in world.cluster.pods() if "-worker-0-" in pod["metadata"]["name"]]
    assert len(failed) == 2  # retried once, alone
    launcher.save_logs(world.folder / "logs")
    logs = sorted(path.name for path in (world.folder / "logs").iterdir())
    assert logs == sorted(f"{pod['metadata']['name']}.log" for pod in failed)  # the aggregator has no output
    launcher.remove(wait=True)
    assert world.nothing_left()


def test_workers_may_fail_up_to_the_limit(world: World) -> None:
    world.program(aggregator="sleep 2", worker="test $INDEX = 1 && exec sleep 60; exit 7")
    world.launcher(world.federation(max_failed_workers=1)).run()


@pytest.mark.parametrize(("code", "kind"), [(2, ExperimentError), (8, WorkerLostError)])
def test_a_worker_with_a_permanent_error_is_not_retried(world: World, code: int, kind: type[FedloomError]) -> None:
    world.program(aggregator="exec sleep 60", worker=f"{failing(kind, 'found no CUDA')}; exit {code}")
    with pytest.raises(kind, match="found no CUDA"):
        world.launcher(world.federation(retries=3, workers=1)).run()
    assert len([pod for pod in world.cluster.pods() if "-worker-" in pod["metadata"]["name"]]) == 1


@pytest.mark.parametrize(
    ("code", "kind", "tries"),
    [
        (2, ExperimentError, 1),
        (4, RefusedError, 1),
        (8, AbandonedError, 1),
        (6, StorageError, 3),
        (1, WorkerLostError, 3),
    ],
)
def test_exits_of_an_aggregator(world: World, code: int, kind: type[FedloomError], tries: int) -> None:
    world.program(aggregator=f"echo INFO; {failing(kind, 'the reason', 'the remedy')}; exit {code}")
    with pytest.raises(FedloomError, match=f"ended with code {code} .*: the reason\n  the remedy") as error:
        world.launcher(world.federation(retries=2)).run()
    assert type(error.value) is kind
    assert len([pod for pod in world.cluster.pods() if "-aggregator-" in pod["metadata"]["name"]]) == tries
    assert any("the reason" in line for line in world.said)


def test_an_evicted_aggregator_is_replaced_regardless_of_retries(world: World) -> None:
    world.program(aggregator=f"test -e {world.folder}/2 && exit 0; touch {world.folder}/2; exec sleep 60")
    ended = in_background(world.launcher().run)
    until((world.folder / "2").exists, "a first aggregator")
    (pod,) = (pod["metadata"]["name"] for pod in world.cluster.pods() if "-aggregator-" in pod["metadata"]["name"])
    admin = Api()
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    world.cluster.api.identities[_token()].rules = None
    admin._call("POST", admin._path("Pod", pod) + "/eviction", body=body)
    assert ended() is None


def _token() -> str:
    tree = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    return str(tree["users"][0]["user"]["token"])


def test_a_federation_that_failed_without_a_launcher_is_restarted(world: World) -> None:
    world.program(aggregator=f"test -e {world.folder}/2 && exit 0; touch {world.folder}/2; exit 8")
    world.launcher().ensure()  # this launcher is killed; without one the aggregator ends with 8
    until(lambda: world.job().get("status", {}).get("conditions"), "the end of the first attempt")
    world.launcher().run()
    assert world.job()["metadata"]["annotations"][ATTEMPT] == "2"
    assert any("attempt 2" in line for line in world.said)


def test_a_federation_with_a_permanent_error_is_not_restarted(world: World) -> None:
    world.program(aggregator=f"{failing(DataError, 'wrong')}; exit 3")
    world.launcher().ensure()
    until(lambda: world.job().get("status", {}).get("conditions"), "its end")
    with pytest.raises(FedloomError, match=r"code 3 .DATA.: wrong"):
        world.launcher().run()
    assert world.job()["metadata"]["annotations"][ATTEMPT] == "1"


def test_deadline_of_a_federation(world: World) -> None:
    world.program(aggregator="exec sleep 60")
    with pytest.raises(QuorumError, match=r"cluster\.deadline_s"):
        world.launcher(world.federation(deadline_s=1)).run()


PENDING = [
    ({"image": "fedloom:2"}, ExperimentError, ["fedloom:2", "not found", "cluster.image"]),
    ({"worker_image": "cuda:2"}, ExperimentError, ["worker-", "cuda:2", "not found"]),
    ({"storage_secret": "other"}, ExperimentError, ["CreateContainerConfigError", "other", "kubectl create secret"]),
    (
        {"gpu": {"count": 1}, "pending_timeout_s": 2},
        QuorumError,
        ["Unschedulable", "Insufficient nvidia.com/gpu", "cluster.pending_timeout_s"],
    ),
    (
        {
            "volumes": ({"name": "ca", "configMap": {"name": "ca"}},),
            "volume_mounts": ({"name": "ca", "mountPath": "/ca"},),
        },
        ExperimentError,
        ["FailedMount", "ca"],
    ),
    (
        {
            "volumes": ({"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}},),
            "volume_mounts": ({"name": "kept", "mountPath": "/kept"},),
        },
        ExperimentError,
        ['persistentvolumeclaim "kept" not found'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "kind", "words"), PENDING, ids=["image", "worker-image", "secret", "gpu", "volume", "claim"]
)
def test_pods_that_cannot_start_are_reported(
    world: World, changes: dict[str, Any], kind: type[FedloomError], words: list[str]
) -> None:
    world.program(aggregator="exec sleep 60")
    launcher = world.launcher(world.federation(**changes))
    with pytest.raises(kind) as error:
        launcher.run()
    assert type(error.value) is kind
    assert mentions(str(error.value), *words)
    launcher.remove(wait=True)
    assert world.nothing_left()


AGGREGATOR = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from fedloom.federation.activity import Activity, ConnectedWorker, Group, LastEvaluation
from fedloom.transport.control import CONTROL, WATCH, to_wire
from fedloom.transport.wire import control_pb2 as wire

def told(phase, round, **more):
    workers = tuple(ConnectedWorker(name) for name in "ab")
    now = Activity("small", "toy", phase, 0.0, 0.0, round=round, rounds=4, workers=workers, **more)
    return wire.WatchResponse(activity=to_wire(now))

def until_exists(path):
    while not Path(path).exists():
        time.sleep(0.05)

def watch(request, context):
    until_exists(sys.argv[1])
    yield told("training", 1)
    until_exists(sys.argv[2])
    yield told("finished", 4, measured=LastEvaluation(4, {"seen": Group(2, accuracy_pooled=0.5, pooled=0.5)}))

reads, writes = wire.WatchRequest.FromString, wire.WatchResponse.SerializeToString
handler = grpc.unary_stream_rpc_method_handler(watch, reads, writes)
server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(CONTROL, {WATCH: handler})])
server.add_insecure_port(sys.argv[sys.argv.index("--listen") + 1])
server.start()
until_exists(sys.argv[2])
time.sleep(1)
"""
"""An aggregator of which only the progress is real. Its training begins and ends when two files exist."""


@pytest.mark.parametrize("inside", [False, True])
def test_progress_is_shown_inside_and_outside_of_the_cluster(world: World, inside: bool) -> None:
    script, begin, end = (world.folder / name for name in ("aggregator.py", "begin", "end"))
    script.write_text(AGGREGATOR)
    world.program(aggregator=f'exec {sys.executable} {script} {begin} {end} "$@"')
    ended = in_background(world.launcher(inside=inside).run)
    until(lambda: any(line.startswith("aggregator: running") for line in world.said), "the pods' phases")
    begin.touch()
    until(lambda: any(line.startswith("training: round 1/4, workers: 2") for line in world.said), "progress")
    assert (("get", "pods/portforward") in world.cluster.api.requests) is not inside
    seen = federations.federation_progress(Api(), federations.find_federation(Api(), "run-1"))
    assert seen is not None
    assert (seen.phase, seen.round, seen.rounds) == ("training", 1, 4)
    end.touch()
    assert ended() is None
    assert any(line.startswith("after round 4") for line in world.said)


def test_missing_progress_is_reported_without_the_right_to_forward_a_port(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [rule for rule in RULES if "pods/portforward" not in rule["resources"]]
    monkeypatch.setenv("KUBECONFIG", str(world.cluster.kubeconfig_for(rules)))
    world.launcher().run()
    assert any("get pods/portforward, create pods/portforward" in line for line in world.said)


def test_a_tunnel_leads_to_the_current_pod_or_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.program(aggregator=f'exec {sys.executable} {world.folder}/echo.py "$@"')
    (world.folder / "echo.py").write_text(
        "import socket, sys, os\nhost, port = sys.argv[sys.argv.index('--listen') + 1].split(':')\n"
        "listener = socket.create_server((host, int(port)))\nwhile True:\n    peer, _ = listener.accept()\n"
        "    while data := peer.recv(1 << 16): peer.sendall(data)\n    peer.close()\n"
    )
    launcher = world.launcher(world.federation(retries=3))
    launcher.ensure()
    api = Api()
    pods = lambda: [pod for pod in world.cluster.pods() if "-aggregator-" in pod["metadata"]["name"]]  # noqa: E731

    def send(peer: socket.socket, text: bytes) -> None:
        with suppress(OSError):  # the other side may end first
            peer.sendall(text)

    def echoed(address: str, text: bytes) -> bytes:
        host, _, port = address.partition(":")
        found = b""
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            try:
                threading.Thread(target=send, args=(peer, text), daemon=True).start()
                while len(found) < len(text) and (data := peer.recv(1 << 16)):
                    found += data
            except OSError:
                pass
        return found

    text = random.Random(0).randbytes(300_000)
    with Tunnel(api, lambda: aggregator_pod(pods()), PORT) as tunnel:
        until(lambda: echoed(tunnel.address, text) == text, "an echo")
        first = aggregator_pod(pods())
        assert first is not None
        world.cluster.kill(first)
        until(lambda: aggregator_pod(pods()) not in (None, first), "another pod")
        until(lambda: echoed(tunnel.address, text) == text, "an echo of the next")
        launcher.remove(wait=True)
        assert echoed(tunnel.address, b"hello") == b""
    monkeypatch.setenv("KUBECONFIG", str(world.cluster.kubeconfig_for([])))
    with Tunnel(Api(), lambda: "any", PORT) as tunnel:
        assert echoed(tunnel.address, b"hello") == b""


def test_missing_rights_are_named_with_the_file_to_apply(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Api().missing_rights() == []  # the Role grants all of them
    rules = [{**rule, "verbs": [verb for verb in rule["verbs"] if verb != "create"]} for rule in RULES]
    monkeypatch.setenv("KUBECONFIG", str(world.cluster.kubeconfig_for(rules)))
    assert Api().missing_rights() == ["create services", "create jobs"]
    with pytest.raises(RefusedError, match=r"cannot create resource .jobs(.|\n)*components/federate/rbac\.yaml"):
        world.launcher().run()
    assert world.nothing_left()


def test_events_are_optional(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [rule for rule in RULES if "events" not in rule["resources"]]
    monkeypatch.setenv("KUBECONFIG", str(world.cluster.kubeconfig_for(rules)))
    assert Api().events("anything") == []


def test_rejected_credentials_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig_with(world, monkeypatch, "token", "old")
    with pytest.raises(RefusedError, match="does not accept these credentials") as error:
        world.launcher().run()
    assert world.cluster.url in str(error.value)


@pytest.mark.parametrize("kind", ["count/jobs.batch", "count/services", "services"])
def test_a_launcher_adopts_a_federation_despite_a_full_quota(world: World, kind: str) -> None:
    """The API server then answers the create of an existing object with 403 instead of 409."""
    world.program(aggregator=f"until test -e {world.folder}/go; do sleep 0.05; done")
    world.cluster.add_quota("few", **{kind: "2" if "jobs" in kind else "1"})
    world.launcher().ensure()  # this launcher is killed
    before = {item["metadata"]["uid"] for plural in ("jobs", "services") for item in world.cluster.objects(plural)}
    creates = [asked for asked in world.cluster.api.requests if asked[0] == "create"]
    for _ in range(3):
        world.launcher().ensure()
    assert [asked for asked in world.cluster.api.requests if asked[0] == "create"] == creates  # they are charged
    ended = in_background(world.launcher().run)
    (world.folder / "go").touch()
    assert ended() is None
    after = {item["metadata"]["uid"] for plural in ("jobs", "services") for item in world.cluster.objects(plural)}
    assert after == before


@pytest.mark.parametrize("resource", ["jobs", "services"])
def test_objects_created_by_a_concurrent_launcher_are_adopted(world: World, resource: str) -> None:
    """Both launchers found nothing; the other one then created it and used up the quota."""
    other = world.launcher()
    mine = world.launcher()
    read = mine._api.read

    def late(kind: Any, name: str) -> Any:
        found = read(kind, name)
        if found is None and kind.lower() + "s" == resource:
            other.ensure()
            world.cluster.fail("create", resource, 403, "Forbidden", f'"{name}" is forbidden: exceeded quota: few')
        return found

    mine._api.read = late  # type: ignore[method-assign]
    mine.ensure()
    assert len(world.names("jobs")) == 2


@pytest.mark.parametrize(
    ("verb", "code", "output"),
    [
        ("create", 403, 'jobs.batch "x" is forbidden: exceeded quota: few, requested: count/jobs.batch=1, used: 4'),
        ("create", 403, 'admission webhook "policy.example" denied the request: no label team'),
        ("create", 400, 'admission webhook "policy.example" denied the request: no label team'),
        ("get", 403, 'jobs.batch "x" is forbidden: User "u" cannot get resource "jobs" in API group "batch"'),
    ],
)
def test_a_launcher_removes_only_objects_that_it_created_or_adopted(
    world: World, verb: str, code: int, output: str
) -> None:
    world.launcher().ensure()
    before = [job["metadata"]["uid"] for job in world.cluster.objects("jobs")]
    world.cluster.fail("get", "jobs", 404, "NotFound", "not found")  # as if it did not exist a moment ago
    world.cluster.fail(verb, "jobs", code, "Forbidden", output, times=9)
    if verb == "create":
        world.cluster.fail("get", "jobs", 404, "NotFound", "not found")
    late = world.launcher()
    with pytest.raises(RefusedError):
        late.ensure()
    late.save_logs(world.folder / "logs")
    late.remove(wait=True)
    assert [job["metadata"]["uid"] for job in world.cluster.objects("jobs")] == before
    assert all("deletionTimestamp" not in job["metadata"] for job in world.cluster.objects("jobs"))


@pytest.mark.parametrize(
    ("kind", "hard", "created", "words"),
    [
        ("count/jobs.batch", "1", ["Job", "Service"], ["few", "fewer federations at once"]),
        ("count/services", "0", ["Job"], ["few", "fewer federations at once"]),
        ("pods", "1", ["Job", "Service", "Job"], ["few", "cluster.workers"]),
        ("limits.memory", "1Gi", ["Job", "Service", "Job"], ["few", "cluster.aggregator.limits.memory"]),
        ("requests.memory", "2Gi", ["Job", "Service", "Job"], ["few", "cluster.worker.requests.memory"]),
        ("default", "512Mi", ["Job", "Service", "Job"],  # below our requests
         ["512Mi", "cluster.aggregator.limits.memory", "cluster.aggregator.requests.memory",
          "cluster.aggregator.limits.cpu", "cluster.aggregator.requests.cpu", "limitrange"]),
    ],
)  # fmt: skip
def test_an_exceeded_quota_exits_with_4_and_names_the_setting(
    world: World, kind: str, hard: str, created: list[str], words: list[str]
) -> None:
    if kind == "default":
        world.cluster.add_limit_range(memory=hard, cpu="100m")
    else:
        world.cluster.add_quota("few", **{kind: hard})
    world.program(aggregator="exec sleep 60")
    launcher = world.launcher()
    with pytest.raises(RefusedError) as error:
        launcher.run()
    assert [line.split()[1] for line in world.said if line.startswith("created")] == created
    assert mentions(str(error.value), *words)
    assert "rbac" not in str(error.value)
    launcher.remove(wait=True)
    assert world.nothing_left()


POLICY = "ValidatingAdmissionPolicy 'team' with binding 'team-here' denied request: failed expression: false"
HOOK = 'admission webhook "team" denied the request: no label team'
UNCALLED = 'failed calling webhook "team": failed to call webhook: Post "https://policy/x": connection refused'


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (422, "Invalid", f'jobs.batch "x" is forbidden: {POLICY}'),
        (401, "", HOOK),
        (500, "", HOOK),
        (500, "InternalError", f"Internal error occurred: {UNCALLED}"),
    ],
)
def test_a_refusal_by_an_operators_policy_exits_with_4_and_names_it(
    world: World, code: int, reason: str, message: str
) -> None:
    """A webhook's own status code is that of the answer (apiserver/pkg/admission/plugin/webhook/errors)."""
    world.cluster.fail("create", "jobs", code, reason, message, times=99)
    with pytest.raises(RefusedError, match=r"ask the operator of team\Z") as error:
        world.launcher().run()
    assert type(error.value) is RefusedError
    assert message in str(error.value)
    assert not any("allowed this before" in line for line in world.said)


@pytest.mark.parametrize("field", ["tolerationSeconds", "keey"])
def test_a_manifest_rejected_by_the_api_is_reported(world: World, field: str) -> None:
    bad = world.federation(tolerations=({"operator": "Exists", field: "soon"},))
    with pytest.raises(ExperimentError, match=field):
        world.launcher(bad).run()


def test_a_missing_namespace_is_reported(world: World) -> None:
    world.cluster.api.identities[_token()].rules = None
    elsewhere = dataclasses.replace(world.federation(), namespace="nowhere")
    with pytest.raises(ExperimentError, match=r"nowhere.*not found(.|\n)*kubectl create namespace nowhere"):
        Launcher(elsewhere, Api("nowhere"), world.said.append).run()


def test_requests_to_an_unavailable_api_are_retried(world: World) -> None:
    for verb, resource in (("create", "jobs"), ("create", "services"), ("list", "jobs"), ("list", "pods")):
        world.cluster.fail(verb, resource, 503, "ServiceUnavailable", "apiserver is shutting down")
    world.cluster.fail("watch", "jobs", 500, "InternalError", "etcdserver: leader changed")
    world.launcher().run()


@pytest.mark.parametrize("code", [403, 401])
@pytest.mark.parametrize("adopted", [False, True])
def test_a_launcher_outlasts_an_api_server_that_knows_no_roles_after_its_start(
    world: World, code: int, adopted: bool
) -> None:
    world.program(aggregator=f"until test -e {world.folder}/go; do sleep 0.05; done")
    if adopted:
        world.launcher().ensure()
    ended = in_background(world.launcher().run)
    requests = world.cluster.api.requests
    until(lambda: ("watch", "jobs") in requests, "a watch")
    before = {job["metadata"]["uid"] for job in world.cluster.objects("jobs")}
    world.cluster.restart_api(3.0, code)  # longer than this launcher repeats single requests
    lists = requests.count(("list", "jobs"))
    until(lambda: requests.count(("list", "jobs")) >= lists + 3, "refused requests")
    until(lambda: any(f"answers {code}" in line for line in world.said), "it is told")
    (world.folder / "go").touch()
    assert ended() is None
    assert {job["metadata"]["uid"] for job in world.cluster.objects("jobs")} == before
    assert ("delete", "jobs") not in requests


def test_lost_rights_and_refused_content_are_told_apart(world: World) -> None:
    """A right is requested again if it was there; what a quota or a policy rejects is not."""
    api = Api(patience_s=5.0)
    assert api.missing_rights() == []
    api.select("Event")  # allowed
    world.cluster.fail(
        "list", "events", 403, "Forbidden", 'events is forbidden: User "u" cannot list resource "events"'
    )
    assert api.events("any") == []
    assert world.cluster.api.requests.count(("list", "events")) == 3  # refused once, then answered
    for message in ("exceeded quota: few", 'admission webhook "policy.example" denied the request: no label team'):
        world.cluster.fail("create", "jobs", 403, "Forbidden", f'jobs.batch "x" is forbidden: {message}')
        with pytest.raises(RefusedError, match=message[:8]):
            api.create(completed(aggregator_job(world.federation()), "any", [], 1))
    assert world.cluster.api.requests.count(("create", "jobs")) == 2


def test_a_new_login_ends_the_refusal_of_an_old_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.folder / "kubeconfig"
    shutil.copyfile(os.environ["KUBECONFIG"], path)
    monkeypatch.setenv("KUBECONFIG", str(path))
    world.program(aggregator=f"until test -e {world.folder}/go; do sleep 0.05; done")
    ended = in_background(world.launcher().run)
    until(lambda: ("watch", "jobs") in world.cluster.api.requests, "a watch")
    del world.cluster.api.identities[_token()]  # it has expired
    (world.folder / "go").touch()
    until(lambda: any("answers 401" in line for line in world.said), "it is told")
    shutil.copyfile(world.cluster.kubeconfig_for(RULES), path)
    assert ended() is None


def test_rights_that_stay_lost_end_with_4_and_remove_nothing(world: World) -> None:
    world.program(aggregator="exec sleep 60")
    launcher = world.launcher(world.federation(deadline_s=5))
    launcher.ensure()
    world.cluster.restart_api(60.0)
    with pytest.raises(RefusedError, match=r"RBAC(.|\n)*components/federate/rbac\.yaml"):
        launcher.run()
    assert not launcher.over
    assert all("deletionTimestamp" not in job["metadata"] for job in world.cluster.objects("jobs"))


def test_a_launcher_without_an_api_asks_whether_the_run_is_finished(world: World) -> None:
    world.program(aggregator="exec sleep 60")
    done = threading.Event()
    ended = in_background(world.launcher(finished=done.is_set).run)
    until(lambda: ("watch", "jobs") in world.cluster.api.requests, "a watch")
    world.cluster.restart_api(60.0)
    until(lambda: any("waiting for the Kubernetes API" in line for line in world.said), "it is told")
    done.set()
    assert isinstance(ended(), RefusedError)  # well before the deadline of the federation


@pytest.mark.parametrize("adopted", [False, True])
def test_only_the_creator_may_remove_a_federation_that_cannot_start(world: World, adopted: bool) -> None:
    federation = world.federation(worker_image="cuda:2")
    world.program(aggregator="exec sleep 60")
    if adopted:
        world.launcher(federation).ensure()
    launcher = world.launcher(federation)
    with pytest.raises(ExperimentError, match="cuda:2"):
        launcher.run()
    assert launcher.over is not adopted


def test_requests_to_an_absent_api_time_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig_with(world, monkeypatch, "server", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(Unreachable, match=r"http://127.0.0.1:9 cannot be reached: .*refused"):
        world.launcher().run()


@pytest.mark.parametrize(
    ("content", "kind", "output"),
    [
        (None, RefusedError, "no Kubernetes cluster"),
        ("{", ExperimentError, "kubeconfig"),
        ("a: b", ExperimentError, "kubeconfig"),
    ],
)
def test_a_missing_kubeconfig_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, kind: type[FedloomError], output: str
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(kind, match=output):
        Api()


def test_a_federation_is_deleted_with_its_workflow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = world.cluster
    kind = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow"}
    api = Api()
    admin.api.identities[_token()].rules = None
    path = f"/apis/argoproj.io/v1alpha1/namespaces/{admin.namespace}/workflows"
    made = api._call("POST", path, body={**kind, "metadata": {"name": "pipeline-1"}, "spec": {}})
    reference = {**kind, "name": "pipeline-1", "uid": made["metadata"]["uid"], "controller": True}
    step = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "step-1", "ownerReferences": [reference]},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "fedloom:1", "command": ["true"]}]},
    }  # fmt: skip
    api._call("POST", api._path("Pod"), body=step)
    assert _owners(api) == []  # this process is not in a pod
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    owners = _owners(api)
    assert [owner["name"] for owner in owners] == ["pipeline-1"]
    world.program(aggregator="exec sleep 60")
    world.launcher(owners=owners).ensure()
    assert [owner["kind"] for owner in world.job()["metadata"]["ownerReferences"]] == ["Workflow"]
    assert len(world.names("jobs")) == 2
    api._call("DELETE", f"{path}/pipeline-1", body={"propagationPolicy": "Background"})
    until(world.nothing_left, "garbage collection")


def test_cleanup_deletes_only_the_objects_of_a_run(world: World) -> None:
    world.program(aggregator="exec sleep 60")
    world.launcher(world.federation("run-1")).ensure()
    world.launcher(world.federation("run-2")).ensure()
    kept = world.federation("run-2").name
    assert sorted(cleanup("run-1", say=world.said.append)) == sorted(
        [f"Job {world.federation('run-1').name}-{end}" for end in ("aggregator", "worker")]
        + [f"Service {world.federation('run-1').name}"]
    )
    until(lambda: world.names("jobs") == [f"{kept}-aggregator", f"{kept}-worker"], "two Jobs are left")
    until(lambda: world.names("services") == [kept], "one Service is left")
    assert cleanup("run-1") == []
