"""FedBN against a loop of torch's own layers and optimizer (Li et al., ICLR 2021), and buffers that are not shared."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_method import METHODS
from facts import tells
from federations import CLASSES, IMAGE, Federation, clients, federation, setup
from torch import Tensor, nn

from fedloom.algorithms.base import Algorithm, find_algorithm
from fedloom.algorithms.batches import batches
from fedloom.algorithms.fedavg import FEDAVG
from fedloom.algorithms.fedbn import FEDBN
from fedloom.data.federated import ClientData
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator
from fedloom.models.module import ModuleModel
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
EPOCHS = 3


def net() -> nn.Module:
    layers = (nn.Conv2d(IMAGE[0], 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))


def model(buffers: Any = "shared") -> ModuleModel:
    return ModuleModel(net, IMAGE, CLASSES, "pixels", buffers=buffers)


def run(folder: Path, method: Algorithm, m: ModuleModel, **keys: Any) -> Federation:
    s = method.settings.model_validate({"local": LOCAL} | keys)
    f = federation(folder, method, s, setup(m), clients(SIZES), rounds=2, unseen=["c2"])
    f.start = f.state["theta"].clone()
    f.run()
    return f


def trained(named: dict[str, Tensor], client: ClientData, epochs: int, random: torch.Generator, only: str = "") -> Any:
    """Return the net's tensors after SGD with momentum by torch.optim; ``only`` trains layers with these numbers."""
    made = net().double().train()
    made.load_state_dict(named, strict=False)
    chosen = [p for name, p in made.named_parameters() if name.split(".")[0] in (only or "01234567")]
    optimizer = torch.optim.SGD(chosen, lr=0.05, momentum=0.9)
    n = len(client.train)
    for index in batches(n, 3, epochs * (n // 3), random):
        optimizer.zero_grad()
        F.cross_entropy(made(client.train.x[index]), client.train.y[index]).backward()
        optimizer.step()
    return {name: t.detach().clone() for name, t in made.state_dict().items() if name in named}


def loop(m: ModuleModel, start: dict[str, Tensor], kept: set[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run two rounds; return the averaged entries, and each client's own values of the others."""
    data, shared = clients(SIZES), {name: t for name, t in start.items() if name not in kept}
    first = {name: t.detach().double() for name, t in net().state_dict().items() if name in kept}
    own: dict[str, Any] = {c.id: first for c in data}
    weights = torch.tensor(SIZES[:2], dtype=torch.float64)
    for t in (1, 2):
        ends = []
        for c in data[:2]:
            ends.append(trained({**shared, **own[c.id]}, c, 2, generator(SEED, "train/train", c.id, t)))
            own[c.id] = {name: ends[-1][name] for name in kept}
        shared = {name: sum(w * e[name] for w, e in zip(weights, ends, strict=True)) / weights.sum() for name in shared}
    return shared, own


def norms(m: ModuleModel) -> set[str]:
    return {name for name, _ in m.layout.entries if name.split(".")[0] in ("1", "6")}


def test_rounds_average_all_but_normalization_and_new_clients_train_theirs(tmp_path: Path) -> None:
    m = model()
    kept = norms(m)
    assert set(m.layout.normalization) == kept
    f = run(tmp_path, FEDBN, m, personalize_epochs=EPOCHS)
    sent = [name for name, _ in m.layout.entries if name not in kept]
    sizes = [dict(zip(dict(m.layout.entries), m.layout.sizes, strict=True))[name] for name in sent]
    shapes = dict(m.layout.entries)
    parts = torch.split(f.start, sizes)
    start = {name: part.view(shapes[name]) for name, part in zip(sent, parts, strict=True)}
    shared, own = loop(m, start, kept)
    found = torch.cat([shared[name].flatten() for name in sent])
    assert f.state["theta"].shape == found.shape  # nothing else is ever sent
    torch.testing.assert_close(f.state["theta"], found, rtol=0, atol=1e-12)
    for c in clients(SIZES):
        named = {**shared, **own[c.id]}
        if c.id == "c2":
            named = trained(named, c, EPOCHS, generator(SEED, "evaluate/personalize", c.id, 2), only="16")
        theta = f.predictors[2, c.id]["personal"].tensors()["theta"]
        torch.testing.assert_close(theta, m.layout.join(named), rtol=0, atol=1e-12)
    half = FEDBN.client(FEDBN.settings.model_validate({"local": LOCAL, "personalize_epochs": EPOCHS}), setup(m))
    assert half.personalization_steps("personal", 6) == 2 * EPOCHS
    assert half.stateful


def test_local_buffers_of_fedavg_stay_with_their_clients(tmp_path: Path) -> None:
    m = model("local")
    kept = set(m.layout.buffers)
    assert kept == {f"{layer}.running_{kind}" for layer in "16" for kind in ("mean", "var")}
    f = run(tmp_path, FEDAVG, m)
    sent = [name for name, _ in m.layout.entries if name not in kept]
    sizes = dict(zip(dict(m.layout.entries), m.layout.sizes, strict=True))
    parts = torch.split(f.start, [sizes[name] for name in sent])
    shapes = dict(m.layout.entries)
    start = {name: part.view(shapes[name]) for name, part in zip(sent, parts, strict=True)}
    shared, own = loop(m, start, kept)
    torch.testing.assert_close(
        f.state["theta"], torch.cat([shared[name].flatten() for name in sent]), rtol=0, atol=1e-12
    )
    for c in clients(SIZES):
        theta = f.predictors[2, c.id]["global"].tensors()["theta"]
        torch.testing.assert_close(theta, m.layout.join({**shared, **own[c.id]}), rtol=0, atol=1e-12)
    assert FEDAVG.client(FEDAVG.settings.model_validate({}), setup(m)).stateful
    assert not FEDAVG.client(FEDAVG.settings.model_validate({}), setup(model())).stateful


@pytest.mark.parametrize("name", ["scaffold", "heurfedamp", "drfa", "comfedl", "apfl", "pefll", "pfedbayes", "pfedhn"])
def test_other_methods_reject_local_buffers(name: str) -> None:
    method = find_algorithm(name)
    with pytest.raises(ExperimentError) as error:
        method.check_model(method.settings.model_validate(METHODS[name]), model("local"))
    assert tells(str(error.value), "model.", name)


def test_a_model_without_normalization_is_rejected() -> None:
    with pytest.raises(ExperimentError) as error:
        FEDBN.check_model(FEDBN.settings.model_validate({}), MLP(IMAGE, [5], CLASSES))
    assert tells(str(error.value), "model.name", "fedbn", "normalization")
    assert not copy.copy(MLP(IMAGE, [5], CLASSES)).layout.normalization
