"""Gradient inversion: a linear layer reveals its input exactly, other networks approximately."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.attacks.inversion import (
    LARGEST_PSNR,
    Target,
    best_matches,
    gradient_of_step,
    invert_linear_layer,
    label_of,
    linear_layer,
    match_gradient,
    psnr,
    total_variation,
)
from fedloom.data.federated import ClientData, Split
from fedloom.models.flat import FlatModel, Layout
from fedloom.models.lenet import LeNet
from fedloom.models.mlp import MLP


class SmoothNetwork(FlatModel):
    """A convolution and a linear layer with sigmoids between, as in Zhu et al."""

    layout = Layout(
        (
            ("conv.weight", (6, 1, 3, 3)),
            ("conv.bias", (6,)),
            ("fc.weight", (4, 6 * 6 * 6)),
            ("fc.bias", (4,)),
        )
    )

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.sigmoid(F.conv2d(x, parameters["conv.weight"], parameters["conv.bias"])).flatten(1)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(self.features(parameters, x), parameters["fc.weight"], parameters["fc.bias"])


def target(model: FlatModel, x: Tensor, y: Tensor) -> Target:
    examples = Split(x, y)
    theta = model.init(torch.Generator().manual_seed(1))
    gradient = gradient_of_step(model, theta, examples, ClientData("a", examples, examples, examples, 4))
    return Target(model, theta, gradient, tuple(x.shape[1:]), y)


def inputs(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, *shape, generator=generator), torch.arange(count) % 4


@pytest.mark.parametrize("hidden", [[], [7], [16, 5]])
def test_a_linear_layer_reveals_a_single_input_exactly(hidden: list[int]) -> None:
    x, y = inputs(1, 1, 5, 5)
    found = invert_linear_layer(target(MLP((1, 5, 5), hidden, 4), x, y))
    assert found is not None
    torch.testing.assert_close(found[:1], x, rtol=1e-3, atol=1e-3)


def test_the_gradient_is_recovered_from_the_update() -> None:
    x, y = inputs(3, 6)
    model = MLP((6,), [5], 4)
    made = target(model, x, y)
    theta = made.theta.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(model.logits(theta, x), y), [theta])
    torch.testing.assert_close(made.gradient, expected, rtol=1e-3, atol=1e-6)


def test_units_activated_by_one_example_reveal_it_in_a_batch() -> None:
    x, y = inputs(4, 1, 5, 5)
    found = invert_linear_layer(target(MLP((1, 5, 5), [256], 4), x, y))
    assert found is not None
    values = [value for value, _ in best_matches(x, found, 4.0)]
    assert max(values) > 50


def test_a_convolution_is_not_inverted_as_a_linear_layer() -> None:
    assert linear_layer(LeNet((1, 28, 28), 4).layout, 784) is None
    x, y = inputs(1, 1, 28, 28)
    assert invert_linear_layer(target(LeNet((1, 28, 28), 4), x, y)) is None


@pytest.mark.parametrize("label", range(4))
def test_the_label_of_an_example_follows_from_its_gradient(label: int) -> None:
    x, _ = inputs(1, 1, 28, 28)
    assert label_of(target(LeNet((1, 28, 28), 4), x, torch.tensor([label]))) == label


def test_gradient_matching_on_a_smooth_network_reveals_the_input() -> None:
    x = torch.zeros(1, 1, 8, 8)
    x[..., 2:6, 3:5] = 1.0
    made = target(SmoothNetwork(), x, torch.tensor([2]))
    found = match_gradient(made, 0.0, 1.0)
    assert psnr(x, found, 1.0) > 40 > psnr(x, torch.full_like(x, float(x.mean())), 1.0) + 20


@pytest.mark.exhaustive
def test_gradient_matching_on_a_relu_network_reveals_an_outline() -> None:
    x = torch.zeros(1, 1, 28, 28)
    x[..., 8:20, 12:16] = 1.0
    found = match_gradient(target(LeNet((1, 28, 28), 4), x, torch.tensor([2])), 0.0, 1.0)
    assert psnr(x, found, 1.0) > psnr(x, torch.full_like(x, float(x.mean())), 1.0) + 3


def test_peak_signal_to_noise_ratio() -> None:
    x = torch.zeros(2, 2)
    assert psnr(x, x, 1.0) == LARGEST_PSNR
    assert psnr(x, x + 0.1, 1.0) == pytest.approx(20.0, abs=1e-5)
    assert psnr(x, x + 0.1, 10.0) == pytest.approx(40.0, abs=1e-5)


def test_total_variation_needs_images() -> None:
    assert float(total_variation(torch.randn(2, 5))) == 0
    image = torch.zeros(1, 1, 2, 2)
    image[..., 1] = 1.0
    assert float(total_variation(image)) == 1.0
