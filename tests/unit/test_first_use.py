"""What somebody who is new meets at the command line: other screens, folders that are not there, divergence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Fedloom = Callable[..., tuple[int, str, str]]

EXPERIMENT = """\
name: first
data:
  dataset: tiny
  root: {root}
  partition: {{scheme: iid, clients: 6}}
  unseen_fraction: 0.2
model: {{name: logistic}}
algorithm: {{name: fedavg, local: {{lr: 0.05, steps: 2}}}}
federation: {{rounds: 1, clients_per_round: 3}}
runtime: {{workers: 0}}
"""


@pytest.fixture
def experiment(tiny_root: Path, tmp_path: Path) -> Path:
    path = tmp_path / "first.yaml"
    path.write_text(EXPERIMENT.format(root=tiny_root))
    return path


def test_resuming_what_is_not_there_is_said(fedloom: Fedloom, experiment: Path) -> None:
    code, _, err = fedloom("run", experiment, "--out", "new", "--resume")
    assert code == 0
    assert [line for line in err.splitlines() if "nothing to resume" in line and "new" in line]
    code, _, err = fedloom("run", experiment, "--out", "new", "--resume", "--set", "federation.rounds=2")
    assert code == 0
    assert "nothing to resume" not in err
