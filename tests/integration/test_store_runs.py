"""Aggregators and workers that share only a store, like pods: real processes, a real S3 server, real data."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from ports import free_port
from run_processes import ended, experiment, fedloom, final, losses, rounds, scores, started, until
from s3_support import S3Server

from fedloom import load, personalize
from fedloom.cli.run import run_command as command
from fedloom.data.manifest import Manifest
from fedloom.errors import ExperimentError
from fedloom.federation.activity import Activity, LastEvaluation
from fedloom.runs.folder import RunFolder
from fedloom.runs.published import Publisher
from fedloom.serving.serve import DurableRounds
from fedloom.storage import open_store
from fedloom.transport.control import follow

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.group("store")]

STATEFUL = {
    "algorithm": {"name": "pfedbayes", "steps": 6, "batch_size": 16},
    "federation": {"rounds": 6, "clients_per_round": 6, "checkpoint_every_s": 0, "deadline_s": 200},
    "evaluation": {"every": 3, "cohort": 10},
}


@dataclass(frozen=True)
class Place:
    """A bucket with a published partition and an experiment file, and the experiment's undisturbed run."""

    url: str
    partition: str
    experiment: str
    environment: dict[str, str]
    worker_environment: dict[str, str]
    undisturbed: Path
    manifest: Manifest

    def store(self, below: str = "") -> Any:
        return open_store(f"{self.url}/{below}" if below else self.url, self.environment)

    def aggregator(
        self, run: str, folder: Path, port: int, *more: object, code: int | None = None
    ) -> tuple[object, ...]:
        at = ("aggregator", self.experiment, "--partition", self.partition, "--out", folder, "--resume")
        return (*at, "--publish", f"{self.url}/runs/{run}", "--listen", f"127.0.0.1:{port}", *more)

    def worker(self, run: str, name: str, port: int, *more: object) -> tuple[object, ...]:
        at = ("worker", "--aggregator", f"127.0.0.1:{port}", "--name", name, "--partition", self.partition)
        return (*at, "--states", f"{self.url}/runs/{run}/states", "--reconnect", 120, *more)


def made(s3_server: S3Server, tmp: Path, root: Path, **sections: Any) -> Place:
    """Run an experiment in one process, and put everything needed to repeat it into a new bucket."""
    path = experiment(tmp, root, **sections)
    fedloom("run", path, "--out", tmp / "run")
    url = f"s3://{s3_server.new_bucket()}/team"
    store = open_store(url, s3_server.environment)
    store.upload("experiments/small.yaml", path)
    manifest = Manifest.from_json((tmp / "run" / "partition.json").read_text())
    partition = f"{url}/partitions/{manifest.fingerprint}"
    output = fedloom(
        "partition", f"{url}/experiments/small.yaml", "--out", partition, environment=s3_server.environment
    )
    assert f"18 seen and 2 unseen clients in {partition}" in output
    return Place(
        url,
        partition,
        f"{url}/experiments/small.yaml",
        s3_server.environment,
        s3_server.worker_environment,
        tmp / "run",
        manifest,
    )


@pytest.fixture(scope="module")
def stateful(s3_server: S3Server, fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return made(s3_server, tmp_path_factory.mktemp("stateful"), fresh_root, **STATEFUL)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def elsewhere(stateful: Place, tmp_path: Path) -> Any:
    """Return environments of processes that share no folder: each has its own home and temporary folder."""

    def make(name: str) -> dict[str, str]:
        home = tmp_path / name
        (home / "tmp").mkdir(parents=True)
        own = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "FEDLOOM_DATA": str(home / "nothing")}
        return {**stateful.environment, **own}

    return make


def fetched(home: Path) -> set[str]:
    """Return the clients whose shards a worker has fetched into its temporary folder."""
    return {path.stem for path in (home / "tmp").glob("fedloom-shards-*/*/shards/*.safetensors")}


@contextlib.contextmanager
def watched(port: int) -> Iterator[list[Activity]]:
    """Follow a run in a thread; yield the received statuses."""
    reported: list[Activity] = []

    def look() -> None:
        for progress in follow(f"127.0.0.1:{port}", connect_s=120):
            reported.append(progress)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield reported
    thread.join(60)
    assert not thread.is_alive()


def test_a_federation_that_shares_only_the_store(stateful: Place, elsewhere: Any, tmp_path: Path, port: int) -> None:
    """Each worker serves only its block, and fetches no other shard; its credentials allow exactly that."""
    ids = [entry.id for entry in stateful.manifest.clients]
    run = tmp_path / "a" / "run"
    w0, w1 = ({**elsewhere(name), **stateful.worker_environment} for name in ("w0", "w1"))
    with (
        started(*stateful.aggregator("whole", run, port), "--report", environment=elsewhere("a")) as aggregator,
        started(*stateful.worker("whole", "w0", port, "--clients", "0/2"), environment=w0) as first,
        started(*stateful.worker("whole", "w1", port, "--clients", "1/2"), environment=w1) as second,
        watched(port) as reported,
    ):
        until(lambda: rounds(run) >= 1, "the first round")
        assert fetched(tmp_path / "w0") == set(ids[:10])
        assert fetched(tmp_path / "w1") == set(ids[10:])
        assert not fetched(tmp_path / "a")
        for process in (aggregator, first, second):
            ended(process, 0)
    assert final(run) == final(stateful.undisturbed)
    assert scores(run) == scores(stateful.undisturbed)
    assert losses(run) == []
    # Statuses during the run.
    assert (reported[-1].phase, reported[-1].round, reported[-1].rounds) == ("finished", 6, 6)
    assert reported[-1].measured == LastEvaluation.from_line([*RunFolder(run).lines("metrics.jsonl")][-1])
    # The published files equal those of the run's folder.
    store = stateful.store("runs/whole")
    for name in ("summary.json", "report.html", "clients.csv", "metrics.jsonl", "checkpoints/round-000006.safetensors"):
        assert store.read(name) == (run / name).read_bytes()
    assert json.loads(store.read("logs/aggregator.jsonl").splitlines()[0])["level"] == "INFO"
    # The clients' states were never with the aggregator, and are found in the published run.
    assert not (run / "states").exists()
    fedloom(
        "evaluate", run, "--partition", stateful.partition, "--out", tmp_path / "e.json", environment=elsewhere("e")
    )
    assert json.loads((tmp_path / "e.json").read_text())["seen"] == scores(run)["seen"]


def test_an_aggregator_that_another_has_overtaken_says_so_and_takes_the_run_up(
    stateful: Place, elsewhere: Any, tmp_path: Path, port: int
) -> None:
    """The first one lives on, and its workers remove the states that the second one would start from."""
    store, late = stateful.store("runs/overtaken"), tmp_path / "b" / "run"
    other = free_port()
    with (
        started(*stateful.aggregator("overtaken", tmp_path / "a" / "run", port), environment=elsewhere("a")) as first,
        started(*stateful.worker("overtaken", "w0", port), environment=elsewhere("w0")) as worker,
    ):
        until(lambda: len([*store.entries("published/")]) >= 2, "round 1, published")
        first.send_signal(signal.SIGSTOP)
        with started(*stateful.aggregator("overtaken", late, other), environment=elsewhere("b")) as second:
            until(lambda: any((late / "checkpoints").glob("*.safetensors")), "the second has read the run")
            first.send_signal(signal.SIGCONT)
            ended(first, 0)
            ended(worker, 0)
            summary = store.read("summary.json")
            with started(*stateful.worker("overtaken", "w1", other), environment=elsewhere("w1")):
                output = ended(second, 6)
    assert tells(output, "another aggregator", 6, "--resume"), output
    fedloom(*stateful.aggregator("overtaken", late, other), environment=elsewhere("b-again"))
    assert store.read("summary.json") == summary
    assert scores(late) == scores(stateful.undisturbed)


@pytest.mark.exhaustive  # real deadlines: half a minute
def test_a_run_without_watchers_ends(stateful: Place, elsewhere: Any, tmp_path: Path, port: int) -> None:
    run = tmp_path / "a" / "run"
    order = stateful.aggregator("orphan", run, port)
    output = fedloom(*order, "--orphan-after", 1, code=8, environment=elsewhere("a"))
    assert tells(output, "1 s", "--orphan-after")
    # Watched, it continues; when the watcher leaves, it ends with its last round durable.
    with (
        started(*order, "--orphan-after", 8, environment=elsewhere("b")) as aggregator,
        started(*stateful.worker("orphan", "w0", port), environment=elsewhere("w0")) as worker,
    ):
        watch = follow(f"127.0.0.1:{port}", connect_s=120)
        for progress in watch:
            if progress.round >= 1:
                break
        worker.kill()  # keeps the run from finishing before the end is detected
        watch.close()
        ended(aggregator, 8)
    shutil.rmtree(run)
    assert any(stateful.store("runs/orphan").entries("published/"))
    with (
        started(*order, environment=elsewhere("c")) as aggregator,
        started(*stateful.worker("orphan", "w0", port), environment=elsewhere("w0-again")) as worker,
    ):
        ended(aggregator, 0)
        ended(worker, 0)
    assert scores(run) == scores(stateful.undisturbed)


@pytest.mark.exhaustive
def test_a_late_worker_continues_after_a_terminated_one(
    stateful: Place, elsewhere: Any, tmp_path: Path, port: int
) -> None:
    run = tmp_path / "a" / "run"
    with (
        started(*stateful.aggregator("drained", run, port), environment=elsewhere("a")) as aggregator,
        started(*stateful.worker("drained", "w0", port), environment=elsewhere("w0")) as worker,
    ):
        until(lambda: rounds(run) >= 1, "the first round")
        worker.send_signal(signal.SIGTERM)
        output = ended(worker, 130)  # not 0: its work is incomplete
        assert "before the end of the run" in output
        with started(*stateful.worker("drained", "late", port), environment=elsewhere("late")) as late:
            ended(aggregator, 0)
            ended(late, 0)
    assert final(run) == final(stateful.undisturbed)
    assert scores(run) == scores(stateful.undisturbed)
    assert losses(run) == []


@pytest.mark.exhaustive
def test_fedloom_run_publishes_where_storage_is_a_store(
    stateful: Place, elsewhere: Any, tmp_path: Path, fresh_root: Path
) -> None:
    """A run in one process is resumed by one with worker processes in another, empty folder."""
    common = ("--set", f"storage={stateful.url}", "--partition", stateful.partition)
    short = ("run", stateful.experiment, *common, "--set", "federation.rounds=2")
    fedloom(*short, "--workers", 0, "--out", tmp_path / "a" / "small", environment=elsewhere("a"))
    output = fedloom(*short, "--workers", 0, "--out", tmp_path / "b" / "small", code=2, environment=elsewhere("b"))
    assert tells(output, f"{stateful.url}/runs/small", "--resume", "--publish")
    assert not (tmp_path / "b" / "small").exists()
    shutil.rmtree(tmp_path / "a")
    place, there = f"{stateful.url}/runs/small", elsewhere("d")
    reported = json.loads(fedloom("status", place, "--json", environment=there))
    assert (reported["phase"], reported["round"], reported["rounds"], reported["durable_round"]) == (
        "finished",
        2,
        2,
        2,
    )
    listed = json.loads(fedloom("status", place, "--clients", "--json", environment=there))
    assert len(listed) == reported["clients"]["roster"]
    fedloom("status", f"{stateful.url}/runs/absent", environment=there, code=3)
    out = tmp_path / "c" / "small"
    order = ("run", stateful.experiment, *common, "--workers", 2, "--resume", "--out", out)
    output = fedloom(*order, environment=elsewhere("c"))
    assert "resuming after round 2" in output
    assert final(out) == final(stateful.undisturbed)
    assert scores(out) | {"best": None} == scores(stateful.undisturbed) | {"best": None}
    assert losses(out) == []
    assert json.loads(stateful.store("runs/small").read("summary.json"))["rounds"] == 6


def test_models_of_a_published_run_equal_those_of_its_folder(
    stateful: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stateful.environment.items():
        monkeypatch.setenv(name, value)
    shutil.copytree(stateful.undisturbed, tmp_path / "run")
    url, folder = f"{stateful.url}/runs/served", RunFolder(tmp_path / "run")
    published = Publisher(folder, stateful.store("runs/served"), "one")
    published.publish(6)
    x = torch.randint(256, (20, 1, 28, 28), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    made, expected = (personalize(where, x, torch.arange(20) % 10) for where in (url, str(folder.path)))
    assert made.card == expected.card
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in made.state_dict().items())
    loaded = load(url)
    assert loaded.history.equals(load(folder.path).history)
    assert loaded.folder != folder.path
    durable = DurableRounds(RunFolder.open(url))
    first = durable(None)
    assert first is not None
    assert (first.round, durable(first.digest)) == (6, None)
    (folder.checkpoints / "round-000006.safetensors").unlink()  # as if a newer publication had replaced it
    published.publish(6)
    second = durable(first.digest)
    assert second is not None
    assert second.round < 6


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_partition_of_another_experiment_is_rejected(stateful: Place, tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in stateful.environment.items():
        monkeypatch.setenv(name, value)
    for change, output in (
        ("seed=9", "seed: the partition has 5, the experiment 9"),
        ("data.held_out_fraction=0.2", "data.held_out_fraction: the partition has 0.1, the experiment 0.2"),
        (
            "data.partition={scheme: iid, clients: 20}",
            "data.partition.scheme: the partition has 'classes', the experiment 'iid'",
        ),
        ("data.dataset=mnist", "data.dataset: the partition has 'fashion-mnist', the experiment 'mnist'"),
    ):
        with pytest.raises(ExperimentError) as refused:
            command(stateful.experiment, set_=[change], partition=stateful.partition, out=tmp_path / "run")
        assert output in str(refused.value)
        assert "fedloom partition" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_invalid_places_are_rejected(stateful: Place, tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in stateful.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExperimentError, match=r"publish must be a store.*here"):
        command(stateful.experiment, partition=stateful.partition, publish="here", out=tmp_path / "run")
    output = fedloom("worker", "--aggregator", "127.0.0.1:1", "--partition", stateful.partition, "--clients", "2/2",
                   code=2, environment=stateful.environment)  # fmt: skip
    assert tells(output, "--clients", "I/N", "2/2")
    assert not (tmp_path / "run").exists()
    assert not any(tmp_path.iterdir())
