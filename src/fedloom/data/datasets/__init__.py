"""Published data sets and their registry.

``datasets.toml`` describes each: its examples, files, checksums, and the locations of the files. A module for each
family of formats reads them. Another package adds data sets through the entry point ``fedloom.datasets``
(docs/extending.md).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from fedloom.core.plugins import plugins
from fedloom.data.datasets.base import DataFile, Dataset, FetchProgress, Owners, OwnFiles, Pool, RawDataset
from fedloom.data.datasets.fetching import checksums, fetch_dataset, load_dataset, size_on_disk
from fedloom.data.datasets.leaf import OWN_FILES
from fedloom.data.spec import DataSpec
from fedloom.errors import ExperimentError

__all__ = [
    "DATASETS",
    "DataFile",
    "Dataset",
    "FetchProgress",
    "OwnFiles",
    "Owners",
    "Pool",
    "RawDataset",
    "checksums",
    "fetch_dataset",
    "find_dataset",
    "load_dataset",
    "size_on_disk",
]


def _reader(name: str) -> Callable[[Mapping[str, bytes]], RawDataset]:
    """Return the function ``MODULE:FUNCTION`` of this package."""
    module, _, function = name.partition(":")
    reader: Callable[[Mapping[str, bytes]], RawDataset] = getattr(import_module(f"{__name__}.{module}"), function)
    return reader


def _registry() -> dict[str, Dataset]:
    """Return the data sets of ``datasets.toml``, and those of other packages."""
    datasets: dict[str, Dataset] = {}
    for name, entry in tomllib.loads((Path(__file__).parent / "datasets.toml").read_text("utf-8")).items():
        datasets[name] = Dataset(
            name,
            entry["title"],
            DataSpec.single(entry["kind"], tuple(entry["input_shape"]), tuple(entry["classes"])),
            entry["licence"],
            _reader(entry.get("reader", "base:no_files")),
            tuple(DataFile(file, *content) for file, content in entry.get("files", {}).items()),
            tuple(entry.get("locations", ())),
            needs=tuple(datasets[dependency] for dependency in entry.get("needs", ())),
            own=OWN_FILES if entry.get("leaf") else None,
            synthetic="reader" not in entry,
        )
    return datasets | {each.name: each for each in plugins("fedloom.datasets", Dataset)}


DATASETS = _registry()
"""All data sets, by the name that experiment files use."""


def find_dataset(name: str) -> Dataset:
    """Return a data set by its name; raise ExperimentError if there is no data set of that name."""
    if name not in DATASETS:
        raise ExperimentError(
            f"data.dataset {name!r} is unknown; choose one of {', '.join(DATASETS)}.",
            key="data.dataset",
            found=name,
            allowed=[*DATASETS],
        )
    return DATASETS[name]
