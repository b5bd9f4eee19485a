"""Paths that begin with ``~`` or are relative, and errors for a user without a home folder."""

from __future__ import annotations

import json
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import telling, tells
from run_folders import put
from typer.main import get_command
from typer.testing import CliRunner, Result

import fedloom
from fedloom.cli.main import app
from fedloom.cluster import api
from fedloom.core.home import expanded
from fedloom.data.folders import data_root
from fedloom.data.pack import PackSettings, pack
from fedloom.engine.trained import evaluate
from fedloom.errors import DataError, ExitCode, ExperimentError
from fedloom.experiment import load_experiment
from fedloom.storage import open_store


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "FEDLOOM_DATA", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_the_variable_to_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExperimentError) as raised:
        data_root()
    assert raised.value.exit_code == ExitCode.EXPERIMENT
    assert tells(str(raised.value.hint), "FEDLOOM_DATA", "HOME")
    with pytest.raises(ExperimentError) as raised:
        open_store("~/runs")
    assert tells(str(raised.value.hint), "HOME")
    with pytest.raises(ExperimentError) as raised:
        api._configuration(object())
    assert tells(str(raised.value.hint), "KUBECONFIG")
    monkeypatch.setenv("FEDLOOM_DATA", "/data")
    assert data_root() == Path("/data")


@pytest.mark.usefixtures("homeless")
def test_a_path_without_a_home_folder_is_kept() -> None:
    assert expanded("data/x") == Path("data/x")
    assert data_root("/d") == Path("/d")


EXPERIMENT = """
name: home
data: {dataset: table, source: {path: ~/t.csv}, root: ~/data, partition: {scheme: iid, clients: 3}}
model: {name: logistic}
algorithm: {name: fedavg, local: {epochs: 1, batch_size: 8, lr: 0.05}}
federation: {rounds: 1, clients_per_round: 2}
runtime: {workers: 0}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder with a table and an experiment; another folder is the current one."""
    found, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    found.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(found))
    monkeypatch.chdir(elsewhere)
    (found / "t.csv").write_text("a,label\n" + "".join(f"{i},{'xy'[i % 2]}\n" for i in range(60)))
    (found / "e.yaml").write_text(EXPERIMENT)
    return found


def test_options_and_arguments_take_paths_in_the_home_folder(home: Path) -> None:
    for words, made in (
        (["data", "pack", "~/t.csv", "--out=~/client"], "client/client.json"),
        (["partition", "~/e.yaml", "--out=~/parts"], "parts/partition.json"),
        (["run", "~/e.yaml", "--no-report", "--out=~/run", "--partition=~/parts"], "run/summary.json"),
        (["personalize", "~/run", "--out=~/models"], "models"),
        (["data", "fetch", "vowel", "--from=~/nothing", "--root=~/data"], None),
    ):
        done = CliRunner().invoke(app, words)
        if made is None:
            assert str(home / "nothing") in str(done.exception)
        else:
            assert done.exit_code == 0, done.output
            assert (home / made).exists()
    assert not list(Path().iterdir())


def test_every_command_takes_paths_in_the_home_folder() -> None:
    def leaves(command: Any) -> Iterator[Any]:
        for inner in getattr(command, "commands", {}).values():
            yield from leaves(inner)
        if not hasattr(command, "commands"):
            yield command

    found = list(leaves(get_command(app)))
    assert len(found) > 40
    assert {type(command).invoke for command in found} == {type(found[0]).invoke}


def test_functions_take_paths_in_the_home_folder(home: Path) -> None:
    run = fedloom.run("~/e.yaml", out="~/run", report=False, progress=False)
    assert run.folder == home / "run"
    assert fedloom.load("~/run").folder == home / "run"
    assert fedloom.compare("~/run").write("~/page") == home / "page" / "compare.html"
    next(iter(run.models().values())).save("~/model.safetensors")
    assert (home / "model.safetensors").exists()
    pack(home / "t.csv", home / "client", PackSettings())
    saved = fedloom.personalize("~/run", data="~/client").save("~/another.safetensors")
    assert home / "another.safetensors" in saved
    assert not list(Path().iterdir())


def test_only_one_module_looks_up_the_home_folder() -> None:
    """``Path.expanduser`` and ``Path.home`` raise unexpected errors."""
    source = Path(__file__).parents[2] / "src" / "fedloom"
    found = [
        path for path in source.rglob("*.py") if any(w in path.read_text() for w in (".expanduser()", "Path.home("))
    ]
    assert found == [source / "core" / "home.py"]


ELSEWHERE = """name: t
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
    Path("e.yaml").write_text(ELSEWHERE)
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
    with telling(DataError, "partition"):
        command(*again, *moved)
    with pytest.raises(ExperimentError, match=r"data\.source\.client"):
        command(*again, "--set", "data.source={path: ../d.npz}", "--set", "data.partition={scheme: iid, clients: 3}")


def test_another_partition_is_not_accepted_for_the_runs(elsewhere: Path) -> None:
    path = elsewhere / "r" / "partition.json"
    put(path, path.read_text().replace('"seed":1', '"seed":2'))  # as by a FedLoom that assigned differently
    with telling(DataError, "partition", "data"):
        evaluate(Path("../r"))


def test_an_absolute_path_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=np.eye(12, 4, dtype="f4"), y=np.arange(12) % 3, who=np.zeros(12, dtype=int))
    text = ELSEWHERE.replace("path: d.npz", f"path: {tmp_path / 'd.npz'}").replace("root: data", f"root: {tmp_path}")
    (tmp_path / "e.yaml").write_text(text.replace("storage: kept", "storage: s3://bucket/prefix"))
    e = load_experiment(tmp_path / "e.yaml")
    assert e.located() == e
    monkeypatch.chdir(tmp_path)
    assert fedloom.Federated.from_arrays({"a": (np.eye(12), np.arange(12))}, root="here").section["root"] == str(
        tmp_path / "here"
    )
