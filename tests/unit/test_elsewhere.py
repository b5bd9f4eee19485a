"""A run is used from another folder than the one it was started in, and after its source is removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import tells
from run_folders import put
from typer.testing import CliRunner, Result

import fedloom
from fedloom.cli.main import app
from fedloom.engine.trained import evaluate
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import load_experiment

EXPERIMENT = """name: t
data:
  {dataset: arrays, source: {path: d.npz, client: who}, root: data, partition: {scheme: natural},
   held_out_fraction: 0.25}
model: {name: logistic}
algorithm: {name: fedavg, local: {epochs: 1, batch_size: 8, lr: 0.05}}
federation: {rounds: 2, clients_per_round: 2}
runtime: {workers: 0}
storage: kept
"""


def command(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder ``home`` with a finished run ``r`` on data with relative paths; change to another folder."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 4)).astype("f4"), random.integers(0, 3, 120)
    np.savez("d.npz", x=x, y=y, who=np.repeat(np.arange(4), 30))
    Path("e.yaml").write_text(EXPERIMENT)
    assert command("run", "e.yaml", "--out", "r", "--no-report").exit_code == 0
    monkeypatch.chdir(home / "elsewhere")
    yield home
    assert not list((home / "elsewhere").glob("data")), "no other data root was begun"


def accuracies(found: dict[str, Any]) -> list[float]:
    return [found[group]["accuracy_pooled"] for group in ("seen", "unseen")]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["there", "gone"])
def test_a_finished_run_is_usable_from_another_folder(elsewhere: Path, source: str) -> None:
    if source == "gone":
        (elsewhere / "d.npz").unlink()
    summary = json.loads((elsewhere / "r" / "summary.json").read_text())
    found = evaluate(Path("../r"))
    assert accuracies(found.statistics) == accuracies(summary)
    assert command("evaluate", "../r").exit_code == 0
    assert command("personalize", "../r", "--out", "models").exit_code == 0
    assert command("report", "../r").exit_code == 0
    run = fedloom.load("../r")
    assert Path(run.experiment.data.source.path) == elsewhere / "d.npz"
    assert Path(run.experiment.data.root) == elsewhere / "data"
    assert Path(run.experiment.storage) == elsewhere / "kept"
    model = fedloom.personalize("../r", np.zeros((12, 4), dtype="f4"), np.arange(12) % 3)
    assert model.classes == ("0", "1", "2")


@pytest.mark.parametrize("file", ["../e.yaml", pytest.param("../r/experiment.yaml", marks=pytest.mark.exhaustive)])
def test_a_run_is_resumed_from_another_folder(elsewhere: Path, file: str) -> None:
    more = ["--set", "federation.rounds=3", "--no-report"]
    done = command("run", file, "--out", "../r", "--resume", *more)
    assert done.exit_code == 0, done.output
    assert json.loads((elsewhere / "r" / "summary.json").read_text())["rounds"] == 3
    there = fedloom.run(Path(file), out="../r", resume=True, report=False, progress=False, federation__rounds=4)
    assert there.summary["rounds"] == 4
    # Without a run to resume, a relative path starts from the current folder, as usual.
    with pytest.raises(ExperimentError, match=r"d\.npz"):
        command("run", "../e.yaml", "--out", "new")


@pytest.mark.slow
def test_a_sweep_is_resumed_from_another_folder(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(elsewhere)
    assert command("run", "e.yaml", "--seeds", "1", "--out", "s", "--no-report").exit_code == 0
    monkeypatch.chdir(elsewhere / "elsewhere")
    again = ["run", "../e.yaml", "--seeds", "1,2", "--out", "../s", "--resume", "--no-report"]
    assert command(*again).exit_code == 0
    swept = fedloom.sweep(Path("../e.yaml"), seeds="1-3", out="../s", resume=True, report=False, progress=False)
    assert [run.finished for run in swept] == [True] * 3


def test_a_run_is_resumed_only_with_its_own_examples(elsewhere: Path) -> None:
    held = dict(np.load(elsewhere / "d.npz"))
    np.savez("moved.npz", **held)
    moved = [f"--set=data.source.path={Path('moved.npz').absolute()}", f"--set=data.root={elsewhere / 'data'}"]
    again = ["run", "../r/experiment.yaml", "--out", "../r", "--resume", "--no-report", "--set=federation.rounds=3"]
    assert command(*again, *moved).exit_code == 0
    np.savez("moved.npz", **{**held, "x": held["x"] + 1})
    with pytest.raises(DataError) as error:
        command(*again, *moved)
    assert tells(str(error.value), "partition")
    with pytest.raises(ExperimentError, match=r"data\.source\.client"):
        command(*again, "--set", "data.source={path: ../d.npz}", "--set", "data.partition={scheme: iid, clients: 3}")


def test_another_partition_is_not_accepted_for_the_runs(elsewhere: Path) -> None:
    path = elsewhere / "r" / "partition.json"
    put(path, path.read_text().replace('"seed":1', '"seed":2'))  # as by a FedLoom that assigned differently
    with pytest.raises(DataError) as error:
        evaluate(Path("../r"))
    assert tells(str(error.value), "partition", "data")


def test_an_absolute_path_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=np.eye(12, 4, dtype="f4"), y=np.arange(12) % 3, who=np.zeros(12, dtype=int))
    text = EXPERIMENT.replace("path: d.npz", f"path: {tmp_path / 'd.npz'}").replace("root: data", f"root: {tmp_path}")
    (tmp_path / "e.yaml").write_text(text.replace("storage: kept", "storage: s3://bucket/prefix"))
    e = load_experiment(tmp_path / "e.yaml")
    assert e.located() == e
    monkeypatch.chdir(tmp_path)
    assert fedloom.Federated.from_arrays({"a": (np.eye(12), np.arange(12))}, root="here").section["root"] == str(
        tmp_path / "here"
    )
