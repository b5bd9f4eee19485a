"""Plain convolutional networks: the VGG of papers/003, §5, and the four-layer CNN of papers/002, §5.2."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatModel, Layout, linear, linear_entries

STATISTICS = ("mean", "log_variance")
EPSILON = 1e-5  # as in torch.nn.BatchNorm2d
TRACKING = 0.1
"""Fraction by which a call in training moves statistics towards the batch's: torch's batch-normalization momentum."""


class ConvNet(FlatModel):
    """Blocks of a 3x3 convolution (padding 1), ReLU and 2x2 max pooling, then linear layers with ReLU between them.

    Parameters
    ----------
    input_shape
        (channels, height, width); pooling drops the last pixel of a side of odd length.
    channels
        Channels of each convolution, one per block.
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
            raise ValueError(
                f"{len(channels)} poolings 2x2 need images of at least {least}x{least} (got {height}x{width})"
            )
        entries: list[tuple[str, tuple[int, ...]]] = []
        for name, (before, after) in zip(self.convolutions, pairwise([depth, *channels]), strict=True):
            entries += [(f"{name}.weight", (after, before, 3, 3)), *self.beside(name, after)]
        widths = [channels[-1] * pooled[0] * pooled[1], *hidden, classes]
        self.linears = [f"fc{i}" for i in range(1, len(widths))]
        self.layout = Layout((*entries, *linear_entries(widths)))

    def beside(self, name: str, channels: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return the entries of a convolution besides its kernel: its bias."""
        return [(f"{name}.bias", (channels,))]

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return He's bound for layers with ReLU, and that of PyTorch's Linear for the last layer.

        K. He et al., ICCV 2015, eq. 10 (uniform, biases zero). Without normalization, PyTorch's bound loses five sixths
        of the signal's power in each block, and training starts with a plateau (docs/models.md).
        """
        if name.startswith(self.linears[-1]):
            return super().bound(name, shape, fan_in)
        return math.sqrt(6 / fan_in) if name.endswith("weight") else 0.0

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the input of the last linear layer, ``[b, channels, height, width] -> [b, f]``."""
        h = self.convolved(parameters, x).flatten(1)
        for name in self.linears[:-1]:
            h = F.relu(linear(parameters, name, h))
        return h

    def convolved(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the output of the blocks.

        ReLU follows the pooling, so that it runs on a quarter of the pixels. Both are monotone, so the function is the
        same.
        """
        h = x
        for name in self.convolutions:
            h = F.conv2d(h, parameters[f"{name}.weight"], parameters[f"{name}.bias"], padding=1)
            h = F.relu(F.max_pool2d(h, 2))
        return h


class BatchNormConvNet(ConvNet):
    """ConvNet with batch normalization (Ioffe, Szegedy, ICML 2015, arXiv 1502.03167) between convolution and ReLU.

    Training normalizes by the mean and variance of the batch, and moves statistics a tenth of the way to them, as torch
    does. Prediction normalizes by these statistics. They are entries of θ, so they are sent, averaged and stored like
    the rest of it, but not trained.

    Entries of a block are its kernel, ``gain`` (the scale less 1) and ``shift``, and the statistics ``mean`` and
    ``log_variance`` (biased, ε = 1e-5 inside the logarithm). All but the kernel start at zero. There is no bias, since
    the mean would cancel it.
    """

    needs_whole_batches = True

    def __init__(
        self, input_shape: tuple[int, ...], channels: Sequence[int], hidden: Sequence[int], classes: int
    ) -> None:
        super().__init__(input_shape, channels, hidden, classes)
        beside = [f"{name}.{entry}" for name in self.convolutions for entry in ("gain", "shift", *STATISTICS)]
        statistics = [name for name in beside if name.endswith(STATISTICS)]
        self.layout = replace(self.layout, buffers=tuple(statistics), normalization=tuple(beside))
        self._trains = False

    def in_training(self) -> FlatModel:
        """Return the model that normalizes by the batch."""
        view = copy.copy(self)
        view._trains = True
        return view

    def beside(self, name: str, channels: int) -> list[tuple[str, tuple[int, ...]]]:
        """Return the entries for gain, shift, mean and log-variance of each channel."""
        return [(f"{name}.{entry}", (channels,)) for entry in ("gain", "shift", *STATISTICS)]

    def convolved(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the output of the blocks; training moves the statistics in place."""
        h = x
        for name in self.convolutions:
            h = self._normalized(parameters, name, F.conv2d(h, parameters[f"{name}.weight"], padding=1))
        return h

    def _normalized(self, parameters: Mapping[str, Tensor], name: str, h: Tensor) -> Tensor:
        """Return the output of a block, given that of its convolution."""
        gain, shift, *statistics = (parameters[f"{name}.{entry}"] for entry in ("gain", "shift", *STATISTICS))
        h = h.to(gain.dtype)
        if self._trains:
            with torch.no_grad():
                variance, mean = torch.var_mean(h, (0, 2, 3), correction=0)
                for kept, found in zip(statistics, (mean, (variance + EPSILON).log()), strict=True):
                    kept.lerp_(found, TRACKING)
            h = F.batch_norm(h, None, None, 1 + gain, shift, training=True, eps=EPSILON)
        else:
            mean, log_variance = statistics
            scale = (1 + gain) * (-log_variance / 2).exp()
            h = h * scale[:, None, None] + (shift - mean * scale)[:, None, None]
        return F.relu(F.max_pool2d(h, 2))
