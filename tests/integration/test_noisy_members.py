"""Members of an open federation with example privacy: their noise is a secret of their workers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from run_processes import ended
from safetensors.torch import load_file
from test_open_federation import EXPERIMENT, GIVEN, Federation, members
from torch import Tensor

__all__ = ["members"]

NOISY = (
    EXPERIMENT.replace("input_shape: [9], ", f"input_shape: [9], normalization: {GIVEN}, ")
    .replace("min_clients: 2", "min_clients: 3")
    .replace("rounds: null", "rounds: 5")
    .replace(
        "checkpoint_every_s: 0}",
        "checkpoint_every_s: 0,\n   privacy: {of: examples, clip: 1.0, noise_multiplier: 0.5, delta: 1e-3}}",
    )
)


def trained(folder: Path, members: Path) -> dict[str, Tensor]:
    """Return the final state of a federation of three members, which are in every cohort."""
    folder.mkdir()
    with contextlib.ExitStack() as processes:
        federation = Federation(folder, members, processes, NOISY)
        aggregator = federation.aggregator()
        workers = [federation.worker(i, name=f"w{i}") for i in range(3)]
        ended(aggregator, 0)
        for worker in workers:
            ended(worker, 0)
        lines = [line for line in federation.lines() if line["outcome"] == "done"]
        assert len(lines) == 5
        assert all("loss" not in line["statistics"] for line in lines)
        return load_file(sorted((federation.run / "checkpoints").glob("*.safetensors"))[-1])


@pytest.mark.slow
def test_noise_of_members_does_not_follow_from_the_seed(tmp_path: Path, members: Path) -> None:
    one, other = (trained(tmp_path / name, members) for name in ("one", "other"))
    for state in (one, other):
        assert state["theta"].isfinite().all()
    assert (one["theta"] - other["theta"]).abs().min() > 0  # no coordinate has the same noise
    assert 0.001 < float((one["theta"] - other["theta"]).std()) < 1
