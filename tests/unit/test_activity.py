"""The snapshot of a federation's activity, and the monitor that provides it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from federations import clients, federation, setup

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.data.manifest import ClientEntry
from fedloom.federation.activity import Activity, Awaited, ClientCounts, Connected, ConnectedWorker
from fedloom.federation.monitor import Monitor
from fedloom.runs.journal import Attempt, ConversationRecord, Loss

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
    assert now.measured is not None
    assert (now.measured.round, now.measured.groups["seen"].clients) == (3, 3)
    assert now.durable_age_s is not None
    assert now.durable_age_s < 600
    assert {"training", "evaluating", "saving"} <= set(now.totals.phases)
    assert now.totals.rounds == 3
    assert now.totals.seconds == pytest.approx(sum(now.totals.exchanges.values()))


def test_a_snapshot_needs_no_torch() -> None:
    script = "import fedloom.federation.monitor, sys; assert not {'torch', 'numpy', 'grpc'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
