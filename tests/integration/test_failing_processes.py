"""Exit codes and standard error of processes that fail. They are not forked: gRPC fixes its logging when imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_processes import ENVIRONMENT, FEDLOOM, WAIT_S, experiment, fedloom
from transport_support import make_aggregator

from fedloom.core.processes import END_WITH_PARENT
from fedloom.errors import ExitCode

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.group("faults")]


def partition(path: Path) -> Path:
    """Create the partition of an experiment, and return its folder."""
    output = fedloom("partition", path)
    return next(Path(word) for word in output.split() if (Path(word) / "partition.json").is_file())


def test_a_rejected_worker_reports_the_reason_while_its_parent_runs(fresh_root: Path, tmp_path: Path) -> None:
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


def test_binding_an_address_of_another_machine_fails(fresh_root: Path, tmp_path: Path) -> None:
    path = experiment(tmp_path, fresh_root)
    there = ("--listen", "192.0.2.1:7733", "--insecure")  # a reserved address, RFC 5737
    command = [*FEDLOOM, "aggregator", path, *there, "--out", tmp_path / "run"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == ExitCode.EXPERIMENT
    assert "cannot serve on 192.0.2.1:7733" in done.stderr
    assert ".cc:" not in done.stderr, "a line of gRPC's C core"
