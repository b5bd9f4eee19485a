"""``fedloom run`` and ``fedloom aggregator``: the same round loop, with workers of its own or workers that come."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedloom.cli.compose import Parts
    from fedloom.cli.watch import Watch
    from fedloom.data.federated import FederatedDataset
    from fedloom.experiment import Experiment
    from fedloom.federation.folder import RunFolder

log = logging.getLogger("fedloom.run")

ExperimentFile = Annotated[Path, typer.Argument(help="The experiment file.", metavar="EXPERIMENT")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file; repeatable.")
]
Out = Annotated[
    Path | None, typer.Option(help="The run's folder; by default runs/NAME-ALGORITHM-seedN.", metavar="DIR")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the folder.")]
ReplayRun = Annotated[
    Path | None,
    typer.Option("--replay", metavar="RUN", help="Repeat the journal of a run: same cohorts, same losses, same bits."),
]

FREE_ON_RESUME = (
    ("runtime",),
    ("storage",),
    ("data", "root"),
    ("federation", "rounds"),
    ("federation", "deadline_s"),
    ("federation", "attempts"),
    ("federation", "checkpoint_every_s"),
)
"""What may differ between a run and its resumption: none of it changes a number."""

WORKERS_COME_S = 60.0
STOP_GRACE_S = 15.0


def run(
    experiment: ExperimentFile,
    set_: Set = None,
    out: Out = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes; 0 trains in this process.", min=0, metavar="N")
    ] = None,
    resume: Resume = False,
    replay: ReplayRun = None,
    seeds: Annotated[str | None, typer.Option(help="Run once with each seed: 1,2,3 or 1-3.", metavar="N,N,...")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Run with each of these values; repeat it for more keys.", metavar="KEY=VALUE,VALUE,..."),
    ] = None,
) -> None:
    """Run an experiment on this machine; with --seeds or --grid, at every point, and compare."""
    overrides = [*(set_ or ()), *([f"runtime.workers={workers}"] if workers is not None else ())]
    if seeds is None and not grid:
        _conduct(experiment, overrides, out, resume, replay, listen=None, wait_s=WORKERS_COME_S)
        return
    if replay is not None:
        from fedloom.errors import ExperimentError

        raise ExperimentError("--replay: found with --seeds or --grid; allowed: with a single run")
    _sweep(experiment, overrides, out, resume, seeds, grid or ())


def aggregator(
    experiment: ExperimentFile,
    listen: Annotated[str, typer.Option(help="Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7733",
    set_: Set = None,
    out: Out = None,
    resume: Resume = False,
    replay: ReplayRun = None,
    wait: Annotated[float, typer.Option(help="Seconds until workers must serve every client.", metavar="S")] = 600.0,
) -> None:
    """Run an experiment's rounds with workers that connect (`fedloom worker`)."""
    _conduct(experiment, set_ or (), out, resume, replay, listen=listen, wait_s=wait)


def _sweep(
    path: Path, overrides: Sequence[str], out: Path | None, resume: bool, seeds: str | None, grid: Sequence[str]
) -> None:
    """Run every point that is not finished yet; one that fails does not keep the others from running."""
    from fedloom.cli import sweep
    from fedloom.errors import ExperimentError, InterruptedRun, QuorumError
    from fedloom.federation.folder import RunFolder

    points = sweep.points(path, overrides, seeds, grid)
    first = points[0].experiment
    folder = out or first.runs / f"{first.name}-sweep"
    if (folder / "experiment.yaml").exists():
        raise ExperimentError(f"--out: found {folder}, which is a run; allowed: a sweep's folder, or a new one")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise ExperimentError(
            f"{folder}: found a sweep there already", hint="go on with --resume, or choose another folder with --out"
        )
    for point in points:  # all folders fit before anything runs
        _check_folder(RunFolder(folder / point.name), point.experiment, resume)
    failures: list[QuorumError] = []
    for number, point in enumerate(points, start=1):
        where = f"run {number} of {len(points)}, {point.name}"
        if sweep.finished(folder / point.name, point.experiment):
            typer.echo(f"{where}: finished before", err=True)
            continue
        typer.echo(f"{where}", err=True)
        try:
            _conduct(
                path,
                point.overrides,
                folder / point.name,
                resume,
                None,
                listen=None,
                wait_s=WORKERS_COME_S,
                table=False,
                choosing=bool(grid),
            )
        except QuorumError as error:  # as after a step size that is too large: a result, too
            typer.echo(f"{where}: failed: {error}", err=True)
            failures.append(error)
        except InterruptedRun as error:
            raise InterruptedRun(f"{error} ({where}; {number - 1} done)") from error
    if len(failures) < len(points):
        sweep.conclude(folder)
    if failures:
        raise QuorumError(f"{len(failures)} of {len(points)} runs failed; the first: {failures[0]}")


def _conduct(
    path: Path,
    overrides: Sequence[str],
    out: Path | None,
    resume: bool,
    replay: Path | None,
    *,
    listen: str | None,
    wait_s: float,
    table: bool = True,
    choosing: bool = False,
) -> None:
    from fedloom import experiment as experiments
    from fedloom.cli import compose
    from fedloom.cli.watch import Watch, logged_to, results
    from fedloom.federation.folder import RunFolder
    from fedloom.federation.journal import Journal, Replay

    started = time.perf_counter()
    e = experiments.load(path, overrides)
    folder = RunFolder(out or e.runs / f"{e.name}-{e.algorithm.name}-seed{e.seed}")
    resume = _check_folder(folder, e, resume)
    compose.use_device(e.runtime.device if listen is None else "cpu", e.runtime.threads)
    repeated = Replay(Journal.read(_existing(replay))) if replay is not None else None
    if repeated is not None and e.federation.rounds:
        repeated.attempt(e.federation.rounds)  # a journal that is too short is said now, not at its end
    dataset = compose.dealt(e)
    these = compose.parts(e, dataset.manifest)
    _check_partition(folder, dataset)

    def prepare() -> None:
        """Make the run's folder, once nothing but the work itself can fail."""
        held.enter_context(folder.held())
        folder.make(e.resolved_yaml())
        held.enter_context(logged_to(folder.logs / "aggregator.jsonl", alone=True))
        folder.write("partition.json", dataset.manifest.to_json())
        folder.write_json("environment.json", compose.fingerprint(e))

    stop = threading.Event()
    with ExitStack() as held, Watch(e.federation.rounds, choosing=choosing) as watch:
        watch.say(
            f"{e.name}: {e.algorithm.name} on {e.data.dataset}, {len(dataset.manifest.clients)} clients, {folder.path}"
        )
        with _carried(these, dataset, folder, prepare, stop, watch, listen, wait_s) as carrier:
            loop = compose.loop(these, carrier, folder, watch, stop, repeated)
            before = 0.0
            if resume:
                loop.resume()
                before = loop.training_seconds()
                watch.say(f"resuming after round {loop.round}")
            gc.freeze()  # what imports made is never garbage, and walking it would cost each collection
            log.info("ready to train after %.2f s", time.perf_counter() - started)
            final = loop.run()
        summary = compose.conclude(these, loop, final, before + time.perf_counter() - started)
    _report(folder)
    if table:
        from rich.console import Console

        Console().print(results(summary))
        typer.echo(f"report: {folder.path / 'report.html'}")


@contextmanager
def _carried(
    these: Parts,
    dataset: FederatedDataset,
    folder: RunFolder,
    prepare: Callable[[], None],
    stop: threading.Event,
    watch: Watch,
    listen: str | None,
    wait_s: float,
) -> Iterator[Any]:
    """The carrier of a run, with signal handlers that stop it in good order."""
    from fedloom.cli import compose

    e = these.experiment
    if listen is None and e.runtime.workers == 0:
        prepare()
        with _stopping(stop, watch, lambda: None, training := threading.Event()):
            training.set()
            yield compose.in_process(these, dataset, folder)
        return

    import uuid

    from fedloom.cli.workers import Workers
    from fedloom.errors import InterruptedRun, QuorumError
    from fedloom.federation.loop import vocabulary
    from fedloom.transport.aggregator import Aggregator

    server = Aggregator(
        run=e.name,
        incarnation=uuid.uuid4().hex,
        experiment=compose.welcome(these),
        vocabulary=vocabulary(these.algorithm),
        dtype=compose.DTYPE,
        algorithm=these.algorithm.name,
        version=these.algorithm.version,
    )
    address = server.start(listen or "127.0.0.1:0")
    workers: Workers | None = None
    finished = False
    training = threading.Event()

    def abort() -> None:
        stop.set()
        server.stop()

    try:
        prepare()
        log.info("serving on %s", address)
        with _stopping(stop, watch, abort, training):
            if listen is None:
                workers = Workers(e.runtime.workers, address, dataset.folder, folder, e.runtime, abort)
            else:
                watch.say(f"waiting for: fedloom worker --aggregator {address} --partition {dataset.folder}")
            try:
                server.wait_for(
                    [entry.id for entry in dataset.manifest.clients],
                    wait_s,
                    workers=e.runtime.workers if listen is None else 1,
                )
                training.set()
                yield server
                finished = True
            except BaseException as error:
                # The loop only sees that everything was lost; what really happened is the worker's failure.
                if workers is not None and workers.failure is not None:
                    raise workers.failure from error
                if stop.is_set() and isinstance(error, QuorumError):
                    raise InterruptedRun("stopped while waiting for workers; go on with --resume") from error
                raise
    finally:
        if workers is not None:
            workers.dismiss()
        server.stop(finished=finished)
        if workers is not None:
            workers.stop()


@contextmanager
def _stopping(
    stop: threading.Event, watch: Watch, abort: Callable[[], None], training: threading.Event
) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after the round at hand; after a grace, or a second signal, at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []

    def handle(number: int, frame: Any) -> None:
        again = stop.is_set()
        stop.set()
        # In a thread of its own: what this handler interrupts may hold what abort needs.
        timer = threading.Timer(STOP_GRACE_S if training.is_set() and not again else 0.0, abort)
        timer.daemon = True
        timer.start()
        timers.append(timer)
        if again:
            raise KeyboardInterrupt
        watch.say("stopping after this round (again to stop at once)" if training.is_set() else "stopping")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_folder(folder: RunFolder, e: Experiment, resume: bool) -> bool:
    """Whether there is a run to resume.

    Raises
    ------
    ExperimentError
        If the folder is taken and not to be resumed, or holds another experiment.
    """
    from fedloom import experiment as experiments
    from fedloom.errors import ExperimentError

    before = folder.read("experiment.yaml")
    if before is None:
        if folder.path.is_dir() and any(folder.path.iterdir()):
            raise ExperimentError(
                f"--out: found {folder.path}, which is not empty and not a run; allowed: a new folder"
            )
        return False
    if not resume:
        raise ExperimentError(
            f"{folder.path}: found a run there already", hint="go on with --resume, or choose another folder with --out"
        )
    old = experiments.load(folder.path / "experiment.yaml").model_dump(mode="json")
    new = e.model_dump(mode="json")
    for path in FREE_ON_RESUME:
        for tree in (old, new):
            for key in path[:-1]:
                tree = tree[key]
            tree.pop(path[-1], None)
    changed = list(_differences(old, new))
    if changed:
        raise ExperimentError(
            f"--resume: {folder.path} holds another experiment:\n  " + "\n  ".join(changed[:10]),
            hint="resume with the same settings, or choose another folder with --out",
        )
    return True


def _check_partition(folder: RunFolder, dataset: FederatedDataset) -> None:
    """A resumed run goes on with the very examples it began with.

    Raises
    ------
    DataError
        If the partition on disk is another.
    """
    from fedloom.data.federated import Manifest
    from fedloom.errors import DataError

    before = folder.read("partition.json")
    if before is None:
        return
    begun_with = Manifest.from_json(before, where=str(folder.path / "partition.json")).fingerprint
    if begun_with != dataset.manifest.fingerprint:
        raise DataError(
            f"--resume: the run was begun with partition {begun_with[:12]}, {dataset.folder} is now "
            f"{dataset.manifest.fingerprint[:12]}",
            hint="resume with the same FedLoom and data, or begin anew with --out",
        )


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif old != new:
        yield f"{where}: the run has {old!r}, found {new!r}"


def _existing(path: Path) -> RunFolder:
    from fedloom.errors import DataError
    from fedloom.federation.folder import RunFolder

    if not (path / "journal.jsonl").is_file():
        raise DataError(f"{path}: not a run's folder (no journal.jsonl)")
    return RunFolder(path)


def _report(folder: RunFolder) -> None:
    try:
        from fedloom.evaluation.report import write_report
    except ImportError as error:
        typer.echo(f"no report: {error.name} is not installed (pip install 'fedloom[report]')", err=True)
        return
    write_report(folder.path)
