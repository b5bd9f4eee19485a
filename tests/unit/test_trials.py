"""Trials of a stored study, also after a kill at any point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from facts import refusing

from fedloom import experiment as experiments
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import Experiment
from fedloom.experiment.search_space import SearchPlan, plan_search, read_space
from fedloom.tuning.trials import LOG, REDUCTION, STARTUP, Schedule, Trial, Trials

FILE = Path(__file__).parents[2] / "experiments" / "vowel.yaml"
SCHEDULE = Schedule(rounds=9, every=1)
SPACE = {
    "algorithm.local.lr": {"min": 0.001, "max": 1, "log": True},
    "algorithm.local.epochs": {"min": 1, "max": 9},
    "model.hidden": {"choices": [[8], [16], [32]]},
}


def make(changes: Sequence[str]) -> Experiment:
    return experiments.of(FILE, ["evaluation.every=1", "federation.rounds=9", *changes])


def plan(**settings: Any) -> SearchPlan:
    return plan_search(read_space({"parameters": SPACE, "seed": 5, **settings}), make)


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
    asked = plan_search(read_space({"parameters": space, "seed": 5, "sampler": sampler, "trials": None}), make)
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
    assert best is not None
    assert best.score == max(trial.score for trial in trials.all if trial.score is not None)


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
    assert best is not None
    assert best.state == "done"


def test_a_search_can_be_extended(tmp_path: Path) -> None:
    search(opened(tmp_path / "s", plan(trials=5)), [])
    search(more := opened(tmp_path / "s", plan(trials=12)), [])
    search(whole := opened(tmp_path / "whole", plan(trials=12)), [])
    assert [trial.texts for trial in more.all] == [trial.texts for trial in whole.all]


def test_a_trial_beyond_the_epsilon_bound_is_not_chosen(tmp_path: Path) -> None:
    private = ["algorithm.weighting=uniform", "federation.privacy={clip: 1.0, noise_multiplier: 1.0, delta: 1.0e-3}"]
    bounded = plan_search(
        read_space({"parameters": SPACE, "epsilon": 2.0, "trials": 3}), lambda changes: make([*private, *changes])
    )
    trials = opened(tmp_path / "s", bounded)
    for score, epsilon in ((0.9, 2.5), (0.5, 1.9), (0.8, None)):
        trials.end(trials.draw(), "done", score=score, epsilon=epsilon)
    best = trials.best()
    assert best is not None
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
