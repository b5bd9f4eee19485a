"""``fedloom search`` on real data: trials are runs, validation data decide, and a killed search continues."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from facts import mentions, refusing, tells
from forked import Popen, run
from vowel_data import vowel_root

import fedloom
from fedloom import experiment as experiments
from fedloom.engine.jobs import Job, JobObserver
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.errors import ExperimentError, QuorumError
from fedloom.experiment import Experiment
from fedloom.experiment.search_space import plan_search, read_space
from fedloom.tuning.search import SEARCH, SearchResult, run_search

REPOSITORY = Path(__file__).parents[2]
FILE = REPOSITORY / "experiments" / "vowel.yaml"
SPACE: dict[str, Any] = {
    "parameters": {
        "algorithm.local.lr": {"min": 0.003, "max": 1.0, "log": True},
        "algorithm.local.epochs": {"min": 1, "max": 3},
    },
    "seed": 1,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vowel_root(tmp_path_factory.mktemp("data"))


def changes(root: Path) -> list[str]:
    small = ["federation.rounds=4", "evaluation.every=1", "algorithm.personalize_steps=5", "runtime.workers=0"]
    return [f"data.root={root}", *small]


def command(root: Path, out: Path, space: dict[str, Any], *arguments: str) -> list[str]:
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(space))
    words = [sys.executable, "-m", "fedloom", "search", str(FILE), "--space", str(path), "--out", str(out)]
    for change in changes(root):
        words += ["--set", change]
    return [*words, *arguments]


def search(root: Path, out: Path, space: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(command(root, out, space, *arguments), capture_output=True, text=True, timeout=280)


def found_in(out: Path) -> dict[str, Any]:
    found = json.loads((out / SEARCH).read_text())
    found.pop("digest")
    return dict(found)


def in_process(
    root: Path, out: Path, space: dict[str, Any], observer: JobObserver | None = None, *more: str, parallel: int = 1
) -> SearchResult:
    def make(settings: Sequence[str]) -> Experiment:
        return experiments.of(FILE, [*changes(root), *more, *settings])

    plan = plan_search(read_space(space), make)
    options = RunOptions(report=False, resume=out.exists())
    return run_search(plan, make, out, options, observer, parallel=parallel)


@pytest.mark.slow
def test_trials_are_chosen_on_validation_and_only_the_best_shows_test_results(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    done = search(root, out, {**SPACE, "trials": 4})
    assert done.returncode == 0, done.stderr
    found = found_in(out)
    trials = found["trials"]
    assert [trial["folder"] for trial in trials] == sorted(path.parent.name for path in out.glob("*/summary.json"))
    for trial in trials:
        folder = out / trial["folder"]
        settings = experiments.load_experiment(folder / "experiment.yaml").algorithm.settings
        assert trial["parameters"] == {
            "algorithm.local.lr": settings.local.lr,
            "algorithm.local.epochs": settings.local.epochs,
        }
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert trial["validation_by_round"] == {str(line["round"]): line["validation_pooled"] for line in lines[1:]}
        assert trial["validation"] == lines[-1]["validation_pooled"]
    best = max(trials, key=lambda trial: trial["validation"])
    chosen = found["chosen"]
    assert chosen["trial"] == best["trial"]
    summary = json.loads((out / best["folder"] / "summary.json").read_text())
    for group in ("seen", "unseen", "global"):
        assert chosen["test"][group]["mean"] == summary[group]["accuracy_mean"]
    assert all("test" not in trial for trial in trials)
    # The output shows nothing about test data of the others.
    assert "test accuracy" not in done.stderr
    for trial in trials:
        mean = json.loads((out / trial["folder"] / "summary.json").read_text())["seen"]["accuracy_mean"]
        assert (f"{mean:.4f}" in done.stdout) == (trial["trial"] == best["trial"])
    assert tells(done.stdout, best["folder"], f"--set algorithm.local.lr={best['parameters']['algorithm.local.lr']!r}")
    page = (out / "search.html").read_text()
    assert page.count("<svg") == 3
    others = [f"{100 * t['validation']:.1f}" for t in trials]
    assert mentions(page, *others, "algorithm.local.lr")
    again = search(root, out, {**SPACE, "trials": 4})
    assert again.returncode == 2
    assert tells(again.stderr, out, "--resume", "--out")


@pytest.mark.slow
def test_a_killed_search_continues_with_the_same_trials(root: Path, tmp_path: Path) -> None:
    space = {**SPACE, "trials": 4}
    in_process(root, tmp_path / "whole", space)
    out = tmp_path / "killed"
    process = Popen(command(root, out, space), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "trial-003" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stderr.close()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("trial-00[12]/summary.json")}
    assert len(finished) == 2
    done = search(root, out, space, "--resume")
    assert done.returncode == 0, done.stderr
    assert found_in(out) == found_in(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    for trial in range(1, 5):
        for pattern in (f"trial-{trial:03d}/clients.csv", f"trial-{trial:03d}/checkpoints/*"):
            there, here = (max(folder.glob(pattern)) for folder in (out, tmp_path / "whole"))
            assert there.name == here.name
            assert there.read_bytes() == here.read_bytes()


class Events(JobObserver):
    """Record of the events of a search."""

    def __init__(self) -> None:
        self.stopped_after: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self.before: list[int] = []
        self.begun: list[int] = []

    def begins(self, job: Job, *, beside: bool) -> RunObserver:
        self.begun.append(job.number)
        return RunObserver()

    def ended(self, job: Job, outcome: str, error: Exception | None = None) -> None:
        if error is not None:
            self.failures[job.number] = str(error)
        elif outcome == "already finished":
            self.before.append(job.number)
        else:
            self.stopped_after[job.number] = int(outcome.removeprefix("stopped after round "))


@pytest.mark.slow
def test_trials_that_fall_behind_are_pruned_between_rounds(root: Path, tmp_path: Path) -> None:
    seen = Events()
    rates = {"algorithm.local.lr": {"choices": [0.2, 0.21, 0.22, 0.23, 0.24, 1e-5, 2e-5]}}
    space = {"parameters": rates, "sampler": "grid", "early_stopping": "median", "seed": 0}
    found = in_process(root, tmp_path / "s", space, seen)
    bad = {trial.number: trial for trial in found.trials if float(trial.texts["algorithm.local.lr"]) < 0.1}
    late = {number for number in bad if number > 5}
    assert seen.stopped_after
    assert late <= seen.stopped_after.keys()
    for number, round in seen.stopped_after.items():
        folder = tmp_path / "s" / f"trial-{number:03d}"
        assert 2 <= round < 4
        assert not (folder / "summary.json").exists()
        journal = [json.loads(line)["round"] for line in (folder / "journal.jsonl").read_text().splitlines()]
        assert max(journal) == round
        assert max(path.name for path in (folder / "checkpoints").iterdir()) == f"round-{round:06d}.safetensors"
    assert found.chosen.state == "done"


@pytest.mark.slow
def test_a_diverged_trial_is_recorded(root: Path, tmp_path: Path) -> None:
    seen = Events()
    space = {"parameters": {"algorithm.local.lr": {"choices": [0.1, 1e30]}}, "sampler": "grid"}
    found = in_process(root, tmp_path / "s", space, seen, "federation.attempts=1")
    (failed,) = [trial for trial in found.trials if trial.state == "failed"]
    assert failed.texts == {"algorithm.local.lr": "1.0e+30"}
    assert list(seen.failures) == [failed.number]
    assert "diverged" in str(failed.error)
    assert found.chosen.texts == {"algorithm.local.lr": "0.1"}
    again = Events()
    in_process(root, tmp_path / "s", space, again, "federation.attempts=1")
    assert (again.before, again.begun) == ([1, 2], [])
    alone = {"parameters": {"algorithm.local.lr": {"choices": [1e30]}}}
    with refusing(QuorumError, "trial-001"):
        in_process(root, tmp_path / "alone", {**alone, "trials": 1}, None, "federation.attempts=1")


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_parallel_grid_trials_equal_sequential_ones(root: Path, tmp_path: Path) -> None:
    space = {"parameters": {"algorithm.local.lr": {"choices": [0.01, 0.1, 0.3]}}, "sampler": "grid"}
    one, two = (in_process(root, tmp_path / f"{n}", space, parallel=n) for n in (1, 2))
    assert {**two.summary, "digest": "", "parallel": 1} == {**one.summary, "digest": ""}


@pytest.mark.slow
def test_the_epsilon_budget_ends_trials(root: Path, tmp_path: Path) -> None:
    noise = {"federation.privacy.noise_multiplier": {"choices": [1.0, 20.0]}}
    private = ("federation.privacy={clip: 1.0, noise_multiplier: 1.0, delta: 1.0e-3}", "algorithm.weighting=uniform")
    space = {"parameters": noise, "sampler": "grid", "epsilon": 3.0}
    found = in_process(root, tmp_path / "s", space, None, *private)
    by_noise = {trial.texts["federation.privacy.noise_multiplier"]: trial for trial in found.trials}
    assert {trial.state for trial in found.trials} == {"done"}
    assert all(trial.epsilon is not None and trial.epsilon <= 3 for trial in found.trials)
    assert max(by_noise["1.0"].measured) < max(by_noise["20.0"].measured) == 4
    summary = json.loads((tmp_path / "s" / by_noise["1.0"].name / "summary.json").read_text())
    assert (summary["ended_by"], summary["training_privacy"]["epsilon"]) == ("budget", by_noise["1.0"].epsilon)


@pytest.mark.slow
def test_a_search_in_python(root: Path, tmp_path: Path) -> None:
    space = {"parameters": {"algorithm.local.lr": {"choices": [0.01, 0.3]}}, "sampler": "grid"}
    keys = {"data__root": str(root), "federation__rounds": 2, "evaluation__every": 2, "runtime__workers": 0}
    found = fedloom.search(FILE, space, out=tmp_path / "s", progress=False, **keys)
    assert len(found) == 2
    best = max(found, key=lambda run: max(run.history["validation_pooled"].iloc[-1:]))
    assert found.chosen.folder == best.folder
    assert found.parameters == {"algorithm.local.lr": best.experiment.algorithm.settings.local.lr}
    assert list(found.table["algorithm.local.lr"]) == [run.experiment.algorithm.settings.local.lr for run in found]
    assert list(found.table.columns) == ["state", "validation", "epsilon", "algorithm.local.lr"]
    again = fedloom.search(FILE, space, out=tmp_path / "s", resume=True, progress=False, **keys)
    assert again.summary == found.summary
    with refusing(ExperimentError, "parallel"):
        fedloom.search(FILE, space, out=tmp_path / "t", parallel=0, progress=False, **keys)
    assert not (tmp_path / "t").exists()


def test_an_invalid_search_runs_nothing(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    wrong = {"parameters": {"algorithm.local.lr": {"min": -1.0, "max": 0.1}}}
    refused = search(root, out, wrong)
    assert refused.returncode == 2
    assert tells(refused.stderr, "at algorithm.local.lr=-1.0", "algorithm.local.lr")
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert search(root, out, SPACE, "--resume").returncode == 2
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    missing = run([sys.executable, "-m", "fedloom", "search", str(FILE)], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2
    assert re.search("--space", missing.stderr)
