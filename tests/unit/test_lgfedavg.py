"""LG-FedAvg against FedAvg and against SGD on the clients' bodies (Liang et al., 2020)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import (
    CLASSES,
    IMAGE,
    Federation,
    clients,
    close,
    federation,
    setup,
    sgd,
)

from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.lgfedavg import LGFEDAVG, LGFedAvgSettings
from fedloom.federation.randomness import generator
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05}
SMALL = MLP(IMAGE, [5], CLASSES)
BODY = SMALL.layout.body_size


def made(**changes: Any) -> LGFedAvgSettings:
    return LGFedAvgSettings.model_validate({"local": LOCAL, "personalize_epochs": 2} | changes)


def run(folder: Path, s: LGFedAvgSettings, **keys: Any) -> Federation:
    keys = {"rounds": 2, "unseen": ["c2"]} | keys
    f = federation(folder, LGFEDAVG, s, setup(), keys.pop("data", clients(SIZES)), **keys)
    f.run()
    return f


def test_the_first_rounds_head_is_fedavgs_to_the_bit_and_bodies_stay_local(tmp_path: Path) -> None:
    settings = FedAvgSettings.model_validate({"local": LOCAL})
    avg = federation(tmp_path / "avg", FEDAVG, settings, setup(), clients(SIZES), unseen=["c2"])
    start = avg.state["theta"]
    avg.run()
    lg = run(tmp_path / "lg", made(personalize_epochs=0), rounds=1)
    head = avg.state["theta"][BODY:]
    assert torch.equal(lg.state["theta"][BODY:], head)
    assert torch.equal(lg.state["theta"][:BODY], start[:BODY])
    for c in clients(SIZES)[:2]:
        members = ClientGroup([c], lambda client, purpose: generator(SEED, f"train/{purpose}", client, 1))
        body = FEDAVG.train(SMALL, members, start[None], settings).theta[0, :BODY]
        assert torch.equal(lg.predictors[1, c.id]["personal"].tensors()["theta"], torch.cat([body, head]))
    assert torch.equal(lg.predictors[1, "c2"]["personal"].tensors()["theta"], lg.state["theta"])


@pytest.mark.usefixtures("each_task")
def test_rounds_are_sgd_on_both_parts_and_average_the_heads(tmp_path: Path) -> None:
    """Compare the seen clients with SGD; the unseen one trains a body, and the head does not change."""
    s, data = made(), clients(SIZES)
    theta = federation(tmp_path / "start", LGFEDAVG, s, setup(), data).state["theta"]
    bodies, head = {c.id: theta[:BODY] for c in data}, theta[BODY:]
    weights = torch.tensor(SIZES[:2], dtype=torch.float64)
    for t in (1, 2):
        heads = []
        for c in data[:2]:
            start = torch.cat([bodies[c.id], head])
            end = sgd(SMALL, start, c, s.local, slice(None), generator(SEED, "train/train", c.id, t))
            bodies[c.id] = end[:BODY]
            heads.append(end[BODY:])
        head = (weights[:, None] * torch.stack(heads)).sum(0) / weights.sum()
    new = torch.cat([theta[:BODY], head])
    new = sgd(SMALL, new, data[2], s.local, slice(BODY), generator(SEED, "evaluate/personalize", "c2", 2))
    f = run(tmp_path / "run", s)
    close(f.state["theta"], torch.cat([theta[:BODY], head]))
    expected = {c.id: torch.cat([bodies[c.id], head]) for c in data[:2]} | {"c2": new}
    for c, own in expected.items():
        found = f.predictors[2, c]["personal"].tensors()["theta"]
        close(found, own)
        assert torch.equal(found[BODY:], f.state["theta"][BODY:])
    assert LGFEDAVG.client(s, setup()).personalization_steps("personal", 6) == 4
    assert LGFEDAVG.client(made(personalize_epochs=0), setup()).personalization_steps("personal", 6) == 0
