"""Paths that begin with ``~``, and errors for a user without a home folder: they name the variable to set."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from typer.main import get_command
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.cluster import api
from fedloom.core.home import expanded
from fedloom.data.folders import data_root
from fedloom.data.pack import PackSettings, pack
from fedloom.errors import ExitCode, ExperimentError
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
        (["data", "fetch", "vowel", "--from=~/nothing"], None),
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
    assert len(found) > 35
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
