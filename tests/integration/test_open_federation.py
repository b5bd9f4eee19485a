"""An open federation of real processes: members join, leave and are killed, and so is the aggregator."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from facts import tells
from ports import free_address
from run_processes import WAIT_S, ended, fedloom, final, rounds, started, until
from s3_support import S3Server
from safetensors.torch import load
from transport_support import Hostile
from vowel_data import vowel_examples

from fedloom.algorithms.base import find_algorithm
from fedloom.data.datasets import find_dataset
from fedloom.data.own import Own
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.data.spec import Normalization
from fedloom.engine.options import RunOptions
from fedloom.engine.run_data import open_manifest
from fedloom.engine.run_experiment import replay_segments, run_experiment
from fedloom.errors import ExperimentError
from fedloom.experiment import OwnData, load_experiment
from fedloom.federation.releases import count_releases, count_training_releases
from fedloom.privacy.accounting import Release
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE, EVALUATED, Attempt, Replay
from fedloom.storage import open_store
from fedloom.transport.wire import federation_pb2 as wire

CLASS_NAMES = find_dataset("vowel").spec.class_names

GIVEN = f"{{mean: {[0.0] * 9}, std: {[1.0] * 9}}}"
OWN = Own(kind="features", input_shape=(9,), classes=CLASS_NAMES)

EXPERIMENT = f"""\
name: vowels
data: {{own: {{kind: features, input_shape: [9], classes: [{", ".join(CLASS_NAMES)}]}}}}
model: {{name: mlp, hidden: [6]}}
algorithm: {{name: fedavg, local: {{steps: 2, lr: 0.1}}}}
federation:
  {{rounds: null, clients_per_round: 3, min_clients: 2, heartbeat_timeout_s: 0.5, deadline_s: 3, checkpoint_every_s: 0}}
evaluation: {{every: 20, cohort: 2}}
runtime: {{workers: 0}}
"""


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return six packed speakers: ``s0`` to ``s5``."""
    root = tmp_path_factory.mktemp("members")
    x, y, owners = vowel_examples()
    for speaker in range(6):
        np.savez(root / "source.npz", x=x[owners == speaker], y=y[owners == speaker])
        pack(root / "source.npz", root / f"s{speaker}", PackSettings(f"speaker-{speaker}", Request(OWN.spec)))
    return root


class Federation:
    """An aggregator's folder and port, and the processes of a test."""

    def __init__(self, folder: Path, members: Path, processes: contextlib.ExitStack, experiment: str) -> None:
        self.run, self.members, self._processes = folder / "run", members, processes
        self.experiment = folder / "vowels.yaml"
        self.experiment.write_text(experiment)
        self.address = free_address()

    def aggregator(self, *arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        at = ("aggregator", self.experiment, "--listen", self.address, "--out", self.run, "--no-report")
        return self._processes.enter_context(started(*at, *arguments, environment=environment))

    def worker(self, *speakers: int, name: str, observes: tuple[int, ...] = (), more: tuple[object, ...] = ()) -> Any:
        whose = [word for i in speakers for word in ("--data", self.members / f"s{i}")]
        whose += [word for i in observes for word in ("--observe", self.members / f"s{i}")]
        at = ("worker", "--aggregator", self.address, "--name", name, "--reconnect", 200)
        return self._processes.enter_context(started(*at, *whose, *more))

    def lines(self) -> list[dict[str, Any]]:
        return list(RunFolder(self.run).objects("journal.jsonl")) if (self.run / "journal.jsonl").exists() else []

    def told(self, what: str) -> list[str]:
        """Return every client that has joined, or left, by the journal."""
        return [told["id"] if isinstance(told, dict) else told for line in self.lines() for told in line.get(what, ())]

    def more_rounds(self, count: int = 3) -> None:
        before = rounds(self.run)
        until(lambda: rounds(self.run) >= before + count, f"{count} more rounds")

    def replay(self, out: Path, *observes: int) -> Path:
        data = [self.members / f"s{i}" for i in range(6) if i not in observes]
        observe = tuple(self.members / f"s{i}" for i in observes)
        options = RunOptions(out, replay=self.run, packed=tuple(data), observe=observe, report=False)
        run_experiment(load_experiment(self.experiment), options)
        return out


@pytest.fixture
def federation(tmp_path: Path, members: Path) -> Iterator[Federation]:
    with contextlib.ExitStack() as processes:
        yield Federation(tmp_path, members, processes, EXPERIMENT)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def equal_to_the_replay(federation: Federation, out: Path, *observes: int) -> None:
    """Check that model and evaluations equal those of the journal's replay, to the bit."""
    again = federation.replay(out, *observes)
    assert final(again) == final(federation.run)
    mine, other = (list(RunFolder(run).objects("metrics.jsonl")) for run in (federation.run, again))
    for key in ("round", "seen", "unseen", "global", "validation_pooled"):
        assert [line[key] for line in mine] == [line[key] for line in other]


@pytest.mark.slow
def test_joins_leaves_and_kills_do_not_change_the_replay(federation: Federation, tmp_path: Path) -> None:
    aggregator = federation.aggregator()
    first = federation.worker(0, name="first", observes=(3,))
    until(lambda: (federation.run / "logs" / "aggregator.jsonl").exists(), "the run's folder")
    second = federation.worker(1, name="second")
    until(lambda: federation.lines(), "the first evaluation")
    assert sorted(federation.told("joined")) == ["speaker-0", "speaker-1", "speaker-3"]
    manifest = RunFolder(federation.run).manifest()
    federation.more_rounds()

    third = federation.worker(2, 4, name="third")
    until(lambda: {"speaker-2", "speaker-4"} <= set(federation.told("joined")), "the third joins")
    federation.more_rounds()
    kill(second)
    until(lambda: "speaker-1" in federation.told("left"), "the second leaves")
    federation.more_rounds()

    kill(aggregator)
    aggregator = federation.aggregator("--resume")
    federation.more_rounds()
    fourth = federation.worker(1, name="fourth")  # the same client, from another worker
    until(lambda: federation.told("joined").count("speaker-1") > 1, "the second client comes back")
    federation.more_rounds()

    aggregator.send_signal(signal.SIGTERM)
    ended(aggregator, 130)
    last = rounds(federation.run) + 40
    changed = ("--set", f"federation.rounds={last}", "--set", "algorithm.local.lr=0.05", "--set", "evaluation.every=7")
    changed += ("--set", "federation.min_clients=4")  # forty rounds may be over before all members have reconnected
    aggregator = federation.aggregator("--resume", *changed)
    ended(aggregator, 0)
    for process in (first, third, fourth):
        ended(process, 0)

    experiments = [json.loads(line["experiment"]) for line in federation.lines() if "experiment" in line]
    assert [e["algorithm"]["local"]["lr"] for e in experiments] == [0.1, 0.05]
    assert RunFolder(federation.run).manifest().spec.normalization == manifest.spec.normalization
    summary = json.loads((federation.run / "summary.json").read_text())
    assert (summary["rounds"], summary["seen"]["clients"], summary["unseen"]["clients"]) == (last, 4, 1)
    equal_to_the_replay(federation, tmp_path / "replay", 3)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_replay_with_other_settings_evaluates_as_the_run_did(tmp_path: Path, *, evaluated: bool) -> None:
    """The run was stopped after a round with an evaluation, and resumed with settings without one."""
    path = tmp_path / "vowels.yaml"
    path.write_text(EXPERIMENT)
    first, then = load_experiment(path), load_experiment(path, ["evaluation.every=7"])
    folder = RunFolder(tmp_path)
    who = [{"id": "a", "train": 1, "validation": 1, "test": 1, "labelled": True, "observer": False, "class_counts": []}]
    lines = [Attempt(0, 0, EVALUATED, joined=who, experiment=first.shared_json())]
    lines += [Attempt(round, 1, statistics={"client_steps": 1.0}) for round in range(1, 21)]
    lines += [Attempt(20, 0, EVALUATED)] if evaluated else []
    lines += [Attempt(21, 1, statistics={"client_steps": 1.0}, experiment=then.shared_json())]
    folder.rewrite("journal.jsonl", map(asdict, lines))
    assert isinstance(first.data, OwnData)
    manifest = open_manifest(first, first.data.own, Normalization((0.0,) * 9, (1.0,) * 9))
    legs = replay_segments(first, Replay(folder), manifest)
    assert [(leg.upto, leg.measured) for leg in legs] == [(20, evaluated), (21, True)]


def test_a_run_below_min_clients_waits_until_it_is_stopped(federation: Federation) -> None:
    aggregator = federation.aggregator()
    assert aggregator.stdout is not None
    output = next(line for line in aggregator.stdout if "federation.min_clients" in line)
    assert tells(output, "waiting", "0 clients", "federation.min_clients", 2)
    alone = federation.worker(0, name="alone", observes=(1, 2))  # observers do not count
    log = federation.run / "logs" / "aggregator.jsonl"
    until(lambda: log.exists() and "worker alone" in log.read_text(), "the worker joins")
    aggregator.send_signal(signal.SIGTERM)
    output = aggregator.stdout.read()
    assert aggregator.wait(WAIT_S) == 130, output
    assert "Traceback" not in output
    assert federation.lines() == []
    kill(alone)


@pytest.mark.slow
def test_a_rejected_member_gets_the_reason_and_the_others_continue(
    federation: Federation, tmp_path: Path, members: Path
) -> None:
    federation.aggregator()
    federation.worker(0, 1, name="first")
    until(lambda: federation.lines(), "the federation begins")
    at = ("worker", "--aggregator", federation.address)
    output = fedloom(*at, "--data", members / "s1", "--name", "second", code=4)
    assert tells(output, "speaker-1", "another worker")
    np.savez(tmp_path / "other.npz", x=np.eye(9, dtype=np.float32), y=np.arange(9) % 2)
    other = Own(kind="features", input_shape=(9,), classes=("a", "b"))
    pack(tmp_path / "other.npz", tmp_path / "other", PackSettings("other", Request(other.spec)))
    output = fedloom(*at, "--data", tmp_path / "other", "--name", "third", code=3)
    assert tells(output, "other", "classes", "a, b", "data.own", "hid")
    wide = Own(kind="features", input_shape=(10,), classes=CLASS_NAMES)
    np.savez(tmp_path / "wide.npz", x=np.eye(22, 10, dtype=np.float32), y=np.arange(22) % 11)
    pack(tmp_path / "wide.npz", tmp_path / "wide", PackSettings("wide", Request(wide.spec)))
    output = fedloom(*at, "--data", tmp_path / "wide", "--name", "fourth", code=3)
    assert tells(output, "wide", "input_shape", "[10]", "data.own", "[9]")
    np.savez(tmp_path / "bare.npz", x=np.random.default_rng(1).normal(size=(40, 9)))
    pack(tmp_path / "bare.npz", tmp_path / "bare", PackSettings("bare", Request(OWN.spec, labelled=False)))
    output = fedloom(*at, "--data", tmp_path / "bare", "--name", "fifth", code=3)
    assert tells(output, "bare", "no labels", "--observe")
    federation.more_rounds()
    assert set(federation.told("joined")) <= {"speaker-0", "speaker-1", "other", "wide", "bare"}


@pytest.mark.slow
def test_a_published_run_resumes_on_another_machine(
    federation: Federation, s3_server: S3Server, tmp_path: Path
) -> None:
    environment, url = s3_server.environment, f"s3://{s3_server.new_bucket()}/runs/vowels"
    aggregator = federation.aggregator("--publish", url, "--resume", environment=environment)
    first, second = (federation.worker(i, name=f"worker-{i}") for i in range(2))
    until(lambda: federation.lines(), "the federation begins")
    federation.more_rounds(5)
    published = open_store(url, environment)
    until(lambda: any(published.entries("published/")), "it is published")
    federation.more_rounds(5)
    kill(aggregator)
    normalization = RunFolder(federation.run).manifest().spec.normalization

    federation.run = tmp_path / "elsewhere"
    again = ("--publish", url, "--resume", "--set", "federation.rounds=60")
    aggregator = federation.aggregator(*again, environment=environment)
    third = federation.worker(2, name="worker-2")
    ended(aggregator, 0)
    for process in (first, second, third):
        ended(process, 0)
    assert RunFolder(federation.run).manifest().spec.normalization == normalization
    equal_to_the_replay(federation, tmp_path / "replay")


@pytest.mark.slow
def test_a_copy_of_a_running_run_is_a_backup(federation: Federation, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "running-a-federation.md").read_text(encoding="utf-8")
    script = re.search(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert script is not None
    # As a service starts it, also for the first time.
    aggregator = federation.aggregator("--resume", "--set", "federation.checkpoint_every_s=0.5")
    first, second = (federation.worker(i, name=f"worker-{i}") for i in range(2))
    until(lambda: federation.lines(), "the federation begins")
    until(lambda: len(list((federation.run / "checkpoints").glob("round-*"))) > 1, "rounds that are durable")
    subprocess.run(["sh", "-euc", script[1].replace("RUN", str(federation.run))], cwd=tmp_path, check=True)
    federation.more_rounds(5)
    kill(aggregator)

    lines = (tmp_path / "backup" / "journal.jsonl").read_text().splitlines()
    federation.run = tmp_path / "backup"
    aggregator = federation.aggregator("--resume", "--set", f"federation.rounds={rounds(federation.run) + 30}")
    ended(aggregator, 0)
    for process in (first, second):
        ended(process, 0)
    assert (federation.run / "journal.jsonl").read_text().splitlines()[:2] == lines[:2]  # it did not restart
    equal_to_the_replay(federation, tmp_path / "replay")


@pytest.mark.slow
def test_a_method_whose_clients_keep_states_and_descriptors(federation: Federation, tmp_path: Path) -> None:
    for name, settings in (
        ("pfedbayes", "{name: pfedbayes, steps: 2}"),
        ("pefll", "{name: pefll, descriptor: {size: 3}, embedding: {network: mlp}, local: {steps: 2, epochs: null}}"),
    ):
        federation.run = tmp_path / name
        changed = ("--set", f"algorithm={settings}", "--set", "federation.rounds=6")
        aggregator = federation.aggregator(*changed, "--set", "evaluation.every=3")
        more = [("--states", tmp_path / f"{name}-{i}") for i in range(2)]
        first = federation.worker(0, name="first", observes=(2,), more=(*more[0], "--set", "class_counts=true"))
        second = federation.worker(1, name="second", more=more[1])
        ended(aggregator, 0)
        ended(first, 0)
        ended(second, 0)
        federation.experiment.write_text(EXPERIMENT.replace("{name: fedavg, local: {steps: 2, lr: 0.1}}", settings))
        equal_to_the_replay(federation, tmp_path / f"{name}-replay", 2)
        federation.experiment.write_text(EXPERIMENT)


@pytest.mark.slow
def test_replies_to_a_killed_aggregator_count(federation: Federation) -> None:
    """Rounds after the last checkpoint are cut from the journal and repeated: their descriptors were released."""

    def asked(lines: Iterable[Mapping[str, Any]]) -> Counter[str]:
        return Counter(client for line in lines for held in line["conversations"] for client in held["clients"])

    privacy = "{clip: 1.0, noise_multiplier: 2.0}"
    settings = f"{{size: 3, train: all, evaluate: all, privacy: {privacy}}}"
    method = f"{{name: pefll, descriptor: {settings}, embedding: {{network: mlp}}, local: {{steps: 2, epochs: null}}}}"
    changed = ["--set", f"algorithm={method}", "--set", "federation.checkpoint_every_s=1000"]
    changed += ["--set", "evaluation.every=1000"]
    aggregator = federation.aggregator(*changed, "--set", "federation.rounds=1000")
    workers = [federation.worker(i, name=f"w{i}") for i in range(2)]
    federation.more_rounds(4)
    kill(aggregator)
    lost = asked(federation.lines())
    before = count_releases(RunFolder(federation.run), repeatable=False).times
    assert all(sum(before[client].values()) >= count for client, count in lost.items())
    aggregator = federation.aggregator(*changed, "--set", "federation.rounds=3", "--resume")
    ended(aggregator, 0)
    for worker in workers:
        ended(worker, 0)
    life = max(line["life"] for line in federation.lines())
    again, kept = asked(line for line in federation.lines() if line["life"] == life), asked(federation.lines())
    found = json.loads((federation.run / "summary.json").read_text())["pefll"]["privacy"]
    most = max(sum(before[client].values()) + again[client] for client in kept)
    assert found["releases_most"] >= most > max(kept.values())
    assert found["epsilon_most"] == pytest.approx(gaussian_epsilon(2.0, 1e-5, found["releases_most"]), rel=1e-6)
    assert found["noise"] == "secret"


@pytest.mark.slow
def test_private_cohorts_follow_the_roster_and_count_every_draw(federation: Federation) -> None:
    """Sampling rates follow each round's roster; the clipping norm adapts and survives a kill."""
    privacy = "{clip: 0.05, noise_multiplier: 1.0, delta: 1e-3, adaptive_clip: {count_noise: 1.0}}"
    keys = (f"federation.privacy={privacy}", "federation.clients_per_round=2", "algorithm.weighting=uniform")
    chosen = [word for key in keys for word in ("--set", key)]
    aggregator = federation.aggregator(*chosen)
    federation.worker(0, 1, name="first")
    until(lambda: federation.lines(), "the federation begins")
    federation.more_rounds()
    federation.worker(2, 3, name="second")
    until(lambda: {"speaker-2", "speaker-3"} <= set(federation.told("joined")), "the second joins")
    federation.more_rounds(8)
    kill(aggregator)
    aggregator = federation.aggregator("--resume", *chosen)
    federation.more_rounds()
    aggregator.send_signal(signal.SIGTERM)
    ended(aggregator, 130)
    counts = count_training_releases(RunFolder(federation.run)).counts[""]
    assert {release for release in counts if release.population == 2} == {Release(1.0, 1.0, 2, 2, "all")}
    assert {(release.rate, release.sampling) for release in counts if release.population == 4} == {(0.5, "poisson")}
    assert sum(counts.values()) >= rounds(federation.run)
    attempts = [line for line in federation.lines() if line["outcome"] == DONE]
    sizes = {len(line["conversations"][0]["clients"]) for line in attempts}
    assert len(sizes) > 1
    assert float(load(final(federation.run))["federation/clip"]) != 0.05


@pytest.mark.slow
def test_changes_not_allowed_on_resume_are_rejected(federation: Federation) -> None:
    aggregator = federation.aggregator("--set", "federation.rounds=2")
    worker = federation.worker(0, 1, name="first")
    ended(aggregator, 0)
    ended(worker, 0)
    at = ("aggregator", federation.experiment, "--listen", federation.address, "--out", federation.run, "--resume")
    for change, facts in (
        ("model={name: mlp, hidden: [7]}", ("model", "6", "7")),
        ("algorithm={name: fedprox}", ("algorithm.name", "fedavg", "fedprox")),
        ("data.own.classes=[a, b]", ("data", "hid", "'a'")),
        ("seed=2", ("seed", 1, 2)),
    ):
        output = fedloom(*at, "--set", change, "--set", "federation.rounds=3", code=2)
        assert tells(output, "--resume", *facts), output
    output = fedloom(
        "run", federation.experiment, "--replay", federation.run, "--out", federation.run.parent / "x", code=2
    )
    assert tells(output, "data.own", "--data")


def two_members_end_the_run(federation: Federation, aggregator: Any, crowd: Silent) -> None:
    """Let two answering members join beside a crowd; with them the run ends, and they end with it."""
    assert crowd.has_joined.wait(WAIT_S)
    workers = [federation.worker(i, name=f"honest-{i}") for i in range(2)]
    ended(aggregator, 0)
    for worker in workers:
        ended(worker, 0)


@pytest.mark.slow
@pytest.mark.parametrize("observes", [False, True], ids=["ghosts that train", "ghosts that observe"])
def test_a_member_with_silent_clients_delays_a_run_only_for_the_stated_time(
    federation: Federation, tmp_path: Path, *, observes: bool
) -> None:
    """Three hundred silent clients precede two answering ones in every list; evaluations ask two at a time."""
    changed = ("rounds=12", "deadline_s=1", "min_clients=2", "clients_per_round=2")
    settings = [word for each in changed for word in ("--set", f"federation.{each}")]
    aggregator = federation.aggregator(*settings, "--set", "evaluation.every=4", environment={"OMP_NUM_THREADS": "1"})
    ghosts = [f"ghost-{i:03d}" for i in range(300)]
    told = wire.Announced(train=10, validation=2, test=3, labelled=True, observer=observes)
    until(lambda: (federation.run / "logs" / "aggregator.jsonl").exists(), "the run's folder")
    with contextlib.closing(Silent(federation.address, ghosts, [told] * len(ghosts))) as crowd:
        two_members_end_the_run(federation, aggregator, crowd)
    assert "ghost-299" in federation.told("joined")
    history = list(RunFolder(federation.run).objects("metrics.jsonl"))
    assert [line["round"] for line in history] == [0, 4, 8, 12]
    assert {line["seen"]["clients"] for line in history[1:]} == {2}  # only answering clients are measured
    rest = [line for line in federation.lines() if line["outcome"] == EVALUATED and line["round"]]
    lost = {loss["client"] for line in rest for held in line["conversations"] for loss in held["lost"]}
    assert lost == set(ghosts)
    equal_to_the_replay(federation, tmp_path / "replay")


@pytest.mark.slow
def test_a_silent_crowd_in_larger_cohorts_does_not_end_a_run(federation: Federation) -> None:
    """Two members answer, and a cohort has room for five."""
    changed = ("rounds=6", "deadline_s=1", "min_clients=2", "clients_per_round=5", "heartbeat_timeout_s=20")
    settings = [word for each in changed for word in ("--set", f"federation.{each}")]
    settings += ["--set", f"data.own.normalization={GIVEN}", "--set", "evaluation.every=3"]
    aggregator = federation.aggregator(*settings, environment={"OMP_NUM_THREADS": "1"})
    ghosts = [f"ghost-{i:03d}" for i in range(300)]
    told = wire.Announced(train=10, validation=2, test=3, labelled=True)
    until(lambda: (federation.run / "logs" / "aggregator.jsonl").exists(), "the run's folder")
    with contextlib.closing(Silent(federation.address, ghosts, [told] * len(ghosts))) as crowd:
        two_members_end_the_run(federation, aggregator, crowd)
    assert "ghost-299" in federation.told("joined")


@pytest.mark.slow
def test_a_crowd_that_refuses_before_others_join_does_not_end_a_run(federation: Federation) -> None:
    """Three hundred clients refuse every request; the two that train join after a failed round."""
    changed = ("rounds=4", "deadline_s=5", "min_clients=2", "clients_per_round=5", "heartbeat_timeout_s=60")
    settings = [word for each in changed for word in ("--set", f"federation.{each}")]
    settings += ["--set", f"data.own.normalization={GIVEN}", "--set", "evaluation.every=2"]
    aggregator = federation.aggregator(*settings, environment={"OMP_NUM_THREADS": "1"})
    ghosts = [f"ghost-{i:03d}" for i in range(300)]
    told = wire.Announced(train=10, validation=2, test=3, labelled=True)
    until(lambda: (federation.run / "logs" / "aggregator.jsonl").exists(), "the run's folder")
    with contextlib.closing(Silent(federation.address, ghosts, [told] * len(ghosts), refuses=True)):
        until(lambda: any(line["round"] == 1 for line in federation.lines()), "a failed attempt")
        time.sleep(3)
        workers = [federation.worker(i, name=f"honest-{i}") for i in range(2)]
        ended(aggregator, 0)
    for worker in workers:
        ended(worker, 0)
    failed = [line for line in federation.lines() if line["round"] and line["outcome"] not in (DONE, EVALUATED)]
    assert len(failed) <= 2


class Silent:
    """A worker of the given clients that joins, reconnects when asked to, and answers nothing, or refuses."""

    def __init__(
        self, address: str, clients: list[str], announced: list[wire.Announced], *, refuses: bool = False
    ) -> None:
        self._refuses = refuses
        self._over = threading.Event()
        self._joined: Hostile | None = None
        self.has_joined = threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(address, clients, announced))
        self._thread.start()

    def _hold(self, address: str, clients: list[str], announced: list[wire.Announced]) -> None:
        version = find_algorithm("fedavg").version
        while not self._over.wait(0.1):
            self._joined = Hostile(address, "silent", clients, announced=announced, algorithms={"fedavg": version})
            with contextlib.suppress(grpc.RpcError, StopIteration):
                self._joined.join()
                self.has_joined.set()
                while True:
                    part = self._joined.next()
                    asked = part.begin.envelope
                    if self._refuses and asked.rows:
                        lost = {"conversation": asked.conversation, "exchange": asked.exchange, "reason": "no"}
                        for row in asked.rows:
                            self._joined.part(wire.WorkerPart(row_lost=wire.RowLost(row=row, **lost)))
            self._joined.leave()

    def close(self) -> None:
        self._over.set()
        if self._joined is not None:
            self._joined.incoming.cancel()
        self._thread.join(30)


@pytest.mark.slow
def test_rounds_end_at_the_early_stopping_condition(members: Path, tmp_path: Path) -> None:
    path = tmp_path / "vowels.yaml"
    path.write_text(EXPERIMENT)
    data = tuple(members / f"s{i}" for i in range(3))
    for i, (end, check) in enumerate(
        (
            ("{at_least: 0.2}", lambda best, last: best["value"] >= 0.2),
            ("{not_better_for: 12}", lambda best, last: last - best["round"] >= 12),
        )
    ):
        e = load_experiment(path, [f"federation.until={end}", "evaluation.every=3"])
        summary = run_experiment(e, RunOptions(tmp_path / f"run-{i}", packed=data, report=False)).summary
        assert summary["rounds"] % 3 == 0
        history = list(RunFolder(tmp_path / f"run-{i}").objects("metrics.jsonl"))
        scores = {line["round"]: line["validation_pooled"] for line in history}
        best = max(scores, key=lambda t: (scores[t], -t))
        assert check({"value": scores[best], "round": best}, summary["rounds"])
        if "at_least" in end:
            assert all(score < 0.2 for t, score in scores.items() if t < summary["rounds"])


def test_a_threshold_of_the_wrong_direction_is_rejected_before_round_1(members: Path, tmp_path: Path) -> None:
    path = tmp_path / "vowels.yaml"
    path.write_text(EXPERIMENT)
    e = load_experiment(path, ["federation.until={at_most: 1.5}"])
    data = tuple(members / f"s{i}" for i in range(3))
    with pytest.raises(ExperimentError) as error:
        run_experiment(e, RunOptions(tmp_path / "run", packed=data, report=False))
    assert error.value.key == "federation.until.at_most"
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
def test_a_refusal_is_told_by_the_dry_run_the_worker_and_the_status(federation: Federation, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("only_sums: false\nmethods: [ditto]\n")
    line = "policy.yaml:2: methods"
    data = ("--data", federation.members / "s2", "--policy", policy)
    assert line in fedloom("worker", *data, "--dry-run", federation.experiment, code=4)
    assert line not in fedloom("worker", *data, "--dry-run", "any")

    federation.aggregator()
    for i in range(2):
        federation.worker(i, name=f"w{i}")
    until(lambda: rounds(federation.run) > 0, "the first round")
    refusing = federation.worker(2, name="refusing", more=("--policy", policy))
    until(lambda: line in fedloom("status", federation.address), "the refusal in the status")
    (declined,) = (text for text in fedloom("status", federation.address).splitlines() if line in text)
    assert tells(declined, "declined", "refusing", "ditto", "fedavg")
    assert line in json.loads(fedloom("status", federation.address, "--json"))["declined"]["refusing"]
    until(lambda: federation.told("joined").count("speaker-2") == federation.told("left").count("speaker-2"), "it left")
    federation.more_rounds()
    assert refusing.poll() is None  # the experiment may change
