"""Calls of a module: named inputs, fields of outputs, one logit, other tasks, the head, and optional steps of runs."""

from __future__ import annotations

import logging
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import refusing
from test_local_data import TASK, people
from test_module_check import Small, model_of, small_group
from test_module_model import refused
from torch import Tensor, nn

import fedloom
from fedloom.algorithms.client import train
from fedloom.algorithms.fedper import FEDPER
from fedloom.algorithms.fedrod import FEDROD
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.per_fedavg import PER_FEDAVG
from fedloom.errors import ExperimentError
from fedloom.models.module import ModuleModel
from fedloom.models.module_call import SingleInput, trial_inputs
from fedloom.models.registry import ModuleSettings
from fedloom.tasks.classification import CLASSIFICATION
from fedloom.tasks.multilabel import Multilabel
from fedloom.tasks.next_token import NextToken
from fedloom.tasks.regression import Regression
from fedloom.tasks.segmentation import Segmentation

# --- outputs ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["logits", "aux"])


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor


class Returns(Small):
    """Module that returns a function of the logits."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Any:
        return self.made(super().forward(x))


@pytest.mark.parametrize(
    ("made", "output"),
    [
        (lambda z: {"loss": None, "logits": z}, None),
        (lambda z: Output(z.exp(), z), None),
        (lambda z: Pair(z, z.exp()), None),
        (lambda z: {"out": z, "aux": 2 * z}, "out"),
        (lambda z: {"out": z, "aux": 2 * z}, None),
        (lambda z: (z.repeat(1, 3), z), None),
        (lambda z: {"a": z, "b": 3}, None),
        (lambda z: (z, z[:, :1]), None),
        (lambda z: (2 * z, z), 1),
        (lambda z: (2 * z, z), "1"),
        (lambda z: Pair(2 * z, z), 1),
        (lambda z: [z], 0),
    ],
    ids=[
        "mapping",
        "dataclass",
        "namedtuple",
        "named field",
        "out",
        "only fitting part",
        "only tensor",
        "before a binary one",
        "position",
        "position as text",
        "position of a field",
        "list",
    ],
)
def test_a_field_of_the_output_is_used_for_training_and_prediction(made: Any, output: str | int | None) -> None:
    model, plain = model_of(lambda: Returns(made), output=output), model_of(Small)
    assert model.layout.head == ()  # there is only one layer
    theta, x = model.init(torch.Generator().manual_seed(1)), torch.randn(4, 3)
    assert torch.equal(model.logits(theta, x), plain.logits(theta, x))
    steps, group = LocalSGD(steps=2), small_group(6)
    ends = [train(m, group, theta[None], steps).theta for m in (model, plain)]
    assert torch.equal(*ends)
    assert ModuleSettings(factory="a:b", output=output).output == output


@pytest.mark.parametrize(
    ("made", "output", "facts"),
    [
        (lambda z: (z, z), None, ("tuple", "0", "[3, 2]", "1", "model.output")),
        (lambda z: {"a": z, "b": z}, None, ("dict", "a", "[3, 2]", "b", "model.output")),
        (lambda z: {"out": z, "aux": 3}, "aux", ("dict", "out", "aux", "model.output")),
        (lambda z: (z, z), 2, ("tuple", "0", "1", "model.output")),
        (lambda z: "none", None, ("tensor", "str")),
    ],
)
def test_outputs_without_a_known_field_are_rejected_with_their_names(
    made: Any, output: str | int | None, facts: tuple[str, ...]
) -> None:
    with refused("model.factory", "Returns", *facts):
        model_of(lambda: Returns(made), output=output)


@pytest.mark.parametrize("flat", [False, True], ids=["[b, 1]", "[b]"])
def test_one_logit_is_a_binary_classifier(flat: bool, caplog: pytest.LogCaptureFixture) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.last(self.first(x).relu())
            return z[:, 0] if flat else z

    One.__name__ = f"One{flat}"  # the log names each kind once
    with caplog.at_level(logging.INFO, "fedloom.models"):
        model = model_of(One)
    assert f"One{flat}" in caplog.text
    theta, module = model.init(torch.Generator().manual_seed(1)), One()
    module.load_state_dict(model.layout.split(theta))
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 1])
    z = module(x).flatten()
    torch.testing.assert_close(model.logits(theta, x).softmax(1)[:, 1], z.sigmoid())
    expected = F.binary_cross_entropy_with_logits(z, y.float(), reduction="none")
    w = model.layout.leaves(theta, requires_grad=True)
    found = model.in_training().loss(w, x, y)
    torch.testing.assert_close(found, expected)
    slopes = torch.autograd.grad(found.sum(), list(w.values()))
    own = dict(module.named_parameters())
    torch.testing.assert_close(slopes, torch.autograd.grad(expected.sum(), [own[name] for name in w]))
    assert model.layout.head == ("last.weight", "last.bias")
    assert model.has_features
    FEDPER.check_model(FEDPER.settings(), model)
    with refused("fedrod", "'last'", "outputs"):
        FEDROD.check_model(FEDROD.settings(), model)
    model.check_steps(clients=2)


def test_a_custom_loss_gets_the_modules_outputs() -> None:
    class Hinge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x)[:, 0]

        def loss(self, z: Tensor, y: Tensor) -> Tensor:
            return (1 - z * (2 * y - 1)).relu()

    model = model_of(Hinge)
    theta, module = model.init(torch.Generator().manual_seed(1)), Hinge()
    module.load_state_dict(model.layout.split(theta))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    torch.testing.assert_close(model.loss(model.layout.leaves(theta), x, y), module.loss(module(x), y))


@pytest.mark.parametrize("axes", [(1,), ()])
def test_one_number_for_several_classes_is_told_about_regression_first(axes: tuple[int, ...]) -> None:
    layers = [nn.Linear(3, 1), *([] if axes else [nn.Flatten(0)])]
    with refusing(ExperimentError, "[3, 55]") as refused_model:
        ModuleModel(lambda: nn.Sequential(*layers), (3,), 55, "features")
    message = str(refused_model.value)
    assert message.index('task="regression"') < message.index("logits")


@pytest.mark.parametrize("flat", [False, True], ids=["tuple", "mapping"])
def test_auxiliary_outputs_in_training_mode_are_not_trained(flat: bool) -> None:
    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last, self.aux = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Any:
            h = self.body(x)
            if not self.training:
                return self.last(h)
            return {"main": self.last(h), "aux": self.aux(h)} if flat else (self.aux(h), self.last(h))

    model = model_of(Aux)
    w = model.layout.leaves(model.init(torch.Generator().manual_seed(1)), requires_grad=True)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    expected = F.cross_entropy(model.forward(w, x), y, reduction="none")
    torch.testing.assert_close(model.in_training().loss(w, x, y), expected)


@pytest.mark.parametrize(
    ("task", "classes", "shape", "layers"),
    [
        (CLASSIFICATION, 3, (), [nn.Linear(4, 3), nn.Softmax(1)]),
        (CLASSIFICATION, 2, (), [nn.Linear(4, 1), nn.Sigmoid()]),
        (Multilabel(), 3, (3,), [nn.Linear(4, 3), nn.Sigmoid()]),
    ],
    ids=["softmax", "sigmoid", "labels"],
)
def test_probabilities_are_trained_by_their_likelihood(
    task: Any, classes: int, shape: tuple[int, ...], layers: list[nn.Module]
) -> None:
    net = nn.Sequential(*layers)
    model = ModuleModel(lambda: net, (4,), classes, "features", task=task, target_shape=shape)
    x, generator = torch.randn(6, 4), torch.Generator().manual_seed(0)
    y = torch.randint(2, (6, *shape), generator=generator)
    p, theta = net(x), model.init(torch.Generator())
    if isinstance(layers[1], nn.Softmax):
        expected = F.nll_loss(p.log(), y, reduction="none")
    else:
        expected = F.binary_cross_entropy(p, y.float().reshape(p.shape), reduction="none").mean(1)
    w = model.layout.leaves(theta, requires_grad=True)
    found = model.in_training().loss(w, x, y.float() if shape else y)
    torch.testing.assert_close(found, expected)
    slopes = torch.autograd.grad(found.sum(), list(w.values()))
    torch.testing.assert_close(slopes, torch.autograd.grad(expected.sum(), list(net.parameters())))
    predicted = task.probabilities(task.predictions(model.logits(theta, x)))
    torch.testing.assert_close(predicted[:, -p.shape[1] :], p)
    with torch.no_grad():  # saturated outputs have a finite loss
        far = model.layout.leaves(theta * 1e4)
    assert torch.isfinite(model.loss(far, x, y.float() if shape else y)).all()
    model.check_steps(clients=2, twice=True)


def test_an_all_zero_initial_output_is_not_taken_for_probabilities() -> None:
    def zeros() -> nn.Module:
        layer = nn.Linear(3, 1)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    model = model_of(zeros)
    theta = model.init(torch.Generator())
    assert not model.logits(theta, torch.randn(4, 3)).any()


class NextTokens(nn.Module):
    """Logits of the next token in the order or shape of a given function."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.table, self.last, self.made = nn.Embedding(7, 4), nn.Linear(4, 7), made

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self.last(self.table(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "made", [lambda z: z.transpose(1, 2), lambda z: z.reshape(-1, 7)], ids=["[b, V, T]", "[b T, V]"]
)
def test_next_token_outputs_may_have_another_axis_order(made: Any) -> None:
    described = {"": SingleInput("integers", (5,), 7)}
    keys: dict[str, Any] = {"task": NextToken(), "target_shape": (5,)}
    models = [ModuleModel(lambda f=f: NextTokens(f), described, 7, "integers", **keys) for f in (lambda z: z, made)]
    theta, x = models[0].init(torch.Generator().manual_seed(1)), torch.randint(7, (4, 5))
    assert torch.equal(*(model.logits(theta, x) for model in models))
    with refused("next_token", "[3, 5, 7]"):
        ModuleModel(lambda: NextTokens(lambda z: z[:, 1:]), described, 7, "integers", **keys)


def test_a_module_with_additional_required_arguments_is_rejected() -> None:
    class Hidden(Small):
        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return super().forward(x + hidden)

    with refused("model.factory", "Hidden", "hidden", "default"):
        model_of(Hidden)


def test_one_logit_works_with_running_statistics() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))

    model = ModuleModel(made, (3,), 2, "features")
    assert model.layout.buffers == ("1.running_mean", "1.running_var")
    labels = ModuleModel(
        lambda: nn.Sequential(made(), nn.Linear(1, 2)), (3,), 2, "features", task=Multilabel(), target_shape=(2,)
    )
    assert labels.layout.buffers == ("0.1.running_mean", "0.1.running_var")


def test_outputs_of_other_tasks_are_compared_with_the_required_shape() -> None:
    def segment(classes: int) -> nn.Module:
        return nn.Conv2d(1, classes, 3, padding=1)

    task = Segmentation()
    keys: dict[str, Any] = {"task": task, "target_shape": (6, 6)}
    model = ModuleModel(lambda: segment(3), (1, 6, 6), 3, "pixels", **keys)
    theta, x, y = model.init(torch.Generator()), torch.randn(4, 1, 6, 6), torch.randint(3, (4, 6, 6))
    outputs = model.logits(theta, x)
    assert outputs.shape == (4, 3, 6, 6)
    torch.testing.assert_close(model.loss(model.layout.leaves(theta), x, y), task.loss(outputs, y))  # other kernels
    model.check_steps(clients=2, twice=True)
    binary = ModuleModel(lambda: segment(1), (1, 6, 6), 2, "pixels", **keys)
    two = binary.logits(binary.init(torch.Generator()), x)
    assert two.shape == (4, 2, 6, 6)
    assert not two[:, 0].any()
    with refused("segmentation", "[3, 3, 6, 6]", "[3, 2, 6, 6]"):
        ModuleModel(lambda: segment(2), (1, 6, 6), 3, "pixels", **keys)
    after = ModuleModel(lambda: nn.Sequential(segment(3), nn.Softmax(1)), (1, 6, 6), 3, "pixels", **keys)
    torch.testing.assert_close(after.loss(after.layout.leaves(theta), x, y), task.loss(outputs, y))
    for shape, width in (((), 1), ((2,), 2)):
        keys = {"task": Regression(), "target_shape": shape}
        real = ModuleModel(lambda width=width: nn.Linear(3, width), (3,), width, "features", **keys)
        assert real.logits(real.init(torch.Generator()), torch.randn(5, 3)).shape == (5, width)
    flat = ModuleModel(lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), (3,), 1, "features", task=Regression())
    assert flat.logits(flat.init(torch.Generator()), torch.randn(5, 3)).shape == (5, 1)
    assert flat.layout.head_is_linear is False  # it has one layer
    with refused("regression", "[3, 2]", "[3, 1]"):
        ModuleModel(lambda: nn.Linear(3, 1), (3,), 2, "features", task=Regression(), target_shape=(2,))
    labels: dict[str, Any] = {"task": Multilabel(), "target_shape": (4,)}
    assert ModuleModel(lambda: nn.Linear(3, 4), (3,), 4, "features", **labels).layout.size == 16
    tokens: dict[str, Any] = {"task": NextToken(), "target_shape": (5,)}
    described = {"": SingleInput("integers", (5,), 7)}
    words = ModuleModel(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), described, 7, "integers", **tokens)
    assert words.logits(words.init(torch.Generator()), torch.randint(7, (3, 5))).shape == (3, 5, 7)
    assert words.layout.head == ("1.weight", "1.bias")
    assert not words.has_features
    words.check_steps(clients=2)


# --- inputs -----------------------------------------------------------------------------------------------------------

NAMED = {
    "image": SingleInput("pixels", (3, 8, 8)),
    "row": SingleInput("features", (4,)),
    "code": SingleInput("integers", (), 5),
}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.code, self.last = nn.Conv2d(3, 2, 3), nn.Embedding(5, 2), nn.Linear(8, 2)

    def joined(self, image: Tensor, row: Tensor, code: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.cat([self.conv(image).mean((2, 3)), row, self.code(code)], 1))
        return logits


class ByName(Parts):
    def forward(self, image: Tensor, code: Tensor, row: Tensor) -> Tensor:
        return self.joined(image, row, code)


class ByKeywords(Parts):
    def forward(self, **parts: Tensor) -> Tensor:
        return self.joined(**parts)


class AsDict(Parts):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.joined(**batch)


class Other(Parts):
    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.joined(image, table, table[:, 0].long())


@pytest.mark.parametrize("make", [ByName, ByKeywords, AsDict])
def test_named_inputs_are_passed_by_name_or_as_one_dict(make: Any) -> None:
    model = ModuleModel(make, NAMED, 2, "named")
    assert model.layout.head == ("last.weight", "last.bias")
    theta, module = model.init(torch.Generator().manual_seed(1)), make()
    module.load_state_dict(model.layout.split(theta))
    x = {"image": torch.randn(4, 3, 8, 8), "row": torch.randn(4, 4), "code": torch.arange(4)}
    w = model.layout.split(theta)
    assert torch.equal(model.forward(w, x), module.joined(**x))
    assert model.features(w, x).shape == (4, 8)
    model.check_steps(clients=2, twice=True)


def test_named_inputs_unknown_to_forward_are_rejected() -> None:
    with refused("Other.forward", "image", "table", "image, row, code"):
        ModuleModel(Other, NAMED, 2, "named")


def test_integer_inputs_cover_the_range_of_the_data() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(10, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.last(self.table(x).mean(1))
            return logits

    model = ModuleModel(Looks, {"": SingleInput("integers", (6,), 10)}, 2, "integers")
    assert model.logits(model.init(torch.Generator()), torch.randint(10, (4, 6))).shape == (4, 2)
    with refused("'table'", "Embedding", "IndexError"):
        ModuleModel(Looks, {"": SingleInput("integers", (6,), 11)}, 2, "integers")


def test_columns_of_codes_may_have_separate_embeddings() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.last = nn.ModuleList(nn.Embedding(n, 3) for n in (2, 7, 4)), nn.Linear(9, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.last(torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], 1))
            return logits

    model = ModuleModel(Columns, {"": SingleInput("integers", (3,), 7)}, 2, "integers")
    codes = torch.stack([torch.arange(8) % n for n in (2, 7, 4)], 1)
    assert model.logits(model.init(torch.Generator()), codes).shape == (8, 2)
    assert model.layout.head == ("last.weight", "last.bias")
    with refused("'tables.0'", "Embedding", "IndexError"):  # no column has the largest code
        ModuleModel(Columns, {"": SingleInput("integers", (3,), 8)}, 2, "integers")


def test_an_embedding_too_small_for_a_column_is_detected_in_any_trial() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Embedding(12, 2), nn.Embedding(6, 2), nn.Linear(8, 3)

        def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
            found: Tensor = self.last(torch.cat([numbers, self.first(codes[:, 0]), self.second(codes[:, 1])], 1))
            return found

    specs = {"codes": SingleInput("integers", (2,), 12), "numbers": SingleInput("features", (4,))}
    first, other = (trial_inputs(specs, seed)["codes"][:, 1] for seed in (0, 1))
    assert first.max() < 6 <= other.max()
    assert ModuleModel(Two, specs, 3, "named").layout.head == ("last.weight", "last.bias")


# --- the head ---------------------------------------------------------------------------------------------------------


class Followed(nn.Module):
    """Two layers, and a function of the logits and the inputs."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(()))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.after(self, self.last(self.first(x).relu()), x)
        return logits


def test_functions_without_parameters_may_follow_the_head() -> None:
    def make() -> nn.Module:
        return Followed(lambda self, z, x: z.log_softmax(1))

    assert model_of(make).layout.head == ()
    model = model_of(make, head="last")
    assert model.layout.head == ("last.weight", "last.bias")
    assert model.has_features
    assert not model.layout.head_is_linear
    FEDPER.check_model(FEDPER.settings(), model)
    with refused("fedrod", "'last'", "logits"):
        FEDROD.check_model(FEDROD.settings(), model)
    for after in (lambda self, z, x: z * self.scale, lambda self, z, x: z + x[:, :2]):
        with refused("model.head", "'last'", "alone"):
            model_of(lambda after=after: Followed(after), head="last")
    with refused("model.head", "'first'", "alone"):
        model_of(make, head="first")


# --- optional steps of a run ------------------------------------------------------------------------------------------


class Flash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None, None, :].expand(-1, 1, 4, -1)
        logits: Tensor = self.last(
            F.scaled_dot_product_attention(self.last.weight[None, None].expand(len(x), 1, -1, -1), h, h)[:, 0, 0]
        )
        return logits


class Rounds(Small):
    """Module that mixes types under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.zeros(len(x), 2)
        logits[torch.arange(len(x))] = super().forward(x)
        return logits


def test_optional_steps_of_a_run_are_checked_before_it_starts() -> None:
    model = model_of(Flash)
    model.check_steps()
    exact, first = (PER_FEDAVG.settings(hessian=kind) for kind in ("exact", "none"))
    assert PER_FEDAVG.differentiates_twice(exact)
    assert not PER_FEDAVG.differentiates_twice(first)
    with refused("model.factory", "differentiated", "first-order"):
        model.check_steps(twice=True)


def test_an_unsupported_second_order_run_is_rejected_before_round_1(tmp_path: Path) -> None:
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    keys = {"data": data, "report": False, "progress": False, "out": tmp_path / "run"}
    exact = {"name": "per-fedavg", "hessian": "exact", "local": {"steps": 1}}
    with refused("model.factory", "differentiated"):
        fedloom.run(TASK, model=Flash(), algorithm=exact, **keys)
    assert not (tmp_path / "run").exists()
    with refused("Rounds", "RuntimeError", "model.precision", "float32"):
        fedloom.run(TASK, model=Rounds(), model__precision="bfloat16", **keys)
