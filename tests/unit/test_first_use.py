"""First experiences at the command line: narrow screens, missing folders, divergence."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from run_folders import write_run

from fedloom.cli.characters import write_anything
from fedloom.cli.tables import print_results, print_table
from fedloom.errors import ExitCode
from fedloom.experiment import parse_experiment
from fedloom.runs.folder import RunFolder

Fedloom = Callable[..., tuple[int, str, str]]

EXPERIMENT = """\
name: first
data:
  dataset: tiny
  root: {root}
  partition: {{scheme: iid, clients: 6}}
  held_out_fraction: 0.2
model: {{name: logistic}}
algorithm: {{name: fedavg, local: {{lr: 0.05, steps: 2}}}}
federation: {{rounds: 1, clients_per_round: 3}}
runtime: {{workers: 0}}
"""


@pytest.fixture
def experiment(tiny_root: Path, tmp_path: Path) -> Path:
    path = tmp_path / "first.yaml"
    path.write_text(EXPERIMENT.format(root=tiny_root))
    return path


DIVERGING = ("--set", "model={name: mlp, hidden: [8]}", "--set", "algorithm.local.lr=1e30")


@pytest.mark.parametrize(
    ("algorithm", "key", "found"),
    [
        ("{name: wga, user: nobody}", "algorithm.user", "'nobody'"),
        ("{name: wga, weights: {nobody: 1.0}}", "algorithm.weights", "'nobody'"),
        ("{name: fedrep}", "model.name", "fedrep"),
    ],
)
def test_a_method_rejects_unsuitable_data_before_anything_is_written(
    fedloom: Fedloom, experiment: Path, tmp_path: Path, algorithm: str, key: str, found: str
) -> None:
    before = sorted(tmp_path.iterdir())
    code, _, err = fedloom("run", experiment, "--out", "new", "--set", f"algorithm={algorithm}")
    assert code == ExitCode.EXPERIMENT
    assert tells(err, "error: ", f"{key}: ", found)
    assert sorted(tmp_path.iterdir()) == before


def test_resuming_a_missing_run_is_reported(fedloom: Fedloom, experiment: Path) -> None:
    code, _, err = fedloom("run", experiment, "--out", "new", "--resume")
    assert code == 0
    assert [line for line in err.splitlines() if "nothing to resume" in line and "new" in line]
    code, _, err = fedloom("run", experiment, "--out", "new", "--resume", "--set", "federation.rounds=2")
    assert code == 0
    assert "nothing to resume" not in err


SUMMARY: dict[str, Any] = {
    "name": "first",
    "algorithm": "fedavg",
    "seed": 1,
    "seen": {
        "clients": 4, "accuracy_mean": 0.8125, "accuracy_std": 0.0625, "accuracy_worst_decile": 0.7187,
        "accuracy_worst": 0.7031, "accuracy_pooled": 0.8203, "loss_mean": 0.5781,
    },
    "unseen": None,
    "global": None,
}  # fmt: skip
FIGURES = ("0.8125", "0.0625", "0.7187", "0.7031", "0.8203", "0.5781")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_results_are_shown_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    write_anything()
    print_results(SUMMARY)
    stream.flush()
    shown = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert all(figure in shown for figure in FIGURES)
    assert "?" not in shown


@pytest.mark.parametrize("columns", [20, 30, 50, 80, 200])
def test_a_narrow_terminal_fits(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_results(SUMMARY)
    shown = capsys.readouterr().out
    assert all(figure in shown for figure in FIGURES)
    assert max(map(len, shown.splitlines())) <= columns


def test_output_to_a_file_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("", ("", "n"), [("a" * 100, "1" * 100)])
    assert "1" * 100 in capsys.readouterr().out


PROGRAM = """
import sys
from fedloom.cli.main import main
for words in (["compare", "run"], ["runs", "."]):
    sys.argv = ["fedloom", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    assert "torch" not in sys.modules, "torch"
"""


@pytest.mark.slow
def test_commands_on_finished_runs_need_no_torch_and_write_ascii(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert done.stdout.lower().count("fedavg") >= 2


def finished_run(folder: Path) -> Path:
    """Write a run of one evaluated round, as `fedloom run` leaves it."""
    text = EXPERIMENT.format(root="/nowhere").replace("dataset: tiny", "dataset: fashion-mnist")
    resolved = parse_experiment(text, (), source="first.yaml").resolved_yaml()
    return write_run(folder, algorithm="fedavg", n=6, unseen=1, rounds=(0, 1), experiment=resolved)


def test_runs_are_listed_with_their_progress(fedloom: Fedloom, experiment: Path, tmp_path: Path) -> None:
    assert fedloom("run", experiment, "--out", "runs/done")[0] == 0
    assert fedloom("run", experiment, "--out", "runs/deep/er/failed", *DIVERGING)[0] == ExitCode.QUORUM
    damaged = tmp_path / "runs" / "damaged"
    shutil.copytree(tmp_path / "runs" / "done", damaged)
    (damaged / "summary.json").write_text("{")
    code, out, _ = fedloom("runs", "--json")
    assert code == 0
    found = {Path(run["path"]).name: run for run in json.loads(out)}
    done, failed = found["done"], found["failed"]
    assert (done["state"], done["done"], done["rounds"]) == ("finished", 1, 1)
    assert (done["name"], done["method"], done["dataset"], done["seed"]) == ("first", "fedavg", "tiny", 1)
    summary = json.loads((tmp_path / "runs" / "done" / "summary.json").read_text())
    assert done["seen"] == summary["seen"]["accuracy_mean"]
    assert (failed["state"], failed["done"], failed["rounds"]) == ("interrupted", 0, 1)
    assert found["damaged"]["state"] == "damaged"
    code, out, err = fedloom("runs")
    assert code == 0
    assert all(name in out for name in ("done", "deep/er/failed", "damaged"))
    assert "summary.json" in err
    with RunFolder(tmp_path / "runs" / "done").held():
        assert json.loads(fedloom("runs", "runs/done", "--json")[1])[0]["state"] == "running"


def test_listing_a_folder_without_runs(fedloom: Fedloom, experiment: Path, tmp_path: Path) -> None:
    code, _, err = fedloom("runs")
    assert code == ExitCode.DATA
    assert "runs" in err
    experiment.rename(tmp_path / "experiment.yaml")  # an experiment file alone is not a run
    code, out, _ = fedloom("runs", ".")
    assert (code, "no runs" in out) == (0, True)
    assert fedloom("runs", ".", "--json")[1].strip() == "[]"


def test_diverging_training_is_reported_before_answer_counts(fedloom: Fedloom, experiment: Path) -> None:
    code, _, err = fedloom("run", experiment, *DIVERGING)
    assert code == ExitCode.QUORUM
    (failed,) = [line for line in err.splitlines() if line.startswith("error:")]
    output = re.search(r"diverged|not finite", failed)
    assert output.start() < failed.index("0 of 3 clients")
    assert "--out" in err.rpartition("error:")[2], "other settings cannot be given to --resume"


@pytest.mark.parametrize("command", ["report", "evaluate", "compare", "runs"])
def test_a_file_in_place_of_a_folder(fedloom: Fedloom, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = fedloom(command, "file")
    assert code == ExitCode.DATA
    assert tells(err, "file", "is a file")


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_file_at_the_path_of_the_run(fedloom: Fedloom, experiment: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = fedloom("run", experiment, "--out", out)
    assert code == ExitCode.EXPERIMENT
    assert tells(err, "error: ", "--out", "folder")
