"""``fedloom run`` and ``fedloom aggregator``: the same round loop, with the run's own workers or external ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import AuditLog, ExperimentFile, Health, InsecureServer, Metrics, ServerCredentials, Set
from fedloom.core.garbage import collection_paused

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.runner.options import RunOptions

Out = Annotated[
    Path | None, typer.Option(help="The run's folder; by default runs/NAME-ALGORITHM-seedN.", metavar="DIR")
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue from the last checkpoint of the folder, or from the last one published."),
]
ReplayRun = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="RUN",
        help="Repeat a run from its journal: the same cohorts, lost clients and numbers.",
    ),
]
Workers = Annotated[
    int | None, typer.Option(help="Number of worker processes; 0 trains in this process.", min=0, metavar="N")
]
Partition = Annotated[
    str | None,
    typer.Option(help="Use this partition instead of creating one: a folder or s3://BUCKET/PREFIX.", metavar="DIR|URL"),
]
OwnFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--data", help="With data.own: a packed client, or a folder of packed clients; repeatable.", metavar="DIR"
    ),
]
Observe = Annotated[
    list[Path] | None,
    typer.Option(help="Like --data, for clients that are only evaluated and never train; repeatable.", metavar="DIR"),
]
Publish = Annotated[
    str | None,
    typer.Option(
        help="Publish the run at this URL while it runs: s3://BUCKET/PREFIX; by default STORAGE/runs/NAME if "
        "`storage` is a store.",
        metavar="URL",
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report",
        envvar="FEDLOOM_REPORT",
        help="Write the report at the end, which takes two seconds; `fedloom report` writes it later.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        envvar="FEDLOOM_TRACK",
        help="Also send the numbers to a tracker: csv, katib, tensorboard, mlflow, wandb; repeatable.",
        metavar="NAME",
    ),
]


def run_command(
    experiment: ExperimentFile,
    set_: Set = None,
    out: Out = None,
    workers: Workers = None,
    resume: Resume = False,
    replay: ReplayRun = None,
    partition: Partition = None,
    data: OwnFolders = None,
    observe: Observe = None,
    publish: Publish = None,
    report: Report = True,
    track: Track = None,
    seeds: Annotated[str | None, typer.Option(help="Run once with each seed: 1,2,3 or 1-3.", metavar="N,N,...")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Run with each of these values; repeatable for further keys.", metavar="KEY=VALUE,VALUE,..."),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(
            help="With --seeds or --grid: number of parallel runs, each with its share of the cores.",
            min=1,
            metavar="N",
        ),
    ] = 1,
) -> None:
    """Run an experiment on this machine. With --seeds or --grid, run every combination and compare."""
    from fedloom import experiment as experiments
    from fedloom.core import processes
    from fedloom.errors import ExperimentError
    from fedloom.runner.options import RunOptions

    overrides = [*(set_ or ()), *([f"runtime.workers={workers}"] if workers is not None else ())]
    options = RunOptions(
        out,
        resume,
        replay,
        partition,
        tuple(data or ()),
        tuple(observe or ()),
        publish=publish,
        signals=True,
        report=report,
        track=tuple(track or ()),
    )
    if processes.ends_with_parent():
        from fedloom.cli.eof import at_eof

        at_eof(lambda: os.kill(os.getpid(), signal.SIGTERM))
    if seeds is None and not grid:
        if parallel > 1:
            raise ExperimentError("--parallel needs --seeds or --grid.", key="parallel")
        with collection_paused():
            found = experiments.load_experiment(experiment, overrides, begun=out if resume else None)
        _run(found, options)
        return
    if replay is not None:
        raise ExperimentError("--replay cannot be combined with --seeds or --grid.", key="replay")
    begun = experiments.begun_in(out) if resume else None
    points = experiments.points(experiment, overrides, seeds, grid or (), begun=begun)
    from fedloom.api.watch import SweepWatch
    from fedloom.cli.sweep import show_sweep
    from fedloom.runner.sweep import run_sweep

    folder = out or points[0].experiment.runs / f"{points[0].experiment.name}-sweep"
    run_sweep(points, folder, options, SweepWatch(choosing=bool(grid)), parallel=parallel, ended=show_sweep)


def aggregator_command(
    experiment: ExperimentFile,
    listen: Annotated[str, typer.Option(help="Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7733",
    set_: Set = None,
    out: Out = None,
    resume: Resume = False,
    replay: ReplayRun = None,
    partition: Partition = None,
    publish: Publish = None,
    report: Report = True,
    track: Track = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait until workers serve every client.", min=0, metavar="S")
    ] = 600.0,
    orphan_after: Annotated[
        float | None,
        typer.Option(help="Stop with exit code 8 after this many seconds without a watcher.", min=0.1, metavar="S"),
    ] = None,
    finished_grace: Annotated[
        float,
        typer.Option(help="Seconds to wait at the end for watchers to receive the final state.", min=0, metavar="S"),
    ] = 5.0,
    health: Health = None,
    metrics: Metrics = None,
    stay: Annotated[bool, typer.Option("--stay", help="Keep answering watchers after the run, until SIGTERM.")] = False,
    credentials: ServerCredentials = None,
    audit: AuditLog = None,
    insecure: InsecureServer = False,
) -> None:
    """Run rounds with external workers, started with `fedloom worker`."""
    from fedloom import experiment as experiments
    from fedloom.runner.options import RunOptions
    from fedloom.security.options import Protection, ServerOptions
    from fedloom.transport.address import split_address

    host, _ = split_address(listen, what="--listen", lowest=0)
    protection = ServerOptions.of(credentials, insecure=insecure)
    Protection(protection).check(host)  # before anything is read or created
    options = RunOptions(
        out,
        resume,
        replay,
        partition,
        publish=publish,
        listen=listen,
        protection=protection,
        audit=audit,
        wait_s=wait,
        orphan_after_s=orphan_after,
        finished_grace_s=finished_grace,
        health=health,
        metrics=metrics,
        stay=stay,
        signals=True,
        report=report,
        track=tuple(track or ()),
    )
    with collection_paused():
        found = experiments.load_experiment(experiment, set_ or (), begun=out if resume else None)
    _run(found, options)


def _run(experiment: Experiment, options: RunOptions) -> None:
    """Run an experiment and show its results."""
    with collection_paused():
        from fedloom.api.watch import Watch
        from fedloom.cli.logged import LoggedRun
        from fedloom.cli.tables import print_results
        from fedloom.core.logs import structured
        from fedloom.runner.run_experiment import run_experiment

    if structured():
        run_experiment(experiment, options, LoggedRun())
        return
    found = run_experiment(experiment, options, Watch())
    print_results(found.summary)
    if (claim := found.summary.get("training_privacy")) is not None:
        typer.echo(claim["statement"][0])
    if found.report is not None:
        typer.echo(f"report: {found.report}")
