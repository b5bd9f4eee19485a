"""Runs below a folder, finished or not, for ``fedloom runs``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import DataError
from fedloom.federation.folder import EXPERIMENT, RunFolder
from fedloom.reporting.runs import experiment_of

FINISHED, INTERRUPTED, RUNNING, DAMAGED = "finished", "interrupted", "running", "damaged"
DONE = "done"  # federation.journal.DONE, whose module needs torch


@dataclass(frozen=True)
class Listed:
    """Run as an entry of a list.

    Attributes
    ----------
    path
        Folder of the run.
    state
        ``finished``, ``interrupted``, ``running``, or ``damaged``.
    name, method, dataset, seed
        From the experiment; None if that is damaged.
    done, rounds
        Rounds done, and rounds planned; None also for a run without an end.
    seen, unseen
        Mean test accuracy over clients in the last evaluated round, as a fraction; None if no client was evaluated or
        the data have no classes.
    seen_loss, unseen_loss
        Mean test loss over clients in that round.
    changed
        Time of the last change, in seconds since 1970.
    fault
        Description of the damage.
    """

    path: str
    state: str
    name: str | None = None
    method: str | None = None
    dataset: str | None = None
    seed: int | None = None
    done: int | None = None
    rounds: int | None = None
    seen: float | None = None
    unseen: float | None = None
    seen_loss: float | None = None
    unseen_loss: float | None = None
    changed: float | None = None
    fault: str | None = None


def list_runs(folder: Path) -> list[Listed]:
    """Return the runs in a folder and below it, sorted by path.

    Raises
    ------
    DataError
        If the folder does not exist.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder}: found {'a file' if folder.exists() else 'no such folder'}, expected one that holds runs",
            hint="fedloom run EXPERIMENT makes one; runs elsewhere: fedloom runs DIR",
        )
    return [_listed(path) for path in run_folders(folder)]


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield folders of runs; a folder with only an experiment file is not a run."""
    for path, folders, files in os.walk(folder):
        folders.sort()
        if EXPERIMENT in files and ("logs" in folders or "partition.json" in files):
            folders.clear()
            yield Path(path)


def _listed(path: Path) -> Listed:
    run = RunFolder(path)
    try:
        e = experiment_of(run)
        method = e["algorithm"]
        rule = f" {method['rule']}" if "rule" in method else ""
        summary = run.json("summary.json") if (path / "summary.json").exists() else None
        last = summary or (run.last_evaluation() or ({}, 0))[0]
        rounds = None if e["federation"]["rounds"] is None else int(e["federation"]["rounds"])
        journal = (line.get("round", 0) for line in run.objects("journal.jsonl") if line.get("outcome") == DONE)
        done = int(summary["rounds"]) if summary is not None else max(journal, default=0)
        ended = FINISHED if is_whole(e, summary, done) else INTERRUPTED
        found = {group: last.get(group) or {} for group in ("seen", "unseen")}
        return Listed(
            path=str(path),
            state=RUNNING if is_held(path) else ended,
            name=str(e["name"]),
            method=f"{method['name']}{rule}",
            dataset=str(e["data"].get("dataset", "own")),
            seed=int(e["seed"]),
            done=done,
            rounds=rounds,
            seen=found["seen"].get("accuracy_mean"),
            unseen=found["unseen"].get("accuracy_mean"),
            seen_loss=found["seen"].get("loss_mean"),
            unseen_loss=found["unseen"].get("loss_mean"),
            changed=changed_at(path),
        )
    except DataError as error:
        return Listed(str(path), DAMAGED, changed=changed_at(path), fault=str(error))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Listed(
            str(path), DAMAGED, changed=changed_at(path), fault=f"{path}: not what FedLoom writes ({error!r})"
        )


def is_whole(experiment: Mapping[str, Any], summary: Mapping[str, Any] | None, done: int) -> bool:
    """Return whether a run with this many rounds done has ended and has not been continued since."""
    if summary is None or int(summary["rounds"]) < done:
        return False
    federation = experiment["federation"]
    return federation["rounds"] is None or federation.get("until") is not None or done >= int(federation["rounds"])


def is_held(path: Path) -> bool:
    """Return whether a process works on the run (:meth:`RunFolder.held`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def changed_at(path: Path) -> float:
    """Return when a run last changed, in seconds since 1970."""
    files = (path / name for name in ("summary.json", "journal.jsonl", "metrics.jsonl", EXPERIMENT))
    return max(file.stat().st_mtime for file in files if file.exists())
