"""Built-in networks as functions of a flat vector: perceptrons, LeNet, VGG, ResNet20, LSTMs, and a quadratic."""

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


class MLP(FlatModel):
    """Linear layers of the given widths with ReLU between them; without hidden layers, logistic regression."""

    def __init__(self, input_shape: tuple[int, ...], hidden: Sequence[int], classes: int) -> None:
        widths = [math.prod(input_shape), *hidden, classes]
        self.depth = len(widths) - 1
        self.layout = Layout(tuple(linear_entries(widths)))

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the last hidden layer, ``[b, *input_shape] -> [b, width of the last hidden layer]``."""
        h = x.flatten(1)
        for i in range(1, self.depth):
            h = F.relu(linear(parameters, f"fc{i}", h))
        return h

    def forward_together(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
        """Return the logits of g clients, ``[g, b, *input_shape] -> [g, b, C]``; None for a subclass.

        Layers are W xᵀ, so that the gradient of W has its memory layout: a step along a transposed one takes twice as
        long.
        """
        if type(self) is not MLP:
            return None
        h = x.flatten(2)
        for i in range(1, self.depth + 1):
            weight, bias = parameters[f"fc{i}.weight"], parameters[f"fc{i}.bias"]
            h = torch.matmul(weight, h.transpose(1, 2)).transpose(1, 2) + bias[:, None]
            h = h if i == self.depth else F.relu(h)
        return h


def lenet_layout(channels: int, height: int, width: int, outputs: int) -> Layout:
    """Return the layout of conv 16@5x5, pool, conv 32@5x5, pool, 120, 84, ``outputs``; convolutions have no padding.

    On 32x32 the first linear layer has 800 inputs (Table 3); on 28x28, 512.

    Raise ValueError if the image is too small to leave a pixel (the minimum is 16x16).
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


STATISTICS = ("mean", "log_variance")
EPSILON = 1e-5  # as in torch.nn.BatchNorm2d
TRACKING = 0.1
"""Fraction by which a call in training moves statistics towards the batch's: torch's batch-normalization momentum."""


class ConvNet(FlatModel):
    """Blocks of a 3x3 convolution (padding 1), ReLU and 2x2 max pooling, then linear layers with ReLU between them.

    Raise ValueError if the image is too small to leave a pixel.

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
        for name, (inputs, outputs) in zip(self.convolutions, pairwise([depth, *channels]), strict=True):
            entries += [(f"{name}.weight", (outputs, inputs, 3, 3)), *self.beside(name, outputs)]
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
        gain, shift, mean, log_variance = (parameters[f"{name}.{entry}"] for entry in ("gain", "shift", *STATISTICS))
        h = h.to(gain.dtype)
        if self._trains:
            with torch.no_grad():
                batch_variance, batch_mean = torch.var_mean(h, (0, 2, 3), correction=0)
                mean.copy_(torch.lerp(mean, batch_mean, TRACKING))  # torch.func.vmap runs lerp_ client by client
                log_variance.copy_(torch.lerp(log_variance, (batch_variance + EPSILON).log(), TRACKING))
            h = F.batch_norm(h, None, None, 1 + gain, shift, training=True, eps=EPSILON)
        else:
            scale = (1 + gain) * (-log_variance / 2).exp()
            h = h * scale[:, None, None] + (shift - mean * scale)[:, None, None]
        return F.relu(F.max_pool2d(h, 2))


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

    Raise ValueError if the image is smaller than 4x4, which leaves one pixel for the third stage.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        if min(input_shape[1:]) < 4:
            raise ValueError(f"ResNet20 needs images of at least 4x4 (got {input_shape[1]}x{input_shape[2]})")
        entries: list[tuple[str, tuple[int, ...]]] = [("conv.weight", (STAGES[0], input_shape[0], 3, 3))]
        self.blocks: list[tuple[str, int]] = []  # name, stride
        inputs = STAGES[0]
        for s, channels in enumerate(STAGES, start=1):
            for b in range(1, BLOCKS + 1):
                block = f"stage{s}.block{b}"
                self.blocks.append((block, 2 if inputs != channels else 1))
                entries += [
                    (f"{block}.conv1.weight", (channels, inputs, 3, 3)),
                    (f"{block}.conv2.weight", (channels, channels, 3, 3)),
                ]
                if inputs != channels:
                    entries.append((f"{block}.shortcut.weight", (channels, inputs, 1, 1)))
                inputs = channels
        entries += [("fc.weight", (classes, inputs)), ("fc.bias", (classes,))]
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


FORGET_OFFSET = 1.0
"""Offset of the forget gate's argument, as in TensorFlow's BasicLSTMCell: a fresh network remembers. It is part of the
function, not of θ, so that it also applies to parameters generated by a hypernetwork."""


class LSTM(FlatModel):
    """Embedding, stacked LSTM layers, and a linear layer on the final state of the last one.

    S. Caldas et al., "LEAF: A benchmark for federated settings", 2018, §A, and its implementation; the clients' model
    of papers/001, A.3 "Shakespeare dataset". An LSTM layer with input x_t and state (h, c) computes, with σ the
    logistic function, ⊙ the elementwise product, and one bias per gate::

        (i, f, g, o) = W x_t + U h + b
        c ← σ(f + 1) ⊙ c + σ(i) ⊙ tanh(g)
        h ← σ(o) ⊙ tanh(c)

    Parameters
    ----------
    vocabulary
        Number of distinct tokens, which are also the classes.
    embedding, hidden, layers
        Length of a token's vector, width of a layer, number of layers.
    outputs
        Outputs of the linear layer; None for one per token, the logits of the next one.
    """

    def __init__(
        self, vocabulary: int, embedding: int = 8, hidden: int = 256, layers: int = 2, *, outputs: int | None = None
    ) -> None:
        outputs = vocabulary if outputs is None else outputs
        self.hidden = hidden
        self.layers = [f"lstm{i}" for i in range(1, layers + 1)]
        entries: list[tuple[str, tuple[int, ...]]] = [("embedding.weight", (vocabulary, embedding))]
        width = embedding
        for name in self.layers:
            entries += [
                (f"{name}.input.weight", (4 * hidden, width)),
                (f"{name}.state.weight", (4 * hidden, hidden)),
                (f"{name}.bias", (4 * hidden,)),
            ]
            width = hidden
        entries += [("fc.weight", (outputs, hidden)), ("fc.bias", (outputs,))]
        self.layout = Layout(tuple(entries))

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return the bound of LEAF's implementation: Glorot's, an LSTM's two matrices taken as one; biases are zero.

        X. Glorot, Y. Bengio, AISTATS 2010, eq. 16. Only the token vectors are drawn wider, with variance 1 like any
        other input (and like PyTorch's Embedding): with LEAF's bound, training starts with a longer plateau.
        """
        if name.endswith("bias"):
            return 0.0
        if name == "embedding.weight":
            return math.sqrt(3)
        if name.startswith("lstm"):
            width = dict(self.layout.entries)[name.replace("state", "input")][1]
            fan_in = width + self.hidden
        return math.sqrt(6 / (fan_in + shape[0]))

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the final state of the last layer, ``[b, tokens]`` of any integer type ``-> [b, hidden]``."""
        h = F.embedding(x.int().t(), parameters["embedding.weight"])  # [tokens, b, embedding]
        for name in self.layers:
            h = self._layer(parameters, name, h)
        return h[-1]

    def _layer(self, parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        """Return the states of one layer, ``[tokens, b, width] -> [tokens, b, hidden]``.

        The loop over time contains only what depends on the state: W x_t is one product for all t.
        """
        bias = parameters[f"{name}.bias"]
        forget = F.pad(bias.new_full((self.hidden,), FORGET_OFFSET), (self.hidden, 2 * self.hidden))
        inputs = F.linear(x, parameters[f"{name}.input.weight"], bias + forget)  # [tokens, b, 4 hidden]
        u = parameters[f"{name}.state.weight"].t()
        h = c = inputs.new_zeros(x.shape[1], self.hidden)
        states = []
        for wx in inputs.unbind(0):
            i, f, g, o = torch.addmm(wx, h, u).chunk(4, 1)
            c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states)


class Quadratic(FlatModel):
    """Estimator θ of the mean of the inputs: an input x costs (θ - x)ᵀ H (θ - x)/2, H diagonal.

    For inputs of mean m and covariance Σ, a client's objective is f_i(θ) = (θ - m)ᵀH(θ - m)/2 + tr(HΣ)/2, and its
    stochastic gradient H(θ - x) has the noise H(x - m). With H = I this is mean estimation.

    Raise ValueError if the number of curvatures differs from ``features``.

    Parameters
    ----------
    features
        Length of an input, and of θ.
    curvature
        Diagonal of H: one number for all coordinates, or one for each; all above 0.
    """

    needs_labels = False

    def __init__(self, features: int, curvature: float | Sequence[float] = 1.0) -> None:
        diagonal = [curvature] * features if isinstance(curvature, int | float) else list(curvature)
        if len(diagonal) != features:
            raise ValueError(f"curvature has {len(diagonal)} numbers, but the inputs have {features} features")
        self.layout = Layout((("theta", (features,)),))
        self.curvature = torch.tensor(diagonal, dtype=torch.float64)

    def bound(self, name: str, shape: tuple[int, ...], fan_in: int) -> float:
        """Return 0: θ starts at 0."""
        del name, shape, fan_in
        return 0.0

    def features(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the inputs themselves, ``[b, f]``."""
        del parameters
        return x

    def forward(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return θ for each input, ``[b, f] -> [b, f]``."""
        return parameters["theta"].expand_as(x)

    def loss(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor | None) -> Tensor:
        """Return (θ - x)ᵀ H (θ - x)/2 of each input, ``[b, f] -> [b]``; labels are ignored."""
        del y
        curvature = self.curvature.to(x)
        return (curvature * (self.forward(parameters, x) - x).square()).sum(1) / 2
