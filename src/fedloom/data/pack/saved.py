"""Data sets that the package ``datasets`` has saved (``save_to_disk``), one table or several splits.

A column of images makes pixels, columns of equally long lists make named inputs, a column of text becomes the tokens of
a tokenizer, and other columns are those of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.words import first_of
from fedloom.data.manifest import SPLITS
from fedloom.data.pack.arrays import array_columns
from fedloom.data.pack.examples import SPLIT_NAMES, Columns, OnProgress, Request, ValidationErrors
from fedloom.data.pack.items import read_items
from fedloom.data.pack.tables import read_frame
from fedloom.data.pack.texts import IDS, tokenize
from fedloom.data.spec import INPUT_NAME, InputSpec, RawInputs
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame

SPLIT = "fedloom split"
"""Column with the split of each row."""


def read_saved(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read a folder that ``datasets`` has saved.

    Raise ExperimentError if ``datasets`` is not installed; DataError if the folder is not such a data set, or it lacks
    labels, or examples for training.
    """
    on_progress("reading the data set", 0, None)
    parts, notes = _splits(path)
    features = next(iter(parts.values())).features
    images = [name for name, kind in features.items() if type(kind).__name__ == "Image"]
    frames = {} if images else {split: part.to_pandas() for split, part in parts.items()}
    lists = [name for name in features if frames and _has_lists(next(iter(frames.values()))[name])]
    if ((images or lists) and request.label not in features) or len(images) > 1:
        raise DataError(
            f"{path}: it has the columns {first_of(list(features))}; one column of labels ({request.called('label')}) "
            "and at most one of images are needed; images with masks are read from a folder of both, or from arrays"
        )
    if images:
        columns = _of_images(parts, images[0], request, errors)
    elif lists:
        columns = _of_lists(frames, lists, request, errors)
    elif None in frames:
        columns = read_frame(frames[None], request, errors)
    else:
        import pandas

        tables = [frame.assign(**{SPLIT: SPLITS[split or 0]}) for split, frame in frames.items()]
        columns = read_frame(pandas.concat(tables, ignore_index=True), replace(request, split=SPLIT), errors)
    classes = None if request.targets else _class_names(features.get(request.label))
    return replace(columns, classes=classes, notes=(*columns.notes, *notes))


def _splits(path: Path) -> tuple[dict[int | None, Any], list[str]]:
    """Return the tables of a folder by the positions of their splits (None: a single table), and notes.

    Splits with other names are left out. Without a split for testing, that for validation is used.
    """
    try:
        import datasets
    except ImportError:
        raise ExperimentError(
            f"reading {path} needs the package datasets, which is not installed",
            hint="pip install 'fedloom[huggingface]'",
        ) from None
    try:
        whole = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} is not a data set that datasets has saved: {reason}") from error
    if not isinstance(whole, Mapping):
        return {None: whole}, []
    names = [name for name in whole if name.lower() in SPLIT_NAMES]
    parts: dict[int | None, Any] = {SPLIT_NAMES[name.lower()]: whole[name] for name in names}
    if 0 not in parts or len(parts) < len(names):
        raise DataError(
            f"{path}: the splits are {first_of(list(whole))}; give train, validation (or val) and test, each once"
        )
    left_out = [name for name in whole if name not in names]
    notes = [f"splits left out: {first_of(left_out)}"] * bool(left_out)
    if len(parts) == 1:
        return {None: parts[0]}, notes
    if 2 not in parts:
        parts[2] = parts.pop(1)
        notes.append("no split is for testing: that for validation is used for it")
    return parts, notes


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of the classes of a column, or of lists in it, in the order of the labels; None if unnamed."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    names = getattr(feature, "names", None)
    return None if names is None else tuple(names)


def _has_lists(column: Any) -> bool:
    return bool(column.map(lambda cell: isinstance(cell, list | np.ndarray)).all())


def _of_images(parts: Mapping[int | None, Any], image: str, request: Request, errors: ValidationErrors) -> Columns:
    arrays: dict[str, RawInputs] = {}
    owners: list[str] = []
    for split, part in parts.items():
        prefix = "" if split is None else f"{SPLITS[split]}_"
        items = [(row[image], row[request.label]) for row in part]
        arrays[f"{prefix}x"], arrays[f"{prefix}y"], _ = read_items(items, f"{errors.source} {prefix}".rstrip(" _"))
        owners += [] if request.client is None else map(str, part[request.client])
    columns = array_columns([(None, arrays)], None, request, errors)
    return replace(columns, owners=None if request.client is None else owners)


def _of_lists(
    frames: Mapping[int | None, DataFrame], lists: Sequence[str], request: Request, errors: ValidationErrors
) -> Columns:
    """Return columns of lists, and the tokens of a text, as inputs; the column of labels may be a list, too."""
    arrays: dict[str, RawInputs] = {}
    owners: list[str] = []
    specs: dict[str, InputSpec] = {}
    text = request.text
    for split, frame in frames.items():
        prefix = "" if split is None else f"{SPLITS[split]}_"
        inputs = {name: _stacked_columns(frame, name, errors.source) for name in lists if name != request.label}
        if text is not None:
            if text.column not in frame.columns:
                raise DataError(f"{errors.source}: there is no column {text.column!r}; it has {first_of([*frame])}")
            cells = frame[text.column].astype(object).where(frame[text.column].notna(), None).tolist()
            tokens, specs = tokenize(cells, text, lambda i: f"row {i + 1}, column {text.column}", errors)
            inputs |= {name or IDS: each for name, each in tokens.items()}
        if wrong := [name for name in inputs if not INPUT_NAME.fullmatch(name)]:
            raise DataError(f"{errors.source}: column {wrong[0]!r} cannot name an input; use letters and digits")
        is_list = request.label in lists
        labels = _stacked_columns(frame, request.label, errors.source) if is_list else np.asarray(frame[request.label])
        arrays |= {f"{prefix}x": next(iter(inputs.values())) if len(inputs) == 1 else inputs, f"{prefix}y": labels}
        owners += [] if request.client is None else map(str, frame[request.client])
    errors.refuse()
    columns = array_columns([(None, arrays)], None, request, errors)
    of_text = {(name or IDS if "" not in columns.specs else name): spec for name, spec in specs.items()}
    return replace(columns, specs={**columns.specs, **of_text}, owners=None if request.client is None else owners)


def _stacked_columns(frame: DataFrame, name: str, source: str) -> NDArray[Any]:
    try:
        return np.stack([np.asarray(value) for value in frame[name]])
    except ValueError as error:
        raise DataError(f"{source}: column {name}: lists must be of one length ({error}); pad them first") from error
