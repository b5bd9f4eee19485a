"""`fedloom` as a user runs it: processes on a little real data. Every wait is bounded.

They are forks of one process that has imported torch (``forked.py``), except where that would defeat the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from forked import Popen, children, cmdline, run

from fedloom.runs.folder import RunFolder

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200", "FEDLOOM_REPORT": "0"}
WAIT_S = 240.0  # generous: a test machine may be busy with other things
FEDLOOM = (sys.executable, "-m", "fedloom")

EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "seed": 5,
    "data": {
        "dataset": "fashion-mnist",
        "partition": {
            "scheme": "classes", "clients": 20, "classes_per_client": 2, "shares": [0.7, 0.3],
            "train_per_client": 40, "test_per_client": 20,
        },
    },
    "model": {"name": "mlp", "hidden": [16]},
    "algorithm": {
        "name": "pefll",
        "local": {"epochs": 2, "batch_size": 16, "lr": 0.02},
        "descriptor": {"standardize": "first"},
        "server": {"rule": "adam", "lr": 0.001},
    },
    "federation": {"rounds": 4, "clients_per_round": 6, "checkpoint_every_s": 0, "deadline_s": 200},
    "evaluation": {"every": 2, "cohort": 10},
    "runtime": {"workers": 0},
}  # fmt: skip


def experiment(folder: Path, root: Path, **sections: dict[str, Any]) -> Path:
    """Write the small experiment, with some keys changed, to ``folder/experiment.yaml``."""
    tree = json.loads(json.dumps(EXPERIMENT))
    tree["data"]["root"] = str(root)
    for name, keys in sections.items():
        tree[name] = keys if "name" in keys else {**tree[name], **keys}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def fedloom(*arguments: object, code: int = 0, before: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end and return its output; ``before`` is shell code to run first in its process."""
    command = [*FEDLOOM, *map(str, arguments)]
    if before:
        command = ["bash", "-c", f'{before}; exec "$@"', "bash", *command]
    given = {**ENVIRONMENT, **(environment or {})}
    done = run(command, env=given, capture_output=True, text=True, timeout=WAIT_S)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


@contextmanager
def started(
    *arguments: object, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Run a command, as arguments of the ``prefix``, for the duration of the block, and kill it at the end."""
    process = Popen(
        [*prefix, *FEDLOOM, *map(str, arguments)],
        env={**ENVIRONMENT, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    known: set[int] = set()
    try:
        yield process
        known = set(children(process.pid))
    finally:
        known |= set(children(process.pid))
        for pid in (process.pid, *known):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait(WAIT_S)
        if process.stdout is not None:
            process.stdout.close()


def ended(process: subprocess.Popen[str], code: int) -> str:
    """Wait for a command to end and return its output."""
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, output
    return output


def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until a condition holds."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.01
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.05)  # polling slows the polled process, such as a store


def alive(pid: int) -> bool:
    """Return True if a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def worker(process: subprocess.Popen[str], name: str) -> int | None:
    """Wait for one of a run's workers and return its process id."""
    for pid in children(process.pid):
        if name in cmdline(pid):
            return pid
    return None


def rounds(run: Path) -> int:
    """Return the number of attempts in the journal."""
    return sum(1 for line in RunFolder(run).lines("journal.jsonl") if line["outcome"] != "evaluated")


def final(run: Path) -> bytes:
    """Return the bytes of the last checkpoint."""
    return sorted((run / "checkpoints").glob("round-*.safetensors"))[-1].read_bytes()


def scores(run: Path) -> dict[str, Any]:
    """Return the parts of a summary that must be equal to the bit."""
    summary = json.loads((run / "summary.json").read_text())
    return {key: summary[key] for key in ("seen", "unseen", "global", "best", "rounds")}


def losses(run: Path) -> list[tuple[int, str, str]]:
    """Return round, client and reason of every loss in the journal."""
    return [
        (line["round"], loss["client"], loss["reason"])
        for line in RunFolder(run).lines("journal.jsonl")
        for conversation in line["conversations"]
        for loss in conversation["lost"]
    ]
