"""Labels, owners and splits: names, and their positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import composed, first_of, pluralize
from fedloom.data.pack.examples import SPLIT_NAMES, ValidationErrors
from fedloom.data.values import FEW, are_numbers, found_classes, label_text, measured, plain_numbers
from fedloom.errors import DataError

Place: TypeAlias = Callable[[int], str]
"""Returns the place of the i-th example in a source."""

SEPARATORS = "|;"
"""Marks between labels in a cell that lists several."""


def label_positions(
    y: NDArray[Any],
    classes: tuple[str, ...] | None,
    place: Place,
    errors: ValidationErrors,
    *,
    in_order: bool = False,
    is_name: bool = False,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return labels ``[n]`` as positions in the classes, and the classes; record labels that are missing or unknown.

    A label is a class name. Where the classes are given and their names are not integers, integer labels are positions.

    Raise DataError if labels are neither text nor numbers, or it is unclear whether integers are names or positions.

    Parameters
    ----------
    classes
        Classes that are given; None: the distinct labels.
    in_order
        The classes are in label order: integer labels are positions, whatever the names.
    is_name
        Integer labels are names, whatever the classes; labels may be of any type.
    """
    present = np.array([label for label in y.tolist() if label is not None]) if y.dtype.kind == "O" else y
    numeric = present.dtype.kind in "iuf" and not is_name
    if present.dtype.kind not in "USOiufb" and not is_name:
        raise DataError(
            f"{errors.source}: labels of type {y.dtype} are not classes; labels must be whole numbers or class names"
        )
    names = names_of(y.tolist(), place, errors, classes=classes or ())
    if classes is None:
        classes = _distinct_classes(names, place, errors)
    elif numeric and (in_order or not are_numbers(classes)):
        return _positions(names, tuple(map(str, range(len(classes)))), place, errors), classes
    elif numeric and classes != found_classes(classes):
        raise DataError(
            f"{errors.source}: the labels are integers, and so are the names of the classes, but in another order "
            f"({first_of(classes)}); give the labels as text, so that they are names of classes"
        )
    return _positions(names, classes, place, errors), classes


def names_of(
    labels: Iterable[object],
    place: Place,
    errors: ValidationErrors,
    column: str = "label",
    classes: Collection[str] = (),
) -> list[str | None]:
    """Return labels or owners as text: digits if all are numbers, None where missing, ``?`` where invalid.

    Record those that are missing or invalid. ``classes`` are those given, if any.
    """
    parsed: dict[tuple[type, object], tuple[str | None, str | None]] = {}
    names: list[str | None] = []
    for i, label in enumerate(labels):
        key = (type(label), label) if isinstance(label, str | bytes | int | float) else (type(label), str(label))
        if key not in parsed:
            try:
                parsed[key] = label_text(label, classes), None
            except ValueError as error:
                parsed[key] = "?", str(error)
        name, fault = parsed[key]
        if name is None and isinstance(label, str) and label.strip():
            errors.add(f"{column} missing, by its text; rename it if it is a name", f"{place(i)}: {label!r}")
        elif name is None:
            errors.add(f"{column} missing", place(i))
        elif fault is not None:
            errors.add(f"a {column} must be text or a whole number", f"{place(i)}: {fault}")
        names.append(name)
    plain = plain_numbers(name for name, _ in parsed.values() if name)
    return [plain.get(name, name) if name else None for name in names] if plain else names


def owner_names(owners: Iterable[object], place: Place, errors: ValidationErrors) -> tuple[str, ...]:
    """Return owners as text; record those that are missing."""
    return tuple(name or "" for name in names_of(owners, place, errors, "client"))


def split_positions(splits: Iterable[object], place: Place, errors: ValidationErrors) -> NDArray[np.int64]:
    """Return the position in ``SPLITS`` for each split name of a source, ``[n]``; record unknown ones."""
    names = names_of(splits, place, errors, "split")
    positions = np.array([SPLIT_NAMES.get((name or "").strip().lower(), -1) for name in names], dtype=np.int64)
    wrong = np.flatnonzero(positions < 0).tolist()
    allowed = f"unknown split; splits are {', '.join(SPLIT_NAMES)}"
    errors.add_many(allowed, len(wrong), (f"{place(i)}: {names[i]!r}" for i in wrong))
    return positions


def notes_of_classes(classes: Sequence[str], several: str) -> tuple[str, ...]:
    """Return a note on integer labels, unless they are 0, 1, 2 and so on, or on labels that list several others.

    ``several`` says how to give several labels of an example.
    """
    if are_numbers(classes):
        if tuple(classes) == tuple(map(str, range(len(classes)))):
            return ()
        return (f"{pluralize(len(classes), 'class', 'classes')}, the different labels: {first_of(classes)}",)
    for mark in SEPARATORS:
        parts = {name: [part.strip() for part in name.split(mark)] for name in classes if mark in name}
        counts = Counter(part for name in classes for part in parts.get(name, [name]))
        if lists := [name for name, own in parts.items() if all(own) and any(counts[part] > 1 for part in own)]:
            several_are = pluralize(len(lists), "class is a list", "classes are lists")
            return (
                f"{several_are} of others: {first_of(lists, 5)}; if an example has several labels, give {several} for "
                f"multilabel (pandas: label.str.get_dummies({mark!r}))",
            )
    return ()


def _positions(
    labels: Sequence[str | None], classes: Sequence[str], place: Place, errors: ValidationErrors
) -> NDArray[np.int64]:
    """Return the position in the classes of each label, ``[n]``; record unknown labels."""
    positions = {composed(name): i for i, name in enumerate(classes)}
    y = np.array([positions.get(label or "", -1) for label in labels], dtype=np.int64)
    unknown = [i for i in np.flatnonzero(y < 0).tolist() if labels[i]]
    consecutive = tuple(classes) == tuple(map(str, range(len(classes))))
    allowed = f"0 to {len(classes) - 1}" if consecutive and classes else first_of(classes)
    labels_shown = (labels[i] if are_numbers((labels[i] or "",)) else repr(labels[i]) for i in unknown)
    errors.add_many(
        f"unknown label; labels are {allowed}",
        len(unknown),
        (f"{place(i)}: {label}" for i, label in zip(unknown, labels_shown, strict=True)),
    )
    return y


def _distinct_classes(labels: Sequence[str | None], place: Place, errors: ValidationErrors) -> tuple[str, ...]:
    """Return the distinct labels, and record an error if they are a measured quantity."""
    different = {label for label in labels if label}
    quantity = set(measured(different))
    if not quantity and len(different) > max(FEW, len(labels) // 2) and are_numbers(tuple(different)):
        quantity = different
    places = [i for i, label in enumerate(labels) if label in quantity]
    errors.add_many(
        f"a measured quantity ({pluralize(len(different), 'different number')}); classes must be names or whole "
        "numbers that repeat; for numbers as targets, set task: regression",
        len(places),
        (f"{place(i)}: {labels[i]}" for i in places),
    )
    return found_classes(different)
