"""Standard error of failing processes: our message, and no output of libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from run_processes import ENVIRONMENT, FEDLOOM, WAIT_S, experiment

from fedloom.errors import ExitCode


@pytest.mark.slow
def test_binding_an_address_of_another_machine_fails(fresh_root: Path, tmp_path: Path) -> None:
    path = experiment(tmp_path, fresh_root)
    there = ("--listen", "192.0.2.1:7733", "--insecure")  # a reserved address, RFC 5737
    command = [*FEDLOOM, "aggregator", path, *there, "--out", tmp_path / "run"]
    # A separate process: gRPC fixes its logging when it is imported.
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == ExitCode.EXPERIMENT
    assert "cannot serve on 192.0.2.1:7733" in done.stderr
    assert ".cc:" not in done.stderr, "a line of gRPC's C core"
