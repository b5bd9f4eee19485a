"""FedAvg against SGD and weighted means (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from facts import refusing
from federations import client, clients, close, federation, group, mean_loss, setup, sgd
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.client import train
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings, PersonalizeRequest
from fedloom.algorithms.local import LOCAL, LocalClient, LocalSettings
from fedloom.data.federated import ClientData, Split
from fedloom.errors import DataError, ExperimentError, QuorumError
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
    random = generator(SEED, "train/train", c.id, round)
    return sgd(problem.model, theta, c, s.local, slice(None), random)


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


# --- local training alone ---------------------------------------------------------------------------------------------


def alone(**local: Any) -> LocalSettings:
    return LocalSettings.model_validate({"local": {"epochs": 3, "batch_size": 3, "lr": 0.05} | local})


@pytest.mark.usefixtures("each_task")
def test_a_clients_model_is_sgd_from_its_own_start(tmp_path: Path) -> None:
    s, problem, data = alone(), setup(), clients(SIZES)
    run = federation(tmp_path, LOCAL, s, problem, data, rounds=0, unseen=["c2"])
    evaluation = run.run()
    assert evaluation.predictors == ("personal",)
    assert evaluation.present.all()
    starts = []
    for c in data:
        members = group([c])
        members._generator = lambda id, purpose: generator(SEED, f"evaluate/{purpose}", id, 0)
        start = problem.model.init(members.generator(0, "init"), torch.float64)
        expected = train(problem.model, members, start[None], s.local)
        assert torch.equal(run.predictors[0, c.id]["personal"].tensors()["theta"], expected.theta[0])
        assert expected.steps.item() == LocalClient(s, problem).personalization_steps("personal", len(c.train))
        starts.append(start)
    assert not torch.equal(starts[0], starts[1])


def test_a_clients_model_does_not_depend_on_other_clients(tmp_path: Path) -> None:
    s, problem, data = alone(), setup(), clients(SIZES)
    run, single = (
        federation(tmp_path / name, LOCAL, s, problem, given, rounds=0)
        for name, given in (("all", data), ("one", data[1:2]))
    )
    run.run()
    single.run()
    mine, theirs = (f.predictors[0, "c1"]["personal"].tensors()["theta"] for f in (run, single))
    assert torch.equal(mine, theirs)


def test_local_training_has_no_rounds_and_no_state(tmp_path: Path) -> None:
    assert not LOCAL.trains
    run = federation(tmp_path, LOCAL, alone(), setup(), clients(SIZES), rounds=1)
    assert run.state == {}
    with pytest.raises(ExperimentError, match=r"\b1\b.*federation\.rounds to 0"):
        run.loop._train_round()
