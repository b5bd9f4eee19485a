"""Kinds of input, and the description of one input tensor of every example."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

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

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON, without those at their defaults."""
        known: dict[str, Any] = {"kind": self.kind, "shape": self.shape, "normalization": vars(self.normalization)}
        if self.channel_axis != "first":
            known["channel_axis"] = self.channel_axis
        if self.high is not None:
            known["high"] = self.high
        if self.tokenizer is not None:
            known["tokenizer"] = self.tokenizer
        return known

    def fault(self, name: str = "input_shape", *, normalized: bool = True) -> str | None:
        """Return a contradiction within the description, or None.

        ``name`` is the name of the shape in the message; ``normalized`` is False if the normalization is not known yet.
        """
        scalar = not self.shape and name == "shape" and self.kind in ("features", "integers")  # one of named inputs
        if not scalar and (fault := input_shape_fault(self.kind, self.shape, name)) is not None:
            return fault
        if self.channel_axis != "first" and (self.kind in ("pixels", "tokens") or len(self.shape) < 2):
            return (
                f"channel_axis is last, which is only for features and integers of two or more axes (got {self.kind})"
            )
        if (self.high is None) != (self.kind != "integers") or (self.high is not None and self.high < 1):
            return f"high is {self.high}; it must be at least 1 for integers, and null for other kinds"
        if self.tokenizer is not None and (self.kind != "integers" or not DIGEST.fullmatch(self.tokenizer)):
            return f"tokenizer is {self.tokenizer[:80]}; it must be a SHA-256 in hex, and only integers have one"
        return self._normalization_fault() if normalized else None

    def _normalization_fault(self) -> str | None:
        mean, std = self.normalization.mean, self.normalization.std
        if not len(mean) == len(std) == self.numbers:
            return (
                f"normalization: {len(mean)} means and {len(std)} deviations; {self.kind} need {self.numbers} of each"
            )
        if not all(map(math.isfinite, mean)):
            return f"normalization: mean is {list(mean)}; the numbers must be finite"
        if not all(0 < each < math.inf for each in std):
            return f"normalization: std is {list(std)}; the numbers must be finite and above 0"
        return None

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


class DescribesInputs(Protocol):
    """Anything with the fields that describe inputs: a manifest, a card, a problem."""

    @property
    def kind(self) -> Kind:
        """Kind of the inputs."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a single input; empty for named ones."""

    @property
    def normalization(self) -> Normalization:
        """Normalization of a single input."""

    @property
    def channel_axis(self) -> ChannelAxis:
        """Axis of its normalization."""

    @property
    def high(self) -> int | None:
        """Largest integer + 1."""

    @property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer that made the integers."""

    @property
    def inputs(self) -> Mapping[str, InputSpec] | None:
        """Named inputs, or None."""


def specs_of(about: DescribesInputs) -> Mapping[str, InputSpec]:
    """Return the description of each input tensor, in order; the name of a single one is empty."""
    if about.inputs is not None:
        return about.inputs
    assert about.kind != "named", "checked: named inputs have descriptions"
    axis, high, tokenizer = about.channel_axis, about.high, about.tokenizer
    return {"": InputSpec(about.kind, about.input_shape, about.normalization, axis, high, tokenizer)}


def tokenizer_of(specs: Mapping[str, InputSpec]) -> str | None:
    """Return the digest of the tokenizer that made one of the inputs, or None."""
    return next((spec.tokenizer for spec in specs.values() if spec.tokenizer is not None), None)


def input_fields(specs: Mapping[str, InputSpec]) -> dict[str, Any]:
    """Return the fields of :class:`DescribesInputs` for input tensors, the inverse of :func:`specs_of`."""
    if (spec := specs.get("")) is not None:
        return {
            "kind": spec.kind,
            "input_shape": spec.shape,
            "normalization": spec.normalization,
            "channel_axis": spec.channel_axis,
            "high": spec.high,
            "tokenizer": spec.tokenizer,
            "inputs": None,
        }
    return {
        "kind": "named",
        "input_shape": (),
        "normalization": NOTHING,
        "channel_axis": "first",
        "high": None,
        "tokenizer": None,
        "inputs": specs,
    }


def without_defaults(known: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON text without those of inputs and targets at their defaults.

    Data that need none of these fields then have the same text as before the fields existed; the hash of a text
    identifies the data.
    """
    for key in ("inputs", "targets", "high", "tokenizer"):
        if known.get(key, 0) is None:
            del known[key]
    if known.get("channel_axis") == "first":
        del known["channel_axis"]
    if known.get("inputs"):
        known["inputs"] = {name: spec.as_json() for name, spec in known["inputs"].items()}
    if known.get("targets"):
        known["targets"] = vars(known["targets"])
    if isinstance(known.get("normalization"), Normalization):
        known["normalization"] = vars(known["normalization"])
    return known


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


def joined_normalization(parts: Sequence[Normalization]) -> Normalization:
    """Return the normalizations of several tensors, concatenated."""
    return Normalization(
        tuple(number for part in parts for number in part.mean), tuple(number for part in parts for number in part.std)
    )


def with_normalizations(specs: Mapping[str, InputSpec], found: Sequence[Normalization]) -> dict[str, InputSpec]:
    """Return input tensors with a normalization each."""
    pairs = zip(specs.items(), found, strict=True)
    return {name: replace(spec, normalization=each) for (name, spec), each in pairs}


def input_shape_fault(kind: Kind, shape: Sequence[int], name: str = "input_shape") -> str | None:
    """Return why a shape of inputs does not fit their kind, or None."""
    if kind == "named":
        return f"{name}: {list(shape)} must be [] for named inputs, each of which has a shape" if shape else None
    axes = AXES.get(kind)
    if shape and min(shape) >= 1 and len(shape) == (len(shape) if axes is None else len(axes)):
        return None
    wanted = "features, or any axes" if kind == "features" else "any axes" if axes is None else ", ".join(axes)
    return f"{name}: {list(shape)} must be [{wanted}] for {kind}, each at least 1"


def inputs_fault(about: DescribesInputs, *, normalized: bool = True) -> str | None:
    """Return a contradiction within a description of inputs, or None."""
    if (about.kind == "named") != (about.inputs is not None):
        return f"kind is {about.kind}; inputs must be given for named inputs, and for no others"
    if about.inputs is None:
        spec = specs_of(about)[""]
        return spec.fault(normalized=normalized)
    if (fault := input_shape_fault("named", about.input_shape)) is not None:
        return fault
    if not about.inputs:
        return "inputs: it is empty; name at least one input"
    for name, spec in about.inputs.items():
        if not INPUT_NAME.fullmatch(name):
            return f"inputs: {name!r} must be a name of letters, digits and underscores"
        if spec.kind == "tokens":
            return f"inputs.{name}: tokens cannot be named inputs; use integers"
        if (fault := spec.fault("shape", normalized=normalized)) is not None:
            return f"inputs.{name}: {fault}"
    return None
