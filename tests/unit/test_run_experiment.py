"""Resumption and completion of runs, on folders in the state that runs leave."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from facts import telling, tells
from run_folders import write_run

import fedloom
from fedloom.engine.engine import write_report_if_possible
from fedloom.engine.observer import RunObserver
from fedloom.engine.resume import check_folder, check_states
from fedloom.errors import ExitCode, ExperimentError, QuorumError
from fedloom.experiment import load_experiment
from fedloom.runs.checkpoint import Checkpoint, Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.tuning import sweep

EXPERIMENT = load_experiment(Path(__file__).parents[2] / "experiments" / "vowel.yaml", ["federation.rounds=400"])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(write_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("published", "url"), [(None, "s3://b/new"), ("s3://b/old", "s3://b/new"), ("s3://b/old", None)]
)
def test_client_states_have_one_location(run: RunFolder, published: str | None, url: str | None) -> None:
    def place(url: str | None) -> str:
        return str(run.states) if url is None else f"{url}/states"

    if published is not None:
        run.write_json("published.json", {"url": published})
    check_states(run, published)
    with pytest.raises(ExperimentError) as refused:
        check_states(run, url)
    assert refused.value.exit_code is ExitCode.EXPERIMENT
    assert tells(str(refused.value), "states", place(published), place(url))
    (run.path / "journal.jsonl").unlink()  # as if killed before a round had counted
    check_states(run, url)
    run.states.mkdir()
    with pytest.raises(ExperimentError):
        check_states(run, "s3://b/new")


def test_a_run_is_complete_when_all_files_exist(run: RunFolder) -> None:
    run.write("experiment.yaml", EXPERIMENT.resolved_yaml())
    run.checkpoints.mkdir()
    checkpoints = Checkpoints(run.checkpoints)
    checkpoints.save(Checkpoint("fedavg", 1, 400, None, {"theta": torch.zeros(1)}))
    checkpoints.close()
    assert not sweep.complete(run, EXPERIMENT)  # without its report
    run.write("report.html", "all that was found")
    assert sweep.complete(run, EXPERIMENT)
    run.write_json("published.json", {"url": "s3://bucket/run"})
    assert not sweep.complete(run, EXPERIMENT)
    run.write_json("published.json", {"url": "s3://bucket/run", "finished": True})
    assert sweep.complete(run, EXPERIMENT)
    summary = json.loads((run.path / "summary.json").read_text())
    run.write_json("summary.json", {**summary, "rounds": 300})
    assert not sweep.complete(run, EXPERIMENT)


def test_a_run_without_the_reporting_packages_is_complete(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    output: list[str] = []

    class Listener(RunObserver):
        def notice(self, text: str) -> None:
            output.append(text)

    assert write_report_if_possible(run, Listener()) is False  # its location is not reported
    assert "jinja2" in output[0]
    assert not (run.path / "report.html").exists()


def test_a_run_is_not_rewound(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("experiment.yaml", EXPERIMENT.resolved_yaml())
    folder.checkpoints.mkdir()
    (folder.checkpoints / "round-000400.safetensors").touch()
    assert check_folder(folder, EXPERIMENT, resume=True)
    fewer = EXPERIMENT.model_copy(update={"federation": EXPERIMENT.federation.model_copy(update={"rounds": 399})})
    with pytest.raises(ExperimentError, match=r"federation\.rounds .*400.*399"):
        check_folder(folder, fewer, resume=True)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_without_any_measured_client_fails(workers: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    people = {name: (random.normal(size=(40, 3)) * 1e6, np.arange(40) % 2) for name in ("ann", "bob", "cy")}
    data = fedloom.Federated.from_arrays(people, root=tmp_path, held_out_fraction=0.3)
    experiment = {
        "name": "diverges",
        "data": data,
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "local", "local": {"steps": 20, "lr": 1e30}},
        "federation": {"rounds": 0, "clients_per_round": 2},
        "runtime": {"workers": workers},
    }
    for resume in (False, True):
        with telling(QuorumError, "3 clients", "round 0", "client-0000") as error:
            fedloom.run(experiment, out=tmp_path / "run", resume=resume, report=False, progress=False)
        assert error.value.exit_code is ExitCode.QUORUM
        assert RunFolder(tmp_path / "run").read("summary.json") is None
    sane = {**experiment, "algorithm": {"name": "local", "local": {"steps": 20, "lr": 0.01}}}
    assert fedloom.run(sane, out=tmp_path / "sane", report=False, progress=False).summary["seen"]["clients"] == 2
