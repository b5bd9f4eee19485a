"""The networks as functions of a flat θ, against torch's own modules and the papers' tables."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.errors import ExperimentError
from fedloom.models.embedding import LeNetEmbedding, LinearEmbedding
from fedloom.models.flat import FlatModel, FlatNetwork, Layout, vjp
from fedloom.models.networks import MLP, LeNet
from fedloom.models.registry import LeNetSettings, LogisticSettings, MLPSettings


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class LeNetModule(nn.Module):
    """Module of papers/001, Table 3, layer by layer."""

    def __init__(self, channels: int, flat: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(flat, 120), nn.Linear(120, 84), nn.Linear(84, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv1(x)), 2)
        h = F.max_pool2d(F.relu(self.conv2(h)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(h)))))


# --- layouts ----------------------------------------------------------------------------------------------------------

shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)


@given(shapes)
@settings(max_examples=50)
def test_a_layout_splits_and_joins(found: list[tuple[int, ...]]) -> None:
    layout = Layout(tuple((f"p{i}", shape) for i, shape in enumerate(found)))
    theta = torch.arange(layout.size, dtype=torch.float64)
    parts = layout.split(theta)
    assert [tuple(part.shape) for part in parts.values()] == found
    assert torch.equal(layout.join(parts), theta)
    leaves = layout.leaves(theta, requires_grad=True)
    assert torch.equal(layout.join(leaves), theta)
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves.values())


def test_a_theta_of_another_length_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        Layout((("w", (2, 2)),)).split(torch.zeros(3))


def test_leaves_share_no_memory_with_theta() -> None:
    layout = Layout((("w", (2, 3, 2, 2)), ("b", (2,))))
    theta = torch.zeros(layout.size)
    leaves = layout.leaves(theta)
    for leaf in leaves.values():
        leaf += 1
    assert not theta.any()
    assert leaves["w"].is_contiguous(memory_format=torch.channels_last)


def test_the_gradient_through_a_split_is_that_of_theta() -> None:
    model = MLP((4,), [3], 2)
    theta = model.init(seeded(), torch.float64).requires_grad_()
    x = torch.randn(5, 4, generator=seeded(), dtype=torch.float64)
    (whole,) = torch.autograd.grad(model.logits(theta, x).exp().sum(), [theta])
    parts = model.layout.leaves(theta, requires_grad=True)
    by_part = torch.autograd.grad(model.forward(parts, x).exp().sum(), list(parts.values()))
    assert torch.equal(whole, model.layout.join(dict(zip(parts, by_part, strict=True))))
    step = torch.zeros_like(theta)
    step[3] = 1e-6
    with torch.no_grad():
        slope = (model.logits(theta + step, x).exp().sum() - model.logits(theta - step, x).exp().sum()) / 2e-6
    assert abs(slope - whole[3]) < 1e-7


def test_vjp_equals_autograds() -> None:
    a = torch.randn(3, generator=seeded(), dtype=torch.float64).requires_grad_()
    b = torch.randn(2, 3, generator=seeded(), dtype=torch.float64).requires_grad_()
    out, cotangent = (b @ a).exp(), torch.tensor([2.0, -3.0], dtype=torch.float64)
    expected = torch.autograd.grad(out, [a, b], cotangent, retain_graph=True)
    for found in (vjp(out, [a, b], cotangent, keep=True), vjp(out, [a, b], cotangent)):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-15)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "classes", "flat", "size"),
    [((1, 28, 28), 10, 512, 85_822), ((3, 32, 32), 10, 800, 121_182), ((3, 32, 32), 100, 800, 128_832)],
)
def test_lenet_has_the_sizes_of_table_3(shape: tuple[int, int, int], classes: int, flat: int, size: int) -> None:
    layout = LeNet(shape, classes).layout
    found = dict(layout.entries)
    assert found["conv1.weight"] == (16, shape[0], 5, 5)
    assert found["conv2.weight"] == (32, 16, 5, 5)
    assert found["fc1.weight"] == (120, flat)
    assert found["fc2.weight"] == (84, 120)
    assert found["fc3.weight"] == (classes, 84)
    assert layout.size == size == sum(p.numel() for p in LeNetModule(shape[0], flat, classes).parameters())


@pytest.mark.parametrize(("shape", "flat"), [((1, 28, 28), 512), ((3, 32, 32), 800), ((1, 16, 20), 64)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_lenet_equals_the_module_of_table_3(shape: tuple[int, int, int], flat: int, channels_last: bool) -> None:
    model, module = LeNet(shape, 10), LeNetModule(shape[0], flat, 10).double()
    theta = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert [name for name, _ in model.layout.entries] == [name for name, _ in module.named_parameters()]
    x = torch.randn(4, *shape, generator=seeded(), dtype=torch.float64)
    parameters = model.layout.leaves(theta) if channels_last else model.layout.split(theta)
    torch.testing.assert_close(model.forward(parameters, x), module(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.logits(theta, x), module(x), rtol=0, atol=1e-12)
    assert model.features(parameters, x).shape == (4, 84)


@pytest.mark.parametrize("hidden", [[], [7], [6, 5]])
def test_an_mlp_is_linear_layers_with_relu_between(hidden: list[int]) -> None:
    widths = [12, *hidden, 3]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    module = nn.Sequential(*layers[:-1]).double()
    model = MLP((1, 3, 4), hidden, 3)
    theta = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    x = torch.randn(5, 1, 3, 4, generator=seeded(), dtype=torch.float64)
    torch.testing.assert_close(model.logits(theta, x), module(x), rtol=0, atol=1e-13)
    assert model.features(model.layout.split(theta), x).shape == (5, widths[-2])


@pytest.mark.parametrize("model", [LeNet((1, 28, 28), 10), MLP((1, 28, 28), [100], 10)])
def test_initialization_equals_torchs_linear_and_conv2d(model: FlatModel) -> None:
    """U(-1/√fan_in, 1/√fan_in) for weights and biases: torch's bounds and variance, mean zero."""
    torch.manual_seed(0)  # torch's modules draw from the global generator
    parts = model.layout.split(model.init(seeded()))
    for name, part in parts.items():
        weight = parts[name.replace("bias", "weight")]
        bound = 1 / math.sqrt(weight[0].numel())
        assert part.abs().max() <= bound
        if part.numel() > 1000:
            assert part.abs().max() > 0.99 * bound
            assert abs(part.var().item() / (bound**2 / 3) - 1) < 0.1
            assert abs(part.mean().item()) < 4 * bound / math.sqrt(3 * part.numel())
    for module, name in ((nn.Conv2d(16, 32, 5), "conv2"), (nn.Linear(120, 84), "fc2")):
        if f"{name}.weight" in parts and parts[f"{name}.weight"].shape == module.weight.shape:
            assert module.bias is not None
            for theirs, mine in ((module.weight, parts[f"{name}.weight"]), (module.bias, parts[f"{name}.bias"])):
                assert abs(theirs.abs().max().item() / mine.abs().max().item() - 1) < 0.15


def test_a_float64_network_starts_at_the_same_values() -> None:
    model = MLP((6,), [5], 3)
    assert torch.equal(model.init(seeded(3)), model.init(seeded(3), torch.float64).float())
    assert not torch.equal(model.init(seeded(3)), model.init(seeded(4)))


def test_images_too_small_for_lenet_are_rejected() -> None:
    for shape in ((1, 15, 16), (1, 28, 12)):
        with pytest.raises(ValueError, match="16x16"):
            LeNet(shape, 10)
        with pytest.raises(ExperimentError, match="16x16") as refused:
            LeNetSettings().build(shape, 10)
        assert (refused.value.key, refused.value.found) == ("model.name", "lenet")
    with pytest.raises(ExperimentError, match=r"pixels.*features") as refused:
        LeNetSettings().build((80,), 10, "features")
    assert (refused.value.key, refused.value.found) == ("model.name", "lenet")
    assert LeNetSettings().build((1, 16, 16), 10).layout.size > 0


def test_the_registry_builds_the_named_models() -> None:
    assert LogisticSettings().build((1, 28, 28), 10).layout.size == 7850
    assert MLPSettings(hidden=[100]).build((1, 28, 28), 10).layout.size == 784 * 100 + 100 + 1010


# --- embedding networks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "flat"), [((1, 16, 16), 32), ((3, 20, 16), 64), ((1, 28, 28), 512)])
def test_label_planes_equal_a_convolution_over_label_channels(shape: tuple[int, int, int], flat: int) -> None:
    """The labels are C additional channels, constant over the image (Table 4, §4 "Models")."""
    classes, size = 4, 6
    network = LeNetEmbedding(shape, classes, size, labels=True)
    module = LeNetModule(shape[0] + classes, flat, size).double()
    theta = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    x = torch.randn(7, *shape, generator=seeded(), dtype=torch.float64)
    y = torch.arange(7) % classes
    planes = F.one_hot(y, classes).double()[:, :, None, None].expand(-1, -1, *shape[1:])
    expected = module(torch.cat([x, planes], 1))
    torch.testing.assert_close(network.forward(network.layout.split(theta), x, y), expected, rtol=0, atol=1e-12)

    leaves = network.layout.leaves(theta, requires_grad=True)
    found = torch.autograd.grad(network.forward(leaves, x, y).square().sum(), list(leaves.values()))
    truth = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_the_embedding_networks_have_the_sizes_of_table_4() -> None:
    found = dict(LeNetEmbedding((3, 32, 32), 10, 26, labels=True).layout.entries)
    assert (found["conv1.weight"], found["fc1.weight"], found["fc3.weight"]) == ((16, 13, 5, 5), (120, 800), (26, 84))
    assert dict(LeNetEmbedding((3, 32, 32), 10, 26, labels=False).layout.entries)["conv1.weight"] == (16, 3, 5, 5)


def test_the_unlabelled_variant_ignores_labels() -> None:
    network = LeNetEmbedding((1, 16, 16), 3, 5, labels=False)
    parameters = network.layout.split(network.init(seeded()))
    x = torch.randn(6, 1, 16, 16, generator=seeded())
    y = torch.arange(6) % 3
    without = network.describe(parameters, x, None)
    assert torch.equal(network.describe(parameters, x, y), without)
    assert torch.equal(network.describe(parameters, x, y.flip(0)), without)
    labelled = LeNetEmbedding((1, 16, 16), 3, 5, labels=True)
    p = labelled.layout.split(labelled.init(seeded()))
    assert not torch.equal(labelled.describe(p, x, y), labelled.describe(p, x, (y + 1) % 3))


def test_the_linear_embedding_uses_only_labels() -> None:
    network = LinearEmbedding(4, 3)
    layer = nn.Linear(4, 3).double()
    theta = torch.cat([p.detach().reshape(-1) for p in layer.parameters()])
    y = torch.tensor([0, 3, 3, 1])
    found = network.forward(network.layout.split(theta), torch.randn(4, 2, dtype=torch.float64), y)
    torch.testing.assert_close(found, layer(F.one_hot(y, 4).double()), rtol=0, atol=1e-15)
    # Its mean is the layer at the client's class proportions.
    described = network.describe(network.layout.split(theta), torch.zeros(4, 2, dtype=torch.float64), y)
    torch.testing.assert_close(described, layer(torch.tensor([0.25, 0.25, 0, 0.5]).double()), rtol=0, atol=1e-15)


NETWORKS: list[FlatNetwork] = [LeNetEmbedding((1, 16, 16), 3, 5, labels=True), LinearEmbedding(3, 5)]


@pytest.mark.parametrize("network", NETWORKS, ids=["lenet", "linear"])
@given(n=st.integers(1, 6), seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_a_descriptor_is_the_mean_in_any_order(network: LeNetEmbedding | LinearEmbedding, n: int, seed: int) -> None:
    random = seeded(seed)
    parameters = network.layout.split(network.init(random, torch.float64))
    x = torch.randn(n, 1, 16, 16, generator=random, dtype=torch.float64)
    y = torch.randint(3, (n,), generator=random)
    each = [network.forward(parameters, x[i : i + 1], y[i : i + 1])[0] for i in range(n)]
    found = network.describe(parameters, x, y)
    assert found.shape == (5,)
    torch.testing.assert_close(found, sum(each) / n, rtol=0, atol=1e-13)
    order = torch.randperm(n, generator=random)
    torch.testing.assert_close(network.describe(parameters, x[order], y[order]), found, rtol=0, atol=1e-13)
