"""``fedloom run`` and ``fedloom aggregator``: the same round loop, with workers of its own or workers that come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedloom.words import counted

ExperimentFile = Annotated[
    str, typer.Argument(help="The experiment file; also one in a store, s3://BUCKET/NAME.yaml.", metavar="EXPERIMENT")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file; repeatable.")
]
Out = Annotated[
    Path | None, typer.Option(help="The run's folder; by default runs/NAME-ALGORITHM-seedN.", metavar="DIR")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint of the folder, or the last that is published.")
]
ReplayRun = Annotated[
    Path | None,
    typer.Option("--replay", metavar="RUN", help="Repeat the journal of a run: same cohorts, same losses, same bits."),
]
Partition = Annotated[
    str | None,
    typer.Option(help="Use this partition, and deal none: a folder or s3://BUCKET/PREFIX.", metavar="DIR|URL"),
]
Publish = Annotated[
    str | None,
    typer.Option(
        help="Publish the run there as it goes: s3://BUCKET/PREFIX; by default STORAGE/runs/NAME where `storage` is a "
        "store.",
        metavar="URL",
    ),
]

WORKERS_COME_S = 60.0


def run(
    experiment: ExperimentFile,
    set_: Set = None,
    out: Out = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes; 0 trains in this process.", min=0, metavar="N")
    ] = None,
    resume: Resume = False,
    replay: ReplayRun = None,
    partition: Partition = None,
    publish: Publish = None,
    seeds: Annotated[str | None, typer.Option(help="Run once with each seed: 1,2,3 or 1-3.", metavar="N,N,...")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Run with each of these values; repeat it for more keys.", metavar="KEY=VALUE,VALUE,..."),
    ] = None,
) -> None:
    """Run an experiment on this machine; with --seeds or --grid, at every point, and compare."""
    from fedloom.errors import ExperimentError
    from fedloom.run.run_experiment import Order, run_experiment

    overrides = [*(set_ or ()), *([f"runtime.workers={workers}"] if workers is not None else ())]
    if seeds is None and not grid:
        run_experiment(
            Order(
                experiment,
                tuple(overrides),
                out,
                resume,
                replay,
                partition=partition,
                publish=publish,
                wait_s=WORKERS_COME_S,
            )
        )
        return
    if replay is not None:
        raise ExperimentError("--replay: found with --seeds or --grid; allowed: with a single run")
    _sweep(experiment, overrides, out, resume, partition, publish, seeds, grid or ())


def aggregator(
    experiment: ExperimentFile,
    listen: Annotated[str, typer.Option(help="Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7733",
    set_: Set = None,
    out: Out = None,
    resume: Resume = False,
    replay: ReplayRun = None,
    partition: Partition = None,
    publish: Publish = None,
    wait: Annotated[
        float, typer.Option(help="Seconds until workers must serve every client.", min=0, metavar="S")
    ] = 600.0,
    orphan_after: Annotated[
        float | None,
        typer.Option(help="Stop (code 8) once nobody has watched the run for so long.", min=0.1, metavar="S"),
    ] = None,
    finished_grace: Annotated[
        float, typer.Option(help="Seconds to wait at the end until watchers have been told.", min=0, metavar="S")
    ] = 5.0,
) -> None:
    """Run an experiment's rounds with workers that connect (`fedloom worker`)."""
    from fedloom.run.run_experiment import Order, run_experiment
    from fedloom.transport.address import split_address

    split_address(listen, what="--listen", lowest=0)
    run_experiment(
        Order(
            experiment,
            tuple(set_ or ()),
            out,
            resume,
            replay,
            partition=partition,
            publish=publish,
            listen=listen,
            wait_s=wait,
            orphan_after_s=orphan_after,
            finished_grace_s=finished_grace,
        )
    )


def _sweep(
    experiment: str,
    overrides: Sequence[str],
    out: Path | None,
    resume: bool,
    partition: str | None,
    publish: str | None,
    seeds: str | None,
    grid: Sequence[str],
) -> None:
    """Run every point that is not finished yet; one that fails does not keep the others from running."""
    from fedloom.errors import ExperimentError, InterruptedRun, QuorumError
    from fedloom.federation.folder import RunFolder
    from fedloom.run import sweep
    from fedloom.run.resume import check_folder
    from fedloom.run.run_experiment import Order, run_experiment

    points = sweep.points(experiment, overrides, seeds, grid)
    first = points[0].experiment
    folder = out or first.runs / f"{first.name}-sweep"
    if (folder / "experiment.yaml").exists():
        raise ExperimentError(f"--out: found {folder}, which is a run; allowed: a sweep's folder, or a new one")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise ExperimentError(
            f"{folder}: found a sweep there already", hint="go on with --resume, or choose another folder with --out"
        )
    for point in points:  # all folders fit before anything runs
        check_folder(RunFolder(folder / point.name), point.experiment, resume)
    failures: list[QuorumError] = []
    for number, point in enumerate(points, start=1):
        where = f"run {number} of {len(points)}, {point.name}"
        if sweep.finished(folder / point.name, point.experiment):
            typer.echo(f"{where}: finished before", err=True)
            continue
        typer.echo(f"{where}", err=True)
        try:
            run_experiment(
                Order(
                    experiment,
                    point.overrides,
                    folder / point.name,
                    resume,
                    partition=partition,
                    publish=f"{publish.rstrip('/')}/{point.name}" if publish else None,
                    name=f"{folder.name}/{point.name}",
                    wait_s=WORKERS_COME_S,
                    table=False,
                    choosing=bool(grid),
                )
            )
        except QuorumError as error:  # as after a step size that is too large: a result, too
            typer.echo(f"{where}: failed: {error}", err=True)
            failures.append(error)
        except InterruptedRun as error:
            raise InterruptedRun(f"{error} ({where}; {number - 1} done)") from error
    if len(failures) < len(points):
        sweep.conclude(folder)
    if failures:
        raise QuorumError(f"{len(failures)} of {counted(len(points), 'run')} failed; the first: {failures[0]}")
