"""Ditto against FedAvg, local training, and Algorithm 1 in plain PyTorch (Li et al., ICML 2021)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import Federation, clients, close, federation, group, setup, sgd
from safetensors.torch import load_file
from torch import Tensor

from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.ditto import DITTO, DittoSettings, train_near
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.9}
PERSONAL = {"steps": 3, "batch_size": 2, "lr": 0.1, "momentum": 0.5}
MODEL = setup().model


def made(**changes: Any) -> DittoSettings:
    base = {"local": LOCAL, "personal": PERSONAL, "proximity": 2.0, "personalize_steps": 2}
    return DittoSettings.model_validate(base | changes)


def run(folder: Path, s: DittoSettings, **keys: Any) -> Federation:
    data = keys.pop("data", None) or clients(SIZES)
    f = federation(folder, DITTO, s, setup(), data, **keys)
    f.run()
    return f


def theta_of(f: Federation, round: int, client: str, name: str = "personal") -> Tensor:
    theta: Tensor = f.predictors[round, client][name].tensors()["theta"]
    return theta


def visit(s: DittoSettings, v: Tensor, w: Tensor, c: ClientData, steps: int, random: torch.Generator) -> Tensor:
    """Train on f_i(v) + λ/2 ‖v - w‖², with the term in the loss."""
    term = lambda p: s.proximity / 2 * (p - w).square().sum()  # noqa: E731
    return sgd(MODEL, v, c, s.personal, slice(None), random, steps=steps, term=term)


@pytest.mark.parametrize("proximity", [0.0, 5.0])
def test_the_shared_model_equals_fedavgs_to_the_bit(tmp_path: Path, proximity: float) -> None:
    mine = run(tmp_path / "ditto", made(proximity=proximity), rounds=3, cohort=2)
    s = FedAvgSettings.model_validate({"local": LOCAL})
    average = federation(tmp_path / "avg", FEDAVG, s, setup(), clients(SIZES), rounds=3, cohort=2)
    average.run()
    assert torch.equal(mine.state["theta"], average.state["theta"])
    for c in ("c0", "c1", "c2"):
        assert torch.equal(theta_of(mine, 3, c, "global"), theta_of(average, 3, c, "global"))
    losses = [[a.statistics["loss"] for a in f.loop.journal.counted()] for f in (mine, average)]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("each_task")
def test_rounds_follow_algorithm_1(tmp_path: Path) -> None:
    """v starts at the w of the client's first visit and continues from there, near the w of each round."""
    s, data = made(), clients(SIZES)
    f = federation(tmp_path, DITTO, s, setup(), data, rounds=2, unseen=["c2"])
    v = {c.id: f.state["theta"] for c in data}
    received = []
    send = f.loop._train_round
    for t in (1, 2):
        received.append(f.state["theta"])
        send()
        for c in data[:2]:
            v[c.id] = visit(s, v[c.id], received[-1], c, 3, generator(SEED, "train/personal", c.id, t))
    f.run()
    for c in data[:2]:
        close(theta_of(f, 2, c.id), v[c.id])
    w, c = f.state["theta"], data[2]  # an unseen client starts at w
    close(theta_of(f, 2, c.id), visit(s, w, w, c, 2, generator(SEED, "evaluate/personal", c.id, 2)))
    steps = sum(s.local.count(n) + 3 for n in SIZES[:2])
    assert [a.statistics["client_steps"] for a in f.loop.journal.counted()] == [steps, steps]
    half = DITTO.client(s, setup())
    assert [half.personalization_steps(name, 6) for name in ("personal", "global")] == [2, 0]


def test_without_the_proximal_term_it_equals_local_training_to_the_bit(tmp_path: Path) -> None:
    """With λ = 0, v depends on w only through its start."""
    one, other = (
        run(tmp_path / str(lr), made(proximity=0.0, local=LOCAL | {"lr": lr}), rounds=2) for lr in (0.05, 0.4)
    )
    assert not torch.equal(one.state["theta"], other.state["theta"])
    data = clients(SIZES)
    start = federation(tmp_path / "start", DITTO, made(), setup(), data).state["theta"]
    for c in data:
        assert torch.equal(theta_of(one, 2, c.id), theta_of(other, 2, c.id))
        v = start[None]
        for t in (1, 2):
            alone = ClientGroup([c], lambda id, purpose, t=t: generator(SEED, f"train/{purpose}", id, t))
            v = train(MODEL, alone, v, LocalSGD.model_validate(PERSONAL), purpose="personal").theta
        assert torch.equal(theta_of(one, 2, c.id), v[0])


def test_on_a_quadratic_v_is_the_proximal_point() -> None:
    """Expect (h c + λ w)/(h + λ), so that a large λ gives w."""
    c, w = torch.tensor([-1.0, 5.0]).double(), torch.tensor([3.0, -1.0]).double()
    h, split = torch.tensor([2.0, 0.5]).double(), Split(c.repeat(4, 1), None)
    members = group([ClientData("c0", split, split, split, 0)])
    for strength in (0.5, 9.0, 1e5):
        s = made(proximity=strength, personal={"steps": 200, "lr": 0.5 / (2 + strength), "momentum": 0.0})
        found = train_near(Quadratic(2, (2.0, 0.5)), members, torch.zeros(1, 2).double(), w[None], s, s.personal)
        close(found.theta[0], (h * c + strength * w) / (h + strength), atol=1e-9)


def test_the_model_before_round_1_is_trained_locally_unless_new_clients_make_no_steps(tmp_path: Path) -> None:
    """Check the models among which ``best`` chooses at round 0; without steps a client never drawn has w."""
    data = clients(SIZES)
    for steps in (50, 0):
        f = run(tmp_path / str(steps), made(personalize_steps=steps), rounds=0, unseen=["c2"])
        w = f.state["theta"]
        for c in data:
            random = generator(SEED, "evaluate/personal", c.id, 0)
            expected = visit(made(), w, w, c, steps, random) if steps else w
            close(theta_of(f, 0, c.id), expected)
            assert torch.equal(theta_of(f, 0, c.id), w) is (steps == 0)


def test_v_is_that_of_the_last_counted_round(tmp_path: Path) -> None:
    """A client that is lost in every round has none, and is served as an unseen one; the others keep theirs."""
    f = run(tmp_path, made(), rounds=2, lost={0: 1})
    assert not list((tmp_path / "states" / "c1").glob("2-*"))
    w, c = f.state["theta"], clients(SIZES)[1]
    close(theta_of(f, 2, "c1"), visit(made(), w, w, c, 2, generator(SEED, "evaluate/personal", "c1", 2)))
    (path,) = (tmp_path / "states" / "c0").glob("2-*.safetensors")
    assert torch.equal(theta_of(f, 2, "c0"), load_file(path)["v"])
