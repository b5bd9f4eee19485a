"""Data sets of the package ``datasets``: saved folders, and its local cache, from which one is read by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.home import expanded
from fedloom.data.pack.examples import SPLIT_NAMES, listed
from fedloom.errors import DataError, ExperimentError

INFO = "dataset_info.json"
"""File that describes a data set in the cache."""

NAME = re.compile(r"([\w.-]+/)?[\w.-]+")
"""Pattern of the names of data sets: OWNER/NAME, or NAME."""


def library(what: str) -> Any:
    """Return the package ``datasets``; raise ExperimentError if it is missing, so that ``what`` cannot be read."""
    try:
        import datasets
    except ImportError:
        raise ExperimentError(
            f"reading {what} needs the package datasets, which is not installed",
            hint="pip install 'fedloom[huggingface]'",
        ) from None
    return datasets


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
    datasets = library(name)
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


def saved_splits(path: Path, labels: Sequence[str]) -> tuple[dict[str, Any], list[int | None], tuple[str, ...]]:
    """Return the tables of a folder by the names of their splits, the positions of these, and notes.

    A single table, or a single split for training, has the position None. Splits with other names are left out if there
    is one for training, and so are splits without labels. Without a split for testing, that for validation is used.

    Parameters
    ----------
    labels
        Columns of the labels.

    Raise ExperimentError if ``datasets`` is not installed; DataError if the folder is neither a saved data set nor one
    of the cache, or no split is for training.
    """
    datasets = library(str(path))
    try:
        whole = _of_cache(datasets, path) if _is_cache(path) else datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} is not a data set that datasets has saved: {reason}") from error
    if not isinstance(whole, Mapping):
        return {"": whole}, [None], ()
    places = {name: SPLIT_NAMES.get(name.lower()) for name in whole}
    if 0 not in places.values():
        raise DataError(f"{path}: the splits are {listed(list(whole))}; they must be {', '.join(SPLIT_NAMES)}")
    training = next(part for name, part in whole.items() if places[name] == 0)
    kept = {name: part for name, part in whole.items() if places[name] is not None}
    if unlabelled := [name for name, part in kept.items() if _is_unlabelled(part, training, labels)]:
        kept = {name: part for name, part in kept.items() if name not in unlabelled}
    left_out = [name for name in whole if places[name] is None]
    notes = [f"splits left out: {listed(left_out)}"] if left_out else []
    notes += [f"splits without labels, left out: {listed(unlabelled)}"] if unlabelled else []
    if not any(places[name] == 0 for name in kept):
        raise DataError(f"{path}: no example for training has a label ({', '.join(labels)})")
    if len(kept) == 1:
        return {"": next(iter(kept.values()))}, [None], tuple(notes)
    if 2 not in (places[name] for name in kept):
        validation = next(name for name in kept if places[name] == 1)
        places[validation] = 2
        notes.append(f"no split is for testing: {validation} is used for it")
    return kept, [places[name] for name in kept], tuple(notes)


def class_names(feature: Any) -> tuple[str, ...] | None:
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
            named = class_names(part.features[name]) is not None
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
