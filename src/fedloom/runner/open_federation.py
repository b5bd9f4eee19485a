"""Open federations, in which clients with data of their own come and go, as the aggregator sees them."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from fedloom import experiment as experiments
from fedloom.data.manifest import Manifest, Normalization
from fedloom.data.own import Given, Own, own_manifest, own_normalization
from fedloom.errors import NEW_RUN, DataError, ExperimentError, QuorumError, argument
from fedloom.experiment import Experiment, OwnData
from fedloom.federation.activity import Monitor
from fedloom.federation.measuring import measured_normalization
from fedloom.federation.roster import POLL_S, AvailableClients, OpenRoster
from fedloom.runner import assemble
from fedloom.runner.assemble import RunContext
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Replay
from fedloom.transport.aggregator import Aggregator


def own_of(experiment: Experiment) -> Own | None:
    """Return the requirements on every client's data; None without ``data.own``."""
    return experiment.data.own if isinstance(experiment.data, OwnData) else None


def known_normalization(own: Own, folder: RunFolder) -> Normalization | None:
    """Return the normalization if it is given, not needed, or was measured when the run began; else None.

    Raises
    ------
    DataError
        If the run's manifest is damaged.
    """
    if isinstance(own.normalization, Given) or own.kind == "tokens":
        return own_normalization(own, ())
    before = folder.read("partition.json")
    return (
        None if before is None else Manifest.from_json(before, where=str(folder.path / "partition.json")).normalization
    )


def open_manifest(experiment: Experiment, own: Own, found: Normalization | None) -> Manifest:
    """Return a manifest without clients, and without a normalization if it is not known yet."""
    return own_manifest(own, (), experiment.seed, Normalization((), ()) if found is None else found)


def is_known(manifest: Manifest) -> bool:
    """Return whether the manifest's normalization is known."""
    return manifest.kind == "tokens" or bool(manifest.normalization.mean)


def begun(
    parts: RunContext,
    own: Own,
    server: Aggregator,
    presence: AvailableClients,
    folder: RunFolder,
    stop: threading.Event,
    say: Callable[[str], None],
    monitor: Monitor,
) -> tuple[RunContext, OpenRoster]:
    """Return the parts and the roster of an open federation once the normalization is known.

    If it is unknown, measure it on the connected clients as soon as there are enough, send it to the workers, and
    save it in the run's manifest.

    Raises
    ------
    QuorumError
        If no client sends the moments of its inputs.
    InterruptedRun
        If the run is stopped while waiting.
    """
    federation = parts.experiment.federation

    def roster_of(manifest: Manifest) -> OpenRoster:
        limits = federation.min_clients, federation.heartbeat_timeout_s
        return OpenRoster(manifest, presence, *limits, stop, say, monitor, server.silence)

    if not is_known(parts.manifest):
        roster = roster_of(parts.manifest)
        found = _measured(server, own, roster, presence, federation.deadline_s, federation.heartbeat_timeout_s)
        parts = assemble.make_parts(parts.experiment, open_manifest(parts.experiment, own, found))
        folder.write("partition.json", parts.manifest.to_json())
        server.start_new_session(uuid.uuid4().hex, assemble.welcome(parts))
    return parts, roster_of(parts.manifest)


def _measured(
    server: Aggregator, own: Own, roster: OpenRoster, presence: AvailableClients, deadline_s: float, patience_s: float
) -> Normalization:
    """Measure the normalization on the clients that are there.

    Where all of them are silent, wait for others; where they answer, and none tells its sums, wait for others for
    ``patience_s``.

    Raises
    ------
    QuorumError
        If nobody else has come by then.
    InterruptedRun
        If the run is stopped while waiting.
    """
    refused: set[str] = set()
    over_at = math.inf
    while True:
        roster.settle(0, evaluating=True)
        apart = refused | server.silence.silent
        clients = {entry.id: entry.train for entry in roster.manifest.clients if entry.seen and entry.id not in apart}
        if clients:
            try:
                return measured_normalization(server, own, clients, deadline_s)
            except QuorumError as error:
                failure = error
            if answered := clients.keys() - server.silence.silent:
                refused |= answered
                over_at = time.monotonic() + patience_s
        elif time.monotonic() < over_at:
            presence.wait(POLL_S)
        else:
            raise failure


@dataclass(frozen=True)
class ReplaySegment:
    """Segment of a replayed run with one experiment.

    Attributes
    ----------
    upto
        Round to stop at; None: as the experiment says.
    measured
        Whether that round is evaluated.
    """

    parts: RunContext
    upto: int | None = None
    measured: bool = True


def replayed(experiment: Experiment, replay: Replay, manifest: Manifest) -> list[ReplaySegment]:
    """Return the segments to replay, one per experiment that the federation has had."""
    legs = []
    texts = [text for _, text in replay.experiments]
    for i, text in enumerate(texts):
        shared = experiments.from_shared_json(text, runtime=experiment.runtime)
        parts = assemble.make_parts(shared, manifest)
        if i + 1 == len(texts):
            legs.append(ReplaySegment(parts, replay.rounds))
        elif replay.evaluation_begins(i + 1):
            legs.append(ReplaySegment(parts, replay.experiments[i + 1][0], measured=False))
        else:  # it may have stopped before a due evaluation that the next experiment omits
            upto = replay.experiments[i + 1][0] - 1
            legs.append(ReplaySegment(parts, upto, measured=replay.evaluation(upto) is not None))
    return legs


def check_changes(old: dict[str, object], new: dict[str, object]) -> None:
    """Raise if a setting changed that must stay the same on resume of an open federation.

    Parameters
    ----------
    old, new
        Resolved experiments, without ``runtime`` and ``storage``.

    Raises
    ------
    ExperimentError
        If the name, seed, model, method or data section differs.
    """

    def fixed(tree: dict[str, object]) -> dict[str, object]:
        algorithm = tree["algorithm"]
        assert isinstance(algorithm, dict)
        kept = {key: tree[key] for key in ("name", "seed", "data", "model")}
        return {**kept, "algorithm.name": algorithm["name"]}

    before, after = fixed(old), fixed(new)
    changed = [
        f"{key}: the run has {before[key]!r}, found {after[key]!r}" for key in before if before[key] != after[key]
    ]
    if changed:
        raise ExperimentError(
            f"{argument('resume')}: these settings cannot change on resume:\n  " + "\n  ".join(changed),
            hint=f"resume with the same, or {NEW_RUN}",
        )


def check_begun_open(folder: RunFolder) -> None:
    """Refuse to resume, as an open federation, a run that started with a fixed set of packed folders.

    Raises
    ------
    ExperimentError
        If the run started that way.
    """
    first = next(iter(folder.objects("journal.jsonl")), None)
    if first is not None and "experiment" not in first:
        raise ExperimentError(
            f"{argument('resume')}: {folder.path} is a run whose clients were all known, which an aggregator cannot "
            "resume.",
            hint=f"choose another folder ({argument('out')}), or go on with `fedloom run --data ...`",
            key="resume",
        )


def check_replay(replay: Replay, own: Own | None, listen: str | None) -> None:
    """Raise if the replay of an open federation is requested in an unsupported way.

    Raises
    ------
    ExperimentError
        If the experiment has no ``data.own``, or the run would listen for workers.
    DataError
        If the journal of an open federation has no round.
    """
    if listen is not None and (replay.is_open or own is not None):
        raise ExperimentError(
            f"{argument('replay')} of clients with data of their own needs `fedloom run --data`; an aggregator "
            "cannot do it.",
            key="replay",
        )
    if replay.is_open and own is None:
        raise ExperimentError(
            f"{argument('replay')} is of an open federation: the experiment needs data.own, and {argument('packed')} "
            "the "
            "clients' folders.",
            key="replay",
        )
    if replay.is_open and not replay.rounds:
        raise DataError("the journal to replay has no round")
