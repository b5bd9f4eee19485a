"""Checks before a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedloom import experiment as experiments
from fedloom.data.federated import FederatedDataset, Manifest
from fedloom.errors import NEW_RUN, DataError, ExperimentError, argument
from fedloom.experiment import Experiment
from fedloom.federation.checkpoint import Checkpoints
from fedloom.federation.folder import RunFolder
from fedloom.reporting.runs import read_run
from fedloom.runner import assemble
from fedloom.runner.open_federation import check_begun_open, check_changes

FREE_ON_RESUME = (
    ("runtime",),
    ("storage",),
    ("tracking",),
    ("data", "root"),
    ("data", "source", "path"),
    ("federation", "rounds"),
    ("federation", "deadline_s"),
    ("federation", "attempts"),
    ("federation", "checkpoint_every_s"),
)
"""Settings that may change on resume, since they do not affect results.

:func:`check_partition` verifies that data read from another path are the same. Client states do not move to another
``storage``; see :func:`check_states`.
"""


def check_folder(
    folder: RunFolder, e: Experiment, resume: bool, where: str | None = None, *, is_open: bool = False
) -> bool:
    """Return whether there is a run to resume.

    Parameters
    ----------
    where
        Location of the run to show to the user; None: its folder.
    is_open
        Whether it is an open federation, whose experiment may change on resume.

    Raises
    ------
    ExperimentError
        If the folder is in use and ``resume`` is false, or holds another experiment or more rounds than requested.
    """
    file = next((path for path in (folder.path, *folder.path.parents) if path.exists()), None)
    if file is not None and not file.is_dir():
        raise ExperimentError(
            f"{argument('out')} must be a folder, and {file} is a file (got {folder.path}).", key="out"
        )
    before = folder.read("experiment.yaml")
    if before is None:
        if not folder.is_free():
            raise ExperimentError(
                f"{argument('out')} is {folder.path}, which is neither empty nor a run; choose a new folder.", key="out"
            )
        return False
    if not resume:
        raise ExperimentError(
            f"{folder.path}: found a run there already",
            hint=f"go on with {argument('resume')}, or choose another folder ({argument('out')})",
        )
    old = experiments.of_run(folder.path).located().model_dump(mode="json")
    new = e.located().model_dump(mode="json")
    for path in FREE_ON_RESUME:
        for tree in (old, new):
            inner: Any = tree
            for key in path[:-1]:
                inner = inner.get(key) or {}
            inner.pop(path[-1], None)
    if is_open:
        check_begun_open(folder)
        check_changes(old, new)
        return _enough_rounds(folder, e, where)
    changed = list(_differences(old, new))
    if changed:
        other = f"folder ({argument('out')})" if where is None else f"place ({argument('publish')})"
        raise ExperimentError(
            f"{argument('resume')}: {where or folder.path} holds another experiment:\n  " + "\n  ".join(changed[:10]),
            hint=f"resume with the same settings, or choose another {other}",
        )
    return _enough_rounds(folder, e, where)


def _enough_rounds(folder: RunFolder, e: Experiment, where: str | None) -> bool:
    """Return True; raise if the run has done more rounds than requested."""
    done = max(Checkpoints(folder.checkpoints).rounds(), default=0)
    if e.federation.rounds is not None and e.federation.rounds < done:
        raise ExperimentError(
            f"federation.rounds must be at least {done} with {argument('resume')}: so many has "
            f"{where or folder.path} done "
            f"(got {e.federation.rounds}).",
            key="federation.rounds",
            found=e.federation.rounds,
        )
    return True


def finished(folder: RunFolder, e: Experiment) -> dict[str, Any] | None:
    """Return the summary of a run that has completed its rounds; None if it has not.

    Return None, too, if its results cannot be read: they are then recomputed from its last checkpoint.

    Raises
    ------
    DataError
        If its last checkpoint is damaged.
    """
    rounds, checkpoints = e.federation.rounds, Checkpoints(folder.checkpoints)
    if rounds is None or not folder.has("summary.json") or max(checkpoints.rounds(), default=None) != rounds:
        return None
    try:
        read_run(folder.path)
        summary = folder.json("summary.json")
    except DataError:
        return None
    # A run resumed with more rounds has continued past this end.
    went_on = any(isinstance(t := line.get("round"), int) and t > rounds for line in folder.objects("journal.jsonl"))
    if summary.get("rounds") != rounds or not isinstance(summary.get("name"), str) or went_on:
        return None
    checkpoints.load(rounds)
    return summary


def check_partition(folder: RunFolder, dataset: FederatedDataset) -> None:
    """Raise unless a resumed run uses the same partition as before.

    Raises
    ------
    DataError
        If the partition on disk is a different one.
    """
    before = folder.read("partition.json")
    if before is None:
        return
    begun_with = Manifest.from_json(before, where=str(folder.path / "partition.json")).fingerprint
    if begun_with != dataset.manifest.fingerprint:
        raise DataError(
            f"{argument('resume')}: the run was begun with partition {begun_with[:12]}, {dataset.folder} is now "
            f"{dataset.manifest.fingerprint[:12]}",
            hint=f"resume with the same FedLoom and data, or {NEW_RUN}",
        )


def check_states(folder: RunFolder, url: str | None) -> None:
    """Raise if the run's client states are elsewhere, since nothing copies them.

    Parameters
    ----------
    url
        URL to publish the run at; None: it is not published, and client states are in its folder.

    Raises
    ------
    ExperimentError
        If the run's client states are at another place.
    """
    if not folder.states.is_dir() and not (folder.path / "journal.jsonl").exists():
        return  # no round is complete, so no states are needed
    before = assemble.states_of(folder)
    now = str(folder.states) if url is None else f"{url}/states"
    if before != now:
        raise ExperimentError(
            f"{argument('resume')}: the run keeps its clients' states in {before}, where they must stay, and would "
            "go on "
            f"with {now}.",
            hint=f"resume with the same `storage` and {argument('publish')}, or {NEW_RUN}",
        )


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif old != new:
        yield f"{where}: the run has {old!r}, found {new!r}"
