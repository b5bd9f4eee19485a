"""What a process that fails leaves on standard error: our sentence, and nothing of the libraries below."""

from __future__ import annotations

from pathlib import Path

from run_processes import experiment, fedloom

from fedloom.errors import ExitCode


def test_an_address_of_another_machine(fresh_root: Path, tmp_path: Path) -> None:
    path = experiment(tmp_path, fresh_root)
    there = ("--listen", "192.0.2.1:7733")  # of nobody, RFC 5737
    said = fedloom("aggregator", path, *there, "--out", tmp_path / "run", code=ExitCode.EXPERIMENT)
    assert "cannot serve on 192.0.2.1:7733" in said
    assert ".cc:" not in said, "a line of gRPC's C core"
