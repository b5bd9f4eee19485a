"""Which runs a store holds, and removing those that nobody wants any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedloom.storage.base import Store

SUMMARY = "summary.json"
"""What has one is whole."""


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


def stored_runs(store: Store) -> list[StoredRun]:
    """Return the runs of a store (``storage`` of an experiment), the one that was written to last first."""
    found: dict[str, list[tuple[str, int, float]]] = {}
    for entry in store.entries("runs/"):
        run, _, file = entry.name.removeprefix("runs/").partition("/")
        if file:
            found.setdefault(run, []).append((file, entry.size, entry.modified))
    runs = [
        StoredRun(
            name=run,
            size=sum(size for _, size, _ in files),
            modified=max(modified for *_, modified in files),
            finished=any(file == SUMMARY for file, *_ in files),
            files=tuple(file for file, *_ in files),
        )
        for run, files in found.items()
    ]
    return sorted(runs, key=lambda run: (-run.modified, run.name))


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
