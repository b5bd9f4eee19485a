"""Targets of examples: the task that arrays suggest, and the targets of a task as shards hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.input_spec import InputSpec
from fedloom.data.pack.examples import ValidationErrors, listed
from fedloom.data.targets import RANKS, SHAPES, Targets
from fedloom.data.values import Rounding, as_numbers
from fedloom.errors import DataError
from fedloom.tasks.names import IGNORED, TaskName
from fedloom.tasks.tokens import next_tokens

FEW_LABELS = 4
"""Targets of tokens are labels (named-entity recognition) if the vocabulary is this many times their number."""


def inferred_task(ys: Sequence[NDArray[Any]], specs: Mapping[str, InputSpec]) -> TaskName:
    """Return the task that the targets of all parts suggest, given the input tensors.

    Numbers with fractions are for regression; ``[n, K]`` of 0 and 1, K > 1, for multilabel; integers, or 0 and 1, of
    the size of an image or a volume for segmentation; integers of the shape of integer inputs for next_token;
    everything else is for classification.
    """
    kinds, shapes = {y.dtype.kind for y in ys}, {y.shape[1:] for y in ys}
    if not kinds <= set("iufb") or len(shapes) > 1:
        return "classification"
    shape = shapes.pop()
    if any(_has_fraction(y) for y in ys):
        return "regression"
    binary = all(bool(((y == 0) | (y == 1)).all()) for y in ys)
    if len(shape) == 1 and shape[0] > 1 and binary:
        return "multilabel"
    if (kinds <= set("iub") or binary) and shape in map(_plane, specs.values()):
        return "segmentation"
    sequences = [spec.shape for spec in specs.values() if spec.kind == "integers" and len(spec.shape) == 1]
    return "next_token" if kinds <= set("iu") and shape in sequences else "classification"


def without_ones(y: NDArray[Any], task: TaskName | None, specs: Mapping[str, InputSpec]) -> NDArray[Any]:
    """Return targets without an axis of length one: classes ``[n, 1]`` as ``[n]``, masks ``[n, 1, h, w]`` as masks.

    The task is None if it is inferred from the targets.
    """
    if y.ndim < 2 or y.shape[1] != 1 or y.dtype.kind not in "iufb" or task in ("multilabel", "regression"):
        return y
    if y.ndim == 2:
        return y if task in ("segmentation", "next_token") or (task is None and _has_fraction(y)) else y[:, 0]
    return y[:, 0] if any(_plane(spec) == y.shape[2:] for spec in specs.values()) else y


def one_hot_rows(y: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the rows of ``[n, K]`` that have one 1 and are 0 elsewhere, ``[n]``."""
    return np.asarray(((y == 1).sum(1) == 1) & ((y != 0).sum(1) == 1))


def is_one_hot(ys: Sequence[NDArray[Any]]) -> bool:
    """Return True if targets are rows ``[n, K]``, K > 1, of 0 with exactly one 1."""
    return all(y.ndim == 2 and y.shape[1] > 1 and y.dtype.kind in "iufb" and bool(one_hot_rows(y).all()) for y in ys)


def names_of_ones(y: NDArray[Any], classes: Sequence[str], source: str) -> NDArray[Any]:
    """Return the name of the class with the 1 of each row, ``[n, K] -> [n]``; raise DataError unless there are K."""
    if y.shape[1] != len(classes):
        raise DataError(
            f"{source}: targets have {y.shape[1]} columns, one for each class; the classes are {listed(classes)}"
        )
    return np.asarray(np.array(classes)[y.argmax(1)])


def notes_on_one_hot(ys: Sequence[NDArray[Any]], key: str) -> tuple[str, ...]:
    """Return a note if labels that may hold together never do, with the key that makes them classes."""
    if not is_one_hot(ys):
        return ()
    return (
        "every row of the targets has exactly one 1, and they are read as several labels of an example (multilabel); "
        f"if they are classes (one-hot), set {key}: classification",
    )


def read_targets(
    ys: Sequence[NDArray[Any]],
    task: TaskName,
    specs: Mapping[str, InputSpec],
    where: Callable[[int], str],
    errors: ValidationErrors,
    *,
    names: Sequence[str] = (),
    outputs: int | None = None,
) -> tuple[NDArray[Any], Targets, tuple[str, ...]]:
    """Return the targets of a task as shards hold them, ``[n, ...]``, their description, and notes.

    Raise DataError if arrays do not have the shape or type of the task's targets.

    Parameters
    ----------
    ys
        Targets of all parts.
    where
        Returns the place of the i-th example.
    names
        Names of the labels, numbers or classes; empty if they have none.
    outputs
        Minimum number of outputs of segmentation and next_token: the data may lack some.
    """
    shapes = {y.shape[1:] for y in ys}
    if len(shapes) > 1:
        raise DataError(
            f"{errors.source}: targets have the shapes {listed([str(list(s)) for s in sorted(shapes)])}; give one"
        )
    y, shape, notes = np.concatenate(ys), shapes.pop(), tuple[str, ...]()
    if len(shape) not in RANKS[task] or y.dtype.kind not in "iufb" or 0 in shape:
        raise DataError(
            f"{errors.source}: targets are {y.dtype} of shape {list(y.shape)}; task {task} needs {SHAPES[task]}"
        )
    _check_shape(task, shape, specs, errors.source)
    if task == "regression":
        numbers, notes = _numbers(y, where, errors)
        return numbers, Targets(task, shape, math.prod(shape), tuple(names)), notes
    if task == "segmentation":
        y, notes = pixel_classes(y, len(names) or outputs, errors.source)
    most, known = _most(task, y, specs, names, outputs, shape, errors.source)
    targets = Targets(task, shape, known, tuple(names))
    with np.errstate(invalid="ignore"):
        wrong = ~((y >= 0) & (y <= most) & (y == np.floor(y)))
    if targets.ignored is not None:
        wrong &= y != targets.ignored
    of_labels = names if task == "multilabel" else ()
    places = (
        f"{where(int(i[0]))}{f', {of_labels[int(i[1])]}' if of_labels else ''}: {y[tuple(i)]:g}"
        for i in np.argwhere(wrong)
    )
    also = "" if targets.ignored is None else f", or {targets.ignored} for no target"
    errors.add_many(f"target that is not a whole number from 0 to {most}{also}", int(wrong.sum()), places)
    return np.where(wrong, 0, y).astype(targets.stored), targets, notes


def pixel_classes(masks: NDArray[Any], outputs: int | None, source: str) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return masks whose pixels are classes from 0, or 255 where they have none, and notes.

    Black and white masks, which have only 0 and 255, have two classes, and 255 becomes 1. In other masks with at most
    255 classes, 255 marks pixels without a class. ``outputs`` is the number of classes; None: that of the masks, whose
    numbers must then show it.

    Raise DataError if no pixel has a class, or the number of classes must be stated.
    """
    ignored = IGNORED["segmentation"]
    marked = masks == ignored
    others = masks[~marked]
    if marked.any() and others.size and outputs in (None, 2) and not others.any():
        return np.where(marked, 1, masks), (f"masks of 0 and {ignored}: {ignored} became class 1",)
    if outputs is None and masks.size:
        _check_numbers(masks, source)
    if not marked.any() or (outputs or 0) > ignored or (others > ignored).any():
        return masks, ()
    if not others.size:
        raise DataError(
            f"{source}: every pixel of the masks is {ignored}, which marks pixels without a class; give pixels the "
            "numbers of their classes, from 0"
        )
    return masks, (
        f"{int(marked.sum()):,} pixels are {ignored}, which marks pixels without a class: they are left out",
    )


def _check_numbers(masks: NDArray[Any], source: str) -> None:
    """Reject masks whose numbers do not show how many classes there are.

    Most numbers below the greatest must be used. 255, if it is the greatest, marks pixels without a class if the others
    are consecutive from 0.
    """
    with np.errstate(invalid="ignore"):
        if not (np.isfinite(masks) & (masks >= 0) & (masks == np.floor(masks))).all():
            return  # reported with their places
    ignored, found = IGNORED["segmentation"], _distinct(masks)
    used, most, shown = len(found), found[-1], listed([f"{number}" for number in found])
    advice = "number the classes from 0 in the masks, or set outputs to the number of classes"
    if most == ignored and used > 1 and (found[-2] != used - 2 or used > ignored):
        raise DataError(
            f"{source}: the masks have the numbers {shown}, and {ignored} may be a class, or mark pixels without one.",
            hint=f"{advice} ({ignored} is a class if there are {ignored + 1} or more)",
            key="outputs",
        )
    if most != ignored and 2 * used < most + 1:
        raise DataError(
            f"{source}: the masks have only {used:,} of the numbers from 0 to {most:,} ({shown}), so that most classes "
            "would have no pixel.",
            hint=f"{advice}, {most + 1} or more",
            key="outputs",
        )


def _distinct(numbers: NDArray[Any]) -> list[int]:
    """Return the different numbers, in order; they are whole and not negative."""
    most = int(numbers.max())
    if most > np.iinfo(np.uint16).max:
        return [int(number) for number in np.unique(numbers)]
    present = np.zeros(most + 1, dtype=np.bool_)
    present[numbers.astype(np.int64)] = True
    return np.flatnonzero(present).tolist()


def tokens_to_predict(x: Mapping[str, NDArray[Any]], y: NDArray[Any]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return the target of each output, ``[n, T]``, and a note; targets that equal an input are moved by one place."""
    for name, tokens in x.items():
        moved = next_tokens(tokens, y)
        if moved is not y:
            called = f"x.{name}" if name else "x"
            return moved, (f"targets equal {called}: they were moved by one place, so that outputs predict the next",)
    return y, ()


def _has_fraction(y: NDArray[Any]) -> bool:
    finite = y[np.isfinite(y)] if y.dtype.kind == "f" else y[:0]
    return bool((finite != np.floor(finite)).any())


def _plane(spec: InputSpec) -> tuple[int, ...] | None:
    """Return height and width of an image, or depth, height and width of a volume, or None."""
    if spec.kind not in ("pixels", "features") or len(spec.shape) not in (3, 4):
        return None
    return spec.shape[1:] if spec.channel_axis == "first" else spec.shape[:-1]


def _check_shape(task: TaskName, shape: tuple[int, ...], specs: Mapping[str, InputSpec], source: str) -> None:
    """Reject masks of another size than the images, and tokens of another length than the inputs."""
    fits: list[tuple[int, ...]] = []
    if task == "segmentation":
        fits = [plane for spec in specs.values() if (plane := _plane(spec)) is not None]
    elif task == "next_token":
        fits = [spec.shape for spec in specs.values() if spec.kind == "integers" and len(spec.shape) == 1]
    else:
        return
    if shape not in fits:
        needed = (
            " or ".join(str(list(each)) for each in fits) or "that of images" * (task == "segmentation") or "integers"
        )
        raise DataError(f"{source}: targets of {task} have the shape {list(shape)}; the inputs' is {needed}")


def _most(
    task: TaskName,
    y: NDArray[Any],
    specs: Mapping[str, InputSpec],
    names: Sequence[str],
    outputs: int | None,
    shape: tuple[int, ...],
    source: str,
) -> tuple[int, int]:
    """Return the largest value of a target, and the number of outputs."""
    if task == "multilabel":
        return 1, shape[0]
    if names:
        return len(names) - 1, len(names)
    with np.errstate(invalid="ignore"):
        found = int(_classes_of(task, y).max(initial=0)) + 1 if np.isfinite(y).all() else 1
    vocabulary = max(spec.high or 1 for spec in specs.values())
    if task == "next_token" and outputs is None and FEW_LABELS * found > vocabulary:
        found = max(found, vocabulary)
    if outputs is not None and outputs < found:
        renumber = "number the classes from 0, or " if task == "segmentation" else ""
        raise DataError(
            f"{source}: outputs is {outputs}, but the data have {found}; {renumber}set it to {found} or more"
        )
    known = max(found, outputs or 1)
    return known - 1, known


def _classes_of(task: TaskName, y: NDArray[Any]) -> NDArray[Any]:
    """Return the targets that are classes or tokens; in masks, 255 is a class only if there are greater values."""
    ignored = IGNORED[task]
    return y if (y > ignored).any() else y[y != ignored]


def _numbers(
    y: NDArray[Any], where: Callable[[int], str], errors: ValidationErrors
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return numbers as 32-bit floats, and a note if they are rounded visibly."""
    try:
        values = as_numbers(y).reshape(len(y), -1)
    except ValueError as error:
        raise DataError(f"{errors.source}: targets: {error}") from None
    with np.errstate(over="ignore", invalid="ignore"):
        kept = values.astype(np.float32)
    wrong = ~np.isfinite(kept)
    places = (f"{where(int(i))}: {values[i, j]:g}" for i, j in np.argwhere(wrong))
    errors.add_many("target that is not a finite 32-bit number", int(wrong.sum()), places)
    rounding = Rounding(values.shape[1])
    rounding.add(values, kept)
    lost = [f"target {j}" for j in rounding.lost()]
    errors.add_many("targets that 32-bit floats cannot distinguish (subtract an offset first)", len(lost), lost)
    noted = [f"target {j}" for j in rounding.noted()]
    notes = (f"rounded to the precision of 32-bit floats: {listed(noted)}",) if noted else ()
    return kept.reshape(y.shape), notes
