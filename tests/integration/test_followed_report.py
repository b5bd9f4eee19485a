"""A report that follows a run: refreshed while the run continues, and static after any end of the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from run_processes import WAIT_S, ended, experiment, fedloom, started, until

FOR_EVER = 10**6


def page(run: Path) -> str:
    try:
        return (run / "report.html").read_text()
    except FileNotFoundError:
        return ""


def renews(run: Path) -> bool:
    return '<meta http-equiv="refresh" content="1">' in page(run)


def small(folder: Path, root: Path, rounds: int) -> Path:
    algorithm = {"name": "fedavg", "local": {"epochs": 1, "batch_size": 40}}
    return experiment(folder, root, algorithm=algorithm, federation={"rounds": rounds, "clients_per_round": 4})


@pytest.mark.exhaustive
def test_following_a_run_that_is_killed(fresh_root: Path, tmp_path: Path) -> None:
    path, run = small(tmp_path, fresh_root, FOR_EVER), tmp_path / "run"
    with started("run", path, "--out", run) as training:
        until(lambda: (run / "metrics.jsonl").exists(), "an evaluated round")
        with started("report", run, "--follow", "--every", 1) as following:
            until(lambda: renews(run), "a page that renews itself")
            assert "Learning curves" in page(run)
            assert "<h2>Clients</h2>" not in page(run)  # added at the end
            os.kill(training.pid, signal.SIGKILL)
            output = ended(following, 0)
        training.wait(WAIT_S)
    assert "not finished" in output
    assert 'http-equiv="refresh"' not in page(run)
    assert "stopped or killed after" in page(run)
    assert not list(run.glob(".report*"))


@pytest.mark.exhaustive
def test_following_a_run_to_its_end(fresh_root: Path, tmp_path: Path) -> None:
    path, run = small(tmp_path, fresh_root, 40), tmp_path / "run"
    with started("run", path, "--out", run) as training:
        until(lambda: (run / "metrics.jsonl").exists(), "an evaluated round")
        with started("report", run, "--follow", "--every", 1) as following:
            until(lambda: renews(run) or training.poll() is not None, "a page that renews itself, or the end")
            ended(training, 0)
            assert "finished: 40 rounds" in ended(following, 0)
    last = page(run)
    assert 'http-equiv="refresh"' not in last
    fedloom("report", run)
    assert page(run) == last


@pytest.mark.exhaustive
def test_interrupting_the_report_leaves_a_static_page(fresh_root: Path, tmp_path: Path) -> None:
    path, run = small(tmp_path, fresh_root, FOR_EVER), tmp_path / "run"
    with started("run", path, "--out", run):
        until(lambda: (run / "metrics.jsonl").exists(), "an evaluated round")
        with started("report", run, "--follow", "--every", 1) as following:
            until(lambda: renews(run), "a page that renews itself")
            following.send_signal(signal.SIGINT)
            ended(following, 130)
    assert 'http-equiv="refresh"' not in page(run)
    assert "in progress" in page(run)
