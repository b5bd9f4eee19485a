"""Reader output, and collection of the errors that readers find in a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed, pluralize, shortened
from fedloom.data.input_spec import (
    DTYPES,
    ChannelAxis,
    InputSpec,
    Kind,
    RawInputs,
    TensorKind,
    named_arrays,
    unnamed,
)
from fedloom.data.requirements import Own
from fedloom.data.spec import DataSpec
from fedloom.data.targets import Targets
from fedloom.data.text_column import TextColumn
from fedloom.data.values import (
    EXACT,
    EXPANSION,
    FEW,
    LARGE,
    Rounding,
    are_numbers,
    found_classes,
    label_text,
    measured,
    plain_numbers,
)
from fedloom.errors import DataError, argument
from fedloom.tasks.names import TaskName

OnProgress: TypeAlias = Callable[[str, float, float | None], None]
"""Progress callback: the current step, amount done, and total (None if unknown)."""

SHOWN = 5
"""Maximum places named for each kind of error."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of one client.

    Attributes
    ----------
    classes
        As in :class:`~fedloom.data.own.Own`.
    x
        ``[n, *input_shape]``: uint8 for pixels and tokens, float32 for features, int64 for integers; or such arrays by
        name.
    y
        ``[n]`` positions in ``classes``; or other targets, as shards hold them; None if unlabelled.
    split
        ``[n]`` positions in ``SPLITS``, where the source sets the splits; else None.
    where
        Returns the place of the i-th example in the source, for error messages.
    overlap
        As in :class:`~fedloom.data.datasets.base.Owners`: number of characters that windows of a text share.
    notes
        Changes to the examples that their owner should know.
    owners
        ``[n]`` owner names, where the source has the examples of several owners; else None.
    features
        Column names of features and then of integers from a table, in order; else None.
    specs
        Input tensors, without a normalization.
    targets
        Targets that are not classes, without a normalization.
    """

    specs: Mapping[str, InputSpec]
    classes: tuple[str, ...]
    x: RawInputs
    y: NDArray[Any] | None
    split: NDArray[np.int64] | None
    where: Callable[[int], str]
    overlap: int = 0
    notes: tuple[str, ...] = ()
    owners: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    targets: Targets | None = None

    @property
    def spec(self) -> DataSpec:
        """Inputs, without normalizations, and targets."""
        return DataSpec(self.specs, self.classes, self.targets)

    def __len__(self) -> int:
        return len(next(iter(named_arrays(self.x).values())))

    @property
    def kind(self) -> Kind:
        """Kind of the inputs."""
        return self.specs[""].kind if "" in self.specs else "named"

    @property
    def strata(self) -> NDArray[np.int64]:
        """Class of each example, ``[n]``, for drawing splits class by class; 0 if the examples have none."""
        return np.zeros(len(self), dtype=np.int64) if self.y is None or self.targets is not None else self.y

    def chosen(self, rows: NDArray[Any]) -> RawInputs:
        """Return the inputs of some examples."""
        return unnamed({name: np.ascontiguousarray(x[rows]) for name, x in named_arrays(self.x).items()})


@dataclass(frozen=True)
class Request:
    """Reading options.

    Attributes
    ----------
    own
        The experiment's requirements on clients; None: kind, shape and classes are inferred.
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
        Prefix of the keys that name the columns (``data.source.``); None: arguments of packing name them.
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
    classes
        Names of the classes in the order of the labels, which are integers from 0, where the source has such names.
    """

    own: Own | None
    labelled: bool = True
    label: str = "label"
    split: str | None = None
    resize: bool = False
    client: str | None = None
    keys: str | None = None
    task: TaskName | None = None
    outputs: int | None = None
    targets: tuple[str, ...] = ()
    integers: bool | tuple[str, ...] = False
    channel_axis: ChannelAxis = "first"
    text: TextColumn | None = None
    classes: tuple[str, ...] | None = None

    @property
    def wanted_task(self) -> TaskName | None:
        """Name of the task, if the request or the experiment states it."""
        if self.own is None:
            return self.task
        return "classification" if self.own.targets is None else self.own.targets.task

    def called(self, name: str) -> str:
        """Return the name of ``label``, ``split`` or ``client`` in messages."""
        if self.keys is not None:
            return f"{self.keys}{name}"
        without = f"; {argument('unlabelled')} if there are no labels" if name == "label" else ""
        return f"{argument(name)}{without}"


@dataclass
class ValidationErrors:
    """Errors in a source: a count for each kind of error, and its first places."""

    source: str
    outcome: str = "; nothing was written"
    _counts: dict[str, int] = field(default_factory=dict)
    _places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, *places: str) -> None:
        """Record an error of some kind at each of these places."""
        self.add_many(what, len(places), places)

    def add_many(self, what: str, count: int, places: Iterable[str]) -> None:
        """Record ``count`` errors of some kind; only the first places are used."""
        if count:
            self._counts[what] = self._counts.get(what, 0) + count
            named = self._places.setdefault(what, [])
            named += [shortened(place, 100) for place, _ in zip(places, range(SHOWN - len(named)), strict=False)]

    def refuse(self) -> None:
        """Raise DataError if errors were recorded: one line for each kind, with its count and first places."""
        if not self._counts:
            return
        lines = [f"{self.source}: {pluralize(sum(self._counts.values()), 'error')}{self.outcome}"]
        for what, count in self._counts.items():
            places = "; ".join(self._places[what]) + ("; ..." if count > len(self._places[what]) else "")
            lines.append(f"  {what}, in {pluralize(count, 'place')}: {places}")
        raise DataError("\n".join(lines))


@dataclass
class Batches:
    """Inputs that arrive as chunks of float64, checked and stored in the dtype of their kind."""

    kind: TensorKind
    shape: tuple[int, ...]
    classes: int
    errors: ValidationErrors
    name: Callable[[int], str]
    """Returns the name of the j-th number of an input."""
    high: int | None = None
    """Exclusive upper bound of integers, if it is known."""
    _kept: list[NDArray[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rounding = Rounding(int(np.prod(self.shape)))

    def add(self, values: NDArray[np.float64], where: Callable[[int, int], str], known: NDArray[np.bool_]) -> None:
        """Add ``[m, f]`` values; ``known`` marks those whose errors are already recorded.

        ``where`` returns the place of row i, column j of this chunk.
        """
        if self.kind == "features":
            wrong = ~np.isfinite(values)
            large = np.abs(values) > np.finfo(np.float32).max
            self._note("not a finite number", wrong & ~known, values, where)
            self._note("too large for a 32-bit float", large & ~wrong & ~known, values, where)
            with np.errstate(over="ignore", invalid="ignore"):
                kept = values.astype(np.float32)
            self._rounding.add(values, kept)
            self._kept.append(kept.reshape(-1, *self.shape))
            return
        if self.kind == "integers":
            top = EXACT if self.high is None else self.high - 1
            self._rounding.add(values, values.astype(np.float32))  # a model may get them as 32-bit floats
        else:
            top = 255 if self.kind == "pixels" else self.classes - 1
        wrong = ~((values >= 0) & (values <= top) & (values == np.floor(values)))
        self._note(f"not an integer from 0 to {top}", wrong & ~known, values, where)
        self._kept.append(np.where(wrong, 0, values).astype(DTYPES[self.kind]).reshape(-1, *self.shape))

    def _note(
        self, what: str, wrong: NDArray[np.bool_], values: NDArray[np.float64], where: Callable[[int, int], str]
    ) -> None:
        places = (f"{where(int(i), int(j))}: {values[i, j]:g}" for i, j in zip(*np.nonzero(wrong), strict=True))
        self.errors.add_many(what, int(wrong.sum()), places)

    def joined(self) -> tuple[NDArray[Any], tuple[str, ...]]:
        """Return all inputs, ``[n, *shape]``, and notes on changes that their owner should know."""
        lost, noted = self._rounding.lost(), self._rounding.noted()
        self.errors.add_many(
            "values that 32-bit floats cannot distinguish (subtract an offset first, or leave the column out)",
            len(lost),
            (self.name(j) for j in lost),
        )
        notes = [f"rounded to the precision of 32-bit floats: {listed([self.name(j) for j in noted])}"] if noted else []
        if counting := self._rounding.counting():
            notes.append(
                f"another whole number in each row, in order: {listed([self.name(j) for j in counting])}; if it is an "
                "id or numbers the rows, leave it out: it tells nothing of new examples"
            )
        x = np.concatenate([np.zeros((0, *self.shape), dtype=DTYPES[self.kind]), *self._kept])
        return x, tuple(notes)


@dataclass
class ColumnBatches:
    """Inputs that are columns of rows: of one tensor, or of several named ones."""

    parts: Mapping[str, tuple[Batches, NDArray[np.int64]]]
    """Chunks of each tensor, and the positions of its columns."""
    errors: ValidationErrors

    def add(self, values: NDArray[np.float64], where: Callable[[int, int], str], known: NDArray[np.bool_]) -> None:
        """Add ``[m, f]`` values, as :meth:`Batches.add` does."""
        for batches, columns in self.parts.values():
            batches.add(values[:, columns], _of_columns(where, columns), known[:, columns])

    def joined(self) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
        """Return all inputs by name, and notes on changes that their owner should know."""
        found = {name: batches.joined() for name, (batches, _) in self.parts.items()}
        return {name: x for name, (x, _) in found.items()}, tuple(note for _, notes in found.values() for note in notes)


def _of_columns(where: Callable[[int, int], str], columns: NDArray[np.int64]) -> Callable[[int, int], str]:
    return lambda i, j: where(i, int(columns[j]))


def spec_of(kind: TensorKind, x: NDArray[Any], channel_axis: ChannelAxis = "first") -> InputSpec:
    """Return the description of an input tensor ``[n, *shape]``."""
    high = int(x.max(initial=0)) + 1 if kind == "integers" else None
    axis = channel_axis if kind in ("features", "integers") and x.ndim > 2 else "first"
    return InputSpec(kind, tuple(int(size) for size in x.shape[1:]), channel_axis=axis, high=high)


MOST_CHANNELS = 4
"""Maximum channels of an image: a larger channel axis opposite an axis this small means swapped axes, an error."""


def notes_on_axes(called: str, spec: InputSpec) -> tuple[str, ...]:
    """Return a note if the last axis of features, rather than the first, looks like that of channels."""
    shape = spec.shape
    if spec.kind != "features" or spec.channel_axis == "last" or len(shape) < 2:
        return ()
    if not shape[0] > MOST_CHANNELS >= shape[-1]:
        return ()
    return (
        f"{called} has inputs of shape {list(shape)}, whose first axis is taken for channels, each with a mean of its "
        "own; if the last one is that of channels, set channel_axis: last, or give numpy.moveaxis(x, -1, 1)",
    )


def names_of(
    labels: Iterable[object],
    where: Callable[[int], str],
    errors: ValidationErrors,
    what: str = "label",
    classes: Sequence[str] | None = None,
) -> list[str | None]:
    """Return labels or owners as text: digits if all are numbers, None where missing, ``?`` where invalid.

    Record those that are missing or invalid. ``classes`` are those given, if any.
    """
    known: dict[tuple[type, object], tuple[str | None, str | None]] = {}
    names: list[str | None] = []
    for i, label in enumerate(labels):
        key = (type(label), label) if isinstance(label, str | bytes | int | float) else (type(label), str(label))
        if key not in known:
            known[key] = _name_of(label, classes or ())
        name, fault = known[key]
        if name is None and isinstance(label, str) and label.strip():
            errors.add(f"{what} missing, by its text; rename it if it is a name", f"{where(i)}: {label!r}")
        elif name is None:
            errors.add(f"{what} missing", where(i))
        elif fault is not None:
            errors.add(f"a {what} must be text or a whole number", f"{where(i)}: {fault}")
        names.append(name)
    plain = plain_numbers(name for name, _ in known.values() if name)
    return [plain.get(name, name) if name else None for name in names] if plain else names


def owner_names(owners: Iterable[object], where: Callable[[int], str], errors: ValidationErrors) -> tuple[str, ...]:
    """Return owners as text; record those that are missing."""
    return tuple(name or "" for name in names_of(owners, where, errors, "client"))


def _name_of(label: object, classes: Collection[str]) -> tuple[str | None, str | None]:
    try:
        return label_text(label, classes), None
    except ValueError as error:
        return "?", str(error)


def positions(
    labels: Sequence[str | None], classes: Sequence[str] | None, where: Callable[[int], str], errors: ValidationErrors
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the position in the classes of each label of :func:`names_of`, ``[n]``, and the classes.

    The classes are those of the experiment; None: the distinct labels.
    """
    if classes is None:
        classes = _classes_of(labels, where, errors)
    place = {composed(name): i for i, name in enumerate(classes)}
    y = np.array([place.get(label or "", -1) for label in labels], dtype=np.int64)
    unknown = [i for i in np.flatnonzero(y < 0).tolist() if labels[i]]
    consecutive = are_numbers(classes) and tuple(classes) == tuple(map(str, range(len(classes))))
    allowed = f"0 to {len(classes) - 1}" if consecutive and classes else listed(classes)
    errors.add_many(
        f"unknown label; labels are {allowed}", len(unknown), (f"{where(i)}: {_quoted(labels[i])}" for i in unknown)
    )
    return y, tuple(classes)


def _quoted(label: str | None) -> str:
    return str(label) if label and are_numbers((label,)) else repr(label)


def notes_of_classes(classes: Sequence[str], several: str) -> tuple[str, ...]:
    """Return a note on integer labels, unless they are 0, 1, 2 and so on, or on labels that list several others.

    ``several`` says how to give several labels of an example.
    """
    if are_numbers(classes):
        if tuple(classes) == tuple(map(str, range(len(classes)))):
            return ()
        return (f"{pluralize(len(classes), 'class', 'classes')}, the different labels: {listed(classes)}",)
    for mark in SEPARATORS:
        parts = {name: [part.strip() for part in name.split(mark)] for name in classes if mark in name}
        known = Counter(part for name in classes for part in parts.get(name, [name]))
        if lists := [name for name, own in parts.items() if all(own) and any(known[part] > 1 for part in own)]:
            return (
                f"{pluralize(len(lists), 'class is a list', 'classes are lists')} of others: {listed(lists, 5)}; if an "
                f"example has several labels, give {several} for multilabel (pandas: label.str.get_dummies({mark!r}))",
            )
    return ()


SEPARATORS = "|;"
"""Marks between labels in a cell that lists several."""


def _classes_of(labels: Sequence[str | None], where: Callable[[int], str], errors: ValidationErrors) -> tuple[str, ...]:
    """Return the distinct labels, and record an error if they are a measured quantity."""
    different = {label for label in labels if label}
    classes = found_classes(different)
    quantity = set(measured(different))
    if not quantity and len(different) > max(FEW, len(labels) // 2) and are_numbers(tuple(different)):
        quantity = different
    places = [i for i, label in enumerate(labels) if label in quantity]
    errors.add_many(
        f"a measured quantity ({pluralize(len(different), 'different number')}); classes must be names or whole "
        "numbers that repeat; for numbers as targets, set task: regression",
        len(places),
        (f"{where(i)}: {labels[i]}" for i in places),
    )
    return classes


def split_positions(
    names: Sequence[str | None], where: Callable[[int], str], errors: ValidationErrors
) -> NDArray[np.int64]:
    """Return the position in ``SPLITS`` for each split name of a source, ``[n]``."""
    place = np.array([SPLIT_NAMES.get((name or "").strip().lower(), -1) for name in names], dtype=np.int64)
    wrong = np.flatnonzero(place < 0).tolist()
    allowed = f"unknown split; splits are {', '.join(SPLIT_NAMES)}"
    errors.add_many(allowed, len(wrong), (f"{where(i)}: {names[i]!r}" for i in wrong))
    return place


SPLIT_NAMES = {"train": 0, "validation": 1, "val": 1, "test": 2}
"""Accepted names of splits in a source, and their position in ``SPLITS``."""


def listed(words: Sequence[str], most: int = 12) -> str:
    """Return words as a comma-separated list, with an ellipsis and the total beyond ``most``."""
    return ", ".join(words) if len(words) <= most else f"{', '.join(words[:most])}, ... ({len(words)})"


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
