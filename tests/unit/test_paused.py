"""Pause, resume and stop, without a wire: the record, and its effect on the round loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from federations import Silent, clients, federation, setup
from published_runs import aggregator, run_folder

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.errors import DataError, InterruptedRun, StorageError
from fedloom.federation.monitor import CONTROL, Control, Monitor, read_pause
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, Journal
from fedloom.storage import open_store

SETTINGS = FedAvgSettings.model_validate({"local": {"steps": 2, "batch_size": 4, "lr": 0.1}})


def no_stop(now: bool) -> None:
    raise AssertionError("nobody asked for it")


def control() -> Control:
    return Control(Monitor(), no_stop)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_pause_is_recorded_and_survives_a_restart(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = control()
    first.keep(folder)
    assert (read_pause(folder), (tmp_path / CONTROL).exists()) == (None, False)
    assert (first.pause("operator"), first.pause("another")) == (True, False)
    second = control()
    second.keep(folder)
    assert second.paused is not None
    assert (second.paused.by, second.monitor.now().paused_by) == ("operator", "operator")
    assert (second.resume(), second.resume()) == (True, False)
    assert read_pause(folder) is None
    assert second.monitor.now().paused_by is None


def test_a_pause_requested_before_the_folder_exists_is_recorded_later(tmp_path: Path) -> None:
    early = control()
    early.pause("operator")
    early.keep(RunFolder(tmp_path))
    assert read_pause(RunFolder(tmp_path)) == early.paused


def test_a_pause_that_cannot_be_recorded_has_no_effect(tmp_path: Path) -> None:
    kept = control()
    kept.keep(RunFolder(tmp_path / "gone"))
    with pytest.raises(StorageError):
        kept.pause("operator")
    assert (kept.paused, kept.monitor.now().paused_by) == (None, None)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2, "paused": null}', '{"version": 1}', '{"version": 1, "paused": {"by": 1}}']
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / CONTROL).write_text(text)
    with pytest.raises(DataError) as refused:
        control().keep(RunFolder(tmp_path))
    assert tells(str(refused.value), CONTROL)


class PauseAfter(Silent):
    """Observer that requests a pause as a round ends."""

    def __init__(self, kept: Control, round: int = 2) -> None:
        self.kept, self.round = kept, round

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        if attempt.round == self.round:
            self.kept.pause("operator")


def paused_run(folder: Path, *, after: int = 2) -> tuple[Any, Control, threading.Thread, list[BaseException]]:
    kept = control()
    kept.keep(RunFolder(folder))
    held = federation(folder, FEDAVG, SETTINGS, setup(n=4), clients([4, 6, 8, 5]), rounds=4, cohort=2, control=kept)
    held.loop.observer = PauseAfter(kept, after)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            held.run()
        except BaseException as error:
            failed.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    until(lambda: kept.monitor.now().phase == "paused")
    return held, kept, running, failed


@pytest.mark.parametrize("after", [2, 4])  # a round follows; an evaluation, and nothing after it
def test_a_pause_holds_between_rounds_with_the_last_one_durable_and_equal_results(tmp_path: Path, after: int) -> None:
    alone = federation(tmp_path / "alone", FEDAVG, SETTINGS, setup(n=4), clients([4, 6, 8, 5]), rounds=4, cohort=2)
    alone.run()
    held, kept, running, failed = paused_run(tmp_path / "paused", after=after)
    now = kept.monitor.now()
    assert (now.round, now.durable_round, now.doing, now.paused_by) == (after, after, None, "operator")
    assert Journal.read(RunFolder(tmp_path / "paused")).whole == after
    kept.resume()
    running.join(60)
    assert failed == []
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, held.state[name])
    lines = list(RunFolder(tmp_path / "paused").objects("journal.jsonl"))
    ((at, line),) = ((i, line) for i, line in enumerate(lines) if "paused" in line)
    assert (at, line["outcome"]) == ((2, "done") if after == 2 else (4, "evaluated"))
    assert line["paused"]["by"] == "operator"
    assert line["paused"]["seconds"] > 0
    assert kept.monitor.now().totals.seconds < sum(kept.monitor.now().totals.phases.values())
    again = federation(
        tmp_path / "again", FEDAVG, SETTINGS, setup(n=4), clients([4, 6, 8, 5]), rounds=4, cohort=2,
        repeated=RunFolder(tmp_path / "paused"),
    )  # fmt: skip
    again.run()
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, again.state[name])


def test_a_stopped_paused_run_resumes_paused_and_ends_equally(tmp_path: Path) -> None:
    alone = federation(tmp_path / "alone", FEDAVG, SETTINGS, setup(n=4), clients([4, 6, 8, 5]), rounds=4, cohort=2)
    alone.run()
    held, _, running, failed = paused_run(tmp_path / "paused")
    held.loop.stop.set()
    running.join(60)
    assert isinstance(failed[0], InterruptedRun)
    later = control()
    later.keep(RunFolder(tmp_path / "paused"))
    resumed = federation(
        tmp_path / "paused", FEDAVG, SETTINGS, setup(n=4), clients([4, 6, 8, 5]), rounds=4, cohort=2, control=later
    )
    resumed.loop.resume()
    running = threading.Thread(target=resumed.run, daemon=True)
    running.start()
    until(lambda: later.monitor.now().phase == "paused")
    assert (later.monitor.now().round, later.monitor.now().durable_round) == (2, 2)
    later.resume()
    running.join(60)
    for name, tensor in alone.state.items():
        assert torch.equal(tensor, resumed.state[name])


def test_a_published_run_shows_pause_and_resumption(tmp_path: Path) -> None:
    reported: list[tuple[int, bool]] = []
    kept = control()
    kept.keep(RunFolder(tmp_path))
    held = federation(
        tmp_path, FEDAVG, SETTINGS, setup(n=3), clients([4, 6, 8]), rounds=3, control=kept, checkpoint_every_s=0,
        after=lambda round: reported.append((round, read_pause(RunFolder(tmp_path)) is not None)),
    )  # fmt: skip
    held.loop.observer = PauseAfter(kept)
    running = threading.Thread(target=held.run, daemon=True)
    running.start()
    until(lambda: reported[-1:] == [(2, True)] and kept.monitor.now().phase == "paused")
    kept.resume()
    running.join(60)
    assert (2, False) in reported[reported.index((2, True)) :]
    assert reported[-1] == (3, False)


def test_another_aggregator_adopts_a_published_pause(tmp_path: Path) -> None:
    kept, store = control(), open_store(tmp_path / "store")
    mine = run_folder(tmp_path / "mine", 3)
    kept.keep(mine)
    kept.pause("operator")
    aggregator(mine.path, store, "life-1").publish(3)
    other = RunFolder(tmp_path / "other")
    assert aggregator(other.path, store, "life-2").restore()
    assert read_pause(other) == kept.paused
