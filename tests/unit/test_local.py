"""Local: every client trains alone, from its own start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import clients, federation, group, setup

from fedloom.algorithms.client import train
from fedloom.algorithms.local import LOCAL, LocalClient, LocalSettings
from fedloom.errors import ExperimentError
from fedloom.federation.randomness import generator

SIZES = (4, 9, 6)
SEED = 7  # of the federations


def made(**local: Any) -> LocalSettings:
    return LocalSettings.model_validate({"local": {"epochs": 3, "batch_size": 3, "lr": 0.05} | local})


@pytest.mark.usefixtures("each_task")
def test_a_clients_model_is_sgd_from_its_own_start(tmp_path: Path) -> None:
    s, problem, data = made(), setup(), clients(SIZES)
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
    s, problem, data = made(), setup(), clients(SIZES)
    run, alone = (
        federation(tmp_path / name, LOCAL, s, problem, given, rounds=0)
        for name, given in (("all", data), ("one", data[1:2]))
    )
    run.run()
    alone.run()
    mine, theirs = (f.predictors[0, "c1"]["personal"].tensors()["theta"] for f in (run, alone))
    assert torch.equal(mine, theirs)


def test_local_training_has_no_rounds_and_no_state(tmp_path: Path) -> None:
    assert not LOCAL.trains
    run = federation(tmp_path, LOCAL, made(), setup(), clients(SIZES), rounds=1)
    assert run.state == {}
    with pytest.raises(ExperimentError, match=r"\b1\b.*federation\.rounds to 0"):
        run.loop._train_round()
