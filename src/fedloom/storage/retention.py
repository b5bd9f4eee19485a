"""Which runs and partitions a store holds, and removing those that nobody wants any more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedloom.storage.base import Store

SUMMARY = "summary.json"
"""A run that has one is whole."""
MANIFEST = "partition.json"
"""A partition that has one is whole; a run's folder has that of its partition."""


@dataclass(frozen=True)
class StoredRun:
    """A run below ``runs/``.

    Attributes
    ----------
    name
        Of its folder.
    size
        Bytes of all its files.
    modified
        When the last of them was written, in seconds since the epoch.
    finished
        Whether it came to its end.
    files
        Their names below the run's folder.
    """

    name: str
    size: int
    modified: float
    finished: bool
    files: tuple[str, ...]


@dataclass(frozen=True)
class StoredPartition:
    """A partition below ``partitions/``; as :class:`StoredRun`."""

    name: str
    size: int
    modified: float
    files: tuple[str, ...]


def stored_runs(store: Store) -> list[StoredRun]:
    """Return the runs of a store (``storage`` of an experiment), the one that was written to last first."""
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
    """Name, size and time of the files of each folder in one."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for entry in store.entries(above):
        folder, _, file = entry.name.removeprefix(above).partition("/")
        if file:
            found.setdefault(folder, []).append((file, entry.size, entry.modified))
    return found


def expired(
    runs: Sequence[StoredRun], now: float, *, keep: int | None = None, older_than_s: float | None = None
) -> list[StoredRun]:
    """Return the runs to be removed.

    Parameters
    ----------
    runs
        The one that was written to last first.
    now
        Seconds since the epoch.
    keep
        How many finished runs stay in any case. Alone, it lets go of finished runs only.
    older_than_s
        Nothing that was written to since stays out of this list; None: age does not matter.
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
    """Remove runs; one whose removal was cut short is none that could be taken for whole, or gone on with."""
    for run in runs:
        first = [SUMMARY, *(file for file in run.files if file.startswith("published/"))]
        rest = [file for file in run.files if file not in first]
        for files in (first, rest):
            store.remove([f"runs/{run.name}/{file}" for file in files])


def unused(
    store: Store, partitions: Sequence[StoredPartition], runs: Iterable[StoredRun], now: float, *, older_than_s: float
) -> tuple[list[StoredPartition], list[StoredRun]]:
    """Return the partitions that no run refers to.

    Those that have just been published, or published again for a run that is about to start, are too young.

    Parameters
    ----------
    runs
        Those that stay.
    now, older_than_s
        As of :func:`expired`.

    Returns
    -------
    tuple
        The partitions; and the unfinished runs that have not said yet which they need: as long as there are such, it
        may be any, and no partition is returned.
    """
    old = [partition for partition in partitions if now - partition.modified >= older_than_s]
    if not old:
        return [], []
    whole = {_digest(store, f"partitions/{p.name}/{MANIFEST}"): p.name for p in partitions if MANIFEST in p.files}
    used: set[str] = set()
    silent = []
    for run in runs:
        # A run that goes on has published its manifest as a blob, which is named after its digest.
        digests = {file.rpartition("-")[2] for file in run.files if file.startswith("blobs/")}
        if MANIFEST in run.files:
            digests.add(_digest(store, f"runs/{run.name}/{MANIFEST}"))
        found = {whole[digest] for digest in digests if digest in whole}
        used |= found
        if not (found or run.finished):
            silent.append(run)
    return ([] if silent else [partition for partition in old if partition.name not in used]), silent


def remove_partitions(store: Store, partitions: Iterable[StoredPartition]) -> None:
    """Remove partitions; one whose removal was cut short is none that could be taken for whole."""
    for partition in partitions:
        for files in ([MANIFEST], [file for file in partition.files if file != MANIFEST]):
            store.remove([f"partitions/{partition.name}/{file}" for file in files])


def _digest(store: Store, name: str) -> str:
    return hashlib.sha256(store.read(name)).hexdigest()
