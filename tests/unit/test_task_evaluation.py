"""Evaluation of every task: the clients' metrics of their models, and their statistics."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import refusing
from federations import federation
from lazy import Lazy
from test_tasks import SHAPES, TASK, K, batch, measured, targets
from torch import Tensor

from fedloom.algorithms.base import Setup, find_algorithm
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.evaluation.group_statistics import group_statistics, groups, metric_statistics
from fedloom.evaluation.measure import implausible, metrics
from fedloom.evaluation.plan import EvaluationPlan, EvaluationResult
from fedloom.evaluation.summary import (
    Communication,
    RunCost,
    RunDescription,
    best,
    line_score,
    metrics_line,
    summary,
    validation_pooled,
)
from fedloom.models.flat import FlatModel, Layout
from fedloom.models.predictors import Ensemble, ModelPredictor
from fedloom.runs.folder import RunFolder
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION
from fedloom.tasks.own_metric import OwnMetric
from fedloom.tasks.regression import Regression

sk = Lazy("sklearn.metrics")


class Scaled(FlatModel):
    """Model whose outputs are its inputs times a number, so that any outputs can be produced."""

    has_features = False

    def __init__(self, task: PredictionTask) -> None:
        self.task = task
        self.layout = Layout((("scale", (1,)),))

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x * parameters["scale"]


def client(task: PredictionTask, i: int, n: int) -> ClientData:
    train, validation, test = (Split(*batch(task, size, 100 * i + size)) for size in (4, n + 1, n))
    return ClientData(f"c{i}", train, validation, test, K if task.name == "classification" else 0)


SIZES = (9, 14, 23)


def evaluated(task: PredictionTask, scale: float = 1.0, sizes: tuple[int, ...] = SIZES) -> EvaluationResult:
    """Return the clients' metrics for a fixed model, measured in small batches."""
    plan = EvaluationPlan.of(targets(task.name), task)
    data = [client(task, i, n) for i, n in enumerate(sizes)]
    model, theta = Scaled(task), torch.tensor([scale])
    predictors = [{"personal": ModelPredictor(model, theta), "global": ModelPredictor(model, theta / 2)} for _ in data]
    found = metrics(predictors, data, ("personal", "global"), batch_size=4, plan=plan)
    for row, n in enumerate(sizes):
        assert implausible(found.select([row]), plan, validation=n + 1, test=n) is None
        assert implausible(found.select([row]), plan, validation=n + 1, test=n + 1)
    ids = tuple(c.id for c in data)
    seen, present = torch.ones(len(data), dtype=torch.bool), torch.ones(len(data), dtype=torch.bool)
    return EvaluationResult(5, ids, seen, present, ("personal", "global"), **found.tensors(), plan=plan)


@TASK
def test_statistics_cover_metrics_per_client_and_over_all_examples(task: PredictionTask) -> None:
    e = evaluated(task)
    everyone = torch.ones(len(SIZES), dtype=torch.bool)
    found = metric_statistics(e, "personal", everyone)
    assert next(iter(found)) == task.headline.name
    data = [client(task, i, n).test for i, n in enumerate(SIZES)]
    each = [measured(task, c.x, c.y) for c in data]
    together = measured(
        task, torch.cat([c.x for c in data]), torch.cat([c.y for c in data]), pooled=task.name == "multilabel"
    )
    for metric in e.plan.sums[0].metrics + (e.plan.sums[1].metrics if len(e.plan.sums) > 1 else ()):
        values = sorted(one[metric.name] for one in each)
        worst = values[0] if metric.higher_is_better else values[-1]
        assert found[metric.name] == pytest.approx(
            {
                "mean": np.mean(values),
                "std": np.std(values),
                "worst": worst,
                "worst_decile": worst,
                "pooled": together[metric.name],
            },
            rel=1e-9,
        )


def test_class_statistics_equal_scikit_learns_and_the_accuracies() -> None:
    e = evaluated(CLASSIFICATION)
    found = groups(e, label_mask=False)["seen"]
    assert found["metrics"]["accuracy"] == {
        key.removeprefix("accuracy_"): value for key, value in found.items() if key.startswith("accuracy_")
    }
    assert found["metrics"]["log_loss"]["mean"] == found["loss_mean"]
    data = [client(CLASSIFICATION, i, n).test for i, n in enumerate(SIZES)]
    balanced = [sk.balanced_accuracy_score(c.y, c.x.argmax(1)) for c in data]
    assert found["metrics"]["balanced_accuracy"]["mean"] == pytest.approx(np.mean(balanced))
    y, predicted = torch.cat([c.y for c in data]), torch.cat([c.x.argmax(1) for c in data])
    pooled = sk.f1_score(y, predicted, average="macro")
    assert found["metrics"]["macro_f1"]["pooled"] == pytest.approx(pooled)
    assert set(found["metrics"]) == {metric.name for metric in e.plan.metrics}


def test_class_metrics_respect_the_label_mask() -> None:
    e = evaluated(CLASSIFICATION)
    for label_mask in (False, True):
        found = groups(e, label_mask=label_mask)["seen"]
        assert found["metrics"]["accuracy"]["mean"] == found["accuracy_mean"]


@TASK
def test_other_tasks_have_no_accuracy_and_a_mean_loss(task: PredictionTask) -> None:
    e = evaluated(task)
    counts = e.of("personal", "test", "unmasked")
    data = [client(task, i, n).test for i, n in enumerate(SIZES)]
    expected = [float(task.loss(c.x, c.y).double().sum()) for c in data]
    torch.testing.assert_close(counts[:, 2], torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)
    assert counts[:, 1].tolist() == list(SIZES)
    if task.name != "classification":
        assert not counts[:, 0].any()
        assert e.confusion.numel() == 0
        statistics = group_statistics(counts, classes=False)
        assert statistics["accuracy_mean"] is None
        assert groups(e, label_mask=True)["seen"] is None  # there is nothing to mask
        assert (groups(e, label_mask=False)["global"] or {})["metrics"][task.headline.name] is not None


@TASK
def test_the_score_is_the_signed_headline_on_validation_data(task: PredictionTask) -> None:
    good, bad = evaluated(task), evaluated(task, scale=-1.0)
    for e in (good, bad):
        pooled = validation_pooled(e, label_mask=False)
        assert pooled is not None
        assert line_score(line(e)) == (pooled if task.headline.higher_is_better else -pooled)
        together = e.metrics("personal", "validation", e.seen, pooled=True)[task.headline.name]
        assert pooled == pytest.approx(float(together))


def line(e: EvaluationResult, round: int = 5) -> dict[str, Any]:
    e = dataclasses.replace(e, round=round)
    found = metrics_line(e, label_mask=False, train_loss=1.0, communication=Communication(1, 2), client_steps=3)
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


@TASK
def test_summaries_name_task_and_headline_and_choose_the_best_round_by_it(task: PredictionTask) -> None:
    e = [evaluated(task, scale) for scale in (0.1, 1.0, -1.0)]
    lines = [line(each, round) for round, each in enumerate(e, start=1)]
    cost = RunCost(3, 2, Communication(1, 2), 1.0, 1, 1.0)
    found = summary(e[2], lines, RunDescription("a", "b", "c", "d", 1), cost, label_mask=False, last=lines)
    json.dumps(found, allow_nan=False)
    assert found["task"] == task.name
    assert found["headline"] == task.headline._asdict()
    assert set(found["metrics"]) == {metric.name for metric in e[0].plan.metrics}
    scores = [line_score(line(each)) or -math.inf for each in e]
    assert found["best"] == best(lines)
    assert found["best"]["round"] == 1 + int(np.argmax(scores))
    late, name = found["last_evaluations"]["seen"], task.headline.name
    assert list(late) == [f"{name}_mean", f"{name}_pooled"]
    values = [one["seen"]["metrics"][name]["pooled"] for one in lines]
    assert late[f"{name}_pooled"] == pytest.approx(
        {"mean": np.mean(values), "lowest": min(values), "highest": max(values)}
    )


@TASK
def test_an_ensemble_is_measured_by_its_averaged_predictions(task: PredictionTask) -> None:
    plan, model, data = EvaluationPlan.of(targets(task.name), task), Scaled(task), client(task, 0, 9)
    ensemble = Ensemble(model, torch.tensor([[0.5], [2.0]]))
    found = metrics([{"personal": ensemble}], [data], ["personal"], batch_size=4, plan=plan)
    draws = torch.stack([task.predictions(data.test.x * scale) for scale in (0.5, 2.0)])
    sums = torch.cat([part.of(task.combine(draws), data.test.y) for part in plan.sums])
    torch.testing.assert_close(found.sums[0, 0, 1], sums, rtol=1e-5, atol=1e-6)
    named = ensemble.predict(ensemble.named(), data.test.x)
    torch.testing.assert_close(task.probabilities(named), ensemble.probabilities(data.test.x))


@TASK
def test_clients_without_targets_measure_nothing(task: PredictionTask) -> None:
    data = client(task, 0, 9)
    data = dataclasses.replace(data, test=Split(data.test.x, None), validation=Split(data.validation.x, None))
    plan = EvaluationPlan.of(targets(task.name), task)
    predictor = ModelPredictor(Scaled(task), torch.ones(1))
    found = metrics([{"personal": predictor}], [data], ["personal"], batch_size=4, plan=plan)
    assert not any(tensor.any() for tensor in found.tensors().values())
    assert implausible(found, plan, validation=10, test=9) is None


@TASK
def test_sums_of_an_untrusted_client_are_checked(task: PredictionTask) -> None:
    plan, data = EvaluationPlan.of(targets(task.name), task), client(task, 0, 9)
    predictor = ModelPredictor(Scaled(task), torch.ones(1))
    found = metrics([{"personal": predictor}], [data], ["personal"], batch_size=4, plan=plan)
    for split in range(2):
        lie = found.sums.clone()
        lie[0, 0, split, 0] = -3.0
        assert implausible(dataclasses.replace(found, sums=lie), plan, validation=10, test=9)
    negative = found.counts.clone()
    negative[0, 0, 1, 0, 2] = -100
    assert implausible(dataclasses.replace(found, counts=negative), plan, validation=10, test=9)


def test_auroc_of_classes_is_measured_on_request() -> None:
    plan = EvaluationPlan.of(targets("classification"), None, ["auroc", "f1"])
    data = client(CLASSIFICATION, 0, 40)
    predictor = ModelPredictor(Scaled(CLASSIFICATION), torch.ones(1))
    found = metrics([{"personal": predictor}], [data], ["personal"], batch_size=7, plan=plan)
    e = EvaluationResult(
        1, ("c0",), torch.ones(1).bool(), torch.ones(1).bool(), ("personal",), **found.tensors(), plan=plan
    )
    values = metric_statistics(e, "personal", e.seen)["auroc"]
    expected = sk.roc_auc_score(data.test.y, data.test.x.double().softmax(1), multi_class="ovr")
    assert values["mean"] == pytest.approx(expected)
    assert values["pooled"] == pytest.approx(expected, abs=0.02)


def test_metrics_that_a_task_lacks_are_rejected() -> None:
    with refusing(ExperimentError, "evaluation.metrics", "rmse", "accuracy", "auroc") as refused:
        EvaluationPlan.of(targets("classification"), None, ["rmse"])
    assert refused.value.key == "evaluation.metrics"
    with refusing(ExperimentError, "evaluation.metrics", "f1", "perplexity"):
        EvaluationPlan.of(targets("next_token"), None, ["f1"])


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).abs().mean(1)


absolute.higher_is_better = False  # type: ignore[attr-defined]


class Correlation:
    """Pearson correlation of all numbers: a metric that is not a mean over examples."""

    percent = True

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        a, b = outputs.flatten().double(), y.flatten().double()
        return torch.stack(
            [torch.tensor(len(a)).double(), a.sum(), b.sum(), (a * a).sum(), (b * b).sum(), (a * b).sum()]
        )

    def value(self, sums: Tensor) -> float:
        n, a, b, aa, bb, ab = sums.tolist()
        return (n * ab - a * b) / math.sqrt((n * aa - a * a) * (n * bb - b * b))


def own(function: Any, **targets_: Any) -> OwnMetric:
    named = function if isinstance(function, type) else getattr(function, "__name__", "Correlation")
    return OwnMetric(f"mine:{getattr(named, '__name__', named)}", function, batch(Regression(), 4), **targets_)


def test_own_metrics_are_example_means_or_computed_from_own_sums() -> None:
    mean, std = (1.0, 2.0, 3.0, 4.0), (2.0, 1.0, 0.5, 3.0)
    parts = [own(absolute, mean=mean, std=std), own(Correlation(), mean=mean, std=std)]
    plan = EvaluationPlan.of(targets("regression", mean=mean, std=std), None, (), parts)
    data = [client(Regression(), i, n) for i, n in enumerate(SIZES)]
    predictors = [{"personal": ModelPredictor(Scaled(Regression()), torch.ones(1))} for _ in data]
    found = metrics(predictors, data, ["personal"], batch_size=4, plan=plan)
    everyone = torch.ones(len(data), dtype=torch.bool)
    e = EvaluationResult(1, ("a", "b", "c"), everyone, everyone, ("personal",), **found.tensors(), plan=plan)
    statistics = metric_statistics(e, "personal", everyone)
    pairs = [
        (c.test.x * torch.tensor(std) + torch.tensor(mean), c.test.y * torch.tensor(std) + torch.tensor(mean))
        for c in data
    ]
    together = [torch.cat(tensors) for tensors in zip(*pairs, strict=True)]
    each = [float((a - b).abs().mean()) for a, b in pairs]
    assert statistics["absolute"] is not None
    assert statistics["absolute"]["mean"] == pytest.approx(np.mean(each), rel=1e-5)
    assert statistics["absolute"]["worst"] == pytest.approx(max(each), rel=1e-5)
    assert statistics["absolute"]["pooled"] == pytest.approx(float((together[0] - together[1]).abs().mean()), rel=1e-5)
    correlation = statistics["Correlation"]
    expected = np.corrcoef(together[0].flatten(), together[1].flatten())[0, 1]
    assert correlation["pooled"] == pytest.approx(expected, rel=1e-5)
    assert [metric.percent for metric in parts[1].metrics] == [True]


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, y: outputs.mean(),
        lambda outputs, y: 1.0,
        lambda outputs, y: outputs[:, 99],
        lambda outputs: outputs,
        type("NoValue", (), {"sums": lambda self, outputs, y: y})(),
        type("Scalar", (), {"sums": lambda self, o, y: o.sum(), "value": lambda self, s: s})(),
        type("Prose", (), {"sums": lambda self, o, y: o[:, 0], "value": lambda self, s: "high"})(),
    ],
)
def test_functions_that_are_not_metrics_are_rejected(function: Any) -> None:
    with refusing(ExperimentError, "evaluation.metrics", "mine") as refused:
        OwnMetric("package:mine", function, batch(Regression(), 4))
    assert refused.value.key == "evaluation.metrics"


def test_names_of_own_metrics_are_unique() -> None:
    with refusing(ExperimentError, "evaluation.metrics", "rmse"):
        OwnMetric("package:rmse", absolute, batch(Regression(), 4))
    with refusing(ExperimentError, "evaluation.metrics", "absolute"):
        EvaluationPlan.of(targets("regression"), None, (), [own(absolute), own(absolute)])


def test_examples_with_non_finite_own_metrics_are_left_out() -> None:
    def risky(outputs: Tensor, y: Tensor) -> Tensor:
        return y[:, 0] / (y[:, 0] > 0)

    class Risky:
        def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
            return risky(outputs, y).sum()[None]

        def value(self, sums: Tensor) -> float:
            return float(sums)

    outputs, y = batch(Regression(), 9)
    part = OwnMetric("mine:risky", risky, (outputs, y))
    sums = part.of(outputs, y)
    positive = y[:, 0][y[:, 0] > 0]
    assert sums.tolist() == pytest.approx([len(positive), float(positive.sum())])
    assert part.implausible(sums, 9) is None
    assert part.implausible(torch.tensor([9, 1e41]).double(), 9)
    assert part.of(outputs, -y.abs()).tolist() == [0, 0]
    assert math.isnan(part.values(torch.zeros(1, 2))["risky"])
    assert not OwnMetric("mine:Risky", Risky(), (outputs, y)).of(outputs, y).any()


def test_target_shapes_agree_with_the_plan() -> None:
    for name in SHAPES:
        plan = EvaluationPlan.of(targets(name))
        assert plan.nothing(3, 2).sums.shape == (3, 2, 2, plan.size)
        assert plan.classes == (K if name == "classification" else 0)


# --- training over a real loop ----------------------------------------------------------------------------------------


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
    plan = EvaluationPlan.of(targets(task.name), task)
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
