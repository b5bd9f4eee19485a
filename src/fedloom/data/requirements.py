"""Requirements of an experiment on the data that clients bring: keys of ``data.own``."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from fedloom.core.settings import Settings
from fedloom.core.words import composed
from fedloom.data.input_spec import NOTHING, ChannelAxis, InputSpec, Kind, Normalization
from fedloom.data.spec import DataSpec
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
        return InputSpec(self.kind, self.shape, NOTHING, self.channel_axis, self.high, self.tokenizer)


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
        return self


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
    def spec(self) -> DataSpec:
        """Inputs and targets, without normalizations."""
        if self.inputs is not None:
            inputs = {name: each.spec for name, each in sorted(self.inputs.items())}
        else:
            assert self.kind != "named", "checked: there are no named inputs"
            inputs = {"": InputSpec(self.kind, self.input_shape, NOTHING, self.channel_axis, self.high, self.tokenizer)}
        return DataSpec(inputs, self.classes, None if self.targets is None else self.targets.targets)

    @property
    def task(self) -> TaskName:
        """Name of the task that the targets are for."""
        return self.spec.task

    @model_validator(mode="after")
    def _check_keys(self) -> Own:
        if (self.kind == "named") != (self.inputs is not None) or (self.inputs is not None and self.input_shape):
            raise ValueError(f"kind: {self.kind}; named inputs need inputs, each with a shape, and others input_shape")
        if not self.classes and self.targets is None:
            raise ValueError("classes: the list is empty; give at least one name, or targets that are not classes")
        spec = self.spec
        if self.features is not None:
            if any(each.kind in ("pixels", "tokens") or len(each.shape) > 1 for each in spec.inputs.values()):
                raise ValueError(f"features: names are only for features and integers of a table (got {self.kind})")
            if len(set(map(composed, self.features))) != (
                numbers := sum(each.numbers for each in spec.inputs.values())
            ):
                raise ValueError(f"features: must be {numbers} different names (got {list(self.features)})")
        if isinstance(self.normalization, Given):
            given = Normalization(self.normalization.mean, self.normalization.std)
            if not spec.with_normalization(given).is_normalized:
                raise ValueError(f"normalization: give {spec.numbers} means and deviations")
        return self
