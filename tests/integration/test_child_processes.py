"""Processes started by FedLoom: where they import from, how long they are waited for, and which errors they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import tells
from run_processes import ENVIRONMENT, WAIT_S

import fedloom
from fedloom.errors import ExperimentError, WorkerLostError

TASK: dict[str, Any] = {
    "name": "children",
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedavg", "local": {"epochs": 1, "batch_size": 8, "lr": 0.05}},
    "federation": {"rounds": 1, "clients_per_round": 2, "deadline_s": 60},
    "runtime": {"workers": 1},
}
MODULE = {"name": "module", "factory": "childrens_models:small"}
FACTORY = """
import os, sys
from torch import nn

def small(classes, input_shape):
    if {condition}:
        {action}
    return nn.Linear(input_shape[0], classes)
"""


def task(folder: Path, **sections: Any) -> dict[str, Any]:
    """Write an experiment on the test's own data into a folder."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(80, 4)).astype("f4"), random.integers(0, 3, 80)
    np.savez(folder / "d.npz", x=x, y=y, who=np.repeat(np.arange(4), 20))
    data = {
        "dataset": "arrays",
        "root": str(folder / "data"),
        "source": {"path": str(folder / "d.npz"), "client": "who"},
        "partition": {"scheme": "natural"},
    }
    return {**TASK, "data": data, **sections}


def factory(folder: Path, monkeypatch: pytest.MonkeyPatch, condition: str = "False", action: str = "pass") -> None:
    code = folder / "code"
    code.mkdir()
    (code / "childrens_models.py").write_text(FACTORY.format(condition=condition, action=action))
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setenv("PYTHONPATH", str(code))
    monkeypatch.delitem(sys.modules, "childrens_models", raising=False)


def program(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder as a user types it: this tests the start itself, so it is not forked."""
    command = [str(Path(sys.executable).parent / "fedloom"), *words] if words[0] != "python" else words
    command = [sys.executable if word == "python" else word for word in command]
    given = {name: value for name, value in ENVIRONMENT.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    return subprocess.run(
        command, cwd=folder, env={**given, **environment}, capture_output=True, text=True, timeout=WAIT_S
    )


ALONE = ["--out", "run"]
BESIDE = ["--out", "sweep", "--seeds", "1-2", "--parallel", "2", "--set", "runtime.workers=0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(ALONE, id="alone"), pytest.param(BESIDE, id="beside others", marks=pytest.mark.exhaustive)]
)
def test_modules_in_the_current_folder_are_not_imported(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps(task(tmp_path)))
    (tmp_path / "random.py").write_text("open('ran', 'w').close()\nraise SystemExit('somebody else is random')\n")
    done = program(tmp_path, "run", "e.json", *how)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_workers_import_the_factory_from_the_folder_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps(task(tmp_path, model=MODULE)))
    (tmp_path / "childrens_models.py").write_text(FACTORY.format(condition="False", action="pass"))
    (tmp_path / "script.py").write_text(
        "import fedloom\nrun = fedloom.run('e.json', out='run', report=False, progress=False)\nassert run.finished\n"
    )
    done = program(tmp_path, "python", "script.py")
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()  # and from another folder, where PYTHONPATH names it
    done = program(tmp_path / "elsewhere", "run", "../e.json", "--out", "run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("forks")
def test_exit_codes_of_user_code_are_not_taken_for_fedlooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factory(tmp_path, monkeypatch, "sys.argv[1:2] == ['worker']", "sys.exit(4)")
    with pytest.raises(WorkerLostError) as error:
        fedloom.run(task(tmp_path, model=MODULE), out=tmp_path / "run", report=False, progress=False)
    assert error.value.exit_code == 7
    assert tells(str(error.value), "worker-0", "4", "2 restarts", "worker-0.jsonl", "resume=True")


@pytest.mark.usefixtures("forks")
def test_a_workers_error_reaches_the_parent_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    action = "raise ValueError('first line\\nerror: second line')"
    factory(tmp_path, monkeypatch, "sys.argv[1:2] == ['worker']", action)
    with pytest.raises(ExperimentError) as error:
        fedloom.run(task(tmp_path, model=MODULE), out=tmp_path / "run", report=False, progress=False)
    assert tells(str(error.value), "worker-0", "childrens_models:small", "ValueError", "first line", "second line")
    log = (tmp_path / "run" / "logs" / "aggregator.jsonl").read_text()
    assert log.count("ended with code 2") == 1  # a restart would fail again


@pytest.mark.usefixtures("forks")
def test_parallel_runs_report_complete_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    action = "raise ValueError('first line\\nerror: second line')"
    factory(tmp_path, monkeypatch, "sys.argv[1:2] == ['run']", action)
    keys = {"runtime__workers": 0, "report": False, "progress": False, "parallel": 2, "seeds": "1-2"}
    done = fedloom.sweep(task(tmp_path, model=MODULE), out=tmp_path / "sweep", **keys)
    assert len(done) == 0
    for failure in done.failures.values():
        assert isinstance(failure, ExperimentError)
        assert tells(str(failure), "childrens_models:small", "ValueError", "first line", "second line")


@pytest.mark.usefixtures("forks")
def test_a_bug_in_a_parallel_run_is_reported_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = "import fedloom.engine.run_experiment as r; r.run_experiment = None"
    factory(tmp_path, monkeypatch, "sys.argv[1:2] == ['run']", action)
    keys = {"runtime__workers": 0, "report": False, "progress": False, "parallel": 2, "seeds": "1-2"}
    done = fedloom.sweep(task(tmp_path, model=MODULE), out=tmp_path / "sweep", **keys)
    assert len(done.failures) == 2
    for failure in done.failures.values():
        assert isinstance(failure, WorkerLostError)
        assert tells(str(failure), "Traceback", "cli/run.py", "TypeError", "resume=True")
    assert os.environ.get("FEDLOOM_TELL_PARENT") is None
