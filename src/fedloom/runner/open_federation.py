"""Manifest and checks for experiments whose clients bring their own data."""

from __future__ import annotations

import json

from fedloom.core import digests
from fedloom.data.input_spec import Normalization
from fedloom.data.manifest import Manifest
from fedloom.data.own import own_manifest, own_normalization
from fedloom.data.requirements import Given, Own
from fedloom.errors import NEW_RUN, DataError, ExperimentError, argument
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.question import combined_digest
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Replay


def own_of(experiment: Experiment) -> Own | None:
    """Return the requirements on every client's data; None without ``data.own``."""
    return experiment.data.own if isinstance(experiment.data, OwnData) else None


def known_normalization(own: Own, folder: RunFolder) -> Normalization | None:
    """Return the normalization if it is given, not needed, or was measured at the start of the run; else None.

    Raise DataError if the run's manifest is damaged.
    """
    if isinstance(own.normalization, Given) or not own.numbers:
        return own_normalization(own, ())
    before = folder.read("partition.json")
    return None if before is None else Manifest.from_json(before, where=str(folder.path / "partition.json")).figures


def open_manifest(experiment: Experiment, own: Own, found: Normalization | None) -> Manifest:
    """Return a manifest without clients, and without a normalization if it is not known yet."""
    return own_manifest(own, (), experiment.seed, Normalization((), ()) if found is None else found)


def has_normalization(manifest: Manifest) -> bool:
    """Return whether the manifest's normalization is known."""
    return len(manifest.figures.mean) == manifest.numbers


def check_changes(old: dict[str, object], new: dict[str, object]) -> None:
    """Raise ExperimentError if a setting has changed that must stay the same on resume of an open federation.

    These are the name, seed, model, method and data section; ``old`` and ``new`` are resolved experiments.
    """
    before, after = _fixed(old), _fixed(new)
    changed = [
        f"{key}: the run has {before[key]!r}, and the experiment {after[key]!r}"
        for key in before
        if before[key] != after[key]
    ]
    if changed:
        raise ExperimentError(
            f"{argument('resume')}: these settings cannot change on resume:\n  " + "\n  ".join(changed),
            hint=f"resume with the same, or {NEW_RUN}",
        )


def _fixed(tree: dict[str, object]) -> dict[str, object]:
    """Return the settings that stay the same on resume of an open federation."""
    algorithm = tree["algorithm"]
    assert isinstance(algorithm, dict)
    kept = {key: tree[key] for key in ("name", "seed", "data", "model")}
    return {**kept, "algorithm.name": algorithm["name"]}


def run_digest(experiment: Experiment) -> str:
    """Return a digest of the settings that stay the same on resume, except the name, which affects no answer.

    Runs with equal digests may ask a client for the same answers.
    """
    fixed = {key: value for key, value in _fixed(json.loads(experiment.shared_json())).items() if key != "name"}
    return digests.short_digest(json.dumps(fixed, sort_keys=True).encode())


def answers_digest(experiment: Experiment, manifest: Manifest) -> bytes:
    """Return a digest of all settings that shape a client's answer, as one side of a federation knows them.

    Sides that differ only in a name, deadlines, or numbers of rounds and attempts have equal digests.
    """
    settings = json.loads(experiment.shared_json())
    shaping = ("clients_per_round", "lost_state", "privacy", "secure_aggregation")
    federation = {key: settings["federation"][key] for key in shaping}
    figures = manifest.figures
    described = {**settings, "name": "", "federation": federation, "figures": [figures.mean, figures.std]}
    return combined_digest(json.dumps(described, sort_keys=True))


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


def check_replay(replay: Replay, own: Own | None, listens: bool) -> None:
    """Raise ExperimentError if an open federation is replayed without ``data.own``, or by a run that listens.

    Raise DataError if the journal of an open federation has no round.
    """
    if listens and (replay.is_open or own is not None):
        raise ExperimentError(
            f"{argument('replay')} of clients with their own data needs `fedloom run --data`, not an aggregator.",
            key="replay",
        )
    if replay.is_open and own is None:
        raise ExperimentError(
            f"{argument('replay')} names an open federation: give an experiment with data.own, and the folders of its "
            f"clients with {argument('packed')}.",
            key="replay",
        )
    if replay.is_open and not replay.rounds:
        raise DataError("The journal to replay has no rounds.")
