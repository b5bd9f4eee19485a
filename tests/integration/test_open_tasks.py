"""Open federations of real processes on numbers, named inputs and multilabel signals, with new clients."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ports import free_address
from run_processes import ended, fedloom, rounds, started, until
from safetensors.torch import load_file

import fedloom as python
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.data.spec import Targets
from fedloom.engine.options import RunOptions
from fedloom.engine.run_experiment import run_experiment
from fedloom.experiment import OwnData, load_experiment
from fedloom.runs.folder import RunFolder

N = 40
RNG = np.random.default_rng(11)
ROWS = RNG.normal(20, 6, (4 * N, 3)).astype(np.float32)
CODES = RNG.integers(0, 5, (4 * N, 2))
SIGNALS = RNG.normal(0, 2, (4 * N, 2, 12)).astype(np.float32)
WEIGHTS = np.array([[3.0, 1.0, -2.0], [4e-4, 1e-4, -1e-4]])
PRICES = ROWS @ WEIGHTS.T * np.array([1e5, 1.0]) + np.array([5e7, -3.0])  # ten orders of magnitude apart
LABELS = (SIGNALS.mean(2) @ RNG.normal(0, 1, (2, 4)) > 0).astype(np.int64)

MODULE = """\
import torch

class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.codes, self.out = torch.nn.Embedding(5, 2), torch.nn.Linear(3 + 4, 2)

    def forward(self, row, codes):
        return self.out(torch.cat([row, self.codes(codes).flatten(1)], 1))
"""
NAMED = {"row": {"kind": "features", "shape": [3]}, "codes": {"kind": "integers", "shape": [2], "high": 5}}
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "numbers": (
        ROWS,
        PRICES,
        {"kind": "features", "input_shape": [3], "targets": {"task": "regression", "shape": [2]}},
        {"name": "mlp", "hidden": [8]},
    ),
    "named": (
        {"row": ROWS, "codes": CODES},
        PRICES,
        {"kind": "named", "inputs": NAMED, "targets": {"task": "regression", "shape": [2], "names": ["a", "b"]}},
        {"name": "module", "factory": "open_models:Mixed"},
    ),
    "labels of signals": (
        SIGNALS,
        LABELS,
        {"kind": "features", "input_shape": [2, 12], "targets": {"task": "multilabel", "shape": [4]}},
        {"name": "mlp", "hidden": [8]},
    ),
}


def part(x: Any, rows: slice) -> Any:
    """Return some examples."""
    return {name: each[rows] for name, each in x.items()} if isinstance(x, dict) else x[rows]


def check_units(found: torch.Tensor, y: Any, targets: Targets) -> None:
    """Check that predictions are numbers in the targets' units, or probabilities of labels."""
    if targets.task == "multilabel":
        assert tuple(found.shape) == (N, 4)
        assert bool(((found >= 0) & (found <= 1)).all())
        return
    assert targets.mean == pytest.approx(tuple(PRICES.mean(0)), rel=0.2)
    assert ((found.double().numpy() - y).std(0) < y.std(0)).all()
    assert float(found[:, 0].double().mean()) == pytest.approx(y[:, 0].mean(), rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_members_train_and_new_clients_get_predictions_in_own_units(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, own, model = CASES[case]
    (tmp_path / "open_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    factories = {"FEDLOOM_FACTORIES": "open_models:Mixed", "PYTHONPATH": str(tmp_path)}
    monkeypatch.setenv("FEDLOOM_FACTORIES", factories["FEDLOOM_FACTORIES"])
    tree = {
        "name": "open",
        "data": {"own": own},
        "model": model,
        "algorithm": {"name": "fedavg", "local": {"steps": 5, "lr": 0.05}, "personalize_steps": 5},
        "federation": {"rounds": None, "clients_per_round": 2, "min_clients": 2, "checkpoint_every_s": 0},
        "evaluation": {"every": 5, "cohort": 2},
        "runtime": {"workers": 0},
    }
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(tree))
    experiment = load_experiment(tmp_path / "e.yaml")
    assert isinstance(experiment.data, OwnData)
    for i in range(3):
        rows = slice(i * N, (i + 1) * N)
        arrays = {f"x.{name}": each for name, each in part(x, rows).items()} if isinstance(x, dict) else {"x": x[rows]}
        np.savez(tmp_path / "source.npz", y=y[rows], **arrays)
        pack(tmp_path / "source.npz", tmp_path / f"s{i}", PackSettings(f"c{i}", Request(experiment.data.own.spec)))
    address = free_address()
    run, new = tmp_path / "run", slice(3 * N, 4 * N)
    with contextlib.ExitStack() as processes:
        at = ("aggregator", tmp_path / "e.yaml", "--listen", address, "--out", run, "--no-report")
        aggregator = processes.enter_context(started(*at, environment=factories))
        for i, more in enumerate(((), ("--observe", tmp_path / "s2"))):
            joins = ("worker", "--aggregator", address, "--name", f"w{i}", "--reconnect", 200)
            processes.enter_context(started(*joins, "--data", tmp_path / f"s{i}", *more, environment=factories))
        journal = run / "journal.jsonl"
        until(lambda: journal.exists() and rounds(run) >= 10, "ten rounds")
        there = python.personalize(address, part(x, new), y[new], client="new")
        aggregator.send_signal(signal.SIGTERM)
        ended(aggregator, 130)
    manifest = RunFolder(run).manifest()
    targets = manifest.spec.targets
    assert targets is not None
    here = python.personalize(run, part(x, new), y[new], client="new")
    raw = part(x, new)
    as_tensors = {name: torch.from_numpy(each) for name, each in raw.items()} if isinstance(raw, dict) else raw
    assert there.card.spec.targets == here.card.spec.targets == targets
    for found in (there(as_tensors), here(as_tensors)):
        check_units(found, y[new], targets)
    data = tuple(tmp_path / f"s{i}" for i in range(2))
    options = RunOptions(tmp_path / "again", replay=run, packed=data, observe=(tmp_path / "s2",), report=False)
    run_experiment(experiment, options)
    ends = (sorted((one / "checkpoints").glob("round-*.safetensors"))[-1] for one in (run, tmp_path / "again"))
    mine, other = (load_file(path)["theta"] for path in ends)  # a replay also measures the last round
    assert torch.equal(mine, other)
    named = [word for i in range(3) for word in ("--data", tmp_path / f"s{i}")]
    reported = fedloom("evaluate", run, *named, "--out", tmp_path / "evaluated.json", environment=factories)
    assert reported
    groups = json.loads((tmp_path / "evaluated.json").read_text())
    headline = {"regression": "rmse", "multilabel": "auroc"}[targets.task]
    assert groups["seen"]["metrics"][headline]["mean"] is not None
    assert groups["unseen"]["clients"] == 1
