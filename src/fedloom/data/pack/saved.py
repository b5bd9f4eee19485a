"""Data sets of the package ``datasets``: saved folders, and its local cache, from which one is read by name.

One table or several splits: a column of images makes pixels, columns of equally long lists make named inputs, a column
of text becomes the tokens of a tokenizer, and other columns are those of a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.home import expanded
from fedloom.data.input_spec import INPUT_NAME, InputSpec, RawInputs
from fedloom.data.manifest import SPLITS
from fedloom.data.pack.arrays import array_columns
from fedloom.data.pack.examples import SPLIT_NAMES, Columns, OnProgress, Request, ValidationErrors, listed
from fedloom.data.pack.items import read_items
from fedloom.data.pack.tables import read_frame
from fedloom.data.pack.texts import IDS, tokenized
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    from pandas import DataFrame

SPLIT = "fedloom split"
"""Column with the split of each row."""

INFO = "dataset_info.json"
"""File that describes a data set in the cache."""

NAME = re.compile(r"([\w.-]+/)?[\w.-]+")
"""Pattern of the names of data sets: OWNER/NAME, or NAME."""


def cached(name: str, subset: str | None = None) -> Path:
    """Return the folder of a data set in the local cache of ``datasets`` (``HF_DATASETS_CACHE``), the newest version.

    Nothing is downloaded. ``name`` is OWNER/NAME, or NAME; ``subset`` is a configuration, None for the only one.

    Raise ExperimentError if ``datasets`` is not installed, the cache lacks the data set or the subset, or there are
    several subsets and none is named.
    """
    key = "data.source.path"
    if not NAME.fullmatch(name):
        hint = "give OWNER/NAME of a data set in the cache, or a folder saved by datasets (save_to_disk)"
        raise ExperimentError(f"{key}: {name} does not exist", hint=hint, key=key, found=name)
    datasets = _library(name)
    cache = expanded(datasets.config.HF_DATASETS_CACHE, "HF_DATASETS_CACHE")
    *owner, own_name = name.split("/")
    home = cache / "___".join([*owner, datasets.naming.camelcase_to_snakecase(own_name)])
    found: dict[str, list[Path]] = {}
    for info in home.glob(f"*/*/*/{INFO}"):
        found.setdefault(info.parents[2].name, []).append(info.parent)
    if not found:
        raise ExperimentError(
            f"{key}: {name} is neither a folder nor in the cache of datasets, {cache}, and nothing is downloaded.",
            hint=f"run datasets.load_dataset({name!r}) once where there is a connection, or give a saved folder",
            key=key,
            found=name,
        )
    if (subset is None and len(found) > 1) or (subset is not None and subset not in found):
        key, names = "data.source.subset", sorted(found)
        raise ExperimentError(
            f"{key} must name a subset of {name} in the cache: {listed(names)} (got {subset}).",
            key=key,
            found=subset,
            allowed=names,
        )
    versions = found[next(iter(found)) if subset is None else subset]
    return max(versions, key=lambda folder: (folder.stat().st_mtime_ns, str(folder)))


def read_saved(path: Path, request: Request, errors: ValidationErrors, on_progress: OnProgress) -> Columns:
    """Read a folder that ``datasets`` has saved (``save_to_disk``) or keeps in its cache.

    Raise ExperimentError if ``datasets`` is not installed; DataError if the folder is not such a data set, or it lacks
    labels, or examples for training.
    """
    on_progress("reading the data set", 0, None)
    parts, notes = _splits(path, request.targets or (request.label,))
    features = next(iter(parts.values())).features
    images = [name for name, kind in features.items() if type(kind).__name__ == "Image"]
    frames = {} if images else {split: part.to_pandas() for split, part in parts.items()}
    lists = [
        name
        for name in features
        if not images and next(iter(frames.values()))[name].map(lambda cell: isinstance(cell, list | np.ndarray)).all()
    ]
    if ((images or lists) and request.label not in features) or len(images) > 1:
        raise DataError(
            f"{path}: it has the columns {listed(list(features))}; one column of labels ({request.called('label')}) "
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

        named = [frame.assign(**{SPLIT: SPLITS[split or 0]}) for split, frame in frames.items()]
        columns = read_frame(pandas.concat(named, ignore_index=True), replace(request, split=SPLIT), errors)
    classes = None if request.targets else _class_names(features.get(request.label))
    return replace(columns, classes=classes, notes=(*columns.notes, *notes))


def _library(what: str) -> Any:
    """Return the package ``datasets``; raise ExperimentError if it is missing, so that ``what`` cannot be read."""
    try:
        import datasets
    except ImportError:
        raise ExperimentError(
            f"reading {what} needs the package datasets, which is not installed",
            hint="pip install 'fedloom[huggingface]'",
        ) from None
    return datasets


def _splits(path: Path, labels: Sequence[str]) -> tuple[dict[int | None, Any], list[str]]:
    """Return the tables of a folder by the positions of their splits, and notes.

    A single table, or a single split for training, has the position None. Splits with other names are left out if there
    is one for training, and so are splits without labels. Without a split for testing, that for validation is used.
    """
    datasets = _library(str(path))
    try:
        whole = _of_cache(datasets, path) if _is_cache(path) else datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} is not a data set that datasets has saved: {reason}") from error
    if not isinstance(whole, Mapping):
        return {None: whole}, []
    places = {name: SPLIT_NAMES.get(name.lower()) for name in whole}
    positions = [place for place in places.values() if place is not None]
    if 0 not in positions or len(set(positions)) < len(positions):
        raise DataError(
            f"{path}: the splits are {listed(list(whole))}; they must be train, validation (or val) and test, each once"
        )
    training = next(part for name, part in whole.items() if places[name] == 0)
    left_out = [name for name in whole if places[name] is None]
    unlabelled = [
        name for name, part in whole.items() if name not in left_out and _is_unlabelled(part, training, labels)
    ]
    notes = [f"splits left out: {listed(left_out)}"] * bool(left_out)
    notes += [f"splits without labels, left out: {listed(unlabelled)}"] * bool(unlabelled)
    kept = {places[name]: part for name, part in whole.items() if name not in (*left_out, *unlabelled)}
    if 0 not in kept:
        raise DataError(f"{path}: no example for training has a label ({', '.join(labels)})")
    if len(kept) == 1:
        return {None: kept[0]}, notes
    if 2 not in kept:
        kept[2] = kept.pop(1)
        notes.append("no split is for testing: that for validation is used for it")
    return kept, notes


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of the classes of a column, or of lists in it, in the order of the labels; None if unnamed."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    names = getattr(feature, "names", None)
    return None if names is None else tuple(names)


def _is_unlabelled(part: Any, training: Any, labels: Sequence[str]) -> bool:
    """Return True if a split lacks a column of labels, or it has only nulls and -1, which ``datasets`` uses for both.

    If -1 also occurs among the labels for training, and their names are not known, it is a label.
    """
    for name in set(labels) & set(training.column_names):
        if name not in part.column_names:
            return True
        if all(_missing(cell) for cell in _cells(part, name)):
            named = _class_names(part.features[name]) is not None
            return named or not any(_missing(cell) for cell in _cells(training, name))
    return False


def _cells(part: Any, column: str) -> list[Any]:
    return list(part.select_columns([column]).to_pandas()[column])


def _missing(cell: Any) -> bool:
    """Return True if a label, or each of a list, is null, not a number, or -1."""
    if isinstance(cell, list | np.ndarray):
        return all(map(_missing, cell))
    return cell is None or cell != cell or cell == -1


def _is_cache(path: Path) -> bool:
    return (path / INFO).is_file() and not (path / "state.json").exists()


def _of_cache(datasets: Any, path: Path) -> Mapping[str, Any]:
    """Return the tables in a folder of the cache by split; raise ValueError if it describes none."""
    info = datasets.DatasetInfo.from_directory(str(path))
    if not info.splits or not info.dataset_name:
        raise ValueError("it has no splits")
    parts = {}
    for name, about in info.splits.items():
        files = datasets.naming.filenames_for_dataset_split(
            str(path),
            dataset_name=info.dataset_name,
            split=name,
            filetype_suffix="arrow",
            shard_lengths=about.shard_lengths,
        )
        parts[str(name)] = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
    return parts


def _of_images(parts: Mapping[int | None, Any], image: str, request: Request, errors: ValidationErrors) -> Columns:
    given: dict[str, RawInputs] = {}
    owners: list[str] = []
    for split, part in parts.items():
        prefix = "" if split is None else f"{SPLITS[split]}_"
        items = [(row[image], row[request.label]) for row in part]
        given[f"{prefix}x"], given[f"{prefix}y"], _ = read_items(items, f"{errors.source} {prefix}".rstrip(" _"))
        owners += [] if request.client is None else map(str, part[request.client])
    columns = array_columns([(None, given)], None, request, errors)
    return replace(columns, owners=None if request.client is None else owners)


def _of_lists(
    frames: Mapping[int | None, DataFrame], lists: Sequence[str], request: Request, errors: ValidationErrors
) -> Columns:
    """Return columns of lists, and the tokens of a text, as inputs; the column of labels may be a list, too."""
    given: dict[str, RawInputs] = {}
    owners: list[str] = []
    specs: dict[str, InputSpec] = {}
    text = request.text
    for split, frame in frames.items():
        prefix = "" if split is None else f"{SPLITS[split]}_"
        inputs = {name: _stacked(frame, name, errors.source) for name in lists if name != request.label}
        if text is not None:
            if text.column not in frame.columns:
                raise DataError(
                    f"{errors.source}: there is no column {text.column!r}; the columns are {listed([*frame])}"
                )
            cells = frame[text.column].astype(object).where(frame[text.column].notna(), None).tolist()
            tokens, specs = tokenized(cells, text, lambda i: f"row {i + 1}, column {text.column}", errors)
            inputs |= {name or IDS: each for name, each in tokens.items()}
        if wrong := [name for name in inputs if not INPUT_NAME.fullmatch(name)]:
            raise DataError(f"{errors.source}: column {wrong[0]!r} cannot name an input; use letters and digits")
        is_list = request.label in lists
        labels = _stacked(frame, request.label, errors.source) if is_list else np.asarray(frame[request.label])
        given[f"{prefix}x"] = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        given[f"{prefix}y"] = labels
        owners += [] if request.client is None else map(str, frame[request.client])
    errors.refuse()
    columns = array_columns([(None, given)], None, request, errors)
    of_text = {(name or IDS if "" not in columns.specs else name): spec for name, spec in specs.items()}
    return replace(columns, specs={**columns.specs, **of_text}, owners=None if request.client is None else owners)


def _stacked(frame: DataFrame, name: str, source: str) -> NDArray[Any]:
    try:
        return np.stack([np.asarray(value) for value in frame[name]])
    except ValueError as error:
        raise DataError(f"{source}: column {name}: lists must be of one length ({error}); pad them first") from error
