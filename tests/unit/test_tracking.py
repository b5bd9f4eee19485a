"""Trackers get every number, change none, and cannot stop a run."""

from __future__ import annotations

import csv
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from facts import telling, tells
from test_local_data import TASK, people
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.core.plugins import _entries
from fedloom.engine import tracking
from fedloom.engine.observer import RunObserver
from fedloom.engine.tracking import find_trackers
from fedloom.errors import ExperimentError, InterruptedRun
from fedloom.experiment import load_experiment, of
from fedloom.trackers.numbers import NumberTracker


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data", held_out_fraction=0.25)
    rounds = {"rounds": 3, "clients_per_round": 2, "checkpoint_every_s": 0}
    return {**TASK, "data": data, "federation": rounds, "evaluation": {"every": 1}}


def numbers(path: Path) -> dict[tuple[int, str], float]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(int(row["round"]), row["name"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows)  # no number twice
    return found


class Notices(RunObserver):
    def __init__(self, stop_after: int | None = None) -> None:
        self.said: list[str] = []
        self._stop_after = stop_after

    def notice(self, text: str) -> None:
        self.said.append(text)

    def round_done(self, attempt: Any, rounds: int | None) -> None:
        if attempt.round == self._stop_after:
            os.kill(os.getpid(), 2)


@pytest.mark.slow
def test_trackers_get_every_number_and_do_not_change_the_run(task: dict[str, Any], tmp_path: Path) -> None:
    alone = fedloom.run(task, out=tmp_path / "alone", report=False, progress=False)
    names = ["csv", "tensorboard"]
    tracked = fedloom.run(task, out=tmp_path / "tracked", report=False, progress=False, tracking=names)
    assert (tracked.folder / "clients.csv").read_bytes() == (alone.folder / "clients.csv").read_bytes()
    assert tracked.experiment.shared_json() == alone.experiment.shared_json()
    comparison = fedloom.compare([alone, tracked])
    assert "tracking" not in comparison.table.columns
    found = numbers(tracked.folder / "tracking.csv")
    assert found[3, "unseen/accuracy_mean"] == tracked.summary["unseen"]["accuracy_mean"]
    assert found[2, "train/loss"] == tracked.history.loc[2, "train.loss"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.folder / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("unseen/accuracy_mean")}
    assert shown == pytest.approx({t: found[t, "unseen/accuracy_mean"] for t in range(4)}, abs=1e-6)


@pytest.mark.slow
def test_a_resumed_run_logs_each_number_once(task: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InterruptedRun):
        fedloom.run(task, out=tmp_path / "run", report=False, progress=Notices(stop_after=2), tracking=["csv"])
    run = fedloom.run(
        task, out=tmp_path / "run", report=False, progress=False, resume=True, tracking=["csv", "tensorboard"]
    )
    found = numbers(run.folder / "tracking.csv")
    assert {t for t, name in found if name == "train/loss"} == {1, 2, 3}


class Breaks(RunObserver):
    def __init__(self, folder: Path) -> None:
        pass

    def evaluated(self, line: dict[str, Any]) -> None:
        line.clear()
        raise OSError("disk of the tracker is full\nand more")


class BreaksAtOnce(Breaks):
    def __init__(self, folder: Path) -> None:
        raise RuntimeError("nobody at home")


class Unreachable(Breaks):
    """Tracker whose library quotes the address of its server, as MLflow's does: with the password in it."""

    def __init__(self, folder: Path) -> None:
        try:
            urllib.request.urlopen(f"{os.environ['MLFLOW_TRACKING_URI']}/api")
        except OSError as error:
            raise RuntimeError(f"API request to {os.environ['MLFLOW_TRACKING_URI']}/api failed: {error}") from error


TRAINED = threading.Event()


class Late(NumberTracker):
    """Tracker whose server comes up when the run has trained."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "late.txt"
        if not TRAINED.wait(30):
            raise TimeoutError("the run waits for this tracker")

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(f"{round} {'train/loss' in numbers}\n")


class Silent(NumberTracker):
    """Tracker of a server that accepts connections and never answers."""

    def __init__(self, folder: Path) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        if round:
            with closing(socket.create_connection(self._server.getsockname(), timeout=30)) as connection:
                connection.recv(1)


@pytest.fixture
def plugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    about = site / "extra_trackers-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-trackers\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(
        "[fedloom.observers]\nbreaks = test_tracking:Breaks\natonce = test_tracking:BreaksAtOnce\n"
        "unreachable = test_tracking:Unreachable\n"
        "late = test_tracking:Late\nsilent = test_tracking:Silent\nabsent = not_installed_at_all.part:Thing\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setitem(sys.modules, "test_tracking", sys.modules[__name__])
    _entries.cache_clear()


@pytest.mark.usefixtures("plugged")
def test_a_failing_tracker_does_not_stop_a_run(task: dict[str, Any], tmp_path: Path) -> None:
    seen = Notices()
    names = ["breaks", "atonce", "csv"]
    run = fedloom.run(task, out=tmp_path / "run", report=False, progress=seen, tracking=names)
    assert run.finished
    assert len(run.history) == 4
    assert len(numbers(run.folder / "tracking.csv"))
    output = sorted(text for text in seen.said if "failed" in text)
    assert len(output) == 2
    assert tells(output[0], "tracking", "atonce", "RuntimeError", "nobody at home")
    assert tells(output[1], "tracking", "breaks", "OSError", "disk of the tracker is full")
    lost = [text for text in seen.said if "did not log" in text]
    assert all(tells(text, "7 of 7", "metrics.jsonl") for text in lost)
    assert {name for text in lost for name in names if name in text.split()} == {"breaks", "atonce"}


@pytest.mark.usefixtures("plugged")
def test_a_run_does_not_wait_for_a_tracker(task: dict[str, Any], tmp_path: Path) -> None:
    class Trained(Notices):
        def round_done(self, attempt: Any, rounds: int | None) -> None:
            if attempt.round == rounds:
                TRAINED.set()

    TRAINED.clear()
    seen = Trained()
    run = fedloom.run(task, out=tmp_path / "run", report=False, progress=seen, tracking=["late"])
    assert not any("tracking" in text for text in seen.said)
    lines = [(t, kind) for t in (1, 2, 3) for kind in (True, False)]  # trained, then evaluated
    logged = (run.folder / "late.txt").read_text().splitlines()
    assert logged == [f"{t} {kind}" for t, kind in [(0, False), *lines]]


@pytest.mark.usefixtures("plugged")
def test_a_silent_tracker_is_given_up(task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "CALL_S", 0.5)
    seen = Notices()
    began = time.monotonic()
    run = fedloom.run(task, out=tmp_path / "run", report=False, progress=seen, tracking=["silent"])
    assert run.finished
    assert time.monotonic() - began < 20  # the connection itself would wait for 30 s
    failed, lost = (text for text in seen.said if "tracking" in text)
    assert tells(failed, "silent", "0.5 s")
    assert tells(lost, "silent", "6 of 7")  # the evaluation of round 0 was logged


@pytest.mark.usefixtures("plugged")
def test_a_stopped_run_leaves_a_tracker(task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "STOP_S", 0.2)
    seen = Notices(stop_after=2)
    began = time.monotonic()
    with pytest.raises(InterruptedRun):
        fedloom.run(task, out=tmp_path / "run", report=False, progress=seen, tracking=["silent"])
    assert time.monotonic() - began < 20
    assert tells(seen.said[-1], "silent", "metrics.jsonl")


@pytest.mark.usefixtures("plugged")
def test_a_password_in_the_address_of_a_tracker_is_not_shown_or_stored(
    task: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:hunter2@tracker.invalid:9")
    seen = Notices()
    run = fedloom.run(task, out=tmp_path / "run", report=False, progress=seen, tracking=["unreachable"])
    assert any(tells(text, "unreachable", "http://tracker.invalid:9/api") for text in seen.said)
    stored = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    assert any(b"http://tracker.invalid:9/api" in content for content in stored)
    assert not any(b"hunter2" in content for content in stored)
    assert "hunter2" not in "".join((*seen.said, caplog.text, *capfd.readouterr()))


@pytest.mark.usefixtures("plugged")
def test_an_unknown_tracker_is_rejected_before_the_run(task: dict[str, Any], tmp_path: Path) -> None:
    for name, output in (
        ("nothing", ("nothing", "csv", "tensorboard")),
        ("absent", ("absent", "not_installed_at_all")),
    ):
        with telling(ExperimentError, "tracking", *output):
            fedloom.run(task, out=tmp_path / "run", progress=False, tracking=[name])
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_the_package_to_install_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"fedloom.trackers.{name}", raising=False)
    with telling(ExperimentError, name, "not installed", f"fedloom[{name}]"):
        find_trackers([name])


def test_trackers_are_chosen_on_the_command_line_and_in_its_environment(
    task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "e.yaml").write_text(of(task).resolved_yaml())
    command = ["run", str(tmp_path / "e.yaml"), "--no-report", "--out"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "a"), "--set", "tracking=[csv]"])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("FEDLOOM_TRACK", "csv")
    done = CliRunner().invoke(app, [*command, str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    first, second = (numbers(tmp_path / name / "tracking.csv") for name in "ab")
    assert first.keys() == second.keys()
    assert first[3, "train/loss"] == second[3, "train/loss"]


def test_trackers_are_chosen_in_the_experiment(task: dict[str, Any], tmp_path: Path) -> None:
    e = of(task, tracking=["csv"])
    (tmp_path / "e.yaml").write_text(e.resolved_yaml())
    assert load_experiment(tmp_path / "e.yaml").tracking == ("csv",)
    with pytest.raises(ExperimentError, match="tracking"):
        of(task, tracking="csv")
