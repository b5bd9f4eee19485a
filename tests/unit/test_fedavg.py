"""FedAvg against SGD and weighted means (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from facts import refusing
from federations import client, clients, close, federation, group, mean_loss, setup
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings, PersonalizeRequest
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError, QuorumError
from fedloom.federation.randomness import generator
from fedloom.models.predictors import predictor_of

SIZES = (4, 9, 6)
SEED = 7  # of the federations


def made(**changes: Any) -> FedAvgSettings:
    return FedAvgSettings.model_validate(
        {"local": {"steps": 5, "batch_size": 3, "lr": 0.05, "momentum": 0.9} | changes.pop("local", {}), **changes}
    )


def visit(s: FedAvgSettings, problem: Setup, theta: Tensor, c: ClientData, round: int) -> Tensor:
    """Train by torch.optim.SGD on the batches of the client's generator for this round."""
    p = theta.clone().requires_grad_()
    optimizer = torch.optim.SGD([p], lr=s.local.lr, momentum=s.local.momentum)
    random = generator(SEED, "train/train", c.id, round)
    assert c.train.y is not None
    for index in batches(len(c.train), s.local.batch_size, s.local.count(len(c.train)), random):
        optimizer.zero_grad()
        mean_loss(problem.model.logits(p, c.train.x[index]), c.train.y[index]).backward()
        optimizer.step()
    return p.detach()


@pytest.mark.usefixtures("each_task")
def test_one_client_trains_by_sgd(tmp_path: Path) -> None:
    s, problem, data = made(), setup(n=1), clients((10,))
    run = federation(tmp_path, FEDAVG, s, problem, data, rounds=3)
    theta = run.state["theta"]
    for t in (1, 2, 3):
        theta = visit(s, problem, theta, data[0], t)
    run.run()
    close(run.state["theta"], theta)


@pytest.mark.usefixtures("each_task")
def test_a_full_batch_step_of_all_clients_is_a_gradient_step_on_the_pooled_data(tmp_path: Path) -> None:
    """FedSGD: with n_i weights, one step of each client from the same θ is one step on the union of the data."""
    s = made(local={"steps": 1, "batch_size": 100, "momentum": 0.0})
    problem, data = setup(), clients(SIZES)
    run = federation(tmp_path, FEDAVG, s, problem, data)
    theta = run.state["theta"].requires_grad_()
    x = torch.cat([c.train.x for c in data])
    y = torch.cat([c.train.y for c in data if c.train.y is not None])
    (gradient,) = torch.autograd.grad(mean_loss(problem.model.logits(theta, x), y), [theta])
    run.run()
    close(run.state["theta"], (theta - s.local.lr * gradient).detach())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize("lost", [None, 0, 2])
@pytest.mark.usefixtures("each_task")
def test_the_average_is_weighted_over_the_answering_clients(
    tmp_path: Path, weighting: str, server_lr: float, lost: int | None
) -> None:
    s = made(weighting=weighting, server_lr=server_lr, local={"epochs": 2, "steps": None})
    problem, data = setup(), clients(SIZES)
    run = federation(tmp_path, FEDAVG, s, problem, data, lost=None if lost is None else {0: lost})
    theta = run.state["theta"]
    here = [c for i, c in enumerate(data) if i != lost]
    weights = torch.tensor([float(len(c.train)) if weighting == "examples" else 1.0 for c in here]).double()
    models = torch.stack([visit(s, problem, theta, c, 1) for c in here])
    average = (weights[:, None] * models).sum(0) / weights.sum()
    run.run()
    close(run.state["theta"], theta + server_lr * (average - theta))
    (attempt,) = run.loop.journal.counted()
    assert attempt.statistics["client_steps"] == sum(s.local.count(len(c.train)) for c in here)


def test_without_steps_the_personal_model_equals_the_global_one(tmp_path: Path) -> None:
    data = clients(SIZES)
    run = federation(tmp_path, FEDAVG, made(), setup(), data, unseen=["c2"])
    evaluation = run.run()
    theta = run.state["theta"]
    for c in data:
        named = run.predictors[1, c.id]
        assert list(named) == ["personal", "global"]
        assert torch.equal(named["personal"].tensors()["theta"], theta)
        assert torch.equal(named["global"].tensors()["theta"], theta)
    assert evaluation.predictors == ("personal", "global")
    assert torch.equal(evaluation.counts[:, 0], evaluation.counts[:, 1])


@pytest.mark.usefixtures("each_task")
def test_fine_tuning_is_local_sgd_from_the_global_model(tmp_path: Path) -> None:
    s, problem, data = made(personalize_steps=4, local={"epochs": 2, "steps": None}), setup(), clients(SIZES)
    run = federation(tmp_path, FEDAVG, s, problem, data, unseen=["c2"])
    run.run()
    theta = run.state["theta"]
    tuning = s.local.model_copy(update={"steps": 4, "epochs": None})
    for c in data:
        named = run.predictors[1, c.id]
        assert torch.equal(named["global"].tensors()["theta"], theta)
        members = group([c])
        members._generator = lambda id, purpose: generator(SEED, f"evaluate/{purpose}", id, 1)
        expected = train(problem.model, members, theta[None], tuning, purpose="fine-tune").theta
        assert torch.equal(named["personal"].tensors()["theta"], expected[0])
        assert not torch.equal(named["personal"].tensors()["theta"], theta)
    half = FEDAVG.client(s, problem)
    assert (half.personalization_steps("personal", 9), half.personalization_steps("global", 9)) == (4, 0)


def test_a_client_without_labels_gets_the_global_model_but_no_fine_tuning() -> None:
    c = client("c7", 4)
    c = ClientData(c.id, Split(c.train.x, None), c.validation, c.test, c.classes)
    opening = PersonalizeRequest(torch.zeros(setup().model.layout.size).double())
    for steps, names in ((0, {"personal", "global"}), (1, {"global"})):
        with pytest.raises(StopIteration) as end:
            next(FEDAVG.client(made(personalize_steps=steps), setup()).open(group([c]), opening))
        (named,) = end.value.value
        assert set(named) == names
    with refusing(DataError, "client c7", "personal", "label"):
        predictor_of("c7", named, "personal")


def test_a_model_that_is_not_finite_is_discarded(tmp_path: Path) -> None:
    """If updates are finite but the step is not, the attempt fails and θ stays the same."""
    data = clients((4, 4))
    run = federation(tmp_path, FEDAVG, made(server_lr=1e308, local={"steps": 1, "lr": 100.0}), setup(n=2), data)
    theta = run.state["theta"]
    with pytest.raises(QuorumError, match="not finite"):
        run.run()
    assert torch.equal(run.state["theta"], theta)
