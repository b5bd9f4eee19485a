"""Runs and partitions in a store, and removal of old ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedloom.runs.files import PARTITION, SUMMARY
from fedloom.storage.base import Store


@dataclass(frozen=True)
class StoredFolder:
    """Run below ``runs/`` of a store, or partition below ``partitions/``.

    Attributes
    ----------
    path
        Path of its folder, such as ``runs/NAME``.
    size
        Size of all its files in bytes.
    modified
        Time of its last write, in seconds since the epoch.
    files
        File names below the folder.
    """

    path: str
    size: int
    modified: float
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.rpartition("/")[2]

    @property
    def finished(self) -> bool:
        """True if it is a complete run."""
        return SUMMARY in self.files


def stored_runs(store: Store) -> list[StoredFolder]:
    """Return the runs of a store (``storage`` of an experiment), most recently written first."""
    return sorted(_folders(store, "runs/"), key=lambda run: (-run.modified, run.name))


def stored_partitions(store: Store) -> list[StoredFolder]:
    """Return the partitions of a store, by name."""
    return sorted(_folders(store, "partitions/"), key=lambda partition: partition.name)


def _folders(store: Store, above: str) -> list[StoredFolder]:
    """Return the subfolders of ``above``."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for entry in store.entries(above):
        folder, _, file = entry.name.removeprefix(above).partition("/")
        if file:
            found.setdefault(folder, []).append((file, entry.size, entry.modified))
    return [
        StoredFolder(
            path=f"{above}{folder}",
            size=sum(size for _, size, _ in files),
            modified=max(modified for *_, modified in files),
            files=tuple(file for file, *_ in files),
        )
        for folder, files in found.items()
    ]


def expired(
    runs: Sequence[StoredFolder], now: float, *, keep: int | None = None, older_than_s: float | None = None
) -> list[StoredFolder]:
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
    finished = [run for run in runs if run.finished]
    old = finished if older_than_s is None else [run for run in runs if now - run.modified >= older_than_s]
    kept = {run.name for run in finished[: keep or 0]}
    return [run for run in old if run.name not in kept]


def unused(
    store: Store, partitions: Sequence[StoredFolder], runs: Iterable[StoredFolder], now: float, *, older_than_s: float
) -> tuple[list[StoredFolder], list[StoredFolder]]:
    """Return the partitions that none of the kept ``runs`` refers to, if they are old enough (:func:`expired`).

    Partitions that were just published, or published again for a run about to start, are too young.

    The second list has the unfinished runs that do not name their partition yet. As long as there are such runs, no
    partition is returned, since they may need any.
    """
    old = [partition for partition in partitions if now - partition.modified >= older_than_s]
    if not old:
        return [], []
    names = {_manifest_digest(store, each): each.name for each in partitions if PARTITION in each.files}
    used = {run: {names[digest] for digest in _digests(store, run) & names.keys()} for run in runs}
    silent = [run for run, found in used.items() if not found and not run.finished]
    if silent:
        return [], silent
    return [partition for partition in old if partition.name not in set().union(*used.values())], []


def remove_folders(store: Store, folders: Iterable[StoredFolder]) -> None:
    """Remove runs or partitions, markers first: a partly removed run is neither taken for complete nor resumed."""
    for folder in folders:
        first = [file for file in (SUMMARY, PARTITION) if file in folder.files]
        first += [file for file in folder.files if file.startswith("published/")]
        rest = [file for file in folder.files if file not in first]
        for files in (first, rest):
            store.remove([f"{folder.path}/{file}" for file in files])


def _digests(store: Store, run: StoredFolder) -> set[str]:
    """Return the SHA-256 of every file that may be a run's manifest: its blobs, and its ``partition.json``."""
    blobs = {file.rpartition("-")[2] for file in run.files if file.startswith("blobs/")}
    return blobs | ({_manifest_digest(store, run)} if PARTITION in run.files else set())


def _manifest_digest(store: Store, folder: StoredFolder) -> str:
    return hashlib.sha256(store.read(f"{folder.path}/{PARTITION}")).hexdigest()
