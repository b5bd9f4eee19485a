"""Arrays: npz and safetensors files with ``x`` and ``y``, or ``train_x``, ``train_y`` and so on."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedloom.data.manifest import SPLITS, Kind
from fedloom.data.own import Own
from fedloom.data.pack.examples import Batches, Examples, Mistakes, Request, Tell, positions
from fedloom.errors import DataError

ROWS = 4096


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
    needed = [f"{prefix}{name}" for prefix in prefixes for name in (("x", "y") if request.labelled else ("x",))]
    missing = [name for name in needed if name not in arrays]
    if missing:
        instead = "" if request.labelled else "--unlabelled: "
        raise DataError(
            f"{path}: found the arrays {', '.join(sorted(arrays)) or '(none)'}, and no {', '.join(missing)}; allowed: "
            f"{instead}x and y, or train_x, train_y and so on; or --unlabelled, without y"
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
    return Examples(kind, classes, batches.joined(), y, split, where)


def _form(x: NDArray[Any], own: Own | None, path: Path) -> tuple[Kind, tuple[int, ...]]:
    """The kind and shape of inputs: those asked for, or what the array looks like."""
    if own is not None:
        return own.kind, own.input_shape
    if x.ndim == 4 and x.dtype == np.uint8:
        return "pixels", tuple(int(size) for size in x.shape[1:])
    if x.ndim == 2:
        return "features", (int(x.shape[1]),)
    raise DataError(
        f"{path}: x is {x.dtype} of shape {list(x.shape)}; allowed without --experiment: [n, features], or uint8 of "
        "shape [n, channels, height, width]"
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
    allowed = f"unknown label; allowed: 0 ... {len(classes) - 1}"
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
