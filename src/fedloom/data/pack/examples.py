"""Reading options, the columns that readers yield, and the errors in a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedloom.core.settings import Settings
from fedloom.core.words import pluralize, shortened
from fedloom.data.spec import ChannelAxis, DataSpec, InputSpec, RawInputs, named_arrays, unnamed
from fedloom.data.values import EXPANSION, LARGE
from fedloom.errors import DataError
from fedloom.tasks.names import TaskName

OnProgress: TypeAlias = Callable[[str, float, float | None], None]
"""Progress callback: the current step, amount done, and total (None if unknown)."""

SHOWN = 5
"""Maximum places named for each kind of error."""

SPLIT_NAMES = {"train": 0, "validation": 1, "val": 1, "test": 2}
"""Accepted names of splits in a source, and their position in ``SPLITS``."""


class TextColumn(Settings):
    """Column of texts, and the tokenizer that makes tokens of it."""

    column: str = Field(min_length=1, description="Column with the texts.")
    tokenizer: str = Field(
        min_length=1, description="Folder of a tokenizer of transformers (`save_pretrained`); nothing is downloaded."
    )
    length: int = Field(ge=1, description="Tokens of each example: longer texts are cut, and shorter ones padded.")
    padding: Literal["left", "right"] | None = Field(
        default=None, description="Side on which shorter texts are padded, left or right; null: the tokenizer's own."
    )
    truncation: Literal["left", "right", "refuse"] | None = Field(
        default=None,
        description="Side on which longer texts are cut, left or right; refuse: they are errors; null: the tokenizer's "
        "own side.",
    )
    mask: bool = Field(
        default=True, description="True: the inputs are `input_ids` and `attention_mask`; false: only the ids."
    )


@dataclass(frozen=True)
class Request:
    """Reading options.

    Attributes
    ----------
    needs
        Inputs and targets that an experiment or a run requires; None: kind, shape and classes are inferred.
    labelled
        True if labels are required.
    label, split
        Names of the columns with the labels and with the splits (None: no such column).
    resize
        True if images of another size are resized.
    client
        Name of the column, or array, with the owner of each example; ``folder`` for the outermost folders of a folder
        of images. None: all examples have one owner.
    keys
        Prefix of the names of these options in messages, such as ``data.source.``.
    task
        Name of the task; None: required by the experiment, or inferred from the data.
    outputs
        Minimum number of outputs of segmentation and next_token; None: as many as the data have.
    targets
        Columns of a table with the targets, in place of ``label``.
    integers
        True if the inputs of a table are integers, or the columns that are; in arrays, the type decides.
    channel_axis
        Axis of features and integers along which they are standardized.
    text
        Column of texts that become tokens, if any.
    features
        Columns of a table that are required as inputs, in order; None: any.
    needed_by
        What requires ``needs``, in messages.
    """

    needs: DataSpec | None = None
    labelled: bool = True
    label: str = "label"
    split: str | None = None
    resize: bool = False
    client: str | None = None
    keys: str = ""
    task: TaskName | None = None
    outputs: int | None = None
    targets: tuple[str, ...] = ()
    integers: bool | tuple[str, ...] = False
    channel_axis: ChannelAxis = "first"
    text: TextColumn | None = None
    features: tuple[str, ...] | None = None
    needed_by: str = "data.own"

    @property
    def wanted_task(self) -> TaskName | None:
        """Name of the task, if the request or the requirements state it."""
        return self.task if self.needs is None else self.needs.task

    def called(self, name: str) -> str:
        """Return the name of an option in messages."""
        return f"{self.keys}{name}"


class Places:
    """Names of examples, and of their numbers, in messages.

    Parameters
    ----------
    rows
        Number or name of each example.
    noun
        What precedes it: ``line ``.
    columns
        Names of the columns of each input.
    """

    def __init__(self, rows: Sequence[object], noun: str = "", columns: Mapping[str, Sequence[str]] | None = None):
        self.rows, self.noun, self.columns = rows, noun, columns or {}

    def row(self, i: int) -> str:
        """Return the place of the i-th example."""
        return f"{self.noun}{self.rows[i]}"

    def target(self, i: int) -> str:
        """Return the place of its target."""
        return self.row(i)

    def column(self, name: str, j: int) -> str:
        """Return the name of the j-th number of an input."""
        return f"column {self.columns[name][j]}"

    def cell(self, name: str, i: int, j: int) -> str:
        """Return the place of the j-th number of an input of the i-th example."""
        return f"{self.row(i)}, {self.column(name, j)}"


@dataclass(frozen=True, eq=False)
class Columns:
    """Examples as a reader finds them, before they are checked and converted.

    Attributes
    ----------
    x
        Numbers of each input, ``[n, *shape]``, by name; the name of a single one is empty.
    specs
        Description of each input; ``high`` of integers may be unknown.
    y
        Labels ``[n]``, or other targets; None if unlabelled.
    split
        ``[n]`` positions in ``SPLITS``, where the source sets the splits; else None.
    owners
        ``[n]`` owner names, where the source has the examples of several owners; else None.
    classes
        Names of the classes, where the source has them: labels that are integers are their positions.
    outputs
        Names of the columns of targets; whole numbers in them are no classes unless the task says so.
    label_is_name
        True if integer labels are names of classes, never positions.
    features
        Column names of features and then of integers from a table, in order; else None.
    overlap
        As in :class:`~fedloom.data.datasets.base.Owners`: number of characters that windows of a text share.
    by_owner
        True if the examples are to be grouped by owner.
    notes
        Changes to the examples that their owner should know.
    """

    x: Mapping[str, NDArray[Any]]
    specs: Mapping[str, InputSpec]
    y: NDArray[Any] | None
    places: Places
    split: NDArray[np.int64] | None = None
    owners: Sequence[str] | None = None
    classes: tuple[str, ...] | None = None
    outputs: tuple[str, ...] = ()
    label_is_name: bool = False
    features: tuple[str, ...] | None = None
    overlap: int = 0
    by_owner: bool = False
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.x.values())))


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of one client, or of several owners, as shards hold them.

    Attributes
    ----------
    spec
        Inputs and targets.
    x
        ``[n, *input_shape]``: uint8 for pixels and tokens, float32 for features, int64 for integers; or such arrays by
        name.
    y
        ``[n]`` positions in the classes; or other targets, as shards hold them; None if unlabelled.
    place
        Returns the place of the i-th example in the source, for error messages.
    split, owners, features, overlap, notes
        As in :class:`Columns`.
    """

    spec: DataSpec
    x: RawInputs
    y: NDArray[Any] | None
    place: Callable[[int], str]
    split: NDArray[np.int64] | None = None
    owners: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    overlap: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(named_arrays(self.x).values())))

    @property
    def strata(self) -> NDArray[np.int64]:
        """Class of each example, ``[n]``, for drawing splits class by class; 0 if the examples have none."""
        return np.zeros(len(self), dtype=np.int64) if self.y is None or self.spec.targets is not None else self.y

    def chosen(self, rows: NDArray[Any]) -> RawInputs:
        """Return the inputs of some examples."""
        return unnamed({name: np.ascontiguousarray(x[rows]) for name, x in named_arrays(self.x).items()})


@dataclass
class ValidationErrors:
    """Errors in a source: a count for each kind of error, and its first places."""

    source: str
    outcome: str = "; nothing was written"
    _counts: dict[str, int] = field(default_factory=dict)
    _places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, message: str, *places: str) -> None:
        """Record an error of some kind at each of these places."""
        self.add_many(message, len(places), places)

    def add_many(self, message: str, count: int, places: Iterable[str]) -> None:
        """Record ``count`` errors of some kind; only the first places are used."""
        if count:
            self._counts[message] = self._counts.get(message, 0) + count
            places_shown = self._places.setdefault(message, [])
            places_shown += [
                shortened(place, 100) for place, _ in zip(places, range(SHOWN - len(places_shown)), strict=False)
            ]

    def refuse(self) -> None:
        """Raise DataError if errors were recorded: one line for each kind, with its count and first places."""
        if not self._counts:
            return
        lines = [f"{self.source}: {pluralize(sum(self._counts.values()), 'error')}{self.outcome}"]
        for message, count in self._counts.items():
            places = "; ".join(self._places[message]) + ("; ..." if count > len(self._places[message]) else "")
            lines.append(f"  {message}, in {pluralize(count, 'place')}: {places}")
        raise DataError("\n".join(lines))


def described_shape(x: NDArray[Any]) -> str:
    """Return the shape of an array of n examples: ``[n, 3, 8]``."""
    return f"[{', '.join(['n', *map(str, x.shape[1:])])}]"


def check_unpacked(source: Path, unpacked: int) -> None:
    """Reject a small file that would fill the memory, given the unpacked size in bytes that it declares.

    Raise DataError if that is more than 1 GiB and more than 100 times the file.
    """
    size = source.stat().st_size
    if unpacked > LARGE and unpacked > EXPANSION * size:
        raise DataError(
            f"{source}: the file has {size:,} bytes and unpacks to {unpacked:,}; the limit is {EXPANSION} times "
            f"its size, or {LARGE:,} bytes if that is more",
            hint="store it uncompressed if it is really that large",
        )


def undecodable_line(source: Path) -> int:
    """Return the number of the first line that is not valid UTF-8, or 0."""
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0


Reader: TypeAlias = Callable[[Path, Request, ValidationErrors, OnProgress], Columns]
"""Function that reads a source."""
