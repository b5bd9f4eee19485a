"""Memory format of convolution kernels, chosen by the module, and gradients that share memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithms.local_sgd import LocalSGD, LocalStep
from fedloom.models.module import ModuleModel


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
