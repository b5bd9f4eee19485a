"""FedProto against Algorithm 1 in plain PyTorch, and the nearest prototype (Tan et al., AAAI 2022)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, Federation, clients, close, federation, group, setup
from pydantic import ValidationError
from torch import Tensor, nn

from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedproto import FEDPROTO, FedProtoSettings
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.module import ModuleModel
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
FEATURES = 5
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.5}
MODEL = MLP(IMAGE, [FEATURES], CLASSES)


class NoBias(nn.Module):
    """Module whose last layer has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 4), nn.Linear(4, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x.flatten(1)).relu())
        return found


def made(**changes: Any) -> FedProtoSettings:
    return FedProtoSettings.model_validate({"strength": 2.0, "local": LOCAL} | changes)


def some(sizes: tuple[int, ...] = SIZES) -> list[ClientData]:
    """Return clients of whom the first lacks the last class."""
    data = clients(sizes)
    data[0].train.y.clamp_(max=CLASSES - 2)
    return data


def run(folder: Path, s: FedProtoSettings, **keys: Any) -> Federation:
    f = federation(folder, FEDPROTO, s, setup(), keys.pop("data", some()), **keys)
    f.run()
    return f


def visit(
    s: FedProtoSettings, theta: Tensor, prototypes: dict[int, Tensor], c: ClientData, steps: int, random: Any
) -> Tensor:
    """Train by torch.optim.SGD on cross-entropy + λ times the authors' mean squared error from the prototypes."""
    p = theta.clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=s.local.lr, momentum=s.local.momentum)
    for index in batches(len(c.train), s.local.batch_size, steps, random):
        x, y = c.train.x[index], c.train.y[index]
        z = MODEL.features(MODEL.layout.split(p), x)
        target = z.detach().clone()
        for row, label in enumerate(y.tolist()):
            target[row] = prototypes.get(label, target[row])
        optimizer.zero_grad()
        (F.cross_entropy(MODEL.logits(p, x), y) + s.strength * F.mse_loss(z, target)).backward()
        optimizer.step()
    return p.detach()


def means(theta: Tensor, c: ClientData) -> dict[int, tuple[Tensor, int]]:
    """Return mean features and number of examples of each class that the client has."""
    z = MODEL.features(MODEL.layout.split(theta), c.train.x)
    return {k: (z[c.train.y == k].mean(0), int((c.train.y == k).sum())) for k in set(c.train.y.tolist())}


def start_of(f: Federation, s: FedProtoSettings, c: ClientData, phase: str, round: int) -> Tensor:
    if s.start == "own":
        return MODEL.init(generator(SEED, f"{phase}/init", c.id, round), torch.float64)
    return MODEL.init(torch.Generator().manual_seed(int(f.state["seed"])), torch.float64)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("start", ["common", "own"])
def test_rounds_follow_algorithm_1(tmp_path: Path, weighting: str, start: str) -> None:
    """A class that no client of a round has keeps its prototype; one that no client ever had adds no loss."""
    s, data = made(weighting=weighting, start=start, personalize_steps=3), some()
    f = run(tmp_path, s, data=data, rounds=3, cohort=1, unseen=["c2"])
    prototypes: dict[int, Tensor] = {}
    own: dict[str, Tensor] = {}
    for t, attempt in enumerate(f.loop.journal.counted(), start=1):
        found = []
        for c in (c for c in data if c.id in attempt.conversations[0].clients):
            theta = own.get(c.id, start_of(f, s, c, "train", t))
            random = generator(SEED, "train/train", c.id, t)
            own[c.id] = visit(s, theta, prototypes, c, s.local.count(len(c.train)), random)
            found.append(means(own[c.id], c))
        for k in range(CLASSES):
            have = [each[k] for each in found if k in each]
            if have:
                share = torch.tensor([float(n) if weighting == "examples" else 1.0 for _, n in have]).double()
                stacked = torch.stack([mean for mean, _ in have])
                prototypes[k] = (share[:, None] * stacked).sum(0) / share.sum()
    assert prototypes.keys() == {k for k in range(CLASSES) if f.state["known"][k]}
    for k, prototype in prototypes.items():
        close(f.state["prototypes"][k], prototype)
    new = visit(
        s,
        start_of(f, s, data[2], "evaluate", 3),
        prototypes,
        data[2],
        3,
        generator(SEED, "evaluate/personalize", "c2", 3),
    )
    for c in data:  # the nearest prototype
        theta = own.get(c.id, new if c.id == "c2" else None)
        if theta is None:
            continue
        z = MODEL.features(MODEL.layout.split(theta), c.test.x)
        distances = torch.stack([(z - prototypes[k]).square().sum(1) / 2 for k in sorted(prototypes)], dim=1)
        found_p = f.predictors[3, c.id]["personal"].log_probabilities(c.test.x)
        close(found_p[:, sorted(prototypes)], F.log_softmax(-distances, dim=1), 1e-9)
        assert bool((found_p.exp()[:, [k for k in range(CLASSES) if k not in prototypes]] == 0).all())


def test_prototypes_are_averaged_by_class(tmp_path: Path) -> None:
    s, data = made(), some()
    for weighting in ("examples", "uniform"):
        s = made(weighting=weighting)
        f = run(tmp_path / weighting, s, data=data, rounds=1)
        found = []
        for c in data:
            theta = start_of(f, s, c, "train", 1)
            random = generator(SEED, "train/train", c.id, 1)
            found.append(means(visit(s, theta, {}, c, s.local.count(len(c.train)), random), c))
        for k in range(CLASSES):
            have = [each[k] for each in found if k in each]
            assert len(have) == (2 if k == CLASSES - 1 else 3)
            share = torch.tensor([float(n) if weighting == "examples" else 1.0 for _, n in have]).double()
            expected = (share[:, None] * torch.stack([mean for mean, _ in have])).sum(0) / share.sum()
            close(f.state["prototypes"][k], expected)


def test_only_prototypes_are_sent(tmp_path: Path) -> None:
    """Values of 8 bytes: prototypes, a count for each class, and the seed down; steps and loss up."""
    f = run(tmp_path, made(), rounds=2)
    numbers = CLASSES * FEATURES + CLASSES
    for attempt in f.loop.journal.counted():
        assert (attempt.payload_down, attempt.payload_up) == (3 * 8 * (numbers + 1), 3 * 8 * (numbers + 2))
    assert {name: tuple(tensor.shape) for name, tensor in f.state.items()} == {
        "prototypes": (CLASSES, FEATURES),
        "known": (CLASSES,),
        "seed": (1,),
    }


def test_a_client_predicts_by_its_head_before_prototypes_exist(tmp_path: Path) -> None:
    for rounds, predict in ((0, "prototypes"), (0, "head"), (2, "head")):
        s = made(predict=predict, personalize_steps=0)
        f = run(tmp_path / f"{rounds}-{predict}", s, rounds=rounds, unseen=["c2"])
        found = f.predictors[rounds, "c2"]["personal"].tensors()["theta"]
        assert torch.equal(found, start_of(f, s, some()[2], "evaluate", rounds))


def test_strength_0_equals_local_training(tmp_path: Path) -> None:
    data = some()
    s = made(strength=0.0, predict="head")
    f = run(tmp_path, s, data=data, rounds=2)
    for c in data:
        theta = start_of(f, s, c, "train", 1)
        for t in (1, 2):
            theta = visit(s, theta, {}, c, s.local.count(len(c.train)), generator(SEED, "train/train", c.id, t))
        close(f.predictors[2, c.id]["personal"].tensors()["theta"], theta)


def test_a_lost_client_is_excluded_from_the_means(tmp_path: Path) -> None:
    data = some()
    f = run(tmp_path / "all", made(), data=data[::2], rounds=2)
    lost = run(tmp_path / "lost", made(), data=data, rounds=2, lost={0: 1})
    for name in ("prototypes", "known"):
        close(lost.state[name], f.state[name])


def test_unsuitable_settings_are_rejected() -> None:
    for key, value in (("strength", -1.0), ("predict", "mean"), ("weighting", "sizes"), ("trim", 0.1)):
        with pytest.raises(ValidationError, match=key):
            made(**{key: value})
    with pytest.raises(ExperimentError) as refused:
        FEDPROTO.check_model(made(), MLP(IMAGE, [], CLASSES))
    assert refused.value.key == "model.name"
    model = ModuleModel(NoBias, IMAGE, CLASSES, "pixels")
    with pytest.raises(ExperimentError) as refused:
        FEDPROTO.check_model(made(), model)
    assert refused.value.key == "algorithm.predict"
    FEDPROTO.check_model(made(predict="head"), model)
    assert FEDPROTO.requires_fixed_population(made()) is None


def test_an_impossible_count_is_out_of_range() -> None:
    server = FEDPROTO.server(made(), setup(), generator(SEED, "init"))
    assert dict(server.update_bounds(9)) == {"steps": made().local.count(9), "counts": 9}
    server = FEDPROTO.server(made(weighting="uniform"), setup(), generator(SEED, "init"))
    assert dict(server.update_bounds(9)) == {"steps": made().local.count(9), "counts": 1}


def test_a_client_without_examples_gets_no_model() -> None:
    data = some()
    data[2] = replace(data[2], train=Split(data[2].train.x[:0], torch.zeros(0, dtype=torch.int64)))
    half = FEDPROTO.client(made(), setup())
    server = FEDPROTO.server(made(), setup(), generator(SEED, "init"))
    ask = FEDPROTO.messages[2]
    with pytest.raises(DataError, match="c2"):
        next(half.open(group([data[2]]), ask(**server.state)))
