"""FedProx against FedAvg and SGD with the proximal term in the loss (Li et al., MLSys 2020)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import client, clients, federation, group, setup, sgd
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.fedprox import FEDPROX, FedProxSettings, work
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.networks import Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 3, "batch_size": 3, "lr": 0.05, "momentum": 0.9}


def made(**changes: Any) -> FedProxSettings:
    return FedProxSettings.model_validate({"local": LOCAL | changes.pop("local", {}), **changes})


def visit(s: FedProxSettings, problem: Setup, theta: Tensor, c: ClientData, round: int, steps: int) -> Tensor:
    """Train on f_i(w) + μ/2 ‖w - w_t‖², with the term in the loss."""
    term = lambda p: s.mu / 2 * (p - theta).square().sum()  # noqa: E731
    random = generator(SEED, "train/train", c.id, round)
    return sgd(problem.model, theta, c, s.local, slice(None), random, steps=steps, term=term)


def test_without_its_term_it_equals_fedavg_to_the_bit(tmp_path: Path) -> None:
    data = clients(SIZES)
    average = FedAvgSettings.model_validate({"local": LOCAL, "personalize_steps": 2})
    prox, avg = (
        federation(tmp_path / method.name, method, s, setup(), data, rounds=2, unseen=["c2"])
        for method, s in ((FEDPROX, made(mu=0.0, personalize_steps=2)), (FEDAVG, average))
    )
    prox.run()
    avg.run()
    assert torch.equal(prox.state["theta"], avg.state["theta"])
    for key, named in avg.predictors.items():
        for name, predictor in named.items():
            assert torch.equal(prox.predictors[key][name].tensors()["theta"], predictor.tensors()["theta"])


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.usefixtures("each_task")
def test_a_visit_is_sgd_with_the_proximal_term(tmp_path: Path, weighting: str) -> None:
    """The term is centred at the start of the round, in the second round too."""
    s, problem, data = made(mu=2.0, weighting=weighting), setup(), clients(SIZES)
    run = federation(tmp_path, FEDPROX, s, problem, data, rounds=2)
    theta = run.state["theta"]
    weights = torch.tensor([float(n) if weighting == "examples" else 1.0 for n in SIZES]).double()
    for t in (1, 2):
        ends = torch.stack([visit(s, problem, theta, c, t, s.local.count(len(c.train))) for c in data])
        theta = (weights[:, None] * ends).sum(0) / weights.sum()
    run.run()
    torch.testing.assert_close(run.state["theta"], theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.5, 9.0])
def test_many_steps_on_a_quadratic_reach_the_proximal_point(mu: float) -> None:
    """Expect (h c + μ w)/(h + μ), so that μ = 0 gives the client's own optimum."""
    h, c, w = (torch.tensor(v).double() for v in ([2.0, 0.5], [-1.0, 5.0], [3.0, -1.0]))
    split = Split(c.repeat(4, 1), None)
    s = made(mu=mu, local={"epochs": None, "steps": 1000, "lr": 0.1, "momentum": 0.0})
    members = group([ClientData("c0", split, split, split, 0)])
    found = FEDPROX.train(Quadratic(2, (2.0, 0.5)), members, w[None], s)
    torch.testing.assert_close(found.theta[0], (h * c + mu * w) / (h + mu), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("each_task")
def test_stragglers_do_part_of_the_work_and_are_counted(tmp_path: Path) -> None:
    s, problem, data = made(mu=0.5, stragglers=1.0, weighting="uniform"), setup(), clients((9, 12, 1))
    full = [s.local.count(len(c.train)) for c in data]
    assert full == [9, 12, 3]
    run = federation(tmp_path, FEDPROX, s, problem, data)
    theta = run.state["theta"]
    counts = []
    for c in data:
        members = group([c])
        members._generator = lambda id, purpose: generator(SEED, f"train/{purpose}", id, 1)
        counts += work(members, s)
    assert all(1 <= made_ < whole for made_, whole in zip(counts, full, strict=True))
    ends = [visit(s, problem, theta, c, 1, count) for c, count in zip(data, counts, strict=True)]
    run.run()
    torch.testing.assert_close(run.state["theta"], torch.stack(ends).mean(0), rtol=0, atol=1e-12)
    (attempt,) = run.loop.journal.counted()
    assert attempt.statistics["client_steps"] == sum(counts)
    assert not any(conversation.lost for conversation in attempt.conversations)


def test_number_and_delay_of_stragglers() -> None:
    """With the configured probability, and by every number of steps from 1 to all but one."""
    s, data = made(stragglers=0.3), [client(f"c{i}", 3) for i in range(400)]  # three steps
    counts = torch.tensor(work(group(data), s))
    assert set(counts.tolist()) == {1, 2, 3}
    late = counts < 3
    assert float(late.double().mean()) == pytest.approx(0.3, abs=0.07)
    assert float((counts[late] == 1).double().mean()) == pytest.approx(0.5, abs=0.15)
    assert set(work(group(data), made())) == {3}
    one_step = made(stragglers=1.0, local={"epochs": None, "steps": 1})
    assert set(work(group(data), one_step)) == {1}  # one step cannot be divided
