"""Workers and aggregators that are killed, stopped, or told the wrong thing (docs/federation.md, "Faults")."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from run_processes import (
    alive,
    children,
    ended,
    experiment,
    fedloom,
    final,
    losses,
    rounds,
    scores,
    started,
    until,
    worker,
)

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("faults")]

SLOW = "algorithm.local={epochs: 30, batch_size: 2, lr: 0.001}"
"""Local training long enough for a signal to arrive in the middle of it."""


@pytest.fixture(scope="module")
def slow_run(small_run: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small experiment with longer training, undisturbed."""
    run = tmp_path_factory.mktemp("slow") / "run"
    fedloom("run", small_run[0], "--set", SLOW, "--out", run)
    return run


def slowly(small_run: tuple[Path, Path], run: Path, workers: int) -> tuple[object, ...]:
    return ("run", small_run[0], "--set", SLOW, "--workers", workers, "--out", run)


def gone(pids: list[int]) -> None:
    until(lambda: not any(alive(pid) for pid in pids), f"the end of {pids}", timeout_s=30)


def test_a_worker_killed_in_the_middle_of_a_round(small_run: tuple[Path, Path], slow_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(*slowly(small_run, run, 2)) as process:
        until(lambda: rounds(run) >= 1, "the first round")
        victim = worker(process, "worker-1")
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        ended(process, 0)
    assert final(run) == final(slow_run)
    assert scores(run) == scores(slow_run)
    assert losses(run) == []
    assert "ended with code -9" in (run / "logs" / "aggregator.jsonl").read_text()


def test_a_worker_that_keeps_dying_stops_the_run_resumably(
    small_run: tuple[Path, Path], slow_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(*slowly(small_run, run, 2)) as process:
        until(lambda: rounds(run) >= 1, "the first round")
        others = children(process.pid)
        killed: set[int] = set()
        while len(killed) < 3:
            until(lambda: worker(process, "worker-0") not in {None, *killed}, "a restart")
            victim = worker(process, "worker-0")
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        said = ended(process, 7)
    assert "worker-0 ended with code -9 after 2 restarts" in said
    assert "--resume" in said
    gone([*others, *killed])
    fedloom(*slowly(small_run, run, 0), "--resume")
    assert final(run) == final(slow_run)
    assert scores(run) == scores(slow_run)


@pytest.mark.parametrize(("workers", "after"), [(2, 0), (1, 2), (0, 1)])
def test_the_aggregator_killed_and_resumed(
    small_run: tuple[Path, Path], slow_run: Path, tmp_path: Path, workers: int, after: int
) -> None:
    run = tmp_path / "run"
    with started(*slowly(small_run, run, workers)) as process:
        # Right after the first evaluation, or so many rounds.
        until(lambda: (run / "metrics.jsonl").exists() and rounds(run) >= after, f"round {after}")
        workforce = children(process.pid)
        assert len(workforce) == workers
        process.kill()
        process.wait(30)
        gone(workforce)
    fedloom(*slowly(small_run, run, workers), "--resume")
    assert final(run) == final(slow_run)
    assert scores(run) == scores(slow_run)


def test_ctrl_c(small_run: tuple[Path, Path], slow_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(*slowly(small_run, run, 1)) as process:
        until(lambda: rounds(run) >= 1, "the first round")
        workforce = children(process.pid)
        process.send_signal(signal.SIGINT)
        said = ended(process, 130)
    assert "go on with --resume" in said
    gone(workforce)
    assert 1 <= rounds(run) <= 4
    fedloom(*slowly(small_run, run, 0), "--resume")
    assert final(run) == final(slow_run)
    assert scores(run) == scores(slow_run)


def test_a_stopped_worker_loses_its_clients_by_the_deadline_and_the_journal_replays(
    small_run: tuple[Path, Path], tmp_path: Path
) -> None:
    path, run, again = small_run[0], tmp_path / "run", tmp_path / "again"
    overrides = ("--set", "federation.deadline_s=10", "--set", "federation.rounds=6")
    with started("run", path, *overrides, "--workers", 2, "--set", SLOW, "--out", run) as process:
        until(lambda: rounds(run) >= 1, "the first round")
        victim = worker(process, "worker-1")
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        before = rounds(run)
        until(lambda: rounds(run) >= before + 2, "rounds without the stopped worker")
        os.kill(victim, signal.SIGCONT)
        ended(process, 0)
    assert losses(run)
    assert all("deadline" in reason for _, _, reason in losses(run))
    fedloom("run", path, *overrides, "--set", SLOW, "--replay", run, "--out", again)
    assert final(again) == final(run)
    assert scores(again) == scores(run)
    assert losses(again) == losses(run)


def test_workers_are_there_for_a_run_whose_conclusion_failed(
    small_run: tuple[Path, Path], fresh_root: Path, tmp_path: Path
) -> None:
    """What fails after the last round is tried again, and the clients are measured once more for it."""
    path, undisturbed = small_run
    run = tmp_path / "run"
    said = fedloom("partition", path)
    partition = next(Path(word) for word in said.split() if (Path(word) / "partition.json").is_file())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    order = ("aggregator", path, "--partition", partition, "--listen", address, "--out", run)
    with started("worker", "--aggregator", address, "--partition", partition, "--reconnect", 200) as patient:
        with started(*order) as aggregator:
            until(lambda: (run / "environment.json").exists(), "the aggregator")
            (run / "clients.csv").mkdir()
            assert "clients.csv: cannot be written" in ended(aggregator, 6)
        assert final(run) == final(undisturbed)
        (run / "clients.csv").rmdir()
        assert alive(patient.pid)
        with started(*order, "--resume", "--wait", 60) as aggregator:
            ended(aggregator, 0)
        ended(patient, 0)
    assert final(run) == final(undisturbed)
    assert scores(run) == scores(undisturbed)


def test_aggregator_and_workers_by_hand(small_run: tuple[Path, Path], fresh_root: Path, tmp_path: Path) -> None:
    path, undisturbed = small_run
    run = tmp_path / "run"
    (partition,) = {
        folder
        for folder in (fresh_root / "partitions").iterdir()
        if (folder / "partition.json").is_file()
        and (folder / "partition.json").read_text() == (undisturbed / "partition.json").read_text()
    }
    other = fedloom("partition", experiment(tmp_path / "other", fresh_root, data={"unseen_fraction": 0.2}))
    other_folder = next(Path(word) for word in other.split() if (Path(word) / "partition.json").is_file())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with started("aggregator", path, "--listen", address, "--out", run) as aggregator:
        until(lambda: (run / "environment.json").exists(), "the aggregator")  # written once the port is ours

        said = fedloom("aggregator", path, "--listen", address, "--out", tmp_path / "second", code=2)
        assert "is taken" in said
        assert not (tmp_path / "second").exists()

        said = fedloom("worker", "--aggregator", address, "--partition", other_folder, "--name", "lost", code=3)
        assert "fedloom partition" in said

        ids = [f"client-{i:04d}" for i in range(20)]
        halves = [",".join(ids[:7]), ",".join(ids[7:])]
        common = ("--aggregator", address, "--partition", partition)
        with (
            started("worker", *common, "--name", "a", "--clients", halves[0]) as a,
            started("worker", *common, "--name", "b", "--clients", halves[1]) as b,
        ):
            ended(aggregator, 0)
            ended(a, 0)
            ended(b, 0)
    assert final(run) == final(undisturbed)
    assert scores(run) == scores(undisturbed)
