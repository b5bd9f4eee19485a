"""FedALA against FedAvg and Algorithm 1 with autograd on the weights (Zhang et al., AAAI 2023)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, IMAGE, Federation, clients, close, federation, kept, setup, sgd
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.batches import batches
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedala import FEDALA, FedALASettings, LastLayers
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.data.federated import ClientData
from fedloom.federation.randomness import generator
from fedloom.models.networks import MLP, BatchNormConvNet

SIZES = (5, 12, 9)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.3, "momentum": 0.5}
MODEL = MLP(IMAGE, [6, 5], CLASSES)
D = MODEL.layout.size


def made(**changes: Any) -> FedALASettings:
    base = {"local": LOCAL, "layers": 2, "weights_lr": 20.0, "share": 0.7, "start_epochs": 13, "threshold": 1e-9}
    return FedALASettings.model_validate(base | changes)


def run(folder: Path, s: FedALASettings, **keys: Any) -> Federation:
    f = federation(folder, FEDALA, s, setup(MODEL), keys.pop("data", clients(SIZES)), **keys)
    f.run()
    return f


def theta_of(f: Federation, round: int, client: str, name: str = "personal") -> Tensor:
    theta: Tensor = f.predictors[round, client][name].tensors()["theta"]
    return theta


def aggregated(
    s: FedALASettings, w: Tensor, own: Tensor, weights: Tensor, c: ClientData, key: tuple[str, int], first: bool
) -> tuple[Tensor, Tensor, int]:
    """Return Θ̂, W and the number of epochs; autograd differentiates the loss by W, through the mixture."""
    k, b = len(weights), min(s.local.batch_size, len(c.train))
    steps = max(1, int(s.share * len(c.train)) // b)
    order = list(batches(len(c.train), s.local.batch_size, steps, generator(SEED, key[0], c.id, key[1])))

    def mixture(weights: Tensor) -> Tensor:
        return torch.cat([w[:-k], own[-k:] + (w[-k:] - own[-k:]) * weights])

    losses: list[float] = []
    while True:
        for index in order:
            p = weights.clone().requires_grad_()
            loss = F.cross_entropy(MODEL.logits(mixture(p), c.train.x[index]), c.train.y[index])
            (slope,) = torch.autograd.grad(loss, [p])
            weights = (weights - s.weights_lr * slope).clamp(0, 1)
        losses.append(float(loss.detach()))
        settled = len(losses) > 10 and float(torch.tensor(losses[-10:]).std(correction=0)) < s.threshold
        if not first or settled or len(losses) == s.start_epochs:
            return mixture(weights), weights, len(losses)


def test_parameters_with_weights() -> None:
    for layers, names in (
        (1, ["fc3.weight", "fc3.bias"]),
        (2, ["fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"]),
        (9, [name for name, _ in MODEL.layout.entries]),
    ):
        found = LastLayers.of(MODEL.layout, layers)
        assert found.names == names
        k = sum(size for (name, _), size in zip(MODEL.layout.entries, MODEL.layout.sizes, strict=True) if name in names)
        assert found.at.tolist() == list(range(D - k, D))
    statistics = BatchNormConvNet(IMAGE, [3], [], CLASSES).layout
    assert LastLayers.of(statistics, 2).names == ["conv1.weight", "conv1.gain", "conv1.shift", "fc1.weight", "fc1.bias"]
    assert LastLayers.of(MLP(IMAGE, [], CLASSES).layout, 1).names == ["fc1.weight", "fc1.bias"]


def test_the_first_visit_equals_fedavgs_to_the_bit(tmp_path: Path) -> None:
    average = FedAvgSettings.model_validate({"local": LOCAL})
    mine = run(tmp_path / "mine", made())
    other = federation(tmp_path / "avg", FEDAVG, average, setup(MODEL), clients(SIZES))
    other.run()
    assert torch.equal(mine.state["theta"], other.state["theta"])
    assert mine.loop.journal.counted()[0].statistics == other.loop.journal.counted()[0].statistics


@pytest.mark.parametrize("threshold", [1e-9, 1e9])
def test_rounds_follow_algorithm_1(tmp_path: Path, threshold: float) -> None:
    """The first aggregation makes all epochs if losses do not settle, and 11 if they settle at once; later ones 1."""
    s, data = made(threshold=threshold), clients(SIZES)
    w = federation(tmp_path / "start", FEDALA, s, setup(MODEL), data).state["theta"]
    f = run(tmp_path / "run", s, rounds=5, cohort=2)
    own: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    learned: set[str] = set()
    for t, attempt in enumerate(f.loop.journal.counted(), start=1):
        seen = [c for c in data if c.id in attempt.conversations[0].clients]
        ends, steps = [], 0
        for c in seen:
            start = w
            if c.id in own:
                found = aggregated(s, w, own[c.id], weights[c.id], c, ("train/weights", t), c.id not in learned)
                start, weights[c.id], epochs = found
                assert epochs == (1 if c.id in learned else 13 if threshold < 1 else 11)
                steps += epochs * (int(0.7 * len(c.train)) // 3)
                learned.add(c.id)
            else:
                weights[c.id] = torch.ones(sum(MODEL.layout.sizes[-4:])).double()
            end = sgd(MODEL, start, c, s.local, slice(None), generator(SEED, "train/train", c.id, t))
            own[c.id], steps = end, steps + s.local.count(len(c.train))
            ends.append(end)
        share = torch.tensor([len(c.train) for c in seen]).double()
        w = (share[:, None] * torch.stack(ends)).sum(0) / share.sum()
        assert attempt.statistics["client_steps"] == steps
    assert learned
    close(f.state["theta"], w)
    for name, theta in own.items():
        close(kept(tmp_path / "run", name, "theta"), theta)
        close(kept(tmp_path / "run", name, "weights"), weights[name])
        assert float(kept(tmp_path / "run", name, "started")) == (name in learned)
    assert any(0 < float(value) < 1 for name in learned for value in weights[name])
    for c in data:  # a personal model is the start of a visit
        found = aggregated(s, w, own[c.id], weights[c.id], c, ("evaluate/weights", 5), c.id not in learned)
        close(theta_of(f, 5, c.id), found[0])
        assert torch.equal(theta_of(f, 5, c.id, "global"), f.state["theta"])


def test_new_clients_fine_tune_the_shared_model(tmp_path: Path) -> None:
    data = clients(SIZES)
    f = run(tmp_path, made(personalize_steps=4), rounds=2, unseen=["c2"])
    s = made(local=LOCAL | {"epochs": None, "steps": 4}).local
    random = generator(SEED, "evaluate/fine-tune", "c2", 2)
    close(theta_of(f, 2, "c2"), sgd(MODEL, f.state["theta"], data[2], s, slice(None), random))
    half = FEDALA.client(made(personalize_steps=4), setup(MODEL))
    assert [half.personalization_steps(name, 9) for name in ("personal", "global")] == [4, 0]


def test_extreme_weights_select_one_of_the_two_models(tmp_path: Path) -> None:
    """To the bit: 1 is the shared model, 0 the client's own in the last layers."""
    c, s = clients((7,))[0], made(weights_lr=1e-300)
    random = torch.Generator().manual_seed(5)
    w, own = (MODEL.init(random, torch.float64) for _ in range(2))
    k = sum(MODEL.layout.sizes[-4:])
    for value, expected in ((1.0, w), (0.0, torch.cat([w[:-k], own[-k:]]))):
        state = {"theta": own, "weights": torch.full((k,), value).double(), "started": torch.ones(1).double()}
        members = ClientGroup([c], lambda id, purpose: generator(SEED, purpose, id, 1), [state], may_keep=False)
        assert torch.equal(FEDALA.personalize(MODEL, members, w[None], s)["personal"][0], expected)


def test_a_gradient_bound_does_not_bound_the_update() -> None:
    """A visit may start far from the shared model, at the client's own."""
    s = made(local=LOCAL | {"clip": 1.0})
    assert dict(FEDALA.update_bounds(s, 12)) == {"steps": s.local.count(12) + 13 * 2}


def test_unsuitable_settings_are_rejected() -> None:
    for key, value in (("layers", 0), ("share", 0.0), ("share", 1.1), ("start_epochs", 0), ("threshold", -1.0)):
        with pytest.raises(ValidationError, match=key):
            made(**{key: value})
    assert FEDALA.requires_fixed_population(made()) is None
