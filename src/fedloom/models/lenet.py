"""LeNet-style ConvNets: the clients' model and the embedding network (papers/001, Tables 3 and 4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout, linear, linear_entries


def lenet_layout(channels: int, height: int, width: int, outputs: int) -> Layout:
    """Return the layout of conv 16@5x5, pool, conv 32@5x5, pool, 120, 84, ``outputs``; convolutions have no padding.

    On 32x32 the first linear layer has 800 inputs (Table 3); on 28x28, 512.

    Raises
    ------
    ValueError
        If the image is too small to leave a pixel (the minimum is 16x16).
    """
    pooled = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    if min(pooled) < 1:
        raise ValueError(f"LeNet needs images of at least 16x16 (got {height}x{width})")
    return Layout(
        (
            ("conv1.weight", (16, channels, 5, 5)),
            ("conv1.bias", (16,)),
            ("conv2.weight", (32, 16, 5, 5)),
            ("conv2.bias", (32,)),
            *linear_entries([32 * pooled[0] * pooled[1], 120, 84, outputs]),
        )
    )


def lenet_features(parameters: Mapping[str, Tensor], convolved: Tensor) -> Tensor:
    """Apply all but the first convolution and the last layer, ``[b, 16, h, w] -> [b, 84]``.

    ReLU follows the pooling, so that it runs on a quarter of the pixels. Both are monotone, so the function is that of
    the table.
    """
    p = parameters
    h = F.relu(F.max_pool2d(convolved, 2))
    h = F.relu(F.max_pool2d(F.conv2d(h, p["conv2.weight"], p["conv2.bias"]), 2))
    return F.relu(linear(p, "fc2", F.relu(linear(p, "fc1", h.flatten(1)))))


class LeNet(FlatModel):
    """Clients' model of papers/001, Table 3 (85,822 parameters on 1x28x28 with ten classes)."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = input_shape
        self.layout = lenet_layout(channels, height, width, classes)

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the input of the last layer, ``[b, channels, height, width] -> [b, 84]``."""
        return lenet_features(parameters, F.conv2d(x, parameters["conv1.weight"], parameters["conv1.bias"]))
