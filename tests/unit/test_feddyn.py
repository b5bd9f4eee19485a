"""FedDyn against plain PyTorch, a proximal point in closed form, and the optimum (Acar et al., ICLR 2021)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLASSES, IMAGE, clients, close, federation, group, kept, rostered, setup, sgd
from pydantic import ValidationError
from torch import Tensor

from fedloom.algorithms.base import Setup
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.feddyn import FEDDYN, FedDynSettings
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.networks import BatchNormConvNet, Quadratic

SIZES = (4, 9, 6)
SEED = 7  # of the federations
LOCAL = {"epochs": 2, "batch_size": 3, "lr": 0.05, "momentum": 0.5}
MODEL = setup().model


def made(**changes: Any) -> FedDynSettings:
    return FedDynSettings.model_validate({"alpha": 0.3, "local": LOCAL | changes.pop("local", {}), **changes})


def visit(s: FedDynSettings, w: Tensor, g: Tensor, c: ClientData, round: int) -> Tensor:
    """Train on f_i(θ) - ⟨g, θ⟩ + α/2 ‖θ - w‖², with all terms in the loss."""
    term = lambda p: s.alpha / 2 * (p - w).square().sum() - g @ p  # noqa: E731
    return sgd(MODEL, w, c, s.local, slice(None), generator(SEED, "train/train", c.id, round), term=term)


def test_rounds_follow_algorithm_1_with_partial_participation(tmp_path: Path) -> None:
    s, data = made(), clients(SIZES)
    w = federation(tmp_path / "start", FEDDYN, s, setup(), data).state["theta"]
    h, g = torch.zeros_like(w), {c.id: torch.zeros_like(w) for c in data}
    f = rostered(tmp_path / "run", FEDDYN, s, data, rounds=4, cohort=2)
    drawn = [attempt.conversations[0].clients for attempt in f.loop.journal.counted()]
    assert len(set(map(tuple, drawn))) > 1
    for t, names in enumerate(drawn, start=1):
        ends = {c.id: visit(s, w, g[c.id], c, t) for c in data if c.id in names}
        g |= {name: g[name] - s.alpha * (end - w) for name, end in ends.items()}
        h = h - s.alpha / len(data) * sum((end - w for end in ends.values()), torch.zeros_like(w))
        w = torch.stack(list(ends.values())).mean(0) - h / s.alpha
    close(f.state["theta"], w)
    close(f.state["h"], h)
    for name, linear in g.items():
        close(kept(tmp_path / "run", name, "g"), linear)


def test_h_is_the_mean_of_the_counted_clients_states(tmp_path: Path) -> None:
    """Average over the whole roster: a client that never answers counts with zero."""
    f = rostered(tmp_path, FEDDYN, made(), clients((*SIZES, 5)), rounds=3, lost={0: 1}, unseen=["c3"])
    close(f.state["h"], (kept(tmp_path, "c0", "g") + kept(tmp_path, "c2", "g")) / 3)
    assert f.state["h"].abs().max() > 1e-3


def test_many_steps_on_a_quadratic_reach_the_minimum_of_the_objective() -> None:
    """Expect (H c + g + α w)/(H + α); the new g is then the gradient there (the paper's first-order condition)."""
    curvature, c, w, g = (torch.tensor(v).double() for v in ([2.0, 0.5], [-1.0, 5.0], [3.0, -1.0], [0.4, -0.7]))
    split = Split(c.repeat(4, 1), None)
    data = [ClientData("c0", split, split, split, 0)]
    s = made(alpha=0.8, local={"epochs": None, "steps": 1000, "lr": 0.1, "momentum": 0.0})
    members = ClientGroup(data, group(data)._generator, [{"g": g}])
    found = FEDDYN.train(Quadratic(2, (2.0, 0.5)), members, w[None], s).theta[0]
    close(found, (curvature * c + g + 0.8 * w) / (curvature + 0.8))
    close(members.kept[0]["g"], curvature * (found - c))


@pytest.mark.slow
def test_it_converges_to_the_optimum_with_unequal_local_steps(tmp_path: Path) -> None:
    """Expect the mean of the clients' means, which FedAvg misses, because clients with more steps move it further."""
    centres, sizes = torch.tensor([[1.0, 0.0], [0.0, -2.0], [5.0, 3.0]]).double(), (1, 2, 4)
    splits = [Split(c.repeat(n, 1), None) for c, n in zip(centres, sizes, strict=True)]
    data = [ClientData(f"c{i}", split, split, split, 0) for i, split in enumerate(splits)]
    problem = Setup(Quadratic(2, (1.0, 0.5)), 0, (2,), 3, torch.float64)
    local = {"epochs": 3, "batch_size": 1, "lr": 0.1, "momentum": 0.0}
    mine = rostered(tmp_path / "d", FEDDYN, made(local=local, alpha=1.0), data, rounds=150, problem=problem)
    average = FedAvgSettings.model_validate({"local": local, "weighting": "uniform"})
    other = rostered(tmp_path / "a", FEDAVG, average, data, rounds=150, problem=problem)
    close(mine.state["theta"], centres.mean(0), atol=1e-3)
    assert (other.state["theta"] - centres.mean(0)).abs().max() > 0.1


def test_running_statistics_are_averaged_and_have_no_gradient(tmp_path: Path) -> None:
    model = BatchNormConvNet(IMAGE, [3], [], CLASSES)
    moving = model.layout.mask(model.layout.buffers)
    start = federation(tmp_path / "start", FEDDYN, made(), setup(model), clients(SIZES)).state["theta"]
    f = rostered(tmp_path / "run", FEDDYN, made(), clients(SIZES), problem=setup(model), rounds=1)
    ends = []
    for c in clients(SIZES):
        members = ClientGroup([c], lambda id, purpose: generator(SEED, f"train/{purpose}", id, 1))
        ends.append(FEDDYN.train(model, members, start[None], made()).theta[0])
    close(f.state["theta"][moving], torch.stack(ends).mean(0)[moving])
    assert not torch.equal(f.state["theta"][moving], start[moving])
    for linear in (f.state["h"], *(kept(tmp_path / "run", c.id, "g") for c in clients(SIZES))):
        assert not linear[moving].any()
        assert linear[~moving].any()


def test_a_personal_model_is_the_fine_tuned_shared_one(tmp_path: Path) -> None:
    """By plain SGD without g_i and α; without steps the model equals the shared one to the bit."""
    data = clients(SIZES)
    f = rostered(tmp_path, FEDDYN, made(personalize_steps=3), data, rounds=2, unseen=["c2"])
    w = f.state["theta"]
    for c in data:
        random = generator(SEED, "evaluate/fine-tune", c.id, 2)
        found = {name: predictor.tensors()["theta"] for name, predictor in f.predictors[2, c.id].items()}
        close(found["personal"], sgd(MODEL, w, c, made().local, slice(None), random, steps=3))
        assert torch.equal(found["global"], w)


def test_unsuitable_settings_are_rejected() -> None:
    for alpha in (20.0, 30.0):
        with pytest.raises(ValidationError, match=rf"alpha: .*\b{alpha:g}\b.*\b0\.05\b"):
            made(alpha=alpha)
    with pytest.raises(ValidationError, match="alpha"):
        made(alpha=0.0)
    for key, value in (("weighting", "examples"), ("trim", 0.1), ("max_norm", 1.0)):
        with pytest.raises(ValidationError, match=key):
            made(**{key: value})
    assert FEDDYN.requires_fixed_population(made()) is not None
