"""Every task trained by FedAvg over a real loop: losses of the task, sums over the exchange, metrics of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from federations import federation
from test_task_evaluation import client
from test_tasks import TASK, K, targets
from torch import Tensor

from fedloom.algorithms.base import Setup, find_algorithm
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.models.flat import FlatModel, Layout
from fedloom.runs.folder import RunFolder
from fedloom.tasks.base import PredictionTask


class Shifted(FlatModel):
    """Model that returns its inputs, which look like outputs, times a number, plus another."""

    has_features = False

    def __init__(self, task: PredictionTask) -> None:
        self.task = task
        self.layout = Layout((("scale", (1,)), ("shift", (1,))))

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x * parameters["scale"] + parameters["shift"]


@TASK
def test_fedavg_trains_and_measures_the_task(tmp_path: Path, task: PredictionTask) -> None:
    data = [client(task, i, n) for i, n in enumerate((8, 9, 10))]
    plan = EvaluationPlan.from_targets(targets(task.name), task)
    settings = find_algorithm("fedavg").settings.model_validate({"local": {"steps": 3, "batch_size": 2, "lr": 0.05}})
    problem = Setup(Shifted(task), plan.classes, (K,), 3)
    made = federation(tmp_path, find_algorithm("fedavg"), settings, problem, data, rounds=2, plan=plan)
    made.run()
    lines = list(RunFolder(tmp_path).lines("metrics.jsonl"))
    assert lines[-1]["task"] == task.name
    found = lines[-1]["seen"]["metrics"][task.headline.name]
    assert found["pooled"] is not None
    theta = made.state["theta"]
    model, total = Shifted(task), 0.0
    for c in data:
        predictions = task.predictions(model.logits(theta, c.test.x))
        total += float(task.loss(predictions, c.test.y).mean()) / len(data)
    assert lines[-1]["global"]["loss_mean"] == pytest.approx(total, rel=1e-5)
