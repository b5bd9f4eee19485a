"""FedRep: a personal head, trained first, and a shared body (Collins et al., ICML 2021)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLASSES, IMAGE, Federation, clients, close, federation, group, setup, sgd
from safetensors.torch import load_file
from torch import Tensor

from fedloom.algorithms.client import train
from fedloom.algorithms.fedrep import FEDREP, FedRepSettings
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData
from fedloom.federation.randomness import generator
from fedloom.federation.transport import Call, Lost
from fedloom.models.networks import MLP

SIZES = (4, 9, 6)
SEED = 7  # of the federations
SMALL = MLP(IMAGE, [5], CLASSES)
BODY = SMALL.layout.body_size


def made(**changes: Any) -> FedRepSettings:
    base: dict[str, Any] = {
        "local": {"epochs": 1, "batch_size": 3, "lr": 0.05},
        "head": {"epochs": 2, "batch_size": 2, "lr": 0.1},
        "personalize_epochs": 2,
    }
    return FedRepSettings.model_validate(base | changes)


def run(folder: Path, s: FedRepSettings, **keys: Any) -> Federation:
    return federation(folder, FEDREP, s, setup(), clients(SIZES), **keys)


def start_of_head(c: ClientData, where: str, round: int) -> Tensor:
    return SMALL.init(generator(SEED, f"{where}/own-head", c.id, round), torch.float64)[BODY:]


def kept_head(folder: Path, client: str, round: int) -> Tensor:
    (path,) = (folder / "states" / client).glob(f"{round}-*.safetensors")
    return load_file(path)["head"]


@pytest.mark.usefixtures("each_task")
def test_two_rounds_follow_algorithm_1(tmp_path: Path) -> None:
    s, data = made(), clients(SIZES)
    f = run(tmp_path, s, rounds=2)
    body = f.state["theta"]
    assert body.shape == (BODY,)
    heads: dict[str, Tensor] = {}
    for t in (1, 2):
        bodies = []
        for c in data:
            head = heads[c.id] if c.id in heads else start_of_head(c, "train", 1)
            # The batches and the start of a head have separate generators.
            theta = torch.cat([body, head])
            theta = sgd(SMALL, theta, c, s.head, slice(BODY, len(theta)), generator(SEED, "train/head", c.id, t))
            theta = sgd(SMALL, theta, c, s.local, slice(0, BODY), generator(SEED, "train/train", c.id, t))
            heads[c.id] = theta[BODY:]
            bodies.append(theta[:BODY])
        body = torch.stack(bodies).mean(0)
    f.run()
    close(f.state["theta"], body)
    for c in data:
        theta = f.predictors[2, c.id]["personal"].tensors()["theta"]
        close(theta, torch.cat([body, heads[c.id]]))
    steps = sum(s.head.count(n) + s.local.count(n) for n in SIZES)
    assert [a.statistics["client_steps"] for a in f.loop.journal.counted()] == [steps, steps]


@pytest.mark.parametrize("sizes", [(9,), (9, 4, 6)], ids=["alone", "group"])
def test_each_part_is_frozen_to_the_bit_while_the_other_trains(sizes: tuple[int, ...]) -> None:
    data, random = clients(sizes), torch.Generator().manual_seed(2)
    theta = torch.randn(len(data), SMALL.layout.size, generator=random, dtype=torch.float64)
    s = LocalSGD(steps=4, batch_size=3, lr=0.05, momentum=0.9, lambda_theta=0.1, clip=0.5)
    head = train(SMALL, group(data), theta, s, only="head").theta
    assert torch.equal(head[:, :BODY], theta[:, :BODY])
    assert (head[:, BODY:] != theta[:, BODY:]).any(1).all()
    body = train(SMALL, group(data), head, s, only="body").theta
    assert torch.equal(body[:, BODY:], head[:, BODY:])
    assert (body[:, :BODY] != head[:, :BODY]).any(1).all()


def test_the_kept_head_is_that_of_the_head_phase() -> None:
    """The body's phase comes last, and must not change the head."""
    s, data = made(), clients(SIZES)
    members = group(data)
    body = SMALL.init(torch.Generator().manual_seed(2), torch.float64)[:BODY].expand(3, -1)
    trained = FEDREP.train(SMALL, members, body, s)
    assert trained.theta.shape == (3, BODY)
    for i, c in enumerate(data):
        head = SMALL.init(group([c]).generator(0, "own-head"), torch.float64)[BODY:]
        theta = torch.cat([body[0], head])
        theta = sgd(SMALL, theta, c, s.head, slice(BODY, len(theta)), group([c]).generator(0, "head"))
        torch.testing.assert_close(members.kept[i]["head"], theta[BODY:], rtol=0, atol=1e-12)


class Late:
    """Transport that loses c1's answers in the second round, after c1 has trained and stored its head."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def exchange(self, call: Call) -> list[Any]:
        late = call.key.purpose == "train" and call.key.round == 2
        answers = zip(call.clients, self._transport.exchange(call), strict=True)
        return [Lost("late") if late and client == "c1" else answer for client, answer in answers]


def test_the_head_of_a_lost_client_is_that_of_its_last_counted_round(tmp_path: Path) -> None:
    f = run(tmp_path, made(personalize_epochs=3), rounds=2)
    f.loop.transport = Late(f.loop.transport)
    f.loop._train_round()
    first = {c: kept_head(tmp_path, c, 1) for c in ("c0", "c1", "c2")}
    f.run()
    assert not torch.equal(kept_head(tmp_path, "c1", 2), first["c1"])  # of the round that did not count it
    for name, head in first.items():
        theta = f.predictors[2, name]["personal"].tensors()["theta"]
        assert torch.equal(theta[:BODY], f.state["theta"])
        assert torch.equal(theta[BODY:], head) is (name == "c1")


def test_a_client_without_a_head_trains_one_with_the_body_frozen(tmp_path: Path) -> None:
    s, data = made(), clients(SIZES)
    f = run(tmp_path, s, rounds=1, unseen=["c2"])
    f.run()
    body, c = f.state["theta"], data[2]
    theta = torch.cat([body, start_of_head(c, "evaluate", 1)])
    longer = s.head.model_copy(update={"epochs": 2})
    theta = sgd(SMALL, theta, c, longer, slice(BODY, len(theta)), generator(SEED, "evaluate/personalize", c.id, 1))
    found = f.predictors[1, "c2"]["personal"].tensors()["theta"]
    assert torch.equal(found[:BODY], body)
    close(found, theta)
    half = FEDREP.client(s, setup())
    assert half.predictors == ("personal",)
    assert half.personalization_steps("personal", 6) == longer.count(6) == 6
    assert FEDREP.client(made(personalize_epochs=0), setup()).personalization_steps("personal", 6) == 0


def test_weights_can_follow_the_official_code(tmp_path: Path) -> None:
    assert made().weighting == "uniform"
    f, uniform = (run(tmp_path / w, made(weighting=w), rounds=1) for w in ("examples", "uniform"))
    start = f.state["theta"]
    f.run()
    uniform.run()
    assert not torch.equal(f.state["theta"], uniform.state["theta"])
    assert (f.state["theta"] != start).any()
