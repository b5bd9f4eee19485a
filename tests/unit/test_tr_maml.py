"""TR-MAML against Per-FedAvg, and its rounds on quadratics (Collins et al., NeurIPS 2020)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import clients, federation, held_out_elsewhere, setup

from fedloom.algorithms.afl import project_onto_simplex
from fedloom.algorithms.base import Setup
from fedloom.algorithms.per_fedavg import PER_FEDAVG, PerFedAvgSettings
from fedloom.algorithms.tr_maml import TR_MAML, TRMAMLSettings
from fedloom.data.federated import ClientData, Split
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
LOCAL: dict[str, Any] = {"steps": 3, "batch_size": 3, "lr": 0.05, "momentum": 0.9}


def problem() -> Setup:
    return dataclasses.replace(setup(), roster=("c0", "c1", "c2"))


@pytest.mark.parametrize("hessian", ["none", "exact"])
def test_constant_weights_give_uniform_per_fedavg_to_the_bit(tmp_path: Path, hessian: str) -> None:
    keys = {"local": LOCAL, "hessian": hessian, "inner_lr": 0.05}
    mine, other = (
        federation(tmp_path / m.name, m, s, problem(), clients(SIZES), rounds=2)
        for m, s in (
            (TR_MAML, TRMAMLSettings.model_validate(keys | {"weights_lr": 0})),
            (PER_FEDAVG, PerFedAvgSettings.model_validate(keys | {"weighting": "uniform"})),
        )
    )
    mine.run()
    other.run()
    assert torch.equal(mine.state["theta"], other.state["theta"])
    for key, named in other.predictors.items():
        for name, predictor in named.items():
            assert torch.equal(mine.predictors[key][name].tensors()["theta"], predictor.tensors()["theta"])


def at(c: float, id: str) -> ClientData:
    split = Split(torch.full((4, 1), c, dtype=torch.float64), None)
    return ClientData(id, split, split, split, 0)


def test_a_round_on_quadratics_matches_a_hand_computation(tmp_path: Path) -> None:
    """F_i = (1 - α)² (w - c)²/2: w descends by n p_i ∇F_i, p ascends on F_i, not on p_i F_i."""
    centres, alpha, lr, rate = (1.0, -3.0, 0.5), 0.2, 0.1, 0.3
    keys = {"inner_lr": alpha, "hessian": "exact", "weights_lr": rate}
    s = TRMAMLSettings.model_validate(keys | {"local": {"steps": 1, "lr": lr, "momentum": 0.0}})
    p = Setup(Quadratic(1), 3, (1,), 3, torch.float64, roster=("c0", "c1", "c2"))
    run = federation(tmp_path, TR_MAML, s, p, [at(c, f"c{i}") for i, c in enumerate(centres)], rounds=3)
    w, weights, c = (
        torch.zeros(1).double(),
        torch.full((3,), 1 / 3, dtype=torch.float64),
        torch.tensor(centres).double(),
    )
    for _ in range(3):
        slope, value = (1 - alpha) ** 2 * (w - c), ((1 - alpha) * (w - c)).square() / 2
        w, weights = w - lr * (weights * slope).sum(), project_onto_simplex(weights + rate * value)
    run.run()
    torch.testing.assert_close(run.state["theta"], w, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.state["weights"], weights, rtol=0, atol=1e-12)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)


def test_a_client_gets_one_inner_step_on_its_train_split(tmp_path: Path) -> None:
    s = TRMAMLSettings.model_validate({"local": LOCAL})
    data = clients(SIZES)
    one, other = (
        federation(tmp_path / name, TR_MAML, s, problem(), d, rounds=1, unseen=["c2"])
        for name, d in (("one", data), ("other", held_out_elsewhere(data)))
    )
    one.run()
    other.run()
    assert torch.equal(one.state["weights"], other.state["weights"])
    for key, named in one.predictors.items():
        found = named["personal"].tensors()["theta"]
        assert torch.equal(found, other.predictors[key]["personal"].tensors()["theta"])
        assert not torch.equal(found, one.state["theta"])
    assert TR_MAML.client(s, problem()).personalization_steps("personal", 9) == 1
