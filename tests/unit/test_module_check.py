"""Training and evaluation mode of a module, and modules rejected before a run, with the layer and the fix."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_local_data import TASK, people
from test_module_model import Net, of_clients, refused
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fedloom
from fedloom.algorithms.client import LocalTrainer
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedper import FEDPER
from fedloom.algorithms.fedrod import FEDROD, TwoHeads
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.models.flat import bfloat16, masked
from fedloom.models.module import ModuleModel, remember
from fedloom.models.module_facts import identity_of
from fedloom.models.predictors import ModelPredictor


class Small(nn.Module):
    """Module of three inputs and two classes; tests change a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(x)
        return logits


class Modes(nn.Module):
    """Module that subtracts a margin from the first logit and doubles its features, only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * (2 if self.training else 1)
        logits: Tensor = self.last(h)
        return logits


def model_of(make: Any, shape: tuple[int, ...] = (3,), **keys: Any) -> ModuleModel:
    return ModuleModel(make, shape, 2, "pixels" if len(shape) == 3 else "features", **keys)


def small_group(*sizes: int) -> ClientGroup:
    generator = torch.Generator().manual_seed(3)
    clients = []
    for i, n in enumerate(sizes):
        split = Split(torch.randn(n, 3, generator=generator), torch.arange(n) % 2)
        clients.append(ClientData(f"c{i}", split, split, split, 2))
    return of_clients(clients)


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda model: model, bfloat16])
def test_a_model_equals_its_module_in_evaluation_and_in_training_mode(wrap: Any) -> None:
    model = wrap(model_of(Modes))
    theta = model.init(torch.Generator().manual_seed(1))
    w, x, y = model.layout.leaves(theta), torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    training = model.in_training()
    assert training.in_training().layout == model.layout
    modes = Modes()
    modes.load_state_dict(model.layout.split(theta))
    near = {"rtol": 0.02, "atol": 0.02} if wrap is bfloat16 else {}
    for each, trains in ((model, False), (training, True), (training.in_training(), True)):
        module = modes.train(trains)
        torch.testing.assert_close(each.logits(theta, x), module(x), check_dtype=True, **near)
        expected = F.cross_entropy(module(x), y, reduction="none")
        torch.testing.assert_close(each.loss(w, x, y), expected, **near)
    torch.testing.assert_close(training.features(w, x), 2 * model.features(w, x), **near)
    hidden = masked(training, torch.tensor([True, False]))
    assert torch.equal(hidden.in_training().forward(w, x)[:, 1], training.forward(w, x)[:, 1])


@pytest.mark.parametrize("sizes", [(6,), (6, 9)])
@pytest.mark.parametrize("mask_absent", [False, True])
def test_gradients_use_training_mode_and_losses_evaluation_mode(sizes: tuple[int, ...], mask_absent: bool) -> None:
    model, group = model_of(Modes), small_group(*sizes)
    theta = torch.stack([model.init(torch.Generator().manual_seed(i)) for i in range(len(sizes))])
    local = LocalTrainer(model, group, mask_absent=mask_absent)
    pieces = local.everything()
    slope, loss = local.gradient_at(theta, *pieces)
    measured = local.measured(local.parameters(theta), *pieces)
    assert not measured.requires_grad
    for i, client in enumerate(group.clients):
        module = Modes()
        module.load_state_dict(model.layout.split(theta[i]))
        trained = F.cross_entropy(module.train()(client.train.x), client.train.y)
        torch.testing.assert_close(loss[i], trained)
        torch.testing.assert_close(local.value(local.parameters(theta), *pieces)[i], trained)
        torch.testing.assert_close(measured[i], F.cross_entropy(module.eval()(client.train.x), client.train.y))
        named = dict(module.named_parameters())
        expected = torch.autograd.grad(trained, [named[name] for name, _ in model.layout.entries])
        torch.testing.assert_close(slope[i], torch.cat([part.flatten() for part in expected]))


def test_modes_of_threads_are_independent() -> None:
    model = model_of(Modes)
    theta, x = model.init(torch.Generator().manual_seed(1)), torch.randn(4, 3)
    each = [model, model.in_training()]
    expected = [m.logits(theta, x) for m in each]
    assert not torch.equal(*expected)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: each[i % 2].logits(theta, x), range(40)))
    assert all(torch.equal(logits, expected[i % 2]) for i, logits in enumerate(found))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["fedavg", "q-fedavg", "knn-per", "fedrod", "pfedgp", "drfa", "comfedl", "ditto"])
def test_a_run_trains_in_training_mode_and_evaluates_and_saves_in_evaluation_mode(method: str, tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    class Noted(Modes):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    settings: dict[str, Any] = {
        "pfedgp": {"steps": 1, "gibbs_steps": 1, "chains": 2},
        "knn-per": {"local": {"steps": 1}, "neighbours": [1]},
        "comfedl": {"objective": "robust", "local": {"steps": 1}},
    }
    keys = {"data": data, "algorithm": {"name": method, **settings.get(method, {"local": {"steps": 1}})}}
    run = fedloom.run(TASK, model=Noted(), out=tmp_path / "run", report=False, progress=False, **keys)
    assert run.summary["seen"]["clients"] > 0
    assert {training for training, gradients in seen if not gradients} == {False}
    assert {training for training, gradients in seen if gradients} == {True}
    model, x = run.models("ann"), torch.randn(5, 3)
    seen.clear()
    expected = model(x)
    assert {training for training, _ in seen} == {False}
    if method != "pfedgp":
        model.save(tmp_path / "ann.pt2")
        program = torch.export.load(tmp_path / "ann.pt2").module()
        torch.testing.assert_close(program(x), expected)


# --- the head ---------------------------------------------------------------------------------------------------------


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), parametrizations.weight_norm(nn.Linear(4, 2)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(x).relu())
        return logits


def test_all_parameters_below_the_last_layer_are_the_head(tmp_path: Path) -> None:
    layout = model_of(weight_normed).layout
    place = "2.parametrizations.weight.original"
    assert layout.head == ("2.bias", f"{place}0", f"{place}1")
    assert layout.body == ("0.weight", "0.bias")
    assert layout.body_size == 3 * 4 + 4
    assert not layout.head_is_linear
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    keys = {"data": data, "algorithm": {"name": "fedper", "local": {"steps": 1}}}
    run = fedloom.run(TASK, model=weight_normed(), out=tmp_path / "run", report=False, progress=False, **keys)
    assert run.summary["communication"]["payload_up"] % (layout.body_size * 4 + 16) == 0
    heads = [run.models(name).state_dict()[f"{place}1"] for name in ("ann", "bob")]
    assert not torch.equal(*heads)


def test_a_parametrized_or_shared_head_is_rejected_by_body_and_head_methods() -> None:
    with refused("fedrod", "'2'", "parametrizations.weight.original0"):
        FEDROD.check_model(FEDROD.settings(), model_of(weight_normed))
    FEDROD.check_model(FEDROD.settings(), model_of(Modes))
    tied = ModuleModel(Tied, (2,), 2, "features")
    assert tied.has_features
    assert tied.layout.head == ()
    with refused("model.name", "fedper", "last linear layer", "outputs"):
        FEDPER.check_model(FEDPER.settings(), tied)
    with refused("model.head", "'last'", "shares"):
        ModuleModel(Tied, (2,), 2, "features", head="last")


# --- random draws and states ------------------------------------------------------------------------------------------


NUMBERS = np.random.default_rng(0)
GENERATOR = torch.Generator().manual_seed(0)


class Draws(Small):
    """Module that changes its outputs once in 10,000 calls."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits * 2 if self.training and self.draw() < 1e-4 else logits


class Inner(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.body, self.drop = nn.Linear(3, 3), Draws(draw)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.drop(self.body(x))
        return logits


@pytest.mark.parametrize(
    ("draw", "library"),
    [
        (lambda: torch.rand(()), "torch"),
        (random.random, "python"),
        (lambda: np.random.rand(), "numpy"),  # noqa: NPY002
    ],
    ids=["torch", "python", "numpy"],
)
def test_random_draws_are_noted_in_training_and_rejected_in_evaluation(draw: Any, library: str) -> None:
    states = torch.get_rng_state(), random.getstate()
    model = model_of(lambda: Inner(draw))
    assert model.draws == model.in_training().draws == (library,)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()

    class Always(Inner):
        def train(self, mode: bool = True) -> Always:
            return super().train(True)

    with refused("model.factory", "'drop'", "Draws", "evaluation", library, "self.training"):
        model_of(lambda: Always(draw))
    assert model_of(Small).draws == ()


@pytest.mark.usefixtures("unfrozen")  # frozen objects are not searched
@pytest.mark.parametrize(
    "draw", [lambda: torch.rand((), generator=GENERATOR), lambda: NUMBERS.random()], ids=["own", "numpy's own"]
)
def test_a_draw_that_a_run_cannot_seed_is_rejected_even_if_it_rarely_matters(draw: Any) -> None:
    with refused("model.factory", "'drop'", "Draws", "generator", "global"):
        model_of(lambda: Inner(draw))


class Counts(Small):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls > 1000 else 1)


class Owns(Small):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.numbers.random() < 1e-4 else 1)


LATER: dict[str, np.random.Generator] = {}


def draw_later() -> float:
    """Module that draws from a generator created by the first call."""
    return LATER.setdefault("made", np.random.default_rng(0)).random()


def test_a_generator_created_in_forward_is_detected() -> None:
    LATER.clear()
    with refused("model.factory", "Draws", "random", "generator"):
        model_of(lambda: Inner(draw_later))


class Remembers(Small):
    """Module that adds the preceding rows of the batch."""

    mean: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x) + self.mean
        self.mean = x.detach().mean()
        return logits


class FirstSeen(Small):
    """Module that centres inputs by the first inputs of this process."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "centre"):
            self.centre = x.detach().mean(0)
        return super().forward(x - self.centre)


class ByTheBatch(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x - x.mean(0))


class Caches(Small):
    """Module that keeps a result of a call that no other call uses."""

    seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return self.seen


class Undefined(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / x.new_zeros(1) * 0


class Squeezes(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (Counts, ("Counts", "calls", "evaluation.batch_size")),
        (Owns, ("Owns", "numbers")),
        (Remembers, ("Remembers", "same inputs", "keep")),
        (FirstSeen, ("FirstSeen", "training mode", "other inputs")),
        (ByTheBatch, ("ByTheBatch", "evaluation mode", "evaluation.batch_size")),
        (Undefined, ("Undefined", "NaN")),
    ],
)
def test_changing_state_and_mixing_examples_are_rejected(make: Any, facts: tuple[str, ...]) -> None:
    with refused("model.factory", *facts):
        model_of(make)


def test_a_dropped_batch_axis_is_restored() -> None:
    model, plain = model_of(Squeezes), model_of(Small)
    theta, x = model.init(torch.Generator().manual_seed(1)), torch.randn(4, 3)
    for rows in (x, x[:1]):
        assert torch.equal(model.logits(theta, rows), plain.logits(theta, rows))
    y = torch.tensor([1])
    assert torch.equal(*(m.loss(m.layout.leaves(theta), x[:1], y) for m in (model.in_training(), plain)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_legacy_weight_norm_equals_the_parametrization() -> None:
    def old() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), torch.nn.utils.weight_norm(nn.Linear(4, 2)))

    model, new = model_of(old), model_of(weight_normed)
    theta, x, y = model.init(torch.Generator().manual_seed(1)), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    old_to_new = {
        "2.weight_g": "2.parametrizations.weight.original0",
        "2.weight_v": "2.parametrizations.weight.original1",
    }
    named = {old_to_new.get(name, name): t.clone().requires_grad_() for name, t in model.layout.split(theta).items()}
    w = model.layout.leaves(theta, requires_grad=True)
    losses = model.in_training().loss(w, x, y), new.in_training().loss(named, x, y)
    torch.testing.assert_close(*losses)
    slopes = torch.autograd.grad(losses[0].sum(), list(w.values()))
    expected = torch.autograd.grad(losses[1].sum(), [named[old_to_new.get(name, name)] for name in w])
    torch.testing.assert_close(slopes, expected)
    module = old()
    module(x).sum().backward()  # leaves a weight with autograd history
    assert remember(module).startswith("memory:")


@pytest.mark.slow
def test_compiled_modules_are_unwrapped_and_criteria_give_per_example_losses() -> None:
    class Criterion(Small):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

    module = Criterion()
    assert remember(torch.compile(module)) == remember(module)  # type: ignore[arg-type]
    assert module.loss.reduction == "mean"
    model, plain = model_of(Criterion), model_of(Small)
    theta, x, y = model.init(torch.Generator().manual_seed(1)), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    assert torch.equal(*(m.loss(m.layout.leaves(theta), x, y) for m in (model, plain)))


def test_changes_that_preserve_the_output_are_accepted() -> None:
    model_of(Caches)
    model_of(lambda: nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1)))  # softmax of it is the same


# --- a training step --------------------------------------------------------------------------------------------------


class Views(nn.Module):
    """The network of PyTorch's tutorial, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 3, 3), nn.Linear(3 * 9, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(F.max_pool2d(F.relu(self.conv(x)), 2).view(-1, 3 * 9))
        return logits


def test_kernels_are_channels_last_if_the_module_supports_it() -> None:
    model, x = model_of(Views, (1, 8, 8)), torch.randn(5, 1, 8, 8)
    assert not model.layout.channels_last
    theta = model.init(torch.Generator().manual_seed(1))
    assert all(leaf.is_contiguous() for leaf in model.layout.leaves(theta).values())
    module = Views()
    module.load_state_dict(model.layout.split(theta))
    assert torch.equal(ModelPredictor(model, theta).log_probabilities(x), module(x).log_softmax(1))
    two = TwoHeads(model)
    assert not two.layout.channels_last
    net = ModuleModel(Net, (1, 28, 28), 10, "pixels")
    assert net.layout.channels_last
    leaf = net.layout.leaves(net.init(torch.Generator()))["conv2.weight"]
    assert leaf.is_contiguous(memory_format=torch.channels_last)


class Unused(Small):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(3, 4)


@pytest.mark.parametrize("sizes", [(6,), (6, 9)])
def test_an_unused_parameter_has_a_zero_gradient(sizes: tuple[int, ...]) -> None:
    model, local = model_of(Unused), LocalTrainer(model_of(Unused), small_group(*sizes))
    theta = torch.stack([model.init(torch.Generator().manual_seed(i)) for i in range(len(sizes))])
    slope, _ = local.gradient_at(theta, *local.everything())
    for row in slope:
        parts = model.layout.split(row)
        assert not parts["pooler.weight"].any()
        assert not parts["pooler.bias"].any()
        assert parts["last.weight"].any()


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "per-fedavg", "local": {"steps": 2, "lambda_theta": 0.1}, "hessian": "exact"},
        {"name": "pfedgp", "steps": 1, "gibbs_steps": 1, "chains": 2},
        {"name": "pfedbayes", "steps": 1},
    ],
    ids=lambda algorithm: str(algorithm["name"]),
)
def test_methods_train_a_module_with_an_unused_layer(algorithm: dict[str, Any], tmp_path: Path) -> None:
    class Deep(Modes):
        def __init__(self) -> None:
            super().__init__()
            self.pooler = nn.Linear(3, 4)

    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    run = fedloom.run(
        TASK, data=data, model=Deep(), algorithm=algorithm, out=tmp_path / "run", report=False, progress=False
    )
    assert run.summary["seen"]["clients"] == len(people())
    assert run.models("ann")(torch.randn(2, 3)).shape == (2, 2)


class Penalized(Small):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none") + self.last.weight.square().sum()


def test_a_custom_loss_may_use_parameters() -> None:
    model = model_of(Penalized)
    theta = model.init(torch.Generator().manual_seed(1))
    x, y, module = torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), Penalized()
    module.load_state_dict(model.layout.split(theta))
    expected = module.loss(module(x), y)
    w = model.layout.leaves(theta, requires_grad=True)
    found = model.in_training().loss(w, x, y)
    torch.testing.assert_close(found, expected)
    slopes = torch.autograd.grad(found.sum(), list(w.values()))
    torch.testing.assert_close(slopes, torch.autograd.grad(expected.sum(), list(module.parameters())))


class Listed(Small):
    """Module that reads its weight from a place that training does not update."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.last.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0], self.last.bias)


class Checkpointed(Modes):
    """Module that recomputes its first layer in the backward pass, when its parameters have changed."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=False))
        return logits


class Detached(Small):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class InPlace(Small):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x).sigmoid()
        h += 1
        return h


class FailsInTraining(Modes):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        logits: Tensor = self.last(h[:, :3] if self.training else h)
        return logits


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (Listed, ("'last'", "Linear", "last.weight", "list")),
        (Checkpointed, ("'first'", "first.weight", "checkpoint")),
        (Detached, ("Detached", "no parameter", "no_grad")),
        (InPlace, ("InPlace", "training step", "RuntimeError")),
        (FailsInTraining, ("'last'", "Linear", "training", "RuntimeError", "test_module_check.py", "line")),
    ],
)
def test_a_step_that_fails_or_differs_from_the_modules_is_rejected(make: Any, facts: tuple[str, ...]) -> None:
    with refused("model.factory", *facts):
        model_of(make)


# --- other modules ----------------------------------------------------------------------------------------------------


class Locked(Small):
    def __init__(self) -> None:
        super().__init__()
        self.guard = threading.Lock()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 2))


class Computed(Small):
    """Module that computes a weight from parameters once."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = 2 * next(self.parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (Locked, ("Locked", "guard", "lock")),
        (Computed, ("Computed", "doubled", "parametrizations")),
        (lambda: torch.jit.script(nn.Linear(3, 2)), ("TorchScript",)),
        (lambda: torch.jit.trace(nn.Linear(3, 2), torch.zeros(2, 3)), ("TorchScript",)),
        (on_meta, ("'0'", "Linear", "weight", "meta", "CPU")),
    ],
)
def test_modules_without_values_or_copies_are_rejected(make: Any, facts: tuple[str, ...]) -> None:
    for take in (model_of, lambda make: remember(make())):
        with refused("model.factory", *facts):
            take(make)


# --- identity ---------------------------------------------------------------------------------------------------------


class Counted(nn.Linear):
    calls = 0
    power = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x**self.power)


def made(change: Callable[[nn.Linear], object] = lambda module: None) -> nn.Module:
    torch.manual_seed(0)
    module = Counted(4, 3)
    change(module)
    return module


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "value": lambda module: module.weight.data[0, 0].add_(1),
    "attribute": lambda module: setattr(module, "power", 2),
    "frozen": lambda module: module.bias.requires_grad_(False),
    "mode": lambda module: module.eval(),
    "tied": lambda module: setattr(module, "other", module.bias),
    "class": lambda module: setattr(module, "__class__", nn.Linear),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modules_are_equal_only_with_equal_code_tensors_and_attributes(change: Callable[[nn.Linear], object]) -> None:
    assert identity_of(made()) == identity_of(made()) is not None
    assert identity_of(made(change)) != identity_of(made())
    assert identity_of(made(), 3) != identity_of(made(), 2)


def test_a_reloaded_class_is_a_different_one() -> None:
    again = type("Counted", (nn.Linear,), {"__module__": __name__, "__qualname__": "Counted"})
    module, name = made(), globals()
    before, own = identity_of(module), Counted
    try:
        name["Counted"] = again
        module.__class__ = again
        assert identity_of(module) not in (None, before)
    finally:
        name["Counted"] = own


def test_modules_with_opaque_attributes_have_no_identity() -> None:
    assert identity_of(made(lambda module: setattr(module, "act", lambda x: x))) is None
    assert identity_of(made(lambda module: setattr(module, "lock", threading.Lock()))) is None


def test_a_module_is_checked_once_per_process() -> None:
    first = ModuleModel(made, (4,), 3, "features")
    calls = Counted.calls
    again = ModuleModel(made, (4,), 3, "features")
    assert Counted.calls == calls
    assert again.layout == first.layout
    with pytest.raises(ExperimentError):
        ModuleModel(made, (4,), 5, "features")  # other settings are checked again
    assert Counted.calls > calls
