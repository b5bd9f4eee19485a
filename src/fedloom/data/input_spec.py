"""Kinds of input, and the description of one input tensor of every example."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["pixels", "features", "tokens", "integers", "named"]
"""Kind of input.

``pixels`` [channels, height, width] uint8, standardized per channel after division by 255; ``features`` float32 of any
rank, standardized per entry of the channel axis; ``tokens`` [length] uint8, indices into a vocabulary that is the list
of classes (next-token prediction), used unchanged; ``integers`` int64 of any rank, from 0 (category codes, token ids),
used unchanged by a model that takes them, else standardized like features; ``named`` several tensors, each of its own
kind.
"""

TensorKind: TypeAlias = Literal["pixels", "features", "tokens", "integers"]
"""Kind of one tensor."""

ChannelAxis: TypeAlias = Literal["first", "last"]
"""Axis of an input whose entries have a mean and a standard deviation each."""

AXES: Mapping[Kind, tuple[str, ...]] = {
    "pixels": ("channels", "height", "width"),
    "tokens": ("tokens",),
}
"""Names of the axes of inputs with a fixed rank."""

DTYPES: Mapping[Kind, np.dtype[Any]] = {
    "pixels": np.dtype(np.uint8),
    "features": np.dtype(np.float32),
    "tokens": np.dtype(np.uint8),
    "integers": np.dtype(np.int64),
}
"""Types in which shards hold inputs."""

INPUT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Pattern of the names of named inputs, which are arguments of a module."""

DIGEST = re.compile(r"[0-9a-f]{64}")
"""Pattern of a SHA-256 in hex."""

RawInputs: TypeAlias = NDArray[Any] | Mapping[str, NDArray[Any]]
"""Inputs as shards hold them: ``[n, *shape]``, or such arrays by name."""


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of each channel (of pixels scaled to 0 ... 1), feature or number.

    Empty for tokens.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def identity(cls, numbers: int) -> Normalization:
        """Return the normalization that changes nothing."""
        return cls((0.0,) * numbers, (1.0,) * numbers)

    def fault(self, numbers: int) -> str | None:
        """Return why these are not the means and deviations of ``numbers`` channels, or None; they may be empty."""
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, numbers):
            return f"normalization: {len(self.mean)} means and {len(self.std)} deviations; give {numbers} of each"
        if not all(map(math.isfinite, self.mean)) or not all(0 < each < math.inf for each in self.std):
            return "normalization: means must be finite, and deviations finite and above 0"
        return None


NOTHING = Normalization((), ())


@dataclass(frozen=True)
class InputSpec:
    """Description of one input tensor.

    Attributes
    ----------
    kind, shape
        Its kind and shape for one example.
    normalization
        Mean and standard deviation of each entry of the channel axis, also for integers, which some models cannot
        take unchanged.
    channel_axis
        Axis of features and integers along which normalization is measured.
    high
        Largest integer of the data + 1; None for other kinds.
    tokenizer
        SHA-256 of the tokenizer that turned texts into integers
        (:func:`~fedloom.data.pack.texts.tokenizer_digest`), if any.
    """

    kind: TensorKind
    shape: tuple[int, ...]
    normalization: Normalization = NOTHING
    channel_axis: ChannelAxis = "first"
    high: int | None = None
    tokenizer: str | None = None

    @property
    def numbers(self) -> int:
        """Length of the normalization: entries of the channel axis; 0 for tokens."""
        if not self.shape:
            return 1
        return 0 if self.kind == "tokens" else self.shape[0 if self.channel_axis == "first" else -1]

    @property
    def values(self) -> int:
        """Values of one example that each mean covers; 1 for tokens."""
        return math.prod(self.shape) // self.numbers if self.numbers else 1

    @property
    def scale(self) -> int:
        """Divisor of raw values before normalization."""
        return 255 if self.kind == "pixels" else 1

    @property
    def broadcast(self) -> tuple[int, ...]:
        """Shape in which a mean broadcasts against ``[n, *shape]``."""
        if not self.shape:
            return (1,)
        others = [1] * (len(self.shape) - 1)
        return (1, -1, *others) if self.channel_axis == "first" else (1, *others, -1)

    def rows(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return ``[n, *shape]`` as ``[numbers, n * values]``."""
        if not self.shape:
            return x.reshape(1, -1)
        return np.moveaxis(x, 1 if self.channel_axis == "first" else -1, 0).reshape(self.numbers, -1)

    def fault(self, name: str = "") -> str | None:
        """Return a contradiction within the description of the input with this name, or None.

        The normalization may be empty, as long as it is not known.
        """
        within = f"inputs.{name}." if name else ""
        axes = AXES.get(self.kind)
        scalar = name and not self.shape and axes is None
        if not scalar and (min(self.shape, default=0) < 1 or len(self.shape) != len(axes or self.shape)):
            wanted = "any axes" if axes is None else ", ".join(axes)
            key = "shape" if name else "input_shape"
            return f"{within}{key}: {list(self.shape)} must be [{wanted}] for {self.kind}, each at least 1"
        if self.channel_axis != "first" and (axes is not None or len(self.shape) < 2):
            return f"{within}channel_axis: last is only for features and integers of two or more axes"
        if (self.high is None) != (self.kind != "integers") or (self.high is not None and self.high < 1):
            return f"{within}high: must be at least 1 for integers, and null for other kinds (got {self.high})"
        if self.tokenizer is not None and (self.kind != "integers" or not DIGEST.fullmatch(self.tokenizer)):
            return f"{within}tokenizer: must be a SHA-256 in hex, of integers (got {self.tokenizer[:80]})"
        return self.normalization.fault(self.numbers)

    def values_fault(self, x: NDArray[Any], classes: int, what: str = "the inputs are") -> str | None:
        """Return why an array cannot hold the inputs of a shard's examples, or None."""
        dtype = DTYPES[self.kind]
        if x.shape[1:] != self.shape or x.dtype != dtype:
            return (
                f"{what} {x.dtype} of shape {list(x.shape[1:])}; {self.kind} must be {dtype} of shape "
                f"{list(self.shape)}"
            )
        if self.kind == "features" and not np.isfinite(x).all():
            return f"a feature is {x[~np.isfinite(x)][0]}; features must be finite"
        if self.kind == "tokens" and len(x) and int(x.max()) >= classes:
            return f"a token is {int(x.max())}; tokens must be 0 to {classes - 1}"
        if self.kind == "integers" and x.size and int(x.min()) < 0:
            return f"an integer is {int(x.min())}; integers must be 0 or more"
        return None


def named_arrays(x: RawInputs) -> Mapping[str, NDArray[Any]]:
    """Return inputs by name; the name of a single tensor is empty."""
    return x if isinstance(x, Mapping) else {"": x}


def unnamed(x: Mapping[str, NDArray[Any]]) -> RawInputs:
    """Return the single tensor of the empty name, or all by name: the inverse of :func:`named_arrays`."""
    return x.get("", x)


def input_key(split: str, name: str = "") -> str:
    """Return the key of an input tensor in a shard: ``train_x``, or ``train_x.NAME``."""
    return f"{split}_x.{name}" if name else f"{split}_x"


def shard_tensors(split: str, x: RawInputs, y: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    """Return the inputs and targets (None: none) of a split by their keys in a shard."""
    tensors = {input_key(split, name): each for name, each in named_arrays(x).items()}
    return tensors if y is None else tensors | {f"{split}_y": y}
