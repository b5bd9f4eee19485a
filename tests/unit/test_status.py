"""Activity of a federation: its monitor, and ``fedloom status``, with and without ``--clients``, from a run's files."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from federations import clients, federation, setup
from rich.console import Console
from typer.testing import CliRunner

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.cli import status as shown
from fedloom.cli.main import app
from fedloom.cli.status import duration, status_lines
from fedloom.data.manifest import ClientEntry
from fedloom.errors import AbandonedError, DataError
from fedloom.federation.activity import Activity, Awaited, ClientCounts, Connected, ConnectedWorker
from fedloom.federation.monitor import Control, Monitor
from fedloom.reporting.status import RunStatus
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Attempt, ConversationRecord, Loss
from fedloom.runs.listing import list_runs, newest_run
from fedloom.runs.published import PublishedRun, Publisher
from fedloom.storage import open_store

EXPERIMENT = """\
name: small
seed: 1
data: {dataset: vowel}
model: {name: mlp}
algorithm: {name: fedavg}
federation: {rounds: ROUNDS, until: null}
"""

SETTINGS = FedAvgSettings.model_validate({"local": {"steps": 1, "batch_size": 4, "lr": 0.1}})


def run(folder: Path, *, made: int = 3, rounds: int | str = 3, lost: dict[int, int] | None = None) -> RunFolder:
    """Return the files of a partially completed run, by the real loop."""
    data = clients([4, 6, 8])
    held = federation(
        folder, FEDAVG, SETTINGS, setup(n=3), data, rounds=made, checkpoint_every_s=0, unseen=["c2"], lost=lost
    )
    held.run()
    written = RunFolder(folder)
    written.write("experiment.yaml", EXPERIMENT.replace("ROUNDS", str(rounds)))
    written.write("partition.json", held.loop.manifest.to_json())
    return written


def finish(folder: RunFolder, rounds: int) -> None:
    nothing = {"clients": 2, "accuracy_mean": 0.5, "loss_mean": 1.0}
    folder.write_json("summary.json", {"rounds": rounds, "seen": nothing, "unseen": None, "global": None})


def test_the_status_is_read_from_the_files_of_a_run(tmp_path: Path) -> None:
    folder = run(tmp_path, rounds=5, lost={0: 1})
    now = RunStatus(folder).activity()
    assert (now.run, now.method, now.phase, now.round, now.rounds) == ("small", "fedavg", "interrupted", 3, 5)
    assert (now.durable_round, now.totals.rounds, now.totals.failed_attempts) == (3, 3, 0)
    assert (now.clients.roster, now.clients.observing, now.clients.connected) == (3, 1, None)
    assert (now.clients.cohort, now.clients.answered) == (2, 1)
    assert (now.measured.round, now.measured.groups["seen"].clients) == (3, 2)
    *_, line = folder.lines("metrics.jsonl")
    assert now.measured.train_loss == line["train"]["loss"] is not None
    assert now.totals.seconds == pytest.approx(sum(now.totals.exchanges.values()))
    assert [(c.id, c.observes, c.examples, c.last_round) for c in RunStatus(folder).clients()] == [
        ("c0", False, 4, 3), ("c1", False, 6, None), ("c2", True, 8, None),
    ]  # fmt: skip


def test_phases_of_a_working_finished_and_resumed_run(tmp_path: Path) -> None:
    folder = run(tmp_path)
    with folder.held():
        assert RunStatus(folder).activity().phase == "running"
    finish(folder, 3)
    assert RunStatus(folder).activity().phase == "finished"
    folder.write("experiment.yaml", EXPERIMENT.replace("ROUNDS", "9"))
    assert RunStatus(folder).activity().phase == "interrupted"


def test_a_run_starts_although_another_process_looks_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(tmp_path)
    looking = os.open(folder.path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: os.close(looking))
    with folder.held():
        assert folder.is_held()


def test_a_journal_is_read_incrementally_and_again_after_truncation(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    lines = (tmp_path / "run" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    journal = tmp_path / "run" / "journal.jsonl"
    journal.write_bytes(lines[0] + lines[1][:20])  # the second is incomplete
    files = RunStatus(folder)
    assert files.activity().round == 1
    with journal.open("ab") as more:
        more.write(lines[1][20:])
    assert (files.activity().round, files.activity().totals.rounds) == (2, 2)
    folder.line_file("journal.jsonl").cut(len(lines[0]))
    assert (files.activity().round, files.activity().totals.rounds) == (1, 1)
    with journal.open("ab") as more:
        more.write(b"no object\n")
    with pytest.raises(DataError, match=r"journal\.jsonl"):
        files.activity()


def test_a_pause_is_shown_for_a_run_that_is_not_working(tmp_path: Path) -> None:
    folder = run(tmp_path, rounds=5)
    held = Control(RunStatus(folder)._monitor, lambda now: None)
    held.keep(folder)
    held.pause("operator")
    assert RunStatus(folder).activity().paused_by == "operator"


def test_the_newest_run_is_the_last_one_worked_on(tmp_path: Path) -> None:
    for name, when in (("b", 100), ("a", 300), ("c", 200)):
        folder = run(tmp_path / name)
        for file in folder.path.iterdir():
            os.utime(file, (when, when))
    assert newest_run(tmp_path) == tmp_path / "a"
    with pytest.raises(DataError, match="nowhere"):
        newest_run(tmp_path / "nowhere")


def test_status_of_a_run_in_a_store(tmp_path: Path) -> None:
    folder, store = run(tmp_path / "run", rounds=5), open_store(tmp_path / "store")
    copy = RunFolder(tmp_path / "look")
    copy.published = PublishedRun(store, copy.path, checkpoints=False)
    looked = RunStatus(copy)
    with pytest.raises(DataError, match="store"):
        looked.activity()
    published = Publisher(folder, store, "life-1")
    published.publish(2)
    now = looked.activity()
    assert (now.phase, now.round, now.durable_round) == ("published", 3, 2)
    assert [client.id for client in looked.clients()] == ["c0", "c1", "c2"]
    assert not (tmp_path / "look" / "checkpoints").exists()
    folder.append(
        "journal.jsonl", json.loads((tmp_path / "run/journal.jsonl").read_text().splitlines()[-1]) | {"round": 4}
    )
    published.publish(4)
    assert (looked.activity().round, looked.activity().totals.rounds) == (4, 4)
    finish(folder, 4)
    published.finish()
    assert looked.activity().phase == "finished"


def test_a_run_without_an_end_is_listed(tmp_path: Path) -> None:
    run(tmp_path / "endless", rounds="null")
    (found,) = list_runs(tmp_path)
    assert (found.state, found.done, found.rounds) == ("interrupted", 3, None)
    assert "3" in CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout


# ---- the commands


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        (["status", "{t}/absent"], 3, ("{t}/absent", "folder", "exist", "fedloom run")),
        (["status", "{t}"], 3, ("no experiment.yaml",)),
        (["status", "--clients", "{t}"], 3, ("no experiment.yaml",)),
        (["status", "localhost:99999"], 2, ("HOST:PORT", "99999")),
        (["status", "127.0.0.1:1"], 8, ("127.0.0.1:1", "nothing listens")),
        (["status", "--clients", "127.0.0.1:1"], 8, ("127.0.0.1:1",)),
        (["federation", "pause", "127.0.0.1:1"], 8, ("127.0.0.1:1",)),
        (["status", "--clients", "--follow"], 2, ("--follow", "--clients")),
        (["federation", "stop", "{t}"], 2, ("HOST:PORT", "{t}")),
        (["status", "ftp://x/y"], 2, ("ftp://x/y",)),
        (["status", "h:1", "--credentials", "{t}/absent"], 2, ("absent",)),
    ],
)
def test_errors_are_one_sentence(tmp_path: Path, arguments: list[str], code: int, facts: tuple[str, ...]) -> None:
    ended = CliRunner().invoke(app, [word.format(t=tmp_path) for word in arguments])
    assert (getattr(ended.exception, "exit_code", None), ended.stdout) == (code, "")
    assert tells(str(ended.exception), *(fact.format(t=tmp_path) for fact in facts))


def test_the_newest_run_is_shown_without_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["status"])
    assert getattr(ended.exception, "exit_code", None) == 3
    run(tmp_path / "runs" / "mine", rounds=5)
    assert tells(CliRunner().invoke(app, ["status"]).stdout, "small", "fedavg", "interrupted", "round 3 of 5")
    reported = json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)
    assert (reported["phase"], reported["round"], reported["durable_round"]) == ("interrupted", 3, 3)
    assert tells(CliRunner().invoke(app, ["status", "--clients"]).stdout, "c0", "trains", "c2", "observes")
    assert json.loads(CliRunner().invoke(app, ["status", "--clients", "--json"]).stdout)[2]["id"] == "c2"
    lines = CliRunner().invoke(app, ["status", "--follow", "--json"]).stdout.splitlines()
    assert [json.loads(line)["round"] for line in lines] == [3]  # it is over


IMPORTS = """
import sys
from fedloom.cli.main import main

for more, where, code in [(c, *w) for c in ([], ["--clients"]) for w in ((FOLDER, 0), ("127.0.0.1:1", 8))]:
    sys.argv = ["fedloom", "status", *more, where]
    try:
        main()
    except SystemExit as end:
        assert end.code == code
assert not {"torch", "matplotlib", "minio"} & set(sys.modules), sorted(sys.modules)
"""


def test_neither_command_imports_torch(tmp_path: Path) -> None:
    run(tmp_path, rounds=5)
    code = IMPORTS.replace("FOLDER", repr(str(tmp_path)))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- display


def activity(**changes: Any) -> Activity:
    late = Awaited("speaker-3", "second", 990.0, 1_020.0, late=True)
    workers = tuple(ConnectedWorker(f"worker-{i}", "north", "cpu", 2, 900.0, 999.0) for i in range(40))
    usual = Activity("vowels", "fedavg", "training", 1_000.0, 970.0, round=3, doing=4, attempt=1, message="a\x1b[31m")
    return replace(usual, awaiting=(late,), awaited=2, late=1, workers=workers, **changes)


def lines(now: Activity, width: int, height: int = 10_000) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO())
    return [line.plain for line in shown._fitting(status_lines(now, console), console)]


@pytest.mark.parametrize("width", [20, 37, 80, 200])
def test_a_narrow_terminal_shows_all(width: int) -> None:
    narrow = lines(activity(), width)
    assert max(map(len, narrow)) <= width
    assert "".join("".join(narrow).split()) == "".join("".join(lines(activity(), 1000)).split())
    assert not any("\x1b" in line for line in narrow)


def test_a_short_terminal_counts_the_hidden_lines() -> None:
    low = lines(activity(), 80, height=10)
    assert len(low) == 9
    assert tells(low[-1], "more lines", "--once")


def test_late_clients_are_named() -> None:
    text = "\n".join(lines(activity(), 200))
    assert tells(text, "round 4", "late", "speaker-3", "second", "10 s", "20 s")


@pytest.mark.parametrize(
    ("seconds", "output"),
    [
        (0.04, "0.0 s"), (9.949, "9.9 s"), (9.96, "10 s"), (59.6, "1 min"), (125, "2 min 5 s"), (7_800, "2 h 10 min"),
        (90_000, "1 d 1 h"), (-3, "0.0 s"),
    ],
)  # fmt: skip
def test_durations_are_readable(seconds: float, output: str) -> None:
    assert duration(seconds) == output


def test_an_absent_aggregator_is_polled_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "LOST_S", 0.02)

    def gone() -> Activity:
        raise AbandonedError("nobody")

    source = shown._Source(gone, list, every_s=0.001)
    stopping = activity(phase="stopping")
    assert list(shown._states(source, stopping)) == [stopping]
    silences: list[float] = []
    states = shown._states(source, activity(), lambda silent_s, error: silences.append(silent_s))
    assert next(states).phase != "stopping"
    with pytest.raises(AbandonedError):
        next(states)
    assert silences
    assert sorted(silences) == silences
    assert silences[-1] < 0.02


NOTHING = {"train": (), "validation": (), "test": ()}


def entry(name: str, *, seen: bool = True) -> ClientEntry:
    return ClientEntry(name, seen, 10, 2, 2, NOTHING, "0" * 64)


def attempt(round: int, *, lost: int = 0, outcome: str = "done") -> Attempt:
    asked = ["a", "b", "c"]
    losses = [Loss(row, asked[row], 0, "late") for row in range(lost)]
    return Attempt(
        round,
        1,
        outcome,
        [ConversationRecord(asked, losses)],
        {"client_steps": 6.0, "loss": 0.5},
        {"SharedModel": 0.3, "server": 0.2},
        0.5,
    )


def test_a_monitor_reports_rounds_clients_rates_and_time_by_phase() -> None:
    monitor = Monitor("vowels", "fedavg", None, "life-1")
    monitor.know([entry("a"), entry("b"), entry("c"), entry("o", seen=False)])
    assert monitor.now().phase == "waiting"
    monitor.enter("training", doing=1, attempt=2)
    now = monitor.now()
    assert (now.run, now.method, now.incarnation, now.rounds) == ("vowels", "fedavg", "life-1", None)
    assert (now.phase, now.round, now.doing, now.attempt, now.rounds_per_s) == ("training", 0, 1, 2, None)
    monitor.attempted(attempt(1, outcome="nobody answered"), counts=False)
    monitor.attempted(attempt(1, lost=1), counts=True)
    now = monitor.now()
    assert (now.round, now.doing, now.train_loss) == (1, None, 0.5)
    assert (now.rounds_per_s, now.client_steps_per_s) == (2.0, 12.0)
    assert now.clients == ClientCounts(roster=4, observing=1, connected=4, absent=0, cohort=3, answered=2)
    assert (now.totals.rounds, now.totals.failed_attempts, now.totals.client_steps) == (1, 1, 6.0)
    assert (now.totals.seconds, now.totals.exchanges) == (1.0, {"SharedModel": 0.6, "server": 0.4})
    assert set(now.totals.phases) == {"waiting", "training"}


def test_a_monitor_lists_late_clients_first_and_at_most_a_hundred() -> None:
    monitor = Monitor()
    monitor.know(entry(f"c{i}") for i in range(300))
    awaiting = [Awaited(f"c{i}", "w", 100.0 + i, None, late=False) for i in range(200)]
    awaiting.append(Awaited("c250", None, 900.0, 960.0, late=True))
    worker = ConnectedWorker("w", "north", "cpu", 250, 1.0, 2.0)
    now = monitor.now(Connected((worker,), tuple(awaiting), 250, {"late or repeated reply": 3}, 70, 80))
    assert (now.awaited, now.late, len(now.awaiting)) == (201, 1, 100)
    assert [each.client for each in now.awaiting[:2]] == ["c250", "c0"]
    assert (now.clients.connected, now.clients.absent) == (250, 50)
    assert (now.totals.bytes_up, now.totals.bytes_down, now.workers) == (70, 80, (worker,))
    assert now.totals.refusals == {"late or repeated reply": 3}


def test_nested_phases_and_no_updates_after_the_end() -> None:
    monitor = Monitor()
    monitor.enter("training", doing=3)
    with monitor.during("saving"):
        assert monitor.now().phase == "saving"
    assert (monitor.now().phase, monitor.now().doing) == ("training", 3)
    monitor.stopping()
    assert monitor.now().phase == "stopping"
    monitor.enter("failed", "the disk is full")
    monitor.enter("training")
    assert (monitor.now().phase, monitor.now().message) == ("failed", "the disk is full")


def test_the_loop_updates_its_monitor(tmp_path: Path) -> None:
    settings = FedAvgSettings.model_validate({"local": {"steps": 1, "batch_size": 4, "lr": 0.1}})
    held = federation(tmp_path, FEDAVG, settings, setup(n=3), clients([4, 6, 8]), rounds=3, checkpoint_every_s=0)
    held.run()
    now: Activity = held.loop.monitor.now()
    assert (now.round, now.durable_round, now.clients.roster, now.clients.answered) == (3, 3, 3, 3)
    assert (now.measured.round, now.measured.groups["seen"].clients) == (3, 3)
    assert now.durable_age_s is not None
    assert now.durable_age_s < 600
    assert {"training", "evaluating", "saving"} <= set(now.totals.phases)
    assert now.totals.rounds == 3
    assert now.totals.seconds == pytest.approx(sum(now.totals.exchanges.values()))
