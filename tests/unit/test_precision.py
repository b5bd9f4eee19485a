"""``model.precision: bfloat16`` against the same network in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor
from torch.func import grad, vmap

from fedloom.errors import ExperimentError
from fedloom.models.flat import FlatModel, bfloat16
from fedloom.models.networks import LSTM, MLP, ConvNet, LeNet, ResNet20
from fedloom.models.registry import LeNetSettings, MLPSettings, QuadraticSettings

IMAGE = (3, 32, 32)
MODELS: dict[str, FlatModel] = {
    "lenet": LeNet(IMAGE, 10),
    "resnet20": ResNet20((3, 8, 8), 10),
    "vgg": ConvNet(IMAGE, [8] * 5, [16], 10),
    "mlp": MLP(IMAGE, [20], 10),
    "lstm": LSTM(10, 4, 16, 2),
}
HALF_UNIT = 2**-9
"""The largest relative error of one rounding to bfloat16, which has 8 significant bits."""
SWITCHED = 0.1
"""Tolerance relative to a gradient's length: beyond rounding, since ReLU and max pooling choose otherwise near ties."""


def data(name: str, b: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    shape = (3, 8, 8) if name == "resnet20" else IMAGE
    x = torch.randn(b, *shape, generator=random, dtype=torch.float64).to(dtype)
    if name == "lstm":
        x = torch.randint(10, (b, 12), generator=random).to(torch.uint8)
    return x, torch.randint(10, (b,), generator=random)


def start(model: FlatModel, dtype: torch.dtype = torch.float32) -> Tensor:
    return model.init(torch.Generator().manual_seed(1), dtype)


def gradient(model: FlatModel, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss and its gradient on leaves, as on CPUs."""
    leaves = model.layout.leaves(theta, requires_grad=True)
    loss = model.loss(leaves, x, y).mean()
    parts = torch.autograd.grad(loss, list(leaves.values()))
    assert {part.dtype for part in parts} == {theta.dtype} == {loss.dtype}
    return loss.detach(), model.layout.join(dict(zip(leaves, parts, strict=True)))


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_match_float32_up_to_rounding(name: str) -> None:
    model, (x, y) = MODELS[name], data(name)
    theta = start(model)
    loss, exact = gradient(model, theta, x, y)
    rounded_loss, rounded = gradient(bfloat16(model), theta, x, y)
    assert 0 < abs(rounded_loss - loss) < 4 * HALF_UNIT * loss  # a different computation with nearly equal results
    assert 0 < (rounded - exact).norm() < SWITCHED * exact.norm()
    assert F.cosine_similarity(rounded, exact, dim=0) > 0.99


@pytest.mark.parametrize("name", MODELS)
def test_results_are_float32(name: str) -> None:
    model, (x, _) = bfloat16(MODELS[name]), data(name)
    leaves = model.layout.leaves(start(model))
    assert model.forward(leaves, x).dtype == model.features(leaves, x).dtype == torch.float32
    assert torch.equal(model.forward(leaves, x), model.forward(leaves, x))


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_float64_is_unchanged(name: str) -> None:
    model, (x, y) = MODELS[name], data(name, dtype=torch.float64)
    theta = start(model, torch.float64)
    for one, other in zip(gradient(model, theta, x, y), gradient(bfloat16(model), theta, x, y), strict=True):
        assert torch.equal(one, other)


def test_initial_values_are_equal() -> None:
    model = MODELS["vgg"]  # it has its own initialization
    assert torch.equal(start(bfloat16(model)), start(model))


@pytest.mark.parametrize("name", ["lenet", "vgg", "mlp"])
def test_stacked_gradients_equal_those_of_single_clients(name: str) -> None:
    """``vmap(grad)``, the driver for GPUs, sums differently, so results are equal only up to rounding."""
    model, (x, y) = bfloat16(MODELS[name]), data(name)
    thetas = torch.stack([start(model), 0.9 * start(model)])

    def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(theta, x), y)

    together = vmap(grad(loss))(thetas, torch.stack([x, x]), torch.stack([y, y]))
    for theta, found in zip(thetas, together, strict=True):
        _, alone = gradient(model, theta, x, y)
        assert (found - alone).norm() < SWITCHED * alone.norm()


def test_second_derivatives_work() -> None:
    """Compute the product of the Hessian with a vector, which ComFedL-DAMAML needs."""
    model, (x, y) = MODELS["mlp"], data("mlp")
    theta = start(model)

    def product(model: FlatModel) -> Tensor:
        at = theta.clone().requires_grad_()
        (first,) = torch.autograd.grad(F.cross_entropy(model.logits(at, x), y), [at], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), [at])
        return second

    exact = product(model)
    assert 0 < (product(bfloat16(model)) - exact).norm() < 20 * HALF_UNIT * exact.norm()


def test_the_experiment_file_selects_the_precision() -> None:
    assert isinstance(LeNetSettings().build(IMAGE, 10), LeNet)
    rounded, exact = (LeNetSettings(precision=p).build(IMAGE, 10) for p in ("bfloat16", "float32"))
    theta, (x, _) = start(exact), data("lenet")
    assert torch.equal(rounded.logits(theta, x), bfloat16(exact).logits(theta, x))
    assert not torch.equal(rounded.logits(theta, x), exact.logits(theta, x))
    with pytest.raises(ValidationError, match="bfloat16"):
        MLPSettings(precision="float16")  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match=r"model\.precision: quadratic .*float32.*bfloat16"):
        QuadraticSettings(precision="bfloat16").build((3,), 0, "features")
