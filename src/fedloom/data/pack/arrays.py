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
from fedloom.data.input_spec import InputSpec, Kind, RawInputs, TensorKind, named_arrays, unnamed
from fedloom.data.manifest import SPLITS
from fedloom.data.pack.examples import (
    MOST_CHANNELS,
    Batches,
    Examples,
    OnProgress,
    Request,
    ValidationErrors,
    check_unpacked,
    listed,
    names_of,
    notes_of_classes,
    notes_on_axes,
    owner_names,
    positions,
    spec_of,
)
from fedloom.data.pack.targets import (
    inferred_task,
    is_one_hot,
    names_of_ones,
    notes_on_one_hot,
    read_targets,
    tokens_to_predict,
    without_ones,
)
from fedloom.data.targets import SHAPES
from fedloom.data.values import are_numbers, as_numbers, found_classes, label_text
from fedloom.errors import DataError, argument
from fedloom.tasks.names import TaskName

VALUES = 2**22
"""Number of values processed at once, unless one example has more."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Examples of one split or owner; errors call the inputs ``name``, and an example ``place[i]``."""

    name: str
    place: str
    x: Mapping[str, NDArray[Any]]
    y: NDArray[Any] | None
    split: int | None
    owners: NDArray[Any] | str | None

    def __len__(self) -> int:
        return len(next(iter(self.x.values())))

    def called(self, name: str) -> str:
        """Return the name of an input tensor in errors."""
        return f"{self.name}.{name}" if name else self.name


def read_arrays(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read the arrays of a file.

    ``y`` holds positions in the classes, from 0, or class names; or other targets. Named inputs are ``x.NAME``.
    """
    on_progress("reading arrays", 0, None)
    arrays = read_npz(path) if path.suffix.lower() == ".npz" else _safetensors(path)
    prefixes, client = _prefixes(arrays), request.client
    prefix = next(iter(prefixes))
    tensors = sorted(name[len(prefix) :] for name in arrays if name.startswith(f"{prefix}x."))
    inputs = ["x"] if f"{prefix}x" in arrays or not tensors else tensors
    wanted = [*inputs, *["y"] * request.labelled, *[client] * (client is not None)]
    needed = [f"{prefix}{name}" for prefix in prefixes for name in wanted]
    if missing := [name for name in needed if name not in arrays]:
        without = "" if request.keys is not None else f", or only x with {argument('unlabelled')}"
        raise DataError(
            f"{path} has the arrays {', '.join(sorted(arrays)) or '(none)'}, but no {', '.join(missing)}; it must have "
            f"x and y, or train_x, train_y and so on; x.NAME for each of several inputs{without}"
        )
    parts = []
    for prefix, split in prefixes.items():
        x = {name[2:]: with_channels(arrays[f"{prefix}{name}"]) for name in inputs}
        y = arrays[f"{prefix}y"] if request.labelled else None
        owners = None if client is None else arrays[f"{prefix}{client}"]
        parts.append(_Part(f"{prefix}x", f"{prefix}x", x, y, split, owners))
    examples = _joined(parts, request, errors)
    unused = sorted(set(arrays) - set(needed))
    return replace(examples, notes=(*examples.notes, *[f"arrays ignored: {listed(unused)}"] * bool(unused)))


def examples_of(
    parts: Sequence[tuple[str | None, Mapping[str, RawInputs]]],
    classes: Sequence[str] | None,
    request: Request | None = None,
) -> Examples:
    """Return in-memory arrays as examples; all owners' arrays must have the same kind and shape.

    Raise DataError, naming the owner and the array, if the arrays are invalid.

    Parameters
    ----------
    parts
        An owner's name (None: no owner), and ``x`` with ``y``; or ``train_x``, ``train_y``, ``test_x``, ``test_y``, and
        optionally ``validation_x`` and ``validation_y``. Inputs are an array, or arrays by name.
    classes
        Names of the classes, or of other outputs, in order; None: those found.
    request
        Task, outputs and channel axis; None: inferred from the arrays.
    """
    errors = ValidationErrors("the arrays")
    names = None if classes is None else _given_classes(classes)
    found = [part for owner, arrays in parts for part in _parts_in_memory(owner, arrays)]
    if not found or len({(part.split is None, part.owners is None) for part in found}) > 1:
        what = "some clients have train_x and test_x, and others x" if found else "it has no arrays"
        raise DataError(f"{errors.source}: {what}; give the same arrays for every client")
    examples = _joined(found, Request(None) if request is None else request, errors, names, in_order=True)
    errors.refuse()
    return examples


def _prefixes(arrays: Iterable[str]) -> dict[str, int | None]:
    """Return the prefixes of the arrays' names, with the position of the split that each stands for, if any."""
    arrays = {name.partition(".")[0] for name in arrays}
    given: dict[str, int | None] = {f"{name}_": i for i, name in enumerate(SPLITS) if f"{name}_x" in arrays}
    return given if "x" not in arrays and {0, 2} <= {*given.values()} else {"": None}


def _parts_in_memory(owner: str | None, arrays: Mapping[str, RawInputs]) -> Iterator[_Part]:
    whose = "" if owner is None else f"client {owner}: "
    prefixes = _prefixes(arrays)
    _check_names(arrays, [f"{prefix}{name}" for prefix in prefixes for name in "xy"], whose)
    inputs = {prefix: named_arrays(arrays[f"{prefix}x"]) for prefix in prefixes}
    if any(not named for named in inputs.values()):
        raise DataError(f"{whose}x has no arrays; give an array, or arrays by name")
    if not any(each.ndim == 0 or len(each) for named in inputs.values() for each in named.values()):
        raise DataError(f"{whose}it has no examples; leave such a client out")
    for prefix, split in prefixes.items():
        y = arrays[f"{prefix}y"]
        if isinstance(y, Mapping):
            raise DataError(f"{whose}{prefix}y must be one array (got arrays by name)")
        x = {name: with_channels(each) for name, each in sorted(inputs[prefix].items())}
        yield _Part(f"{whose}{prefix}x", f"{whose}{prefix}y", x, y, split, owner)


def _check_names(arrays: Iterable[str], known: Sequence[str], whose: str) -> None:
    """Reject a missing name, and names that would be ignored."""
    names = "x and y, or train_x, train_y, test_x and test_y, and possibly validation_x and validation_y"
    if missing := [name for name in known if name not in arrays]:
        raise DataError(
            f"{whose}{', '.join(missing)} is missing from {', '.join(arrays) or 'the arrays'}; give {names}"
        )
    if foreign := [name for name in arrays if name not in known]:
        raise DataError(
            f"{whose}{', '.join(foreign)} cannot be combined with {', '.join(known)}; use the names {names}"
        )


def _kind(parts: Sequence[_Part], name: str, errors: ValidationErrors) -> TensorKind:
    """Return the kind of an input tensor inferred from its arrays.

    Integers that are not pixels stay integers if all of them are 0 or more; with negative ones they are measurements.
    """
    first, x = parts[0], parts[0].x[name]
    if x.ndim == 4 and x.dtype == np.uint8:
        if x.shape[1] > MOST_CHANNELS >= x.shape[3]:
            raise DataError(
                f"{errors.source}: {first.called(name)} has images of shape {list(x.shape[1:])}; they must be "
                "[channels, height, width], as x.transpose(0, 3, 1, 2) makes them"
            )
        return "pixels"
    arrays = [part.x[name] for part in parts]
    if all(each.dtype.kind in "iu" and int(each.min(initial=0)) >= 0 for each in arrays) and (x.ndim > 1 or name):
        return "integers"
    if (x.ndim > 1 or name) and x.dtype.kind in "iufb":
        return "features"
    raise DataError(
        f"{errors.source}: {first.called(name)} is {x.dtype} of shape {list(x.shape)}; it must be "
        "numbers, [n, features] or [n, ...] of any shape, or pixels from 0 to 255 as uint8, [n, height, width] or "
        "[n, channels, height, width]"
    )


def _joined(
    parts: Sequence[_Part],
    request: Request,
    errors: ValidationErrors,
    names: tuple[str, ...] | None = None,
    *,
    in_order: bool = False,
) -> Examples:
    """Return all parts as examples.

    ``names`` are those of the classes, or of other outputs; None: those of the experiment, or those found. ``in_order``
    is as in :func:`numbered`.
    """
    sizes = _sizes(parts, errors)
    starts = np.cumsum([0, *sizes])

    def where(i: int) -> str:
        part = int(np.searchsorted(starts, i, side="right")) - 1
        return f"{parts[part].place}[{i - starts[part]}]"

    x, specs, notes = _inputs(parts, request, names, errors)
    owners = _owners(parts, where, errors)
    split = np.repeat([-1 if part.split is None else part.split for part in parts], sizes).astype(np.int64)
    known = Examples(specs, (), unnamed(x), None, split if (split >= 0).any() else None, where, owners=owners)
    given = names if request.own is None else request.own.classes
    parts = [
        part if part.y is None else replace(part, y=without_ones(part.y, request.wanted_task, specs)) for part in parts
    ]
    ys = [part.y for part in parts if part.y is not None]
    if not ys:
        return replace(known, classes=given or (), notes=notes)
    task = _task(ys, request, specs, names)
    if task != "classification":
        own = None if request.own is None else request.own.targets
        named, outputs = (names or (), request.outputs) if own is None else (names or own.names, own.outputs)
        y, targets, of_targets = read_targets(ys, task, specs, where, errors, names=named, outputs=outputs)
        if task == "next_token":
            y, of_targets = tokens_to_predict(x, y)
        if task == "multilabel" and request.wanted_task is None:
            of_targets += notes_on_one_hot(ys, request.called("task"))
        return replace(known, y=y, targets=targets, notes=(*notes, *of_targets))
    if is_one_hot(ys):
        given = given or tuple(map(str, range(ys[0].shape[1])))
        ys = [names_of_ones(y, given, errors.source) for y in ys]
        parts = [replace(part, y=y) for part, y in zip(parts, ys, strict=True)]
    _check_labels(parts, errors)
    labels, classes = numbered(ys, given, known.kind, where, errors, in_order=in_order)
    notes += notes_of_classes(classes, "y of 0 and 1, [n, K]") if given is None else ()
    return replace(known, y=labels, classes=classes, notes=notes)


def _task(
    ys: Sequence[NDArray[Any]], request: Request, specs: Mapping[str, InputSpec], names: Sequence[str] | None
) -> TaskName:
    """Return the task of the request, or infer it from the targets and the number of names."""
    if request.wanted_task is not None:
        return request.wanted_task
    task = inferred_task(ys, specs)
    of_classes = task == "regression" and names and len(names) != math.prod(ys[0].shape[1:])
    return "classification" if of_classes else task


def _sizes(parts: Sequence[_Part], errors: ValidationErrors) -> list[int]:
    """Return the number of examples of each part; reject arrays with different names or lengths."""
    for part in parts:
        if set(part.x) != set(parts[0].x):
            raise DataError(
                f"{errors.source}: {part.name} has the inputs {listed(sorted(part.x))}, and {parts[0].name} has "
                f"{listed(sorted(parts[0].x))}; give the same names everywhere"
            )
        for name, x in part.x.items():
            if not x.ndim:
                raise DataError(f"{errors.source}: {part.called(name)} is of shape []; it must be [n, ...]")
        lengths = {part.called(name): len(x) for name, x in part.x.items()}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{name} has {size}" for name, size in lengths.items())
            raise DataError(f"{errors.source}: different numbers of examples: {sizes}; give the same number for each")
        size, y = next(iter(lengths.values())), part.y
        if y is not None and (not y.ndim or len(y) != size):
            raise DataError(
                f"{errors.source}: {part.name[:-1]}y is of shape {list(y.shape)}; it must be "
                f"[{size}], one target for each example of {part.name}"
            )
    return [len(part) for part in parts]


def _check_labels(parts: Sequence[_Part], errors: ValidationErrors) -> None:
    for part in parts:
        if part.y is not None and part.y.ndim != 1:
            raise DataError(
                f"{errors.source}: {part.name[:-1]}y is of shape {list(part.y.shape)}; it must be [{len(part)}], a "
                "class of each example. For targets of several values, set the task: "
                + "; ".join(f"{task} {shape}" for task, shape in SHAPES.items())
            )


def _inputs(
    parts: Sequence[_Part], request: Request, names: Sequence[str] | None, errors: ValidationErrors
) -> tuple[dict[str, NDArray[Any]], dict[str, InputSpec], tuple[str, ...]]:
    """Return the inputs by name, their descriptions, and notes on changes."""
    own = request.own
    needed = None if own is None else own.spec.inputs
    if needed is not None and set(needed) != set(parts[0].x):
        found, wanted = (listed(sorted(each)) or "a single input" for each in (parts[0].x, needed))
        raise DataError(f"{errors.source}: the inputs are {found}; data.own needs {wanted}")
    x, specs, notes = {}, {}, tuple[str, ...]()
    for name in sorted(parts[0].x):
        spec = None if needed is None else needed[name]
        kind = _kind(parts, name, errors) if spec is None else spec.kind
        shape = tuple(int(size) for size in parts[0].x[name].shape[1:]) if spec is None else spec.shape
        classes = len(names or ()) if own is None else len(own.classes)
        column = _column(f"x.{name}" if name else "x", shape)
        batches = Batches(kind, shape, classes, errors, column, None if spec is None else spec.high)
        for part in parts:
            _take(batches, part, name)
        x[name], of_input = batches.joined()
        specs[name] = spec_of(kind, x[name], request.channel_axis) if spec is None else spec
        notes += of_input
        if spec is None:
            notes += notes_on_axes(f"x.{name}" if name else "x", specs[name])
    return x, specs, notes


def _owners(parts: Sequence[_Part], where: Callable[[int], str], errors: ValidationErrors) -> tuple[str, ...] | None:
    owners: list[object] = []
    for part in parts:
        found = part.owners
        if found is None:
            return None
        if isinstance(found, str):
            return tuple(str(part.owners) for part in parts for _ in range(len(part)))
        if found.shape != (len(part),) or found.dtype.kind not in "iufUS":
            raise DataError(
                f"{errors.source}: the owners of {part.name} are {found.dtype} of shape {list(found.shape)}; they "
                f"must be whole numbers or names, [{len(part)}]"
            )
        owners += found.tolist()
    return owner_names(owners, where, errors)


def _given_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes in the form of labels; reject anything but a list of different names."""
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise DataError(f"classes: {classes!r:.80} is not a list; give the names of the classes, in order")
    names: list[str] = []
    for given in classes:
        try:
            name = label_text(given, (str(given).strip(),))
        except ValueError as error:
            raise DataError(f"classes: {error}; give a name for each class") from None
        if not name:
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
    labels = names_of((label for part in ys for label in part.tolist()), where, errors, classes=classes)
    if classes is not None and kinds <= set("iuf"):
        if in_order or kind == "tokens" or not are_numbers(classes):
            y, _ = positions(labels, tuple(map(str, range(len(classes)))), where, errors)
            return y, classes
        if classes != found_classes(classes):
            raise DataError(
                f"{errors.source}: the labels are integers, and so are the names of the classes, but in another order "
                f"({listed(classes)}); give the labels as text, so that they are names of classes"
            )
    return positions(labels, classes, where, errors)


def with_channels(x: NDArray[Any]) -> NDArray[Any]:
    """Return inputs with an axis for channels: gray images may lack one."""
    return x[:, None] if x.ndim == 3 and x.dtype == np.uint8 else x


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
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        declared, size = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if dtype.hasobject or min(shape, default=0) < 0 or declared != size:
            raise ValueError(f"{member.filename} declares {dtype} of shape {list(shape)}, and holds {size:,} bytes")


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{path} is not an intact safetensors file that numpy can read: {error}") from error


def _take(batches: Batches, part: _Part, name: str) -> None:
    x, shape, source, called = part.x[name], batches.shape, batches.errors.source, part.called(name)
    if x.shape[1:] != shape:
        raise DataError(f"{source}: {called} is of shape {list(x.shape)}; it must be [n, {_listed(shape)}]")
    if 0 in shape:
        raise DataError(f"{source}: {called} is of shape {list(x.shape)}, but an input needs at least one number")
    rows = max(1, VALUES // math.prod(shape))
    for start in range(0, len(x), rows):
        piece = x[start : start + rows]
        try:
            values = as_numbers(piece).reshape(len(piece), -1)
        except ValueError as error:
            raise DataError(f"{source}: {called}: {error}") from None
        batches.add(values, _place(called, start, shape), np.zeros(values.shape, dtype=np.bool_))


def _place(name: str, start: int, shape: tuple[int, ...]) -> Callable[[int, int], str]:
    return lambda i, j: f"{name}[{start + i}, {_listed(np.unravel_index(j, shape))}]"


def _column(name: str, shape: tuple[int, ...]) -> Callable[[int], str]:
    return lambda j: f"{name}[:, {_listed(np.unravel_index(j, shape))}]"


def _listed(sizes: Any) -> str:
    return ", ".join(str(int(size)) for size in sizes)
