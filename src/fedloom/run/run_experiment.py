"""One run, from its experiment file to its report: what ``fedloom run`` and ``fedloom aggregator`` do."""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from fedloom.cli import reading
from fedloom.cli.watch import Observers, Watch, logged_to, results
from fedloom.errors import DataError, ExperimentError, FedloomError
from fedloom.experiment import Experiment
from fedloom.federation.carrier import Carrier
from fedloom.federation.folder import RunFolder
from fedloom.federation.journal import Journal, Replay
from fedloom.federation.loop import Observer
from fedloom.federation.published import Published
from fedloom.run import assemble
from fedloom.run.distributed import serving, with_workers
from fedloom.run.resume import check_folder, check_partition, check_states
from fedloom.run.stop_request import StopRequest
from fedloom.run.worker_processes import Workers
from fedloom.storage import Store, is_url, open_store
from fedloom.storage.folder import storing
from fedloom.words import counted

log = logging.getLogger("fedloom.run")


@dataclass(frozen=True)
class Order:
    """What a command was asked for.

    Attributes
    ----------
    experiment
        Path or URL of the experiment file.
    overrides
        ``key=value`` each.
    out
        The run's folder; None: one named after the experiment.
    resume
        Go on with what the folder holds, or with what is published.
    replay
        A run whose journal is repeated.
    partition
        Folder or URL of the partition; None: the experiment's is dealt here.
    publish
        URL to publish the run at; None: below ``storage``, where that is a store.
    name
        What the run is called there; None: as its folder.
    listen
        ``host:port`` where workers may come; None: the run has workers of its own.
    wait_s
        Seconds until every client must be served.
    orphan_after_s
        Seconds without a watcher after which the run stops; None: it need not be watched.
    finished_grace_s
        Seconds to wait at the end until watchers have been told.
    table
        Show the results.
    choosing
        Settings are being chosen: show no test accuracy.
    """

    experiment: str | Path
    overrides: tuple[str, ...] = ()
    out: Path | None = None
    resume: bool = False
    replay: Path | None = None
    partition: str | None = None
    publish: str | None = None
    name: str | None = None
    listen: str | None = None
    wait_s: float = 60.0
    orphan_after_s: float | None = None
    finished_grace_s: float = 5.0
    table: bool = True
    choosing: bool = False


def run_experiment(order: Order) -> None:
    """Make a run.

    Raises
    ------
    FedloomError
        Of the class of what went wrong (docs/exit-codes.md).
    """
    started = time.perf_counter()
    e = reading.experiment(order.experiment, order.overrides)
    folder = RunFolder(order.out or e.runs / f"{e.name}-{e.algorithm.name}-seed{e.seed}")
    resume = check_folder(folder, e, order.resume)
    assemble.use_device(e.runtime.device if order.listen is None else "cpu", e.runtime.threads)
    repeated = Replay(Journal.read(_existing(order.replay))) if order.replay is not None else None
    if repeated is not None and e.federation.rounds:
        repeated.attempt(e.federation.rounds)  # a journal that is too short is said now, not at its end
    if order.partition is None:
        dataset = assemble.make_partition(e)
    else:
        dataset = assemble.open_partition(e, order.partition, verify=order.listen is None)
    parts = assemble.make_parts(e, dataset.manifest)
    url = _published_at(order, e, folder)
    stateful = parts.client_half().stateful

    def check(found: RunFolder, where: str | None = None) -> None:
        """Whether the run in a folder is one that this may go on with."""
        if check_folder(found, e, order.resume, where):
            check_partition(found, dataset)
            if stateful:
                check_states(found, url)

    check(folder)
    store = None if url is None else _place(url, order.resume)
    incarnation = uuid.uuid4().hex
    with ExitStack() as held, Watch(e.federation.rounds, choosing=order.choosing) as watch:
        published = None
        if store is not None:
            published = Published(folder, store, incarnation)
            if order.resume:
                held.enter_context(folder.held())
                resume = published.take_up(partial(check, where=url)) or resume

        def prepare() -> None:
            """Make the run's folder, once nothing but the work itself can fail."""
            if store is None or not order.resume:
                held.enter_context(folder.held())
            folder.make(e.resolved_yaml())
            held.enter_context(logged_to(folder.logs / "aggregator.jsonl", alone=True))
            folder.write("partition.json", dataset.manifest.to_json())
            folder.write_json("environment.json", assemble.fingerprint(e))
            if url is not None:
                folder.write_json("published.json", {"url": url})
            else:  # it may have been published before
                _remove(folder, "published.json")

        stop_request = StopRequest(watch.say)
        place = folder.path if url is None or order.listen is None else url
        clients = counted(len(dataset.manifest.clients), "client")
        watch.say(f"{e.name}: {e.algorithm.name} on {e.data.dataset}, {clients}, {place}")
        if order.resume and not resume:
            watch.say(f"nothing to resume at {place}: starting at round 0")
        with ExitStack() as serves:
            if order.listen is None and e.runtime.workers == 0:
                prepare()
                carrier: Carrier = assemble.in_process(parts, dataset, folder)
                observer: Observer = watch
                hands = _own_hands(stop_request)
                tell = None
            else:
                listen = order.listen or "127.0.0.1:0"
                at = serves.enter_context(serving(parts, listen, incarnation, order.finished_grace_s, watch.say))
                prepare()
                carrier, observer, tell = at.server, Observers(watch, at.notices), at.notices.tell
                where = order.partition or str(dataset.folder)
                workers = None
                if order.listen is None:
                    workers = partial(Workers, e.runtime, where, assemble.states_of(folder), folder.logs)
                else:
                    kept = f" --states {assemble.states_of(folder)}" if stateful and url is not None else ""
                    watch.say(f"waiting for: fedloom worker --aggregator {at.address} --partition {where}{kept}")
                hands = with_workers(at, parts, workers, stop_request, order.wait_s, order.orphan_after_s)
            with _logs_kept(published), stop_request.signals(), hands:
                after = None if published is None else published.publish
                loop = assemble.loop(parts, carrier, folder, observer, stop_request.event, repeated, after=after)
                before = 0.0
                if resume:
                    loop.resume()
                    before = loop.training_seconds()
                    watch.say(said := f"resuming after round {loop.round}")
                    if tell is not None:
                        tell("training", said, round=loop.round)
                gc.freeze()  # what imports made is never garbage, and walking it would cost each collection
                log.info("ready to train after %.2f s", time.perf_counter() - started)
                final = loop.run()
            _remove(folder, "report.html")  # beside a summary, a report is of the same end
            summary = assemble.conclude(parts, loop, final, before + time.perf_counter() - started)
            reported = _report(folder, watch.say)
            if published is not None:
                published.finish()
                folder.write_json("published.json", {"url": url, "finished": True})
    if order.table:
        from rich.console import Console

        Console().print(results(summary))
        if reported:  # a folder in a pod is gone before anyone looks at it
            typer.echo(f"report: {place}/report.html")


def _published_at(order: Order, e: Experiment, folder: RunFolder) -> str | None:
    """Where the run is to be published, if it is."""
    if order.publish is not None:
        if not is_url(order.publish):
            raise ExperimentError(f"--publish: found {order.publish}; allowed: a store, such as s3://BUCKET/PREFIX")
        return order.publish.rstrip("/")
    if e.storage is not None and is_url(e.storage):
        return f"{e.storage.rstrip('/')}/runs/{order.name or folder.path.resolve().name}"
    return None


def _place(url: str, resume: bool) -> Store:
    """The store to publish at, which is there, lets us in, and holds no run unless it is to be resumed.

    Raises
    ------
    ExperimentError
        If there is a run already.
    StorageError, RefusedError
        If the store cannot be used.
    """
    store = open_store(url)
    store.check()
    if not resume and any(store.entries("published/")):
        raise ExperimentError(
            f"{url}: found a run there already", hint="go on with --resume, or choose another place with --publish"
        )
    return store


@contextmanager
def _own_hands(stop_request: StopRequest) -> Iterator[None]:
    """Training in this process."""
    stop_request.training = True
    yield


@contextmanager
def _logs_kept(published: Published | None) -> Iterator[None]:
    """Publish the logs of a run that fails; whoever started it may have no other way to read them."""
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


def _report(folder: RunFolder, say: Callable[[str], None]) -> bool:
    """Write the report; whether there is one now."""
    from fedloom.reporting.report import write_report

    try:
        write_report(folder.path)
    except ExperimentError as error:  # what it needs is not installed, and the run is whole without
        say(f"no report: {error}")
        return False
    return True
