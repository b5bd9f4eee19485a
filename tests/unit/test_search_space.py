"""Search spaces, sweeps, and trials of a stored study, also after a kill at any point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from facts import refusing
from hypothesis import example, given
from hypothesis import strategies as st

from fedloom import experiment as experiments
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import Experiment, Point, as_yaml, grid_values, load_experiment, points
from fedloom.experiment.search_space import LONGEST_NAME, Parameter, SearchPlan, plan_search, read_space
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.tuning.trials import LOG, REDUCTION, STARTUP, Schedule, Trial, Trials

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
    assert budget.federation.privacy.budget == 2.5
    assert budget.algorithm.settings.local.lr == 0.5
    with refusing(ExperimentError, "federation.privacy.budget"):
        planned({"federation.privacy.budget": {"min": 1, "max": 2}}, *PRIVATE, epsilon=2.5)
    with refusing(ExperimentError, "federation.rounds", "hyperband"):
        planned({"federation.rounds": {"min": 50, "max": 90}}, early_stopping="hyperband")


def made(seeds: str | None = None, *grid: str) -> list[Point]:
    return points(FILE, (), seeds, grid)


def test_seeds_of_a_setting_are_adjacent_in_the_product() -> None:
    found = made("1,3-4", "algorithm.local.lr=0.01,3e-2", "federation.rounds=5")
    assert [point.name for point in found] == [
        f"lr={lr},rounds=5,seed={seed}" for lr in ("0.01", "0.03") for seed in (1, 3, 4)
    ]
    assert found[4].experiment.seed == 3
    assert found[4].experiment == load_experiment(FILE, found[4].overrides)
    assert "algorithm.local.lr=0.03" in found[4].overrides


def test_labels_are_the_shortest_distinct_suffixes() -> None:
    names = [
        p.name for p in made(None, "data.partition.min_examples=10", "model.hidden=[8],[16]", "evaluation.every=7")
    ]
    assert names[0].startswith("min_examples=10,hidden=_8_,every=7-")  # brackets are replaced, a hash distinguishes
    assert len(set(names)) == 2
    several = made(None, "algorithm.local.batch_size=4", "evaluation.batch_size=64")
    assert several[0].name == "local.batch_size=4,evaluation.batch_size=64"


def test_methods_have_their_display_names() -> None:
    fedavg = "{name: fedavg, local: {epochs: 1, lr: 0.1}}"
    names = [
        p.name for p in made(None, f"algorithm={fedavg},{{name: fedavg}},{{name: pefll, embedding: {{network: mlp}}}}")
    ]
    assert [name.split("-")[0] for name in names] == ["algorithm=_fedavg_", "algorithm=_fedavg_", "algorithm=_pefll_"]
    assert len(set(names)) == 3


def test_a_name_is_bounded_and_independent_of_the_rest_of_the_grid() -> None:
    long = ",".join(str(i / 1e9) for i in range(100))
    name = made(None, f"model={{name: mlp, hidden: [{', '.join(['32'] * 60)}]}}", "federation.rounds=1,2")[0].name
    assert len(name) <= LONGEST_NAME
    assert made(None, "algorithm.local.lr=0.1,0.2")[0].name == made(None, "algorithm.local.lr=0.1")[0].name
    assert len(long) > LONGEST_NAME


@pytest.mark.parametrize(
    ("seeds", "grid", "output"),
    [
        ("", [], ["seeds", "''"]),
        ("1,x", [], ["seeds", "x"]),
        ("3-1", [], ["seeds", "3-1"]),
        ("1,1", [], ["seeds", "1,1"]),
        (None, ["lr"], ["KEY=VALUE,VALUE"]),
        (None, ["=1,2"], ["KEY=VALUE,VALUE"]),
        (None, ["seed="], ["seed", "value"]),
        (None, ["federation.rounds=1,1"], ["federation.rounds", "1 twice"]),
        (None, ["federation.rounds=1", "federation.rounds=2"], ["federation.rounds twice"]),
        ("1", ["seed=2,3"], ["seed", "seeds"]),
        (None, ["federation.rounds=[1"], ["federation.rounds", "YAML"]),
        (None, ["federation.rounds=5,-1"], ["at federation.rounds=-1: "]),
        (None, ["federation.round=5"], ["federation.round", "rounds?"]),
        (None, ["model={name: mlp},{name: lenet}"], ["at model={name: lenet}: "]),
        ("1,2", ["federation.clients_per_round=5,50"], ["at federation.clients_per_round=50, seed=1: "]),
    ],
)
def test_invalid_grids_are_rejected(seeds: str | None, grid: list[str], output: list[str], tmp_path: Path) -> None:
    text = FILE.read_text().replace("{scheme: natural}", "{scheme: natural, clients: 15}")
    (tmp_path / "e.yaml").write_text(text)
    with refusing(ExperimentError, *output):
        points(tmp_path / "e.yaml", (), seeds, grid)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@example("?0")
@example("0?")
@example("a,b")
def test_any_value_survives_a_grid(value: object) -> None:
    key, values = grid_values(f"name={as_yaml(value)}")
    assert key == "name"
    assert values == [as_yaml(value)]


SCHEDULE = Schedule(rounds=9, every=1)
SPACE = {
    "algorithm.local.lr": {"min": 0.001, "max": 1, "log": True},
    "algorithm.local.epochs": {"min": 1, "max": 9},
    "model.hidden": {"choices": [[8], [16], [32]]},
}


def nine_rounds(changes: Sequence[str]) -> Experiment:
    return experiments.of(FILE, ["evaluation.every=1", "federation.rounds=9", *changes])


def plan(**settings: Any) -> SearchPlan:
    return plan_search(read_space({"parameters": SPACE, "seed": 5, **settings}), nine_rounds)


def value(trial: Trial, round: int) -> float:
    """Return a score for an optimizer to maximize: best at lr = 0.1 and 3 epochs, higher in later rounds."""
    lr, epochs = float(trial.texts["algorithm.local.lr"]), int(trial.texts["algorithm.local.epochs"])
    wide = {"[8]": 0.0, "[16]": 0.3, "[32]": 0.1}[trial.texts["model.hidden"]]
    return -((math.log10(lr) + 1) ** 2) - 0.1 * (epochs - 3) ** 2 + wide - 1.0 / round


class Killed(Exception):
    """Exception that ends the process."""


def search(trials: Trials, events: list[str], kill_at: int | None = None) -> None:
    """Run a search and record its events; the process dies after ``kill_at`` of them."""

    def note(event: str) -> None:
        events.append(event)
        if len(events) == kill_at:
            raise Killed

    while True:
        trial = next(iter(trials.unfinished), None)
        if trial is None:
            if len(trials.all) == trials.plan.trials:
                return
            trial = trials.draw()
            note(f"{trial.name} {sorted(trial.texts.items())}")
        if trial.texts["algorithm.local.epochs"] == "7":  # diverges
            trials.end(trial, "failed", error="too many epochs")
            note(f"{trial.name} failed")
            continue
        behind = trial.behind and max(trial.measured) < 9
        for round in range(max(trial.measured, default=0) + 1, 10):
            if behind:
                break
            trials.measure(trial, round, value(trial, round))
            behind = trial.behind and round < 9
            note(f"{trial.name} {round} {behind}")
        if behind:
            trials.end(trial, "stopped")
        else:
            trials.end(trial, "done", score=value(trial, 9))
        note(f"{trial.name} {trial.state}")


def opened(folder: Path, asked: SearchPlan, base: str = "e", schedule: Schedule = SCHEDULE) -> Trials:
    folder.mkdir(exist_ok=True)
    return Trials(asked, folder, base, schedule)


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_trials_are_those_of_the_stored_study(sampler: str, tmp_path: Path) -> None:
    space = {**SPACE, "algorithm.local.lr": {"choices": [0.01, 0.1, 1.0]}} if sampler == "grid" else SPACE
    asked = plan_search(read_space({"parameters": space, "seed": 5, "sampler": sampler, "trials": None}), nine_rounds)
    trials = opened(tmp_path / "s", asked)
    search(trials, [])
    if sampler == "grid":
        epochs, hidden = (parameter.grid for parameter in asked.parameters[1:])
        each = {(lr, str(e), h) for lr in ("0.01", "0.1", "1.0") for e in epochs for h in hidden}
        assert len(trials.all) == len(each) == 81
        assert {tuple(trial.texts.values()) for trial in trials.all} == each
        return
    stored = optuna.load_study(
        study_name="search",
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "s" / LOG))),
    )
    assert [{key: str(value) for key, value in found.params.items()} for found in stored.trials] == [
        dict(trial.texts) for trial in trials.all
    ]
    assert len({tuple(trial.texts.values()) for trial in trials.all}) == 20
    assert stored.trials[0].distributions == {
        "algorithm.local.lr": optuna.distributions.FloatDistribution(0.001, 1.0, log=True),
        "algorithm.local.epochs": optuna.distributions.IntDistribution(1, 9),
        "model.hidden": optuna.distributions.CategoricalDistribution(["[8]", "[16]", "[32]"]),
    }
    assert len(trials.all) == 20
    best = trials.best()
    assert best.score == max(trial.score for trial in trials.all if trial.score is not None)


@pytest.mark.slow
@pytest.mark.parametrize("early", [None, "median", "hyperband"])
def test_a_search_killed_at_any_point_resumes_unchanged(early: str | None, tmp_path: Path) -> None:
    asked, whole = plan(early_stopping=early, trials=14), list[str]()
    search(opened(tmp_path / "whole", asked), whole)
    states = {event.split()[1] for event in whole if event.split()[1] in ("done", "stopped", "failed")}
    assert states == {"done", "failed", *(["stopped"] if early else [])}
    for kill_at in range(1, len(whole), 7):
        folder, before = tmp_path / f"killed-{kill_at}", list[str]()
        with pytest.raises(Killed):
            search(opened(folder, asked), before, kill_at)
        if kill_at % 2:
            with (folder / LOG).open("a") as log:
                log.write('{"op_code":7,"trial_id":1,"int')  # a truncated line
            (folder / f"{LOG}.lock").symlink_to(folder / LOG)  # left by the killed process
        after = list[str]()
        search(again := opened(folder, asked), after)
        assert [*before, *after] == whole
        assert again.all == opened(folder, asked).all == opened(tmp_path / "whole", asked).all


def test_the_median_pruner_stops_the_trials_optuna_stops(tmp_path: Path) -> None:
    trials = opened(tmp_path / "s", plan(early_stopping="median", trials=30))
    search(trials, [])
    done: list[Trial] = []
    for trial in trials.all:
        if trial.state == "failed":
            continue
        if trial.state == "stopped":
            last = max(trial.measured)
            others = [value(other, last) for other in done]
            assert len(done) >= STARTUP
            assert last >= SCHEDULE.warm_up
            assert max(trial.measured.values()) < sorted(others)[(len(others)) // 2]
        else:
            done.append(trial)
    assert any(trial.state == "stopped" for trial in trials.all)
    best = trials.best()
    assert best.state == "done"


def test_a_search_can_be_extended(tmp_path: Path) -> None:
    search(opened(tmp_path / "s", plan(trials=5)), [])
    search(more := opened(tmp_path / "s", plan(trials=12)), [])
    search(whole := opened(tmp_path / "whole", plan(trials=12)), [])
    assert [trial.texts for trial in more.all] == [trial.texts for trial in whole.all]


def test_a_trial_beyond_the_epsilon_bound_is_not_chosen(tmp_path: Path) -> None:
    bounded = plan_search(
        read_space({"parameters": SPACE, "epsilon": 2.0, "trials": 3}),
        lambda changes: nine_rounds([*PRIVATE, *changes]),
    )
    trials = opened(tmp_path / "s", bounded)
    for score, epsilon in ((0.9, 2.5), (0.5, 1.9), (0.8, None)):
        trials.end(trials.draw(), "done", score=score, epsilon=epsilon)
    best = trials.best()
    assert (best.number, best.score) == (2, 0.5)


def test_hyperband_uses_the_rounds_of_the_experiment(tmp_path: Path) -> None:
    trials = opened(tmp_path / "s", plan(early_stopping="hyperband", trials=40), schedule=Schedule(9, 1))
    search(trials, [])
    ends = {max(trial.measured) for trial in trials.all if trial.state == "stopped"}
    assert ends <= {1, REDUCTION, REDUCTION**2 - 1, *range(1, 9)}
    assert min(ends) == 1


def test_a_different_search_is_rejected(tmp_path: Path) -> None:
    search(opened(tmp_path / "s", plan(trials=3)), [])
    with refusing(ExperimentError, tmp_path / "s", "resume", "space"):
        opened(tmp_path / "s", plan(trials=3, seed=6))
    with refusing(ExperimentError, tmp_path / "s", "resume", "experiment"):
        opened(tmp_path / "s", plan(trials=3), base="other")
    log = tmp_path / "s" / LOG
    text = log.read_text()
    log.write_text(text.replace('"op_code":4', '"op_code":x'))
    with refusing(DataError, LOG):
        opened(tmp_path / "s", plan(trials=3))
