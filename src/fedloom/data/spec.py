"""Description of the examples of a data set, shared by all that holds or requests data.

A data set has input tensors (:class:`InputSpec`), and classes or other targets (:class:`Targets`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed, first_of, named_twice
from fedloom.errors import DataError
from fedloom.tasks.names import KINDS, TargetKind, TaskName

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

AXES: Mapping[Kind, tuple[str, ...]] = {"pixels": ("channels", "height", "width"), "tokens": ("tokens",)}
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
        prefix = f"inputs.{name}." if name else ""
        axes = AXES.get(self.kind)
        scalar = name and not self.shape and axes is None
        if not scalar and (min(self.shape, default=0) < 1 or len(self.shape) != len(axes or self.shape)):
            expected = "any axes" if axes is None else ", ".join(axes)
            key = "shape" if name else "input_shape"
            return f"{prefix}{key}: {list(self.shape)} must be [{expected}] for {self.kind}, each at least 1"
        if self.channel_axis != "first" and (axes is not None or len(self.shape) < 2):
            return f"{prefix}channel_axis: last is only for features and integers of two or more axes"
        if (self.high is None) != (self.kind != "integers") or (self.high is not None and self.high < 1):
            return f"{prefix}high: must be at least 1 for integers, and null for other kinds (got {self.high})"
        if self.tokenizer is not None and (self.kind != "integers" or not re.fullmatch("[0-9a-f]{64}", self.tokenizer)):
            return f"{prefix}tokenizer: must be a SHA-256 in hex, of integers (got {self.tokenizer[:80]})"
        return self.normalization.fault(self.numbers)

    def values_fault(self, x: NDArray[Any], classes: int, subject: str = "the inputs are") -> str | None:
        """Return why an array cannot hold the inputs of a shard's examples, or None."""
        dtype = DTYPES[self.kind]
        if x.shape[1:] != self.shape or x.dtype != dtype:
            return (
                f"{subject} {x.dtype} of shape {list(x.shape[1:])}; {self.kind} must be {dtype} of shape "
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


@dataclass(frozen=True)
class Targets:
    """Description of what is predicted, where it is not one class per example.

    Attributes
    ----------
    task
        Name of the task.
    shape
        Shape of one target: ``(K,)`` 0 or 1 for each label; ``()`` or ``(k,)`` numbers, or ``(...)`` a field of them;
        ``(height, width)`` or ``(depth, height, width)`` class indices; ``(length,)`` tokens.
    outputs
        K: labels, numbers, classes of a pixel, or tokens of the vocabulary.
    names
        Names of the K labels, numbers or classes; empty if they have none.
    mean, std
        Mean and standard deviation of each number over the training targets, for standardization in regression; one
        of each for a field; empty for other tasks.
    """

    task: TaskName
    shape: tuple[int, ...]
    outputs: int
    names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    scale: ClassVar[int] = 1
    """Divisor of raw values before normalization."""

    @property
    def kind(self) -> TargetKind:
        """Properties of the targets of this task."""
        return KINDS[self.task]

    @property
    def numbers(self) -> int:
        """Length of the normalization: K for regression, 1 for a field of numbers, 0 for other tasks."""
        return 0 if not self.kind.is_number else self.outputs if len(self.shape) < 2 else 1

    @property
    def values(self) -> int:
        """Values of one target that each mean covers."""
        return self.outputs // self.numbers if self.numbers else 1

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of each number; empty unless the task is regression."""
        return Normalization(self.mean, self.std)

    @property
    def stored(self) -> np.dtype[Any]:
        """Type in which shards hold targets."""
        small = self.kind.is_binary or (self.kind.like == "plane" and self.outputs <= 256)
        return np.dtype(np.float32 if self.kind.is_number else np.uint8 if small else np.int64)

    @property
    def ignored(self) -> int | None:
        """Value that marks a pixel without a class, or a place without a target, if there is one."""
        value = self.kind.ignored
        return None if value is not None and 0 <= value < self.outputs else value

    def raw(self) -> Targets:
        """Return the targets with the normalization that changes nothing."""
        identity = Normalization.identity(self.numbers)
        return replace(self, mean=identity.mean, std=identity.std)

    def fault(self) -> str | None:
        """Return a contradiction within the description, or None; the normalization may be empty."""
        if self.task not in KINDS or self.kind.is_class:
            return f"targets.task: {self.task} has classes, and no targets"
        if len(self.shape) not in self.kind.ranks or min(self.shape, default=1) < 1:
            return f"targets.shape: {list(self.shape)}; {self.task} has targets {self.kind.shapes}"
        entries = math.prod(self.shape)
        if self.outputs < 1 or (self.kind.like is None and self.outputs != entries):
            return f"targets.outputs: {self.outputs}; {self.task} of targets {list(self.shape)} has {entries}"
        if self.names and (len(self.names) != self.outputs or named_twice(self.names) is not None):
            return f"targets.names: {len(self.names)} names; there must be {self.outputs} different ones, or none"
        return self.normalization.fault(self.numbers)

    def values_fault(self, y: NDArray[Any], count: int) -> str | None:
        """Return why an array cannot hold the targets of ``count`` examples as a shard does, or None."""
        if y.dtype != self.stored or y.shape != (count, *self.shape):
            expected = [count, *self.shape]
            return f"the targets are {y.dtype} of shape {list(y.shape)}; they must be {self.stored} of shape {expected}"
        if not y.size:
            return None
        if self.kind.is_number:
            wrong = ~np.isfinite(y)
            return f"a target is {y[wrong][0]}; targets must be finite" if wrong.any() else None
        most = 1 if self.kind.is_binary else self.outputs - 1
        wrong = (y < 0) | (y > most)
        if self.ignored is not None:
            wrong &= y != self.ignored
        if wrong.any():
            also = "" if self.ignored is None else f", or {self.ignored} for no target"
            return f"a target is {int(y[wrong][0])}; targets must be 0 to {most}{also}"
        return None

    def rows(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return numbers ``[n, *shape]`` as ``[numbers, n * values]``."""
        return y.reshape(-1, self.numbers).T


Measured: TypeAlias = InputSpec | Targets
"""Tensor whose mean and standard deviation are measured."""


class SpecError(DataError, ValueError):
    """Description of data that contradicts itself; pydantic collects it with the errors of other keys."""


@dataclass(frozen=True)
class DataSpec:
    """Inputs and targets of every example of a data set.

    Raise SpecError if the description contradicts itself.

    Attributes
    ----------
    inputs
        Input tensors by name; the name of a single one is empty. Normalizations are empty until they are known.
    class_names
        Names of the C classes, in label order; empty if the targets are not classes, or there are none.
    targets
        Targets that are not classes; None for classes.
    """

    inputs: Mapping[str, InputSpec]
    class_names: tuple[str, ...] = ()
    targets: Targets | None = None

    def __post_init__(self) -> None:
        """Check the description."""
        if (fault := self._fault()) is not None:
            raise SpecError(fault)

    def _fault(self) -> str | None:
        if not self.inputs or ("" in self.inputs and len(self.inputs) > 1):
            return "inputs: give one input, or a name for each of several"
        for name, spec in self.inputs.items():
            if name and not INPUT_NAME.fullmatch(name):
                return f"inputs: {name!r} must be a name of letters, digits and underscores"
            if name and spec.kind == "tokens":
                return f"inputs.{name}.kind: tokens cannot be named inputs; use integers"
            if (fault := spec.fault(name)) is not None:
                return fault
        if (twice := named_twice(self.class_names)) is not None:
            return f"classes: {twice!r} occurs twice; give each class a unique name"
        if self.kind == "tokens" and len(self.class_names) > 256:
            return f"classes: {len(self.class_names)} names; tokens are single bytes, so give at most 256"
        if self.targets is None:
            return None
        return "classes: must be empty, because targets are given" if self.class_names else self.targets.fault()

    @classmethod
    def single(
        cls,
        kind: TensorKind,
        shape: tuple[int, ...],
        class_names: tuple[str, ...] = (),
        normalization: Normalization = NOTHING,
    ) -> DataSpec:
        """Return the description of classified examples with one input tensor."""
        return cls({"": InputSpec(kind, shape, normalization)}, class_names)

    @property
    def kind(self) -> Kind:
        """Kind of the inputs; ``named`` for several."""
        return self.inputs[""].kind if "" in self.inputs else "named"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a single input; empty for named ones."""
        return self.inputs[""].shape if "" in self.inputs else ()

    @property
    def classes(self) -> int:
        """Number C of classes; 0 if there are none."""
        return len(self.class_names)

    @property
    def task(self) -> TaskName:
        """Name of the task that the targets are for."""
        return "classification" if self.targets is None else self.targets.task

    @property
    def outputs(self) -> int:
        """Number of outputs K of a model: classes, labels, numbers, classes of a pixel, or tokens."""
        return self.classes if self.targets is None else self.targets.outputs

    @property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer that made one of the inputs, or None."""
        return next((spec.tokenizer for spec in self.inputs.values() if spec.tokenizer is not None), None)

    @property
    def measured(self) -> list[Measured]:
        """Tensors that have a normalization: the inputs, in order, then regression's targets."""
        targets = [] if self.targets is None or not self.targets.numbers else [self.targets]
        return [*self.inputs.values(), *targets]

    @property
    def numbers(self) -> int:
        """Length of the normalization."""
        return sum(each.numbers for each in self.measured)

    @property
    def normalization(self) -> Normalization:
        """Normalizations of the measured tensors, concatenated; empty if they are not known."""
        parts = [each.normalization for each in self.measured]
        mean, std = ((part.mean for part in parts), (part.std for part in parts))
        return Normalization(tuple(chain.from_iterable(mean)), tuple(chain.from_iterable(std)))

    @property
    def is_normalized(self) -> bool:
        """True if the normalization is known."""
        return len(self.normalization.mean) == self.numbers

    def with_normalization(self, normalization: Normalization) -> DataSpec:
        """Return the description with the normalizations of all measured tensors, concatenated, or with none."""
        if (fault := normalization.fault(self.numbers)) is not None:
            raise SpecError(fault)
        ends = [*accumulate((tensor.numbers for tensor in self.measured), initial=0)]
        parts = [Normalization(normalization.mean[i:j], normalization.std[i:j]) for i, j in pairwise(ends)]
        pairs = zip(self.inputs.items(), parts, strict=False)
        inputs = {name: replace(spec, normalization=part) for (name, spec), part in pairs}
        targets = self.targets
        if targets is not None and targets.numbers:
            targets = replace(targets, mean=parts[-1].mean, std=parts[-1].std)
        return replace(self, inputs=inputs, targets=targets)

    def mismatch(self, other: DataSpec, source: str, *, exact: bool = False, skip: Collection[str] = ()) -> str | None:
        """Return the first difference from the data that ``source`` needs, except in normalizations; None: none.

        Parameters
        ----------
        exact
            Also compare the channel axes and the bounds of integers, and require the tokenizer if one is needed.
        skip
            Aspects that are not compared: ``classes``, ``targets``.
        """
        aspects = ["kind", "input_shape", "inputs", "classes", "targets", *(["channel_axis", "high"] if exact else [])]
        for aspect in aspects:
            has, wants = self._aspect(aspect), other._aspect(aspect)
            if has != wants and aspect not in skip:
                return f"{aspect} is {_shown(has)}; {source} needs {_shown(wants)}"
        if other.tokenizer not in (None, self.tokenizer) and (exact or self.tokenizer is not None):
            return f"tokenizer is {self.tokenizer}; {source} needs {other.tokenizer}"
        return None

    def _aspect(self, name: str) -> Any:
        match name:
            case "classes":
                return tuple(map(composed, self.class_names))
            case "targets":
                return None if self.targets is None else replace(self.targets, mean=(), std=())
            case "inputs":
                return {name: (spec.kind, spec.shape) for name, spec in self.inputs.items() if name}
            case "channel_axis" | "high":
                values = {key: getattr(spec, name) for key, spec in self.inputs.items()}
                return values.get("", values)
        return getattr(self, name)

    def examples_fault(self, x: RawInputs, y: NDArray[Any] | None) -> str | None:
        """Return why arrays cannot hold the inputs and targets of a shard's examples, or None."""
        arrays = named_arrays(x)
        if set(arrays) != set(self.inputs):
            return f"the inputs are {', '.join(arrays) or '(none)'}; they must be {', '.join(self.inputs)}"
        for name, spec in self.inputs.items():
            subject = f"the inputs {name} are" if name else "the inputs are"
            if (fault := spec.values_fault(arrays[name], self.classes, subject)) is not None:
                return fault
        sizes = {len(each) for each in arrays.values()}
        if len(sizes) > 1:
            return f"the inputs have {' and '.join(map(str, sorted(sizes)))} examples; their numbers must be equal"
        size = sizes.pop()
        if y is None:
            return None
        if self.targets is not None:
            return self.targets.values_fault(y, size)
        if y.dtype != np.int64 or y.shape != (size,):
            return f"the labels are {y.dtype} of shape {list(y.shape)}; they must be int64, [{size}]"
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            return f"the labels are {int(y.min())} to {int(y.max())}; they must be 0 to {self.classes - 1}"
        return None


def _shown(value: object) -> str:
    if isinstance(value, Targets):
        names = f" {_shown(value.names)}" if value.names else ""
        return f"{value.task} of shape {list(value.shape)} with {value.outputs} outputs{names}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) or "one tensor"
    if isinstance(value, tuple):
        return f"[{first_of([*map(str, value)], 12)}]"
    return "none" if value is None else str(value)
