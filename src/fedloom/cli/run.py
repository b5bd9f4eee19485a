"""``fedloom run`` and ``aggregator``: runs with own workers, one or many, and with external workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import (
    ExperimentFile,
    Parallel,
    ServerAccess,
    Set,
    act_at_eof,
    with_options,
)
from fedloom.cli.results import CommandResult
from fedloom.core import forks
from fedloom.core.memory import collection_paused
from fedloom.engine.options import RunOptions, ServingOptions


@with_options()
def run_command(
    experiment: ExperimentFile,
    options: RunOptions,
    set_: Set = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of worker processes; 0 trains in this process.", min=0, metavar="N")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Run once with each seed: 1,2,3 or 1-3.", metavar="N,N,...")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Run with each of these values; repeatable for further keys.", metavar="KEY=VALUE,VALUE,..."),
    ] = None,
    parallel: Parallel = 1,
) -> CommandResult:
    """Run an experiment on this machine. With --seeds or --grid, run every combination and compare."""
    from fedloom import experiment as experiments
    from fedloom.errors import ExperimentError

    overrides = [*(set_ or ()), *([f"runtime.workers={workers}"] if workers is not None else ())]
    options = replace(options, signals=True)
    if seeds is None and not grid:
        if parallel > 1:
            raise ExperimentError("--parallel needs --seeds or --grid.", key="parallel")
        return _run(experiment, overrides, options)
    if options.replay is not None:
        raise ExperimentError("--replay cannot be combined with --seeds or --grid.", key="replay")
    begun = experiments.begun_in(options.out) if options.resume else None
    points = experiments.points(experiment, overrides, seeds, grid or (), stored=begun)
    with forks.prepared(parallel > 1 or any(point.experiment.runtime.workers for point in points)):
        from fedloom.api.watch import SweepWatch
        from fedloom.engine import worker  # noqa: F401 (for forks)
        from fedloom.reporting.commands import compared_sweep
        from fedloom.tuning.sweep import failed_sweep, run_points

    folder = options.out or points[0].experiment.runs / f"{points[0].experiment.name}-sweep"
    failures = run_points(points, folder, options, SweepWatch(choosing=bool(grid)), parallel=parallel)
    if len(failures) == len(points):
        raise failed_sweep(failures, len(points))
    return compared_sweep(folder, [failed_sweep(failures, len(points))] if failures else ())


@with_options(without=("packed", "observe", "replay"))
def aggregator_command(
    experiment: ExperimentFile,
    options: RunOptions,
    serving: ServingOptions,
    access: ServerAccess,
    set_: Set = None,
) -> CommandResult:
    """Run rounds with external workers, started with `fedloom worker`."""
    from fedloom.core.address import split_address
    from fedloom.security.options import Protection

    host, _ = split_address(serving.listen, what="--listen", lowest=0)
    protection = access.options()
    Protection(protection).check(host)  # before anything is read or created
    serving = replace(serving, protection=protection)
    return _run(experiment, set_ or (), replace(options, serving=serving, signals=True))


def _run(file: str | Path, overrides: Sequence[str], options: RunOptions) -> CommandResult:
    """Run an experiment and return its results."""
    with collection_paused():
        from fedloom import experiment as experiments
        from fedloom.core import processes

        # before torch is imported, so that an invalid file is refused at once
        experiment = experiments.load_experiment(file, overrides, stored=options.out if options.resume else None)
        with forks.prepared(options.serving is None and experiment.runtime.workers > 0):
            from fedloom.api.watch import LoggedRun, Watch
            from fedloom.cli.tables import print_results
            from fedloom.core.logs import structured
            from fedloom.engine import worker  # noqa: F401 (for forks)
            from fedloom.engine.run_experiment import run_experiment

    if processes.ends_with_parent():
        act_at_eof(lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = run_experiment(experiment, options, LoggedRun() if structured() else Watch())

    def show() -> None:
        if structured():
            return  # the log has the results
        print_results(result.summary)
        if (claim := result.summary.get("training_privacy")) is not None:
            typer.echo(claim["statement"][0])
        if result.report is not None:
            typer.echo(f"report: {result.report}")

    return CommandResult(result.summary, show)
