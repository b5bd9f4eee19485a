"""Description of the examples of a data set, shared by all that holds or requests data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedloom.core import digests
from fedloom.core.words import composed, named_twice, parsed_json, pluralize
from fedloom.data.input_spec import (
    INPUT_NAME,
    NOTHING,
    InputSpec,
    Kind,
    Normalization,
    RawInputs,
    TensorKind,
    named_arrays,
)
from fedloom.data.targets import Targets
from fedloom.errors import DataError
from fedloom.tasks.names import TaskName

Measured: TypeAlias = InputSpec | Targets
"""Tensor whose mean and standard deviation are measured."""

T = TypeVar("T")


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
        return Normalization(
            tuple(number for part in parts for number in part.mean),
            tuple(number for part in parts for number in part.std),
        )

    @property
    def is_normalized(self) -> bool:
        """True if the normalization is known."""
        return len(self.normalization.mean) == self.numbers

    def with_normalization(self, normalization: Normalization) -> DataSpec:
        """Return the description with the normalizations of all measured tensors, concatenated, or with none."""
        parts, start = [], 0
        for tensor in self.measured:
            chosen = slice(start, start + tensor.numbers)
            parts.append(Normalization(normalization.mean[chosen], normalization.std[chosen]))
            start += tensor.numbers
        if len(normalization.mean) not in (0, start) or len(normalization.mean) != len(normalization.std):
            raise SpecError(str(normalization.fault(start)))
        pairs = zip(self.inputs.items(), parts, strict=False)
        inputs = {name: replace(spec, normalization=part) for (name, spec), part in pairs}
        targets = self.targets
        if targets is not None and targets.numbers:
            targets = targets.normalized(parts[-1])
        return replace(self, inputs=inputs, targets=targets)

    def mismatch(self, needed: DataSpec, source: str, *, exact: bool = False, skip: Collection[str] = ()) -> str | None:
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
            has, wants = self._aspect(aspect), needed._aspect(aspect)
            if has != wants and aspect not in skip:
                return f"{aspect} is {_shown(has)}; {source} needs {_shown(wants)}"
        if needed.tokenizer not in (None, self.tokenizer) and (exact or self.tokenizer is not None):
            return f"tokenizer is {self.tokenizer}; {source} needs {needed.tokenizer}"
        return None

    def _aspect(self, name: str) -> Any:
        match name:
            case "classes":
                return tuple(map(composed, self.class_names))
            case "targets":
                return None if self.targets is None else self.targets.plain()
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
            what = f"the inputs {name} are" if name else "the inputs are"
            if (fault := spec.values_fault(arrays[name], self.classes, what)) is not None:
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
        named = f" {_shown(value.names)}" if value.names else ""
        return f"{value.task} of shape {list(value.shape)} with {value.outputs} outputs{named}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) or "one tensor"
    if isinstance(value, tuple):
        words = [str(item) for item in value]
        text = ", ".join(words if len(words) <= 12 else [*words[:12], "..."])
        return f"[{text}]" if len(words) <= 12 else f"[{text}] ({pluralize(len(words), 'item')})"
    return "none" if value is None else str(value)


def parse_document(adapter: TypeAdapter[T], content: bytes, source: str, version: int, hint: str) -> T:
    """Return the object in a JSON text with a compact digest; raise DataError if damaged or of another version."""
    try:
        return adapter.validate_json(digests.without_compact_digest(content))
    except (digests.Damaged, ValidationError) as error:
        try:
            stated = parsed_json(content)["version"]
        except (ValueError, TypeError, KeyError):
            stated = version
        if stated == version:
            raise DataError(f"{source} is damaged: {text_fault(error)}", hint=hint) from error
        fault = f"has version {stated}; this FedLoom reads version {version}"
        raise DataError(f"{source} {fault}", hint=hint) from error


def text_fault(error: digests.Damaged | ValidationError) -> str:
    """Return the key and the error of an invalid JSON text."""
    if isinstance(error, digests.Damaged):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole text'}: {first['msg']:.200}"
