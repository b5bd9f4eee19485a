"""Completion by a shell, as its script asks for it: keys of experiments, runs and names."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import write_run

from fedloom.algorithms.base import available
from fedloom.cli.completion import KEYS, experiment_keys

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("fedloom")


def completed(folder: Path, line: str, shell: str = "bash") -> list[str]:
    """Return what ``fedloom`` answers to a shell about the last word; it must not have imported slow packages."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": line}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(SCRIPT)],
        env=os.environ | words | {"_FEDLOOM_COMPLETE": f"complete_{shell}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    imported = {row.rpartition("|")[2].strip().partition(".")[0] for row in done.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "numpy", "grpc", "yaml"})
    assert "fedloom" in imported
    return [row for row in done.stdout.splitlines() if row]


@pytest.mark.slow
def test_keys_of_experiments(tmp_path: Path) -> None:
    found = completed(tmp_path, "fedloom run e.yaml --set federation.clients")
    assert found == ["federation.clients_per_round="]
    assert "algorithm.local.lr=" in completed(tmp_path, "fedloom check e.yaml --set algorithm.local.")
    (about,) = (
        each for each in completed(tmp_path, "fedloom run e.yaml --set federation.rou", "zsh") if "rounds" in each
    )
    assert experiment_keys()["federation.rounds"][0].split()[0] in about
    assert "algorithm.name=fedavg" in "\n".join(
        completed(tmp_path, "fedloom run e.yaml --set algorithm.name=feda", "zsh")
    )


@pytest.mark.slow
def test_runs_and_names(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    write_run(tmp_path / "sweep" / "second")
    (tmp_path / "runs" / "notes").mkdir()
    assert completed(tmp_path, "fedloom evaluate ") == ["runs/first"]
    assert completed(tmp_path, "fedloom compare sw") == ["sweep/"]
    assert completed(tmp_path, "fedloom status sweep/") == ["sweep/second"]
    assert completed(tmp_path, "fedloom new hos") == ["hospitals"]
    assert completed(tmp_path, "fedloom data fetch fash") == ["fashion-mnist"]
    assert completed(tmp_path, "fedloom datas") == ["datasets"]


def test_stored_keys_are_those_of_the_code() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate_keys.py"))["completed_keys"]()
    assert KEYS.read_text(encoding="utf-8") == made, "make docs"
    assert set(experiment_keys()["algorithm.name"][1]) == set(available())


@pytest.mark.parametrize("path", ["~", "/"])
def test_a_path_that_is_no_run_does_not_fail(tmp_path: Path, path: str) -> None:
    assert all(each.startswith(path) or each == path for each in completed(tmp_path, f"fedloom report {path}"))
