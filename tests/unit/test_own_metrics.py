"""Metrics named by an experiment: FedLoom's by name, and user-defined ones, in runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import refusing
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
    with refusing(ExperimentError, "runtime.workers", "0"):
        run(tmp_path, [likelihood], runtime__workers=1)
    with refusing(ExperimentError, "evaluation.metrics", "Within", "distance"):
        run(tmp_path, [Within])
    with refusing(ExperimentError, "evaluation.metrics", "rmse", "accuracy"):
        run(tmp_path, ["rmse"])
    with refusing(ExperimentError, "evaluation.metrics", "acuracy", "package:function"):
        run(tmp_path, ["acuracy"])
    with refusing(ExperimentError, "evaluation.metrics", f"{module}:nothing", "AttributeError"):
        run(tmp_path, [f"{module}:nothing"])
    with refusing(ExperimentError, "evaluation.metrics", "broken", "KeyError"):
        run(tmp_path, [f"{module}:broken"])
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
