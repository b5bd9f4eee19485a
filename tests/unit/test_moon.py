"""MOON against FedAvg and the contrastive loss in plain PyTorch (Li, He, Song, CVPR 2021)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, Federation, clients, close, federation, setup
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.moon import MOON, MOONSettings
from fedloom.data.federated import ClientData
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.module import ModuleModel
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.5}
MODEL = MLP(IMAGE, [5], CLASSES)


class Own(nn.Module):
    """Module with its own loss, and a last layer with weight normalization, which is not a plain linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(256, 4)  # an ordinary name
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.frozen(x.flatten(1))))
        return found

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none", label_smoothing=0.2)


class Normalized(nn.Module):
    """Module with running statistics."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(256, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
        if not plain:
            nn.utils.parametrizations.weight_norm(self.last)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.norm(self.first(x.flatten(1)))))
        return found


def made(**changes: Any) -> MOONSettings:
    base = {"mu": 2.0, "temperature": 0.4, "local": LOCAL | changes.pop("local", {})}
    return MOONSettings.model_validate(base | changes)


def run(folder: Path, s: MOONSettings, problem: Setup, **keys: Any) -> Federation:
    f = federation(folder, MOON, s, problem, clients(SIZES), **keys)
    f.run()
    return f


def visit(model: FlatModel, s: MOONSettings, w: Tensor, last: Tensor, c: ClientData, round: int, own: Any) -> Tensor:
    """Train by torch.optim.SGD on f_i + μ ℓ_con (eq. 3 as printed)."""
    p = w.clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=s.local.lr, momentum=s.local.momentum)
    random = generator(SEED, "train/train", c.id, round)
    for index in batches(len(c.train), s.local.batch_size, s.local.count(len(c.train)), random):
        x, y = c.train.x[index], c.train.y[index]
        z, near, far = (model.features(model.layout.split(theta), x) for theta in (p, w, last))
        to_w, to_last = (
            ((z * other).sum(1) / (z.norm(dim=1) * other.norm(dim=1)).clamp(min=1e-8) / s.temperature).exp()
            for other in (near, far)
        )
        optimizer.zero_grad()
        (own(model.logits(p, x), y) - s.mu * (to_w / (to_w + to_last)).log().mean()).backward()
        optimizer.step()
    return p.detach()


def test_the_first_round_equals_fedavgs_and_the_second_differs(tmp_path: Path) -> None:
    """Compare with FedAvg: if the last visit's model is the shared one, the two similarities cancel."""
    average = FedAvgSettings.model_validate({"local": LOCAL})
    for rounds in (1, 2):
        mine = run(tmp_path / f"m{rounds}", made(), setup(), rounds=rounds)
        other = federation(tmp_path / f"a{rounds}", FEDAVG, average, setup(), clients(SIZES), rounds=rounds)
        other.run()
        apart = float((mine.state["theta"] - other.state["theta"]).abs().max())
        assert apart < 1e-14 if rounds == 1 else apart > 1e-4


@pytest.mark.parametrize("plain", [True, False])
def test_running_statistics_move_once_per_step(tmp_path: Path, plain: bool) -> None:
    """The first round is FedAvg's, statistics included, for a plain linear last layer and another."""
    problem = setup(ModuleModel(partial(Normalized, plain), IMAGE, CLASSES, "pixels"))
    assert problem.model.layout.buffers
    average = FedAvgSettings.model_validate({"local": LOCAL})
    mine = run(tmp_path / "m", made(), problem)
    other = federation(tmp_path / "a", FEDAVG, average, problem, clients(SIZES))
    other.run()
    close(mine.state["theta"], other.state["theta"], 1e-12)


@pytest.mark.parametrize("kind", ["mlp", "module"])
def test_rounds_are_sgd_with_the_contrastive_loss(tmp_path: Path, kind: str) -> None:
    """The positive is the received model, the negative that of the client's last visit, one or two rounds ago."""
    model = MODEL if kind == "mlp" else ModuleModel(Own, IMAGE, CLASSES, "pixels")
    own = F.cross_entropy if kind == "mlp" else lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.2)
    s, problem, data = made(), setup(model), clients(SIZES)
    w = federation(tmp_path / "start", MOON, s, problem, data).state["theta"]
    f = run(tmp_path / "run", s, problem, rounds=4, cohort=2)
    drawn = [attempt.conversations[0].clients for attempt in f.loop.journal.counted()]
    last: dict[str, Tensor] = {}
    for t, names in enumerate(drawn, start=1):
        seen = [c for c in data if c.id in names]
        ends = [visit(model, s, w, last.get(c.id, w), c, t, own) for c in seen]
        last |= {c.id: end for c, end in zip(seen, ends, strict=True)}
        weights = torch.tensor([len(c.train) for c in seen]).double()
        w = (weights[:, None] * torch.stack(ends)).sum(0) / weights.sum()
    close(f.state["theta"], w)
    for name, theta in last.items():
        paths = sorted((tmp_path / "run" / "states" / name).glob("*.safetensors"))
        close(load_file(paths[-1])["theta"], theta)


def test_without_the_contrastive_term_it_equals_fedavg(tmp_path: Path) -> None:
    average = FedAvgSettings.model_validate({"local": LOCAL, "personalize_steps": 2})
    mine = run(tmp_path / "m", made(mu=0.0, personalize_steps=2), setup(), rounds=3, unseen=["c2"])
    other = federation(tmp_path / "a", FEDAVG, average, setup(), clients(SIZES), rounds=3, unseen=["c2"])
    other.run()
    close(mine.state["theta"], other.state["theta"], 1e-12)
    for key, named in other.predictors.items():
        for name, predictor in named.items():
            close(mine.predictors[key][name].tensors()["theta"], predictor.tensors()["theta"], 1e-12)


def test_absent_labels_are_masked_in_the_loss_but_not_in_the_features(tmp_path: Path) -> None:
    """With a client that lacks a label, the row of the last layer for it does not change."""
    data = clients(SIZES)
    for c in data:
        c.train.y.clamp_(max=CLASSES - 2)
    s = made(local={"mask_absent": True})
    f = federation(tmp_path, MOON, s, setup(), data, rounds=2)
    start = MODEL.layout.split(f.state["theta"])
    f.run()
    end = MODEL.layout.split(f.state["theta"])
    assert torch.equal(start["fc2.weight"][-1], end["fc2.weight"][-1])
    assert not torch.equal(start["fc2.weight"][0], end["fc2.weight"][0])


def test_unsuitable_settings_are_rejected() -> None:
    for key, value in (("mu", -1.0), ("temperature", 0.0)):
        with pytest.raises(ValidationError, match=key):
            made(**{key: value})
    with pytest.raises(ExperimentError) as refused:
        MOON.check_model(made(), MLP(IMAGE, [], CLASSES))
    assert refused.value.key == "model.name"
    assert MOON.requires_fixed_population(made()) is None
