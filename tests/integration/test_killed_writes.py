"""A run killed before one of its writes can be continued: the folder is reused or resumed, and no file is left over."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from forked import run as run_process
from run_processes import ENVIRONMENT, WAIT_S, experiment, final, scores

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(900)]

SECTIONS = {
    "algorithm": {"name": "pfedbayes", "steps": 2, "batch_size": 16},
    "federation": {"rounds": 2, "clients_per_round": 2, "checkpoint_every_s": 0, "deadline_s": 200},
    "evaluation": {"every": 2, "cohort": 20},
}
SCRIPT = Path(__file__).parent / "killed_at.py"


def killed_at(k: int, out: Path, *arguments: object) -> tuple[int, str]:
    """Return exit code and output of a command that is killed before its k-th change of a folder."""
    command = [sys.executable, str(SCRIPT), str(k), str(out), *map(str, arguments), "--out", str(out)]
    done = run_process(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_a_run_killed_at_a_write_can_be_resumed(fresh_root: Path, tmp_path: Path) -> None:
    path = experiment(tmp_path, fresh_root, **SECTIONS)
    whole = tmp_path / "whole"
    code, output = killed_at(0, whole, "run", path)
    counted = re.search(r"changes: (\d+)", output)
    assert code == 0 and counted is not None, output  # noqa: PT018
    changes = int(counted[1])
    assert changes > 40
    begun = 9  # before that it is not a run that can be resumed
    for k in (*range(1, begun, 3), *range(begun, changes + 1, changes // 4)):
        out = tmp_path / f"killed-{k}"
        code, output = killed_at(k, out, "run", path)
        assert code == -signal.SIGKILL, output
        resume = ("--resume",) if (out / "experiment.yaml").exists() else ()
        code, output = killed_at(0, out, "run", path, *resume)
        assert code == 0, output
        assert final(out) == final(whole), k
        assert scores(out) == scores(whole), k
        assert not list(out.rglob("*.partial")), k
