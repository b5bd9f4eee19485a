"""What a reader makes of a source, and the mistakes that it finds there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.data.manifest import Kind
from fedloom.data.own import Own
from fedloom.data.values import (
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
from fedloom.words import composed, counted, shortened

Inputs: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]

Tell: TypeAlias = Callable[[str, float, float | None], None]
"""Called with what is being done, how much of it is done, and out of how much (None where that is not known)."""

SHOWN = 5
"""Places named of each kind of mistake."""


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one client.

    Attributes
    ----------
    kind, classes
        As of :class:`~fedloom.data.own.Own`.
    x
        ``[n, *input_shape]``: uint8 for pixels and tokens, float32 for features.
    y
        ``[n]`` positions in ``classes``; None if they are unlabelled.
    split
        ``[n]`` positions in ``SPLITS``, where the source says which split each belongs to; else None.
    where
        Names the place of the i-th in the source, for mistakes.
    overlap
        As of :class:`~fedloom.data.sources.base.Owners`: windows of a text share so many characters.
    notes
        What was done to them that their owner should know.
    owners
        ``[n]`` names of whose each is, where the source has the examples of several; else None.
    features
        Of features from a table: the names of the columns, in order; else None.
    """

    kind: Kind
    classes: tuple[str, ...]
    x: Inputs
    y: NDArray[np.int64] | None
    split: NDArray[np.int64] | None
    where: Callable[[int], str]
    overlap: int = 0
    notes: tuple[str, ...] = ()
    owners: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Request:
    """What a reader is asked for.

    Attributes
    ----------
    own
        What the experiment asks of clients; None: kind, shape and classes are those that are found.
    labelled
        Whether there must be labels.
    label, split
        Names of the columns with the labels, and with the splits (None: there is none).
    resize
        Whether images of another size are resized.
    client
        Name of the column, or array, that says whose each example is; of a folder of images, ``folder`` for its
        outermost folders. None: they are all of one.
    keys
        Prefix of the keys, or arguments, that name the columns (``data.source.``); None: those of packing do.
    """

    own: Own | None
    labelled: bool = True
    label: str = "label"
    split: str | None = None
    resize: bool = False
    client: str | None = None
    keys: str | None = None

    def called(self, name: str) -> str:
        """Return what messages call ``label``, ``split`` or ``client``."""
        if self.keys is not None:
            return f"{self.keys}{name}"
        without = f"; {argument('unlabelled')} if there are no labels" if name == "label" else ""
        return f"{argument(name)}{without}"


@dataclass
class Mistakes:
    """Everything that is wrong with a source: each kind of mistake counted, its first places named."""

    source: str
    outcome: str = "; nothing was written"
    _counts: dict[str, int] = field(default_factory=dict)
    _places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, what: str, *places: str) -> None:
        """Note a mistake of some kind at each of these places."""
        self.add_many(what, len(places), places)

    def add_many(self, what: str, count: int, places: Iterable[str]) -> None:
        """Note ``count`` mistakes of a kind, of which the first places are enough."""
        if count:
            self._counts[what] = self._counts.get(what, 0) + count
            named = self._places.setdefault(what, [])
            named += [shortened(place, 100) for place, _ in zip(places, range(SHOWN - len(named)), strict=False)]

    def refuse(self) -> None:
        """Raise what was noted, if anything was.

        Raises
        ------
        DataError
            Each kind of mistake on a line: what it is, how often it was found, and where first.
        """
        if not self._counts:
            return
        lines = [f"{self.source}: {counted(sum(self._counts.values()), 'mistake')}{self.outcome}"]
        for what, count in self._counts.items():
            places = "; ".join(self._places[what]) + ("; ..." if count > len(self._places[what]) else "")
            lines.append(f"  {what}, in {counted(count, 'place')}: {places}")
        raise DataError("\n".join(lines))


@dataclass
class Batches:
    """Inputs that come in pieces of float64, checked and kept in the form of their kind."""

    kind: Kind
    shape: tuple[int, ...]
    classes: int
    mistakes: Mistakes
    name: Callable[[int], str]
    """Names the j-th number of an input."""
    _kept: list[Inputs] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin without values."""
        self._rounding = Rounding(int(np.prod(self.shape)))

    def add(self, values: NDArray[np.float64], where: Callable[[int, int], str], known: NDArray[np.bool_]) -> None:
        """Take in ``[m, f]`` values.

        Parameters
        ----------
        where
            Names the place of row i, column j of this piece.
        known
            ``[m, f]``: values that are mistakes already noted.
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
        top = 255 if self.kind == "pixels" else self.classes - 1
        wrong = ~((values >= 0) & (values <= top) & (values == np.floor(values)))
        self._note(f"no integer in 0 to {top}", wrong & ~known, values, where)
        self._kept.append(np.where(wrong, 0, values).astype(np.uint8).reshape(-1, *self.shape))

    def _note(
        self, what: str, wrong: NDArray[np.bool_], values: NDArray[np.float64], where: Callable[[int, int], str]
    ) -> None:
        places = (f"{where(int(i), int(j))}: {values[i, j]:g}" for i, j in zip(*np.nonzero(wrong), strict=True))
        self.mistakes.add_many(what, int(wrong.sum()), places)

    def joined(self) -> tuple[Inputs, tuple[str, ...]]:
        """Return all that was taken in, ``[n, *shape]``, and what was done to it that its owner should know."""
        lost, noted = self._rounding.lost(), self._rounding.noted()
        self.mistakes.add_many(
            "values that 32-bit floats cannot tell apart (subtract an offset first, or leave the column out)",
            len(lost),
            (self.name(j) for j in lost),
        )
        notes = (f"rounded to the precision of 32-bit floats: {listed([self.name(j) for j in noted])}",)
        dtype = np.float32 if self.kind == "features" else np.uint8
        x = np.concatenate([np.zeros((0, *self.shape), dtype=dtype), *self._kept])
        return x, notes if noted else ()


def names_of(
    labels: Iterable[object], where: Callable[[int], str], mistakes: Mistakes, what: str = "label"
) -> list[str | None]:
    """Return labels, or owners, as text: numbers in digits where all are, None where one is missing or neither."""
    known: dict[tuple[type, object], tuple[str | None, str | None]] = {}
    names: list[str | None] = []
    for i, label in enumerate(labels):
        key = (type(label), label) if isinstance(label, str | bytes | int | float) else (type(label), str(label))
        if key not in known:
            known[key] = _name_of(label)
        name, fault = known[key]
        if fault is not None:
            mistakes.add(f"a {what} must be text or a whole number", f"{where(i)}: {fault}")
        names.append(name)
    plain = plain_numbers(name for name, _ in known.values() if name)
    return [plain.get(name, name) if name else None for name in names] if plain else names


def _name_of(label: object) -> tuple[str | None, str | None]:
    """Return the name that a label is, and why it is none."""
    try:
        return label_text(label), None
    except ValueError as error:
        return "?", str(error)


def positions(
    labels: Sequence[str | None], classes: Sequence[str] | None, where: Callable[[int], str], mistakes: Mistakes
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return each label's position in the classes, ``[n]``, and the classes.

    Parameters
    ----------
    labels
        As :func:`names_of` gives them.
    classes
        Those that are asked for; None: the different labels.
    """
    if classes is None:
        classes = _classes_of(labels, where, mistakes)
    place = {composed(name): i for i, name in enumerate(classes)}
    y = np.array([place.get(label or "", -1) for label in labels], dtype=np.int64)
    missing = [i for i in np.flatnonzero(y < 0).tolist() if not labels[i]]
    unknown = [i for i in np.flatnonzero(y < 0).tolist() if labels[i]]
    mistakes.add_many("label missing", len(missing), (where(i) for i in missing))
    consecutive = are_numbers(classes) and tuple(classes) == tuple(map(str, range(len(classes))))
    allowed = f"0 to {len(classes) - 1}" if consecutive and classes else listed(classes)
    mistakes.add_many(
        f"unknown label; allowed: {allowed}", len(unknown), (f"{where(i)}: {_quoted(labels[i])}" for i in unknown)
    )
    return y, tuple(classes)


def _quoted(label: str | None) -> str:
    return str(label) if label and are_numbers((label,)) else repr(label)


def notes_of_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return what the owner of integer labels should know, unless they are those from 0 on."""
    if not are_numbers(classes) or tuple(classes) == tuple(map(str, range(len(classes)))):
        return ()
    return (f"{counted(len(classes), 'class', 'classes')}, the different labels: {listed(classes)}",)


def _classes_of(labels: Sequence[str | None], where: Callable[[int], str], mistakes: Mistakes) -> tuple[str, ...]:
    """Return the different labels, unless they are a measured quantity."""
    different = {label for label in labels if label}
    classes = found_classes(different)
    quantity = set(measured(different))
    if not quantity and len(different) > max(FEW, len(labels) // 2) and are_numbers(tuple(different)):
        quantity = different
    places = [i for i, label in enumerate(labels) if label in quantity]
    mistakes.add_many(
        f"a measured quantity ({counted(len(different), 'different number')}), and classes are names or whole numbers "
        "that repeat",
        len(places),
        (f"{where(i)}: {labels[i]}" for i in places),
    )
    return classes


def split_positions(names: Sequence[str | None], where: Callable[[int], str], mistakes: Mistakes) -> NDArray[np.int64]:
    """Return the position in ``SPLITS`` of what a source calls each split, ``[n]``."""
    place = np.array([SPLIT_NAMES.get((name or "").strip().lower(), -1) for name in names], dtype=np.int64)
    wrong = np.flatnonzero(place < 0).tolist()
    allowed = f"unknown split; allowed: {', '.join(SPLIT_NAMES)}"
    mistakes.add_many(allowed, len(wrong), (f"{where(i)}: {names[i]!r}" for i in wrong))
    return place


SPLIT_NAMES = {"train": 0, "validation": 1, "val": 1, "test": 2}
"""What a source may call its splits, and their position in ``SPLITS``."""


def listed(words: Sequence[str], most: int = 12) -> str:
    """Return words as a list, the rest beyond ``most`` as dots."""
    return ", ".join(words) if len(words) <= most else f"{', '.join(words[:most])}, ... ({len(words)})"


def input_shape(own: Own, found: int, what: str, source: str) -> tuple[int, ...]:
    """Return the shape that inputs are to have, if there are as many numbers of them as it takes.

    Raises
    ------
    DataError
        If there are not.
    """
    needed = int(np.prod(own.input_shape))
    if found != needed:
        raise DataError(
            f"{source}: found {found:,} {what}; allowed by data.own.input_shape {list(own.input_shape)}: {needed:,}"
        )
    return own.input_shape


def check_unpacked(source: Path, unpacked: int) -> None:
    """Refuse a small file that would fill the memory.

    Parameters
    ----------
    unpacked
        Bytes that it says it holds.

    Raises
    ------
    DataError
        If that is more than 1 GiB, and more than 100 times the file.
    """
    size = source.stat().st_size
    if unpacked > LARGE and unpacked > EXPANSION * size:
        raise DataError(
            f"{source}: a file of {size:,} bytes that unpacks to {unpacked:,} is not read; at most {EXPANSION} times "
            f"its size is, or {LARGE:,} bytes",
            hint="store it uncompressed if it is really that large",
        )


def undecodable_line(source: Path) -> int:
    """Return the number of the first line that is no UTF-8 text."""
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0
