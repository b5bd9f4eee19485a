"""``fedloom run --seeds --grid`` on real data: folders named by their settings, and the comparison at the end."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from facts import tells
from forked import run
from vowel_data import vowel_root

import fedloom
from fedloom import experiment as experiments
from fedloom.data.federated import FederatedDataset
from fedloom.engine.jobs import Job, JobObserver
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.errors import FedloomError
from fedloom.experiment import Point
from fedloom.tuning.parallel import core_shares
from fedloom.tuning.sweep import run_points

pytestmark = pytest.mark.usefixtures("forks")

FILE = Path(__file__).parents[2] / "experiments" / "vowel.yaml"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return vowel_root(tmp_path / "data")


def sweep(root: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedloom", "run", str(FILE), "--out", str(out)]
    command += ["--set", f"data.root={root}", "--set", "federation.rounds=2", "--set", "evaluation.every=2"]
    command += ["--set", "algorithm.personalize_steps=5", *arguments]
    return run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_a_sweep_resumes_and_survives_a_diverging_setting(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    first = sweep(root, out, "--seeds", "1,2")
    assert first.returncode == 0, first.stderr
    summaries = {path.parent.name: path.read_text() for path in out.glob("*/summary.json")}
    assert set(summaries) == {"seed=1", "seed=2"}
    assert {json.loads(text)["seed"] for text in summaries.values()} == {1, 2}
    assert (out / "comparison" / "compare.html").exists()
    assert "FedAvg + fine-tuning" in first.stdout

    again = sweep(root, out, "--seeds", "1,2")
    assert again.returncode == 2
    assert tells(again.stderr, out, "--resume", "--out")

    more = sweep(root, out, "--seeds", "1-3", "--resume")
    assert more.returncode == 0, more.stderr
    skipped = [line for line in more.stderr.splitlines() if "already finished" in line]
    assert [tells(line, f"seed={seed}") for seed, line in zip((1, 2), skipped, strict=True)] == [True, True]
    assert {path.parent.name: path.read_text() for path in out.glob("*/summary.json")}.items() >= summaries.items()

    wild = sweep(root, tmp_path / "wild", "--grid", "algorithm.local.lr=1e30,0.03", "--set", "federation.attempts=1")
    assert wild.returncode == 5, wild.stderr
    assert "lr=1.0e+30: failed" in wild.stderr
    assert "1 of 2 runs failed" in wild.stderr
    assert "pooled validation accuracy seen" in wild.stderr  # choosing a setting shows no test accuracy during the run
    assert "test accuracy" not in wild.stderr
    assert (tmp_path / "wild" / "lr=0.03" / "summary.json").exists()
    assert (tmp_path / "wild" / "comparison" / "compare.csv").exists()


@pytest.mark.slow
def test_a_failing_tracker_in_a_parallel_run_is_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "site" / "broken_tracker-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-tracker\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[fedloom.observers]\nbroken = broken_tracker:Broken\n")
    code = "class Broken:\n    def __init__(self, folder):\n        raise RuntimeError('nobody at home')\n"
    (about.parent / "broken_tracker.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(about.parent))
    tracked = ("--set", "tracking=[broken]", "--no-report")
    done = sweep(root, tmp_path / "sweep", "--seeds", "1,2", "--parallel", "2", *tracked)
    assert done.returncode == 0, done.stderr
    for seed in (1, 2):
        failed, lost = (line for line in done.stderr.splitlines() if f"seed={seed}: tracking" in line)
        assert tells(failed, "broken", "RuntimeError", "nobody at home")
        assert tells(lost, "broken", "did not log")


class Counts(JobObserver):
    """Record the datasets that exist when a run begins."""

    def __init__(self) -> None:
        self.datasets: list[int] = []

    def begins(self, job: Job, *, beside: bool) -> RunObserver:
        self.datasets.append(sum(type(there) is FederatedDataset for there in gc.get_objects()))
        return RunObserver()


@pytest.mark.slow
@pytest.mark.usefixtures("unfrozen")
def test_a_sweep_holds_the_data_of_one_run_at_a_time(root: Path, tmp_path: Path) -> None:
    changes = (f"data.root={root}", "federation.rounds=1", "algorithm.personalize_steps=1")
    seeds = [f"seed={seed}" for seed in (1, 2, 3)]
    points = [Point(seed, (), experiments.load_experiment(FILE, [*changes, seed])) for seed in seeds]
    gc.collect()  # left by other tests
    counts = Counts()
    assert run_points(points, tmp_path / "sweep", RunOptions(report=False), counts) == {}
    assert [now - counts.datasets[0] for now in counts.datasets] == [0, 0, 0]
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("unfrozen")
def test_a_run_leaves_no_data_in_memory(root: Path, tmp_path: Path) -> None:
    gc.collect()  # left by other tests
    gc.disable()  # a chance collection would hide objects that the run leaves
    try:
        before = sum(type(there) is FederatedDataset for there in gc.get_objects())
        keys = {"data__root": str(root), "federation__rounds": 1}
        fedloom.run(FILE, out=tmp_path / "run", report=False, progress=False, **keys)
        assert sum(type(there) is FederatedDataset for there in gc.get_objects()) == before
    finally:
        gc.enable()


class KillsTheFirst(JobObserver):
    """Kill the process of the first parallel run, and record how each ends."""

    def __init__(self) -> None:
        self.ends: dict[str, str] = {}

    def begins(self, job: Job, *, beside: bool) -> RunObserver:
        if job.number == 1:
            children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
        return RunObserver()

    def ended(self, job: Job, outcome: str, error: FedloomError | None = None) -> None:
        self.ends[job.name] = outcome


@pytest.mark.slow
def test_parallel_runs_give_equal_bits_and_a_killed_one_does_not_stop_others(root: Path, tmp_path: Path) -> None:
    keys = {"data__root": str(root), "federation__rounds": 2, "runtime__workers": 0, "algorithm__personalize_steps": 5}
    e = experiments.of(FILE, **keys)
    points, out, seen = experiments.points(e, (), "1,2", []), tmp_path / "sweep", KillsTheFirst()
    failures = run_points(points, out, RunOptions(report=False), seen, parallel=2)
    assert list(failures) == ["seed=1"]
    assert failures["seed=1"].exit_code == 7
    assert seen.ends["seed=2"] == "done"
    assert "signal 9" in seen.ends["seed=1"]
    again = fedloom.sweep(e, seeds=[1, 2], out=out, resume=True, parallel=2, report=False, progress=False)
    assert len(again) == 2
    assert not again.failures
    for one in again:
        alone = fedloom.run(one.experiment, out=tmp_path / f"alone-{one.experiment.seed}", report=False, progress=False)
        for pattern in ("clients.csv", "checkpoints/*"):
            there, here = (max(each.folder.glob(pattern)) for each in (one, alone))
            assert there.name == here.name
            assert there.read_bytes() == here.read_bytes()


def test_cores_are_divided_among_parallel_runs() -> None:
    cores = os.sched_getaffinity(0)
    for parallel in (1, 2, 3, 64):
        found = core_shares(parallel)
        assert set().union(*found) == cores
        assert all(found)
        if parallel <= len(cores):
            assert sum(map(len, found)) == len(cores)


def test_no_run_starts_if_a_sweep_point_is_invalid(root: Path, tmp_path: Path) -> None:
    refused = sweep(root, tmp_path / "sweep", "--grid", "algorithm.local.lr=0.1,-1")
    assert refused.returncode == 2
    assert "at algorithm.local.lr=-1: " in refused.stderr
    assert not (tmp_path / "sweep").exists()
    method = "algorithm={name: knn-per, local: {steps: 1}}"
    clients = sweep(root, tmp_path / "sweep", "--set", method, "--grid", "algorithm.neighbours=[1],[1000]")
    assert clients.returncode == 2
    assert tells(clients.stderr, "at neighbours=_1000_", "cannot train client-0000", "needs 1000")
    assert not (tmp_path / "sweep").exists()
    replay = sweep(root, tmp_path / "sweep", "--seeds", "1", "--replay", str(tmp_path))
    assert replay.returncode == 2
    assert tells(replay.stderr, "--replay", "--seeds", "--grid")
    beside = sweep(root, tmp_path / "sweep", "--parallel", "2")
    assert beside.returncode == 2
    assert tells(beside.stderr, "--parallel", "--seeds", "--grid")
