"""Arrays: npz and safetensors files with ``x`` and ``y``, or ``train_x``, ``train_y`` and so on."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedloom.core.words import named_twice
from fedloom.data.manifest import SPLITS, Kind
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
    owner_names,
    positions,
)
from fedloom.data.values import are_numbers, as_numbers, found_classes, label_text
from fedloom.errors import DataError, argument

VALUES = 2**22
"""Numbers processed at once, unless one example has more."""

MOST_CHANNELS = 4
"""Maximum channels of an image: a larger channel axis before a last axis this small means channels-last images."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Inputs of one split or owner; ``name`` and ``place`` are what errors call the array and its examples."""

    name: str
    place: str
    x: NDArray[Any]
    y: NDArray[Any] | None
    split: int | None
    owners: NDArray[Any] | str | None


def read_arrays(path: Path, request: Request, errors: ValidationErrors, tell: Tell) -> Examples:
    """Read the arrays of a file; ``y`` holds positions in the classes, from 0, or class names."""
    tell("reading arrays", 0, None)
    arrays = _npz(path) if path.suffix.lower() == ".npz" else _safetensors(path)
    prefixes, own, client = _prefixes(arrays), request.own, request.client
    wanted = ["x", *["y"] * request.labelled, *[client] * (client is not None)]
    needed = [f"{prefix}{name}" for prefix in prefixes for name in wanted]
    if missing := [name for name in needed if name not in arrays]:
        without = "" if request.keys is not None else f", or x alone with {argument('unlabelled')}"
        raise DataError(
            f"{path} has the arrays {', '.join(sorted(arrays)) or '(none)'}, but no {', '.join(missing)}; it must have "
            f"x and y, or train_x, train_y and so on{without}"
        )
    parts = []
    for prefix, split in prefixes.items():
        x, y = with_channels(arrays[f"{prefix}x"]), arrays[f"{prefix}y"] if request.labelled else None
        owners = None if client is None else arrays[f"{prefix}{client}"]
        parts.append(_Part(f"{prefix}x", f"{prefix}x", x, y, split, owners))
    kind, shape = _form(parts[0], errors) if own is None else (own.kind, own.input_shape)
    examples = _joined(parts, kind, shape, None if own is None else own.classes, errors)
    unused = sorted(set(arrays) - set(needed))
    return replace(examples, notes=(*examples.notes, *[f"arrays ignored: {listed(unused)}"] * bool(unused)))


def examples_of(
    parts: Sequence[tuple[str | None, Mapping[str, NDArray[Any]]]], classes: Sequence[str] | None
) -> Examples:
    """Return in-memory arrays as examples; all owners' arrays must have the same kind and shape.

    Raise DataError if the arrays are invalid; names the owner and the array.

    Parameters
    ----------
    parts
        An owner's name (None: no owner), and ``x`` with ``y``; or ``train_x``, ``train_y``, ``test_x``, ``test_y``, and
        optionally ``validation_x`` and ``validation_y``.
    classes
        Class names in label order; None: those found.
    """
    errors = ValidationErrors("the arrays")
    names = None if classes is None else _given_classes(classes)
    found = [part for owner, arrays in parts for part in _parts_in_memory(owner, arrays)]
    if not found or len({(part.split is None, part.owners is None) for part in found}) > 1:
        what = "some clients have train_x and test_x, and others x" if found else "it has no arrays"
        raise DataError(f"{errors.source}: {what}; give the same arrays for every client")
    kind, shape = _form(found[0], errors)
    examples = _joined(found, kind, shape, names, errors, in_order=True)
    errors.refuse()
    return examples


def _prefixes(arrays: Mapping[str, NDArray[Any]]) -> dict[str, int | None]:
    """Return the prefixes of the arrays' names, with the position of the split that each stands for, if any."""
    given: dict[str, int | None] = {f"{name}_": i for i, name in enumerate(SPLITS) if f"{name}_x" in arrays}
    return given if "x" not in arrays and {0, 2} <= {*given.values()} else {"": None}


def _parts_in_memory(owner: str | None, arrays: Mapping[str, NDArray[Any]]) -> Iterator[_Part]:
    whose = "" if owner is None else f"client {owner}: "
    prefixes = _prefixes(arrays)
    known = [f"{prefix}{name}" for prefix in prefixes for name in "xy"]
    names = "x and y, or train_x, train_y, test_x and test_y, and possibly validation_x and validation_y"
    if missing := [name for name in known if name not in arrays]:
        raise DataError(
            f"{whose}{', '.join(missing)} is missing from {', '.join(arrays) or 'the arrays'}; give {names}"
        )
    if foreign := [name for name in arrays if name not in known]:
        raise DataError(
            f"{whose}{', '.join(foreign)} would not be used besides {', '.join(known)}; use the names {names}"
        )
    if not any(len(arrays[f"{prefix}x"].shape) == 0 or len(arrays[f"{prefix}x"]) for prefix in prefixes):
        raise DataError(f"{whose}it has no examples; leave such a client out")
    for prefix, split in prefixes.items():
        name, x, y = f"{whose}{prefix}", with_channels(arrays[f"{prefix}x"]), arrays[f"{prefix}y"]
        yield _Part(f"{name}x", f"{name}y", x, y, split, owner)


def _form(part: _Part, errors: ValidationErrors) -> tuple[Kind, tuple[int, ...]]:
    """Return the kind and shape of inputs inferred from an array."""
    x = part.x
    if x.ndim == 4 and x.dtype == np.uint8:
        if x.shape[1] > MOST_CHANNELS >= x.shape[3]:
            raise DataError(
                f"{errors.source}: {part.name} has images of shape {list(x.shape[1:])}; they must be [channels, "
                "height, width], as x.transpose(0, 3, 1, 2) makes them"
            )
        return "pixels", tuple(int(size) for size in x.shape[1:])
    if x.ndim == 2 and x.dtype.kind in "iufb":
        return "features", (int(x.shape[1]),)
    raise DataError(
        f"{errors.source}: {part.name} is {x.dtype} of shape {list(x.shape)}; it must be numbers [n, features], or "
        "pixels from 0 to 255 as uint8, [n, height, width] or [n, channels, height, width]"
    )


def _joined(
    parts: Sequence[_Part],
    kind: Kind,
    shape: tuple[int, ...],
    classes: tuple[str, ...] | None,
    errors: ValidationErrors,
    *,
    in_order: bool = False,
) -> Examples:
    """Return all parts as examples; see :func:`numbered` for ``classes`` and ``in_order``."""
    batches = Batches(kind, shape, len(classes or ()), errors, _column("x", shape))
    for part in parts:
        _take(batches, part)
    sizes = [len(part.x) for part in parts]
    starts = np.cumsum([0, *sizes])

    def where(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{parts[part].place}[{i - starts[part]}]"

    y, names = None, classes or ()
    if ys := [part.y for part in parts if part.y is not None]:
        y, names = numbered(ys, classes, kind, where, errors, in_order=in_order)
    owners = _owners(parts, where, errors)
    x, notes = batches.joined()
    split = np.repeat([-1 if part.split is None else part.split for part in parts], sizes).astype(np.int64)
    notes += notes_of_classes(names) if classes is None else ()
    return Examples(kind, names, x, y, split if (split >= 0).any() else None, where, notes=notes, owners=owners)


def _owners(parts: Sequence[_Part], where: Callable[[int], str], errors: ValidationErrors) -> tuple[str, ...] | None:
    owners: list[object] = []
    for part in parts:
        found = part.owners
        if found is None:
            return None
        if isinstance(found, str):
            return tuple(str(part.owners) for part in parts for _ in range(len(part.x)))
        if found.shape != (len(part.x),) or found.dtype.kind not in "iufUS":
            raise DataError(
                f"{errors.source}: the owners of {part.name} are {found.dtype} of shape {list(found.shape)}; they "
                f"must be whole numbers or names, [{len(part.x)}]"
            )
        owners += found.tolist()
    return owner_names(owners, where, errors)


def _given_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes as labels have them; refuse anything but a list of different names."""
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise DataError(f"classes: {classes!r:.80} is not a list; give the names of the classes, in order")
    names: list[str] = []
    for given in classes:
        try:
            name = label_text(given)
        except ValueError as error:
            raise DataError(f"classes: {error}; give a name for each class") from None
        if name is None:
            raise DataError(f"classes: {given!r} is a missing label; give a name for each class")
        names.append(name)
    if not names:
        raise DataError("classes is empty; give the names of the classes, or leave it out")
    if (twice := named_twice(names)) is not None:
        raise DataError(f"classes: {twice!r} occurs twice; give each class a unique name")
    return tuple(names)


def numbered(
    ys: Sequence[NDArray[Any]],
    classes: tuple[str, ...] | None,
    kind: Kind,
    where: Callable[[int], str],
    errors: ValidationErrors,
    *,
    in_order: bool = False,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return labels as positions in the classes, and the classes.

    A label is a class name. Where the classes are given and their names are not integers, integer labels are positions.

    Raise DataError if labels are neither text nor numbers, or mix both.

    Parameters
    ----------
    classes
        Classes of the experiment; None: the distinct labels.
    in_order
        The classes are in label order: integer labels are positions, whatever the names.
    """
    ys = [np.array(part.tolist()) if part.dtype.kind == "O" else part for part in ys]
    kinds = {part.dtype.kind for part in ys}
    if not any(kinds <= set(allowed) for allowed in ("USO", "iuf", "b")):
        raise DataError(
            f"{errors.source}: labels of type {', '.join(sorted({str(part.dtype) for part in ys}))} are not classes; "
            "labels must be whole numbers or class names"
        )
    labels = names_of((label for part in ys for label in part.tolist()), where, errors)
    if classes is not None and kinds <= set("iuf"):
        if in_order or kind == "tokens" or not are_numbers(classes):
            y, _ = positions(labels, tuple(map(str, range(len(classes)))), where, errors)
            return y, classes
        if classes != found_classes(classes):
            raise DataError(
                f"{errors.source}: the labels are integers, and so are the names of the classes, in another order "
                f"({listed(classes)}); give the labels as text, which is a class's name"
            )
    return positions(labels, classes, where, errors)


def with_channels(x: NDArray[Any]) -> NDArray[Any]:
    """Return inputs with an axis for channels: gray images may lack one."""
    return x[:, None] if x.ndim == 3 and x.dtype == np.uint8 else x


def _npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, sum(member.file_size for member in archive.infolist()))
            for member in archive.infolist():
                _check_header(archive, member)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, AttributeError) as error:
        raise DataError(f"{path} is not an intact npz file of plain arrays: {str(error).splitlines()[0]}") from error


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Reject an array whose size differs from its header, before memory is allocated for it."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member.filename} has version {version} of the npy format; use 1.0 or 2.0")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        told = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0 or told != member.file_size - file.tell():
            raise ValueError(
                f"{member.filename} declares {dtype} of shape {list(shape)}, and holds "
                f"{member.file_size - file.tell():,} bytes"
            )


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{path} is not an intact safetensors file that numpy can read: {error}") from error


def _take(batches: Batches, part: _Part) -> None:
    x, shape, source = part.x, batches.shape, batches.errors.source
    if x.shape[1:] != shape:
        raise DataError(f"{source}: {part.name} is of shape {list(x.shape)}; it must be [n, {_listed(shape)}]")
    if part.y is not None and part.y.shape != x.shape[:1]:
        raise DataError(
            f"{source}: {part.name[:-1]}y is of shape {list(part.y.shape)}; it must be [{len(x)}], as many as "
            f"{part.name} has examples"
        )
    if 0 in shape:
        raise DataError(f"{source}: {part.name} is of shape {list(x.shape)}, and an input needs at least one number")
    rows = max(1, VALUES // math.prod(shape))
    for start in range(0, len(x), rows):
        piece = x[start : start + rows]
        try:
            values = as_numbers(piece).reshape(len(piece), -1)
        except ValueError as error:
            raise DataError(f"{source}: {part.name}: {error}") from None
        batches.add(values, _place(part.name, start, shape), np.zeros(values.shape, dtype=np.bool_))


def _place(name: str, start: int, shape: tuple[int, ...]) -> Callable[[int, int], str]:
    return lambda i, j: f"{name}[{start + i}, {_listed(np.unravel_index(j, shape))}]"


def _column(name: str, shape: tuple[int, ...]) -> Callable[[int], str]:
    return lambda j: f"{name}[:, {_listed(np.unravel_index(j, shape))}]"


def _listed(sizes: Any) -> str:
    return ", ".join(str(int(size)) for size in sizes)
