"""Execution of a run from experiment to report, for ``fedloom run`` and ``fedloom aggregator``."""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.algorithms.base import find_algorithm
from fedloom.data.federated import FederatedDataset
from fedloom.data.own import Own
from fedloom.errors import DataError, ExperimentError, FedloomError, argument
from fedloom.experiment import Experiment
from fedloom.federation.activity import Monitor
from fedloom.federation.carrier import Carrier
from fedloom.federation.control import NAME as CONTROL
from fedloom.federation.control import Control
from fedloom.federation.loop import Observer
from fedloom.federation.roster import AvailableClients, ReplayedRoster, Roster
from fedloom.logs import lines_about
from fedloom.runner import assemble, results
from fedloom.runner.distributed import serving, with_workers
from fedloom.runner.log_file import log_kept
from fedloom.runner.observer import Observers, RunObserver
from fedloom.runner.open_federation import (
    ReplaySegment,
    begun,
    check_replay,
    is_known,
    known_normalization,
    open_manifest,
    own_of,
    replayed,
)
from fedloom.runner.options import RunOptions
from fedloom.runner.resume import check_folder, check_partition, check_states, finished
from fedloom.runner.serve import DurableRounds
from fedloom.runner.stop_request import StopRequest
from fedloom.runner.tracking import TrackerObserver, find_trackers
from fedloom.runner.worker_processes import Workers
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Replay
from fedloom.runs.publisher import Publisher
from fedloom.storage import Store, is_url, open_store
from fedloom.storage.folder import storing
from fedloom.transport.address import dialable
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.personalization import Personalization, ServingLimits
from fedloom.trust.audit import Audit
from fedloom.trust.options import Protection, ServerOptions
from fedloom.trust.tokens import make_token

log = logging.getLogger("fedloom.run")


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes
    ----------
    folder
        Folder with all results (docs/evaluation.md).
    summary
        Content of ``summary.json``.
    report
        Path or URL of the report; None if there is none.
    """

    folder: Path
    summary: dict[str, Any]
    report: str | None


def run_experiment(
    experiment: Experiment, options: RunOptions | None = None, observer: RunObserver | None = None
) -> RunResult:
    """Run an experiment, from its data to its report.

    Parameters
    ----------
    experiment
        Experiment to run (:func:`fedloom.experiment.load`).
    options
        Execution options; by default, a folder named after the experiment, and workers as in ``runtime``.
    observer
        Receives the run's progress.

    Raises
    ------
    FedloomError
        An error of the class that describes what went wrong (docs/exit-codes.md).
    """
    started = time.perf_counter()
    e, options = experiment, options or RunOptions()
    folder = RunFolder(options.out or e.runs / f"{e.name}-{e.algorithm.name}-seed{e.seed}")
    trackers = find_trackers(dict.fromkeys((*e.tracking, *options.track)))
    observer = TrackerObserver(observer or RunObserver(), trackers, folder.path)
    own = own_of(e)
    is_open = own is not None and options.listen is not None
    resume = check_folder(folder, e, options.resume, is_open=is_open)
    # Our own workers authenticate with a token that nobody else has; external workers as the options say.
    token = make_token()
    protection = Protection(ServerOptions(token=token) if options.listen is None else options.protection)
    audit = Audit()
    assemble.use_device(e.runtime.device if options.listen is None else "cpu", e.runtime.threads)
    repeated = Replay(_existing(options.replay)) if options.replay is not None else None
    if repeated is not None:
        check_replay(repeated, own, listen=options.listen)
        if e.federation.rounds and not repeated.is_open:
            repeated.attempt(e.federation.rounds)  # raise now, not at its end, if the journal is too short
    dataset = None if is_open else _dataset(e, options, own)
    if dataset is not None:
        manifest = dataset.manifest
    else:
        assert own is not None
        manifest = open_manifest(e, own, known_normalization(own, folder))
    parts = assemble.make_parts(e, manifest)
    url = _published_at(options, e, folder)
    stateful = parts.client_half().stateful

    def check(found: RunFolder, where: str | None = None) -> None:
        """Raise unless the run in a folder can be resumed here."""
        if check_folder(found, e, options.resume, where, is_open=is_open):
            if dataset is not None:
                check_partition(found, dataset)
            if stateful:
                check_states(found, url)

    check(folder)
    store = None if url is None else _place(url, options.resume)
    incarnation = uuid.uuid4().hex
    with ExitStack() as held:
        keep_log = held.enter_context(log_kept(alone=True))
        published = None
        if store is not None:
            published = Publisher(folder, store, incarnation)
            if options.resume:
                held.enter_context(folder.held())
                resume = published.restore(partial(check, where=url)) or resume
        before = finished(folder, e) if resume else None
        if own is not None and is_open and (known := known_normalization(own, folder)) is not None:
            parts = assemble.make_parts(e, open_manifest(e, own, known))  # the published run may have it

        def prepare() -> None:
            """Create the run's folder, once nothing but the work itself can fail."""
            if store is None or not options.resume:
                held.enter_context(folder.held())
            folder.make(e.located().resolved_yaml())
            keep_log(folder.logs / "aggregator.jsonl")
            if not is_open or is_known(parts.manifest):
                folder.write("partition.json", parts.manifest.to_json())
            folder.write_json("environment.json", assemble.fingerprint(e))
            if options.listen is not None and protection.access is not None:
                audit.keep(options.audit or folder.logs / "audit.jsonl")
            if url is not None:
                folder.write_json("published.json", {"url": url})
            else:  # it may have been published before
                _remove(folder, "published.json")
            if control is not None:
                control.keep(folder)
                if (pause := control.paused) is not None:
                    observer.notice(f"paused by {pause.by}: `fedloom federation resume` has the rounds go on")
            else:  # no operator could resume it, and starting it here implies resuming
                _remove(folder, CONTROL)

        monitor = Monitor(e.name, e.algorithm.name, e.federation.rounds, incarnation)
        held.enter_context(lines_about(monitor.about))
        stop_request = StopRequest(observer, monitor)
        control = Control(monitor, stop_request.operator) if options.listen is not None else None
        # The folder of a pod disappears before anyone can read it.
        kept = str(folder.path) if url is None or options.listen is None else url
        observer.started(e, len(parts.manifest.clients), kept)
        held.callback(observer.ended)
        if options.resume and not resume:
            observer.notice(f"nothing to resume at {kept}: starting at round 0")
        presence = AvailableClients() if is_open else None
        serve = partial(
            serving,
            parts,
            protection=protection,
            audit=audit,
            incarnation=incarnation,
            grace_s=options.finished_grace_s,
            say=observer.notice,
            lingers=options.listen is not None,
            resumed=bool(resume),
            presence=presence,
            monitor=monitor,
            control=control,
            models=_models(folder, e, audit) if options.listen is not None else None,
            health=options.health,
            metrics=options.metrics,
            stay=stop_request.wait if options.stay else None,
        )
        if before is not None:
            if store is None:
                held.enter_context(folder.held())
            made = Checkpoints(folder.checkpoints)
            for durable in made.rounds()[-1:]:  # status and metrics show it as in the run itself
                last = folder.last_evaluation()
                monitor.resume(durable, None if last is None else last[0], made.written_at(durable))
            with serve(options.listen) if options.listen is not None else nullcontext() as at:
                if at is not None:  # tell workers that have missed the end
                    at.notices.tell("training", "finished before", round=e.federation.rounds)
                observer.notice(f"finished before, after round {e.federation.rounds}")
                reported = _complete(folder, published, url, options, observer)
            return RunResult(folder.path, before, f"{kept}/report.html" if reported else None)
        with ExitStack() as serves:
            in_hand = options.listen is None and (e.runtime.workers == 0 or (repeated is not None and repeated.is_open))
            if in_hand:
                assert dataset is not None
                prepare()
                carrier: Carrier = assemble.in_process(parts, dataset, folder)
                told: Observer = observer
                hands = _own_hands(stop_request)
                tell = None
            else:
                listen = options.listen or "127.0.0.1:0"
                at = serves.enter_context(serve(listen))
                prepare()
                carrier, told, tell = at.server, Observers(observer, at.notices), at.notices.tell
                workers = None
                if dataset is None:
                    observer.notice(f"waiting for: fedloom worker --aggregator {dialable(at.address)} --data DIR")
                elif options.listen is None:
                    where = options.partition or str(dataset.folder)
                    whose = options.serves or ["--partition", where]
                    factory = getattr(e.model, "factory", None)
                    states = assemble.states_of(folder)
                    workers = partial(Workers, e.runtime, whose, states, folder.logs, token, factory)
                else:
                    kept_at = assemble.states_of(folder) if stateful and url is not None else None
                    where = options.partition or str(dataset.folder)
                    observer.waiting_for_workers(dialable(at.address), where, kept_at)
                hands = with_workers(at, parts, workers, stop_request, options.wait_s, options.orphan_after_s)
            signals = stop_request.signals() if options.signals else nullcontext()
            with _logs_kept(published), signals, hands:
                after = None if published is None else published.publish
                legs: list[ReplaySegment] = [ReplaySegment(parts)]
                roster: Roster | None = None
                if own is not None and isinstance(carrier, Aggregator) and presence is not None:
                    told_of = (stop_request.event, observer.notice, monitor)
                    parts, roster = begun(parts, own, carrier, presence, folder, *told_of)
                    legs = [ReplaySegment(parts)]
                elif repeated is not None and repeated.is_open:
                    legs = replayed(e, repeated, parts.manifest)
                earlier_s = 0.0
                for number, leg in enumerate(legs):
                    if repeated is not None and repeated.is_open and dataset is not None:
                        roster = ReplayedRoster(leg.parts.manifest, repeated)
                        carrier = assemble.in_process(leg.parts, dataset, folder)
                    loop = assemble.loop(
                        leg.parts,
                        carrier,
                        folder,
                        told,
                        stop_request.event,
                        repeated,
                        after=after,
                        roster=roster,
                        upto=leg.upto,
                        measure_last=leg.measured,
                        monitor=monitor,
                        control=control,
                        keep_release=None if published is None else published.keep_release,
                    )
                    if resume or number:
                        loop.resume()
                        earlier_s = loop.training_seconds()
                        observer.resumed(loop.round)
                        if tell is not None:
                            tell("training", f"resuming after round {loop.round}", round=loop.round)
                    if leg is not legs[-1]:
                        loop.advance()
                gc.freeze()  # imported objects are never garbage; scanning them would slow every collection
                log.info("ready to train after %.2f s", time.perf_counter() - started)
                try:
                    final = loop.run()
                finally:
                    gc.unfreeze()  # the process may run more experiments and must free this one's objects
            if published is not None:  # the previous aggregator may have asked clients after this one took over
                published.gather_releases()
            _remove(folder, "report.html")  # a report must match the summary beside it
            if not loop.roster.fixed:
                folder.write("partition.json", loop.manifest.to_json())
            summary = results.conclude(legs[-1].parts, loop, final, earlier_s + time.perf_counter() - started)
            reported = options.report and _report(folder, observer)
            folder.tidy()
            if published is not None:
                published.finish()
                folder.write_json("published.json", {"url": url, "finished": True})
    return RunResult(folder.path, summary, f"{kept}/report.html" if reported else None)


def _models(folder: RunFolder, e: Experiment, audit: Audit) -> Personalization:
    """Return a service for models of the last durable round; it loads nothing before the first request."""
    limits = ServingLimits(threads=e.runtime.threads)
    return Personalization(DurableRounds(folder, patient=True), limits, audit, lazy=True)


def check_roster(experiment: Experiment, options: RunOptions) -> None:
    """Raise if the method cannot train on some client, before anything else runs.

    The partition is read, and created if necessary, only if the method does not accept every client.

    Raises
    ------
    ExperimentError
        Names the first such client and the reason.
    """
    method = experiment.algorithm
    if (
        find_algorithm(method.name).check_client(method.settings, 1, 1) is not None
    ):  # the minimum that a client can have
        _dataset(experiment, options, own_of(experiment))


def _dataset(e: Experiment, options: RunOptions, own: Own | None) -> FederatedDataset:
    """Return the data of a run whose clients are all known."""
    if options.data or options.observe:
        if options.partition is not None:
            raise ExperimentError(
                f"{argument('partition')} cannot be combined with {argument('packed')}.", key="partition"
            )
        found = None
        if own is not None and options.replay is not None:
            found = RunFolder(options.replay).manifest().normalization
        return assemble.open_own(e, options.data, options.observe, found)
    if options.partition is None:
        return assemble.make_partition(e)
    return assemble.open_partition(e, options.partition, verify=options.listen is None)


def _published_at(options: RunOptions, e: Experiment, folder: RunFolder) -> str | None:
    """Return the URL to publish the run at; None if it is not published."""
    if options.publish is not None:
        if not is_url(options.publish):
            raise ExperimentError(
                f"{argument('publish')} must be a store, such as s3://BUCKET/PREFIX (got {options.publish}).",
                key="publish",
                found=options.publish,
            )
        return options.publish.rstrip("/")
    if e.storage is not None and is_url(e.storage):
        return f"{e.storage.rstrip('/')}/runs/{options.name or folder.path.resolve().name}"
    return None


def _place(url: str, resume: bool) -> Store:
    """Return the store to publish at, after checking access and that it holds no run, unless resuming.

    Raises
    ------
    ExperimentError
        If it holds a run already, and this is not a resume.
    StorageError, RefusedError
        If the store cannot be used.
    """
    store = open_store(url)
    store.check()
    if not resume and any(store.entries("published/")):
        raise ExperimentError(
            f"{url}: found a run there already",
            hint=f"go on with {argument('resume')}, or choose another place ({argument('publish')})",
        )
    return store


@contextmanager
def _own_hands(stop_request: StopRequest) -> Iterator[None]:
    """Train in this process."""
    stop_request.training = True
    yield


@contextmanager
def _logs_kept(published: Publisher | None) -> Iterator[None]:
    """Publish the logs of a run that fails; its user may have no other way to read them."""
    try:
        yield
    except FedloomError as error:
        log.error("%s", error)
        if published is not None:
            try:
                published.log_files()
            except FedloomError as another:
                log.warning("the logs could not be published: %s", another)
        raise


def _existing(path: Path) -> RunFolder:
    if not (path / "journal.jsonl").is_file():
        raise DataError(f"{path}: not a run's folder (no journal.jsonl)")
    return RunFolder(path)


def _remove(folder: RunFolder, name: str) -> None:
    path = folder.path / name
    with storing(path, "removed"):
        path.unlink(missing_ok=True)


def _complete(
    folder: RunFolder, published: Publisher | None, url: str | None, options: RunOptions, observer: RunObserver
) -> bool:
    """Write and publish the report of a finished run if missing; return whether there is a report."""
    whole = published is None or published.finished
    reported = (folder.path / "report.html").exists()
    if options.report and not (reported and whole):  # publishing includes the figures
        reported = _report(folder, observer)
    if published is not None and not whole:
        folder.write_json("published.json", {"url": url})
        published.finish()
    if published is not None:
        folder.write_json("published.json", {"url": url, "finished": True})
    return reported


def _report(folder: RunFolder, observer: RunObserver) -> bool:
    """Write the report; return whether there is one."""
    from fedloom.reporting.report import write_report

    try:
        write_report(folder.path)
    except ExperimentError as error:  # a dependency is missing; the run is complete without a report
        observer.notice(f"no report: {error}")
        return False
    return True
