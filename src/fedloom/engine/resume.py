"""Checks before a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedloom.data.federated import FederatedDataset
from fedloom.data.own import Own
from fedloom.engine.assemble import fixed_when_open, states_of
from fedloom.errors import NEW_RUN, DataError, ExperimentError, argument
from fedloom.experiment import Experiment
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.files import EXPERIMENT, JOURNAL, PARTITION, SUMMARY, checkpoint_files
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import SPENT, Replay

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
    ("federation", "privacy", "budget"),
)
"""Settings that may change on resume, since they do not affect results.

:func:`check_partition` verifies that data read from another path are the same. Client states do not move to another
``storage``; see :func:`check_states`.
"""


def check_folder(
    folder: RunFolder, e: Experiment, resume: bool, source: str | None = None, *, is_open: bool = False
) -> bool:
    """Return whether there is a run to resume.

    Messages name the run's place as ``source``, by default its folder. The experiment of an open federation
    (``is_open``) may change on resume.

    Raise ExperimentError if the folder is in use and ``resume`` is false, or holds another experiment or more rounds
    than requested.
    """
    if not _holds_run(folder):
        return False
    if not resume:
        raise ExperimentError(
            f"{folder.path} already holds a run.",
            hint=f"continue with {argument('resume')}, or choose another folder ({argument('out')})",
        )
    old, new = _fixed_settings(folder.experiment()), _fixed_settings(e)
    if is_open:
        check_begun_open(folder)
        check_changes(old, new)
    elif differences := list(_differences(old, new)):
        other = f"folder ({argument('out')})" if source is None else f"place ({argument('publish')})"
        raise ExperimentError(
            f"{argument('resume')}: {source or folder.path} holds another experiment:\n  "
            + "\n  ".join(differences[:10]),
            hint=f"resume with the same settings, or choose another {other}",
        )
    rounds_done = max(checkpoint_files(folder.checkpoints), default=0)
    if e.federation.rounds is not None and e.federation.rounds < rounds_done:
        raise ExperimentError(
            f"federation.rounds must be at least {rounds_done} with {argument('resume')}: {source or folder.path} has "
            f"already completed that many rounds (got {e.federation.rounds}).",
            key="federation.rounds",
            found=e.federation.rounds,
        )
    return True


def _holds_run(folder: RunFolder) -> bool:
    """Return True for a run's folder, and False for one where a run may start; raise if it is neither."""
    file = next((path for path in (folder.path, *folder.path.parents) if path.exists()), None)
    if file is not None and not file.is_dir():
        raise ExperimentError(
            f"{argument('out')} must be a folder, and {file} is a file (got {folder.path}).", key="out"
        )
    if folder.read(EXPERIMENT) is None and not folder.is_free():
        raise ExperimentError(
            f"{argument('out')} is {folder.path}, which is neither empty nor a run; choose a new folder.", key="out"
        )
    return folder.has(EXPERIMENT)


def _fixed_settings(e: Experiment) -> dict[str, Any]:
    """Return the settings that may not change on resume."""
    settings = e.located().model_dump(mode="json")
    privacy = settings["federation"]["privacy"]
    if privacy is not None and privacy["epsilon"] is not None:
        privacy.pop("noise_multiplier")  # a run's folder has the one that was found for ε
    for *above, last in FREE_ON_RESUME:
        inner: Any = settings
        for key in above:
            inner = inner.get(key) or {}
        inner.pop(last, None)
    return settings


def finished(folder: RunFolder, e: Experiment) -> dict[str, Any] | None:
    """Return the summary of a run that has completed its rounds; None if it has not, or its results cannot be read.

    Unreadable results are recomputed from the last checkpoint. Raise DataError if that is damaged.
    """
    rounds, checkpoints = e.federation.rounds, Checkpoints(folder.checkpoints)
    if rounds is None or not folder.is_finished:
        return None
    if _is_spent(folder, e):
        rounds = folder.json(SUMMARY)["rounds"]
    if max(checkpoints.rounds(), default=None) != rounds:
        return None
    try:
        summary = folder.json(SUMMARY)
        for check in (folder.manifest, folder.metrics, folder.clients):
            check()
    except DataError:
        return None
    # A run resumed with more rounds has continued past this end.
    lines = (line for line in folder.objects(JOURNAL) if line.get("outcome") != SPENT)
    went_on = any(isinstance(t := line.get("round"), int) and t > rounds for line in lines)
    if summary.get("rounds") != rounds or not isinstance(summary.get("name"), str) or went_on:
        return None
    checkpoints.load(rounds)
    return summary


def _is_spent(folder: RunFolder, e: Experiment) -> bool:
    """Return whether a run was ended by its privacy budget, and the budget has not changed since."""
    privacy, privacy_before = e.federation.privacy, folder.experiment().federation.privacy
    if privacy is None or privacy_before is None or privacy.budget != privacy_before.budget:
        return False
    return bool((folder.json_or_none(SUMMARY) or {}).get("ended_by") == "budget")


def check_partition(folder: RunFolder, dataset: FederatedDataset) -> None:
    """Raise DataError unless a resumed run uses the same partition as before."""
    if not folder.has(PARTITION):
        return
    begun_with = folder.manifest().fingerprint
    if begun_with != dataset.manifest.fingerprint:
        raise DataError(
            f"{argument('resume')}: the run was started with partition {begun_with[:12]}, and {dataset.folder} is now "
            f"{dataset.manifest.fingerprint[:12]}",
            hint=f"resume with the same FedLoom and data, or {NEW_RUN}",
        )


def check_states(folder: RunFolder, url: str | None) -> None:
    """Raise ExperimentError if the run's client states are at another place, since they are not copied.

    Their place follows from the ``url`` to publish the run at; None: they are in the run's folder.
    """
    if not folder.states.is_dir() and not folder.has(JOURNAL):
        return  # no round is complete, so no states are needed
    old_states = states_of(folder)
    now = str(folder.states) if url is None else f"{url}/states"
    if old_states != now:
        raise ExperimentError(
            f"{argument('resume')}: the run keeps its clients' states in {old_states}, where they must stay, and would "
            f"continue with {now}.",
            hint=f"resume with the same `storage` and {argument('publish')}, or {NEW_RUN}",
        )


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield f"{path} is {new!r}, and the run has {old!r}"


# --- open federations -------------------------------------------------------------------------------------------------


def check_changes(old: dict[str, object], new: dict[str, object]) -> None:
    """Raise ExperimentError if a setting has changed that must stay the same on resume of an open federation.

    These are the name, seed, model, method and data section; ``old`` and ``new`` are resolved experiments.
    """
    old_fixed, new_fixed = fixed_when_open(old), fixed_when_open(new)
    differences = [
        f"{key}: the run has {old_fixed[key]!r}, and the experiment {new_fixed[key]!r}"
        for key in old_fixed
        if old_fixed[key] != new_fixed[key]
    ]
    if differences:
        raise ExperimentError(
            f"{argument('resume')}: these settings cannot change on resume:\n  " + "\n  ".join(differences),
            hint=f"resume with the same, or {NEW_RUN}",
        )


def check_begun_open(folder: RunFolder) -> None:
    """Raise ExperimentError if a run to resume as an open federation was started with a fixed set of packed folders."""
    first = next(iter(folder.objects("journal.jsonl")), None)
    if first is not None and "experiment" not in first:
        raise ExperimentError(
            f"{argument('resume')}: {folder.path} is a run with a fixed set of clients, which an aggregator cannot "
            "resume.",
            hint=f"choose another folder ({argument('out')}), or continue it with `fedloom run --data ...`",
            key="resume",
        )


def check_replay(replay: Replay, own: Own | None) -> None:
    """Raise ExperimentError if an open federation is replayed without ``data.own``.

    Raise DataError if the journal of an open federation has no round.
    """
    if replay.is_open and own is None:
        raise ExperimentError(
            f"{argument('replay')} names an open federation: give an experiment with data.own, and the folders of its "
            f"clients with {argument('packed')}.",
            key="replay",
        )
    if replay.is_open and not replay.rounds:
        raise DataError("The journal to replay has no rounds.")
