"""Losses, metrics and checks of each task, against torch, scikit-learn and torchmetrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from facts import mentions
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy import Lazy
from torch import Tensor

from fedloom.data.spec import Targets
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.tasks.auroc import BINS, WIDTH, Auroc, areas
from fedloom.tasks.base import LOSS_CAP, VALUE_CAP, Counts, PredictionTask, TargetShape
from fedloom.tasks.classification import Classification
from fedloom.tasks.multilabel import Multilabel
from fedloom.tasks.names import next_tokens
from fedloom.tasks.next_token import NextToken
from fedloom.tasks.registry import TASKS, task_of
from fedloom.tasks.regression import Regression
from fedloom.tasks.segmentation import Segmentation

sk, tm = Lazy("sklearn.metrics"), Lazy("torchmetrics.functional")

K = 4
SHAPES: dict[str, tuple[int, ...]] = {
    "classification": (),
    "multilabel": (K,),
    "regression": (K,),
    "segmentation": (5, 6),
    "next_token": (7,),
}


def targets(name: str, **more: Any) -> Targets:
    return Targets(name, SHAPES[name], K, **more)  # type: ignore[arg-type]


def batch(task: PredictionTask, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return outputs of a model and targets of n examples, as a dataset of the task could have them."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[task.name]
    outputs = 2 * torch.randn(n, *task.output_shape(K, shape), generator=generator)
    if task.name == "regression":
        return outputs, torch.randn(n, *shape, generator=generator)
    if task.name == "multilabel":
        return outputs, torch.randint(2, (n, *shape), generator=generator).float()
    return outputs, torch.randint(K, (n, *shape), generator=generator)


def measured(
    task: PredictionTask, outputs: Tensor, y: Tensor, *, pooled: bool = False, **more: Any
) -> dict[str, float]:
    """Return the metrics of one client from its sums."""
    plan = EvaluationPlan.from_targets(targets(task.name, **more), task, task.optional)
    sums = torch.cat([part.of(task.predictions(outputs), y) for part in plan.sums])
    nothing = plan.nothing(1, 1)
    counts = Counts(nothing.counts[:, 0, 1, 0], nothing.confusion[:, 0], nothing.calibration[:, 0])
    return {name: float(value) for name, value in plan.values(counts, sums[None], pooled=pooled).items()}


TASK = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


@TASK
def test_names_settings_and_headline_agree(task: PredictionTask) -> None:
    assert task_of(task.name) is task  # type: ignore[arg-type]
    assert type(task).model_validate_json(task.model_dump_json()) == task
    plan = EvaluationPlan.from_targets(targets(task.name))
    assert task.headline in plan.metrics
    assert plan.task is task


def test_losses_equal_torchs() -> None:
    outputs, y = batch(Classification(), 9)
    weights = (1.0, 2.0, 0.5, 3.0)
    torch.testing.assert_close(Classification().loss(outputs, y), F.cross_entropy(outputs, y, reduction="none"))
    expected = F.cross_entropy(outputs, y, torch.tensor(weights), reduction="none", label_smoothing=0.1)
    found = Classification(class_weights=weights, label_smoothing=0.1).loss(outputs, y)
    assert torch.equal(found, expected)
    outputs, y = batch(Multilabel(), 9)
    expected = F.binary_cross_entropy_with_logits(outputs, y, pos_weight=torch.tensor(weights), reduction="none")
    torch.testing.assert_close(Multilabel(pos_weight=weights).loss(outputs, y), expected.mean(1))
    outputs, y = batch(Regression(), 9)
    for error, function in (("squared", F.mse_loss), ("absolute", F.l1_loss), ("huber", F.huber_loss)):
        expected = function(outputs, y, reduction="none").mean(1)
        torch.testing.assert_close(Regression(error=error).loss(outputs, y), expected)  # type: ignore[arg-type]
    outputs, y = batch(Segmentation(), 9)
    y[:, :2] = 255
    for i, found in enumerate(Segmentation().loss(outputs, y)):
        torch.testing.assert_close(found, F.cross_entropy(outputs[i : i + 1], y[i : i + 1], ignore_index=255))
    outputs, y = batch(NextToken(), 9)
    y[:, -3:] = -100
    for i, found in enumerate(NextToken(label_smoothing=0.2).loss(outputs, y)):
        torch.testing.assert_close(found, F.cross_entropy(outputs[i], y[i], label_smoothing=0.2))


def test_an_example_without_targets_has_zero_loss() -> None:
    for task, ignored in ((Segmentation(), 255), (NextToken(), -100)):
        outputs, y = batch(task, 2)
        y[0] = ignored
        assert task.loss(outputs, y)[0] == 0
        assert task.loss(outputs, y)[1] > 0


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("output_shape", [(), (1,)])
def test_one_number_needs_no_axis(shape: tuple[int, ...], output_shape: tuple[int, ...]) -> None:
    outputs, y = torch.tensor([1.0, 2, 3]).reshape(3, *output_shape), torch.tensor([1.0, 4, 6]).reshape(3, *shape)
    assert Regression().loss(outputs, y).tolist() == [0, 4, 9]


@TASK
def test_losses_under_vmap_equal_those_of_single_clients(task: PredictionTask) -> None:
    pairs = [batch(task, 5, seed) for seed in range(3)]
    outputs, y = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
    found = torch.func.vmap(torch.func.grad(lambda o, t: task.loss(o, t).mean()))(outputs, y)
    for i in range(3):
        expected = torch.func.grad(lambda o, t=y[i]: task.loss(o, t).mean())(outputs[i])
        torch.testing.assert_close(found[i], expected)


@TASK
def test_predictions_are_outputs_and_average_to_predictions(task: PredictionTask) -> None:
    outputs, y = batch(task, 6)
    predictions = task.predictions(outputs)
    torch.testing.assert_close(task.loss(predictions, y), task.loss(outputs, y))
    torch.testing.assert_close(task.combine(predictions[None]), predictions)
    two = torch.stack([predictions, task.predictions(batch(task, 6, 1)[0])]).double()
    mean = task.probabilities(two.flatten(0, 1)).unflatten(0, (2, 6)).mean(0)
    torch.testing.assert_close(task.probabilities(task.combine(two)), mean)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10**6), st.integers(1, 5))
def test_auroc_of_labels_equals_scikit_learn(n: int, seed: int, levels: int) -> None:
    random = np.random.default_rng(seed)
    scores = random.integers(-levels, levels + 1, (n, 3)) / 2  # with ties
    y = random.integers(0, 2, (n, 3))
    found = areas(torch.tensor(scores), torch.tensor(y).bool())
    for label in range(3):
        if len(set(y[:, label])) == 2:
            assert float(found[label]) == pytest.approx(sk.roc_auc_score(y[:, label], scores[:, label]))
        else:
            assert math.isnan(found[label])


@pytest.mark.slow
def test_multilabel_metrics_equal_scikit_learn_and_torchmetrics() -> None:
    outputs, y = batch(Multilabel(), 60)
    y[:, 3] = 0  # a label without examples
    outputs[:, 3] = -1
    found = measured(Multilabel(), outputs, y)
    predicted, true, some = (outputs > 0).int().numpy(), y.int().numpy(), [0, 1, 2]
    p = outputs.double().sigmoid().numpy()
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(true[:, some], p[:, some], average="macro"))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(true, predicted, average="macro", zero_division=np.nan))
    assert found["micro_f1"] == pytest.approx(sk.f1_score(true, predicted, average="micro"))
    assert found["exact_match"] == pytest.approx(sk.accuracy_score(true, predicted))
    assert found["log_loss"] == pytest.approx(
        np.mean([sk.log_loss(true[:, k], p[:, k], labels=[0, 1]) for k in range(K)])
    )
    assert found["auroc"] == pytest.approx(
        float(tm.classification.multilabel_auroc(outputs[:, some], y[:, some].int(), 3))
    )


@pytest.mark.parametrize("std", [(), (2.0, 0.5, 3.0, 1.0)])
def test_regression_metrics_are_in_original_units(std: tuple[float, ...]) -> None:
    outputs, y = batch(Regression(), 30)
    mean = (5.0, -1.0, 0.0, 2.0) if std else ()
    found = measured(Regression(), outputs, y, std=std, mean=mean)
    scale, shift = np.array(std or (1.0,) * K), np.array(mean or (0.0,) * K)
    own_y, own = y.double().numpy() * scale + shift, outputs.double().numpy() * scale + shift
    assert found == pytest.approx(
        {
            "rmse": sk.root_mean_squared_error(own_y, own),
            "mae": sk.mean_absolute_error(own_y, own),
            "mse": sk.mean_squared_error(own_y, own),
            "r2": sk.r2_score(own_y, own),
        }
    )
    constant = measured(Regression(), outputs, torch.ones_like(y))
    assert math.isnan(constant["r2"])
    assert constant["rmse"] > 0


@pytest.mark.slow
def test_segmentation_metrics_equal_scikit_learn_and_torchmetrics() -> None:
    outputs, y = batch(Segmentation(), 8)
    y[y == 3] = 0  # no pixel of this class
    y[:, 0] = 255
    outputs[:, 2] = -9.0  # no pixel is predicted as this class
    counted = y != 255
    true, predicted = y[counted], outputs.argmax(1)[counted]
    found = measured(Segmentation(), outputs, y)
    assert found["mean_iou"] == pytest.approx(sk.jaccard_score(true, predicted, average="macro"))
    assert found["dice"] == pytest.approx(sk.f1_score(true, predicted, average="macro"))
    assert found["pixel_accuracy"] == pytest.approx(sk.accuracy_score(true, predicted))
    expected = tm.classification.multiclass_jaccard_index(outputs, y, K, ignore_index=255)
    assert found["mean_iou"] == pytest.approx(float(expected))


@pytest.mark.slow
def test_next_token_metrics_equal_torchmetrics() -> None:
    outputs, y = batch(NextToken(), 8)
    y[:, -2:] = -100
    found = measured(NextToken(), outputs, y)
    assert found["perplexity"] == pytest.approx(float(tm.text.perplexity(outputs, y, ignore_index=-100)), rel=1e-6)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y[y >= 0], outputs.argmax(-1)[y >= 0]))


def test_classification_sums_equal_scikit_learn() -> None:
    outputs, y = batch(Classification(), 50)
    p = outputs.double().softmax(1).numpy()
    found = measured(Classification(), outputs, y)
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr", average="macro"))
    assert found["brier"] == pytest.approx(((p - np.eye(K)[y]) ** 2).sum(1).mean())
    absent = y.where(y != 2, torch.zeros(()).long())
    ovr = [sk.roc_auc_score(absent == c, p[:, c]) for c in (0, 1, 3)]
    assert measured(Classification(), outputs, absent)["auroc"] == pytest.approx(np.mean(ovr))


def test_classification_metrics_of_counts_equal_scikit_learn() -> None:
    random = np.random.default_rng(0)
    true, predicted = random.integers(0, 3, 40), random.integers(0, 4, 40)
    confusion = torch.tensor(sk.confusion_matrix(true, predicted, labels=range(5)))
    counts = torch.tensor([[float((true == predicted).sum()), 40, 31.0]], dtype=torch.float64)
    found = Classification().metrics_of_counts(Counts(counts, confusion[None], torch.zeros(1, 15, 3)))
    assert float(found["accuracy"]) == pytest.approx(sk.accuracy_score(true, predicted))
    with pytest.warns(UserWarning, match="not in y_true"):
        assert float(found["balanced_accuracy"]) == pytest.approx(sk.balanced_accuracy_score(true, predicted))
    assert float(found["macro_f1"]) == pytest.approx(sk.f1_score(true, predicted, average="macro"))
    assert float(found["log_loss"]) == pytest.approx(31 / 40)


@TASK
def test_sums_are_additive_over_batches_and_clients(task: PredictionTask) -> None:
    outputs, y = batch(task, 20)
    predictions = task.predictions(outputs)
    for part in EvaluationPlan.from_targets(targets(task.name), task, task.optional).sums:
        whole = part.of(predictions, y)
        assert whole.dtype == torch.float64
        assert whole.shape == (part.size,)
        pieces = sum(part.of(predictions[i], y[i]) for i in (slice(0, 7), slice(7, 20)))
        skipped = 2 if isinstance(part, Auroc) else 0  # the exact area of a client is no sum
        torch.testing.assert_close(pieces[skipped:], whole[skipped:])


@TASK
def test_metrics_without_examples_or_definition_are_nan(task: PredictionTask) -> None:
    outputs, y = batch(task, 0)
    for pooled in (False, True):
        assert all(math.isnan(value) for value in measured(task, outputs, y, pooled=pooled).values())


def test_pooled_auroc_differs_from_the_exact_one_only_by_ties_within_bins() -> None:
    outputs, y = batch(Multilabel(), 400)
    outputs = (outputs.clamp(-7, 7) / WIDTH).round() * WIDTH  # all scores of a bin are equal
    exact, pooled = (measured(Multilabel(), outputs, y, pooled=pooled)["auroc"] for pooled in (False, True))
    assert pooled == pytest.approx(exact, abs=1e-12)
    noisy = outputs + 0.9 * WIDTH * torch.rand(outputs.shape, generator=torch.Generator().manual_seed(1))
    exact, pooled = (measured(Multilabel(), noisy, y, pooled=pooled)["auroc"] for pooled in (False, True))
    assert pooled == pytest.approx(exact, abs=0.01)
    assert pooled != exact


def test_pooled_auroc_of_two_clients_is_that_of_their_joint_examples() -> None:
    part, task = Auroc(K, of_classes=False), Multilabel()
    pairs = [batch(task, 50, seed) for seed in (0, 1)]
    pairs = [((outputs / WIDTH).round() * WIDTH, y) for outputs, y in pairs]
    together = [torch.cat(tensors) for tensors in zip(*pairs, strict=True)]
    sums = sum(part.of(*pair) for pair in pairs)
    found = float(part.values(sums[None], pooled=True)["auroc"])
    assert found == pytest.approx(sk.roc_auc_score(together[1].numpy(), together[0].numpy(), average="macro"))


@TASK
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_predictions_have_finite_sums_and_are_wrong(task: PredictionTask, broken: float) -> None:
    outputs, y = batch(task, 6)
    outputs[:] = broken
    for part in EvaluationPlan.from_targets(targets(task.name), task, task.optional).sums:
        sums = part.of(outputs, y)
        assert sums.isfinite().all()
        assert part.implausible(sums, 6) is None
    if math.isnan(broken):
        found = {name: value for name, value in measured(task, outputs, y).items() if not math.isnan(value)}
        wrong = {"accuracy": 0, "exact_match": 0, "pixel_accuracy": 0, "brier": 2, "log_loss": LOSS_CAP}
        assert all(found[name] == pytest.approx(value) for name, value in wrong.items() if name in found)
        assert found.get("rmse", VALUE_CAP**0.5) == pytest.approx(VALUE_CAP**0.5)
        assert found.get("perplexity", math.exp(LOSS_CAP)) == pytest.approx(math.exp(LOSS_CAP))


def test_errors_of_a_field_cover_all_its_numbers() -> None:
    task, shape, std = Regression(), (2, 3, 4), 2.5
    generator = torch.Generator().manual_seed(0)
    outputs, y = (torch.randn(6, *shape, generator=generator) for _ in range(2))
    assert task.output_shape(24, shape) == shape
    torch.testing.assert_close(task.loss(outputs, y), (outputs - y).square().flatten(1).mean(1))
    (errors,) = task.metric_sums(TargetShape(24, shape, (std,)))
    sums = errors.of(outputs, y)
    found = {name: float(value) for name, value in errors.values(sums[None]).items()}
    p, t = outputs.flatten().numpy() * std, y.flatten().numpy() * std
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(t, p), rel=1e-5)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(t, p), rel=1e-5)
    assert found["r2"] == pytest.approx(sk.r2_score(t, p), rel=1e-5)
    assert errors.implausible(sums, 6) is None
    assert errors.implausible(sums, 5)


@TASK
def test_impossible_sums_are_reported(task: PredictionTask) -> None:
    outputs, y = batch(task, 20)
    for part in EvaluationPlan.from_targets(targets(task.name), task, task.optional).sums:
        sums = part.of(task.predictions(outputs), y)
        assert part.implausible(sums, 20) is None
        assert part.implausible(torch.zeros_like(sums), 20) is None
        assert part.implausible(sums, 19)
        for i in range(part.size):
            for value in (-1e9, 1e35):
                lie = sums.clone()
                lie[i] = value
                assert part.implausible(lie, 20), (type(part), i, value)


def test_settings_that_do_not_fit_the_outputs_are_reported() -> None:
    assert mentions(Classification(class_weights=(1.0, 2.0)).setting_fault(K) or "", "task.class_weights")
    assert mentions(Multilabel(pos_weight=(1.0,) * 5).setting_fault(K) or "", "task.pos_weight")
    assert mentions(Segmentation().setting_fault(256) or "", "task.ignore_index")
    assert Segmentation(ignore_index=-100).setting_fault(300) is None
    assert all(task.setting_fault(K) is None for task in TASKS)


@TASK
def test_targets_as_inputs_have_the_stated_length(task: PredictionTask) -> None:
    _, y = batch(task, 5)
    found = task.label_input(y, K)
    assert found.shape == (5, task.label_input_size(K, SHAPES[task.name]))
    assert found.dtype == torch.float32


def test_masks_as_inputs_are_class_proportions() -> None:
    y = torch.tensor([[[0, 1], [1, 255]], [[255, 255], [255, 255]]])
    torch.testing.assert_close(Segmentation().label_input(y, 3), torch.tensor([[1 / 3, 2 / 3, 0], [0, 0, 0]]))


def test_tokens_identical_to_the_inputs_are_shifted_by_one() -> None:
    x = np.array([[4, 5, 6], [7, 8, 9]])
    assert next_tokens(x, x).tolist() == [[5, 6, -100], [8, 9, -100]]
    padded = np.array([[4, 5, -100], [7, 8, 9]])
    assert next_tokens(x, padded).tolist() == [[5, -100, -100], [8, 9, -100]]
    already = np.array([[5, 6, 1], [8, 9, 1]])
    assert next_tokens(x, already) is already
    ignored = np.full((2, 3), -100)
    assert next_tokens(x, ignored) is ignored


def test_memory_does_not_grow_with_the_square_of_the_vocabulary() -> None:
    plan = EvaluationPlan.from_targets(Targets("next_token", (128,), 30_000))
    assert sum(math.prod(shape) for shape in plan.shapes(2).values()) < 1000
    assert EvaluationPlan.of_classes(10).size <= 2  # evaluations of classes keep their small size
    assert Auroc(10, of_classes=True).size == 2 + 10 * 2 * BINS
