"""FLowDUP against plain PyTorch with a dense P (Zakerinia, Scott, Lampert 2026, PMLR 306)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import refusing
from federations import (
    CLASSES,
    IMAGE,
    Federation,
    client,
    clients,
    close,
    federation,
    group,
    made_by,
    mean_loss,
    problem_of,
    sgd,
)
from pydantic import ValidationError
from torch import Tensor, nn

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.flowdup import FLOWDUP, FLowDUPSettings
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.module import ModuleModel
from fedloom.models.networks import MLP, BatchNormConvNet

SIZES = (4, 9, 6, 5)
SEED = 7  # of the federations
E, K = 4, 13
SMALL = MLP(IMAGE, [5], CLASSES)


def made(**changes: Any) -> FLowDUPSettings:
    keys: dict[str, Any] = {
        "local": {"epochs": 2, "batch_size": 3, "lr": 0.05},
        "embedding": {"network": "mlp", "width": 6, "labels": False},
        "embedding_size": E,
        "subspace": {"size": K},
        "lambda_centre": 0.3,
    }
    return FLowDUPSettings.model_validate(keys | changes)


def problem(data: list[ClientData], model: FlatModel = SMALL, **keys: Any) -> Setup:
    """Return a problem whose last client is unseen."""
    return problem_of(model, data, roster=tuple(c.id for c in data[:-1]), **keys)


def run(folder: Path, s: FLowDUPSettings, data: list[ClientData], **keys: Any) -> Federation:
    p = problem(data, keys.pop("model", SMALL), seed=keys.pop("seed", 0))
    f = federation(folder, FLOWDUP, s, p, data, rounds=keys.pop("rounds", 2), unseen=[data[-1].id], **keys)
    f.run()
    return f


def bare(c: ClientData) -> ClientData:
    """Return the client without training labels."""
    return replace(c, train=Split(c.train.x, None))


class Written(nn.Module):
    """ψ and the model that it generates, by torch.nn and a dense P."""

    def __init__(self, psi: Tensor, s: FLowDUPSettings, p: Setup) -> None:
        super().__init__()
        pixels = 16 * 16 + (CLASSES if s.embedding.labels else 0)
        self.h1 = nn.Sequential(nn.Linear(pixels, 6), nn.ReLU(), nn.Linear(6, E)).double()
        self.h2 = nn.Sequential(nn.Linear(E, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, K))
        self.h2, self.centre = self.h2.double(), nn.Parameter(torch.zeros(K, dtype=torch.float64))
        subspace = s.subspace.of(SMALL, p.seed, torch.float64)
        self.origin = nn.Parameter(subspace.origin.clone(), requires_grad=s.subspace.origin == "trained")
        self.shared = s.coordinates == "shared"
        nn.utils.vector_to_parameters(psi.clone(), self.parts)
        self.p = torch.zeros(SMALL.layout.size, K, dtype=torch.float64)
        self.p[torch.arange(len(self.p)), subspace.groups] = subspace.entries

    @property
    def parts(self) -> list[nn.Parameter]:
        networks = [] if self.shared else [*self.h1.parameters(), *self.h2.parameters()]
        return [*networks, self.centre, *([self.origin] if self.origin.requires_grad else [])]

    @property
    def psi(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.parts).detach()

    def v(self, x: Tensor, y: Tensor | None) -> Tensor:
        if self.shared:
            return self.centre
        x = x.flatten(1)
        if y is not None:
            x = torch.cat([x, F.one_hot(y, CLASSES)], 1)
        found: Tensor = self.h2(self.h1(x).mean(0))
        return found

    def theta(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.origin + self.p @ self.v(x, y)


def visit(psi: Tensor, c: ClientData, s: FLowDUPSettings, p: Setup, round: int, *, labelled: bool) -> Tensor:
    """Run a client's steps on ψ by torch.optim.SGD."""
    w = Written(psi, s, p)
    optimizer = torch.optim.SGD(w.parts, lr=s.local.lr, momentum=0.9)
    random = generator(SEED, "train/train", c.id, round)
    for index in batches(len(c.train), s.local.batch_size, s.local.count(len(c.train)), random):
        x, y = c.train.x[index], None if c.train.y is None else c.train.y[index]
        seen = y if s.embedding.labels else None
        loss = s.lambda_centre * (w.v(x, seen) - w.centre).square().sum()
        if labelled:
            assert y is not None
            loss = loss + mean_loss(SMALL.logits(w.theta(x, seen), x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return w.psi


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"unlabelled": 0.5},
        {"weighting": "uniform", "server_lr": 0.5},
        {"embedding": {"network": "mlp", "width": 6, "labels": True}},
        {"subspace": {"size": K, "origin": "trained"}},
        {"coordinates": "shared"},
        {"coordinates": "shared", "subspace": {"size": K, "origin": "trained"}, "unlabelled": 0.5},
    ],
    ids=["labelled", "some hidden", "uniform", "PeFLL on sums", "trained origin", "shared", "shared, trained"],
)
@pytest.mark.parametrize("at_once", [1, 3])
def test_rounds_equal_plain_gradient_steps(tmp_path: Path, changes: dict[str, Any], at_once: int) -> None:
    """Some clients have no labels, others' labels are hidden; unseen clients generate their models themselves."""
    s, data = made(**changes), clients(SIZES)
    if not s.embedding.labels:
        data[1] = bare(data[1])
    p = problem(data, seed=5)
    model: Any = FLOWDUP.client(s, p).setup.model
    labelled = {c.id: model.uses_labels(c) for c in data}
    assert sum(labelled.values()) == len(data) - len({*model.hidden, *(["c1"] * (not s.embedding.labels))})
    assert len(model.hidden) == (1 if s.unlabelled else 0)
    psi = federation(tmp_path / "start", FLOWDUP, s, p, data).state["theta"]
    assert FLOWDUP.starts_alike(s) is (s.subspace.origin == "fixed")
    weights = torch.tensor([len(c.train) for c in data[:-1]], dtype=torch.float64)
    weights = torch.ones_like(weights) if s.weighting == "uniform" else weights
    for t in (1, 2):
        ends = torch.stack([visit(psi, c, s, p, t, labelled=labelled[c.id]) for c in data[:-1]])
        psi = psi + s.server_lr * (weights[:, None] * (ends - psi)).sum(0) / weights.sum()
    f = run(tmp_path / "run", s, data, at_once=at_once, seed=5)
    close(f.state["theta"], psi)
    w = Written(psi, s, p)
    for c in data:
        predictor = f.predictors[2, c.id]["personal"]
        close(predictor.tensors()["theta"], w.theta(c.train.x, c.train.y if s.embedding.labels else None))
        close(
            predictor.log_probabilities(c.test.x), SMALL.logits(predictor.tensors()["theta"], c.test.x).log_softmax(1)
        )


def test_the_control_gives_all_clients_one_model(tmp_path: Path) -> None:
    """Clients share v; with every dimension of the model it is FedAvg, in rotated coordinates."""
    s, data = made(coordinates="shared", subspace={"size": SMALL.layout.size}), clients(SIZES)
    f = run(tmp_path / "control", s, data, seed=5)
    thetas = torch.stack([f.predictors[2, c.id]["personal"].tensors()["theta"] for c in data])
    assert torch.equal(thetas, thetas[:1].expand_as(thetas))
    start = s.subspace.of(SMALL, 5, torch.float64).origin
    averaged = FedAvgSettings.model_validate({"local": {"epochs": 2, "batch_size": 3, "lr": 0.05}})
    g = federation(tmp_path / "plain", FEDAVG, averaged, problem(data, seed=5), data, rounds=2, unseen=[data[-1].id])
    g.loop.server.state["theta"] = start
    g.run()
    close(thetas[0], g.state["theta"])
    assert FLOWDUP.titles(s) != FLOWDUP.titles(made())


def test_unlabelled_clients_leave_a_trained_origin_in_place(tmp_path: Path) -> None:
    s, data = made(subspace={"size": K, "origin": "trained"}), [bare(c) for c in clients(SIZES)]
    start = s.subspace.of(SMALL, 0, torch.float64).origin
    assert torch.equal(run(tmp_path, s, data).state["theta"][-len(start) :], start)


def test_only_the_centre_learns_the_mean_of_the_vs(tmp_path: Path) -> None:
    """Clients without labels move c, in one step of rate 1/(2λ), to the weighted mean of their v."""
    data = [bare(c) for c in clients(SIZES)]
    s = made(lambda_centre=0.5, local={"steps": 1, "batch_size": 99, "lr": 1.0, "momentum": 0.0})
    p = problem(data)
    start = Written(federation(tmp_path / "start", FLOWDUP, s, p, data).state["theta"], s, p)
    expected = sum(len(c.train) * start.v(c.train.x, None) for c in data[:-1]) / sum(SIZES[:-1])
    close(run(tmp_path / "run", s, data, rounds=1).state["theta"][-K:], expected)


def test_hidden_labels_have_no_effect(tmp_path: Path) -> None:
    """Runs with hidden labels are bit-identical to runs of the same clients without labels."""
    s, data = made(unlabelled=0.7, personalize_steps=2), clients(SIZES)
    hidden = FLOWDUP.client(s, problem(data)).setup.model.hidden  # type: ignore[attr-defined]
    assert len(hidden) == 2
    found = made_by(run(tmp_path / "hidden", s, data))
    without = made_by(run(tmp_path / "bare", s, [bare(c) if c.id in hidden else c for c in data]))
    assert found.keys() == without.keys()
    assert all(torch.equal(value, without[key]) for key, value in found.items())


def test_the_seed_selects_the_clients_with_hidden_labels() -> None:
    data = clients([3] * 21)
    sets = [FLOWDUP.client(made(unlabelled=0.29), problem(data, seed=i)).setup.model.hidden for i in range(20)]  # type: ignore[attr-defined]
    assert {len(hidden) for hidden in sets} == {5}  # of 20
    assert len(set(sets)) == len(sets)
    assert set().union(*sets) == {c.id for c in data[:-1]}
    other = problem(data, same_clients=False)
    assert FLOWDUP.client(made(unlabelled=0.5), other).setup.model.hidden == frozenset()  # type: ignore[attr-defined]


def test_clients_with_labels_can_fine_tune_their_models(tmp_path: Path) -> None:
    data = clients(SIZES)
    data[0] = bare(data[0])
    f, plain = (run(tmp_path / str(k), made(personalize_steps=k), data) for k in (3, 0))
    assert torch.equal(f.state["theta"], plain.state["theta"])
    for c in data:
        theta, start = (g.predictors[2, c.id]["personal"].tensors()["theta"] for g in (f, plain))
        if c.train.y is None:
            assert torch.equal(theta, start)
            continue
        random = generator(SEED, "evaluate/fine-tune", c.id, 2)
        close(theta, sgd(SMALL, start, c, made().local, slice(None), random, steps=3))
    half = FLOWDUP.client(made(personalize_steps=3), problem(data))
    assert half.personalization_steps("personal", 9) == 3
    assert FLOWDUP.titles(made()) != FLOWDUP.titles(made(personalize_steps=1))


class Net(nn.Module):
    """A frozen layer, a convolution, a normalization layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(1, 2, 5, stride=3).requires_grad_(False)
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 2), nn.LayerNorm(27), nn.Linear(27, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.conv(self.frozen(x))).flatten(1))
        found: Tensor = self.head(nn.functional.dropout(h, 0.1, self.training))
        return found


def test_models_of_a_pretrained_module_start_at_its_values() -> None:
    """Pretrained values are θ₀; clients in a batch train as single ones, apart from random draws."""
    torch.manual_seed(0)
    pretrained = Net()
    model = ModuleModel(lambda: pretrained, IMAGE, CLASSES, "pixels")
    data = [
        replace(c, **{name: Split(part.x.float(), part.y) for name, part in (("train", c.train), ("test", c.test))})
        for c in clients(SIZES)
    ]
    data[1] = bare(data[1])
    s, p = made(subspace={"size": 40}), replace(problem(data, model), dtype=torch.float32)
    FLOWDUP.check_model(s, model)
    FLOWDUP.check_model(made(subspace={"size": 40, "origin": "model"}), model)
    half = FLOWDUP.client(s, p)
    own = nn.utils.parameters_to_vector(q for q in pretrained.parameters() if q.requires_grad)
    assert torch.equal(half.setup.model.subspace.origin, own)  # type: ignore[attr-defined]
    opening, _, ask = FLOWDUP.messages
    psi = FLOWDUP.server(s, p, torch.Generator().manual_seed(1)).state["theta"]
    answer = next(half.open(group(data), opening(psi)))
    assert answer.delta_theta.isfinite().all()
    assert (answer.delta_theta.norm(dim=1) > 0).all()
    with pytest.raises(StopIteration) as end:
        next(half.open(group(data), ask(psi)))
    (predictor,) = end.value.value[0].values()
    theta = half.setup.model.made(psi, data[0])  # type: ignore[attr-defined]
    assert torch.equal(predictor.tensors()["theta"], theta)
    with torch.no_grad():
        nn.utils.vector_to_parameters(theta, (q for q in pretrained.parameters() if q.requires_grad))
        expected = pretrained.eval()(data[0].test.x).log_softmax(1)
    torch.testing.assert_close(predictor.log_probabilities(data[0].test.x), expected)


def test_unsuitable_models_and_settings_are_rejected() -> None:
    with refusing(ExperimentError, "model.norm", "flowdup"):
        FLOWDUP.check_model(made(), BatchNormConvNet(IMAGE, [3], [], CLASSES))
    with refusing(ExperimentError, "algorithm.subspace.size: ", 100_000):
        FLOWDUP.check_model(made(subspace={"size": 100_000}), SMALL)
    for drawn in (SMALL, ModuleModel(Net, IMAGE, CLASSES, "pixels")):
        with refusing(ExperimentError, "algorithm.subspace.origin: ", "trained"):
            FLOWDUP.check_model(made(subspace={"size": 40, "origin": "model"}), drawn)
    with pytest.raises(ValidationError, match="unlabelled"):
        made(unlabelled=0.5, embedding={"network": "linear", "labels": True})
    with pytest.raises(ValidationError, match=r"local\.mask_absent"):
        made(local={"steps": 2, "mask_absent": True})
    assert FLOWDUP.requires_fixed_population(made()) is None
    fixed = FLOWDUP.requires_fixed_population(made(unlabelled=0.5))
    assert fixed[0] == "unlabelled"
    assert FLOWDUP.labelled(made(embedding={"network": "linear", "labels": True})) is True
    assert FLOWDUP.labelled(made(personalize_steps=1)) is True
    assert FLOWDUP.labelled(made()) is False


def test_a_client_without_inputs_has_no_model() -> None:
    c = client("c0", 3)
    empty = replace(c, train=Split(c.train.x[:0], None))
    half, (_, _, ask) = FLOWDUP.client(made(), problem([c, c])), FLOWDUP.messages
    with refusing(DataError, "c0"):
        next(half.open(group([empty]), ask(torch.zeros(half.setup.model.layout.size).double())))
