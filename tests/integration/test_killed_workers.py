"""A worker process that is killed in the middle of local training, and started again with the same states."""

from __future__ import annotations

from pathlib import Path

import pytest
from ports import free_port
from run_processes import ended, experiment, fedloom, final, scores, started, until


@pytest.mark.slow
def test_killed_worker_continues_from_its_save_with_the_same_bits(tmp_path: Path, fresh_root: Path) -> None:
    algorithm = {"name": "fedavg", "personalize_steps": 0, "local": {"steps": 6000, "batch_size": 16, "lr": 0.01}}
    path = experiment(
        tmp_path,
        fresh_root,
        algorithm=algorithm,
        federation={"rounds": 1, "clients_per_round": 1, "deadline_s": 600},
        evaluation={"every": 1},
    )
    fedloom("run", path, "--out", tmp_path / "whole")
    fedloom("partition", path, "--out", tmp_path / "partition")
    states, address = tmp_path / "states", f"127.0.0.1:{free_port()}"
    at = ("aggregator", path, "--partition", tmp_path / "partition", "--out", tmp_path / "run", "--listen", address)
    worker = ("worker", "--aggregator", address, "--name", "w", "--partition", tmp_path / "partition")
    worker = (*worker, "--states", states, "--set", "runtime.save_every_s=0.2", "--reconnect", 120)
    with started(*at, "--no-report") as aggregator:
        with started(*worker) as first:
            until(lambda: list(states.glob("training/*/*.safetensors")), "a save of local training")
            first.kill()
            first.wait(60)
        assert list(states.glob("training/*/*.safetensors"))
        with started(*worker) as second:
            ended(aggregator, 0)
            output = ended(second, 0)
    assert "local training continues after step" in output
    assert final(tmp_path / "run") == final(tmp_path / "whole")
    assert scores(tmp_path / "run") == scores(tmp_path / "whole")
    assert not list(states.glob("training/*/*"))
