"""What a run may go on from: the checks of a folder, and of the partition a run was begun with."""

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
"""What may differ between a run and its resumption: none of it changes a number. That what is read at another path is
the same, the partition shows (:func:`check_partition`). Where clients keep states, these do not follow to another
``storage``: see :func:`check_states`."""


def check_folder(
    folder: RunFolder, e: Experiment, resume: bool, where: str | None = None, *, is_open: bool = False
) -> bool:
    """Whether there is a run to resume.

    Parameters
    ----------
    where
        The run's place as a person knows it; None: its folder.
    is_open
        Whether it is an open federation, whose experiment may change as it goes on.

    Raises
    ------
    ExperimentError
        If the folder is taken and not to be resumed, or holds another experiment, or more rounds than are asked for.
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
    """True, unless more rounds have been done than are asked for."""
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
    """Return the summary of a run that has come to the end of its rounds; None of one that has not.

    None, too, if its results cannot be read: they are made anew from its last checkpoint.

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
    # Resumed with more rounds, it has gone on.
    went_on = any(isinstance(t := line.get("round"), int) and t > rounds for line in folder.objects("journal.jsonl"))
    if summary.get("rounds") != rounds or not isinstance(summary.get("name"), str) or went_on:
        return None
    checkpoints.load(rounds)
    return summary


def check_partition(folder: RunFolder, dataset: FederatedDataset) -> None:
    """A resumed run goes on with the very examples it began with.

    Raises
    ------
    DataError
        If the partition on disk is another.
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
    """The states that clients keep stay where they are: nothing copies them to another place.

    Parameters
    ----------
    url
        Where the run is to be published; None: nowhere, and the clients' states are in its folder.

    Raises
    ------
    ExperimentError
        If the run has kept them elsewhere.
    """
    if not folder.states.is_dir() and not (folder.path / "journal.jsonl").exists():
        return  # no round has counted, so none of them is needed
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
