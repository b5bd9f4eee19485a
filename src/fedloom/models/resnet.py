"""ResNet20 for small images, without batch normalization (papers/001, A.3 "ResNet Experiments")."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout

STAGES = (16, 32, 64)
"""Channels of the three stages."""

BLOCKS = 3
"""Residual blocks per stage, of two convolutions each: 6·3 + 2 = 20 layers."""


class ResNet20(FlatModel):
    """ResNet20 (K. He et al., "Deep residual learning for image recognition", CVPR 2016, §4.2, n = 3), unnormalized.

    It consists of a 3x3 convolution, three stages of three blocks, the mean over the pixels, and a linear layer. The
    second and third stage start with stride 2, and their first shortcut is a 1x1 convolution ("option B"). Convolutions
    have no biases. Both choices follow the implementation that papers/001 (footnote 5) strips of batch normalization,
    and leave 270,906 parameters on three channels with ten classes.

    Raises
    ------
    ValueError
        If the image is smaller than 4x4, which leaves one pixel for the third stage.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        if min(input_shape[1:]) < 4:
            raise ValueError(f"ResNet20 needs images of at least 4x4 (got {input_shape[1]}x{input_shape[2]})")
        entries: list[tuple[str, tuple[int, ...]]] = [("conv.weight", (STAGES[0], input_shape[0], 3, 3))]
        self.blocks: list[tuple[str, int]] = []  # name, stride
        before = STAGES[0]
        for s, channels in enumerate(STAGES, start=1):
            for b in range(1, BLOCKS + 1):
                block = f"stage{s}.block{b}"
                self.blocks.append((block, 2 if before != channels else 1))
                entries += [
                    (f"{block}.conv1.weight", (channels, before, 3, 3)),
                    (f"{block}.conv2.weight", (channels, channels, 3, 3)),
                ]
                if before != channels:
                    entries.append((f"{block}.shortcut.weight", (channels, before, 1, 1)))
                before = channels
        entries += [("fc.weight", (classes, before)), ("fc.bias", (classes,))]
        self.layout = Layout(tuple(entries))

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return He's bound for convolutions, divided by √L for the last one of each of the L = 9 blocks.

        K. He et al., ICCV 2015, eq. 10. Without normalization and without the division, each branch doubles the
        signal's power, and training diverges. Divided, the nine branches together add as much as one (S. De, S. Smith,
        NeurIPS 2020, §3: the effect of batch normalization on a fresh network). See docs/models.md for the measurement.
        The last layer is initialized as PyTorch's Linear.
        """
        if name.startswith("fc"):
            return super().bound(name, shape, fan_in)
        he = math.sqrt(6 / fan_in)
        return he / math.sqrt(len(self.blocks)) if name.endswith("conv2.weight") else he

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the pixel mean of the last stage, ``[b, channels, height, width] -> [b, 64]``."""
        h = F.relu(F.conv2d(x, parameters["conv.weight"], padding=1))
        for block, stride in self.blocks:
            branch = F.relu(F.conv2d(h, parameters[f"{block}.conv1.weight"], stride=stride, padding=1))
            branch = F.conv2d(branch, parameters[f"{block}.conv2.weight"], padding=1)
            if stride > 1:
                h = F.conv2d(h, parameters[f"{block}.shortcut.weight"], stride=stride)
            h = F.relu(h + branch)
        return h.mean((2, 3))
