"""Real runs as Katib's trials: the shell around their command, its collector, and its early stopping."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from facts import refusing
from fake_cluster import FakeCluster
from fake_cluster.kubelet import expand
from forked import run
from katib_stand_in import Metric, Suggestions, collected, refusals, trial_job, wrap
from s3_support import S3Server
from vowel_data import vowel_root

import fedloom
from fedloom.cluster.api import Api
from fedloom.cluster.settings import ClusterSettings
from fedloom.errors import ExperimentError
from fedloom.experiment.search_space import read_space
from fedloom.kubeflow.katib import plan_katib_search, search_objects, submit_search
from fedloom.storage import open_store

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "experiments" / "vowel.yaml"
RATES = {"algorithm.local.lr": {"choices": [0.01, 0.3]}}
SMALL = ("federation.rounds=3", "evaluation.every=1", "algorithm.personalize_steps=5")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return vowel_root(tmp_path / "data")


@pytest.fixture
def storage(root: Path, s3_server: S3Server) -> str:
    """Return a store with the partition of the trials."""
    url = f"s3://{s3_server.new_bucket()}/team"
    words = ["-m", "fedloom", "partition", str(FILE), "--set", f"data.root={root}", "--out", f"{url}/partitions/vowel"]
    done = run([sys.executable, *words], env={**os.environ, **s3_server.environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return url


def objects(storage: str, parameters: Mapping[str, Any], **settings: Any) -> list[dict[str, Any]]:
    cluster = ClusterSettings(image="fedloom:1", storage_secret="store")
    space = read_space({"parameters": dict(parameters), **settings})
    changes = (f"storage={storage}", *SMALL)
    partition = f"{storage}/partitions/vowel"
    return search_objects(plan_katib_search(FILE.read_text(), changes, space, cluster, partition))


class Container:
    """The container of a trial as a process: its mounts are folders, its environment is its own."""

    def __init__(self, job: Mapping[str, Any], file: Mapping[str, Any], folder: Path, server: S3Server) -> None:
        (spec,) = job["spec"]["template"]["spec"]["containers"]
        self.metrics = folder / "var/log/katib" / "metrics.log"
        self.work = folder / "work"
        for path in (self.metrics.parent, self.work, folder / "etc/fedloom"):
            path.mkdir(parents=True)
        (folder / "etc/fedloom" / "experiment.yaml").write_text(file["data"]["experiment.yaml"])

        def here(given: str) -> str:
            for path in ("/var/log/katib", "/etc/fedloom"):
                given = given.replace(path, f"{folder}{path}")
            return given

        values = {entry["name"]: entry["value"] for entry in spec["env"] if "value" in entry}
        beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": beside, "OMP_NUM_THREADS": "1", **{name: here(value) for name, value in values.items()}}
        environment |= {**server.environment, "HOME": str(self.work), "FEDLOOM_TELL_PARENT": str(folder / "told")}
        arguments = [expand(here(word), values) for word in spec["args"]]
        self.process = subprocess.Popen(
            [*spec["command"], *arguments], env=environment, cwd=self.work, stdout=subprocess.DEVNULL
        )

    @property
    def marks(self) -> list[str]:
        """Return the records of the shell, or of the collector, about the end."""
        return [path.read_text().strip() for path in self.metrics.parent.glob("*.pid")]

    def read(self) -> list[Metric]:
        """Return the metrics that the collector reads."""
        written = self.metrics.read_text() if self.metrics.exists() else ""
        return collected(written, ["validation_accuracy", "epsilon"])

    def stop_early(self) -> None:
        """Act like the collector when a stop rule holds: record it, and end the trial."""
        (self.metrics.parent / f"{self.process.pid}.pid").write_text("early-stopped")
        self.terminate()

    def terminate(self) -> None:
        """Terminate the shell's only child."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)


@pytest.mark.slow
def test_a_trials_command_reports_each_round_and_can_be_stopped_early(
    storage: str, tmp_path: Path, s3_server: S3Server
) -> None:
    hidden = {"model.hidden": {"choices": [[16], [8, 8]]}, "algorithm.weighting": {"choices": ["uniform"]}}
    file, experiment = objects(storage, {**RATES, **hidden}, sampler="grid", early_stopping="median")
    spec = experiment["spec"]
    values = {"algorithm.local.lr": "0.3", "model.hidden": "[8, 8]", "algorithm.weighting": "uniform"}
    jobs = {name: trial_job(spec, name, values) for name in ("vowel-a", "vowel-b")}
    for job in jobs.values():
        wrap(job, spec, stops=True)
    whole = Container(jobs["vowel-a"], file, tmp_path / "a", s3_server)
    assert whole.process.wait(120) == 0
    assert whole.marks == ["completed"]
    trained = fedloom.load(whole.work / "runs" / "vowel-a")
    assert list(trained.experiment.model.hidden) == [8, 8]
    assert trained.experiment.algorithm.settings.local.lr == 0.3
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    values_by_round = [line["validation_pooled"] for line in lines if line["round"] > 0]
    assert [metric.value for metric in whole.read()] == values_by_round
    assert len(values_by_round) == 3
    published = open_store(f"{storage}/runs/vowel-a", s3_server.environment)
    assert "summary.json" in {entry.name for entry in published.entries()}

    long = trial_job({**spec, "trialTemplate": _longer(spec["trialTemplate"])}, "vowel-b", values)
    wrap(long, spec, stops=True)
    stopped = Container(long, file, tmp_path / "b", s3_server)
    until(lambda: len(stopped.read()) >= 3, stopped)
    stopped.stop_early()
    assert stopped.process.wait(60) == 0  # the collector's record lets the pod succeed
    assert stopped.marks == ["completed"]
    assert [metric.value for metric in stopped.read()][:3] == values_by_round
    unfinished = fedloom.load(stopped.work / "runs" / "vowel-b")
    assert not unfinished.finished
    assert max((unfinished.folder / "checkpoints").iterdir()).name >= "round-000003"
    failed = trial_job({**spec, "trialTemplate": _longer(spec["trialTemplate"])}, "vowel-c", values)
    wrap(failed, spec, stops=True)
    killed = Container(failed, file, tmp_path / "c", s3_server)
    until(lambda: killed.read(), killed)
    killed.terminate()
    assert killed.process.wait(60) == 1  # without the record it has failed
    assert killed.marks == []


def until(condition: Callable[[], object], container: Container) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert container.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _longer(template: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(template).replace("federation.rounds=3", "federation.rounds=3000")
    return dict(json.loads(text))


@pytest.mark.cluster
def test_a_search_on_katib_equals_one_without_a_cluster(
    storage: str, root: Path, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = objects(storage, RATES, sampler="grid", seed=4)
    secret = {key: s3_server.environment[key] for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    environment = {"FEDLOOM_S3_ENDPOINT": s3_server.endpoint}
    with FakeCluster(tmp_path / "cluster", images={"fedloom:1": []}, environment=environment) as cluster:
        cluster.add_secret("store", secret)
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        api = Api(patience_s=2.0)
        cluster.fail("create", "experiments", 404, "NotFound", "the server could not find the requested resource")
        with refusing(ExperimentError, "Katib"):
            submit_search(api, made)
        assert cluster.objects("configmaps") == []
        submit_search(api, made)
        with refusing(ExperimentError, "vowel"):
            submit_search(api, made)
        (held,) = cluster.objects("experiments")
        assert refusals(held) == []
        katib, found = Suggestions(held["spec"]), {}
        for number in range(held["spec"]["maxTrialCount"]):
            values, name = katib.ask(), f"vowel-{number}"
            job = trial_job(held["spec"], name, values)
            wrap(job, held["spec"], stops=False)
            assert api.create(job) is not None
            found[values["algorithm.local.lr"]] = _metrics(cluster, name)
    space = {"parameters": RATES, "sampler": "grid", "seed": 4}
    keys = {"data__root": str(root), "federation__rounds": 3, "evaluation__every": 1, "algorithm__personalize_steps": 5}
    ours = fedloom.search(FILE, space, out=tmp_path / "ours", progress=False, **keys)
    same = {
        f"{trial['parameters']['algorithm.local.lr']}": [*trial["validation_by_round"].values()]
        for trial in ours.summary["trials"]
    }
    assert found == same
    best = max(found, key=lambda rate: found[rate][-1])  # the choice of Katib's strategy "latest"
    assert float(best) == ours.parameters["algorithm.local.lr"]


def _metrics(cluster: FakeCluster, name: str) -> list[float]:
    """Wait for the end of a trial's Job, and return the metrics that the collector reads in its pod."""
    deadline = time.monotonic() + 120
    while True:
        (job,) = (job for job in cluster.objects("jobs") if job["metadata"]["name"] == name)
        ends = {condition["type"] for condition in job["status"].get("conditions", ()) if condition["status"] == "True"}
        if "Complete" in ends:
            break
        assert "Failed" not in ends
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (pod,) = (pod for pod in cluster.pods() if pod["metadata"]["labels"].get("job-name") == name)
    folder = cluster.kubelet.run_of(pod["metadata"]["name"]).folder / "volumes" / "metrics-volume"
    assert [path.read_text().strip() for path in folder.glob("*.pid")] == ["completed"]
    return [metric.value for metric in collected((folder / "metrics.log").read_text(), ["validation_accuracy"])]
