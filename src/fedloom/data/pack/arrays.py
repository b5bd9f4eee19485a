"""Arrays: npz and safetensors files, MedMNIST's files, and arrays in memory.

They are ``x`` and ``y``, or ``train_x``, ``train_y`` and so on.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedloom.core.words import first_of, named_twice
from fedloom.data.manifest import SPLITS
from fedloom.data.pack.examples import (
    Columns,
    OnProgress,
    Places,
    Request,
    ValidationErrors,
    check_unpacked,
    described_shape,
)
from fedloom.data.pack.labels import owner_names
from fedloom.data.spec import InputSpec, RawInputs, TensorKind, named_arrays, unnamed
from fedloom.data.values import label_text
from fedloom.errors import DataError, ExperimentError, argument

MOST_CHANNELS = 4
"""Maximum channels of an image: a larger channel axis opposite an axis this small means swapped axes, an error."""

MEDMNIST = {"train": "train", "val": "validation", "test": "test"}
"""Prefixes of MedMNIST's arrays, and their splits."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Arrays of one split or owner; ``whose`` precedes the names of its arrays: ``client ann: test_``."""

    whose: str
    x: Mapping[str, NDArray[Any]]
    y: NDArray[Any] | None
    split: int | None
    owner: str | None

    def __len__(self) -> int:
        return len(next(iter(self.x.values())))

    def called(self, name: str) -> str:
        """Return the name of an input tensor in errors."""
        return f"{self.whose}x.{name}" if name else f"{self.whose}x"


class _ArrayPlaces(Places):
    """Indices of examples within the arrays of several parts."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        super().__init__(())
        self.parts, self.starts = parts, np.cumsum([0, *map(len, parts)])

    def _find(self, i: int) -> tuple[_Part, int]:
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.parts[part], i - int(self.starts[part])

    def row(self, i: int) -> str:
        part, i = self._find(i)
        return f"{part.whose}x[{i}]"

    def target(self, i: int) -> str:
        part, i = self._find(i)
        return f"{part.whose}y[{i}]"

    def _index(self, name: str, j: int) -> str:
        return ", ".join(map(str, np.unravel_index(j, self.parts[0].x[name].shape[1:])))

    def column(self, name: str, j: int) -> str:
        return f"{self.parts[0].called(name)[len(self.parts[0].whose) :]}[:, {self._index(name, j)}]"

    def cell(self, name: str, i: int, j: int) -> str:
        part, i = self._find(i)
        return f"{part.called(name)}[{i}, {self._index(name, j)}]"


def read_arrays(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read the arrays of a file.

    ``y`` holds positions in the classes, from 0, or class names; or other targets. Named inputs are ``x.NAME``.
    """
    on_progress("reading arrays", 0, None)
    arrays = read_npz(path) if path.suffix.lower() == ".npz" else _read_safetensors(path)
    prefixes = [*_prefixes(arrays)]
    start = prefixes[0]
    tensors = sorted(name.removeprefix(start) for name in arrays if name.startswith(f"{start}x."))
    inputs = ["x"] if f"{start}x" in arrays or not tensors else tensors
    others = [*["y"] * request.labelled, *[request.client or ""] * (request.client is not None)]
    names = [f"{prefix}{name}" for prefix in prefixes for name in (*inputs, *others)]
    if missing := [name for name in names if name not in arrays]:
        raise DataError(
            f"{path} has the arrays {', '.join(sorted(arrays)) or '(none)'}, but no {', '.join(missing)}; it must have "
            f"x and y, or train_x, train_y and so on; x.NAME for each of several inputs; when packing with "
            f"{argument('unlabelled')}, only x"
        )
    inputs_by_name: dict[str, RawInputs] = {}
    for prefix in prefixes:
        inputs_by_name[f"{prefix}x"] = unnamed({name[2:]: arrays[f"{prefix}{name}"] for name in inputs})
        if request.labelled:
            inputs_by_name[f"{prefix}y"] = arrays[f"{prefix}y"]
    columns = array_columns([(None, inputs_by_name)], None, request, errors)
    if request.client is not None:
        owners = _concatenated(
            [(f"{prefix}{request.client}", arrays[f"{prefix}{request.client}"]) for prefix in prefixes], errors
        )
        if owners.shape != (len(columns),) or owners.dtype.kind not in "iufUS":
            raise DataError(
                f"{path}: the owners are {owners.dtype} of shape {list(owners.shape)}; they must be whole numbers or "
                f"names, [{len(columns)}]"
            )
        columns = replace(columns, owners=owner_names(owners.tolist(), columns.places.row, errors))
    unused = sorted(set(arrays) - set(names))
    return replace(columns, notes=(*[f"arrays ignored: {first_of(unused)}"] * bool(unused), *columns.notes))


def read_medmnist(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read an npz file of MedMNIST (https://medmnist.com): images or volumes, with one class or several labels.

    Raise DataError if it has other arrays; ExperimentError if the request names owners, which such files lack.
    """
    if request.client is not None:
        key = "data.source.client"
        raise ExperimentError(f"{key}: MedMNIST's files have no owners; leave it out", key=key)
    on_progress("reading arrays", 0, None)
    arrays = read_npz(path)
    names = [f"{prefix}_{kind}" for prefix in MEDMNIST for kind in ("images", "labels")]
    if missing := [name for name in names if name not in arrays]:
        raise DataError(f"{path} has no {', '.join(missing)}, as MedMNIST's files have")
    columns: dict[str, RawInputs] = {}
    for prefix, split in MEDMNIST.items():
        images = arrays[f"{prefix}_images"]
        if images.ndim == 4 and images.shape[3] == 3 and images.shape[1] != 3:
            images = images.transpose(0, 3, 1, 2)
        elif images.ndim == 4:  # volumes, whose grey levels are features
            images = (images[:, None] / np.float32(255)).astype(np.float32)
        columns |= {f"{split}_x": images, f"{split}_y": arrays[f"{prefix}_labels"]}
    return array_columns([(None, columns)], None, request, errors)


def array_columns(
    parts: Sequence[tuple[str | None, Mapping[str, RawInputs]]],
    classes: tuple[str, ...] | None,
    request: Request,
    errors: ValidationErrors,
) -> Columns:
    """Return in-memory arrays as columns; all owners' arrays must have the same kind and shape.

    Raise DataError, naming the owner and the array, if the arrays are invalid.

    Parameters
    ----------
    parts
        An owner's name (None: no owner), and ``x`` with ``y``; or ``train_x``, ``train_y``, ``test_x``, ``test_y``, and
        optionally ``validation_x`` and ``validation_y``. Inputs are an array, or arrays by name. Without labels, only
        the inputs are given.
    classes
        Names of the classes, or of other outputs, in order; None: those found.
    """
    split_parts = [part for owner, arrays in parts for part in _parts(owner, arrays, request)]
    if not split_parts or len({(part.split is None, part.owner is None) for part in split_parts}) > 1:
        reason = "some clients have train_x and test_x, and others x" if split_parts else "it has no arrays"
        raise DataError(f"{errors.source}: {reason}; give the same arrays for every client")
    first, needs = split_parts[0], request.needs
    names = set(first.x) if needs is None else set(needs.inputs)
    for part in split_parts:
        if set(part.x) != names:
            inputs, other = (first_of(sorted(filter(None, each))) or "a single input" for each in (part.x, names))
            needed_by = f"{first.whose}x has" if needs is None else f"{request.needed_by} needs"
            raise DataError(f"{errors.source}: {part.whose}x has the inputs {inputs}; {needed_by} {other}")
        _check_shapes(part, first, request, errors.source)
    x = {
        name: _concatenated([(part.called(name), part.x[name]) for part in split_parts], errors)
        for name in sorted(names)
    }
    ys = [(f"{part.whose}y", part.y) for part in split_parts if part.y is not None]
    notes, specs = tuple[str, ...](), dict[str, InputSpec]()
    for name, each in x.items():
        if needs is not None:
            specs[name] = needs.inputs[name]
            continue
        kind = _kind(each, first.called(name), name, errors)
        axis = request.channel_axis if kind in ("features", "integers") and each.ndim > 2 else "first"
        specs[name] = InputSpec(kind, each.shape[1:], channel_axis=axis)
        notes += _notes_on_axes(f"x.{name}" if name else "x", specs[name])
    split = np.repeat([-1 if part.split is None else part.split for part in split_parts], [*map(len, split_parts)])
    return Columns(
        x,
        specs,
        _concatenated(ys, errors) if ys else None,
        _ArrayPlaces(split_parts),
        None if first.split is None else split.astype(np.int64),
        None if first.owner is None else [str(part.owner) for part in split_parts for _ in range(len(part))],
        classes=classes,
        notes=notes,
    )


def _parts(owner: str | None, arrays: Mapping[str, RawInputs], request: Request) -> list[_Part]:
    """Return the arrays of one owner by their splits."""
    place = "" if owner is None else f"client {owner}: "
    prefixes = _prefixes(arrays)
    allowed = [f"{prefix}{name}" for prefix in prefixes for name in ("xy" if request.labelled else "x")]
    foreign, missing = ([*filter(lambda name: name not in b, a)] for a, b in ((arrays, allowed), (allowed, arrays)))
    if foreign or missing:
        raise DataError(
            f"{place}{', '.join(missing or foreign)} {'is missing from' if missing else 'cannot be combined with'} "
            f"{', '.join(arrays if missing else allowed) or 'the arrays'}; give x and y, or train_x, train_y, test_x "
            "and test_y, and possibly validation_x and validation_y"
        )
    parts = []
    for prefix, split in prefixes.items():
        x, y = named_arrays(arrays[f"{prefix}x"]), arrays.get(f"{prefix}y")
        if not x or isinstance(y, Mapping):
            raise DataError(f"{place}{prefix}x must be an array, or arrays by name, and {prefix}y one array")
        inputs = {name: _with_channels(x[name], name, request) for name in sorted(x)}
        parts.append(_Part(f"{place}{prefix}", inputs, y, split, owner))
    if all(each.ndim and not len(each) for part in parts for each in part.x.values()):
        raise DataError(f"{place}it has no examples; leave such a client out")
    return parts


def _prefixes(arrays: Iterable[str]) -> dict[str, int | None]:
    """Return the prefixes of the arrays' names, with the position of the split that each stands for, if any."""
    arrays = {name.partition(".")[0] for name in arrays}
    prefixes: dict[str, int | None] = {f"{name}_": i for i, name in enumerate(SPLITS) if f"{name}_x" in arrays}
    return prefixes if "x" not in arrays and {0, 2} <= {*prefixes.values()} else {"": None}


def _with_channels(x: NDArray[Any], name: str, request: Request) -> NDArray[Any]:
    """Return an input with an axis for channels: gray images may lack one."""
    spec = None if request.needs is None else request.needs.inputs.get(name)
    return x[:, None] if x.ndim == 3 and x.dtype == np.uint8 and (spec is None or spec.kind == "pixels") else x


def _check_shapes(part: _Part, first: _Part, request: Request, source: str) -> None:
    """Reject arrays of other shapes than the first ones or the requirements, or of different lengths."""
    size = max(len(x) if x.ndim else 0 for x in part.x.values())
    for name, x in part.x.items():
        spec = None if request.needs is None else request.needs.inputs[name]
        shape = first.x[name].shape[1:] if spec is None else spec.shape
        if not x.ndim or x.shape[1:] != shape or 0 in shape:
            raise DataError(
                f"{source}: {part.called(name)} is of shape {list(x.shape)}; it must be "
                f"[n, {', '.join(map(str, shape)) or '...'}], with at least one number"
            )
        if len(x) != size:
            raise DataError(f"{source}: {part.called(name)} has {len(x)} examples; others of the inputs have {size}")
        if spec is not None and spec.kind == "pixels" and x.dtype.kind not in "iu":
            raise DataError(
                f"{source}: {part.called(name)} is {x.dtype}; pixels must be of an integer type, from 0 to 255"
            )
    if part.y is not None and part.y.shape[:1] != (size,):
        raise DataError(
            f"{source}: {part.whose}y is of shape {list(part.y.shape)}; it must be [{size}] or [{size}, ...], one "
            f"target for each example of {part.whose}x"
        )


def _concatenated(arrays: Sequence[tuple[str, NDArray[Any]]], errors: ValidationErrors) -> NDArray[Any]:
    """Return arrays of one kind of values, one after the other; errors name them."""
    (first, one), kind = arrays[0], {"S": "U"}
    for name, other in arrays[1:]:
        same_kind = kind.get(other.dtype.kind, other.dtype.kind) == kind.get(one.dtype.kind, one.dtype.kind)
        if not same_kind or other.shape[1:] != one.shape[1:]:
            raise DataError(
                f"{errors.source}: {name} is {other.dtype} of shape {list(other.shape)}, and {first} is {one.dtype} of "
                f"shape {list(one.shape)}; give one type (whole numbers, floats, or names) and one shape everywhere"
            )
    return one if len(arrays) == 1 else np.concatenate([array for _, array in arrays])


def _kind(x: NDArray[Any], label: str, name: str, errors: ValidationErrors) -> TensorKind:
    """Return the kind of an input tensor inferred from its array.

    Integers that are not pixels stay integers if all of them are 0 or more; with negative ones they are measurements.
    """
    if x.ndim == 4 and x.dtype == np.uint8:
        if x.shape[1] > MOST_CHANNELS >= x.shape[3]:
            raise DataError(
                f"{errors.source}: {label} has images of shape {list(x.shape[1:])}; they must be "
                "[channels, height, width], as x.transpose(0, 3, 1, 2) makes them"
            )
        return "pixels"
    if (x.ndim > 1 or name) and x.dtype.kind in "iufb":
        return "integers" if x.dtype.kind in "iu" and int(x.min(initial=0)) >= 0 else "features"
    raise DataError(
        f"{errors.source}: {label} is {x.dtype} of shape {described_shape(x)}; it must be numbers, [n, features] or "
        "[n, ...] of any shape, or pixels from 0 to 255 as uint8, [n, height, width] or [n, channels, height, width]"
    )


def _notes_on_axes(label: str, spec: InputSpec) -> tuple[str, ...]:
    """Return a note if the last axis of features, rather than the first, looks like that of channels."""
    shape = spec.shape
    if spec.kind != "features" or spec.channel_axis == "last" or len(shape) < 2:
        return ()
    if not shape[0] > MOST_CHANNELS >= shape[-1]:
        return ()
    return (
        f"{label} has inputs of shape {list(shape)}, whose first axis is taken for channels, each with a mean of its "
        "own; if the last one is that of channels, set channel_axis: last, or give numpy.moveaxis(x, -1, 1)",
    )


def class_names(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes in the form of labels; raise DataError for anything but a list of different names."""
    if isinstance(classes, str) or not isinstance(classes, Iterable) or not (listed := [*classes]):
        raise DataError(f"classes: {classes!r:.80} is not a list of names; give a name for each class, in order")
    try:
        names = [label_text(each, (str(each).strip(),)) for each in listed]
    except ValueError as error:
        raise DataError(f"classes: {error}; give a name for each class") from None
    if not all(names):
        raise DataError(
            f"classes: {listed[[*map(bool, names)].index(False)]!r} is a missing label; give a name for each"
        )
    distinct = tuple(name for name in names if name)
    if (twice := named_twice(distinct)) is not None:
        raise DataError(f"classes: {twice!r} occurs twice; give each class a unique name")
    return distinct


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file; raise DataError if it is damaged, or holds anything else."""
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
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
        declared, size = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if dtype.hasobject or min(shape, default=0) < 0 or declared != size:
            raise ValueError(f"{member.filename} declares {dtype} of shape {list(shape)}, and holds {size:,} bytes")


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{path} is not an intact safetensors file that numpy can read: {error}") from error
