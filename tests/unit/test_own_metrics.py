"""Metrics named by an experiment, FedLoom's and user-defined ones; problems of own tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import own_tasks
import pages_own_tasks
import pytest
import torch
from facts import refusing
from own_tasks import GRIDS, PROBLEMS
from task_problems import Clients
from test_local_data import TASK, people
from torch import Tensor

import fedloom as fl
from fedloom.errors import ExperimentError
from fedloom.experiment import from_shared_json
from fedloom.models import factories
from fedloom.models.factories import FACTORIES
from fedloom.runs.folder import RunFolder

CODE = """
def likelihood(outputs, y):
    return outputs.gather(1, y[:, None]).squeeze(1).exp()

def broken(outputs, y):
    raise KeyError("broken")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module of metrics that this process may not call before its user names one."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "somebodys_metrics.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.delenv(FACTORIES, raising=False)
    monkeypatch.setattr(factories, "_permitted", set())
    yield "somebodys_metrics"
    sys.modules.pop("somebodys_metrics", None)


def run(tmp_path: Path, metrics: Any, **more: Any) -> fl.Run:
    data = fl.Federated.from_arrays(people(), root=tmp_path / "data", held_out_fraction=0.25)
    return fl.run(
        TASK, data=data, evaluation__metrics=metrics, out=tmp_path / "run", report=False, progress=False, **more
    )


class Right:
    """Accuracy, from user-defined sums."""

    percent = True

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        return torch.stack([(outputs.argmax(1) == y).sum(), torch.tensor(len(y))])

    def value(self, sums: Tensor) -> float:
        return float(sums[0] / sums[1])


class Within(Right):
    """Metric whose class needs an argument."""

    def __init__(self, distance: float) -> None:
        self.distance = distance


def likelihood(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.gather(1, y[:, None]).squeeze(1).exp()


def test_names_and_functions_define_metrics_of_a_run(tmp_path: Path) -> None:
    made = run(tmp_path, ["f1", "auroc", Right, likelihood], runtime__workers=0)
    for group in ("seen", "unseen", "global"):
        found = made.summary[group]["metrics"]
        assert {"macro_f1", "auroc", "Right", "likelihood"} <= set(found)
        assert found["Right"] == pytest.approx(found["accuracy"])
        assert 0 < found["likelihood"]["mean"] < 1
    assert made.summary["metrics"]["Right"] == {"name": "Right", "higher_is_better": True, "percent": True}


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_named_functions_also_run_in_workers(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    here = run(tmp_path / "a", [f"{module}:likelihood"], runtime__workers=0)
    there = run(tmp_path / "b", [f"{module}:likelihood"], runtime__workers=1)
    assert there.summary["seen"]["metrics"] == here.summary["seen"]["metrics"]


@pytest.mark.slow
def test_metrics_that_cannot_be_computed_are_rejected_before_the_run(tmp_path: Path, module: str) -> None:
    for metric, facts in (
        (Within, ("Within", "distance")),
        ("rmse", ("rmse", "accuracy")),
        ("acuracy", ("acuracy", "package:function")),
        (f"{module}:nothing", (f"{module}:nothing", "AttributeError")),
        (f"{module}:broken", ("broken", "KeyError")),
    ):
        with refusing(ExperimentError, "evaluation.metrics", *facts):
            run(tmp_path, [metric])
    with refusing(ExperimentError, "runtime.workers", "0"):
        run(tmp_path, [likelihood], runtime__workers=1)
    assert not (tmp_path / "run").exists() or not RunFolder(tmp_path / "run").has("journal.jsonl")


@pytest.mark.slow
def test_a_metric_named_only_by_a_run_or_an_aggregator_is_not_imported(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{module}:likelihood"
    made = run(tmp_path, [name], runtime__workers=0)
    monkeypatch.setattr(factories, "_permitted", set())
    sys.modules.pop(module)
    with refusing(ExperimentError, "evaluation.metrics", name, FACTORIES):
        from_shared_json(made.experiment.shared_json())
    with refusing(ExperimentError, "evaluation.metrics", name, FACTORIES):
        fl.load(made.folder).models("ann")
    assert module not in sys.modules
    monkeypatch.setenv(FACTORIES, name)
    assert from_shared_json(made.experiment.shared_json()).evaluation.metrics == (name,)
    assert fl.load(made.folder).models("ann")(torch.zeros(1, 3)).shape == (1, 2)
    assert fl.load(made.folder).summary["seen"]["metrics"]["likelihood"]["mean"] > 0


def test_the_task_of_an_experiment_must_match_its_data(tmp_path: Path) -> None:
    with refusing(ExperimentError, "task.name", "regression", "classification") as refused:
        run(tmp_path, (), task={"name": "regression"})
    assert refused.value.key == "task.name"
    with refusing(ExperimentError, "task.class_weights", "3"):
        run(tmp_path, (), task={"name": "classification", "class_weights": [1.0, 2.0, 3.0]})
    with refusing(ExperimentError, "task"):
        run(tmp_path, (), task={"name": "clustering"})


@pytest.mark.slow
def test_settings_of_the_loss_reach_training(tmp_path: Path) -> None:
    plain = run(tmp_path / "a", (), runtime__workers=0)
    smoothed = run(tmp_path / "b", (), task={"name": "classification", "label_smoothing": 0.5}, runtime__workers=0)
    assert plain.history["train.loss"].iloc[-1] != smoothed.history["train.loss"].iloc[-1]
    again = run(tmp_path / "c", (), task={"name": "classification"}, runtime__workers=0)
    assert plain.summary["seen"] == again.summary["seen"]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_data_of_a_seed_never_change(problem: str) -> None:
    draw = PROBLEMS[problem].draw
    first, again, other = draw(1), draw(1), draw(2)
    inputs = [np.concatenate([np.ravel(x) for x in _inputs(clients)]) for clients in (first, again, other)]
    assert np.array_equal(inputs[0], inputs[1])
    assert not np.array_equal(inputs[0], inputs[2])
    assert all(np.array_equal(first[name][1], again[name][1]) for name in first)


def _inputs(clients: Clients) -> list[np.ndarray]:
    each = [x for x, _ in clients.values()]
    return [part for x in each for part in (x.values() if isinstance(x, dict) else [x])]


@pytest.mark.parametrize("problem", [name for name, about in PROBLEMS.items() if callable(about.model)])
def test_the_module_of_a_problem_accepts_its_inputs(problem: str) -> None:
    make = PROBLEMS[problem].model
    assert callable(make)
    x, y = PROBLEMS[problem].draw(1)["c00"]
    module = make()
    if isinstance(x, dict):
        outputs = module(**{name: torch.as_tensor(part) for name, part in x.items()})
    else:
        outputs = module(torch.as_tensor(x).float())
    sizes = {"regression": (1,), "signals": (4,), "shapes": (3, 16, 16), "categories": (3,)}
    assert outputs.shape == (len(y), *sizes[problem])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_all_methods_of_a_problem_have_equally_many_settings(problem: str) -> None:
    numbers = {method: len(list(own_tasks.settings(problem, method))) for method in GRIDS[problem]}
    assert len(set(numbers.values())) == 1


@pytest.mark.parametrize(("rate", "chosen"), [(0.003, True), (0.01, False)])
def test_folding_marks_the_chosen_setting_and_keeps_a_line_per_seed(tmp_path: Path, rate: float, chosen: bool) -> None:
    searched = [{"setting": {"lr": 0.003}, "validation": 0.75}, {"setting": {"lr": 0.01}, "validation": None}]
    tests = {seed: dict.fromkeys(pages_own_tasks.COLUMNS[1:], 0.5 + seed / 100) for seed in own_tasks.TESTS}
    found = {"headline": "accuracy", "chosen": {"lr": 0.003}, "search": searched, "tests": tests}
    (tmp_path / "cameras").mkdir()
    about = dict.fromkeys(GRIDS["cameras"], found)
    (tmp_path / "cameras" / own_tasks.FOUND).write_text(json.dumps(about))
    runs = pages_own_tasks.folded(tmp_path)
    assert [line["seen_mean"] for line in runs["cameras/test/local"]] == pytest.approx([52, 53, 54])
    [line] = runs[f"cameras/search/local/lr={rate:g}"]
    assert line.values == ({"validation": 75} if chosen else {})
    assert "**0.003: 75.0**" in pages_own_tasks.of_search(runs, "cameras")
