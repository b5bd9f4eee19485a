"""Requirements of an experiment on the data that clients bring: keys of ``data.own``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from fedloom.core.settings import Settings
from fedloom.core.words import composed, named_twice
from fedloom.data.input_spec import NOTHING, ChannelAxis, InputSpec, Kind, Normalization, inputs_fault, specs_of
from fedloom.data.moments import Measured, divided_normalization, measured_tensors
from fedloom.data.targets import Targets
from fedloom.tasks.names import TaskName

AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Numbers: TypeAlias = Annotated[tuple[float, ...], AsTuple]
Words: TypeAlias = Annotated[tuple[str, ...], AsTuple]

TOKENIZER = (
    "For integers made of texts: digest of the tokenizer that every client must use, as `fedloom data pack` prints it; "
    "null: any."
)
"""Description of a key."""


class Given(Settings):
    """Normalization given in advance: of the inputs (named ones sorted by name), then of the targets of regression."""

    mean: Numbers = Field(description="Mean of each channel (of pixels scaled to 0 ... 1) or feature, then target.")
    std: Numbers = Field(description="Standard deviation of each channel or feature, above 0.")


class NamedInput(Settings):
    """Requirements on one of several named inputs."""

    kind: Literal["pixels", "features", "integers"] = Field(description="Kind of input (docs/data.md).")
    shape: Annotated[tuple[int, ...], AsTuple] = Field(description="Shape of one input.")
    channel_axis: ChannelAxis = Field(
        default="first", description="Axis along which it is standardized: first or last."
    )
    high: int | None = Field(default=None, ge=1, description="Exclusive upper bound of integers.")
    tokenizer: str | None = Field(default=None, description=TOKENIZER)

    @property
    def spec(self) -> InputSpec:
        """Description of the input, without a normalization."""
        return InputSpec(
            self.kind, self.shape, channel_axis=self.channel_axis, high=self.high, tokenizer=self.tokenizer
        )


class OwnTargets(Settings):
    """Requirements on targets that are not classes."""

    task: Literal["multilabel", "regression", "segmentation", "next_token"] = Field(description="Task of the targets.")
    shape: Annotated[tuple[int, ...], AsTuple] = Field(
        default=(),
        description="Shape of one target: [labels], [] or [numbers], [height, width], or [tokens].",
    )
    outputs: int | None = Field(
        default=None,
        ge=1,
        description="Number of labels, numbers, classes of a pixel, or tokens; null, for labels and numbers: from the "
        "shape.",
    )
    names: Words = Field(default=(), description="Names of the labels, numbers or classes; empty: none.")

    @property
    def targets(self) -> Targets:
        """Description of the targets, without a normalization."""
        return Targets(self.task, self.shape, self.outputs or math.prod(self.shape), self.names)

    @model_validator(mode="after")
    def _check_keys(self) -> OwnTargets:
        if self.outputs is None and self.task in ("segmentation", "next_token"):
            raise ValueError(f"outputs: {self.task} needs the number of classes or tokens")
        if (fault := self.targets.fault(normalized=False)) is not None:
            raise ValueError(fault.removeprefix("targets."))
        return self


@dataclass(frozen=True)
class PlainInputs:
    """Description of inputs without a normalization (:class:`~fedloom.data.input_spec.DescribesInputs`)."""

    kind: Kind
    input_shape: tuple[int, ...]
    channel_axis: ChannelAxis
    high: int | None
    tokenizer: str | None
    inputs: Mapping[str, InputSpec] | None
    normalization: Normalization = NOTHING


class Own(Settings):
    """Requirements on every client's data."""

    kind: Kind = Field(
        description="Kind of input: pixels, features, tokens, integers, or named for several inputs (docs/data.md)."
    )
    input_shape: Annotated[tuple[int, ...], AsTuple] = Field(
        default=(),
        description="Shape of one input: [channels, height, width], [features] or any axes, or [tokens]; empty for "
        "named inputs.",
    )
    channel_axis: ChannelAxis = Field(
        default="first", description="Axis along which features and integers are standardized: first or last."
    )
    high: int | None = Field(default=None, ge=1, description="Exclusive upper bound of integers.")
    tokenizer: str | None = Field(default=None, description=TOKENIZER)
    inputs: dict[str, NamedInput] | None = Field(default=None, description="Named inputs, by name; null: a single one.")
    classes: Words = Field(
        default=(), description="Names of the classes, in label order; for tokens, the vocabulary. Empty with targets."
    )
    targets: OwnTargets | None = Field(default=None, description="Targets that are not classes; null: classes.")
    features: Words | None = Field(
        default=None, description="For tables: names of the columns of inputs, in order. Null: any."
    )
    normalization: Literal["measured"] | Given = Field(
        default="measured",
        description="measured: mean and std of all clients' training examples, from the counts, sums and sums of "
        "squares that clients announce; or {mean, std}, each a list.",
    )

    @property
    def specs(self) -> Mapping[str, InputSpec]:
        """Input tensors by name, without a normalization; the name of a single one is empty."""
        return specs_of(self._plain)

    @property
    def _plain(self) -> PlainInputs:
        inputs = None if self.inputs is None else {name: each.spec for name, each in sorted(self.inputs.items())}
        return PlainInputs(self.kind, self.input_shape, self.channel_axis, self.high, self.tokenizer, inputs)

    @property
    def wanted(self) -> Targets | None:
        """Targets that are not classes, without a normalization."""
        return None if self.targets is None else self.targets.targets

    @property
    def task(self) -> TaskName:
        """Name of the task that the targets are for."""
        return "classification" if self.targets is None else self.targets.task

    @property
    def measured(self) -> list[Measured]:
        """Tensors that are measured for the normalization."""
        return measured_tensors(self.specs, self.wanted)

    @property
    def numbers(self) -> int:
        """Length of the normalization: means of all inputs and targets."""
        return sum(each.numbers for each in self.measured)

    @model_validator(mode="after")
    def _check_keys(self) -> Own:
        if (fault := inputs_fault(self._plain, normalized=False)) is not None:
            raise ValueError(fault)
        if bool(self.classes) == (self.targets is not None):
            if self.classes:
                raise ValueError("classes: must be empty, because targets are given")
            raise ValueError("classes: the list is empty; give at least one name, or targets that are not classes")
        if (twice := named_twice(self.classes)) is not None:
            raise ValueError(f"classes: {twice!r} occurs twice; give each class a unique name")
        if self.kind == "tokens" and len(self.classes) > 256:
            raise ValueError(f"classes: {len(self.classes)} names; tokens are single bytes, so give at most 256")
        if self.features is not None:
            self._check_features(self.features)
        if isinstance(self.normalization, Given):
            given = Normalization(self.normalization.mean, self.normalization.std)
            if not len(given.mean) == len(given.std) == self.numbers:
                raise ValueError(
                    f"normalization: {len(given.mean)} means and {len(given.std)} deviations; {self.kind} need "
                    f"{self.numbers} of each"
                )
            parts = divided_normalization(self.measured, given)
            faults = [replace(spec, normalization=parts[i]).fault() for i, spec in enumerate(self.specs.values())]
            targets = self.wanted
            if targets is not None and targets.numbers:
                faults.append(targets.normalized(parts[-1]).fault())
            if (fault := next(filter(None, faults), None)) is not None:
                raise ValueError(fault)
        return self

    def _check_features(self, features: tuple[str, ...]) -> None:
        if any(spec.kind in ("pixels", "tokens") or len(spec.shape) > 1 for spec in self.specs.values()):
            raise ValueError(f"features: names are only for features and integers of a table (got {self.kind})")
        if len(set(map(composed, features))) != (numbers := sum(spec.numbers for spec in self.specs.values())):
            raise ValueError(f"features: must be {numbers} different names (got {list(features)})")
