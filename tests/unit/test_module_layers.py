"""Every kind of layer in a module: single clients, stacked ones, and torch's own loop agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_module_model import of_clients, refused
from torch import Tensor, nn

from fedloom.algorithms.client import LocalTrainer, train
from fedloom.algorithms.local_sgd import LocalSGD, LocalStep
from fedloom.core.draws import drawing_with
from fedloom.data.federated import ClientData, Split
from fedloom.models.module import ModuleModel

STEPS = LocalSGD(steps=3, batch_size=100, lr=0.05)
"""Steps on all examples of a client, whose order changes no loss."""

HIGH = 6
CLASSES = 2


class Classifier(nn.Module):
    """A layer with a linear layer on the mean of its outputs."""

    def __init__(self, layer: nn.Module, width: int, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.last, self.call = layer, nn.Linear(width, CLASSES), call

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) if self.call is None else self.call(self.layer, x)
        logits: Tensor = self.last(h.flatten(2).mean(2) if h.dim() > 2 else h)
        return logits


def over_time(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the first result of a layer on sequences, with the features second."""
    found: Tensor = layer(x)[0].transpose(1, 2)
    return found


def attended(layer: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = layer(x, x, x, need_weights=False)[0].transpose(1, 2)
    return found


def cells(layer: nn.Module, x: Tensor) -> Tensor:
    state: Any = None
    for t in range(x.shape[1]):
        state = layer(x[:, t], state)
    found: Tensor = state[0] if isinstance(state, tuple) else state
    return found


SEQUENCE, SIGNAL, IMAGE, VOLUME = (5, 4), (4, 9), (4, 6, 6), (2, 4, 4, 4)

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: Classifier(nn.Linear(4, 3), 3), (4,)),
    "Bilinear": (lambda: Classifier(nn.Bilinear(4, 4, 3), 3, lambda layer, x: layer(x, x.sin())), (4,)),
    "Conv1d": (lambda: Classifier(nn.Conv1d(4, 3, 3), 3), SIGNAL),
    "Conv2d": (lambda: Classifier(nn.Conv2d(4, 3, 3), 3), IMAGE),
    "Conv2d in groups": (lambda: Classifier(nn.Conv2d(4, 4, 3, groups=4, padding="same"), 4), IMAGE),
    "Conv3d": (lambda: Classifier(nn.Conv3d(2, 3, 3), 3), VOLUME),
    "ConvTranspose1d": (lambda: Classifier(nn.ConvTranspose1d(4, 3, 3, stride=2), 3), SIGNAL),
    "ConvTranspose2d": (lambda: Classifier(nn.ConvTranspose2d(4, 3, 3, stride=2), 3), IMAGE),
    "ConvTranspose3d": (lambda: Classifier(nn.ConvTranspose3d(2, 3, 2), 3), VOLUME),
    "Embedding": (lambda: Classifier(nn.Embedding(HIGH, 4), 4, lambda layer, x: layer(x).transpose(1, 2)), (5,)),
    "EmbeddingBag": (lambda: Classifier(nn.EmbeddingBag(HIGH, 4), 4), (5,)),
    "GroupNorm": (lambda: Classifier(nn.Sequential(nn.GroupNorm(2, 4), nn.Tanh()), 4), SIGNAL),
    "LayerNorm": (lambda: Classifier(nn.Sequential(nn.LayerNorm((4, 9)), nn.Tanh()), 4), SIGNAL),
    "InstanceNorm1d": (lambda: Classifier(nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.Tanh()), 4), SIGNAL),
    "InstanceNorm2d": (lambda: Classifier(nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Tanh()), 4), IMAGE),
    "RMSNorm": (lambda: Classifier(nn.RMSNorm(9), 4), SIGNAL),
    "LocalResponseNorm": (lambda: Classifier(nn.LocalResponseNorm(2), 4), SIGNAL),
    "RNN": (lambda: Classifier(nn.RNN(4, 3, batch_first=True), 3, over_time), SEQUENCE),
    "LSTM": (lambda: Classifier(nn.LSTM(4, 3, batch_first=True), 3, over_time), SEQUENCE),
    "GRU": (lambda: Classifier(nn.GRU(4, 3, batch_first=True), 3, over_time), SEQUENCE),
    "RNNCell": (lambda: Classifier(nn.RNNCell(4, 3), 3, cells), SEQUENCE),
    "LSTMCell": (lambda: Classifier(nn.LSTMCell(4, 3), 3, cells), SEQUENCE),
    "GRUCell": (lambda: Classifier(nn.GRUCell(4, 3), 3, cells), SEQUENCE),
    "MultiheadAttention": (lambda: Classifier(nn.MultiheadAttention(4, 2, batch_first=True), 4, attended), SEQUENCE),
    "TransformerEncoderLayer": (
        lambda: Classifier(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            4,
            lambda layer, x: layer(x).transpose(1, 2),
        ),
        SEQUENCE,
    ),
    "PReLU": (lambda: Classifier(nn.PReLU(4), 4), SIGNAL),
    "MaxPool1d": (lambda: Classifier(nn.Sequential(nn.Conv1d(4, 3, 3), nn.MaxPool1d(2)), 3), SIGNAL),
    "MaxPool2d": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 3, 3), nn.MaxPool2d(2)), 3), IMAGE),
    "MaxPool3d": (lambda: Classifier(nn.Sequential(nn.Conv3d(2, 3, 3), nn.MaxPool3d(2)), 3), VOLUME),
    "AvgPool2d": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 3, 3), nn.AvgPool2d(2)), 3), IMAGE),
    "AdaptiveAvgPool2d": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1)), 3), IMAGE),
    "AdaptiveMaxPool2d": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 3, 3), nn.AdaptiveMaxPool2d(1)), 3), IMAGE),
    "LPPool2d": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 3, 3), nn.Sigmoid(), nn.LPPool2d(2, 2)), 3), IMAGE),
    "ReflectionPad2d": (lambda: Classifier(nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(4, 3, 3)), 3), IMAGE),
    "ReplicationPad2d": (lambda: Classifier(nn.Sequential(nn.ReplicationPad2d(1), nn.Conv2d(4, 3, 3)), 3), IMAGE),
    "CircularPad1d": (lambda: Classifier(nn.Sequential(nn.CircularPad1d(1), nn.Conv1d(4, 3, 3)), 3), SIGNAL),
    "ZeroPad2d": (lambda: Classifier(nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 3, 3)), 3), IMAGE),
    "Upsample": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 3, 3), nn.Upsample(scale_factor=2)), 3), IMAGE),
    "PixelShuffle": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)), 2), IMAGE),
    "Unfold": (lambda: Classifier(nn.Unfold(3), 36), IMAGE),
    "Softmax and activations": (
        lambda: Classifier(nn.Sequential(nn.Linear(9, 9), nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softmax(-1)), 4),
        SIGNAL,
    ),
    "weight normalization": (lambda: Classifier(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), 3), (4,)),
}

ALONE = {"RNN", "LSTM", "GRU", "LSTMCell"}
"""Layers that torch cannot vectorize over clients."""


def is_integer(kind: str) -> bool:
    return kind.startswith("Embedding")


def clients(kind: str, shape: tuple[int, ...]) -> list[ClientData]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for i, n in enumerate((6, 9)):
        x = torch.randn(n, *shape, generator=generator)
        if is_integer(kind):
            x = torch.randint(HIGH, (n, *shape), generator=generator)
        split = Split(x, torch.arange(n) % CLASSES)
        found.append(ClientData(f"c{i}", split, split, split, CLASSES))
    return found


class Integers:
    kind, high = "integers", HIGH

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def model_of(kind: str) -> ModuleModel:
    make, shape = LAYERS[kind]
    described = {"": Integers(shape)} if is_integer(kind) else shape
    return ModuleModel(make, described, CLASSES, "features")


def torchs(module: nn.Module, client: ClientData) -> nn.Module:
    """Train a module by torch's own optimizer."""
    optimizer = torch.optim.SGD(module.parameters(), STEPS.lr, momentum=STEPS.momentum)
    x, y = client.train.x, client.train.y
    assert y is not None
    for _ in range(STEPS.steps or 0):
        optimizer.zero_grad()
        F.cross_entropy(module.train()(x), y).backward()
        optimizer.step()
    return module


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*(vmap|performance drop|nested).*")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_trains_as_in_torch_alone_and_together(kind: str) -> None:
    model, (make, shape) = model_of(kind), LAYERS[kind]
    theta = model.init(torch.Generator().manual_seed(1))
    module = make()
    module.load_state_dict(model.layout.split(theta))
    each = clients(kind, shape)
    alone = torch.cat([train(model, of_clients([client]), theta[None], STEPS).theta for client in each])
    expected = [dict(torchs(copy.deepcopy(module), client).named_parameters()) for client in each]
    assert not torch.allclose(alone[0], theta, atol=1e-4)
    torch.testing.assert_close(alone, torch.stack([model.layout.join(own).detach() for own in expected]))
    if kind in ALONE:
        with refused("'layer'", kind, "together", "runtime.clients_at_once", "1"):
            model.check_steps(clients=2)
        return
    model.check_steps(clients=2)
    together = train(model, of_clients(each), theta.expand(2, -1), STEPS).theta
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


DRAWING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Dropout": (lambda: Classifier(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), 8), (4,)),
    "Dropout1d": (lambda: Classifier(nn.Sequential(nn.Conv1d(4, 8, 3), nn.Dropout1d(0.5)), 8), SIGNAL),
    "Dropout2d": (lambda: Classifier(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Dropout2d(0.5)), 8), IMAGE),
    "Dropout3d": (lambda: Classifier(nn.Sequential(nn.Conv3d(2, 8, 3), nn.Dropout3d(0.5)), 8), VOLUME),
    "AlphaDropout": (lambda: Classifier(nn.Sequential(nn.Linear(4, 8), nn.AlphaDropout(0.5)), 8), (4,)),
    "FeatureAlphaDropout": (lambda: Classifier(nn.Sequential(nn.Conv1d(4, 8, 3), nn.FeatureAlphaDropout()), 8), SIGNAL),
    "RReLU": (lambda: Classifier(nn.Sequential(nn.Linear(4, 8), nn.RReLU()), 8), (4,)),
    "LSTM": (lambda: Classifier(nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True), 3, over_time), SEQUENCE),
    "MultiheadAttention": (
        lambda: Classifier(nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), 4, attended),
        SEQUENCE,
    ),
    "TransformerEncoderLayer": (
        lambda: Classifier(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
            4,
            lambda layer, x: layer(x).transpose(1, 2),
        ),
        SEQUENCE,
    ),
}


@pytest.mark.filterwarnings("ignore:.*(vmap|performance drop|nested|dropout).*")
@pytest.mark.parametrize("kind", DRAWING)
def test_a_random_layer_equals_torchs_with_the_seed_of_the_batch(kind: str) -> None:
    make, shape = DRAWING[kind]
    model, each = ModuleModel(make, shape, CLASSES, "features"), clients(kind, shape)
    assert model.draws == ("torch",)
    theta, module = model.init(torch.Generator().manual_seed(1)), make().train()
    module.load_state_dict(model.layout.split(theta))
    own = dict(module.named_parameters())
    local, state = LocalTrainer(model, of_clients(each[:1])), torch.get_rng_state()
    w, drawn = local.parameters(theta[None]), [*local.batches(100, [2], "train")]
    assert len({batch.seed for batch in drawn}) == 2
    for batch in drawn:
        gradients, loss = local.gradient(w, batch)
        assert torch.equal(local.gradient(w, batch)[1], loss)
        assert batch.seed is not None
        with drawing_with(batch.seed):
            expected = F.cross_entropy(module(batch.x), batch.y)
        torch.testing.assert_close(loss[0], expected.detach())
        slopes = torch.autograd.grad(expected, [own[name] for name in w])
        torch.testing.assert_close(gradients, list(slopes))
    x, y = each[0].train.x, each[0].train.y
    losses = [local.measured(w, *local.everything()) for _ in range(2)]
    torch.testing.assert_close(losses[0][0], F.cross_entropy(module.eval()(x), y).detach())
    assert torch.equal(*losses)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:.*(vmap|performance drop|nested|dropout).*")
@pytest.mark.parametrize("kind", sorted(DRAWING.keys() - {"LSTM", "RReLU"}))
def test_stacked_clients_have_independent_draws(kind: str) -> None:
    make, shape = DRAWING[kind]
    model, client = ModuleModel(make, shape, CLASSES, "features"), clients(kind, shape)[0]
    model.check_steps(clients=2)
    theta = model.init(torch.Generator().manual_seed(1)).expand(2, -1)
    twins = [ClientData(name, client.train, client.train, client.train, CLASSES) for name in ("a", "b")]
    found = [train(model, of_clients(twins), theta, STEPS).theta for _ in range(2)]
    assert torch.equal(*found)
    assert not torch.allclose(found[0][0], found[0][1], atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "RReLU"])
def test_random_layers_that_torch_cannot_vectorize_are_rejected_together(kind: str) -> None:
    make, shape = DRAWING[kind]
    model = ModuleModel(make, shape, CLASSES, "features")
    with refused("'layer", kind, "together", "runtime.clients_at_once", "1"):
        model.check_steps(clients=2)


def test_a_layer_that_draws_in_evaluation_is_rejected() -> None:
    layers = nn.Sequential(nn.Conv2d(4, 3, 3), nn.FractionalMaxPool2d(2, output_size=2))
    with refused("'layer.1'", "FractionalMaxPool2d", "evaluation"):
        ModuleModel(lambda: Classifier(layers, 3), IMAGE, CLASSES, "pixels")


# --- memory format of kernels -----------------------------------------------------------------------------------------


def network(norm: type[nn.Module], channels: int, stride: int = 1) -> nn.Module:
    layers: list[nn.Module] = []
    for given, made in ((3, channels), (channels, channels)):
        layers += [nn.Conv2d(given, made, 3, stride, 1), norm(made), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@pytest.mark.parametrize(
    ("norm", "channels", "side", "channels_last"),
    [
        (nn.BatchNorm2d, 8, 8, True),  # the gradients of preceding biases are 0 up to rounding
        (nn.Identity, 8, 8, True),
        (nn.InstanceNorm2d, 8, 8, False),
        (nn.Identity, 64, 16, True),
        (nn.Identity, 64, 2, False),  # at least 36,864 kernel entries for 512 outputs
    ],
)
def test_kernels_are_channels_last_if_that_is_faster(
    norm: type[nn.Module], channels: int, side: int, channels_last: bool
) -> None:
    model = ModuleModel(lambda: network(norm, channels), (3, side, side), 10, "pixels")
    assert model.layout.channels_last == channels_last


@pytest.mark.parametrize("keys", [{"clip": 0.5}, {"clip_value": 0.5}, {"clip": 0.5, "optimizer": "adam"}, {}])
def test_steps_with_shared_gradient_memory_equal_torchs(keys: dict[str, object]) -> None:
    def leaves() -> list[Tensor]:
        return [torch.full((3,), value, requires_grad=True) for value in (1.0, 2.0, 3.0)]

    def loss(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        return (p + q).square().sum() + r.sum()

    s = LocalSGD.model_validate({"steps": 2, "lr": 0.1, **keys})
    w, theirs = leaves(), leaves()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(theirs, lr=s.lr, momentum=0.9)
    if s.optimizer == "adam":
        optimizer = torch.optim.Adam(theirs, lr=s.lr)
    step = LocalStep(w, s, s.lr, stacked=False, decay=True)
    for _ in range(2):
        step(list(torch.autograd.grad(loss(*w), w)), None)
        optimizer.zero_grad()
        loss(*theirs).backward()  # type: ignore[no-untyped-call]
        if s.clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, s.clip)
        if s.clip_value is not None:
            torch.nn.utils.clip_grad_value_(theirs, s.clip_value)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(w, theirs, strict=True))
