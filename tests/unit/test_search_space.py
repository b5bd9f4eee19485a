"""Search space: its file, the values of a parameter, and errors before any run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from facts import refusing
from hypothesis import given
from hypothesis import strategies as st

from fedloom import experiment as experiments
from fedloom.errors import ExperimentError
from fedloom.experiment import Experiment
from fedloom.experiment.search_space import Parameter, SearchPlan, plan_search, read_space
from fedloom.experiment.yaml_reader import parse_yaml

FILE = Path(__file__).parents[2] / "experiments" / "vowel.yaml"
LR = {"algorithm.local.lr": {"min": 0.001, "max": 1, "log": True}}
PRIVATE = ("algorithm.weighting=uniform", "federation.privacy={clip: 1.0, noise_multiplier: 1.0, delta: 1.0e-3}")


def make(changes: Sequence[str]) -> Experiment:
    return experiments.of(FILE, changes)


def planned(parameters: dict[str, Any], *changes: str, **settings: Any) -> SearchPlan:
    return plan_search(read_space({"parameters": parameters, **settings}), lambda more: make([*changes, *more]))


def only(parameters: dict[str, Any], **settings: Any) -> Parameter:
    (found,) = planned(parameters, **settings).parameters
    return found


def test_a_search_space_file_is_read_as_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "parameters:\n  algorithm.local.lr: {min: 1e-3, max: 1, log: true}\n  model.hidden: {choices: [[16], [8, 8]]}\n"
        "sampler: random\ntrials: 7\nseed: 3\nearly_stopping: median\n"
    )
    found = read_space(path)
    parameters = {**LR, "model.hidden": {"choices": [[16], [8, 8]]}}
    same = {"parameters": parameters, "sampler": "random", "trials": 7, "seed": 3, "early_stopping": "median"}
    assert found == read_space(same) == read_space(found)
    assert (read_space(path, trials=9).trials, read_space(path, trials=9).seed) == (9, 3)
    plan = plan_search(found, make)
    assert plan.trials == 7
    assert [parameter.key for parameter in plan.parameters] == ["algorithm.local.lr", "model.hidden"]


def test_a_range_with_integer_ends_has_integers_if_the_key_requires_them() -> None:
    assert only({"algorithm.local.epochs": {"min": 1, "max": 4}}).whole
    assert only({"algorithm.local.batch_size": {"min": 1, "max": 64, "log": True}}).whole
    assert not only({"algorithm.local.lr": {"min": 1, "max": 2}}).whole
    assert only({"algorithm.local.lr": {"min": 1, "max": 3, "step": 1}}).whole
    assert not only({"algorithm.local.momentum": {"min": 0, "max": 0.9}}).whole


def test_values_of_a_grid() -> None:
    assert only({"algorithm.local.epochs": {"min": 1, "max": 8, "step": 3}}).grid == [1, 4, 7]
    assert only({"algorithm.local.epochs": {"min": 1, "max": 3}}).grid == [1, 2, 3]
    assert only({"algorithm.local.lr": {"min": 0.25, "max": 1.0, "step": 0.25}}).grid == [0.25, 0.5, 0.75, 1.0]
    assert only({"model.hidden": {"choices": [[16], [8, 8]]}}).grid == ["[16]", "[8, 8]"]
    both = {"algorithm.local.epochs": {"min": 1, "max": 3}, "model.hidden": {"choices": [[16], [8]]}}
    assert planned(both, sampler="grid").trials == 6
    assert planned(both).trials == 20
    assert planned(both, trials=3).trials == 3


@pytest.mark.parametrize(
    ("low", "high", "step"), [(0.1, 0.3, 0.1), (0.05, 0.35, 0.1), (0.0, 0.9, 0.3), (1e-5, 3e-5, 1e-5)]
)
def test_a_grid_has_both_ends_and_optunas_values(low: float, high: float, step: float) -> None:
    asked = Parameter("algorithm.local.lr", low, high, step)
    assert (asked.grid[0], asked.grid[-1], len(asked.grid)) == (low, high, round((high - low) / step) + 1)
    assert all(optuna.distributions.FloatDistribution(low, high, step=step)._contains(value) for value in asked.grid)


def test_a_grid_ends_below_an_end_that_no_step_meets() -> None:
    assert Parameter("algorithm.local.lr", 0.0, 1.0, 0.4).grid == [0.0, 0.4, 0.8]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("algorithm.local.lr", {"min": 0.5, "max": 2.0, "step": 1e-9}),
        ("algorithm.local.epochs", {"min": 1, "max": 10**12}),
    ],
)
def test_a_range_of_too_many_values_is_rejected_early(key: str, values: dict[str, Any]) -> None:
    with refusing(ExperimentError, f"parameters.{key}", "10,000"):
        planned({key: values}, sampler="grid")


def test_each_value_of_a_parameter_is_read_back_from_its_text() -> None:
    assert only(LR).text(3e-05) == "3e-05"
    assert parse_yaml(only(LR).text(3e-05), "")[0] == 3e-05
    assert only({"algorithm.local.epochs": {"min": 1, "max": 4}}).text(3) == "3"
    method = {"name": "fedavg", "local": {"epochs": 1, "lr": 0.5}}
    choice = only({"algorithm": {"choices": [method, {**method, "name": "fedprox", "mu": 0.1}]}})
    assert parse_yaml(choice.text(choice.grid[0]), "")[0] == method


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_survives_its_text(value: float) -> None:
    assert parse_yaml(Parameter("lr", 0.0, 1.0).text(value), "")[0] == value


@pytest.mark.parametrize(
    ("space", "output"),
    [
        ({}, ["parameters"]),
        ({"parameters": {}}, ["parameters"]),
        ({"parameters": LR, "sampler": "tp"}, ["sampler", "tpe?"]),
        ({"parameters": LR, "sampel": "tpe"}, ["sampel", "sampler?"]),
        ({"parameters": {"a.b": {"min": 1}}}, ["parameters.a.b.max"]),
        ({"parameters": {"a.b": {"min": 2, "max": 2}}}, ["parameters.a.b.max", "2"]),
        ({"parameters": {"a.b": {"min": 3, "max": 2}}}, ["parameters.a.b.max", "3", "2"]),
        ({"parameters": {"a.b": {"min": 0, "max": 2, "log": True}}}, ["parameters.a.b.min", "log"]),
        ({"parameters": {"a.b": {"min": 1, "max": 2, "log": True, "step": 1}}}, ["parameters.a.b.step", "log"]),
        ({"parameters": {"a.b": {"min": 1, "max": 2, "step": 0}}}, ["parameters.a.b.step"]),
        ({"parameters": {"a.b": {"min": 1, "max": 2, "step": 3}}}, ["parameters.a.b.step", "3"]),
        ({"parameters": {"a.b": {"min": "1", "max": 2}}}, ["parameters.a.b.min", '"1"']),
        ({"parameters": {"a.b": {"min": 1, "max": 2, "choices": [1]}}}, ["parameters.a.b.min"]),
        ({"parameters": {"a.b": {"choices": []}}}, ["parameters.a.b.choices"]),
        ({"parameters": {"a.b": {"choices": [1, 1]}}}, ["parameters.a.b", "1 twice"]),
        ({"parameters": LR, "trials": 0}, ["trials", "0"]),
        ({"parameters": LR, "epsilon": 0.0}, ["epsilon"]),
        ([1], ["parameters"]),
    ],
)
def test_an_invalid_space_is_rejected(space: Any, output: list[str], tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(experiments.as_yaml(space))
    with refusing(ExperimentError, *output):
        read_space(path)


def test_errors_of_a_file_name_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("parameters:\n  a.b: {min: 1, max: 2}\n  c.d:\n    min: 0\n    max: 1\n    log: true\n")
    with refusing(ExperimentError, path, "line 4", "parameters.c.d.min"):
        read_space(path)
    with refusing(ExperimentError, "nowhere.yaml"):
        read_space(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("parameters", "settings", "output"),
    [
        ({"algorithm.local.epoch": {"min": 1, "max": 2}}, {}, ["algorithm.local.epoch", "epochs?"]),
        ({"algorithm.local.lr": {"min": -0.1, "max": 1}}, {}, ["at algorithm.local.lr=-0.1"]),
        ({"algorithm.local.momentum": {"min": 0.1, "max": 1}}, {}, ["at algorithm.local.momentum=1"]),
        ({"algorithm.local.epochs": {"min": 0, "max": 3}}, {}, ["at algorithm.local.epochs=0"]),
        ({"algorithm.local.epochs": {"min": 1.0, "max": 3.5}}, {}, ["at algorithm.local.epochs=1.0"]),
        ({**LR, "model": {"choices": [{"name": "mlp"}, {"name": "lenet"}]}}, {}, ["model={name: lenet}"]),
        ({"algorithm.local.lr": {"min": 0.1, "max": 1}}, {"sampler": "grid"}, ["algorithm.local.lr", "step"]),
        (LR, {"sampler": "grid"}, ["algorithm.local.lr", "log"]),
        ({"algorithm.local.epochs": {"min": 1, "max": 4}}, {"sampler": "grid", "trials": 3}, ["trials", "4", "3"]),
        ({"algorithm.local.epochs": {"min": 1, "max": 20_000}}, {"sampler": "grid"}, ["20,000"]),
        (LR, {"early_stopping": "median"}, ["early_stopping", "evaluation.every"]),
        (LR, {"epsilon": 2.0}, ["epsilon", "federation.privacy"]),
        *(({key: {"min": 1, "max": 3}}, {}, [key]) for key in ("seed", "data.partition.clients", "evaluation.every")),
        *(({key: {"choices": ["a", "b"]}}, {}, [key]) for key in ("name", "storage", "runtime.device", "tracking")),
        ({"algorithm..lr": {"min": 1, "max": 3}}, {}, ["algorithm..lr"]),
    ],
)
def test_spaces_that_do_not_fit_the_experiment_are_rejected(
    parameters: dict[str, Any], settings: dict[str, Any], output: list[str]
) -> None:
    with refusing(ExperimentError, *output):
        planned(parameters, "evaluation.every=150", **settings)


def test_few_extreme_values_are_checked_in_all_combinations() -> None:
    both = {"federation.clients_per_round": {"min": 1, "max": 12}, "federation.min_replies": {"min": 1, "max": 12}}
    changes = "data.partition={scheme: natural, clients: 15}"
    with refusing(ExperimentError, "at federation.clients_per_round=1, federation.min_replies=12"):
        planned(both, changes)
    many = {f"algorithm.local.{key}": {"choices": values} for key, values in (("lr", [0.1, 0.2]), ("epochs", [1, 2]))}
    many["algorithm.personalize_steps"] = {"choices": [*range(40)]}
    with refusing(ExperimentError, "algorithm.local.batch_size=0"):
        planned({**many, "algorithm.local.batch_size": {"choices": [4, 0]}})


def test_a_bound_on_epsilon_is_the_budget_of_each_trial() -> None:
    plan = planned(LR, *PRIVATE, epsilon=2.5)
    budget = make([*PRIVATE, *plan.overrides({"algorithm.local.lr": "0.5"})])
    assert budget.federation.privacy is not None
    assert budget.federation.privacy.budget == 2.5
    assert budget.algorithm.settings.local.lr == 0.5
    with refusing(ExperimentError, "federation.privacy.budget"):
        planned({"federation.privacy.budget": {"min": 1, "max": 2}}, *PRIVATE, epsilon=2.5)
    with refusing(ExperimentError, "federation.rounds", "hyperband"):
        planned({"federation.rounds": {"min": 50, "max": 90}}, early_stopping="hyperband")
