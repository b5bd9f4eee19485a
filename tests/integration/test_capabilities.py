"""FedLoom without one of its optional parts: experiments run, and what needs the part says which one is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from forked import run

from fedloom.core.plugins import capability
from fedloom.errors import ExperimentError

ROOT = Path(__file__).parents[2]

PARTS = {
    "audits": ["audit", "run"],
    "cluster": ["cluster", "status", "name"],
    "kubeflow": ["pipeline", "compile", "federated_training"],
    "ledger": ["privacy", "experiment.yaml", "--epsilon", "1"],
    "member": ["member", "show"],
    "reporting": ["report", "run"],
    "serving": ["personalize", "run", "--out", "models"],
    "sums": ["run", "experiment.yaml", "--set", "federation.secure_aggregation={}", "--out", "summed"],
    "trackers": ["run", "experiment.yaml", "--set", "tracking=[csv]", "--out", "tracked"],
    "ui": ["ui"],
    "tuning": ["run", "experiment.yaml", "--seeds", "1,2", "--out", "sweep"],
}
"""Optional rooms, each with a command that needs it."""

SLOW = "matplotlib.figure matplotlib.backends.backend_svg"
"""Imports of the report."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_the_smallest_experiment_trains_without_a_part(tmp_path: Path, part: str) -> None:
    source = tmp_path / "source" / "fedloom"
    source.mkdir(parents=True)
    for room in (ROOT / "src" / "fedloom").iterdir():
        if room.name not in (part, "__pycache__"):
            (source / room.name).symlink_to(room)
    (source.parent / "installed.dist-info").mkdir()  # for a fork that has yet to import FedLoom
    vowels = tmp_path / "data" / "datasets" / "vowel"
    vowels.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "fixtures" / "Vowel.rda", vowels)
    experiment = {
        "name": "small",
        "data": {"root": "data", "dataset": "vowel", "partition": {"scheme": "natural"}},
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": "fedavg"},
        "federation": {"rounds": 1, "clients_per_round": 3},
        "runtime": {"workers": 0},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))

    def fedloom(*words: str) -> subprocess.CompletedProcess[str]:
        return run(
            [sys.executable, "-m", "fedloom", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(source.parent), "FEDLOOM_REPORT": "1", "FORKED_IMPORTS": SLOW},
            capture_output=True,
            text=True,
            timeout=300,
        )

    trained = fedloom("run", "experiment.yaml", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    assert ("report: run/report.html" in trained.stdout) == (part != "reporting")
    refused = fedloom(*PARTS[part])
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert f"this installation lacks FedLoom's part '{part}'" in refused.stderr


def test_an_installation_without_the_entry_point_says_so() -> None:
    """An old installation of a new checkout knows none of its entry points."""
    assert capability("unknown") is None
    with pytest.raises(ExperimentError, match="the report: this installation does not register 'unknown'; install"):
        capability("unknown", "the report")
