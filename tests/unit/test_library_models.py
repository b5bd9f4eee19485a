"""Networks of other libraries: equal to the libraries' own functions, trained, and rejected for other data."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from federations import group
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.algorithms.client import train
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.errors import ExperimentError
from fedloom.models import library
from fedloom.models.flat import FlatModel
from fedloom.models.registry import ModelChoice, ResNet18Settings, TransformerSettings, UNetSettings, ViTSettings
from fedloom.tasks.base import PredictionTask
from fedloom.tasks.classification import CLASSIFICATION
from fedloom.tasks.next_token import NextToken
from fedloom.tasks.regression import Regression
from fedloom.tasks.segmentation import Segmentation

TINY: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2}


def outputs_of(model: FlatModel, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs of a model and of a module with the same parameters."""
    theta = model.init(torch.Generator().manual_seed(1))
    named = {name: tensor.detach() for name, tensor in model.layout.split(theta).items()}
    return model.logits(theta, x), functional_call(module.eval(), named, (x,))


def falls(model: FlatModel, x: Tensor, y: Tensor) -> bool:
    """Check that ten steps of descent lower the loss."""
    theta = model.init(torch.Generator().manual_seed(1)).requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.in_training().loss(model.layout.split(theta), x, y).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses[-1] < losses[0] - 0.01


def test_vit_equals_torchvisions() -> None:
    vision = pytest.importorskip("torchvision.models")
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = ViTSettings(**TINY).build((3, 8, 8), 5)
    theirs = vision.VisionTransformer(8, 4, 1, 2, 8, 32, num_classes=5)
    found, expected = outputs_of(model, theirs, x)
    torch.testing.assert_close(found, expected)
    assert found.shape == (3, 5)
    assert falls(model, x, torch.tensor([0, 3, 4]))
    gray = ViTSettings(**TINY).build((1, 8, 8), 1, "pixels", Regression())
    assert dict(gray.layout.entries)["conv_proj.weight"] == (8, 1, 4, 4)
    assert falls(gray, x[:, :1], torch.tensor([0.5, -1.0, 2.0]))


@pytest.mark.parametrize("side", [28, 64])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet18_equals_torchvisions_except_for_the_stem_on_small_images(side: int, norm: Any) -> None:
    vision = pytest.importorskip("torchvision.models")
    made = library.resnet18((1, side, side), 5, norm).eval()
    theirs = vision.resnet18(
        num_classes=5, norm_layer=None if norm == "batch" else lambda c: nn.GroupNorm(32, c)
    ).eval()
    theirs.conv1 = nn.Conv2d(1, 64, 3, 1, 1, bias=False) if side < 64 else nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    theirs.maxpool = nn.Identity() if side < 64 else theirs.maxpool
    theirs.load_state_dict(made.state_dict())
    x = torch.randn(2, 1, side, side, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made(x), theirs(x))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet18_trains(norm: Any) -> None:
    pytest.importorskip("torchvision")
    model = ResNet18Settings(norm=norm).build((1, 8, 8), 3)
    assert model.layout.head == ("fc.weight", "fc.bias")
    split = Split(torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2]))
    members, theta = group([ClientData("c0", split, split, split, 3)]), model.init(torch.Generator().manual_seed(1))
    first, last = (
        train(model, members, theta[None], LocalSGD(steps=steps, batch_size=6, lr=0.01, momentum=0.0)).loss
        for steps in (1, 15)
    )
    assert last < 0.9 * first  # the mean over the steps


@pytest.mark.parametrize("kind", ["tokens", "integers"])
def test_a_position_of_the_transformer_does_not_see_later_ones(kind: Any) -> None:
    x = torch.tensor([[0, 1, 2, 3, 4, 0], [0, 1, 2, 4, 3, 1]], dtype=torch.uint8 if kind == "tokens" else torch.int64)
    module = TransformerSettings(**TINY).module((6,), 5, NextToken()).eval()
    found = module(x)
    assert found.shape == (2, 6, 5)
    torch.testing.assert_close(found[0, :3], found[1, :3])
    assert (found[0, 3:] - found[1, 3:]).abs().min() > 1e-6


def test_the_transformer_classifies_the_mean_over_positions() -> None:
    x = torch.tensor([[0, 1, 2, 3, 4, 0], [0, 1, 2, 4, 3, 1]], dtype=torch.uint8)
    model = TransformerSettings(**TINY).build((6,), 5, "tokens")
    assert falls(model, x, torch.tensor([1, 2]))
    module = TransformerSettings(vocabulary=7, **TINY).module((6,), 5, CLASSIFICATION).eval()
    assert module.embedding.weight.shape == (7, 8)
    h = module.encoder(module.embedding(x.long()) + module.positions)
    torch.testing.assert_close(module(x), module.fc(h.mean(1)))


def test_next_tokens_are_learned() -> None:
    x = (torch.arange(6) + torch.arange(5)[:, None]) % 5
    y = torch.cat([x[:, 1:], torch.full((5, 1), -100)], 1)
    model = TransformerSettings(**TINY).build((6,), 5, "tokens", NextToken(), (6,))
    assert falls(model, x.to(torch.uint8), y)


@pytest.mark.slow
def test_the_unet_equals_monais() -> None:
    nets = pytest.importorskip("monai.networks.nets")
    model = UNetSettings(channels=[4, 8]).build((2, 8, 8), 3, "pixels", Segmentation(), (8, 8))
    x = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    found, expected = outputs_of(model, nets.UNet(2, 2, 3, (4, 8), (2,)), x)
    torch.testing.assert_close(found, expected)
    assert found.shape == (3, 3, 8, 8)
    assert falls(model, x, (x[:, 0] > 0).long())


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("torchvision.models", lambda: ViTSettings().build((1, 8, 8), 3)),
        ("torchvision.models", lambda: ResNet18Settings().build((1, 8, 8), 3)),
        ("monai.networks.nets", lambda: UNetSettings().build((1, 8, 8), 3, "pixels", Segmentation(), (8, 8))),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, package: str, build: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExperimentError) as error:
        build()
    assert error.value.key == "model.name"
    assert "pip install" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("choice", "shape", "kind", "task"),
    [
        (ViTSettings(), (1, 9, 9), "pixels", CLASSIFICATION),
        (ViTSettings(), (1, 8, 12), "pixels", CLASSIFICATION),
        (ViTSettings(heads=3), (1, 8, 8), "pixels", CLASSIFICATION),
        (ViTSettings(), (8,), "features", CLASSIFICATION),
        (ViTSettings(), (1, 8, 8), "pixels", Segmentation()),
        (UNetSettings(), (1, 10, 10), "pixels", Segmentation()),
        (UNetSettings(), (1, 8, 8), "pixels", CLASSIFICATION),
        (TransformerSettings(heads=5), (6,), "tokens", CLASSIFICATION),
        (TransformerSettings(), (6, 2), "integers", CLASSIFICATION),
        (ResNet18Settings(), (6,), "tokens", CLASSIFICATION),
    ],
)
def test_unsuitable_inputs_and_tasks_are_rejected(
    choice: ModelChoice, shape: tuple[int, ...], kind: Any, task: PredictionTask
) -> None:
    with pytest.raises(ExperimentError) as error:
        choice.build(shape, 5, kind, task, (8, 8) if task.name == "segmentation" else ())
    assert error.value.key == "model.name"
    assert choice.name in str(error.value)
