"""Settings that no method accepts are rejected when the file is read: key, value found, values allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts import mentions, tells
from federations import clients, manifest

from fedloom.engine.run_data import check_clients
from fedloom.errors import ExperimentError
from fedloom.experiment import load_experiment

GOOD = """\
name: bad
data: {dataset: mnist, partition: {scheme: iid, clients: 4}}
model: {name: mlp, hidden: [8]}
algorithm: {name: fedavg}
federation: {rounds: 2, clients_per_round: 2}
"""


def refusal(tmp_path: Path, algorithm: str, key: str) -> str:
    """Return the text of the error after its key, for an ``algorithm`` with one wrong key."""
    (tmp_path / "bad.yaml").write_text(GOOD.replace("{name: fedavg}", algorithm))
    with pytest.raises(ExperimentError) as error:
        load_experiment(tmp_path / "bad.yaml")
    assert error.value.key == f"algorithm.{key}"
    place, reported, text = str(error.value).partition(f"algorithm.{key}: ")
    assert reported
    assert tells(place, "bad.yaml", "line 4")
    return text


@pytest.mark.parametrize(
    ("algorithm", "key", "found"),
    [
        ("{name: pfedme, lr: 0.1, proximity: 15}", "lr", (0.1, "proximity", 15)),
        ("{name: pfedme, inner_lr: 0.1, proximity: 15}", "inner_lr", (0.1, "proximity", 15)),
        ("{name: ditto, proximity: 100, personal: {steps: 1, lr: 0.01}}", "proximity", (100, "personal.lr", 0.01)),
        ("{name: fedprox, mu: 100}", "mu", (100, "local.lr", 0.01)),
        ("{name: feddyn, alpha: 100}", "alpha", (100, "local.lr", 0.01)),
        ("{name: pfedhn, embedding_lr: 10, server_decay: 0.1}", "embedding_lr", (10, "server_decay", 0.1)),
        ("{name: heurfedamp, proximity: 100}", "proximity", (100, "local.lr", 0.01)),
        ("{name: fedavg, local: {steps: 1, lr: 1, lambda_theta: 0.5}}", "local.lambda_theta", (0.5, "lr", 1)),
        ("{name: fedrep, head: {steps: 1, lr: 1, lambda_theta: 0.5}}", "head.lambda_theta", (0.5, "lr", 1)),
        ("{name: pfedgp, lr: 10, weight_decay: 0.1}", "weight_decay", (0.1, "lr", 10)),
        ("{name: pfedhn, server_lr: 10, server_decay: 0.1}", "server_lr", (10, "server_decay", 0.1)),
    ],
)
def test_overshooting_steps_are_rejected(tmp_path: Path, algorithm: str, key: str, found: tuple[object, ...]) -> None:
    assert tells(refusal(tmp_path, algorithm, key), *found)


@pytest.mark.parametrize(
    ("algorithm", "key", "found"),
    [
        ("{name: pfedme, inner_steps: 0}", "inner_steps", (0, 1)),
        ("{name: pfedme, server_lr: 0}", "server_lr", (0, 0)),
        ("{name: pfedme, proximity: -1}", "proximity", (-1, 0)),
        ("{name: ditto, proximity: -1}", "proximity", (-1, 0)),
        ("{name: fedprox, mu: -1}", "mu", (-1, 0)),
        ("{name: heurfedamp, proximity: -1}", "proximity", (-1, 0)),
        ("{name: heurfedamp, sigma: -1}", "sigma", (-1, 0)),
        ("{name: q-fedavg, q: -1}", "q", (-1, 0)),
        ("{name: drfa, gamma: 1.0e+308}", "gamma", ("1e+308", 0)),
        ("{name: afl, weights_lr: -1}", "weights_lr", (-1, 0)),
        ("{name: tr-maml, weights_lr: -1}", "weights_lr", (-1, 0)),
        ("{name: per-fedavg, inner_lr: -1}", "inner_lr", (-1, 0)),
        ("{name: per-fedavg, hessian: finite_difference, delta: 1.0e-300}", "delta", ("1e-300",)),
        ("{name: knn-per, neighbours: [0]}", "neighbours.0", (0, 1)),
        ("{name: knn-per, mixing: [1.1]}", "mixing.0", (1.1, 1)),
        ("{name: knn-per, scale: 1.0e-300}", "scale", ("1e-300",)),
        ("{name: pfnm, sigma: 1.0e-200}", "sigma", ("1e-200",)),
        ("{name: pfnm, sigma0: 1.0e+200}", "sigma0", ("1e+200",)),
        ("{name: pfnm, cap: 7}", "cap", (7, 8)),
        ("{name: pfedgp, lengthscale: 1.0e-200}", "lengthscale", ("1e-200",)),
        ("{name: apfl, alpha: 1.5}", "alpha", (1.5, 1)),
        ("{name: fedrod, balance: 1.0e+300}", "balance", ("1e+300", 0)),
        ("{name: scaffold, local: {steps: 1, momentum: 0.9}}", "local.momentum", ()),
        ("{name: drfa, local: {epochs: 1}}", "local.epochs", ("local.steps",)),
    ],
)
def test_invalid_settings_are_rejected(tmp_path: Path, algorithm: str, key: str, found: tuple[object, ...]) -> None:
    assert mentions(refusal(tmp_path, algorithm, key), *found)


def test_clients_a_method_cannot_train_are_counted(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text(GOOD.replace("fedavg", "knn-per"))
    experiment = load_experiment(tmp_path / "few.yaml")
    with pytest.raises(ExperimentError) as refused:
        check_clients(experiment, manifest(clients((5, 4, 3, 2))).clients)
    assert refused.value.key == "algorithm.name"
    assert tells(str(refused.value), "knn-per", "c1", 2, 4, 5, "algorithm.neighbours")
