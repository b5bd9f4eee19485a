"""Audits of runs of every task and kind of input, of methods of other kinds, and of data without targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from facts import refusing
from test_tasks_end_to_end import CASES, CODES, LABELS, MLP, PRICES, ROWS, TOKENS, Tokens, ran

import fedloom
from fedloom.errors import ExperimentError


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_every_task_can_be_audited(case: str, tmp_path: Path) -> None:
    x, y, model = CASES[case]
    run = fedloom.audit(ran(x, y, tmp_path, model))
    found = run.audit["membership"]["predictors"]["global"]["seen"]
    assert found["clients"] == 2
    assert 0 <= found["auc"] <= 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("x", "y", "model"), [(ROWS, PRICES, MLP), (ROWS, LABELS, MLP), (TOKENS, TOKENS, Tokens()), (CODES, PRICES, MLP)]
)
def test_canary_examples_of_other_tasks_take_the_target_of_another_example(
    x: Any, y: Any, model: Any, tmp_path: Path
) -> None:
    run = ran(x, y, tmp_path, model)
    found = fedloom.audit(run.experiment, canaries=16, of="examples", out=tmp_path / "audit", progress=False)
    document = found.audit["canaries"]
    assert document["canaries"] == 16
    assert found.summary["task"] == run.summary["task"]


@pytest.mark.parametrize("method", ["pefll", "pfedbayes", "local", "knn-per"])
def test_methods_of_other_kinds_can_be_audited(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"pefll": {"embedding": {"network": "mlp"}}}.get(method, {})
    y = (PRICES.mean() < PRICES).astype("int64")
    experiment = {
        "name": "kinds",
        "data": fedloom.Federated.from_arrays(
            {"a": (ROWS[:40], y[:40]), "b": (ROWS[40:], y[40:])}, root=tmp_path / "data", held_out_fraction=0.0
        ),
        "model": MLP,
        "algorithm": {"name": method, **settings},
        "federation": {"rounds": 0 if method == "local" else 2, "clients_per_round": 2},
        "runtime": {"workers": 0},
    }
    run = fedloom.run(experiment, out=tmp_path / "run", report=False, progress=False)
    assert fedloom.audit(run).audit["membership"]["predictors"]["personal"]["seen"]["clients"] == 2


def test_data_without_targets_are_audited_by_the_models_loss(tmp_path: Path) -> None:
    scheme = {"scheme": "means", "clients": 4, "dimension": 2, "train_per_client": 20, "test_per_client": 10}
    experiment = {
        "name": "means",
        "data": {"dataset": "gaussian", "partition": scheme, "root": str(tmp_path / "data")},
        "model": {"name": "quadratic"},
        "algorithm": {"name": "wga", "batch_size": 4, "steps_per_round": 2},
        "federation": {"rounds": 2, "clients_per_round": 3},
        "runtime": {"workers": 0},
    }
    run = fedloom.run(experiment, out=tmp_path / "run", report=False, progress=False)
    assert fedloom.audit(run).audit["membership"]["predictors"]
    with refusing(ExperimentError, "examples", "targets"):
        fedloom.audit(experiment, canaries=8, of="examples", out=tmp_path / "audit", progress=False)
    with refusing(ExperimentError, "wga"):
        fedloom.audit(experiment, canaries=8, out=tmp_path / "other", progress=False)
    assert not (tmp_path / "other").exists()
