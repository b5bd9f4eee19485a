"""Data sets in the formats of other libraries: MedMNIST's npz files, and folders saved by ``datasets``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.input_spec import INPUT_NAME, RawInputs
from fedloom.data.manifest import SPLITS
from fedloom.data.pack.arrays import examples_of, read_npz
from fedloom.data.pack.columns import read_frame
from fedloom.data.pack.examples import Examples, OnProgress, Request, ValidationErrors, listed
from fedloom.data.pack.items import read_items
from fedloom.data.pack.saved import class_names, saved_splits
from fedloom.data.pack.tokens import IDS, TokenizedTexts, tokenized
from fedloom.data.text_column import TextColumn
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame

MEDMNIST = {"train": "train", "val": "validation", "test": "test"}
"""Prefixes of MedMNIST's arrays, and their splits."""


def read_medmnist(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read an npz file of MedMNIST (https://medmnist.com): images or volumes, with one class or several labels.

    Raise DataError if it has other arrays; ExperimentError if the request names owners, which such files lack.
    """
    if request.client is not None:
        key = "data.source.client"
        raise ExperimentError(f"{key}: MedMNIST's files have no owners; leave it out", key=key)
    on_progress("reading arrays", 0, None)
    arrays = read_npz(path)
    needed = [f"{prefix}_{what}" for prefix in MEDMNIST for what in ("images", "labels")]
    if missing := [name for name in needed if name not in arrays]:
        raise DataError(f"{path} has no {', '.join(missing)}, as MedMNIST's files have")
    given: dict[str, RawInputs] = {}
    for prefix, split in MEDMNIST.items():
        given[f"{split}_x"] = _images(arrays[f"{prefix}_images"])
        labels = arrays[f"{prefix}_labels"]
        given[f"{split}_y"] = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return examples_of([(None, given)], None, request)


def _images(images: NDArray[Any]) -> NDArray[Any]:
    """Return images ``[n, channels, height, width]``, or volumes ``[n, 1, depth, height, width]`` of 0 ... 1."""
    if images.ndim == 4 and images.shape[3] == 3 and images.shape[1] != 3:
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    if images.ndim == 4:
        return (images[:, None] / np.float32(255)).astype(np.float32)
    return images


def read_saved(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Examples:
    """Read a folder that ``datasets`` has saved (``save_to_disk``) or keeps in its cache, one table or several splits.

    The columns are those of a table; a column of images makes pixels, columns of equally long lists make named inputs,
    and a column of text (``text``) becomes the tokens of a tokenizer.

    Raise ExperimentError if ``datasets`` is not installed; DataError if the folder is not such a data set.
    """
    on_progress("reading the data set", 0, None)
    parts, splits, notes = saved_splits(path, request.targets or (request.label,))
    columns = next(iter(parts.values())).features
    request = replace(request, classes=class_names(columns.get(request.label)))
    if images := [name for name, kind in columns.items() if type(kind).__name__ == "Image"]:
        examples = _of_images(parts, splits, images, request, str(path))
    else:
        frames = [part.to_pandas() for part in parts.values()]
        lists = [
            name for name in columns if frames[0][name].map(lambda cell: isinstance(cell, list | np.ndarray)).all()
        ]
        if lists:
            examples = _of_lists(frames, splits, lists, request, errors)
        else:
            examples = _of_frames(frames, splits, request, errors)
    return replace(examples, notes=(*examples.notes, *notes))


def _of_images(
    parts: Mapping[str, Any], splits: Sequence[int | None], images: Sequence[str], request: Request, where: str
) -> Examples:
    columns = next(iter(parts.values())).column_names
    if len(images) > 1 or request.label not in columns:
        raise DataError(
            f"{where}: it has the columns {listed(columns)}; a column of images and one of labels "
            f"({request.called('label')}) are needed; images with masks are read from a folder of both, or from arrays"
        )
    given: dict[str, RawInputs] = {}
    owners: list[str] = []
    for (name, part), split in zip(parts.items(), splits, strict=True):
        items = [(row[images[0]], row[request.label]) for row in part]
        prefix = "" if split is None else f"{SPLITS[split]}_"
        given[f"{prefix}x"], given[f"{prefix}y"], _ = read_items(items, f"{where} {name}".strip())
        if request.client is not None:
            owners += [str(each) for each in part[request.client]]
    examples = examples_of([(None, given)], request.classes, request)
    return examples if request.client is None else replace(examples, owners=tuple(owners))


def _of_frames(
    frames: Sequence[DataFrame], splits: Sequence[int | None], request: Request, errors: ValidationErrors
) -> Examples:
    import pandas

    if splits == [None]:
        return read_frame(frames[0], request, errors)
    named = [frame.assign(**{_SPLIT: SPLITS[split or 0]}) for frame, split in zip(frames, splits, strict=True)]
    return read_frame(pandas.concat(named, ignore_index=True), replace(request, split=_SPLIT), errors)


_SPLIT = "fedloom split"
"""Column with the split of each row."""


def _of_lists(
    frames: Sequence[DataFrame],
    splits: Sequence[int | None],
    lists: Sequence[str],
    request: Request,
    errors: ValidationErrors,
) -> Examples:
    """Return columns of lists, or the tokens of a text, as inputs; the column of labels may be a list, too."""
    if request.label not in frames[0].columns:
        raise DataError(
            f"{errors.source}: there is no column {request.label!r} ({request.called('label')}); the columns are "
            f"{listed(list(frames[0].columns))}"
        )
    given: dict[str, RawInputs] = {}
    owners: list[str] = []
    tokens = TokenizedTexts({}, {})
    for frame, split in zip(frames, splits, strict=True):
        prefix = "" if split is None else f"{SPLITS[split]}_"
        if request.text is not None:
            tokens = _tokens(frame, request.text, errors)
        inputs = _inputs(frame, [name for name in lists if name != request.label], tokens, errors.source)
        labels = _stacked(frame, request.label, errors.source) if request.label in lists else frame[request.label]
        given[f"{prefix}x"] = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        given[f"{prefix}y"] = np.asarray(labels)
        owners += [] if request.client is None else [str(each) for each in frame[request.client]]
    errors.refuse()
    examples = examples_of([(None, given)], request.classes, request)
    of_text = {(name or IDS if "" not in examples.specs else name): spec for name, spec in tokens.specs.items()}
    examples = replace(examples, specs={**examples.specs, **of_text})
    return examples if request.client is None else replace(examples, owners=tuple(owners))


def _inputs(frame: DataFrame, lists: Sequence[str], tokens: TokenizedTexts, source: str) -> dict[str, NDArray[Any]]:
    """Return columns of lists, and the tokens of a text, as inputs by name."""
    inputs = {name: _stacked(frame, name, source) for name in lists}
    inputs |= {name or IDS: each for name, each in tokens.x.items()}
    if wrong := [name for name in inputs if not INPUT_NAME.fullmatch(name)]:
        raise DataError(f"{source}: column {wrong[0]!r} cannot name an input; use letters and digits")
    return inputs


def _tokens(frame: DataFrame, text: TextColumn, errors: ValidationErrors) -> TokenizedTexts:
    if text.column not in frame.columns:
        raise DataError(f"{errors.source}: there is no column {text.column!r}; the columns are {listed([*frame])}")
    values = frame[text.column]
    cells = values.astype(object).where(values.notna(), None).tolist()
    return tokenized(cells, text, lambda i: f"row {i + 1}, column {text.column}", errors)


def _stacked(frame: DataFrame, name: str, source: str) -> NDArray[Any]:
    try:
        return np.stack([np.asarray(value) for value in frame[name]])
    except ValueError as error:
        raise DataError(f"{source}: column {name}: lists must be of one length ({error}); pad them first") from error
