"""Entry point of runs, and the kinds of runs: finished before, closed, open, and replayed."""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedloom import experiment as experiments
from fedloom.core.address import dialable
from fedloom.data.manifest import Manifest
from fedloom.data.spec import Normalization
from fedloom.engine.assemble import RunContext, in_process, make_parts, states_of
from fedloom.engine.distributed import Serving, Workers, welcome, with_workers
from fedloom.engine.engine import Engine, RunResult, write_report_if_possible
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions, WorkerOptions
from fedloom.engine.run_data import has_normalization, open_manifest
from fedloom.engine.sums import sums_part
from fedloom.errors import QuorumError
from fedloom.experiment import Experiment
from fedloom.federation.measuring import measured_normalization
from fedloom.federation.roster import POLL_S, AvailableClients, OpenRoster, ReplayedRoster
from fedloom.privacy.settings import SMALLEST_SUM
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.journal import Replay
from fedloom.transport.aggregator import Aggregator

log = logging.getLogger(__name__)


def run_experiment(
    experiment: Experiment, options: RunOptions | None = None, observer: RunObserver | None = None
) -> RunResult:
    """Run an experiment, from its data to its report.

    Parameters
    ----------
    experiment
        Experiment to run (:func:`fedloom.experiment.load_experiment`).
    options
        Execution options; by default, a folder named after the experiment, and workers as in ``runtime``.
    observer
        Receives the run's progress.

    Raises
    ------
    FedloomError
        An error of the class that describes what went wrong (docs/troubleshooting.md).
    """
    engine = Engine(experiment, options or RunOptions(), observer or RunObserver())
    with engine.opened():
        if engine.finished is not None:
            return run_finished(engine, engine.finished)
        if engine.is_open:
            return run_open(engine)
        if engine.replay is not None and engine.replay.is_open:
            return run_replay(engine, engine.replay)
        return run_closed(engine)


# --- finished before --------------------------------------------------------------------------------------------------


def run_finished(engine: Engine, summary: dict[str, Any]) -> RunResult:
    """Complete the report and publication of a finished run; an aggregator also announces the end to workers."""
    engine.hold_folder()
    _restore_status(engine)
    if not engine.listens:
        return _complete(engine, summary)
    with engine.served() as at:
        # Workers may have missed the end.
        at.notices.tell("training", "finished before")
        return _complete(engine, summary)


def _restore_status(engine: Engine) -> None:
    """Restore the status and metrics of the finished run."""
    made = Checkpoints(engine.folder.checkpoints)
    for durable in made.rounds()[-1:]:
        last = engine.folder.last_evaluation()
        engine.monitor.resume(durable, None if last is None else last[0], made.written_at(durable))


def _complete(engine: Engine, summary: dict[str, Any]) -> RunResult:
    engine.observer.notice(f"already finished, after round {engine.experiment.federation.rounds}")
    reported = (engine.folder.path / "report.html").exists()
    if engine.options.report and not (reported and engine.publication.is_whole):  # publishing includes the figures
        reported = write_report_if_possible(engine.folder, engine.observer)
    engine.publication.complete()
    return engine.result(summary, is_reported=reported)


# --- closed -----------------------------------------------------------------------------------------------------------


def run_closed(engine: Engine) -> RunResult:
    """Train the clients in this process, in the run's own worker processes, or in external workers."""
    if not engine.listens and engine.experiment.runtime.workers == 0:
        return _in_process(engine)
    with engine.served() as at:
        engine.make_folder()
        if engine.listens:
            workers = None
            _announce(engine, at)
        else:
            workers = _own_workers(engine)
        with engine.guarded(), with_workers(at, engine.parts, workers, engine.stop_request, engine.options.serving):
            loop = engine.loop(engine.parts, at.server)
            engine.resume(loop, at.notices)
            final = engine.train(loop)
        return engine.conclude(engine.parts, loop, final)


def _in_process(engine: Engine) -> RunResult:
    assert engine.dataset is not None
    engine.make_folder()
    transport = in_process(engine.parts, engine.dataset, engine.folder)
    with engine.guarded():
        engine.stop_request.training = True
        loop = engine.loop(engine.parts, transport)
        engine.resume(loop)
        final = engine.train(loop)
    return engine.conclude(engine.parts, loop, final)


def _announce(engine: Engine, at: Serving) -> None:
    """Show the user how external workers can connect to the run."""
    assert engine.dataset is not None
    states = states_of(engine.folder) if engine.stateful and engine.publication.url is not None else None
    where = engine.options.partition or str(engine.dataset.folder)
    engine.observer.waiting_for_workers(dialable(at.address), where, states)


def _own_workers(engine: Engine) -> partial[Workers]:
    """Return a function that starts the run's own workers; it lacks the address and ``on_failure``."""
    assert engine.dataset is not None
    e, options, runtime = engine.experiment, engine.options, engine.experiment.runtime
    brought, own = bool(options.packed or options.observe), runtime.model_dump(exclude={"workers"})
    worker = WorkerOptions(
        None if brought else options.partition or str(engine.dataset.folder),
        options.packed,
        options.observe,
        settings=tuple(f"runtime.{key}={experiments.as_yaml(value)}" for key, value in own.items()),
        states=states_of(engine.folder),
    )
    return partial(Workers, runtime.workers, worker, engine.folder.logs, engine.token, e.code)


# --- open -------------------------------------------------------------------------------------------------------------


def run_open(engine: Engine) -> RunResult:
    """Train the clients that are connected, round after round."""
    presence = AvailableClients()
    with engine.served(presence) as serving:
        engine.make_folder()
        engine.observer.notice(f"waiting for: fedloom worker --aggregator {dialable(serving.address)} --data DIR")
        with engine.guarded(), with_workers(serving, engine.parts, None, engine.stop_request, engine.options.serving):
            parts = _with_normalization(engine, serving.server, presence)
            roster = _roster(engine, serving.server, presence, parts.manifest)
            loop = engine.loop(parts, serving.server, roster)
            engine.resume(loop, serving.notices)
            final = engine.train(loop)
        return engine.conclude(parts, loop, final)


def _roster(engine: Engine, server: Aggregator, presence: AvailableClients, manifest: Manifest) -> OpenRoster:
    federation = engine.experiment.federation
    limits = federation.min_clients, federation.heartbeat_timeout_s
    stop, say = engine.stop_request.event, engine.observer.notice
    return OpenRoster(manifest, presence, *limits, stop, say, engine.monitor, server.silence, federation.min_replies)


def _with_normalization(engine: Engine, server: Aggregator, presence: AvailableClients) -> RunContext:
    """Return the parts once the normalization is known.

    If it is unknown, measure it on the connected clients as soon as there are enough, send it to the workers, and
    save it in the run's manifest.

    Raise QuorumError if no client sends the moments of its inputs. Raise InterruptedRun if the run is stopped while
    waiting.
    """
    if has_normalization(engine.parts.manifest):
        return engine.parts
    assert engine.own is not None
    found = _measured_normalization(engine, server, presence)
    parts = make_parts(engine.experiment, open_manifest(engine.experiment, engine.own, found))
    engine.folder.write("partition.json", parts.manifest.to_json())
    server.start_new_session(uuid.uuid4().hex, welcome(parts))
    return parts


def _measured_normalization(engine: Engine, server: Aggregator, presence: AvailableClients) -> Normalization:
    """Measure the normalization on the connected clients.

    If all of them are silent, wait for others. If they answer, but none sends its sums, wait for others for as long as
    an absent client stays in the roster.
    """
    assert engine.own is not None
    federation = engine.experiment.federation
    roster = _roster(engine, server, presence, engine.parts.manifest)
    if federation.secure_aggregation is not None:
        return _measured_securely(engine, server, presence, roster)
    refusing_clients: set[str] = set()
    over_at = math.inf
    while True:
        roster.settle(0, evaluating=True)
        apart = refusing_clients | server.silence.silent
        clients = {entry.id: entry.train for entry in roster.manifest.clients if entry.seen and entry.id not in apart}
        if clients:
            try:
                return measured_normalization(server, engine.own, clients, federation.deadline_s)
            except QuorumError as error:
                failure = error
            if new_clients := clients.keys() - server.silence.silent:
                refusing_clients |= new_clients
                over_at = time.monotonic() + federation.heartbeat_timeout_s
        elif time.monotonic() < over_at:
            presence.wait(POLL_S)
        else:
            raise failure


def _measured_securely(
    engine: Engine, server: Aggregator, presence: AvailableClients, roster: OpenRoster
) -> Normalization:
    """Measure the normalization in a secure sum over the connected clients that are not silent.

    It is not known which client makes a sum fail, so all are asked again, for as long as an absent client stays in the
    roster.
    """
    assert engine.own is not None
    federation = engine.experiment.federation
    secure = federation.secure_aggregation
    assert secure is not None
    over_at, attempts = math.inf, itertools.count()
    while True:
        roster.settle(0, evaluating=True)
        silent = server.silence.silent
        clients = {entry.id: entry.train for entry in roster.manifest.clients if entry.seen and entry.id not in silent}
        if len(clients) >= SMALLEST_SUM:
            try:
                return sums_part().securely_measured_normalization(
                    server,
                    engine.own,
                    clients,
                    secure,
                    deadline_s=federation.deadline_s,
                    stop=engine.stop_request.event,
                    attempt=next(attempts),
                )
            except QuorumError as error:
                over_at = min(over_at, time.monotonic() + federation.heartbeat_timeout_s)
                if time.monotonic() >= over_at:
                    raise
                log.warning("%s; trying again", error)
        presence.wait(POLL_S)


# --- replayed ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplaySegment:
    """Segment of a replayed run with one experiment: it ends with round ``upto``, evaluated if ``measured``."""

    parts: RunContext
    upto: int
    measured: bool = True


def run_replay(engine: Engine, replay: Replay) -> RunResult:
    """Repeat the rounds with the clients that took part, in one segment for each set of settings."""
    assert engine.dataset is not None
    engine.make_folder()
    with engine.guarded():
        engine.stop_request.training = True
        segments = replay_segments(engine.experiment, replay, engine.parts.manifest)
        for number, segment in enumerate(segments):
            transport = in_process(segment.parts, engine.dataset, engine.folder)
            roster = ReplayedRoster(segment.parts.manifest, replay)
            loop = engine.loop(segment.parts, transport, roster, segment.upto, measure_last=segment.measured)
            if number:
                loop.resume()  # from the checkpoint of the previous segment
            else:
                engine.resume(loop)
            if number + 1 < len(segments):
                loop.advance()
        final = engine.train(loop)
    return engine.conclude(segments[-1].parts, loop, final)


def replay_segments(experiment: Experiment, replay: Replay, manifest: Manifest) -> list[ReplaySegment]:
    """Return the segments to replay, one per experiment that the federation has had."""
    segments = []
    for this, following in itertools.zip_longest(replay.experiments, replay.experiments[1:]):
        parts = make_parts(experiments.from_shared_json(this.text, runtime=experiment.runtime), manifest)
        if following is None:
            segments.append(ReplaySegment(parts, replay.rounds))
        elif following.is_evaluation:
            segments.append(ReplaySegment(parts, following.round, measured=False))
        else:  # it may have stopped before a due evaluation that the next experiment omits
            upto = following.round - 1
            segments.append(ReplaySegment(parts, upto, measured=replay.evaluation(upto) is not None))
    return segments
