"""ResNet20, the plain convolutional networks and the character LSTM, each against torch's own modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from facts import tells
from pydantic import ValidationError
from torch import Tensor, nn
from torch.func import grad, vmap

from fedloom.data import spec
from fedloom.errors import ExperimentError
from fedloom.models import registry
from fedloom.models.embedding import LSTMEmbedding, MLPEmbedding
from fedloom.models.flat import FlatModel
from fedloom.models.hypernetwork import Hypernetwork
from fedloom.models.networks import LSTM, MLP, ConvNet, ResNet20
from fedloom.models.registry import MODELS, CNNSettings, Kind, LSTMSettings, MLPSettings, ResNet20Settings, VGGSettings


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the same networks as torch modules -------------------------------------------------------------------------------


class Block(nn.Module):
    """Basic block of He et al., 2016, Figure 2 (left), with a projection where the size changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu(self.shortcut(x) + self.conv2(F.relu(self.conv1(x))))
        return out


def resnet20(channels: int, classes: int) -> nn.Module:
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    blocks = [Block(*width) for width in widths]
    first = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
    return nn.Sequential(
        first, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    ).double()


def convnet(depth: int, channels: Sequence[int], widths: Sequence[int]) -> nn.Module:
    """Return a network; ``widths`` of the linear layers include the first one's inputs."""
    layers: list[nn.Module] = []
    for after in channels:
        layers += [nn.Conv2d(depth, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        depth = after
    layers.append(nn.Flatten())
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


class Characters(nn.Module):
    """torch's LSTM; its second bias is the forget gate's offset."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, outputs)
        self.layers = layers
        for i in range(layers):
            second = getattr(self.lstm, f"bias_hh_l{i}")
            second.requires_grad_(False).zero_()[hidden : 2 * hidden] = 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.lstm(self.embedding(x.long()))[0][:, -1])
        return out


def agrees(model: FlatModel, module: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compare logits, features of the last layer, and gradients, from views and from channels-last leaves."""
    weights = [p for p in module.parameters() if p.requires_grad]
    assert [shape for _, shape in model.layout.entries] == [tuple(p.shape) for p in weights]
    theta = torch.cat([p.detach().reshape(-1) for p in weights])
    expected = module(x)
    truth = torch.autograd.grad(F.cross_entropy(expected, y), weights)
    torch.testing.assert_close(model.logits(theta, x), expected, rtol=0, atol=1e-12)
    for parameters in (
        model.layout.leaves(theta, requires_grad=True),
        {name: part.requires_grad_() for name, part in model.layout.split(theta.clone()).items()},
    ):
        logits = model.forward(parameters, x)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
        (weight, bias) = list(parameters.values())[-2:]  # the last layer is last in every model
        torch.testing.assert_close(F.linear(model.features(parameters, x), weight, bias), logits, rtol=0, atol=1e-14)
        found = torch.autograd.grad(F.cross_entropy(logits, y), list(parameters.values()))
        for (name, _), mine, theirs in zip(model.layout.entries, found, truth, strict=True):
            assert theirs.abs().max() > 1e-12, f"the test says nothing about {name}"
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def images(*shape: int, n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, *shape, generator=seeded(1), dtype=torch.float64), torch.arange(n) % 3


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 12), (1, 4, 4)])
def test_resnet20_is_he_et_als_without_normalization(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    agrees(ResNet20(shape, 3), resnet20(shape[0], 3), *images(*shape))


@pytest.mark.parametrize(
    ("shape", "channels", "hidden", "flat"),
    [
        ((3, 32, 32), [16, 32, 64, 128, 128], [], 128),
        ((1, 16, 16), [5, 5, 5, 5], [], 5),
        ((1, 28, 28), [4, 6], [7, 8], 6 * 49),
        ((2, 9, 15), [4, 3], [6], 3 * 2 * 3),
    ],
)
def test_a_convnet_equals_its_layers(shape: tuple[int, ...], channels: list[int], hidden: list[int], flat: int) -> None:
    torch.manual_seed(0)
    agrees(ConvNet(shape, channels, hidden, 3), convnet(shape[0], channels, [flat, *hidden, 3]), *images(*shape))


@pytest.mark.parametrize(("embedding", "hidden", "layers"), [(8, 16, 2), (3, 5, 1), (4, 6, 3)])
def test_the_lstm_equals_torchs(embedding: int, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    module = Characters(7, embedding, hidden, layers, 7).double()
    x = torch.randint(7, (5, 9), generator=seeded(1)).to(torch.uint8)
    x[0, 0], x[0, 1:] = 6, torch.arange(8) % 7  # every token occurs
    agrees(LSTM(7, embedding, hidden, layers), module, x, torch.arange(5) % 7)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "shape", "classes", "kind", "size"),
    [
        # 3·16·9 + 6·16·16·9 + (16·32 + 5·32·32)·9 + 16·32 + (32·64 + 5·64·64)·9 + 32·64 + 650
        (ResNet20Settings(), (3, 32, 32), 10, "pixels", 432 + 13_824 + 50_688 + 512 + 202_752 + 2048 + 650),
        (ResNet20Settings(), (3, 32, 32), 10, "pixels", 270_906),
        (ResNet20Settings(), (1, 28, 28), 100, "pixels", 270_906 - 288 + 90 * 65),
        (CNNSettings(), (3, 32, 32), 10, "pixels", 896 + 3 * 9248 + 1290),
        (CNNSettings(), (1, 28, 28), 10, "pixels", 320 + 3 * 9248 + 330),
        (CNNSettings(filters=64), (3, 32, 32), 10, "pixels", 1792 + 3 * 36_928 + 2570),
        (VGGSettings(), (3, 32, 32), 10, "pixels", 448 + 4640 + 18_496 + 73_856 + 147_584 + 1290),
        (VGGSettings(classifier=[512, 512]), (3, 32, 32), 10, "pixels", 245_024 + 66_048 + 262_656 + 5130),
        # 80·8 + (264 + 1)·1024 + (512 + 1)·1024 + 256·80 + 80
        (LSTMSettings(), (80,), 80, "tokens", 640 + 271_360 + 525_312 + 20_560),
        (LSTMSettings(), (80,), 80, "tokens", 817_872),
        (MLPSettings(), (10,), 11, "features", 1100 + 1111),
    ],
)
def test_parameter_counts_match_a_hand_computation(
    choice: registry.ModelChoice, shape: tuple[int, ...], classes: int, kind: Kind, size: int
) -> None:
    assert choice.build(shape, classes, kind).layout.size == size


# --- the two drivers --------------------------------------------------------------------------------------------------

SMALL: dict[str, tuple[FlatModel, Callable[[torch.Generator, int], Tensor]]] = {
    "resnet20": (ResNet20((1, 8, 8), 3), lambda g, n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)),
    "cnn": (
        ConvNet((2, 16, 16), [4] * 4, [], 3),
        lambda g, n: torch.randn(n, 2, 16, 16, generator=g, dtype=torch.float64),
    ),
    "vgg": (
        ConvNet((1, 8, 8), [3, 4, 5], [6], 3),
        lambda g, n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64),
    ),
    "mlp": (MLP((6,), [5], 3), lambda g, n: torch.randn(n, 6, generator=g, dtype=torch.float64)),
    "lstm": (LSTM(3, 4, 6, 2), lambda g, n: torch.randint(3, (n, 9), generator=g).to(torch.uint8)),
}


@pytest.mark.parametrize("name", SMALL)
def test_stacked_gradients_equal_those_of_single_clients(name: str) -> None:
    """``vmap(grad)`` over θ, the driver for GPUs, against ``autograd.grad`` on leaves, that for CPUs."""
    model, draw = SMALL[name]
    random, g, b = seeded(2), 3, 4
    theta = torch.stack([model.init(seeded(i), torch.float64) for i in range(g)])
    theta = theta + 0.1 * torch.randn(theta.shape, generator=random, dtype=torch.float64)  # no layer is zero
    x = torch.stack([draw(random, b) for _ in range(g)])
    y = torch.randint(3, (g, b), generator=random)

    def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(theta, x), y)

    together = vmap(grad(loss))(theta, x, y)
    for i in range(g):
        leaves = model.layout.leaves(theta[i], requires_grad=True)
        alone = torch.autograd.grad(F.cross_entropy(model.forward(leaves, x[i]), y[i]), list(leaves.values()))
        joined = model.layout.join(dict(zip(leaves, alone, strict=True)))
        assert joined.abs().max() > 1e-3
        torch.testing.assert_close(together[i], joined, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_a_layout_names_every_slice_once(name: str) -> None:
    model, _ = SMALL[name]
    theta = torch.arange(model.layout.size, dtype=torch.float64)
    assert torch.equal(model.layout.join(model.layout.split(theta)), theta)
    assert torch.equal(model.layout.join(model.layout.leaves(theta)), theta)
    names = [name for name, _ in model.layout.entries]
    assert len(set(names)) == len(names)


# --- initialization ---------------------------------------------------------------------------------------------------


def spread(part: Tensor) -> float:
    """Check mean zero and the variance of a uniform draw; return the largest magnitude."""
    bound = part.abs().max().item()
    if part.numel() > 1000 and bound:
        assert abs(part.var().item() / (bound**2 / 3) - 1) < 0.1
        assert abs(part.mean().item()) < 4 * bound / math.sqrt(3 * part.numel())
    return bound


def test_a_convnet_is_initialized_as_by_he_et_al() -> None:
    model = ConvNet((3, 32, 32), [16, 32, 64, 128, 128], [256], 10)
    parts = model.layout.split(model.init(seeded()))
    for name in ("conv1", "conv2", "conv5", "fc1"):
        weight = parts[f"{name}.weight"]
        assert spread(weight) == pytest.approx(math.sqrt(6 / weight[0].numel()), rel=0.02)
        assert not parts[f"{name}.bias"].any()
    assert spread(parts["fc2.weight"]) == pytest.approx(1 / 16, rel=0.02)
    assert 0 < spread(parts["fc2.bias"]) <= 1 / 16


def test_a_fresh_resnet_preserves_the_signals_power() -> None:
    """Nine branches, divided by √9, add (1 + 1/9)^9 = 2.6; with the usual initialization they would add 2^9 = 512."""
    model = ResNet20((3, 32, 32), 10)
    parts = model.layout.split(model.init(seeded()))
    for name, part in parts.items():
        if part.dim() == 4:
            last = name.endswith("conv2.weight")
            assert spread(part) == pytest.approx(math.sqrt(6 / part[0].numel()) / (3 if last else 1), rel=0.05), name
    assert spread(parts["fc.weight"]) == pytest.approx(1 / 8, rel=0.05)
    x = torch.randn(8, 3, 32, 32, generator=seeded(1))
    h = F.relu(F.conv2d(x, parts["conv.weight"], padding=1))
    assert 0.5 < h.square().mean() < 2
    assert model.features(parts, x).abs().mean() < 3


def test_the_lstm_is_initialized_as_documented() -> None:
    parts = LSTM(80).layout.split(LSTM(80).init(seeded()))
    bounds = {
        "embedding.weight": math.sqrt(3),
        "lstm1.input.weight": math.sqrt(6 / 1288),
        "lstm1.state.weight": math.sqrt(6 / 1288),
        "lstm2.input.weight": 1 / 16,
        "lstm2.state.weight": 1 / 16,
        "fc.weight": math.sqrt(6 / 336),
    }
    for name, part in parts.items():
        assert spread(part) == pytest.approx(bounds.get(name, 0), rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (ResNet20((1, 28, 28), 10), torch.randn(8, 1, 28, 28, generator=seeded(1))),
        (ConvNet((1, 32, 32), [16, 32, 64, 128, 128], [], 10), torch.randn(8, 1, 32, 32, generator=seeded(1))),
        (ConvNet((1, 28, 28), [32] * 4, [], 10), torch.randn(8, 1, 28, 28, generator=seeded(1))),
        (LSTM(80, hidden=64), torch.randint(80, (2, 20), generator=seeded(1))),
    ],
    ids=["resnet20", "vgg", "cnn", "lstm"],
)
def test_a_fresh_hypernetwork_generates_models_of_normal_scale(model: FlatModel, x: Tensor) -> None:
    """Logits of a generated θ are finite and small: local training starts near uniform predictions."""
    hypernetwork = Hypernetwork(26, model.layout.size)
    eta_h = hypernetwork.layout.split(hypernetwork.init(seeded()))
    theta = hypernetwork(eta_h, torch.randn(2, 26, generator=seeded(2)))
    for row in theta:
        with torch.no_grad():
            logits = model.logits(row, x)
        assert logits.isfinite().all()
        assert logits.abs().max() < 3
        assert row.std() > 1e-3


# --- input kinds ------------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {"pixels": (3, 32, 32), "features": (10,), "tokens": (80,)}
TAKERS: dict[str, set[str]] = {
    "pixels": {"lenet", "resnet20", "cnn", "vgg", "logistic", "mlp"},
    "features": {"logistic", "mlp"},
    "tokens": {"lstm"},
}


def test_input_kinds_match_the_data() -> None:
    assert get_args(Kind) == get_args(spec.Kind)


@pytest.mark.parametrize("kind", sorted(TAKERS))
@pytest.mark.parametrize("choice", [c for c in MODELS if c.classifies], ids=lambda choice: choice.name)
def test_a_model_rejects_unsupported_input_kinds(choice: registry.ModelChoice, kind: Kind) -> None:
    shape = SHAPES[kind]
    if choice.name in TAKERS[kind]:
        model = choice.build(shape, 10, kind)
        x = torch.zeros(2, *shape, dtype=torch.uint8 if kind == "tokens" else torch.float32)
        assert model.logits(model.init(seeded()), x).shape == (2, 10)
        return
    with pytest.raises(ExperimentError, match=rf"model\.name: {choice.name} .*{kind}") as e:
        choice.build(shape, 10, kind)
    assert set(str(e.value).rpartition("choose from ")[2].split(", ")) == TAKERS[kind]


@pytest.mark.parametrize(
    ("choice", "shape", "facts"),
    [
        (VGGSettings(), (1, 28, 28), ["32x32", "28x28", "lenet, resnet20, cnn"]),
        (VGGSettings(channels=[8, 8]), (1, 8, 3), ["4x4", "8x3"]),
        (CNNSettings(), (3, 16, 15), ["16x16", "16x15", "resnet20, logistic"]),
        (ResNet20Settings(), (1, 3, 9), ["4x4", "3x9", "logistic, mlp"]),
    ],
)
def test_too_small_images_are_rejected(choice: registry.ModelChoice, shape: tuple[int, ...], facts: list[str]) -> None:
    with pytest.raises(ExperimentError) as error:
        choice.build(shape, 10, "pixels")
    assert tells(str(error.value), f"model.name: {choice.name}: ", *facts)


def test_widths_below_one_are_rejected() -> None:
    for settings, key in (
        (MLPSettings, {"hidden": [3, 0]}),
        (VGGSettings, {"channels": [0]}),
        (VGGSettings, {"channels": []}),
        (VGGSettings, {"classifier": [-1]}),
        (CNNSettings, {"filters": 0}),
        (LSTMSettings, {"layers": 0}),
    ):
        with pytest.raises(ValidationError):
            settings.model_validate(key)


# --- embedding networks -----------------------------------------------------------------------------------------------


def test_the_mlp_embedding_uses_inputs_and_labels() -> None:
    torch.manual_seed(0)
    network = MLPEmbedding((2, 3), 4, 5, width=7, labels=True)
    module = nn.Sequential(nn.Linear(6 + 4, 7), nn.ReLU(), nn.Linear(7, 5)).double()
    theta = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    x, y = images(2, 3)
    expected = module(torch.cat([x.flatten(1), F.one_hot(y, 4).double()], 1))
    torch.testing.assert_close(network.forward(network.layout.split(theta), x, y), expected, rtol=0, atol=1e-14)
    unlabelled = MLPEmbedding((2, 3), 4, 5, width=7, labels=False)
    parameters = unlabelled.layout.split(unlabelled.init(seeded(), torch.float64))
    assert parameters["fc1.weight"].shape == (7, 6)
    assert torch.equal(unlabelled.describe(parameters, x, y), unlabelled.describe(parameters, x, None))


def test_the_lstm_embedding_reads_the_label_as_the_next_token() -> None:
    torch.manual_seed(0)
    module = Characters(6, 8, 5, 2, 4).double()
    network = LSTMEmbedding(6, 4, width=5, labels=True)
    theta = torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])
    x, y = torch.randint(6, (3, 7), generator=seeded()).to(torch.uint8), torch.tensor([5, 0, 2])
    parameters = network.layout.split(theta)
    expected = module(torch.cat([x.long(), y[:, None]], 1))
    torch.testing.assert_close(network.forward(parameters, x, y), expected, rtol=0, atol=1e-12)
    unlabelled = LSTMEmbedding(6, 4, width=5, labels=False)
    torch.testing.assert_close(unlabelled.describe(parameters, x, None), module(x).mean(0), rtol=0, atol=1e-12)
    assert torch.equal(network.init(seeded()), LSTM(6, hidden=5, outputs=4).init(seeded()))
