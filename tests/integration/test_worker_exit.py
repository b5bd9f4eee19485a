"""Exit codes of the workers of `fedloom run`, which reach the run at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from facts import tells
from run_processes import ENVIRONMENT, WAIT_S, experiment, fedloom, rounds, until, worker
from transport_support import make_aggregator

from fedloom.core.processes import END_WITH_PARENT

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("faults")]


def partition(path: Path) -> Path:
    """Create the partition of an experiment, and return its folder."""
    output = fedloom("partition", path)
    return next(Path(word) for word in output.split() if (Path(word) / "partition.json").is_file())


def test_a_rejected_worker_reports_the_reason_while_its_parent_runs(fresh_root: Path, tmp_path: Path) -> None:
    """Use a separate process: the test is about the exit of an interpreter."""
    aggregator = make_aggregator()  # of a method that no worker has
    address = aggregator.start("127.0.0.1:0")
    command = [sys.executable, "-m", "fedloom", "worker", "--aggregator", address]
    try:
        process = subprocess.Popen(
            [*command, "--partition", str(partition(experiment(tmp_path, fresh_root)))],
            env={**ENVIRONMENT, END_WITH_PARENT: "1"},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        code = process.wait(WAIT_S)  # our end of the pipe is open
        _, output = process.communicate()
    finally:
        aggregator.stop()
    assert code == 4, output
    assert "toy" in output


@pytest.mark.exhaustive
def test_a_worker_that_fails_permanently_ends_the_run_with_its_exit_code(
    small_run: tuple[Path, Path], fresh_root: Path, tmp_path: Path
) -> None:
    """Killed, it is restarted, and finds another partition in place of its own. No forks: see above."""
    other = experiment(tmp_path / "other", fresh_root, data={"held_out_fraction": 0.2})
    link, run = tmp_path / "partition", tmp_path / "run"
    link.symlink_to(partition(small_run[0]))
    slow = ("--set", "algorithm.local={epochs: 30, batch_size: 2, lr: 0.001}", "--set", "federation.rounds=100000")
    command = ("run", small_run[0], *slow, "--workers", 2, "--partition", link, "--out", run)
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *map(str, command)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: rounds(run) >= 1, "the first round")
        link.unlink()
        link.symlink_to(partition(other))
        victim = worker(process, "worker-1")
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        _, output = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 3, output
    assert tells(output, "worker-1", "partition", "the aggregator's", "fedloom partition EXPERIMENT"), output
    log = (run / "logs" / "aggregator.jsonl").read_text()
    assert re.findall(r"worker-1 \(pid \d+\) ended with code (-?\d+)", log) == ["-9", "3"]
