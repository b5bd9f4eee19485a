"""HeurFedAMP: its weights, its rounds in plain PyTorch, and local training as a special case (Huang et al., 2021)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import clients, close, federation, group, held_out_elsewhere, mean_loss, setup
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.heurfedamp import HEURFEDAMP, HeurFedAMPServer, HeurFedAMPSettings, attention
from fedloom.data.federated import ClientData
from fedloom.federation.randomness import generator

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL: dict[str, Any] = {"steps": 3, "batch_size": 3, "lr": 0.05, "momentum": 0.0}


def problem(n: int = 3) -> Setup:
    return dataclasses.replace(setup(), roster=tuple(f"c{i}" for i in range(n)))


def made(**changes: Any) -> HeurFedAMPSettings:
    return HeurFedAMPSettings.model_validate({"local": LOCAL, "proximity": 2.0} | changes)


def by_hand(models: Tensor, i: int, own: float, sigma: float) -> list[float]:
    cosine = [float(F.cosine_similarity(models[i], model, dim=0)) for model in models]
    e = [math.exp(sigma * c) if j != i else 0.0 for j, c in enumerate(cosine)]
    return [own if j == i else (1 - own) * e[j] / sum(e) for j in range(len(models))]


def test_weights_follow_the_paper() -> None:
    models = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for i in range(5):
        found = attention(models, i, 0.3, 25.0)
        close(found, torch.tensor(by_hand(models, i, 0.3, 25.0), dtype=torch.float64))
        assert float(found.sum()) == pytest.approx(1, abs=1e-12)
        scaled = models * torch.tensor([1.0, 3.0, 0.1, 7.0, 2.0]).double()[:, None]
        close(attention(scaled, i, 0.3, 25.0), found)  # only directions matter
        assert attention(models, i, 0.3, 1e6).isfinite().all()
    alike = torch.tensor([0.3, 0.7 / 4, 0.7 / 4, 0.7 / 4, 0.7 / 4]).double()
    for same in (attention(models, 0, 0.3, 0.0), attention(models[:1].repeat(5, 1), 0, 0.3, 25.0)):
        torch.testing.assert_close(same, alike, rtol=0, atol=1e-7)
    other = torch.randn(5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(attention(models, 0, 0.3, 0.0), attention(other, 0, 0.3, 0.0))  # for any models, to the bit
    assert attention(models[:1], 0, 0.3, 1.0).tolist() == [1.0]
    assert attention(torch.zeros(3, 2), 1, 0.5, 1.0).tolist() == [0.25, 0.5, 0.25]


def visit(s: HeurFedAMPSettings, p: Setup, u: Tensor, c: ClientData, round: int) -> Tensor:
    w = u.clone()
    for index in batches(len(c.train), 3, 3, generator(SEED, "train/train", c.id, round)):
        here = w.clone().requires_grad_()
        loss = mean_loss(p.model.logits(here, c.train.x[index]), c.train.y[index])
        (g,) = torch.autograd.grad(loss + s.proximity / 2 * (here - u).square().sum(), [here])
        w = w - s.local.lr * g
    return w


@pytest.mark.parametrize("cohort", [3, 2])
@pytest.mark.usefixtures("each_task")
def test_rounds_follow_the_paper_and_absent_clients_count_by_their_last_model(tmp_path: Path, cohort: int) -> None:
    s, p, data = made(sigma=5.0), problem(), clients(SIZES)
    run = federation(tmp_path, HEURFEDAMP, s, p, data, rounds=3, cohort=cohort)
    models, counted = run.state["models"], set[int]()
    run.run()
    for t, attempt in enumerate(run.loop.journal.counted(), start=1):
        drawn, new = [int(id[1:]) for id in attempt.conversations[0].clients], models.clone()
        for i in drawn:
            among = sorted(counted | {i})
            weights = by_hand(models[among], among.index(i), 0.5, 5.0) if len(among) > 1 else [1.0]
            u = (torch.tensor(weights, dtype=torch.float64)[:, None] * models[among]).sum(0)
            new[i] = visit(s, p, u, data[i], t)
        models, counted = new, counted | set(drawn)
    close(run.state["models"], models)


def test_full_weight_on_itself_equals_local_training_to_the_bit(tmp_path: Path) -> None:
    """ξ_ii = 1 and no proximal term: three visits of SGD, regardless of other clients."""
    s, p, data = made(self_weight=1.0, proximity=0.0), problem(), clients(SIZES)
    run = federation(tmp_path, HEURFEDAMP, s, p, data, rounds=3)
    start = run.state["models"]
    run.run()
    for i, c in enumerate(data):
        theta = start[i][None]
        for t in (1, 2, 3):
            alone = group([c])
            alone._generator = lambda id, purpose, t=t: generator(SEED, f"train/{purpose}", id, t)  # type: ignore[misc]
            theta = theta + (train(p.model, alone, theta, s.local).theta - theta)
        assert torch.equal(run.state["models"][i], theta[0])
        assert torch.equal(run.predictors[3, c.id]["personal"].tensors()["theta"], theta[0])


def test_equal_weights_give_uniform_fedavg(tmp_path: Path) -> None:
    """σ = 0, half of the weight on each of two clients, no proximal term: both start at the mean of their models."""
    data, s = clients(SIZES[:2]), made(sigma=0.0, proximity=0.0)
    average = FedAvgSettings.model_validate({"local": LOCAL, "weighting": "uniform"})
    mine, fedavg = (
        federation(tmp_path / method.name, method, settings, problem(2), data, rounds=3)
        for method, settings in ((HEURFEDAMP, s), (FEDAVG, average))
    )
    mine.run()
    fedavg.run()
    server = mine.loop.server
    assert isinstance(server, HeurFedAMPServer)
    assert torch.equal(server._centre(0), server._centre(1))
    close(server._centre(0), fedavg.state["theta"])


@pytest.mark.usefixtures("each_task")
def test_a_client_never_counted_starts_from_the_mean_and_trains(tmp_path: Path) -> None:
    """Check an unseen client, a client of the roster that was never drawn, and all clients before the first round."""
    s, p, data = made(), problem(), clients(SIZES)
    run, other = (
        federation(tmp_path / name, HEURFEDAMP, s, p, d, rounds=1, cohort=1, unseen=["c2"])
        for name, d in (("one", data), ("other", held_out_elsewhere(data)))
    )
    run.run()
    other.run()
    (drawn,) = run.loop.journal.counted()[0].conversations[0].clients
    mine = run.state["models"][int(drawn[1:])]
    for c in data:
        found = run.predictors[1, c.id]["personal"].tensors()["theta"]
        assert torch.equal(found, other.predictors[1, c.id]["personal"].tensors()["theta"])
        if c.id == drawn:
            assert torch.equal(found, mine)
            continue
        w = mine
        for index in batches(len(c.train), 3, 3, generator(SEED, "evaluate/personalize", c.id, 1)):
            here = w.clone().requires_grad_()
            loss = mean_loss(p.model.logits(here, c.train.x[index]), c.train.y[index])
            (g,) = torch.autograd.grad(loss + s.proximity / 2 * (here - mine).square().sum(), [here])
            w = w - s.local.lr * g
        close(found, w)


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(ValidationError, match=r"proximity: .*\b20 with local.lr 0.05"):
        made(proximity=20.0)
    for key, value in (("self_weight", 1.1), ("sigma", -1.0), ("proximity", -1.0)):
        with pytest.raises(ValidationError, match=key):
            made(**{key: value})
    assert HEURFEDAMP.sums_suffice(made()) is not None
    assert HEURFEDAMP.requires_fixed_population(made()) is not None
