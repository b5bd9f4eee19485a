"""Lists of runs: in folders, and in stores, where old ones are removed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.core.home import expanded
from fedloom.core.words import pluralize
from fedloom.errors import DataError, argument
from fedloom.runs.files import EXPERIMENT, JOURNAL, PARTITION, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import BURNT, DONE
from fedloom.storage.base import Store
from fedloom.tasks.names import ACCURACY, headline_of, metric_title, values_of

FINISHED, INTERRUPTED, RUNNING, DAMAGED = "finished", "interrupted", "running", "damaged"
RESUME = f"continue it: run it again with {argument('resume')}"


@dataclass(frozen=True)
class RunEntry:
    """Entry of a list of runs; a damaged run has only ``path``, ``changed`` and ``fault``.

    Attributes
    ----------
    state
        ``finished``, ``interrupted``, ``running``, or ``damaged``.
    done, rounds
        Rounds done, and rounds planned; None for a run without an end.
    metric, percent
        Name of the headline metric, and True if it is a fraction; None and False before the first evaluation.
    seen, unseen, seen_loss, unseen_loss
        Mean of that metric, and mean loss, over clients in the last evaluated round, on test data.
    validation
        That metric on the pooled validation data of seen clients, in the same round.
    private, epsilon
        True if training is differentially private, and its ε so far toward readers of the models; None without a
        guarantee.
    changed
        Time of the last change, in seconds since 1970.
    """

    path: str
    state: str
    name: str | None = None
    method: str | None = None
    dataset: str | None = None
    seed: int | None = None
    done: int | None = None
    rounds: int | None = None
    metric: str | None = None
    percent: bool = False
    seen: float | None = None
    unseen: float | None = None
    seen_loss: float | None = None
    unseen_loss: float | None = None
    validation: float | None = None
    private: bool = False
    epsilon: float | None = None
    changed: float | None = None
    fault: str | None = None

    def score(self, value: float | None) -> str:
        """Return a value of the headline metric: an accuracy in percent, or another metric with its name."""
        if value is None or self.metric is None:
            return "–"
        shown = f"{100 * value:.1f}" if self.percent else f"{value:.3g}"
        return shown if self.metric == ACCURACY.name else f"{metric_title(self.metric)} {shown}"


def list_runs(folder: Path) -> list[RunEntry]:
    """Return the runs in a folder and below it, sorted by path.

    Raise DataError if the folder does not exist.
    """
    check_runs_folder(folder)
    return [entry_of(RunFolder(path)) for path in run_folders(folder)]


def check_runs_folder(folder: Path) -> None:
    """Raise DataError if a folder, which may hold runs, does not exist."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} {'is a file' if folder.exists() else 'does not exist'}; give a folder that holds runs.",
            hint="create one with fedloom run EXPERIMENT, or name another folder",
        )


def newest_run(folder: Path) -> Path:
    """Return the most recently changed run in a folder or below it.

    Raise DataError if there is none.
    """
    newest = max(run_folders(folder), key=lambda path: RunFolder(path).changed_at(), default=None)
    if newest is None:
        raise DataError(
            f"{folder} holds no run; give the address of an aggregator, a run's folder, or its URL.",
            hint="fedloom status HOST:PORT|RUN",
        )
    return newest


def finished_runs(paths: Sequence[str | Path]) -> tuple[list[RunFolder], list[str]]:
    """Return the finished runs in or directly below some folders, and notices about skipped ones.

    Raise DataError if a path is neither a finished run nor holds one.
    """
    runs: dict[Path, RunFolder] = {}
    notices: list[str] = []
    for path in map(expanded, paths):
        inside = [RunFolder(path)] if (path / EXPERIMENT).is_file() else _runs_directly_in(path)
        finished = [run for run in inside if run.is_finished]
        if not finished and inside[0].path == path:
            raise DataError(f"{path} has no summary.json, because the run is not finished", hint=RESUME)
        if not finished:
            raise DataError(f"{path} holds {pluralize(len(inside), 'run')}, none of them finished.", hint=RESUME)
        if unfinished := [run.path.name for run in inside if not run.is_finished]:
            many = pluralize(len(unfinished), "unfinished run")
            notices.append(f"{path.resolve().name}: left out {many}: {', '.join(unfinished)}.")
        for run in finished:
            runs.setdefault(run.path.resolve(), run)
    return list(runs.values()), notices


def _runs_directly_in(path: Path) -> list[RunFolder]:
    """Return the runs directly below a folder, in natural order; raise if there are none."""
    below = sorted(path.iterdir(), key=_naturally) if path.is_dir() else []
    inside = [RunFolder(one) for one in below if (one / EXPERIMENT).is_file()]
    if not inside:
        missing = "is a file" if path.exists() else "does not exist"
        reason = f"has no {EXPERIMENT} and holds no runs" if path.is_dir() else missing
        raise DataError(
            f"{path} {reason}; give the folder of a finished run, or one that holds such folders.",
            hint="fedloom run EXPERIMENT",
        )
    return inside


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield folders of runs; a folder with only an experiment file is not a run."""
    for path, folders, files in os.walk(folder):
        folders.sort()
        if EXPERIMENT in files and ("logs" in folders or PARTITION in files):
            folders.clear()
            yield Path(path)


def entry_of(run: RunFolder) -> RunEntry:
    """Return the entry of a run."""
    path, changed_at = str(run.path), run.changed_at()
    try:
        e, summary = run.stored_experiment(), run.json_or_none("summary.json")
        method, rounds = e["algorithm"], e["federation"]["rounds"]
        rule = f" {method['rule']}" if "rule" in method else ""
        last, _ = run.last_evaluation() or (summary or {}, 0)
        privacy = last.get("privacy") or (summary or {}).get("training_privacy")
        seen, unseen = (last.get(group) or {} for group in ("seen", "unseen"))
        headline = headline_of(last)
        rounds_done = _rounds_done(run) if summary is None else int(summary["rounds"])
        state = FINISHED if has_ended(e, summary, rounds_done) else INTERRUPTED
        return RunEntry(
            path,
            state=RUNNING if run.is_held() else state,
            name=str(e["name"]),
            method=f"{method['name']}{rule}",
            dataset=str(e["data"].get("dataset", "own")),
            seed=int(e["seed"]),
            done=rounds_done,
            rounds=None if rounds is None else int(rounds),
            metric=headline.name if last else None,
            percent=headline.percent if last else False,
            seen=values_of(seen, headline).mean,
            unseen=values_of(unseen, headline).mean,
            seen_loss=seen.get("loss_mean"),
            unseen_loss=unseen.get("loss_mean"),
            validation=last.get("validation_pooled"),
            private=privacy is not None,
            epsilon=None if privacy is None else privacy["epsilon"],
            changed=changed_at,
        )
    except DataError as error:
        fault = str(error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fault = f"{path} was not written by FedLoom ({error!r})"
    return RunEntry(path, DAMAGED, changed=changed_at, fault=fault)


def _rounds_done(run: RunFolder) -> int:
    return max(
        (line.get("round", 0) for line in run.objects(JOURNAL) if line.get("outcome") in (DONE, BURNT)), default=0
    )


def has_ended(experiment: Mapping[str, Any], summary: Mapping[str, Any] | None, rounds_done: int) -> bool:
    """Return whether a run with this many rounds has ended and has not been continued since."""
    if summary is None or int(summary["rounds"]) < rounds_done:
        return False
    federation = experiment["federation"]
    if summary.get("ended_by") == "budget":
        return True
    return (
        federation["rounds"] is None or federation.get("until") is not None or rounds_done >= int(federation["rounds"])
    )


def _naturally(path: Path) -> list[tuple[float, str]]:
    """Return a sort key that orders numbers in a name by value."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", path.name)
    return [(float(part), "") if i % 2 else (-1.0, part) for i, part in enumerate(parts)]


@dataclass(frozen=True)
class StoredFolder:
    """Run below ``runs/`` of a store, or partition below ``partitions/``.

    ``path`` is that of its folder, such as ``runs/NAME``, and ``files`` are names below it; ``size`` is in bytes, and
    ``modified`` is the time of the last write, in seconds since 1970.
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
    folders: dict[str, list[tuple[str, int, float]]] = {}
    for entry in store.entries(above):
        folder, _, file = entry.name.removeprefix(above).partition("/")
        if file:
            folders.setdefault(f"{above}{folder}", []).append((file, entry.size, entry.modified))
    columns = {path: tuple(zip(*files, strict=True)) for path, files in folders.items()}
    return [StoredFolder(path, sum(sizes), max(times), names) for path, (names, sizes, times) in columns.items()]


def expired(
    runs: Sequence[StoredFolder], now: float, *, keep: int | None = None, older_than_s: float | None = None
) -> list[StoredFolder]:
    """Return the runs to remove, given the most recently written first, and the time in seconds since 1970.

    The ``keep`` most recent finished runs stay, as do runs younger than ``older_than_s``, by their last write; without
    that, also unfinished runs.
    """
    finished = [run for run in runs if run.finished]
    old = finished if older_than_s is None else [run for run in runs if now - run.modified >= older_than_s]
    names = {run.name for run in finished[: keep or 0]}
    return [run for run in old if run.name not in names]


def unused(
    store: Store, partitions: Sequence[StoredFolder], runs: Iterable[StoredFolder], now: float, *, older_than_s: float
) -> tuple[list[StoredFolder], list[StoredFolder]]:
    """Return the partitions that none of the remaining ``runs`` refers to, if they are old enough (:func:`expired`).

    Partitions published just now for a run about to start are too young. The second list has the unfinished runs that
    do not name their partition yet: as long as there are any, no partition is returned, since they may need it.
    """
    old = [partition for partition in partitions if now - partition.modified >= older_than_s]
    if not old:
        return [], []
    names = {_manifest_digest(store, each): each.name for each in partitions if PARTITION in each.files}
    partitions_by_run = {run: {names[digest] for digest in _digests(store, run) & names.keys()} for run in runs}
    if silent := [run for run, partitions_of in partitions_by_run.items() if not partitions_of and not run.finished]:
        return [], silent
    return [partition for partition in old if partition.name not in set().union(*partitions_by_run.values())], []


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
