"""Optimizers, clipping, accumulation and schedules of local training against torch's own."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_method import LOCAL, METHODS, ours, run
from facts import tells
from federations import CLASSES, IMAGE, client, clients, federation, group, made_by, setup
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_bad_settings import refusal
from torch import Tensor

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.client import LocalTrainer, train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.comfedl import LossShift
from fedloom.algorithms.drfa import DRFATrainRequest
from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings, SharedModel
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.scaffold import SCAFFOLD, ScaffoldSettings
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.networks import MLP, LeNet

SMALL = MLP(IMAGE, [5], CLASSES)

SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0},
    "momentum": {},
    "nesterov": {"nesterov": True},
    "decay": {"momentum": 0.0, "weight_decay": 0.1},
    "nesterov, decay": {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
    "adam": {"optimizer": "adam"},
    "adam, all": {"optimizer": "adam", "betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.3},
    "adamw": {"optimizer": "adamw"},
    "adamw, all": {"optimizer": "adamw", "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    "no betas": {"optimizer": "adam", "betas": (0.0, 0.0)},
    "clip": {"clip": 0.3},
    "clip, decay": {"clip": 0.3, "weight_decay": 0.1},
    "never clipped": {"clip": 1e6},
    "clip_value": {"clip_value": 0.02},
    "adam, clip": {"optimizer": "adam", "clip": 0.3},
    "adamw, clip_value": {"optimizer": "adamw", "clip_value": 0.02, "weight_decay": 0.1},
    "accumulate": {"accumulate": 3},
    "adam, accumulate": {"optimizer": "adam", "accumulate": 2, "clip": 0.5},
}


def made(**changes: Any) -> LocalSGD:
    return LocalSGD.model_validate({"steps": 6, "batch_size": 4, "lr": 0.05, **changes})


def cast(c: ClientData, dtype: torch.dtype) -> ClientData:
    parts = (Split(part.x.to(dtype), part.y) for part in (c.train, c.validation, c.test))
    return ClientData(c.id, *parts, c.classes)


def start(model: FlatModel, g: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([model.init(torch.Generator().manual_seed(i), dtype) for i in range(g)])


def torchs(leaves: list[Tensor], s: LocalSGD) -> torch.optim.Optimizer:
    """Return the optimizer that a user of torch would create, with torch's defaults for missing keys."""
    if s.optimizer == "sgd":
        keys = {"lr": s.lr, "momentum": s.momentum, "weight_decay": s.weight_decay, "nesterov": s.nesterov}
        return torch.optim.SGD(leaves, **keys)
    given = {"betas": s.betas, "eps": s.eps}
    keys = {"lr": s.lr, "weight_decay": s.weight_decay, **{k: v for k, v in given.items() if v is not None}}
    return (torch.optim.Adam if s.optimizer == "adam" else torch.optim.AdamW)(leaves, **keys)


def by_torch(model: FlatModel, theta: Tensor, c: ClientData, s: LocalSGD) -> Tensor:
    """Train in a user's loop in torch on the same batches: backward per mini-batch, clip, step."""
    members = group([c])
    local = LocalTrainer(model, members)
    w = local.parameters(theta[None])
    leaves = list(w.values())
    optimizer = torchs(leaves, s)
    for pieces in local.steps(s, [s.count(len(c.train))], "train"):
        optimizer.zero_grad()
        for batch in pieces:
            (model.loss(w, batch.x, batch.y) * batch.weight).sum().backward()
        if s.clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, s.clip)
        if s.clip_value is not None:
            torch.nn.utils.clip_grad_value_(leaves, s.clip_value)
        optimizer.step()
    return local.join(w)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("model", [SMALL, LeNet(IMAGE, CLASSES)], ids=["mlp", "lenet"])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_equal_torchs_to_the_bit(name: str, model: FlatModel, dtype: torch.dtype) -> None:
    s, c, theta = made(**SETTINGS[name]), cast(client("c0", 11), dtype), start(model, 1, dtype)
    found = train(model, group([c]), theta, s).theta[0]
    assert found.dtype == dtype
    assert torch.equal(found, by_torch(model, theta[0], c, s))
    assert (found - theta[0]).abs().max() > 1e-4


@given(n=st.integers(1, 60), size=st.integers(1, 20), epochs=st.integers(1, 4), accumulate=st.integers(1, 9))
def test_epochs_are_rounded_up_to_whole_steps(n: int, size: int, epochs: int, accumulate: int) -> None:
    s = LocalSGD(epochs=epochs, batch_size=size, accumulate=accumulate)
    batches = epochs * (n // min(size, n))
    assert (s.count(n) - 1) * accumulate < batches <= s.count(n) * accumulate


def test_an_accumulated_step_equals_one_of_a_large_batch() -> None:
    """Use 12 examples in three mini-batches of 4, which are one epoch."""
    c, theta = client("c0", 12), start(SMALL, 1)
    found = train(SMALL, group([c]), theta, made(steps=1, accumulate=3))
    whole = train(SMALL, group([c]), theta, made(steps=1, batch_size=12))
    torch.testing.assert_close(found.theta, whole.theta, rtol=0, atol=1e-13)
    torch.testing.assert_close(found.loss, whole.loss, rtol=0, atol=1e-13)


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"nesterov": True}, {"momentum": 0.0}])
def test_stated_update_bounds_hold(keys: dict[str, Any]) -> None:
    s = made(clip=1e-3, lr=0.9, steps=30, **keys)
    theta, data = 100 * start(SMALL, 1), client("c0", 11)
    moved = train(SMALL, group([data]), theta, s).theta - theta
    bound = s.update_bounds(11)["delta_theta"]
    assert float(moved.norm()) <= bound - 1  # 1 covers rounding in models of any size
    # Aligned gradients of this norm nearly reach it.
    theta_1, g = torch.zeros(1, requires_grad=True), torch.full((1,), 1e-3)
    optimizer = torchs([theta_1], s)
    for _ in range(2000):
        theta_1.grad = g.clone()
        optimizer.step()
    long = s.model_copy(update={"steps": 2000}).update_bounds(11)["delta_theta"]
    assert 0.8 * (long - 1) / 1.1 < float(theta_1.abs().detach()) <= long


@pytest.mark.parametrize(
    "keys", [{}, {"optimizer": "adam", "clip": 1.0}, {"clip": 1.0, "weight_decay": 0.1}, {"clip_value": 1.0}]
)
def test_no_bound_is_stated_where_none_is_known(keys: dict[str, Any]) -> None:
    assert made(**keys).update_bounds(11) == {"steps": 6}


# --- schedules --------------------------------------------------------------------------------------------------------


def factors(schedule: dict[str, Any], rounds: int) -> list[float]:
    s = LocalSGD.model_validate({"steps": 1, "lr": 0.25, "schedule": schedule})
    assert s.rate(None) == 0.25
    return [s.rate(t) / 0.25 for t in range(1, rounds + 1)]


def of_torch(rounds: int, make: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = make(optimizer)
        found = []
        for _ in range(rounds):
            found.append(float(schedule.get_last_lr()[0]))
            optimizer.step()
            schedule.step()
    return found


@given(length=st.integers(1, 30), floor=st.floats(0, 0.9), warm=st.integers(0, 5))
def test_a_cosine_schedule_equals_torchs_after_warm_up(length: int, floor: float, warm: int) -> None:
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

    schedule = {"name": "cosine", "rounds": warm + length, "floor": floor, "warmup_rounds": warm}
    found = factors(schedule, warm + length)
    risen = of_torch(warm, lambda o: LinearLR(o, 1 / (warm + 1), total_iters=warm)) if warm else []
    fallen = of_torch(length, lambda o: CosineAnnealingLR(o, length, eta_min=floor))
    assert found == pytest.approx([*risen, *fallen])
    later = factors(
        {"name": "cosine", "rounds": warm + length, "floor": floor, "warmup_rounds": warm}, warm + length + 9
    )
    assert later[-10:] == [found[-1]] * 10
    assert min(later) > 0


@given(every=st.integers(1, 7), gamma=st.floats(0.05, 1))
def test_a_step_schedule_equals_torchs(every: int, gamma: float) -> None:
    from torch.optim.lr_scheduler import StepLR

    assert factors({"name": "step", "every": every, "gamma": gamma}, 20) == pytest.approx(
        of_torch(20, lambda o: StepLR(o, every, gamma))
    )


def test_a_constant_rate_warms_up() -> None:
    assert factors({"name": "constant", "warmup_rounds": 3}, 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors({"name": "constant"}, 2) == [1, 1]


def test_a_run_trains_at_the_scheduled_rate_and_personalizes_at_the_plain_one(tmp_path: Path) -> None:
    data, local = clients((7,)), {"steps": 3, "batch_size": 3, "lr": 0.2}
    falling = {**local, "schedule": {"name": "step", "every": 1, "gamma": 0.25}}
    s = FedAvgSettings.model_validate({"local": falling, "personalize_steps": 2})
    f = federation(tmp_path / "run", FEDAVG, s, setup(), data, rounds=3)
    theta = f.state["theta"]
    f.run()
    for t in range(1, 4):
        members = ClientGroup(data, lambda c, use, t=t: generator(7, f"train/{use}", c, t))
        theta = theta + (
            train(setup().model, members, theta[None], LocalSGD(**local | {"lr": 0.2 * 0.25 ** (t - 1)})).theta[0]
            - theta
        )
    assert torch.equal(f.state["theta"], theta)
    evaluated = ClientGroup(data, lambda c, use: generator(7, f"evaluate/{use}", c, 3))
    tuned = train(
        setup().model, evaluated, theta[None], LocalSGD.model_validate(local | {"steps": 2}), purpose="fine-tune"
    ).theta[0]
    assert torch.equal(f.predictors[3, "c0"]["personal"].tensors()["theta"], tuned)


def test_control_variates_are_mean_gradients_at_the_scheduled_rate(tmp_path: Path) -> None:
    """With one client SCAFFOLD's corrections cancel at any rate: its rounds are those of plain SGD."""
    data = clients((7,))
    local = {"epochs": 2, "batch_size": 3, "lr": 0.1, "schedule": {"name": "step", "every": 1, "gamma": 0.5}}
    s = ScaffoldSettings.model_validate({"local": local})
    problem = replace(setup(), roster=("c0",))
    scaffold = federation(tmp_path / "a", SCAFFOLD, s, problem, data, rounds=3)
    average = federation(
        tmp_path / "b",
        FEDAVG,
        FedAvgSettings.model_validate({"local": {**local, "momentum": 0.0}}),
        problem,
        data,
        rounds=3,
    )
    scaffold.run()
    average.run()
    torch.testing.assert_close(scaffold.state["theta"], average.state["theta"], rtol=0, atol=1e-12)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "key", "found"),
    [
        ("{name: fedavg, local: {steps: 1, optimizer: adam, momentum: 0.9}}", "local.momentum", ("adam", 0.9, "betas")),
        ("{name: fedavg, local: {steps: 1, momentum: null}}", "local.momentum", ("sgd",)),
        ("{name: fedavg, local: {steps: 1, betas: [0.9, 0.99]}}", "local.betas", ("sgd", 0.99, "adam")),
        ("{name: fedavg, local: {steps: 1, eps: 0.1}}", "local.eps", ("sgd", 0.1, "adam")),
        ("{name: fedavg, local: {steps: 1, nesterov: true, momentum: 0.0}}", "local.nesterov", ("momentum",)),
        ("{name: fedavg, local: {steps: 1, optimizer: adamw, nesterov: true}}", "local.nesterov", ("sgd",)),
        ("{name: fedavg, local: {steps: 1, clip: 1.0, clip_value: 1.0}}", "local.clip_value", ("clip",)),
        ("{name: fedavg, local: {steps: 1, lr: 2.0, weight_decay: 0.5}}", "local.weight_decay", (0.5, "lr", 2)),
        ("{name: fedavg, local: {steps: 1, optimizer: lion}}", "local.optimizer", ("sgd", "adam", "adamw", "lion")),
        (
            "{name: fedavg, local: {steps: 1, schedule: {name: cosine, rounds: 3, warmup_rounds: 3}}}",
            "local.schedule.warmup_rounds",
            ("rounds", 3),
        ),
        ("{name: scaffold, local: {steps: 1, optimizer: adam}}", "local.optimizer", ("control variates",)),
        ("{name: scaffold, local: {steps: 1, momentum: 0.5}}", "local.momentum", ("control variates",)),
        ("{name: scaffold, local: {steps: 1, weight_decay: 0.5}}", "local.weight_decay", ("control variates",)),
        ("{name: q-fedavg, local: {steps: 1, optimizer: adam}}", "local.optimizer", ("sgd", "adam")),
        ("{name: per-fedavg, local: {steps: 1, accumulate: 2}}", "local.accumulate", (1, 2, "batch_size")),
        ("{name: tr-maml, local: {steps: 1, accumulate: 2}}", "local.accumulate", (1, 2)),
        ("{name: comfedl, local: {steps: 1, accumulate: 2}}", "local.accumulate", (1, 2)),
        ("{name: local, local: {steps: 1, schedule: {name: constant}}}", "local.schedule", ("rounds",)),
    ],
)
def test_unsuitable_settings_are_rejected(tmp_path: Path, algorithm: str, key: str, found: tuple[object, ...]) -> None:
    assert tells(refusal(tmp_path, algorithm, key), *found)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_recorded_settings_can_be_read_again(name: str) -> None:
    s = made(optimizer=name, schedule={"name": "cosine", "rounds": 4}, weight_decay=0.1)
    assert LocalSGD.model_validate_json(s.model_dump_json(), strict=True) == s
    with pytest.raises(ValidationError):
        LocalSGD.model_validate({**s.model_dump(), "momentum": 0.9})


def table() -> dict[str, str]:
    """Return the keys that docs/local-training.md lists, by method."""
    text = (Path(__file__).parents[2] / "docs" / "local-training.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.partition("## Methods")[2].splitlines() if line[:1] == "|"]
    named = [(re.sub(r" \(.*?\)", "", names).split(", "), reported) for names, reported in rows[2:]]
    return {name: reported for names, reported in named for name in names}


def test_the_page_lists_the_optimizer_keys_of_every_method() -> None:
    reported = table()
    assert ours() <= set(reported)
    for name in ours():
        local = find_algorithm(name).settings.model_fields.get("local")
        has = local is not None and "optimizer" in local.annotation.model_fields
        assert has == (reported[name].startswith(("all", "the optimizer", "`optimizer: sgd` only"))), name


# --- every method -----------------------------------------------------------------------------------------------------

WITH_LOCAL = [name for name, s in METHODS.items() if "local" in s and name != "local"]
"""Methods whose rounds train by the settings ``local``."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WITH_LOCAL)
def test_every_method_uses_only_the_scheduled_rate_of_a_round(tmp_path: Path, name: str) -> None:
    """Half of the rate by a schedule gives the same server state as half of the rate itself, to the bit."""
    keys = [key for key in ("local", "head", "personal") if key in METHODS[name]]
    warm = {"schedule": {"name": "constant", "warmup_rounds": 1}}
    by_schedule = {key: {**METHODS[name][key], **warm} for key in keys}
    by_rate = {key: {**METHODS[name][key], "lr": METHODS[name][key]["lr"] / 2} for key in keys}
    found, expected = (run(tmp_path / str(i), name, **s).state for i, s in enumerate((by_schedule, by_rate)))
    assert found.keys() == expected.keys()
    for tensor in found:
        assert torch.equal(found[tensor], expected[tensor]), tensor


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [name for name in WITH_LOCAL if table()[name.split()[0]].startswith(("all", "the optimizer"))]
)
def test_every_method_trains_with_adam(tmp_path: Path, name: str) -> None:
    keys = [key for key in ("local", "head", "personal") if key in METHODS[name]]
    one_batch = "no `accumulate`" in table()[name.split()[0]]
    adam = {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5, "accumulate": 1 if one_batch else 2}
    settings = {key: {**METHODS[name][key], **adam} for key in keys}
    found, plain = run(tmp_path / "adam", name, **settings), run(tmp_path / "sgd", name)
    made, without = made_by(found), made_by(plain)
    assert all(bool(tensor.isfinite().all()) for tensor in made.values())
    assert any(not torch.equal(tensor, without[key]) for key, tensor in made.items())
    assert {"personal"} <= {name for named in found.predictors.values() for name in named}


@pytest.mark.parametrize("name", ["apfl", "per-fedavg", "comfedl", "drfa"])
def test_methods_with_their_own_loops_step_equally_when_stacked(name: str) -> None:
    method = find_algorithm(name)
    keys = {"steps": None, "epochs": 2} if name != "drfa" else {"steps": 4}
    local = {**LOCAL, **keys, "optimizer": "adam", "weight_decay": 0.1, "clip": 0.5}
    s = method.settings.model_validate(METHODS[name] | {"local": local})
    problem = replace(setup(), roster=("c0", "c1", "c2"))
    half, theta = method.client(s, problem), start(SMALL, 1)[0]
    opening = DRFATrainRequest(theta, torch.tensor([2.0]).double()) if name == "drfa" else SharedModel(theta)

    def answers(data: list[ClientData]) -> Any:
        conversation = half.open(group(data), opening)
        answer = next(conversation)
        return conversation.send(LossShift(torch.zeros(1).double())) if name == "comfedl" else answer

    data = clients((4, 9, 6))
    together, alone = answers(data).tensors(), [answers([c]).tensors() for c in data]
    for field, rows in together.items():
        torch.testing.assert_close(rows, torch.cat([one[field] for one in alone]), rtol=0, atol=1e-9)
