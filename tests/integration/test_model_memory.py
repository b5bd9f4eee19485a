"""Memory that the processes of a federation with a large model take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from forked import children
from run_processes import ended, experiment, started

WIDTH = 4_000
MODEL = 4 * (784 * WIDTH + WIDTH * WIDTH + 12 * WIDTH)
"""Bytes of a perceptron with two hidden layers of this width: 77 MB."""

FRAMES = 128 << 20
"""Memory that does not grow with the model: frames in transit, and what the C library keeps of them."""


def anonymous(pid: int) -> int:
    """Return the anonymous resident bytes of a process, which the system cannot drop; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def peaks(folder: Path, root: Path, width: int, **federation: object) -> tuple[int, int]:
    """Return the largest anonymous memory that was seen of a run's aggregator, and of any of its workers."""
    partition = {
        "scheme": "classes", "clients": 3, "classes_per_client": 2, "train_per_client": 20, "test_per_client": 10,
    }  # fmt: skip
    path = experiment(
        folder,
        root,
        data={"partition": partition, "held_out_fraction": 0.0},
        model={"name": "mlp", "hidden": [width, width]},
        algorithm={"name": "fedavg", "local": {"steps": 2, "batch_size": 16}},
        federation={"rounds": 2, "clients_per_round": 3, "checkpoint_every_s": 30, "deadline_s": 3600, **federation},
        evaluation={"every": 1000},
    )
    seen: dict[int, int] = {}
    with started("run", path, "--workers", 3, "--no-report", "--out", folder / "run") as process:
        while process.poll() is None:
            for pid in (process.pid, *children(process.pid)):
                seen[pid] = max(seen.get(pid, 0), anonymous(pid))
            time.sleep(0.01)
        ended(process, 0)
    return seen.pop(process.pid), max(seen.values())


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.group("runs")
@pytest.mark.parametrize("federation", [{}, {"secure_aggregation": {}}], ids=["updates", "secure sums"])
def test_no_process_holds_a_large_model_more_than_three_times(
    fresh_root: Path, tmp_path: Path, federation: dict[str, object]
) -> None:
    """A sample that misses a peak can only make this pass: a busy machine never fails it."""
    small = peaks(tmp_path / "small", fresh_root, 8, **federation)
    large = peaks(tmp_path / "large", fresh_root, WIDTH, **federation)
    for side, least, most in zip(("aggregator", "worker"), small, large, strict=True):
        assert most - least <= 3 * MODEL + FRAMES, (side, (most - least) / MODEL)
