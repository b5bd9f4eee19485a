"""Embedding networks φ: one example to a point in descriptor space; a descriptor is their mean (papers/001, §3)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from fedloom.models.flat import FlatNetwork, Layout
from fedloom.models.lenet import lenet_features, lenet_layout


class EmbeddingNetwork(FlatNetwork):
    """φ(x, y; η_v), ``[b, *input_shape], [b] -> [b, l]``."""

    @abstractmethod
    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Embed a batch; ``y`` is None for the unlabelled variant."""

    def describe(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """The descriptor v(B; η_v) = 1/|B| Σ φ(x, y), ``[l]``."""
        return self.forward(parameters, x, y).mean(0)


class LeNetEmbedding(EmbeddingNetwork):
    """LeNet with C label planes appended to the image (papers/001, Table 4 and §4 "Models").

    A label plane is constant and the convolution has no padding, so its contribution is constant over the image: the
    sum of the plane's kernel. It is added as a bias that depends on the label, which is the same function as
    convolving C more channels and an order of magnitude cheaper.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int, *, labels: bool) -> None:
        self.channels, height, width = input_shape
        self.classes = classes
        self.labels = labels
        self.layout = lenet_layout(self.channels + (classes if labels else 0), height, width, size)

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """``[b, channels, height, width], [b] -> [b, l]``."""
        kernel, bias = parameters["conv1.weight"], parameters["conv1.bias"]
        h = F.conv2d(x, kernel[:, : self.channels], bias)
        if self.labels:
            assert y is not None
            planes = F.one_hot(y, self.classes).to(x.dtype) @ kernel[:, self.channels :].sum((2, 3)).t()  # [b, 16]
            h = h + planes[:, :, None, None]
        return F.linear(lenet_features(parameters, h), parameters["fc3.weight"], parameters["fc3.bias"])


class LinearEmbedding(EmbeddingNetwork):
    """One linear layer on the one-hot label (papers/001, §4 "Models"; the paper's choice for CIFAR-100)."""

    def __init__(self, classes: int, size: int) -> None:
        self.classes = classes
        self.layout = Layout((("fc.weight", (size, classes)), ("fc.bias", (size,))))

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """``[b, ...], [b] -> [b, l]``."""
        assert y is not None
        return F.linear(F.one_hot(y, self.classes).to(x.dtype), parameters["fc.weight"], parameters["fc.bias"])
