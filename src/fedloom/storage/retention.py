"""Listing of the runs and partitions in a store, and removal of old ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedloom.storage.base import Store

SUMMARY = "summary.json"
"""File that marks a run as complete."""
MANIFEST = "partition.json"
"""File that marks a partition as complete; a run's folder holds that of its partition."""


@dataclass(frozen=True)
class StoredRun:
    """Run below ``runs/``.

    Attributes
    ----------
    name
        Name of its folder.
    size
        Size of all its files in bytes.
    modified
        Time of its last write, in seconds since the epoch.
    finished
        True if the run is complete.
    files
        File names below the run's folder.
    """

    name: str
    size: int
    modified: float
    finished: bool
    files: tuple[str, ...]


@dataclass(frozen=True)
class StoredPartition:
    """Partition below ``partitions/``; attributes as for :class:`StoredRun`."""

    name: str
    size: int
    modified: float
    files: tuple[str, ...]


def stored_runs(store: Store) -> list[StoredRun]:
    """Return the runs of a store (``storage`` of an experiment), most recently written first."""
    runs = [
        StoredRun(
            name=run,
            size=sum(size for _, size, _ in files),
            modified=max(modified for *_, modified in files),
            finished=any(file == SUMMARY for file, *_ in files),
            files=tuple(file for file, *_ in files),
        )
        for run, files in _folders(store, "runs/").items()
    ]
    return sorted(runs, key=lambda run: (-run.modified, run.name))


def stored_partitions(store: Store) -> list[StoredPartition]:
    """Return the partitions of a store, by name."""
    return [
        StoredPartition(
            name=name,
            size=sum(size for _, size, _ in files),
            modified=max(modified for *_, modified in files),
            files=tuple(file for file, *_ in files),
        )
        for name, files in sorted(_folders(store, "partitions/").items())
    ]


def _folders(store: Store, above: str) -> dict[str, list[tuple[str, int, float]]]:
    """Return name, size and time of the files in each subfolder of ``above``."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for entry in store.entries(above):
        folder, _, file = entry.name.removeprefix(above).partition("/")
        if file:
            found.setdefault(folder, []).append((file, entry.size, entry.modified))
    return found


def expired(
    runs: Sequence[StoredRun], now: float, *, keep: int | None = None, older_than_s: float | None = None
) -> list[StoredRun]:
    """Return the runs to remove.

    Parameters
    ----------
    runs
        Most recently written first.
    now
        Seconds since the epoch.
    keep
        Number of most recent finished runs that are always kept. Without ``older_than_s``, only finished runs are
        removed.
    older_than_s
        Minimum age of a run to remove, in seconds since its last write; None: any age.
    """
    kept = {run.name for run in [run for run in runs if run.finished][: keep or 0]}
    return [
        run
        for run in runs
        if run.name not in kept
        and (older_than_s is None or now - run.modified >= older_than_s)
        and (run.finished or older_than_s is not None)
    ]


def remove_runs(store: Store, runs: Iterable[StoredRun]) -> None:
    """Remove runs, markers first: a partly removed run is neither taken for complete nor resumed."""
    for run in runs:
        first = [SUMMARY, *(file for file in run.files if file.startswith("published/"))]
        rest = [file for file in run.files if file not in first]
        for files in (first, rest):
            store.remove([f"runs/{run.name}/{file}" for file in files])


def unused(
    store: Store, partitions: Sequence[StoredPartition], runs: Iterable[StoredRun], now: float, *, older_than_s: float
) -> tuple[list[StoredPartition], list[StoredRun]]:
    """Return the partitions that no run refers to.

    Partitions that were just published, or published again for a run about to start, are too young.

    Parameters
    ----------
    runs
        Runs that are kept.
    now, older_than_s
        As for :func:`expired`.

    Returns
    -------
    tuple
        The partitions; and the unfinished runs that do not name their partition yet. As long as there are such runs, no
        partition is returned, since they may need any.
    """
    old = [partition for partition in partitions if now - partition.modified >= older_than_s]
    if not old:
        return [], []
    whole = {_digest(store, f"partitions/{p.name}/{MANIFEST}"): p.name for p in partitions if MANIFEST in p.files}
    used: set[str] = set()
    silent = []
    for run in runs:
        # A running run has published its manifest as a blob, which is named after its digest.
        digests = {file.rpartition("-")[2] for file in run.files if file.startswith("blobs/")}
        if MANIFEST in run.files:
            digests.add(_digest(store, f"runs/{run.name}/{MANIFEST}"))
        found = {whole[digest] for digest in digests if digest in whole}
        used |= found
        if not (found or run.finished):
            silent.append(run)
    return ([] if silent else [partition for partition in old if partition.name not in used]), silent


def remove_partitions(store: Store, partitions: Iterable[StoredPartition]) -> None:
    """Remove partitions, manifests first: a partly removed partition is not taken for complete."""
    for partition in partitions:
        for files in ([MANIFEST], [file for file in partition.files if file != MANIFEST]):
            store.remove([f"partitions/{partition.name}/{file}" for file in files])


def _digest(store: Store, name: str) -> str:
    return hashlib.sha256(store.read(name)).hexdigest()
