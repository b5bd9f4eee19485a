"""FedAdam, FedYogi and FedAvgM against FedAvg, torch.optim.SGD, and Algorithm 2 by coordinate (Reddi et al., 2021)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import Federation, clients, close, federation, setup
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.base import Algorithm
from fedloom.algorithms.fedavg import FEDAVG
from fedloom.algorithms.fedopt import FEDADAM, FEDAVGM, FEDYOGI
from fedloom.data.federated import ClientData

SIZES = (4, 9, 6)
LOCAL = {"steps": 3, "batch_size": 3, "lr": 0.05}
METHODS = {"fedadam": FEDADAM, "fedyogi": FEDYOGI, "fedavgm": FEDAVGM}


def made(folder: Path, method: Algorithm, data: list[ClientData] | None = None, **changes: Any) -> Federation:
    keys = {name: changes.pop(name) for name in ("rounds", "cohort", "lost", "unseen") if name in changes}
    s = method.settings.model_validate({"local": LOCAL, **changes})
    return federation(folder, method, s, setup(), clients(SIZES) if data is None else data, **keys)


def mean_update(folder: Path, theta: Tensor, round: int, **changes: Any) -> Tensor:
    """Return the update that FedAvg adds to θ in this round."""
    f = made(folder, FEDAVG, rounds=round, **changes)
    f.loop.server.state["theta"] = theta
    f.loop.round = round - 1
    f.run()
    return f.state["theta"] - theta


TAU = 2.0**-10  # τ², 2 τ and divisions by them are exact
DEGENERATE = {"beta1": 0.0, "beta2": 1.0, "tau": TAU, "server_lr": 2 * TAU}


@pytest.mark.parametrize(
    ("name", "keys"), [("fedavgm", {"momentum": 0.0}), ("fedadam", DEGENERATE), ("fedyogi", DEGENERATE)]
)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_without_its_optimizer_it_equals_fedavg_to_the_bit(
    tmp_path: Path, name: str, keys: dict[str, float], weighting: str
) -> None:
    """Compare with FedAvg where v = τ², so that a step is η/2τ."""
    same: dict[str, Any] = {"weighting": weighting, "personalize_steps": 2, "rounds": 3, "cohort": 2, "unseen": ["c2"]}
    mine, average = made(tmp_path / "m", METHODS[name], **keys, **same), made(tmp_path / "a", FEDAVG, **same)
    mine.run()
    average.run()
    assert torch.equal(mine.state["theta"], average.state["theta"])
    for key, named in average.predictors.items():
        for which, predictor in named.items():
            assert torch.equal(mine.predictors[key][which].tensors()["theta"], predictor.tensors()["theta"])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.usefixtures("each_task")
def test_fedavgm_is_sgd_with_momentum_on_the_mean_update(tmp_path: Path, nesterov: bool) -> None:
    f = made(tmp_path / "m", FEDAVGM, rounds=3, server_lr=0.7, momentum=0.8, nesterov=nesterov)
    theta = f.state["theta"]
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.8, nesterov=nesterov)
    for t in (1, 2, 3):
        theta.grad = -mean_update(tmp_path / str(t), theta.clone(), t)
        optimizer.step()
    f.run()
    close(f.state["theta"], theta)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
@pytest.mark.parametrize("lost", [None, {0: 1}])
def test_adaptive_rounds_follow_algorithm_2(tmp_path: Path, name: str, lost: dict[int, int] | None) -> None:
    """Compare by coordinate; a lost client is not in the mean."""
    f = made(tmp_path / "m", METHODS[name], rounds=3, server_lr=0.1, beta1=0.6, beta2=0.7, tau=0.02, lost=lost)
    theta = f.state["theta"].tolist()
    m, v = [0.0] * len(theta), [0.02**2] * len(theta)
    above = below = 0
    for t in (1, 2, 3):
        delta = mean_update(tmp_path / str(t), torch.tensor(theta, dtype=torch.float64), t, lost=lost).tolist()
        for j, d in enumerate(delta):
            m[j] = 0.6 * m[j] + 0.4 * d
            above, below = above + (v[j] > d * d), below + (v[j] < d * d)
            if name == "fedadam":
                v[j] = 0.7 * v[j] + 0.3 * d * d
            else:
                v[j] += 0.3 * d * d if v[j] < d * d else -0.3 * d * d
            theta[j] += 0.1 * m[j] / (math.sqrt(v[j]) + 0.02)
    assert min(above, below) > 10  # the two rules differ here
    f.run()
    for key, expected in (("theta", theta), ("m", m), ("v", v)):
        close(f.state[key], torch.tensor(expected, dtype=torch.float64))


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValidationError, match="nesterov"):
        FEDAVGM.settings.model_validate({"nesterov": True, "momentum": 0.0})
    with pytest.raises(ValidationError, match="nesterov"):
        FEDADAM.settings.model_validate({"nesterov": True})
