"""Losses of modules, and of batches of tokens, compared with the loop that their author would write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import refusing
from federations import group
from torch import Tensor, nn

import fedloom
from fedloom.algorithms.client import LocalTrainer, train
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.algorithms.pfedbayes import likelihood_of
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel, bfloat16, masked
from fedloom.models.module import ModuleModel
from fedloom.tasks.next_token import NextToken
from fedloom.tasks.regression import Regression

WEIGHTS = torch.tensor([1.0, 2.0, 10.0])


class Layer(nn.Module):
    """Linear layer with a criterion as its loss."""

    def __init__(self, outputs: int, criterion: nn.Module) -> None:
        super().__init__()
        self.last, self.loss = nn.Linear(4, outputs), criterion

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x).squeeze(-1)
        return found


class Autoencoder(nn.Module):
    """Variational autoencoder that returns all that its loss needs, and in evaluation mode less."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Any:
        mu, log_variance = self.encoder(x).chunk(2, 1)
        if not self.training:
            return self.decoder(mu)
        return {"reconstruction": self.decoder(mu), "latent": (mu, log_variance)}

    def loss(self, found: Any, y: Tensor) -> Tensor:
        mu, log_variance = found["latent"]
        divergence = -0.5 * (1 + log_variance - mu.square() - log_variance.exp()).sum(1)
        return (found["reconstruction"] - y).square().sum(1) + divergence


class Events(Layer):
    """Number whose loss reads the target as an index, a count of 0 to 7."""

    def __init__(self) -> None:
        super().__init__(8, nn.Identity())
        del self.loss

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x)
        return found if self.training else found.argmax(1).float()

    def loss(self, z: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(z, y.long(), reduction="none")


class Rates(Layer):
    """Positive numbers."""

    def __init__(self) -> None:
        super().__init__(1, nn.PoissonNLLLoss(log_input=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(super().forward(x))


class LightningModule(nn.Module):
    """Base class with the methods of Lightning's that a training step uses; it logs only under a trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError

    def log(self, name: str, value: Any) -> None:
        raise RuntimeError("no trainer")


def lightning(base: Any) -> nn.Module:
    class Lit(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.criterion = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.CrossEntropyLoss(WEIGHTS)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.body(x)
            return found

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = self.criterion(self(x), y)
            self.log("loss", loss)
            return {"loss": loss}

    made: nn.Module = Lit()
    return made


def classes(x: Tensor) -> Tensor:
    return torch.arange(len(x)) % 3


def counts(x: Tensor) -> Tensor:
    return (x[:, 0].exp() * 2).round().clamp(max=7)


def itself(x: Tensor) -> Tensor:
    return 3 * x + 5


Given = tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], dict[str, Any]]

CASES: dict[str, Given] = {
    "class weights": (lambda: Layer(3, nn.CrossEntropyLoss(weight=WEIGHTS)), classes, lambda z: z.softmax(1), {}),
    "weights, smoothing": (
        lambda: Layer(3, nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=0, label_smoothing=0.1)),
        classes,
        lambda z: z.softmax(1),
        {},
    ),
    "rates": (Rates, counts, lambda z: z, {"task": "regression"}),
    "all outputs": (Autoencoder, itself, lambda z: z, {"task": "regression"}),
    "a training step": (lambda: lightning(LightningModule), classes, lambda z: z.softmax(1), {}),
    "a training step of Lightning": (
        lambda: lightning(pytest.importorskip("lightning").LightningModule),
        classes,
        lambda z: z.softmax(1),
        {},
    ),
    "events": (Events, counts, lambda z: z, {"task": "regression"}),
}


def features(seed: int, n: int = 18) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_loop_of_the_modules_author(tmp_path: Path, case: str) -> None:
    make, targets, finish, keys = CASES[case]
    torch.manual_seed(0)
    net = make()
    arrays = {name: (features(i, 30).numpy(), targets(features(i, 30)).numpy()) for i, name in enumerate("ab")}
    data = fedloom.Federated.from_arrays(arrays, held_out_fraction=0, root=tmp_path / "data", **keys)
    opened = data.open(seed=1)
    sets = [opened.tensors(client.id) for client in opened.manifest.clients]
    y = sets[0]["train_y"]
    experiment = {
        "name": "criteria",
        "data": data,
        "algorithm": {"name": "local", "local": {"steps": 6, "batch_size": len(y), "lr": 0.05, "momentum": 0}},
        "federation": {"rounds": 0, "clients_per_round": 2},
        "evaluation": {"every": 1},
        "runtime": {"workers": 0},
    }
    run = fedloom.run(experiment, model=copy.deepcopy(net), out=tmp_path / "run", report=False, progress=False)
    pool = torch.cat([each["train_x"] for each in sets])
    x, test = ((sets[0][key] - pool.mean(0)) / pool.std(0, correction=0) for key in ("train_x", "test_x"))
    loop = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        loss = loop.criterion(loop(x), y) if hasattr(loop, "criterion") else loop.loss(loop(x), y)
        loss.mean().backward()
        optimizer.step()
    with torch.no_grad():
        expected = finish(loop.eval()(test))
    found = run.models("a")(sets[0]["test_x"]).reshape(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- groups, padding, parts of methods --------------------------------------------------------------------------------


def clients(*sizes: int) -> list[ClientData]:
    found = []
    for i, n in enumerate(sizes):
        x = features(i, n)
        found.append(ClientData(f"c{i}", *[Split(x, classes(x))] * 3, 3))
    return found


def weighted() -> ModuleModel:
    return ModuleModel(lambda: Layer(3, nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1)), (4,), 3, "features")


@pytest.mark.parametrize("sizes", [(7, 12), (12, 7, 5)])
def test_a_group_with_padded_batches_equals_each_client_alone(sizes: tuple[int, ...]) -> None:
    m, data = weighted(), clients(*sizes)
    theta, s = m.init(torch.Generator().manual_seed(1)).expand(len(sizes), -1), LocalSGD(epochs=3, batch_size=8, lr=0.3)
    alone = torch.cat([train(m, group([c]), theta[:1], s).theta for c in data])
    torch.testing.assert_close(train(m, group(data), theta, s).theta, alone)
    one = LocalTrainer(m, group(data[:1]))
    loss = one.measured(one.parameters(theta[:1]), *one.everything())
    z, y = m.logits(theta[0], data[0].train.x), classes(data[0].train.x)
    torch.testing.assert_close(loss[0], F.cross_entropy(z, y, WEIGHTS, ignore_index=1))


def test_a_batch_without_targets_has_a_loss_of_zero() -> None:
    m = weighted()
    weights = m.batch_weights(torch.ones(4, dtype=torch.int64), torch.full((4,), 0.25))
    assert torch.equal(weights, torch.zeros(4))


def test_likelihoods_count_each_example() -> None:
    view, weight = likelihood_of(weighted()), torch.full((3,), 0.25)
    assert torch.equal(view.in_training().batch_weights(torch.tensor([0, 1, 2]), weight), weight)


class Tokens(nn.Module):
    """Next token from this one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(x.long())
        return found


def sequences(*lengths: int) -> Split:
    random = torch.Generator().manual_seed(3)
    x = torch.randint(5, (len(lengths), 6), generator=random, dtype=torch.uint8)
    y = torch.randint(5, (len(lengths), 6), generator=random)
    return Split(x, y.masked_fill(torch.arange(6) >= torch.tensor(lengths)[:, None], -100))


@pytest.mark.parametrize("mean_over", ["tokens", "sequences"])
def test_the_loss_of_next_tokens_is_the_mean_over_the_batch(mean_over: Any) -> None:
    task = NextToken(mean_over=mean_over)
    m: FlatModel = ModuleModel(Tokens, (6,), 5, "tokens", task=task, target_shape=(6,))
    splits = [sequences(1, 6, 2, 0), sequences(6, 6, 1)]
    data = [ClientData(f"c{i}", split, split, split, 0) for i, split in enumerate(splits)]
    theta = torch.stack([m.init(torch.Generator().manual_seed(i)) for i in range(2)])
    together = LocalTrainer(m, group(data))
    measured = together.measured(together.parameters(theta), *together.everything())
    for i, (client, split) in enumerate(zip(data, splits, strict=True)):
        z = m.logits(theta[i], split.x)
        each = F.cross_entropy(z.transpose(1, 2), split.y, reduction="none").sum(1)
        counted = (split.y >= 0).sum(1)
        expected = each.sum() / counted.sum() if mean_over == "tokens" else (each / counted.clamp(min=1)).mean()
        torch.testing.assert_close(measured[i], expected)
        alone = LocalTrainer(m, group([client]))
        _, loss = alone.gradient_at(theta[i : i + 1], *alone.everything())
        torch.testing.assert_close(loss[0], expected)


def test_sequences_of_one_length_keep_their_weights_to_the_bit() -> None:
    weight = torch.full((2, 7), 1 / 7)
    weight[1, 5:] = 0
    assert torch.equal(NextToken().batch_weights(torch.ones(2, 7, 80, dtype=torch.int64), weight), weight)


# --- losses of all outputs --------------------------------------------------------------------------------------------


def autoencoder(wrap: Callable[[FlatModel], FlatModel] = lambda model: model) -> FlatModel:
    return wrap(ModuleModel(Autoencoder, (4,), 4, "features", task=Regression(), target_shape=(4,)))


@pytest.mark.parametrize("wrap", [lambda model: model, bfloat16])
def test_a_loss_gets_all_that_forward_returns(wrap: Any) -> None:
    m, net = autoencoder(wrap), Autoencoder()
    theta, x = m.init(torch.Generator().manual_seed(1)), features(0)
    net.load_state_dict(m.layout.split(theta))
    near = {"rtol": 0.02, "atol": 0.02} if wrap is bfloat16 else {}
    found = m.in_training().loss(m.layout.leaves(theta), x, itself(x))
    torch.testing.assert_close(found, net.loss(net(x), itself(x)), **near)
    torch.testing.assert_close(m.logits(theta, x), net.eval()(x), **near)
    assert m.raw_targets
    m.check_steps(clients=2, examples=True)


def test_outputs_that_a_loss_needs_cannot_be_masked() -> None:
    with refusing(ExperimentError, "mask_absent"):
        masked(autoencoder().in_training(), torch.tensor([True, False, False, False]))


def test_errors_of_torch_are_those_of_the_task() -> None:
    """A criterion of the difference gets standardized numbers, as the task's own error does, whatever the axes."""
    net = Layer(1, nn.HuberLoss(delta=0.5))
    net.forward = lambda x: net.last(x)  # type: ignore[method-assign]  # [b, 1]
    m = ModuleModel(lambda: net, (4,), 1, "features", task=Regression(error="huber", delta=0.5), target_shape=())
    assert not m.raw_targets
    theta, x = m.init(torch.Generator().manual_seed(1)), features(0)
    y = counts(x)
    torch.testing.assert_close(m.loss(m.layout.leaves(theta), x, y), m.task.loss(m.logits(theta, x), y))


def test_a_training_step_without_a_loss_of_the_batch_is_rejected() -> None:
    net = lightning(LightningModule)
    type(net).training_step = lambda self, batch: None
    with refusing(ExperimentError, "training_step"):
        ModuleModel(lambda: net, (4,), 3, "features")


def test_an_attribute_loss_that_is_no_function_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(4, 3)
    net.loss = "mse"
    with caplog.at_level("WARNING", "fedloom"):
        m = ModuleModel(lambda: net, (4,), 3, "features")
    assert not m.own_loss
    assert "'mse'" in caplog.text
