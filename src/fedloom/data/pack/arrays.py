"""Arrays: npz and safetensors files with ``x`` and ``y``, or ``train_x``, ``train_y`` and so on."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedloom.data.manifest import SPLITS, Kind
from fedloom.data.own import Own
from fedloom.data.pack.examples import Batches, Examples, Mistakes, Request, Tell, found_classes, listed, positions
from fedloom.errors import DataError, argument
from fedloom.words import counted

ROWS = 4096

MOST_CHANNELS = 4
"""Images that are no wider, and have more channels, have their channels last."""


def read_arrays(path: Path, request: Request, mistakes: Mistakes, tell: Tell) -> Examples:
    """Read the arrays of a file.

    ``y`` holds positions in the classes, from 0, or their names.

    Raises
    ------
    DataError
        If it is no such file, or an array is missing, of another shape, or of a type that cannot be taken.
    """
    tell("reading arrays", 0, None)
    arrays = _npz(path) if path.suffix.lower() == ".npz" else _safetensors(path)
    given = "x" not in arrays and all(f"{split}_x" in arrays for split in SPLITS)
    prefixes = [f"{split}_" for split in SPLITS] if given else [""]
    wanted = ["x", *(["y"] if request.labelled else []), *([] if request.client is None else [request.client])]
    needed = [f"{prefix}{name}" for prefix in prefixes for name in wanted]
    missing = [name for name in needed if name not in arrays]
    if missing:
        instead = "" if request.labelled else f"{argument('unlabelled')}: "
        raise DataError(
            f"{path}: found the arrays {', '.join(sorted(arrays)) or '(none)'}, and no {', '.join(missing)}; allowed: "
            f"{instead}x and y, or train_x, train_y and so on; or {argument('unlabelled')}, without y"
        )
    kind, shape = _form(arrays[needed[0]], request.own, path)
    batches = Batches(kind, shape, 0 if request.own is None else len(request.own.classes), mistakes)
    sizes = []
    for prefix in prefixes:
        x = arrays[f"{prefix}x"]
        if x.shape[1:] != shape:
            raise DataError(f"{path}: {prefix}x is of shape {list(x.shape)}; allowed: [n, {_joined(shape)}]")
        if x.dtype.kind not in "iuf":
            raise DataError(f"{path}: {prefix}x is of type {x.dtype}; allowed: integers and floats")
        for start in range(0, len(x), ROWS):
            piece = x[start : start + ROWS].reshape(min(ROWS, len(x) - start), -1).astype(np.float64)
            batches.add(piece, _place(f"{prefix}x", start, shape), np.zeros(piece.shape, dtype=np.bool_))
        sizes.append(len(x))
    starts = np.cumsum([0, *sizes])

    def where(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{prefixes[part]}x[{i - starts[part]}]"

    classes = () if request.own is None else request.own.classes
    y = None
    if request.labelled:
        y, classes = _labels(arrays, prefixes, sizes, request.own, where, mistakes, path)
    split = np.repeat(np.arange(3), sizes).astype(np.int64) if given else None
    owners = None
    if request.client is not None:
        owners = _owners(
            [(f"{prefix}{request.client}", size) for prefix, size in zip(prefixes, sizes, strict=True)], arrays, path
        )
    return Examples(kind, classes, batches.joined(), y, split, where, owners=owners)


def _owners(named: list[tuple[str, int]], arrays: Mapping[str, NDArray[Any]], path: Path) -> tuple[str, ...]:
    for name, size in named:
        found = arrays[name]
        if found.shape != (size,) or found.dtype.kind not in "iuU":
            raise DataError(
                f"{path}: {name} is {found.dtype} of shape {list(found.shape)}; allowed: numbers or names, [{size}]"
            )
    return tuple(str(owner) for name, _ in named for owner in arrays[name].tolist())


def examples_of(
    parts: Sequence[tuple[str | None, Mapping[str, NDArray[Any]]]], classes: Sequence[str] | None
) -> Examples:
    """Return arrays in memory as examples; those of every owner have one kind and shape.

    Parameters
    ----------
    parts
        An owner's name (None: nobody's), and ``x`` with ``y``; or ``train_x``, ``train_y``, ``test_x``, ``test_y``, and
        perhaps ``validation_x`` and ``validation_y``.
    classes
        Their names in the order of the labels; None: those that are found.

    Raises
    ------
    DataError
        If anything is wrong with them: whose, which array, what was found and what is allowed.
    """
    mistakes, form = Mistakes("the arrays"), None
    xs: list[tuple[str, NDArray[Any]]] = []
    ys: list[NDArray[Any]] = []
    splits: list[int | None] = []
    owners: list[str | None] = []
    for owner, arrays in parts:
        whose = "" if owner is None else f"client {owner}: "
        pairs = (
            [("", None)]
            if "x" in arrays
            else [(f"{name}_", i) for i, name in enumerate(SPLITS) if f"{name}_x" in arrays]
        )
        if not {split for _, split in pairs} >= {0, 2} and pairs != [("", None)]:
            found = ", ".join(arrays) or "nothing"
            raise DataError(f"{whose}found {found}; allowed: x and y, or train_x, train_y, test_x and test_y")
        for prefix, split in pairs:
            x, y = arrays[f"{prefix}x"], arrays.get(f"{prefix}y")
            if y is None or y.shape != (len(x),):
                found = "none" if y is None else f"shape {list(y.shape)}"
                raise DataError(
                    f"{whose}{prefix}y: found {found}; allowed: [{len(x)}], as many as {prefix}x has examples"
                )
            if x.ndim == 3 and x.dtype == np.uint8:
                x = x[:, None]  # gray images
            if not ((x.ndim == 4 and x.dtype == np.uint8) or (x.ndim == 2 and x.dtype.kind in "iufb")):
                raise DataError(
                    f"{whose}{prefix}x: found {x.dtype} of shape {list(x.shape)}; allowed: numbers [n, features], or "
                    "pixels from 0 to 255 as uint8, [n, height, width] or [n, channels, height, width]"
                )
            _check_channels(x, f"{whose}{prefix}x")
            form = x.shape[1:] if form is None else form
            if x.shape[1:] != form:
                raise DataError(
                    f"{whose}{prefix}x: found examples of shape {list(x.shape[1:])}; allowed: {list(form)}, as the "
                    "first's"
                )
            xs.append((f"{whose}{prefix}x", x))
            ys.append(y)
            splits.append(split)
            owners.append(owner)
    if form is None or len({split is None for split in splits}) > 1 or len({owner is None for owner in owners}) > 1:
        found = "no arrays" if form is None else "some with train_x and test_x, and some with x"
        raise DataError(f"{mistakes.source}: found {found}; allowed: either for every client")
    sizes = [len(x) for _, x in xs]
    kind: Kind = "pixels" if len(form) == 3 else "features"
    batches = Batches(kind, tuple(int(size) for size in form), 0, mistakes)
    for name, x in xs:
        for start in range(0, len(x), ROWS):
            piece = x[start : start + ROWS].reshape(min(ROWS, len(x) - start), -1).astype(np.float64)
            batches.add(piece, _place(name, start, form), np.zeros(piece.shape, dtype=np.bool_))
    starts = np.cumsum([0, *sizes])

    def where(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{xs[part][0].removesuffix('x')}y[{i - starts[part]}]"

    y, names = _numbered(ys, None if classes is None else tuple(classes), where, mistakes)
    mistakes.refuse()
    return Examples(
        kind=kind,
        classes=names,
        x=batches.joined(),
        y=y,
        split=None if splits[0] is None else np.repeat(np.array(splits, dtype=np.int64), sizes),
        where=where,
        owners=None
        if owners[0] is None
        else tuple(str(o) for o, size in zip(owners, sizes, strict=True) for _ in range(size)),
    )


def _numbered(
    ys: list[NDArray[Any]], classes: tuple[str, ...] | None, where: Callable[[int], str], mistakes: Mistakes
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels as positions in the classes, and the classes: names as they are, integers as positions."""
    kinds = {part.dtype.kind for part in ys}
    if kinds <= {"U", "O"}:
        labels = [str(label).strip() for part in ys for label in part.tolist()]
        names = found_classes(labels) if classes is None else classes
        place = {name: i for i, name in enumerate(names)}
        y = np.array([place.get(label, -1) for label in labels], dtype=np.int64)
        allowed = listed(names)
    elif kinds <= {"i", "u"}:
        labels = np.concatenate(ys).tolist()
        y = np.array(labels, dtype=np.int64)
        largest = int(y.max(initial=-1))
        if classes is None and largest >= len(y):  # a number that stands for something else, not a millionth class
            raise DataError(
                f"{mistakes.source}: found the label {largest:,} ({where(int(y.argmax()))}) among "
                f"{counted(len(y), 'example')}; allowed: integers from 0, one for each class, or the names of "
                "the classes"
            )
        names = tuple(map(str, range(largest + 1))) if classes is None else classes
        allowed = "integers from 0" if classes is None else f"0 to {len(names) - 1}"
    else:
        raise DataError(
            f"{mistakes.source}: found labels of type {', '.join(sorted({str(part.dtype) for part in ys}))}; allowed: "
            "integers from 0, or the classes' names"
        )
    wrong = np.flatnonzero((y < 0) | (y >= len(names))).tolist()
    mistakes.add_many(f"unknown label; allowed: {allowed}", len(wrong), (f"{where(i)}: {labels[i]!r}" for i in wrong))
    return y, names


def _form(x: NDArray[Any], own: Own | None, path: Path) -> tuple[Kind, tuple[int, ...]]:
    """The kind and shape of inputs: those asked for, or what the array looks like."""
    if own is not None:
        return own.kind, own.input_shape
    if x.ndim == 4 and x.dtype == np.uint8:
        _check_channels(x, f"{path}: x")
        return "pixels", tuple(int(size) for size in x.shape[1:])
    if x.ndim == 2:
        return "features", (int(x.shape[1]),)
    raise DataError(
        f"{path}: x is {x.dtype} of shape {list(x.shape)}; without {argument('experiment')} it must be [n, "
        "features], or uint8 "
        "of shape [n, channels, height, width]."
    )


def _check_channels(x: NDArray[Any], what: str) -> None:
    if x.ndim == 4 and x.shape[1] > MOST_CHANNELS >= x.shape[3]:
        raise DataError(
            f"{what}: found images of shape {list(x.shape[1:])}; allowed: [channels, height, width], as "
            "x.transpose(0, 3, 1, 2) makes them"
        )


def _labels(
    arrays: Mapping[str, NDArray[Any]],
    prefixes: list[str],
    sizes: list[int],
    own: Own | None,
    where: Callable[[int], str],
    mistakes: Mistakes,
    path: Path,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    parts = []
    for prefix, size in zip(prefixes, sizes, strict=True):
        y = arrays[f"{prefix}y"]
        if y.shape != (size,):
            raise DataError(f"{path}: {prefix}y is of shape {list(y.shape)}; allowed: [{size}], as many as {prefix}x")
        parts.append(y)
    kinds = {part.dtype.kind for part in parts}
    if kinds <= {"U"}:
        return positions([str(label).strip() for part in parts for label in part], own, where, mistakes)
    if not kinds <= {"i", "u"}:
        raise DataError(f"{path}: y is of type {parts[0].dtype}; allowed: integers from 0, or the classes' names")
    y = np.concatenate(parts).astype(np.int64)
    classes = tuple(map(str, range(int(y.max(initial=-1)) + 1))) if own is None else own.classes
    wrong = np.flatnonzero((y < 0) | (y >= len(classes))).tolist()
    allowed = f"unknown label; allowed: {'integers from 0' if own is None else f'0 to {len(classes) - 1}'}"
    mistakes.add_many(allowed, len(wrong), (f"{where(i)}: {y[i]}" for i in wrong))
    return y, classes


def _npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, AttributeError) as error:
        raise DataError(f"{path}: no whole npz file of plain arrays: {str(error).splitlines()[0]}") from error


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{path}: no whole safetensors file that numpy can hold: {error}") from error


def _place(name: str, start: int, shape: tuple[int, ...]) -> Callable[[int, int], str]:
    return lambda i, j: f"{name}[{start + i}, {_joined(np.unravel_index(j, shape))}]"


def _joined(numbers: Any) -> str:
    return ", ".join(str(int(number)) for number in numbers)
