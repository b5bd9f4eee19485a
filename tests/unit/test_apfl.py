"""APFL against FedAvg, local training, and Algorithm 1 in plain PyTorch (Deng, Kamani, Mahdavi, 2020)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from federations import Federation, clients, close, federation, group, mean_loss, setup
from safetensors.torch import load_file
from torch import Tensor

from fedloom.algorithms.apfl import APFL, APFLSettings
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.9, "lambda_theta": 0.01}
MODEL = setup().model


def made(**changes: Any) -> APFLSettings:
    return APFLSettings.model_validate({"local": LOCAL | changes.pop("local", {}), **changes})


def run(folder: Path, s: APFLSettings, **keys: Any) -> Federation:
    data = keys.pop("data", None) or clients(SIZES)
    f = federation(folder, APFL, s, setup(), data, **keys)
    f.run()
    return f


def theta_of(f: Federation, round: int, client: str, name: str = "personal") -> Tensor:
    theta: Tensor = f.predictors[round, client][name].tensors()["theta"]
    return theta


def kept(folder: Path, client: str, round: int) -> dict[str, Tensor]:
    (path,) = (folder / "states" / client).glob(f"{round}-*.safetensors")
    return load_file(path)


@pytest.mark.parametrize("mix", [{"alpha": 0.0, "adaptive": False}, {"alpha": 0.7}], ids=["none", "adaptive"])
def test_the_shared_model_equals_fedavgs_to_the_bit(tmp_path: Path, mix: dict[str, Any]) -> None:
    """With α = 0 the personal models are the shared one, too."""
    mine = run(tmp_path / "apfl", made(**mix), rounds=3, cohort=2)
    s = FedAvgSettings.model_validate({"local": LOCAL})
    average = federation(tmp_path / "avg", FEDAVG, s, setup(), clients(SIZES), rounds=3, cohort=2)
    average.run()
    assert torch.equal(mine.state["theta"], average.state["theta"])
    for c in ("c0", "c1", "c2"):
        assert torch.equal(theta_of(mine, 3, c, "global"), theta_of(average, 3, c, "global"))
        assert torch.equal(theta_of(mine, 3, c), theta_of(average, 3, c)) is (mix["alpha"] == 0)
    losses = [[a.statistics["loss"] for a in f.loop.journal.counted()] for f in (mine, average)]
    assert losses[0] == losses[1]


def test_alpha_1_equals_local_training_to_the_bit(tmp_path: Path) -> None:
    data, f = clients(SIZES), run(tmp_path / "run", made(alpha=1.0, adaptive=False), rounds=2)
    start = federation(tmp_path / "start", APFL, made(), setup(), data).state["theta"]
    for c in data:
        v = start[None]
        for t in (1, 2):
            alone = ClientGroup([c], lambda id, purpose, t=t: generator(SEED, f"train/{purpose}", id, t))
            v = train(MODEL, alone, v, LocalSGD.model_validate(LOCAL)).theta
        assert torch.equal(theta_of(f, 2, c.id), v[0])


@pytest.mark.usefixtures("each_task")
def test_rounds_follow_algorithm_1(tmp_path: Path) -> None:
    """v, w and α, with momentum and λ_θ, which belong to each model's own loss."""
    s, data = made(alpha=0.6), clients(SIZES)
    f = federation(tmp_path, APFL, s, setup(), data, rounds=3, unseen=["c2"])
    theta = f.state["theta"]
    v = {c.id: theta for c in data}
    alpha = {c.id: torch.tensor(0.6, dtype=torch.float64) for c in data}
    for t in (1, 2, 3):
        ends = []
        for c in data[:2]:
            w, mine, share, x, y = theta, v[c.id], alpha[c.id], c.train.x, c.train.y
            momentum, own = torch.zeros_like(w), torch.zeros_like(w)
            drawn = batches(len(c.train), 3, s.local.count(len(c.train)), generator(SEED, "train/train", c.id, t))
            for i, index in enumerate(drawn):
                at = [p.clone().requires_grad_() for p in (w, mine, share)]

                def f_i(p: Tensor, x: Tensor = x[index], y: Tensor = y[index]) -> Tensor:
                    return mean_loss(MODEL.logits(p, x), y) + 0.01 * p.square().sum()

                (g,) = torch.autograd.grad(f_i(at[0]), at[:1])
                g_v, g_alpha = torch.autograd.grad(f_i(at[2] * at[1] + (1 - at[2]) * at[0].detach()), at[1:])
                momentum, own = 0.9 * momentum + g, 0.9 * own + g_v
                w, mine = w - 0.05 * momentum, mine - 0.05 * own
                share = (share - 0.05 * g_alpha).clamp(0, 1) if i == 0 else share
            v[c.id], alpha[c.id] = mine, share
            ends.append(len(c.train) * w)
        theta = torch.stack(ends).sum(0) / sum(SIZES[:2])
    f.run()
    close(f.state["theta"], theta)
    for c in data[:2]:
        close(kept(tmp_path, c.id, 3)["alpha"][0], alpha[c.id])
        assert abs(float(alpha[c.id]) - 0.6) > 1e-6
        close(theta_of(f, 3, c.id), alpha[c.id] * v[c.id] + (1 - alpha[c.id]) * theta)
    steps = sum(2 * s.local.count(n) for n in SIZES[:2])
    assert [a.statistics["client_steps"] for a in f.loop.journal.counted()] == [steps] * 3


@pytest.mark.parametrize(("centre", "alpha"), [(0.9, 0.5 + 0.3 * 0.2 * 0.2), (20.0, 1.0), (-20.0, 0.0)])
def test_alpha_follows_the_loss_and_stays_between_0_and_1(centre: float, alpha: float) -> None:
    """f(θ) = (θ - c)²/2 at v = 0.8, w = 0.6: α ← α - η (v - w)(v̄ - c), v̄ being 0.7 and η 0.3."""
    split = Split(torch.full((4, 1), centre, dtype=torch.float64), None)
    state = {"v": torch.tensor([0.8], dtype=torch.float64), "alpha": torch.tensor([0.5], dtype=torch.float64)}
    members = ClientGroup([ClientData("c0", split, split, split, 0)], group([])._generator, [state])
    local = {"epochs": None, "steps": 1, "lr": 0.3, "momentum": 0.0, "lambda_theta": 0.0}
    APFL.train(Quadratic(1), members, torch.tensor([[0.6]], dtype=torch.float64), made(local=local))
    assert members.kept[0]["alpha"].item() == pytest.approx(alpha, abs=1e-12)


def test_a_client_whose_personal_model_diverges_is_lost() -> None:
    """Lose the client although training of its shared model does not diverge."""
    split = Split(torch.zeros(4, 1).double(), None)
    state = {"v": torch.tensor([1e200]).double(), "alpha": torch.tensor([1.0]).double()}
    members = ClientGroup([ClientData("c0", split, split, split, 0)], group([])._generator, [state])
    trained = APFL.train(Quadratic(1), members, torch.tensor([[0.6]], dtype=torch.float64), made())
    assert trained.theta.isfinite().all()
    assert tells(members.lost[0], "algorithm.local.lr", "0.05")
