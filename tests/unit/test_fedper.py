"""FedPer against FedAvg and against SGD on body and head together (Arivazhagan et al., 2019)."""

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
    federation,
    group,
    setup,
    sgd,
)
from torch import Tensor

from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FEDAVG
from fedloom.algorithms.fedper import FEDPER, FedPerSettings
from fedloom.federation.randomness import generator
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
SMALL = MLP(IMAGE, [5], CLASSES)
BODY = SMALL.layout.body_size


def made(**changes: Any) -> FedPerSettings:
    base: dict[str, Any] = {"local": {"epochs": 2, "batch_size": 3, "lr": 0.05}, "personalize_epochs": 2}
    return FedPerSettings.model_validate(base | changes)


def run(folder: Path, s: FedPerSettings, **keys: Any) -> Federation:
    keys = {"rounds": 2, "unseen": ["c2"]} | keys
    f = federation(folder, FEDPER, s, setup(), keys.pop("data", clients(SIZES)), **keys)
    f.run()
    return f


def drawn_head(client: str, where: str, round: int) -> Tensor:
    return SMALL.init(generator(SEED, f"{where}/own-head", client, round), torch.float64)[BODY:]


@pytest.mark.usefixtures("each_task")
def test_rounds_are_sgd_on_both_parts_and_average_the_bodies(tmp_path: Path) -> None:
    """Compare the seen clients with SGD; the unseen one trains a head, and the body does not change."""
    s, data = made(), clients(SIZES)
    body = federation(tmp_path / "start", FEDPER, s, setup(), data).state["theta"]
    heads = {c.id: drawn_head(c.id, "train", 1) for c in data[:2]}
    weights = torch.tensor(SIZES[:2], dtype=torch.float64)
    for t in (1, 2):
        bodies = []
        for c in data[:2]:
            start = torch.cat([body, heads[c.id]])
            theta = sgd(SMALL, start, c, s.local, slice(None), generator(SEED, "train/train", c.id, t))
            heads[c.id] = theta[BODY:]
            bodies.append(theta[:BODY])
        body = (weights[:, None] * torch.stack(bodies)).sum(0) / weights.sum()
    start = torch.cat([body, drawn_head("c2", "evaluate", 2)])
    new = sgd(SMALL, start, data[2], s.local, slice(BODY, None), generator(SEED, "evaluate/personalize", "c2", 2))
    f = run(tmp_path / "run", s)
    torch.testing.assert_close(f.state["theta"], body, rtol=0, atol=1e-12)
    expected = {c: torch.cat([body, head]) for c, head in heads.items()} | {"c2": new}
    for c, theta in expected.items():
        found = f.predictors[2, c]["personal"].tensors()["theta"]
        torch.testing.assert_close(found, theta, rtol=0, atol=1e-12)
        assert torch.equal(found[:BODY], f.state["theta"])
    assert FEDPER.client(s, setup()).personalization_steps("personal", 6) == 4
    assert FEDPER.client(made(personalize_epochs=0), setup()).personalization_steps("personal", 6) == 0


def test_a_common_head_gives_fedavgs_round_to_the_bit() -> None:
    s, data = made(), clients(SIZES)
    theta = SMALL.init(torch.Generator().manual_seed(3), torch.float64)
    for members in ([data[0]], [data[2]], data):
        mine = ClientGroup(members, group(members)._generator, [{"head": theta[BODY:]}] * len(members))
        found = FEDPER.train(SMALL, mine, theta[:BODY].expand(len(members), -1), s)
        expected = FEDAVG.train(SMALL, group(members), theta.expand(len(members), -1), s)
        assert torch.equal(found.theta, expected.theta[:, :BODY])
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(torch.stack([kept["head"] for kept in mine.kept.values()]), expected.theta[:, BODY:])


def test_heads_stay_separate(tmp_path: Path) -> None:
    f = run(tmp_path, made(), rounds=1)
    heads = [f.predictors[1, c]["personal"].tensors()["theta"][BODY:] for c in ("c0", "c1", "c2")]
    assert not any(torch.equal(heads[i], heads[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
