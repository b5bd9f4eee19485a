"""`federate` from an experiment to a run's folder: as processes, and as pods of the fake cluster."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from facts import failing, refusing, tells
from fake_cluster import FakeCluster
from forked import Popen
from kubernetes import client, config
from run_processes import ENVIRONMENT, WAIT_S, alive, children, fedloom, final, scores, until
from s3_support import S3Server
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from fedloom import experiment as experiments
from fedloom.cli.main import app
from fedloom.cluster import federations
from fedloom.cluster.api import Api
from fedloom.cluster.federate import federate
from fedloom.cluster.manifests import identity
from fedloom.cluster.settings import ClusterSettings
from fedloom.engine import run_data
from fedloom.errors import (
    DataError,
    ExperimentError,
    FedloomError,
    InterruptedRun,
    QuorumError,
    RefusedError,
    StorageError,
    WorkerLostError,
)
from fedloom.experiment import Experiment
from fedloom.storage import open_store

pytestmark = pytest.mark.cluster

SETTINGS: dict[str, Any] = {"image": "fedloom:1", "storage_secret": "store", "retries": 0}

LAUNCH = """
import sys
from pathlib import Path
from fedloom import experiment
from fedloom.cluster.federate import federate
from fedloom.cluster.settings import ClusterSettings
file, partition, out, storage, settings, run_id = sys.argv[1:]
federate(experiment.load_experiment(file, [f"storage={storage}"]), Path(partition), Path(out), backend="kubernetes",
         cluster=ClusterSettings.from_json(settings), run_id=run_id)
"""


@dataclass
class Place:
    """Experiment, partition, store and cluster of a federation."""

    folder: Path
    file: Path
    partition: Path
    storage: str
    cluster: FakeCluster
    said: list[str] = field(default_factory=list)

    def experiment(self, *overrides: str) -> Experiment:
        return experiments.load_experiment(self.file, [f"storage={self.storage}", *overrides])

    def federate(self, *overrides: str, run_id: str = "run", out: str = "out", **changes: Any) -> Path:
        settings = ClusterSettings(**{**SETTINGS, **changes})
        federate(
            self.experiment(*overrides), self.partition, self.folder / out, backend="kubernetes", cluster=settings,
            run_id=run_id, say=self.said.append,
        )  # fmt: skip
        return self.folder / out

    def program(self, text: str) -> None:
        """Replace ``fedloom`` in the pods by a few lines of shell."""
        path = self.folder / "bin" / "fedloom"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        self.cluster.kubelet.environment |= {"PATH": f"{path.parent}:/usr/bin:/bin"}  # type: ignore[operator]

    def nothing_left(self) -> bool:
        return not any(self.cluster.objects(plural) for plural in ("jobs", "services", "pods"))

    def nothing_was_created(self) -> bool:
        return not any(verb == "create" for verb, _ in self.cluster.api.requests)


@pytest.fixture(scope="module")
def partition(small_run: tuple[Path, Path]) -> Path:
    """Return the partition of the small experiment, created on this machine."""
    return run_data.make_partition(experiments.load_experiment(small_run[0])).folder


@pytest.fixture
def place(
    small_run: tuple[Path, Path], partition: Path, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    with FakeCluster(tmp_path / "cluster", images={"fedloom:1": []}) as cluster:
        keys = {"AWS_ACCESS_KEY_ID": s3_server.access_key, "AWS_SECRET_ACCESS_KEY": s3_server.secret_key}
        cluster.add_secret("store", keys)
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield Place(tmp_path, small_run[0], partition, f"s3://{s3_server.new_bucket()}/team", cluster)


@pytest.mark.slow
def test_a_run_is_completed_after_its_launcher_is_killed(place: Place, small_run: tuple[Path, Path]) -> None:
    changes: dict[str, Any] = {"orphan_after_s": 10.0, "clients_per_worker": 10}
    place.cluster.add_secret("tracker", {"FEDLOOM_TRACK": "csv"})
    changes["aggregator"] = {"env": {"FEDLOOM_TRACK": "csv tensorboard"}, "env_secrets": ("tracker",)}
    settings = json.dumps({**SETTINGS, **changes})
    arguments = [place.file, place.partition, place.folder / "first", place.storage, settings, "run"]
    command = [sys.executable, "-c", LAUNCH, *map(str, arguments)]
    place.cluster.node.capacity["cpu"] = "600m"  # room for the aggregator alone
    with Popen(command, env={**os.environ, **ENVIRONMENT}) as launcher:
        until(lambda: len(place.cluster.objects("jobs")) == 2, "two Jobs")
        launcher.kill()
    # Without a launcher the aggregator ends by itself, with 8, and is not restarted.
    until(lambda: ended(place), "the orphan's end")
    (pod,) = [pod for pod in place.cluster.pods() if "-aggregator-" in pod["metadata"]["name"]]
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 8
    place.cluster.node.capacity["cpu"] = "64"
    out = place.federate(**changes)
    assert any("attempt 2" in line for line in place.said)
    assert scores(out) == scores(small_run[1])
    assert place.cluster.api.requests.count(("create", "jobs")) == 4  # two, and two
    until(place.nothing_left, "the end of all objects")
    assert any(line.startswith("after round 4: pooled test accuracy seen") for line in place.said)
    logs = [path.name for path in (out / "logs").iterdir()]
    assert any("-aggregator-" in name for name in logs)
    assert {"report.html", "clients.csv", "journal.jsonl", "checkpoints", "experiment.yaml"} <= {
        path.name for path in out.iterdir()
    }
    assert not {"states", "blobs", "published"} & {path.name for path in out.iterdir()}
    # The environment named the aggregator's trackers; their files are published with the run.
    with (out / "tracking.csv").open(newline="") as file:
        written = [int(row["round"]) for row in csv.DictReader(file) if row["name"] == "train/loss"]
    seen = EventAccumulator(str(out / "tensorboard")).Reload()
    assert written == [event.step for event in seen.Scalars("train/loss")] == [1, 2, 3, 4]
    # The launcher was killed after the end, before it could report it: the run exists, nothing restarts.
    name = f"fl-{identity('run', 'federate')}"
    metadata = {"name": name, "namespace": place.cluster.namespace, "labels": {"app.kubernetes.io/instance": name}}
    spec = {"selector": {"a": "b"}, "ports": [{"port": 7733}]}
    Api().create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})  # not created yet
    place.cluster.api.requests.clear()
    again = place.federate(out="again", **changes)
    assert place.nothing_was_created()
    assert place.nothing_left()
    assert (again / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    # Another experiment under the same run id and task would mix two runs in one place.
    with pytest.raises(ExperimentError, match="another experiment"):
        place.federate("seed=6", out="other", **changes)


@pytest.mark.slow
def test_secure_sums_of_pods_equal_those_of_one_process(place: Place, small_run: tuple[Path, Path]) -> None:
    """No client is lost, and the aggregator's pod never has the answer of a single client; integers have equal sums."""
    keys = {
        "algorithm": "{name: fedavg, local: {epochs: 1, batch_size: 16, lr: 0.02}}",
        "federation.secure_aggregation": "{bits: 32}",
    }
    overrides = [f"{key}={value}" for key, value in keys.items()]
    unreported = {"env": {"FEDLOOM_REPORT": "0"}}  # it takes longer than the rounds
    out = place.federate(*overrides, clients_per_worker=10, aggregator=unreported)
    alone = place.folder / "alone"
    settings = [word for override in overrides for word in ("--set", override)]
    fedloom("run", small_run[0], "--out", alone, "--partition", place.partition, *settings)
    assert final(out) == final(alone)
    assert scores(out) == scores(alone)
    journal = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    trained = [line for line in journal if line["outcome"] == "done"]  # two unseen clients are too few to be measured
    assert not any(talk["lost"] for line in trained for talk in line["conversations"])
    assert all("SumSession" in line["phases"] for line in trained)
    until(place.nothing_left, "the end of all objects")


def ended(place: Place) -> bool:
    jobs = [job for job in place.cluster.objects("jobs") if job["metadata"]["name"].endswith("-aggregator")]
    return bool(jobs and jobs[0].get("status", {}).get("conditions"))


BEFORE = [
    (["storage=runs"], {}, ExperimentError, "storage is runs"),
    ([], {"image": None}, ExperimentError, "cluster.image is not set"),
    ([], {"storage_secret": None}, ExperimentError, "cluster.storage_secret is not set"),
    (["storage=pvc://none/x"], {"storage_secret": None}, StorageError, "pvc://none/x"),  # this machine mounts no claim
    (["runtime.device=cuda"], {}, ExperimentError, "cluster.gpu is not set"),
    ([], {"gpu": {"count": 1}}, ExperimentError, "cluster.gpu asks for a GPU"),
    ([], {"worker": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, ExperimentError, "nvidia.com/mig-1g.10gb"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "changes", "kind", "said"), BEFORE)
def test_invalid_federations_are_rejected_before_anything_is_created(
    place: Place, overrides: list[str], changes: dict[str, Any], kind: type[FedloomError], said: str
) -> None:
    with pytest.raises(kind) as error:
        place.federate(*overrides, **changes)
    assert said in str(error.value)
    assert place.cluster.api.requests == []


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_worker_that_does_not_see_its_gpu_ends_the_federation_with_the_reason(place: Place) -> None:
    """The node allocates parts of a GPU that its pods cannot use; nothing is retried."""
    place.cluster.node.capacity["nvidia.com/mig-1g.10gb"] = "2"
    gpu = {"gpu": {"resource": "nvidia.com/mig-1g.10gb"}, "workers": 1, "retries": 2}
    with pytest.raises(ExperimentError) as error:
        place.federate("runtime.device=cuda", **gpu)
    assert tells(str(error.value), "-worker-", "code 2", "runtime.device is cuda")
    assert sum("-worker-" in line and "ended with code 2" in line for line in place.said) == 1


def test_an_unusable_store_is_reported_before_anything_is_created(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = place.storage
    place.storage = "s3://no-such-bucket-here/x"
    with pytest.raises(FedloomError, match="no-such-bucket-here"):
        place.federate()
    place.storage = bucket
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(RefusedError, match="AWS_SECRET_ACCESS_KEY"):
        place.federate()
    assert place.cluster.api.requests == []


def test_a_launcher_may_use_another_store_address_than_pods(place: Place, s3_server: S3Server) -> None:
    port = s3_server.endpoint.rpartition(":")[2]
    for_pods = f"http://localhost:{port}"
    place.program(f'test $1 = worker && exec sleep 60; test "$FEDLOOM_S3_ENDPOINT" = {for_pods} || exit 2; exit 0')
    with refusing(DataError, "ended", "summary.json"):  # it has reached the store, and the end
        place.federate(s3_endpoint=for_pods)
    with refusing(DataError, "ended", "summary.json"):
        place.federate(s3_endpoint=for_pods, run_id="other")
    place.program('test $1 = worker && exec sleep 60; test "$FEDLOOM_S3_ENDPOINT" = http://127.0.0.1:9 || exit 2')
    with refusing(DataError, "ended", "summary.json"):  # a place that the launcher cannot reach at all
        place.federate(s3_endpoint="http://127.0.0.1:9", run_id="third")


@pytest.mark.parametrize(
    ("variable", "setting", "named", "unnamed"),
    [
        ("http://127.0.0.1:9", None, "set FEDLOOM_S3_ENDPOINT", "cluster.s3_endpoint"),
        ("http://127.0.0.1:9", "http://elsewhere:8333", "set FEDLOOM_S3_ENDPOINT", "cluster.s3_endpoint"),
        (None, "http://127.0.0.1:9", "set cluster.s3_endpoint", "set FEDLOOM_S3_ENDPOINT"),
    ],
)
def test_the_source_of_a_wrong_endpoint_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, variable: str | None, setting: str | None, named: str, unnamed: str
) -> None:
    monkeypatch.delenv("FEDLOOM_S3_ENDPOINT")
    if variable is not None:
        monkeypatch.setenv("FEDLOOM_S3_ENDPOINT", variable)
    with pytest.raises(FedloomError) as error:
        place.federate(s3_endpoint=setting)
    assert named in str(error.value)
    assert unnamed not in str(error.value)


def test_an_endpoint_that_is_not_a_url_is_reported_with_its_setting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDLOOM_S3_ENDPOINT")
    with pytest.raises(ExperimentError, match=r"^cluster\.s3_endpoint\b") as error:
        place.federate(s3_endpoint="elsewhere")
    assert error.value.found == "elsewhere"


def test_permissions_are_checked_before_the_partition_is_published(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(place.cluster.kubeconfig_for([])))
    with pytest.raises(RefusedError, match=r"do not allow: get services.*create jobs(.|\n)*rbac\.yaml"):
        place.federate()
    assert place.nothing_was_created()
    assert list(open_store(place.storage).entries()) == []


def test_orphan_after_s_is_rejected_without_permission_to_forward_ports(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [{"apiGroups": ["", "batch"], "resources": ["services", "jobs", "pods", "pods/log"], "verbs": ["*"]}]
    monkeypatch.setenv("KUBECONFIG", str(place.cluster.kubeconfig_for(rules)))
    with pytest.raises(RefusedError, match=r"cluster\.orphan_after_s") as refused:
        place.federate(orphan_after_s=5)
    assert tells(str(refused.value), "cluster.orphan_after_s", 5, "pods/portforward", "rbac.yaml")
    assert place.nothing_was_created()


def test_a_run_without_a_report_gives_the_command_to_create_one(place: Place) -> None:
    """Cover an aggregator that runs the worker's image, which has no matplotlib."""
    run = open_store(place.storage).under(f"runs/{place.experiment().name}-{identity('run', 'federate')}")
    run.write("experiment.yaml", place.experiment().resolved_yaml().encode())
    run.write("summary.json", b"{}")
    out = place.federate()
    assert any("has no report" in line and f"fedloom report {out}" in line for line in place.said)
    run.write("report.html", b"page")
    place.said.clear()
    place.federate(out="again")
    assert not any("has no report" in line for line in place.said)


def test_an_aggregator_that_exits_without_a_result_is_an_error(place: Place) -> None:
    place.program("test $1 = worker && exec sleep 60; exit 0")
    with refusing(DataError, "ended", "summary.json"):
        place.federate()
    until(place.nothing_left, "the end of all objects")


def test_a_failure_leaves_logs_and_no_objects(place: Place) -> None:
    place.program("test $1 = worker && exec sleep 60; echo 'model: it is so'; exit 2")
    with pytest.raises(ExperimentError, match=r"code 2 .EXPERIMENT.: model: it is so"):
        place.federate()
    (log,) = (place.folder / "out" / "logs").iterdir()
    assert "model: it is so" in log.read_text()
    until(place.nothing_left, "the end of all objects")


@pytest.mark.parametrize("delete", [False, True])
def test_a_stopped_launcher_leaves_an_adoptable_federation_by_default(place: Place, delete: bool) -> None:
    place.program("exec sleep 60")

    def stop() -> None:
        until(lambda: ("watch", "jobs") in place.cluster.api.requests, "a watch")
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop).start()
    with pytest.raises(InterruptedRun) as error:
        place.federate(delete_on_interrupt=delete)
    assert signal.getsignal(signal.SIGTERM) == before
    if delete:
        until(place.nothing_left, "the end of all objects")
    else:
        assert len(place.cluster.objects("jobs")) == 2
        assert "run id run" in str(error.value)
        with pytest.raises(ExperimentError, match="with another specification"):
            place.federate(workers=3)
        assert len(place.cluster.objects("jobs")) == 2  # the running objects were not deleted


# The commands


def command(*arguments: object, code: int = 0) -> str:
    """Run ``fedloom cluster``; return its output (its JSON, without progress), or the message of its failure."""
    done = CliRunner().invoke(app, ["cluster", *map(str, arguments)])
    if isinstance(done.exception, FedloomError):
        assert int(done.exception.exit_code) == code
        return str(done.exception)
    assert done.exit_code == code, done.output
    return done.stdout if "--json" in arguments else done.output


@pytest.fixture
def settings_file(place: Place) -> Path:
    path = place.folder / "cluster.yaml"
    path.write_text(json.dumps(SETTINGS))
    return path


def test_a_federation_is_submitted_inspected_and_stopped(place: Place, settings_file: Path) -> None:
    place.program('echo "$1 says hello"; exec sleep 60')
    submit = ["submit", place.file, "--cluster", settings_file, "--set", f"storage={place.storage}"]
    submit += ["--partition", place.partition]
    said = command(*submit)
    name = said[said.index("fl-") :][:15]
    until(lambda: "2 of 2 workers run" in command("status", name), "pods")
    requests = place.cluster.api.requests
    assert requests.count(("create", "jobs")) == 2
    command(*submit)  # finds it
    assert requests.count(("create", "jobs")) == 2
    run_id = said.rpartition("run id ")[2].partition(",")[0]
    assert command("status", run_id).splitlines()[0] == command("status").splitlines()[0]
    assert f"run {place.storage}/runs/small-" in command("status", name)
    (told,) = json.loads(command("status", "--json"))
    assert (told["name"], told["workers"], told["run_id"]) == (name, 2, run_id)
    until(lambda: command("logs", name) == "aggregator says hello\n", "a log")
    until(lambda: command("logs", run_id, "--worker", 1) == "worker says hello\n", "a worker's log")
    assert "no pod of its worker 2 of 2" in command("logs", name, "--worker", 2, code=2)
    assert name in command("status", "nobody", code=2)  # the message lists existing federations
    told = json.loads(command("stop", name, "--json"))
    assert told["run"].startswith(f"{place.storage}/runs/small-")
    until(place.nothing_left, "the end of all objects")
    assert "no federation" in command("status")
    assert name in command("stop", name, code=2)
    assert list(open_store(place.storage).entries("runs/"))  # its experiment: submitted again, the run continues


def test_stopping_a_federation_frees_a_namespace_that_is_being_deleted(place: Place, settings_file: Path) -> None:
    """Free a namespace (docs/cluster.md): otherwise failed pods of workers wait for replacements for ever."""
    settings_file.write_text(json.dumps(SETTINGS | {"retries": 1}))
    place.program("exec sleep 60")
    submit = ["submit", place.file, "--cluster", settings_file, "--set", f"storage={place.storage}"]
    said = command(*submit, "--partition", place.partition)
    name = said[said.index("fl-") :][:15]
    until(lambda: "2 of 2 workers run" in command("status", name), "pods")
    core = client.CoreV1Api(config.new_client_from_config(str(place.cluster.kubeconfig)))
    core.delete_namespace(place.cluster.namespace)
    worker = f"app.kubernetes.io/instance={name},app.kubernetes.io/component=worker"
    held = lambda: [pod["status"]["phase"] for pod in place.cluster.pods()]  # noqa: E731
    until(lambda: held() == ["Failed", "Failed"], "both workers are held")
    assert len(place.cluster.pods(worker)) == 2
    command("stop", name)
    until(lambda: not place.cluster.objects("namespaces"), "the end of the namespace")
    assert not place.cluster.objects("jobs")


def test_a_log_is_followed_to_its_end(place: Place, settings_file: Path) -> None:
    place.program(f"echo one; until test -e {place.folder}/go; do sleep 0.05; done; echo two; test $1 = aggregator")
    said = command(
        "submit", place.file, "--cluster", settings_file, "--set", f"storage={place.storage}",
        "--partition", place.partition, "--run-id", "mine",
    )  # fmt: skip
    assert "run id mine" in said
    api = Api()
    lines = federations.federation_logs(api, federations.find_federation(api, "mine"), followed=True)
    assert next(lines) == "one"
    (place.folder / "go").touch()
    assert list(lines) == ["two"]
    until(lambda: federations.find_federation(api, "mine").state == "finished", "its end")


def test_status_gives_the_reason_if_a_federation_does_not_start_or_has_failed(
    place: Place, settings_file: Path
) -> None:
    submit = ["submit", place.file, "--set", f"storage={place.storage}", "--partition", place.partition]
    place.program(f"{failing(ExperimentError, 'the reason')}; exit 2")
    command(*submit, "--cluster", settings_file, "--run-id", "bad")
    until(lambda: "failed" in command("status", "bad").splitlines()[0], "its end")
    assert "the reason" in command("status", "bad")
    settings_file.write_text(json.dumps({**SETTINGS, "image": "none:1"}))
    command(*submit, "--cluster", settings_file, "--run-id", "no-image")
    until(lambda: "none:1" in command("status", "no-image"), "a reason")
    assert "starting" in command("status", "no-image")


DENIED = 'services is forbidden: User "u" cannot get resource "services": RBAC: role "launcher" not found'


@pytest.mark.parametrize(
    ("changes", "pods", "reason"),
    [
        ({"worker_image": "cuda:2"}, None, "cuda:2"),
        ({"worker": {"requests": {"cpu": "1000"}}}, None, "Insufficient cpu"),
        ({}, "1", "exceeded quota: few"),
    ],
    ids=["image", "node", "quota"],
)
def test_status_and_logs_give_the_reason_if_workers_do_not_start(
    place: Place, settings_file: Path, changes: dict[str, Any], pods: str | None, reason: str
) -> None:
    place.program("exec sleep 60")
    if pods is not None:
        place.cluster.add_quota("few", pods=pods)
    settings_file.write_text(json.dumps({**SETTINGS, **changes}))
    submit = ["submit", place.file, "--cluster", settings_file, "--set", f"storage={place.storage}"]
    command(*submit, "--partition", place.partition, "--run-id", "mine")
    until(lambda: "running, 0 of 2 workers run" in command("status", "mine"), "an aggregator without workers")
    until(lambda: reason in command("status", "mine"), "a reason")
    assert reason in command("logs", "mine", "--worker", 0, code=2)


def test_a_launcher_that_is_refused_for_a_moment_while_it_adopts_removes_nothing(
    place: Place, settings_file: Path
) -> None:
    place.program("exec sleep 60")
    submit = ["submit", place.file, "--cluster", settings_file, "--set", f"storage={place.storage}"]
    submit += ["--partition", place.partition]
    command(*submit)
    before = {job["metadata"]["uid"] for job in place.cluster.objects("jobs")}
    place.cluster.fail("get", "services", 403, "Forbidden", DENIED)
    command(*submit)
    place.cluster.fail("get", "services", 422, "Invalid", "no retry helps")
    assert "no retry helps" in command(*submit, code=2)
    assert {job["metadata"]["uid"] for job in place.cluster.objects("jobs")} == before
    assert ("delete", "jobs") not in place.cluster.api.requests


def test_a_launcher_with_an_error_of_its_own_leaves_the_federation_running(place: Place) -> None:
    place.program("exec sleep 60")
    requests = place.cluster.api.requests

    def fail() -> None:
        until(lambda: ("watch", "jobs") in requests, "a watch")
        place.cluster.fail("list", "jobs", 400, "BadRequest", "no retry helps")

    threading.Thread(target=fail).start()
    with pytest.raises(ExperimentError, match="no retry helps"):
        place.federate()
    assert len(place.cluster.objects("jobs")) == 2
    assert ("delete", "jobs") not in requests
    assert any("the federation continues" in line for line in place.said)


def test_a_federation_that_finished_while_its_launcher_could_not_look_is_fetched(place: Place) -> None:
    """Its objects may have been removed since, after ``ttl_s``."""
    place.program("exec sleep 60")
    run = open_store(place.storage).under(f"runs/{place.experiment().name}-{identity('run', 'federate')}")

    def finish() -> None:
        until(lambda: ("watch", "jobs") in place.cluster.api.requests, "a watch")
        run.write("summary.json", b"{}")
        Api().delete("Job", f"fl-{identity('run', 'federate')}-aggregator")

    threading.Thread(target=finish).start()
    out = place.federate()
    assert (out / "summary.json").read_bytes() == b"{}"


def test_logs_of_failed_pods_are_fetched_with_a_federation_that_has_ended(place: Place, settings_file: Path) -> None:
    first = place.folder / "first"
    place.program(
        f"test $1 = worker && {{ echo no memory; mkdir {first} && exit 7; exec sleep 60; }}\n"
        f"until test -e {place.folder}/go; do sleep 0.05; done; echo done"
    )
    settings_file.write_text(json.dumps({**SETTINGS, "workers": 1, "retries": 1}))
    submit = ["submit", place.file, "--cluster", settings_file, "--set", f"storage={place.storage}"]
    submit += ["--partition", place.partition, "--run-id", "mine"]
    command(*submit)
    workers = lambda: [pod for pod in place.cluster.pods() if "-worker-" in pod["metadata"]["name"]]  # noqa: E731
    until(lambda: len(workers()) == 2, "a second worker")
    run = open_store(place.storage).under(f"runs/{place.experiment().name}-{identity('mine', 'federate')}")
    run.write("summary.json", b"{}")
    (place.folder / "go").touch()
    until(lambda: "finished" in command("status", "mine"), "its end")
    failed, *_ = [pod["metadata"]["name"] for pod in workers()]
    command(*submit, "--out", place.folder / "out")
    logs = {path.stem: path.read_text() for path in (place.folder / "out" / "logs").iterdir()}
    assert logs[failed] == "no memory\n"
    assert "done\n" in logs.values()
    until(place.nothing_left, "the end of all objects")


def test_submit_rejects_invalid_settings(place: Place, settings_file: Path) -> None:
    submit = ["submit", place.file, "--cluster", settings_file, "--partition", place.partition]
    assert tells(command(*submit, code=2), "storage", "s3://")
    settings_file.write_text(json.dumps({**SETTINGS, "orphan_after_s": 60}))
    assert "cluster.orphan_after_s" in command(*submit, "--set", f"storage={place.storage}", code=2)
    settings_file.write_text("image: [")
    assert "not YAML" in command(*submit, code=2)
    assert place.nothing_was_created()


def test_submit_waits_and_downloads_the_run(place: Place, settings_file: Path) -> None:
    submit = ["submit", place.file, "--cluster", settings_file, "--set", f"storage={place.storage}"]
    submit += ["--partition", place.partition, "--run-id", "mine", "--out", place.folder / "out"]
    place.program("test $1 = worker && exec sleep 60; exit 0")
    assert tells(command(*submit, code=3), "ended", "summary.json")
    run = open_store(place.storage).under(f"runs/{place.experiment().name}-{identity('mine', 'federate')}")
    run.write("summary.json", b"{}")
    command(*submit)
    assert (place.folder / "out" / "summary.json").read_text() == "{}"


# The backend local


ENDLESS = "federation.rounds=1000000"
"""Override for a run that does not end by itself, however fast the machine is."""


def locally(place: Place, *overrides: str, out: str = "out", **changes: Any) -> Path:
    experiment = experiments.load_experiment(place.file, overrides)
    settings = ClusterSettings(**changes)
    federate(
        experiment, place.partition, place.folder / out, backend="local", cluster=settings, run_id="run",
        say=place.said.append,
    )  # fmt: skip
    return place.folder / out


@pytest.fixture
def unforked(small_run: tuple[Path, Path], partition: Path, tmp_path: Path) -> Place:
    return Place(tmp_path, small_run[0], partition, "", None)  # type: ignore[arg-type]


@pytest.fixture
def here(unforked: Place, forks: None) -> Place:
    return unforked


def test_a_local_federation_equals_fedloom_run(
    here: Place, small_run: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_REPORT", "1")
    out = locally(here)
    assert scores(out) == scores(small_run[1])
    assert (out / "report.html").exists()
    assert any(line.startswith("after round 4: pooled test accuracy") for line in here.said)
    locally(here)  # a retried step continues from the existing run, here to the end at once


def test_a_local_federation_uses_no_store(here: Place, small_run: tuple[Path, Path]) -> None:
    """Two federations of one pipeline would share one place there: their folders are all called ``model``."""
    out = locally(here, "storage=s3://nobody-has-this/prefix", out="stored")
    assert scores(out) == scores(small_run[1])
    assert not (out / "published.json").exists()


def test_a_local_failure_keeps_the_class_and_message_of_the_runs_error(here: Place) -> None:
    with pytest.raises(FedloomError, match=r"nothing/partition\.json|found no partition|no partition") as error:
        federate(
            experiments.load_experiment(here.file), here.folder / "nothing", here.folder / "out", backend="local",
            cluster=ClusterSettings(), run_id="run", say=here.said.append,
        )  # fmt: skip
    assert isinstance(error.value, DataError)
    assert not str(error.value).startswith("error:")
    with pytest.raises(ExperimentError, match=r"backend .*local .*kubernetes .*cloud"):
        federate(
            experiments.load_experiment(here.file), here.partition, here.folder / "out", backend="cloud",
            cluster=ClusterSettings(), run_id="run",
        )  # fmt: skip


def test_deadline_of_a_local_federation(here: Place) -> None:
    with pytest.raises(QuorumError, match=r"cluster\.deadline_s"):
        locally(here, ENDLESS, deadline_s=1)
    assert children(os.getpid()) == [] or not any(_is_run(pid) for pid in children(os.getpid()))


def test_stopping_a_local_run_stops_its_process(here: Place) -> None:
    began: list[int] = []

    def stop() -> None:
        until(lambda: any(_is_run(pid) for pid in children(os.getpid())), "a run")
        began.extend(pid for pid in children(os.getpid()) if _is_run(pid))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(InterruptedRun):
        locally(here, ENDLESS)
    deadline = time.monotonic() + WAIT_S
    while any(alive(pid) for pid in began):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "kind", "facts"),
    [
        (signal.SIGKILL, QuorumError, ("memory", "tasks.federate.limits.memory", "runtime.workers")),
        (signal.SIGTERM, InterruptedRun, ()),
        (signal.SIGSEGV, WorkerLostError, ("signal 11",)),
    ],
)
def test_how_a_local_run_was_ended(
    unforked: Place, number: int, kind: type[FedloomError], facts: tuple[str, ...]
) -> None:
    """Only a person or the system asks a run to stop; the kernel kills one that takes too much memory.

    The signals arrive while a process starts, so it is started as usual.
    """

    def end() -> None:
        until(lambda: any(_is_run(pid) for pid in children(os.getpid())), "a run")
        for pid in children(os.getpid()):
            if _is_run(pid):
                os.kill(pid, number)

    threading.Thread(target=end).start()
    with pytest.raises(kind) as error:
        locally(unforked)
    assert tells(str(error.value), *facts)


def test_a_local_run_ends_after_its_launcher_is_killed(here: Place) -> None:
    code = "import sys; from pathlib import Path; from fedloom.cluster.local import run_locally; "
    code += "run_locally(*map(Path, sys.argv[1:]), say=print)"
    endless = yaml.safe_load(here.file.read_text())
    endless["federation"]["rounds"] = 1_000_000
    file = here.folder / "endless.yaml"
    file.write_text(yaml.safe_dump(endless))
    arguments = [file, here.partition, here.folder / "out"]
    with Popen([sys.executable, "-c", code, *map(str, arguments)], env=ENVIRONMENT) as launcher:
        runs = lambda: list(filter(_is_run, children(launcher.pid)))  # noqa: E731 - other children come and go
        until(runs, "a run")
        (run,) = runs()
        launcher.kill()
    until(lambda: not alive(run), "the end of the run")
    assert not (here.folder / "out" / "summary.json").exists()


def _is_run(pid: int) -> bool:
    try:
        return b"\0run\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
