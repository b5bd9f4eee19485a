"""Arrays: npz and safetensors files with ``x`` and ``y``, or ``train_x``, ``train_y`` and so on."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedloom.data.manifest import SPLITS, Kind
from fedloom.data.own import Own
from fedloom.data.pack.examples import (
    Batches,
    Examples,
    Request,
    Tell,
    ValidationErrors,
    check_unpacked,
    listed,
    names_of,
    notes_of_classes,
    positions,
)
from fedloom.data.values import are_numbers, found_classes, label_text, numbers
from fedloom.errors import DataError, argument
from fedloom.words import named_twice

VALUES = 2**22
"""Numbers processed at once, unless one example has more."""

MOST_CHANNELS = 4
"""Maximum channels of an image: a larger channel axis before a last axis this small means channels-last images."""


def read_arrays(path: Path, request: Request, mistakes: ValidationErrors, tell: Tell) -> Examples:
    """Read the arrays of a file.

    ``y`` holds positions in the classes, from 0, or class names.

    Raises
    ------
    DataError
        If the file has another format, or an array is missing or has an unsupported shape or type.
    """
    tell("reading arrays", 0, None)
    stored = _npz(path) if path.suffix.lower() == ".npz" else _safetensors(path)
    arrays = {name: with_channels(array) if name.endswith("x") else array for name, array in stored.items()}
    there = [place for place, split in enumerate(SPLITS) if f"{split}_x" in arrays]
    given = "x" not in arrays and {0, 2} <= set(there)
    prefixes = [f"{SPLITS[place]}_" for place in there] if given else [""]
    wanted = ["x", *(["y"] if request.labelled else []), *([] if request.client is None else [request.client])]
    needed = [f"{prefix}{name}" for prefix in prefixes for name in wanted]
    missing = [name for name in needed if name not in arrays]
    if missing:
        without = "" if request.keys is not None else f", or x alone with {argument('unlabelled')}"
        raise DataError(
            f"{path}: it holds the arrays {', '.join(sorted(arrays)) or '(none)'}, and no {', '.join(missing)}; it "
            f"must hold x and y, or train_x, train_y and so on{without}"
        )
    kind, shape = _form(arrays[needed[0]], request.own, path)
    own_classes = None if request.own is None else request.own.classes
    batches = Batches(kind, shape, len(own_classes or ()), mistakes, _column("x", shape))
    sizes = []
    for prefix in prefixes:
        x = arrays[f"{prefix}x"]
        if x.shape[1:] != shape:
            raise DataError(f"{path}: {prefix}x is of shape {list(x.shape)}; allowed: [n, {_joined(shape)}]")
        _take(batches, x, f"{prefix}x", path)
        sizes.append(len(x))
    starts = np.cumsum([0, *sizes])

    def where(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{prefixes[part]}x[{i - starts[part]}]"

    y, classes = None, own_classes or ()
    if request.labelled:
        parts = [_labels_of(arrays, prefix, size, path) for prefix, size in zip(prefixes, sizes, strict=True)]
        y, classes = numbered(parts, own_classes, kind, where, mistakes)
    split = np.repeat(np.array(there, dtype=np.int64), sizes) if given else None
    owners = None
    if request.client is not None:
        owners = _owners(
            [(f"{prefix}{request.client}", size) for prefix, size in zip(prefixes, sizes, strict=True)],
            arrays,
            where,
            mistakes,
        )
    x, notes = batches.joined()
    notes += notes_of_classes(classes) if own_classes is None else ()
    unused = sorted(name for name in arrays if name not in needed)
    notes += (f"arrays ignored: {listed(unused)}",) if unused else ()
    return Examples(kind, classes, x, y, split, where, notes=notes, owners=owners)


def _owners(
    named: list[tuple[str, int]],
    arrays: Mapping[str, NDArray[Any]],
    where: Callable[[int], str],
    mistakes: ValidationErrors,
) -> tuple[str, ...]:
    for name, size in named:
        found = arrays[name]
        if found.shape != (size,) or found.dtype.kind not in "iufUS":
            raise DataError(
                f"{mistakes.source}: {name} is {found.dtype} of shape {list(found.shape)}; it must be whole numbers or "
                f"names, [{size}]"
            )
    owners = names_of((owner for name, _ in named for owner in arrays[name].tolist()), where, mistakes, "client")
    missing = [i for i, owner in enumerate(owners) if not owner]
    mistakes.add_many("client missing", len(missing), (where(i) for i in missing))
    return tuple(owner or "" for owner in owners)


def examples_of(
    parts: Sequence[tuple[str | None, Mapping[str, NDArray[Any]]]], classes: Sequence[str] | None
) -> Examples:
    """Return in-memory arrays as examples; all owners' arrays must have the same kind and shape.

    Parameters
    ----------
    parts
        An owner's name (None: no owner), and ``x`` with ``y``; or ``train_x``, ``train_y``, ``test_x``, ``test_y``, and
        optionally ``validation_x`` and ``validation_y``.
    classes
        Class names in label order; None: those found.

    Raises
    ------
    DataError
        If the arrays are invalid; names the owner, the array, the value found and the values allowed.
    """
    mistakes, form = ValidationErrors("the arrays"), None
    names = None if classes is None else _given_classes(classes)
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
        known = {f"{prefix}{name}" for prefix, _ in pairs for name in "xy"}
        if foreign := [name for name in arrays if name not in known]:
            raise DataError(
                f"{whose}{', '.join(foreign)} would not be used beside {', '.join(sorted(known))}; the names are x and "
                "y, or train_x, train_y, validation_x, validation_y, test_x and test_y"
            )
        if all(arrays[f"{prefix}x"].shape[:1] == (0,) for prefix, _ in pairs):
            raise DataError(f"{whose}there are 0 examples; leave such a client out")
        for prefix, split in pairs:
            x, y = arrays[f"{prefix}x"], arrays.get(f"{prefix}y")
            if y is None or y.shape != x.shape[:1]:
                found = "none" if y is None else f"shape {list(y.shape)}"
                raise DataError(
                    f"{whose}{prefix}y: found {found}; allowed: {list(x.shape[:1])}, as many as {prefix}x has examples"
                )
            x = with_channels(x)
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
    shape = tuple(int(size) for size in form)
    batches = Batches(kind, shape, 0, mistakes, _column("x", shape))
    for name, x in xs:
        _take(batches, x, name, mistakes.source)
    starts = np.cumsum([0, *sizes])

    def where(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{xs[part][0].removesuffix('x')}y[{i - starts[part]}]"

    y, names = numbered(ys, names, kind, where, mistakes, in_order=True)
    inputs, notes = batches.joined()
    mistakes.refuse()
    return Examples(
        kind=kind,
        classes=names,
        x=inputs,
        y=y,
        notes=(*notes, *(notes_of_classes(names) if classes is None else ())),
        split=None if splits[0] is None else np.repeat(np.array(splits, dtype=np.int64), sizes),
        where=where,
        owners=None
        if owners[0] is None
        else tuple(str(o) for o, size in zip(owners, sizes, strict=True) for _ in range(size)),
    )


def _given_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes as labels have them.

    Raises
    ------
    DataError
        If they are no list of different names.
    """
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise DataError(f"classes: {classes!r:.80} is not a list; give the names of the classes, in order")
    names: list[str] = []
    for given in classes:
        try:
            name = label_text(given)
        except ValueError as error:
            raise DataError(f"classes: {error}; give a name for each class") from None
        if name is None:
            raise DataError(f"classes: {given!r} stands for a missing label; give a name for each class")
        names.append(name)
    if not names:
        raise DataError("classes: the list is empty; give the names of the classes, or leave it out")
    if (twice := named_twice(names)) is not None:
        raise DataError(f"classes: {twice!r} is there twice; each class needs a name of its own")
    return tuple(names)


def numbered(
    ys: Sequence[NDArray[Any]],
    classes: tuple[str, ...] | None,
    kind: Kind,
    where: Callable[[int], str],
    mistakes: ValidationErrors,
    *,
    in_order: bool = False,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return labels as positions in the classes, and the classes.

    A label is a class name. Where the classes are given and their names are not integers, integer labels are positions.

    Parameters
    ----------
    classes
        Classes of the experiment; None: the distinct labels.
    in_order
        The classes are in label order: integer labels are positions, whatever the names.

    Raises
    ------
    DataError
        If labels are neither text nor numbers, or mix both.
    """
    ys = [np.array(part.tolist()) if part.dtype.kind == "O" else part for part in ys]
    kinds = {part.dtype.kind for part in ys}
    if not any(kinds <= set(allowed) for allowed in ("USO", "iuf", "b")):
        raise DataError(
            f"{mistakes.source}: labels of type {', '.join(sorted({str(part.dtype) for part in ys}))} are no classes; "
            "labels are whole numbers, or the classes' names"
        )
    labels = names_of((label for part in ys for label in part.tolist()), where, mistakes)
    if classes is None or not kinds <= set("iuf"):
        return positions(labels, classes, where, mistakes)
    if in_order or kind == "tokens" or not are_numbers(classes):
        y, _ = positions(labels, tuple(map(str, range(len(classes)))), where, mistakes)
        return y, classes
    if classes != found_classes(classes):
        raise DataError(
            f"{mistakes.source}: the labels are integers, and so are the names of the classes, in another order "
            f"({listed(classes)}); give the labels as text, which is a class's name"
        )
    return positions(labels, classes, where, mistakes)


def _form(x: NDArray[Any], own: Own | None, path: Path) -> tuple[Kind, tuple[int, ...]]:
    """Return the kind and shape of inputs: those of the experiment, else those inferred from the array."""
    if own is not None:
        return own.kind, own.input_shape
    if x.ndim == 4 and x.dtype == np.uint8:
        _check_channels(x, f"{path}: x")
        return "pixels", tuple(int(size) for size in x.shape[1:])
    if x.ndim == 2:
        return "features", (int(x.shape[1]),)
    raise DataError(
        f"{path}: x is {x.dtype} of shape {list(x.shape)}; without {argument('experiment')} it must be numbers [n, "
        "features], or uint8 of shape [n, height, width] or [n, channels, height, width]."
    )


def with_channels(x: NDArray[Any]) -> NDArray[Any]:
    """Return inputs with an axis for channels: gray images may lack one."""
    return x[:, None] if x.ndim == 3 and x.dtype == np.uint8 else x


def _check_channels(x: NDArray[Any], what: str) -> None:
    if x.ndim == 4 and x.shape[1] > MOST_CHANNELS >= x.shape[3]:
        raise DataError(
            f"{what}: found images of shape {list(x.shape[1:])}; allowed: [channels, height, width], as "
            "x.transpose(0, 3, 1, 2) makes them"
        )


def _labels_of(arrays: Mapping[str, NDArray[Any]], prefix: str, size: int, path: Path) -> NDArray[Any]:
    y = arrays[f"{prefix}y"]
    if y.shape != (size,):
        raise DataError(f"{path}: {prefix}y is of shape {list(y.shape)}; it must be [{size}], as many as {prefix}x")
    return y


def _npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, sum(member.file_size for member in archive.infolist()))
            for member in archive.infolist():
                _check_header(archive, member)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, AttributeError) as error:
        raise DataError(f"{path}: not a whole npz file of plain arrays: {str(error).splitlines()[0]}") from error


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Reject an array whose size differs from its header, before memory is allocated for it.

    Raises
    ------
    ValueError
        Names the array in the npz file and the reason.
    """
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member.filename} is of version {version} of the npy format; 1.0 and 2.0 are read")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        told = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0 or told != member.file_size - file.tell():
            raise ValueError(
                f"{member.filename} says that it is {dtype} of shape {list(shape)}, and holds "
                f"{member.file_size - file.tell():,} bytes"
            )


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{path}: no whole safetensors file that numpy can hold: {error}") from error


def _take(batches: Batches, x: NDArray[Any], name: str, source: Path | str) -> None:
    """Add an array of inputs in chunks."""
    if 0 in batches.shape:
        raise DataError(f"{source}: {name} is of shape {list(x.shape)}, and an input needs at least one number")
    rows = max(1, VALUES // max(1, math.prod(batches.shape)))
    for start in range(0, len(x), rows):
        piece = x[start : start + rows]
        try:
            values = numbers(piece).reshape(len(piece), math.prod(batches.shape))
        except ValueError as error:
            raise DataError(f"{source}: {name}: {error}") from None
        batches.add(values, _place(name, start, batches.shape), np.zeros(values.shape, dtype=np.bool_))


def _place(name: str, start: int, shape: tuple[int, ...]) -> Callable[[int, int], str]:
    return lambda i, j: f"{name}[{start + i}, {_joined(np.unravel_index(j, shape))}]"


def _column(name: str, shape: tuple[int, ...]) -> Callable[[int], str]:
    return lambda j: f"{name}[:, {_joined(np.unravel_index(j, shape))}]"


def _joined(numbers: Any) -> str:
    return ", ".join(str(int(number)) for number in numbers)
