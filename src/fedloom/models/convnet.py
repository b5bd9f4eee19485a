"""Plain convolutional networks: the VGG of papers/003, §5, and the four-layer CNN of papers/002, §5.2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout


class ConvNet(FlatModel):
    """Blocks of a 3x3 convolution (padding 1), ReLU and 2x2 max pooling; then linear layers with ReLU between them.

    Parameters
    ----------
    input_shape
        (channels, height, width); a side of odd length loses its last pixel to a pooling.
    channels
        Of each convolution, one block each.
    hidden
        Widths of the linear layers before the last one.
    classes
        C.

    Raises
    ------
    ValueError
        If the image is too small to leave a pixel.
    """

    def __init__(
        self, input_shape: tuple[int, ...], channels: Sequence[int], hidden: Sequence[int], classes: int
    ) -> None:
        depth, height, width = input_shape
        self.convolutions = [f"conv{i}" for i in range(1, len(channels) + 1)]
        pooled = [side >> len(channels) for side in (height, width)]
        if min(pooled) < 1:
            least = 1 << len(channels)
            raise ValueError(f"{len(channels)} poolings 2x2 need images from {least}x{least}, found {height}x{width}")
        entries: list[tuple[str, tuple[int, ...]]] = []
        for name, (before, after) in zip(self.convolutions, pairwise([depth, *channels]), strict=True):
            entries += [(f"{name}.weight", (after, before, 3, 3)), (f"{name}.bias", (after,))]
        widths = [channels[-1] * pooled[0] * pooled[1], *hidden, classes]
        self.linears = [f"fc{i}" for i in range(1, len(widths))]
        for name, (before, after) in zip(self.linears, pairwise(widths), strict=True):
            entries += [(f"{name}.weight", (after, before)), (f"{name}.bias", (after,))]
        self.layout = Layout(tuple(entries))

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Layers with ReLU as K. He et al., ICCV 2015, eq. 10 (uniform, biases zero); the last one as PyTorch's Linear.

        Without normalization PyTorch's bound loses five sixths of the signal's power in each block, and training
        starts with a plateau (docs/models.md).
        """
        if name.startswith(self.linears[-1]):
            return super().bound(name, shape, fan_in)
        return math.sqrt(6 / fan_in) if name.endswith("weight") else 0.0

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``[b, channels, height, width] -> [b, f]``, the input of the last linear layer.

        ReLU comes after the pooling: both are monotone, so the function is the same, on a quarter of the pixels.
        """
        h = x
        for name in self.convolutions:
            h = F.conv2d(h, parameters[f"{name}.weight"], parameters[f"{name}.bias"], padding=1)
            h = F.relu(F.max_pool2d(h, 2))
        h = h.flatten(1)
        for name in self.linears[:-1]:
            h = F.relu(F.linear(h, parameters[f"{name}.weight"], parameters[f"{name}.bias"]))
        return h

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """``[b, channels, height, width] -> [b, C]`` logits."""
        last = self.linears[-1]
        return F.linear(self.features(parameters, x), parameters[f"{last}.weight"], parameters[f"{last}.bias"])
