"""Every method in every task that it supports, against losses of PyTorch, and the rejected tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from every_method import LOCAL, METHODS, NORMALIZED, PLAIN, made, ours, run
from facts import tells
from federations import CLASSES, clients, made_by, mean_loss, problem_of
from torch import Tensor
from torch.distributions import Bernoulli, Laplace, Normal

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.pfedbayes import likelihood_of
from fedloom.data.assignment import PartitionSettings
from fedloom.data.federated import ClientData, FederatedDataset, Split
from fedloom.data.partition import partition_dataset
from fedloom.data.spec import Targets
from fedloom.engine.assemble import make_parts
from fedloom.errors import ExperimentError
from fedloom.experiment import load_experiment
from fedloom.models.embedding import EmbeddingSettings, networks_for
from fedloom.models.flat import FlatModel, Layout
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION
from fedloom.tasks.multilabel import Multilabel
from fedloom.tasks.next_token import NextToken
from fedloom.tasks.regression import Regression
from fedloom.tasks.segmentation import Segmentation

TASKS: dict[str, PredictionTask] = {
    task.name: task for task in (CLASSIFICATION, Multilabel(), Regression(), Segmentation(), NextToken())
}
SIZES = (4, 9, 6)
SIDE, LENGTH = 4, 5


class Pixels(FlatModel):
    """A 1x1 convolution."""

    task = TASKS["segmentation"]

    def __init__(self) -> None:
        self.layout = Layout((("conv.weight", (CLASSES, 2, 1, 1)), ("conv.bias", (CLASSES,))), headless=True)

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.conv2d(x, parameters["conv.weight"], parameters["conv.bias"])


class Tokens(FlatModel):
    """An embedding and a linear layer on each token."""

    task = TASKS["next_token"]

    def __init__(self) -> None:
        self.layout = Layout((("embedding.weight", (CLASSES, 4)), ("fc.weight", (CLASSES, 4)), ("fc.bias", (CLASSES,))))

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.embedding(x.long(), parameters["embedding.weight"])

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(self.features(parameters, x), parameters["fc.weight"], parameters["fc.bias"])


def of_pixels(n: int, random: torch.Generator) -> Split:
    """Return masks that depend on the image; one pixel of each is ignored."""
    x = torch.randn(n, 2, SIDE, SIDE, generator=random, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    y[:, 0, 0] = 255
    return Split(x, y)


def of_tokens(n: int, random: torch.Generator) -> Split:
    """Return sequences in which each token follows from the previous one; the last has no successor."""
    x = (torch.randint(CLASSES, (n, 1), generator=random) + torch.arange(LENGTH)) % CLASSES
    y = torch.cat([x[:, 1:], torch.full((n, 1), -100)], 1)
    return Split(x.to(torch.uint8), y)


DENSE: dict[str, tuple[FlatModel, Callable[[int, torch.Generator], Split]]] = {
    "segmentation": (Pixels(), of_pixels),
    "next_token": (Tokens(), of_tokens),
}


def dense_clients(name: str) -> list[ClientData]:
    found = []
    for i, n in enumerate(SIZES):
        random = torch.Generator().manual_seed(i)
        found.append(ClientData(f"c{i}", *(DENSE[name][1](m, random) for m in (n, 2, 2)), 0))
    return found


def by_torch(outputs: Tensor, y: Tensor, *, summed: bool = False) -> Tensor:
    """Return the cross-entropy of each example's counted pixels or tokens, by a loop."""
    classes_last = outputs.movedim(1, -1) if outputs.dim() == 4 else outputs
    losses = []
    for logits, target in zip(classes_last, y, strict=True):
        counted = (target >= 0) & (target < CLASSES)
        reduction = "sum" if summed else "mean"
        losses.append(F.cross_entropy(logits[counted], target[counted].long(), reduction=reduction))
    return torch.stack(losses)


def with_loss(model: FlatModel, **how: Any) -> FlatModel:
    """Return the model with its own loss, independent of the task."""

    class Own(type(model)):  # type: ignore[misc]
        def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
            assert y is not None
            return by_torch(self.forward(parameters, x), y, **how)

    changed = copy.copy(model)
    changed.__class__ = Own
    return changed


STEPS = LOCAL | {"steps": 5, "lr": 0.1}
DENSE_METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"local": STEPS},
    "per-fedavg": {"local": STEPS, "hessian": "exact"},
    "comfedl": {"local": STEPS},
    "comfedl damaml": {"local": STEPS},
    "wga": {"lr": 0.3, "steps_per_round": 4},
    "pfedbayes": {"steps": 20, "lr_personal": 0.05},
    "pefll": {"local": STEPS},
}


def dense(folder: Path, name: str, task: str, model: FlatModel, **keys: Any) -> Any:
    if name == "pefll":
        network = {"segmentation": "linear", "next_token": "lstm"}[task]
        keys["embedding"] = {"network": network} | ({"width": 4} if network == "lstm" else {})
    return made(folder, name, model, dense_clients(task), **DENSE_METHODS[name], **keys)


def loss_on_train(f: Any, data: list[ClientData], round: int) -> float:
    """Return the mean over clients of the mean loss of their predictors on their training data."""
    found = []
    for c in data:
        predictions = f.predictors[round, c.id]["personal"].predictions(c.train.x)
        y = c.train.y
        found.append(
            by_torch(predictions, y).mean() if y.dim() > 2 or not y.is_floating_point() else mean_loss(predictions, y)
        )
    return float(torch.stack(found).mean())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("task", DENSE)
@pytest.mark.parametrize("name", DENSE_METHODS)
def test_pixel_and_token_training_uses_pytorchs_loss(tmp_path: Path, name: str, task: str) -> None:
    """In batches as one by one. pFedBayes uses the sum over pixels and tokens, which is -log p(y | x)."""
    model = DENSE[task][0]
    f, theirs, together = (
        dense(tmp_path / str(i), name, task, of, rounds=3, **keys)
        for i, (of, keys) in enumerate(
            ((model, {}), (with_loss(model, summed=name == "pfedbayes"), {}), (model, {"at_once": 3}))
        )
    )
    for each in (f, theirs, together):
        each.run()
    found = made_by(f)
    for other in (theirs, together):
        for key, tensor in made_by(other).items():
            torch.testing.assert_close(tensor, found[key], rtol=0, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")
    data = dense_clients(task)
    assert loss_on_train(f, data, 3) < loss_on_train(f, data, 0) - 0.01


# --- regression and multilabel ----------------------------------------------------------------------------------------

LONGER: dict[str, dict[str, Any]] = {
    "fedbn": {"local": LOCAL | {"lr": 0.01}},
    "pefll": {"local": {"steps": 20, "batch_size": 3, "lr": 0.01}},
    "pfedme": {"steps": 5, "inner_steps": 10, "lr": 0.05, "inner_lr": 0.05},
    "pfedhn": {"local": {"steps": 20, "batch_size": 3, "lr": 0.05}},
    "fedavgm": {"local": LOCAL, "server_lr": 0.3},
    "pfedbayes": {"steps": 20},
    "wga": {"lr": 0.2, "steps_per_round": 10},
    "afl": {"local": {"steps": 1, "batch_size": 3, "lr": 0.2}},
}
"""Settings for methods whose first rounds are short."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", ["multilabel", "regression"])
@pytest.mark.parametrize("name", METHODS)
def test_regression_and_multilabel_losses_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, task: str
) -> None:
    method = find_algorithm(name.split()[0])
    if task not in method.tasks:
        pytest.skip(method.restriction)
    monkeypatch.setattr(FlatModel, "task", TASKS[task])
    data = clients(SIZES)
    f = run(tmp_path, name, None, data, rounds=6, **LONGER.get(name, {}))
    outputs = torch.zeros(1, CLASSES)
    of_zeros = [float(mean_loss(outputs.expand_as(c.train.y), c.train.y)) for c in data if c.train.y is not None]
    before = max(sum(of_zeros) / len(data), loss_on_train(f, data, 0))  # at round 0 some are already adapted
    assert loss_on_train(f, data, 6 * method.trains) < before - (0.002 if method.trains else 0)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_pfnm_weights_outputs_by_the_number_of_their_examples(task: str) -> None:
    y = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    counts = TASKS[task].examples_per_output(y, CLASSES).tolist()
    assert counts == {"multilabel": [2, 0, 1], "regression": [2, 2, 2]}[task]


def test_the_likelihood_of_a_model_is_its_own_loss_if_it_has_one() -> None:
    own = with_loss(DENSE["segmentation"][0])
    view = likelihood_of(own)
    (client, *_), random = dense_clients("segmentation"), torch.Generator().manual_seed(1)
    w = own.layout.leaves(own.init(random, torch.float64))
    assert torch.equal(view.loss(w, client.train.x, client.train.y), own.loss(w, client.train.x, client.train.y))


# --- rejected tasks ---------------------------------------------------------------------------------------------------


def fitting(name: str, task: str) -> FlatModel:
    model = copy.copy(DENSE[task][0] if task in DENSE else NORMALIZED if name == "fedbn" else PLAIN)
    model.task = TASKS[task]
    return model


@pytest.mark.parametrize("name", sorted(ours()))
def test_a_method_rejects_unsupported_tasks_with_a_reason(name: str) -> None:
    method = find_algorithm(name)
    assert bool(method.restriction) == (set(method.tasks) != set(TASKS))
    settings = method.settings.model_validate(METHODS[name])
    for task in set(TASKS) - set(method.tasks):
        with pytest.raises(ExperimentError) as error:
            method.check_model(settings, fitting(name, task))
        assert error.value.key == "algorithm.name"
        assert tells(str(error.value), name, task, method.restriction)
    for task in {"classification", "multilabel", "regression"} & set(method.tasks):
        method.check_model(settings, fitting(name, task))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "drfa"])
@pytest.mark.parametrize("task", sorted(set(TASKS) - {"classification"}))
def test_absent_labels_are_masked_only_in_classification(name: str, task: str) -> None:
    method, key = find_algorithm(name), {"ditto": "personal", "fedrep": "head"}.get(name, "local")
    keys = METHODS[name] | {key: LOCAL | {"mask_absent": True}}
    settings = method.settings.model_validate(keys)
    model = copy.copy(PLAIN)
    model.task = TASKS[task]
    with pytest.raises(ExperimentError) as error:
        method.check_model(settings, model)
    assert error.value.key == f"algorithm.{key}.mask_absent"
    model.task = CLASSIFICATION
    method.check_model(settings, model)


@pytest.mark.parametrize(
    ("kind", "task", "allowed"),
    [
        ("features", "regression", ("mlp", "linear")),
        ("pixels", "segmentation", ("lenet", "linear", "mlp")),
        ("integers", "multilabel", ("linear",)),
        ("integers", "next_token", ("lstm",)),
        ("tokens", "classification", ("lstm", "linear")),
        ("tokens", "regression", ("linear",)),
        ("", "regression", ("linear",)),
    ],
)
def test_an_embedding_network_that_cannot_read_the_inputs_is_rejected(
    kind: str, task: str, allowed: tuple[str, ...]
) -> None:
    assert networks_for(kind, TASKS[task]) == allowed
    for network in {"lenet", "linear", "mlp", "lstm"} - set(allowed):
        with pytest.raises(ExperimentError) as error:
            EmbeddingSettings.model_validate({"network": network}).network_for(kind, (3,), 2, 4, TASKS[task])
        assert (error.value.key, error.value.allowed) == ("algorithm.embedding.network", allowed)


@pytest.mark.parametrize("task", ["regression", "multilabel", "segmentation"])
def test_targets_enter_an_embedding_network_as_the_task_defines(task: str) -> None:
    """Numbers and labels are used as they are, masks as the fraction of each class."""
    y = {"segmentation": torch.tensor([[[0, 2], [2, 255]]])}.get(task, torch.tensor([[0.5, 1.0, 0.0]]))
    entering = {"segmentation": torch.tensor([[1 / 3, 0.0, 2 / 3]])}.get(task, y)
    x, random = torch.randn(1, 2, 3), torch.Generator().manual_seed(0)
    shape = tuple(y.shape[1:])
    network = EmbeddingSettings(network="mlp").network_for("features", (2, 3), 3, 4, TASKS[task], shape)
    p = network.layout.split(network.init(random))
    h = F.relu(torch.cat([x.flatten(1), entering], 1) @ p["fc1.weight"].T + p["fc1.bias"])
    torch.testing.assert_close(network.forward(p, x, y), h @ p["fc2.weight"].T + p["fc2.bias"])


def test_setup_counts_the_outputs() -> None:
    problem = problem_of(PLAIN, clients(SIZES))
    assert problem.outputs == CLASSES
    problem = replace(problem, classes=0, targets=Targets("segmentation", (4, 4), 2))
    assert problem.outputs == 2


@pytest.mark.parametrize("error", ["squared", "absolute", "huber"])
def test_the_likelihood_of_regression_equals_that_of_distributions(error: str) -> None:
    """Compare differences between two targets. Huber's density is Gaussian near 0, Laplace beyond δ."""
    random = torch.Generator().manual_seed(0)
    outputs, y, other = torch.randn(3, 5, 2, generator=random, dtype=torch.float64)
    task = Regression.model_validate({"error": error, "delta": 0.5})
    found = task.negative_log_likelihood(outputs, y) - task.negative_log_likelihood(outputs, other)
    if error == "huber":
        near, d = 0.5, lambda target: (outputs - target).abs()
        parts = [torch.where(d(t) < near, d(t) ** 2 / 2, near * (d(t) - near / 2)).sum(1) for t in (y, other)]
        expected = parts[0] - parts[1]
    else:
        density = (Normal if error == "squared" else Laplace)(outputs, 1.0)
        expected = (density.log_prob(other) - density.log_prob(y)).sum(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("task", ["multilabel", "segmentation", "next_token"])
def test_the_likelihood_of_labels_pixels_and_tokens_is_a_sum(task: str) -> None:
    random = torch.Generator().manual_seed(0)
    if task == "multilabel":
        outputs, y = torch.randn(4, 3, generator=random), torch.randint(2, (4, 3), generator=random).float()
        expected = -Bernoulli(logits=outputs).log_prob(y).sum(1)
    else:
        split = DENSE[task][1](4, random)
        assert split.y is not None
        y = split.y
        shape = (4, CLASSES, SIDE, SIDE) if task == "segmentation" else (4, LENGTH, CLASSES)
        outputs = torch.randn(shape, generator=random)
        expected = by_torch(outputs, y, summed=True)
    torch.testing.assert_close(TASKS[task].negative_log_likelihood(outputs, y), expected)


def test_label_masks_are_rejected_in_evaluation_without_classes(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(
        "name: e\ndata: {dataset: gaussian, partition: {scheme: means, clients: 4}}\nmodel: {name: quadratic}\n"
        "algorithm: {name: fedavg}\nfederation: {rounds: 1, clients_per_round: 2}\nevaluation: {label_mask: true}\n"
    )
    e = load_experiment(tmp_path / "e.yaml")
    data = partition_dataset("gaussian", PartitionSettings(e.data.partition, 1, 0.0, 0.1), root=tmp_path)
    with pytest.raises(ExperimentError) as error:
        make_parts(e, FederatedDataset.open(data).manifest)
    assert error.value.key == "evaluation.label_mask"
