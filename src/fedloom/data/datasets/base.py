"""Types of published data sets: their examples, files and readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.data.spec import DataSpec, RawInputs
from fedloom.errors import DataError


@dataclass(frozen=True, eq=False)
class Pool:
    """Examples not yet assigned to clients.

    Attributes
    ----------
    inputs
        ``[n, *input_shape]``: uint8 for pixels and tokens, float32 for features, int64 for integers (see
        :data:`Kind`); or such arrays by name.
    labels
        ``[n]`` int64; or other targets, as shards hold them (:class:`~fedloom.data.spec.Targets`).
    owners
        ``[n]`` int64, the owner of each example as an index into ``Owners.names``; None where owners are unknown.
    """

    inputs: RawInputs
    labels: NDArray[Any]
    owners: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Owners:
    """Natural clients of a data set: the owners of its examples.

    Attributes
    ----------
    names
        Name of each owner.
    divided
        True if every owner's examples have an official train part and an official test part. If False (the test writers
        of the data set differ from its train writers), the ``natural`` scheme splits them itself.
    overlap
        Number of preceding examples of the same owner that each example shares content with (windows of a text in time
        order); 0 for exchangeable examples. If positive, the last examples are held out, with a gap of this size
        before.
    """

    names: tuple[str, ...]
    divided: bool
    overlap: int = 0


@dataclass(frozen=True, eq=False)
class RawDataset:
    """Content of a data set's files: the official train and test pools, and the owners of the examples where known.

    Attributes
    ----------
    equal
        ``[n]``, for local data sets: the position, in the train and then the test examples, of the first example with
        the same input. None: all examples count as different, as in published data sets, whose official split is kept.
    """

    train: Pool
    test: Pool
    owners: Owners | None = None
    equal: NDArray[np.int64] | None = None

    @property
    def group(self) -> NDArray[np.int64]:
        """Group of equal inputs that each example belongs to, ``[n]`` (:mod:`fedloom.data.apportion`)."""
        return np.arange(len(self.train) + len(self.test)) if self.equal is None else self.equal


@dataclass(frozen=True)
class DataFile:
    """Name, size in bytes (None if not recorded) and SHA-256 (hex) of an uncompressed file."""

    name: str
    size: int | None
    sha256: str

    def __str__(self) -> str:
        return f"sha256 {self.sha256}" if self.size is None else f"{self.size} bytes of sha256 {self.sha256}"


@dataclass(frozen=True)
class FetchProgress:
    """Progress of a fetch: the current step, and bytes done out of ``total`` (None if unknown)."""

    doing: str
    done: int
    total: int | None


Report: TypeAlias = Callable[[FetchProgress], None]
"""Callback for the progress of a fetch."""


class FetchFailed(Exception):
    """Failure to fetch from one location; the message is a one-line reason."""


@dataclass(frozen=True)
class OwnFiles:
    """Files that users create themselves, whose checksums are therefore not known in advance."""

    expected: str
    """Expected content of a folder, for errors: ``"LEAF's train/*.json and test/*.json"``."""
    names: Callable[[Path], tuple[str, ...]]
    """Returns the file names in a folder, relative to it, with ``/``; empty if it holds none."""


@dataclass(frozen=True)
class Dataset:
    """Data set that can be fetched and read.

    Attributes
    ----------
    name, title
        Name in experiment files, and display name.
    spec
        Inputs, without normalizations, and targets.
    licence
        Licence of the data.
    read
        Converts contents by file name into examples. Each content is read from disk every time it is accessed.
    files
        The official files as stored; empty if there are none.
    locations
        Where the files are, in the order tried (:mod:`fedloom.data.datasets.locations`).
    needs
        Other data sets whose files ``read`` also finds among its contents.
    own
        Files that users may supply instead of the official ones. ``read`` checks them once, recorded checksums from
        then on. None if users cannot supply files.
    synthetic
        True if there are no files: a partition scheme draws the examples and sets their shape.
    at
        Folder of a local data set's files; None: the name decides.
    notes
        Changes to the examples of a local data set that their owner should know.
    """

    name: str
    title: str
    spec: DataSpec
    licence: str
    read: Callable[[Mapping[str, bytes]], RawDataset]
    files: tuple[DataFile, ...] = ()
    locations: tuple[str, ...] = ()
    needs: tuple[Dataset, ...] = ()
    own: OwnFiles | None = None
    synthetic: bool = False
    at: Path | None = None
    notes: tuple[str, ...] = ()

    def folder(self, root: Path) -> Path:
        """Return the folder of the data set's files under a data root."""
        return self.at or root / "datasets" / self.name


def no_files(contents: Mapping[str, bytes]) -> RawDataset:
    """Raise DataError: the reader of a synthetic data set."""
    raise DataError(
        "gaussian has no files: its examples are drawn when a partition is created", hint="fedloom partition EXPERIMENT"
    )
