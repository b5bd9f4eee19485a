"""Conversion of the columns of any reader into examples: inputs by their kind, and targets by their task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import first_of
from fedloom.data.pack.examples import Columns, Examples, Request, ValidationErrors, described_shape
from fedloom.data.pack.labels import label_positions, notes_of_classes
from fedloom.data.spec import DTYPES, DataSpec, InputSpec, SpecError, Targets, TensorKind, unnamed
from fedloom.data.values import EXACT, Rounding, as_numbers, found_classes
from fedloom.errors import DataError
from fedloom.tasks.names import IGNORED_PIXEL, KINDS, TaskName, next_tokens

VALUES = 2**22
"""Number of values converted at once, unless one example has more."""

FEW_LABELS = 4
"""Targets of tokens are labels (named-entity recognition) if the vocabulary is this many times their number."""


def examples_of(columns: Columns, request: Request, errors: ValidationErrors) -> Examples:
    """Return the columns of a reader as examples, in the types of shards; record values that these cannot hold.

    Raise DataError if inputs or targets do not have the form that the task needs.
    """
    x, specs, notes = _inputs(columns, request, errors)
    y, targets, classes, of_targets = _targets(columns, x, specs, request, errors)
    try:
        spec = DataSpec(specs, classes, targets)
    except SpecError as error:
        errors.refuse()
        raise DataError(f"{errors.source}: {error}") from error
    examples = Examples(
        spec=spec,
        x=unnamed(x),
        y=y,
        place=columns.places.row,
        split=columns.split,
        owners=None if columns.owners is None else tuple(columns.owners),
        features=columns.features,
        overlap=columns.overlap,
        notes=(*columns.notes, *notes, *of_targets),
    )
    return _grouped_by_owner(examples) if columns.by_owner and examples.owners else examples


def _grouped_by_owner(examples: Examples) -> Examples:
    assert examples.owners is not None
    rank = {name: i for i, name in enumerate(found_classes(examples.owners))}
    order = np.argsort([rank[owner] for owner in examples.owners], kind="stable")
    return replace(
        examples,
        x=examples.chosen(order),
        y=None if examples.y is None else examples.y[order],
        split=None if examples.split is None else examples.split[order],
        place=lambda i: examples.place(int(order[i])),
        owners=tuple(examples.owners[i] for i in order),
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def _inputs(
    columns: Columns, request: Request, errors: ValidationErrors
) -> tuple[dict[str, NDArray[Any]], dict[str, InputSpec], tuple[str, ...]]:
    """Return the inputs by name in the types of their kinds, their descriptions, and notes on changes."""
    x, specs, notes = dict[str, NDArray[Any]](), dict[str, InputSpec](), tuple[str, ...]()
    places = columns.places
    for name, spec in columns.specs.items():
        high = len(_given_classes(columns, request) or ()) if spec.kind == "tokens" else spec.high
        naming = partial(places.cell, name), partial(places.column, name)
        spread = (
            np.broadcast_to(np.reshape(spec.normalization.std, spec.broadcast), (1, *spec.shape)).reshape(-1)
            if spec.normalization.std
            else None
        )
        x[name], of_input = _packed_numbers(columns.x[name], spec.kind, *naming, errors, high=high, spread=spread)
        notes += of_input if spec.tokenizer is None else ()  # ids of tokens are no numbers
        unbounded = spec.kind == "integers" and spec.high is None
        specs[name] = replace(spec, high=int(x[name].max(initial=0)) + 1) if unbounded else spec
    return x, specs, notes


def _given_classes(columns: Columns, request: Request) -> tuple[str, ...] | None:
    return columns.classes if request.needs is None else request.needs.class_names


def _packed_numbers(
    x: NDArray[Any],
    kind: TensorKind,
    cell: Callable[[int, int], str],
    column: Callable[[int], str],
    errors: ValidationErrors,
    *,
    high: int | None = None,
    spread: NDArray[np.float64] | None = None,
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return numbers ``[n, ...]`` in the type of a kind, and notes; record those that the type cannot hold.

    Parameters
    ----------
    cell
        Returns the place of the j-th number of the i-th example.
    column
        Returns the name of the j-th number of every example.
    high
        Exclusive upper bound of integers and tokens, if it is known.
    spread
        ``[numbers]``: standard deviations that rounding is compared with; None: the range of the numbers.
    """
    if kind == "pixels" and x.dtype == np.uint8:
        return np.ascontiguousarray(x), ()
    numbers = math.prod(x.shape[1:])
    packed = np.zeros((len(x), numbers), dtype=DTYPES[kind])
    rounding, rows = Rounding(numbers), max(1, VALUES // numbers)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        try:
            values = as_numbers(x[part]).reshape(-1, numbers)
        except ValueError as error:
            raise DataError(f"{errors.source}: numbers from {cell(start, 0)} on: {error}") from None
        if kind == "features":
            finite = np.isfinite(values)
            with np.errstate(over="ignore", invalid="ignore"):
                packed[part] = values
            large = finite & ~np.isfinite(packed[part])
            faults = {"not a finite number": ~finite, "too large for a 32-bit float": large}
            rounding.add(values, packed[part])
        else:
            top = 255 if kind == "pixels" else EXACT if high is None else high - 1
            wrong = _not_whole(values, top)
            packed[part] = np.where(wrong, 0, values)
            faults = {f"not an integer from 0 to {top}": wrong}
            if kind == "integers":
                rounding.add(values, values.astype(np.float32))  # a model may get them as 32-bit floats
        for fault, wrong in faults.items():
            places = zip(*np.nonzero(wrong), strict=True)
            errors.add_many(
                fault, int(wrong.sum()), (f"{cell(start + int(i), int(j))}: {values[i, j]:g}" for i, j in places)
            )
    precision_loss = rounding.imprecise_columns(spread)
    errors.add_many(
        "values that 32-bit floats cannot distinguish (subtract an offset first, or leave the column out)",
        len(precision_loss),
        map(column, precision_loss),
    )
    notes = []
    if rounded := rounding.rounded_columns():
        notes.append(f"rounded to the precision of 32-bit floats: {first_of(list(map(column, rounded)))}")
    if counting := rounding.counting_columns():
        notes.append(
            f"another whole number in each row, in order: {first_of(list(map(column, counting)))}; if it is an id or "
            "numbers the rows, leave it out: it tells nothing of new examples"
        )
    return packed.reshape(x.shape), tuple(notes)


def _not_whole(values: NDArray[Any], top: int, ignored_value: int | None = None) -> NDArray[np.bool_]:
    """Return the values that are neither an integer from 0 to ``top`` nor the ignored one."""
    with np.errstate(invalid="ignore"):
        return np.asarray(~((values >= 0) & (values <= top) & (values == np.floor(values)) | (values == ignored_value)))


# --- targets ----------------------------------------------------------------------------------------------------------


def _targets(
    columns: Columns,
    x: Mapping[str, NDArray[Any]],
    specs: Mapping[str, InputSpec],
    request: Request,
    errors: ValidationErrors,
) -> tuple[NDArray[Any] | None, Targets | None, tuple[str, ...], tuple[str, ...]]:
    """Return the targets as shards hold them, their description unless they are classes, the classes, and notes.

    Raise DataError if they do not have the shape or type that their task needs.
    """
    class_list = _given_classes(columns, request)
    if columns.y is None:
        return None, None, class_list or (), ()
    y = _without_ones(columns.y, request.wanted_task, specs)
    task = request.wanted_task or _inferred_task(y, specs, columns)
    if KINDS[task].is_class:
        labels, classes, notes = _classes(y, class_list, columns, request, errors)
        return labels, None, classes, notes
    required = None if request.needs is None else request.needs.targets
    names, outputs = columns.outputs or columns.classes or (), request.outputs
    if required is not None:
        names, outputs = required.names, required.outputs
    packed, targets, notes = _of_task(y, task, specs, columns, errors, names=names, outputs=outputs)
    if targets.kind.like == "sequence":
        packed, shift_notes = tokens_to_predict(x, packed)
        notes += shift_notes
    if targets.kind.is_binary and request.wanted_task is None and one_hot(y):
        notes += (
            "every row of the targets has exactly one 1, and they are read as several labels of an example "
            f"(multilabel); if they are classes (one-hot), set {request.called('task')}: classification",
        )
    return packed, targets, (), notes


def _inferred_task(y: NDArray[Any], specs: Mapping[str, InputSpec], columns: Columns) -> TaskName:
    """Return the task that targets suggest, given the input tensors.

    Numbers with fractions are for regression; ``[n, K]`` of 0 and 1, K > 1, for multilabel; integers, or 0 and 1, of
    the size of an image or a volume for segmentation; integers of the shape of integer inputs for next_token;
    everything else is for classification, except numbers in columns of targets.
    """
    shape, kind = y.shape[1:], y.dtype.kind
    if kind not in "iufb":
        return "classification"
    if has_fraction(y):
        of_classes = columns.classes and len(columns.classes) != math.prod(shape)
        return "classification" if of_classes else "regression"
    binary = bool(((y == 0) | (y == 1)).all())
    if len(shape) == 1 and shape[0] > 1 and binary:
        return "multilabel"
    if (kind in "iub" or binary) and shape in map(_plane, specs.values()):
        return "segmentation"
    if kind in "iu" and shape in _sequences(specs):
        return "next_token"
    return "regression" if columns.outputs else "classification"


def _classes(
    y: NDArray[Any],
    class_list: tuple[str, ...] | None,
    columns: Columns,
    request: Request,
    errors: ValidationErrors,
) -> tuple[NDArray[Any], tuple[str, ...], tuple[str, ...]]:
    """Return the position of each example's class, ``[n]``, the classes, and notes; ``[n, K]`` may have one 1 each."""
    place = columns.places.target
    if y.ndim > 1:
        numeric = y.ndim == 2 and y.dtype.kind in "iufb"
        wrong = np.flatnonzero(~_one_hot_rows(y)) if numeric else np.arange(len(y))
        shapes = "; ".join(f"{name} {each.shapes}" for name, each in KINDS.items() if each.shapes)
        errors.add_many(
            f"targets of shape {described_shape(y)}: not one class (label) or exactly one 1 among 0 for each, as "
            f"task classification needs; for others, set the task: {shapes}",
            len(wrong),
            map(place, wrong.tolist()),
        )
        errors.refuse()
        classes = class_list or columns.outputs or tuple(map(str, range(y.shape[1])))
        if len(classes) != y.shape[1]:
            raise DataError(
                f"{errors.source}: targets have {y.shape[1]} columns, one for each class; the classes are "
                f"{first_of(classes)}"
            )
        return y.argmax(1), classes, ()
    in_order = columns.classes is not None or any(spec.kind == "tokens" for spec in columns.specs.values())
    labels, classes = label_positions(
        y, class_list, place, errors, in_order=in_order, is_name=columns.label_is_name and columns.classes is None
    )
    several = f"0 and 1 for each (y [n, K], or columns that {request.called('targets')} names)"
    return labels, classes, () if class_list is not None else notes_of_classes(classes, several)


def _of_task(
    y: NDArray[Any],
    task: TaskName,
    specs: Mapping[str, InputSpec],
    columns: Columns,
    errors: ValidationErrors,
    *,
    names: Sequence[str],
    outputs: int | None,
) -> tuple[NDArray[Any], Targets, tuple[str, ...]]:
    """Return the targets of a task other than classification, their description, and notes.

    Parameters
    ----------
    names
        Names of the labels, numbers or classes; empty if they have none.
    outputs
        Minimum number of outputs of segmentation and next_token: the data may lack some.
    """
    place, shape, notes, kind = columns.places.target, y.shape[1:], tuple[str, ...](), KINDS[task]
    fits = [shape]
    if kind.like is not None:
        planes = [plane for spec in specs.values() if (plane := _plane(spec)) is not None]
        fits = planes if kind.like == "plane" else _sequences(specs)
    if len(shape) not in kind.ranks or y.dtype.kind not in "iufb" or 0 in shape or shape not in fits:
        of_inputs = f", of the inputs' shape {' or '.join(str(list(each)) for each in fits)}" if kind.like else ""
        raise DataError(
            f"{errors.source}: targets are {y.dtype} of shape {described_shape(y)}; task {task} needs {kind.shapes}"
            f"{of_inputs}"
        )
    if kind.is_number:
        packed, notes = _packed_numbers(
            y.reshape(*y.shape, *[1] * (y.ndim == 1)),
            "features",
            lambda i, j: f"{place(i)}, target {j}",
            lambda j: f"target {j}",
            errors,
        )
        return packed.reshape(y.shape), Targets(task, shape, math.prod(shape), tuple(names)), notes
    if kind.like == "plane":
        y, notes = pixel_classes(y, len(names) or outputs, errors.source)
    label_count = shape[0] if kind.is_binary else len(names) or _outputs(task, y, specs, outputs, errors.source)
    targets = Targets(task, shape, label_count, tuple(names))
    top = 1 if kind.is_binary else label_count - 1
    wrong = _not_whole(y, top, targets.ignored)
    also = "" if targets.ignored is None else f", or {targets.ignored} for no target"
    labels = names if kind.is_binary else ()
    places = (
        f"{place(int(i[0]))}{f', {labels[int(i[1])]}' if labels else ''}: {y[tuple(i)]:g}" for i in np.argwhere(wrong)
    )
    errors.add_many(f"target that is not a whole number from 0 to {top}{also}", int(wrong.sum()), places)
    return np.where(wrong, 0, y).astype(targets.stored), targets, notes


def _outputs(task: TaskName, y: NDArray[Any], specs: Mapping[str, InputSpec], outputs: int | None, source: str) -> int:
    """Return the number of classes of a pixel, or of tokens; in masks, 255 is a class only among greater numbers."""
    ignored_value = KINDS[task].ignored or 0
    values = y if (y > ignored_value).any() else y[y != ignored_value]
    count = int(values.max(initial=0)) + 1 if np.isfinite(y).all() else 1
    vocabulary = max(spec.high or 1 for spec in specs.values())
    if KINDS[task].like == "sequence" and outputs is None and FEW_LABELS * count > vocabulary:
        count = max(count, vocabulary)
    if outputs is not None and outputs < count:
        raise DataError(
            f"{source}: outputs is {outputs}, but the data have {count}; number the classes from 0, or set it to "
            f"{count} or more"
        )
    return max(count, outputs or 1)


def pixel_classes(masks: NDArray[Any], outputs: int | None, source: str) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return masks whose pixels are classes from 0, or 255 where they have none, and notes.

    Black and white masks, which have only 0 and 255, have two classes, and 255 becomes 1. In other masks with at most
    255 classes, 255 marks pixels without a class. ``outputs`` is the number of classes; None: that of the masks, whose
    numbers must then show it.

    Raise DataError if no pixel has a class, or the number of classes must be stated.
    """
    ignored_value = IGNORED_PIXEL
    is_ignored = masks == ignored_value
    others = masks[~is_ignored]
    if is_ignored.any() and others.size and outputs in (None, 2) and not others.any():
        return np.where(is_ignored, 1, masks), (f"masks of 0 and {ignored_value}: {ignored_value} became class 1",)
    if outputs is None and masks.size and not _not_whole(masks, EXACT).any():
        _check_numbers(masks, source)
    if not is_ignored.any() or (outputs or 0) > ignored_value or (others > ignored_value).any():
        return masks, ()
    if not others.size:
        raise DataError(
            f"{source}: every pixel of the masks is {ignored_value}, which marks pixels without a class; give pixels "
            "the numbers of their classes, from 0"
        )
    return masks, (
        f"{int(is_ignored.sum()):,} pixels are {ignored_value}, which marks pixels without a class: they are left out",
    )


def _check_numbers(masks: NDArray[Any], source: str) -> None:
    """Reject masks whose numbers do not show how many classes there are.

    Most numbers below the greatest must be used. 255, if it is the greatest, marks pixels without a class if the others
    are consecutive from 0.
    """
    small = masks.max() <= np.iinfo(np.uint16).max  # np.unique sorts all pixels
    values = np.flatnonzero(np.bincount(masks.reshape(-1).astype(np.int64))) if small else np.unique(masks)
    ignored_value, numbers = IGNORED_PIXEL, [int(number) for number in values]
    count, most = len(numbers), numbers[-1]
    if most == ignored_value and count > 1 and (numbers[-2] != count - 2 or count > ignored_value):
        fault = (
            f"{ignored_value} may be a class, or mark pixels without one ({ignored_value} is a class if there are more)"
        )
    elif most != ignored_value and 2 * count < most + 1:
        fault = f"most of the classes from 0 to {most:,} would have no pixel"
    else:
        return
    raise DataError(
        f"{source}: the masks have the {count:,} numbers {first_of([f'{number}' for number in numbers])}, and {fault}.",
        hint=f"number the classes from 0 in the masks, or set outputs to the number of classes ({most + 1} or more)",
        key="outputs",
    )


def tokens_to_predict(x: Mapping[str, NDArray[Any]], y: NDArray[Any]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the target of each output, ``[n, T]``, and a note; targets that equal an input are moved by one place."""
    for name, tokens in x.items():
        shifted = next_tokens(tokens, y)
        if shifted is not y:
            label = f"x.{name}" if name else "x"
            return shifted, (f"targets equal {label}: they were moved by one place, so that outputs predict the next",)
    return y, ()


def has_fraction(y: NDArray[Any]) -> bool:
    """Return True if a finite number is not whole."""
    finite = y[np.isfinite(y)] if y.dtype.kind == "f" else y[:0]
    return bool((finite != np.floor(finite)).any())


def one_hot(y: NDArray[Any]) -> bool:
    """Return True if targets are rows ``[n, K]``, K > 1, of 0 with exactly one 1."""
    return y.ndim == 2 and y.shape[1] > 1 and bool(_one_hot_rows(y).all())


def _one_hot_rows(y: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray(((y == 1).sum(1) == 1) & ((y != 0).sum(1) == 1))


def _without_ones(y: NDArray[Any], task: TaskName | None, specs: Mapping[str, InputSpec]) -> NDArray[Any]:
    """Return targets without an axis of length one: classes ``[n, 1]`` as ``[n]``, masks ``[n, 1, h, w]`` as masks.

    The task is None if it is inferred from the targets.
    """
    if y.ndim < 2 or y.shape[1] != 1 or y.dtype.kind not in "iufb":
        return y
    kind = None if task is None else KINDS[task]
    if kind is not None and not kind.is_class and kind.like is None:
        return y
    if y.ndim == 2:
        return y if (kind is not None and kind.like) or (task is None and has_fraction(y)) else y[:, 0]
    return y[:, 0] if any(_plane(spec) == y.shape[2:] for spec in specs.values()) else y


def _plane(spec: InputSpec) -> tuple[int, ...] | None:
    """Return height and width of an image, or depth, height and width of a volume, or None."""
    if spec.kind not in ("pixels", "features") or len(spec.shape) not in (3, 4):
        return None
    return spec.shape[1:] if spec.channel_axis == "first" else spec.shape[:-1]


def _sequences(specs: Mapping[str, InputSpec]) -> list[tuple[int, ...]]:
    """Return the shapes of inputs that are sequences of tokens."""
    return [spec.shape for spec in specs.values() if spec.kind == "integers" and len(spec.shape) == 1]
