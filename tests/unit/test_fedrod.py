"""FedRoD against FedAvg, and both losses in plain PyTorch (Chen and Chao, ICLR 2022)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_method import NORMALIZED
from every_method import run as run_method
from federations import (
    CLASSES,
    IMAGE,
    Federation,
    answers_as_alone,
    client,
    clients,
    close,
    federation,
    group,
    made_by,
    setup,
)
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.fedrod import FEDROD, FedRoDSettings, TwoHeads, raised
from fedloom.algorithms.moon import Contrasting, MOONSettings
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP
from fedloom.models.registry import MODELS
from fedloom.tasks.regression import Regression

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
SMALL = MLP(IMAGE, [5], CLASSES)
BODY, D = SMALL.layout.body_size, SMALL.layout.size


def made(**changes: Any) -> FedRoDSettings:
    return FedRoDSettings.model_validate({"local": LOCAL} | changes)


def lacking(c: ClientData, label: int) -> ClientData:
    """Return the client without a label in its train split."""
    has = c.train.y != label
    return ClientData(c.id, Split(c.train.x[has], c.train.y[has]), c.validation, c.test, c.classes)


def run(folder: Path, s: FedRoDSettings, **keys: Any) -> Federation:
    f = federation(folder, FEDROD, s, setup(), keys.pop("data", clients(SIZES)), rounds=2, unseen=["c2"], **keys)
    f.run()
    return f


def visit(theta: Tensor, head: Tensor, c: ClientData, s: FedRoDSettings, t: int) -> tuple[Tensor, Tensor]:
    """Train with two optimizers: body and generic head on the balanced loss, the personal head on the plain one."""
    w, h = theta.clone().requires_grad_(), head.clone().requires_grad_()
    one, two = (torch.optim.SGD([p], lr=s.local.lr, momentum=s.local.momentum) for p in (w, h))
    counts = torch.bincount(c.train.y, minlength=CLASSES).double()
    random = generator(SEED, "train/train", c.id, t)
    for index in batches(len(c.train), s.local.batch_size, s.local.count(len(c.train)), random):
        x, y = c.train.x[index], c.train.y[index]
        logits = SMALL.logits(w, x)
        odds = counts**s.balance * logits.exp()
        generic = -(odds[torch.arange(len(y)), y] / odds.sum(1)).log().mean()
        z = SMALL.features(SMALL.layout.split(w), x).detach()
        own = F.linear(z, h[: 5 * CLASSES].view(CLASSES, 5), h[5 * CLASSES :])
        personal = F.cross_entropy(logits.detach() + own, y)
        for optimizer, loss in ((one, generic), (two, personal)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return w.detach(), h.detach()


def test_without_balance_the_shared_model_equals_fedavgs_to_the_bit(tmp_path: Path) -> None:
    """For any personal heads."""
    rod = run(tmp_path / "rod", made(balance=0.0))
    settings = FedAvgSettings.model_validate({"local": LOCAL})
    avg = federation(tmp_path / "avg", FEDAVG, settings, setup(), clients(SIZES), rounds=2, unseen=["c2"])
    avg.run()
    assert torch.equal(rod.state["theta"], avg.state["theta"])
    for c in ("c0", "c1", "c2"):
        named = rod.predictors[2, c]
        assert torch.equal(named["global"].tensors()["theta"], avg.state["theta"])
        personal = named["personal"].tensors()["theta"]
        assert torch.equal(personal[:BODY], avg.state["theta"][:BODY])
        assert torch.equal(personal, avg.state["theta"]) is (c == "c2")  # a new client has no head to add


@pytest.mark.parametrize(("balance", "personal"), [(1.0, "shared"), (0.5, "shared"), (1.0, "local")])
def test_rounds_equal_a_plain_loop_over_both_losses(tmp_path: Path, balance: float, personal: str) -> None:
    """With a client that lacks a label: its count is zero. ``personal`` uses the server's θ, or the client's own."""
    s, data = made(balance=balance, personal=personal), clients(SIZES)
    data[1] = lacking(data[1], 2)
    theta = federation(tmp_path / "start", FEDROD, s, setup(), data).state["theta"]
    heads = {c.id: torch.zeros(D - BODY, dtype=torch.float64) for c in data[:2]}
    weights = torch.tensor([len(c.train) for c in data[:2]], dtype=torch.float64)
    for t in (1, 2):
        ends = []
        for c in data[:2]:
            end, heads[c.id] = visit(theta, heads[c.id], c, s, t)
            ends.append(end)
        theta = (weights[:, None] * torch.stack(ends)).sum(0) / weights.sum()
    f = run(tmp_path / "run", s, data=data)
    close(f.state["theta"], theta)
    for c, end in zip(data[:2], ends, strict=True):
        base = theta if personal == "shared" else end
        expected = torch.cat([base[:BODY], base[BODY:] + heads[c.id]])
        close(f.predictors[2, c.id]["personal"].tensors()["theta"], expected)
        close(f.predictors[2, c.id]["global"].tensors()["theta"], theta)
        p = f.predictors[2, c.id]["personal"].log_probabilities(c.test.x)
        z = SMALL.features(SMALL.layout.split(base), c.test.x)
        own = F.linear(z, heads[c.id][: 5 * CLASSES].view(CLASSES, 5), heads[c.id][5 * CLASSES :])
        close(p, (SMALL.logits(base, c.test.x) + own).log_softmax(1))
    assert torch.equal(f.predictors[2, "c2"]["personal"].tensors()["theta"], f.state["theta"])
    assert (FEDROD.client(s, setup()).personalization_steps("personal", 6), s.weighting) == (0, "examples")


def test_a_label_absent_at_a_client_has_no_part_in_its_generic_loss() -> None:
    """Its row of the generic head gets no gradient, to the bit."""
    c = lacking(client("c0", 9), 1)
    theta = SMALL.init(torch.Generator().manual_seed(3), torch.float64)
    half, (opening, *_) = FEDROD.client(made(), setup()), FEDROD.messages
    delta = next(half.open(group([c]), opening(theta))).delta_theta[0, BODY:]
    weight, bias = delta[: 5 * CLASSES].view(CLASSES, 5), delta[5 * CLASSES :]
    moved = (weight != 0).any(1) | (bias != 0)
    assert moved.tolist() == [True, False, True]
    amounts = raised(group([c]), theta[None], made())[0]
    assert amounts.isfinite().all()
    assert torch.equal((torch.randn(3).double() + amounts).softmax(0)[1], torch.tensor(0.0).double())


@pytest.mark.parametrize("choice", [m for m in MODELS if m.classifies], ids=lambda m: m.name)
def test_the_first_head_is_that_of_any_model(choice: Any) -> None:
    """Its logits are a linear map of the features."""
    kind = choice.takes[0]
    model = choice.build((7,) if kind == "tokens" else (1, 32, 32), CLASSES, kind)
    if not model.layout.head:
        with pytest.raises(ExperimentError, match=r"^model\.name: "):
            FEDROD.check_model(made(), model)
        return
    x = torch.randint(CLASSES, (2, 7)) if kind == "tokens" else torch.randn(2, 1, 32, 32)
    w = model.layout.split(model.init(torch.Generator().manual_seed(1)))
    assert torch.equal(F.linear(model.features(w, x), *(w[name] for name in model.layout.head)), model.forward(w, x))
    assert TwoHeads(model).layout.head == ("raised.by",)


class OddModel(MLP):
    """Model whose attributes all have unusual values."""

    draws, in_bfloat16, needs_labels, has_features = ("torch",), True, False, False
    needs_whole_batches, least_batch, constrained, predicts_by_batch, vmaps_examples = True, 2, True, True, False
    task, constants, unsaved = Regression(), {"scale": torch.ones(1)}, frozenset({"scale"})
    raw_targets, needs_result, tied = True, True, {"head": "embedding"}


@pytest.mark.parametrize("derived", [TwoHeads, lambda m: Contrasting(m, MOONSettings())], ids=["fedrod", "moon"])
def test_a_derived_model_has_the_properties_of_its_base(derived: Callable[[FlatModel], FlatModel]) -> None:
    model = OddModel(IMAGE, [5], CLASSES)
    for made_from in (derived(model), derived(model).in_training()):
        for name in FlatModel.__annotations__.keys() - {"layout"}:
            assert getattr(made_from, name) == getattr(model, name) != getattr(FlatModel, name), name


@pytest.mark.parametrize("name", ["fedrod", "fedproto", "moon"])
def test_clients_with_batch_normalization_are_not_padded_together(name: str, tmp_path: Path) -> None:
    """Batches of clients are then served one by one, to the same bits."""
    local = LOCAL | {"batch_size": 5}  # one client has 4 examples
    found = [
        made_by(run_method(tmp_path / str(at_once), name, NORMALIZED, at_once=at_once, local=local))
        for at_once in (1, 3)
    ]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_a_batch_with_an_absent_label_replies_as_single_clients() -> None:
    data, (opening, *_) = clients((9, 4, 6)), FEDROD.messages
    data[2] = lacking(data[2], 0)
    theta = SMALL.init(torch.Generator().manual_seed(3), torch.float64)
    states = [None, {"head": torch.randn(D - BODY, generator=torch.Generator().manual_seed(4)).double()}, None]
    answers_as_alone(FEDROD.client(made(), setup()), data, opening(theta), states=states)


def test_untrainable_models_are_rejected() -> None:
    with pytest.raises(ValidationError, match=r"local\.mask_absent"):
        made(local=LOCAL | {"mask_absent": True})
    with pytest.raises(ValidationError, match="balance"):
        made(balance=-1.0)
    c = client("c0", 9)
    bare = ClientData(c.id, Split(c.train.x, None), c.validation, c.test, CLASSES)
    opening, *_ = FEDROD.messages
    with pytest.raises(DataError, match=r"c0: .*labels"):
        next(FEDROD.client(made(), setup()).open(group([bare]), opening(torch.zeros(D).double())))
