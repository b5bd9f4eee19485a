"""What a source of data is: its official files, how to get them, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.data.manifest import Kind
from fedloom.errors import DataError


@dataclass(frozen=True, eq=False)
class Pool:
    """Examples not yet assigned to clients.

    Attributes
    ----------
    inputs
        ``[n, *input_shape]``: uint8 for pixels and tokens, float32 for features (see :data:`Kind`).
    labels
        ``[n]`` int64.
    owners
        ``[n]`` int64, whose example it is, as an index into ``Owners.names``; None where nobody is known to own them.
    """

    inputs: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int64]
    owners: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together."""
        counts = {"inputs": len(self.inputs), "labels": len(self.labels)}
        if self.owners is not None:
            counts["owners"] = len(self.owners)
        if len(set(counts.values())) > 1:
            raise DataError(", ".join(f"{n} {name}" for name, n in counts.items()) + "; expected as many of each")

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.labels)


@dataclass(frozen=True)
class Owners:
    """The natural clients of a source: who its examples come from.

    Attributes
    ----------
    names
        What each is called.
    divided
        Whether every owner's examples are divided into an official train and an official test part. If not (a data
        set whose test writers are others than its train writers), the ``natural`` scheme divides them itself.
    overlap
        Examples of one owner are in time order, and each shares content with so many before it (windows of a text);
        0 for examples that are exchangeable. Held-out examples are then the last ones, with a gap of so many before.
    """

    names: tuple[str, ...]
    divided: bool
    overlap: int = 0


@dataclass(frozen=True, eq=False)
class Official:
    """What a source's files hold: the official train and test pool, and whose the examples are, where that is known.

    Attributes
    ----------
    equal
        ``[n]``, of a data set of one's own: the position, in the train and then the test examples, of the first example
        with the same input. None: each example counts as different, as in published data sets, whose division stands.
    """

    train: Pool
    test: Pool
    owners: Owners | None = None
    equal: NDArray[np.int64] | None = None

    @property
    def group(self) -> NDArray[np.int64]:
        """``[n]``: the group of equal inputs that each example is in (:mod:`fedloom.data.copies`)."""
        return np.arange(len(self.train) + len(self.test)) if self.equal is None else self.equal

    def __post_init__(self) -> None:
        """Refuse owners in one place only, or out of range."""
        for name, pool in (("train", self.train), ("test", self.test)):
            if (pool.owners is None) != (self.owners is None):
                raise DataError(
                    f"the {name} examples have {'no ' if pool.owners is None else ''}owners, unlike the rest"
                )
            if pool.owners is not None and self.owners is not None and len(pool):
                low, high = int(pool.owners.min()), int(pool.owners.max())
                if not 0 <= low <= high < len(self.owners.names):
                    raise DataError(f"{name} owners {low} ... {high}; expected 0 ... {len(self.owners.names) - 1}")


@dataclass(frozen=True)
class SourceFile:
    """One file as it is stored, uncompressed: its name, size in bytes (None if not noted), and sha256 in hex."""

    name: str
    size: int | None
    sha256: str

    def __str__(self) -> str:
        """Return what identifies its content, for errors."""
        return f"sha256 {self.sha256}" if self.size is None else f"{self.size} bytes of sha256 {self.sha256}"


@dataclass(frozen=True)
class Progress:
    """How far a fetch is: what it is doing, and bytes done out of ``total`` (None where that is not known)."""

    doing: str
    done: int
    total: int | None


Report: TypeAlias = Callable[[Progress], None]
"""Is told how far a fetch is."""


class FetchFailed(Exception):
    """A fetcher did not get the files; the message says why, in one line."""


class Fetcher(Protocol):
    """One way to get a source's files."""

    @property
    def title(self) -> str:
        """What it does, for progress and errors: ``"download from ..."``."""

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed; checking it is the caller's job.

        Raises
        ------
        FetchFailed
            If a file cannot be had.
        """


@dataclass(frozen=True)
class OwnFiles:
    """Files that users make themselves, so that nobody can know their checksums beforehand.

    Attributes
    ----------
    expected
        What a folder with them holds, and how to make it, for errors: ``"LEAF's train/*.json and test/*.json"``.
    names
        The names in a folder, relative to it, with ``/``; empty where it holds none.
    """

    expected: str
    names: Callable[[Path], tuple[str, ...]]


@dataclass(frozen=True)
class Source:
    """A data set that can be fetched and read.

    Attributes
    ----------
    name, title
        As in an experiment file, and as people call it.
    class_names, input_shape
        Of the C classes, in label order; shape of one input: (channels, height, width), (features,) or (tokens,).
    licence
        Of the data.
    files
        The official files, as they are stored; empty where there are none.
    fetchers
        How to get them, in the order tried.
    read
        Contents by file name -> the examples. A content is read from disk each time that it is asked for.
    kind
        What an input is, see :data:`~fedloom.data.manifest.Kind`.
    needs
        Other sources whose files ``read`` finds among its contents too.
    own
        What users may bring instead of the official files, checked by ``read`` and from then on by checksums that were
        recorded; None where there is no such thing.
    synthetic
        Whether it has no files: a partition scheme draws its examples, and says their shape.
    at
        The folder of its files, where that is another than its name says: of a data set of one's own.
    notes
        What was done to the examples that their owner should know: of a data set of one's own.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    licence: str
    files: tuple[SourceFile, ...]
    fetchers: tuple[Fetcher, ...]
    read: Callable[[Mapping[str, bytes]], Official]
    kind: Kind = "pixels"
    needs: tuple[Source, ...] = ()
    own: OwnFiles | None = None
    synthetic: bool = False
    at: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """C; 0 for data without classes."""
        return len(self.class_names)

    def folder(self, root: Path) -> Path:
        """Where its files are stored under a data root."""
        return self.at or root / "datasets" / self.name
