"""What a source of data is: its official files, how to get them, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError


@dataclass(frozen=True, eq=False)
class Pool:
    """Examples not yet dealt out: ``images`` [n, channels, height, width] uint8, ``labels`` [n] int64."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Refuse images and labels that do not belong together."""
        if len(self.images) != len(self.labels):
            raise DataError(f"{len(self.images)} images and {len(self.labels)} labels; expected as many of each")

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.labels)


@dataclass(frozen=True)
class SourceFile:
    """One official file, uncompressed: its name, size in bytes, and sha256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Progress:
    """How far a fetch is: what it is doing, and bytes done out of ``total`` (None where that is not known)."""

    doing: str
    done: int
    total: int | None


Report: TypeAlias = Callable[[Progress], None]
"""Is told how far a fetch is."""


class WayFailed(Exception):
    """A way to get the files did not work out; the message says why, in one line."""


class Way(Protocol):
    """A way to get a source's files."""

    @property
    def title(self) -> str:
        """What it does, for progress and errors: ``"download from ..."``."""

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed; checking it is the caller's job.

        Raises
        ------
        WayFailed
            If a file cannot be had this way.
        """


@dataclass(frozen=True)
class Source:
    """A data set that can be fetched and read.

    Attributes
    ----------
    name, title
        As in an experiment file, and as people call it.
    class_names, input_shape
        Of the C classes, in label order; shape of one image (channels, height, width).
    licence
        Of the data.
    files
        The official files, as they are stored.
    ways
        How to get them, in the order tried.
    read
        Contents by file name -> official train and test pool.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    licence: str
    files: tuple[SourceFile, ...]
    ways: tuple[Way, ...]
    read: Callable[[Mapping[str, bytes]], tuple[Pool, Pool]]

    @property
    def classes(self) -> int:
        """C."""
        return len(self.class_names)

    def folder(self, root: Path) -> Path:
        """Where its files are stored under a data root."""
        return root / "datasets" / self.name
