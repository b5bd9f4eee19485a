"""Equal bits in process, with one worker and with two; and the files of a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from run_processes import experiment, fedloom, final, scores
from safetensors.torch import load

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.group("runs")]


def test_workers_do_not_change_results(fresh_root: Path, tmp_path: Path) -> None:
    path = experiment(
        tmp_path,
        fresh_root,
        model={"name": "vgg", "channels": [6]},  # its hypernetwork is small, which saves time
        federation={"rounds": 2, "clients_per_round": 4, "checkpoint_every_s": 30},
        evaluation={"own_steps": [0, 3]},
    )
    for workers in (0, 1, 2):
        fedloom("run", path, "--workers", workers, "--no-report", "--out", tmp_path / str(workers))
    for workers in (1, 2):
        assert final(tmp_path / str(workers)) == final(tmp_path / "0")
        assert scores(tmp_path / str(workers)) == scores(tmp_path / "0")
        assert (tmp_path / str(workers) / "clients.csv").read_text() == (tmp_path / "0" / "clients.csv").read_text()
    of_steps = [json.loads((tmp_path / str(n) / "summary.json").read_text())["own_steps"] for n in (0, 1, 2)]
    assert of_steps[0] == of_steps[1] == of_steps[2]
    assert [line["steps"] for line in of_steps[0]] == [0, 3]
    wires = [json.loads((tmp_path / str(n) / "summary.json").read_text())["communication"] for n in (0, 1, 2)]
    assert wires[0]["wire_up"] is wires[0]["wire_down"] is None
    for wire in wires[1:]:
        assert {k: wire[k] for k in ("payload_up", "payload_down")} == {
            k: wires[0][k] for k in ("payload_up", "payload_down")
        }
        assert wire["wire_up"] > 0
    assert wires[2]["wire_down"] > wires[1]["wire_down"]  # a broadcast is sent once to each worker


def test_files_of_a_run(small_run: tuple[Path, Path]) -> None:
    _, run = small_run
    assert {entry.name for entry in run.iterdir()} >= {
        "experiment.yaml", "environment.json", "partition.json", "metrics.jsonl", "clients.csv", "journal.jsonl",
        "summary.json", "checkpoints", "report.html", "figures", "logs", "descriptors.json",
    }  # fmt: skip
    assert not [path for path in run.rglob("*") if path.name.startswith(".") or path.name.endswith(".partial")]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in metrics] == [0, 2, 4]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["rounds"], summary["seen"]["clients"], summary["unseen"]["clients"]) == (4, 18, 2)
    assert summary["client_steps_per_s"] > 0
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert {"round-000003.safetensors", "round-000004.safetensors"} <= set(checkpoints)
    assert set(checkpoints) - {"round-000003.safetensors", "round-000004.safetensors"} <= {
        f"round-{summary['best']['round']:06d}.safetensors"
    }


def test_clients_trained_together_are_repeatable_and_close_to_one_by_one(fresh_root: Path, tmp_path: Path) -> None:
    algorithm = {"name": "fedavg", "local": {"epochs": 1, "batch_size": 10, "lr": 0.03}}
    federation = {"rounds": 2, "clients_per_round": 8, "checkpoint_every_s": 30}
    path = experiment(tmp_path, fresh_root, model={"name": "logistic"}, algorithm=algorithm, federation=federation)
    for name, workers, together in (("one", 0, 1), ("in", 0, 4), ("again", 0, 4), ("two", 2, 4)):
        chosen = ("--workers", workers, "--set", f"runtime.clients_at_once={together}")
        fedloom("run", path, *chosen, "--no-report", "--out", tmp_path / name)
    assert final(tmp_path / "in") == final(tmp_path / "again")
    assert final(tmp_path / "two") == final(tmp_path / "in")  # each worker has four of eight: the same groups
    theta = [load(final(tmp_path / name))["theta"] for name in ("one", "in")]
    torch.testing.assert_close(*theta, rtol=0, atol=1e-5)
