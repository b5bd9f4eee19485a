"""Runs of one experiment over a grid of settings and seeds, sequential or parallel."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fedloom.core.words import pluralize
from fedloom.errors import ExperimentError, FedloomError, InterruptedRun, QuorumError, argument
from fedloom.experiment import Experiment, Point
from fedloom.models.module import MEMORY
from fedloom.runner.observer import RunObserver
from fedloom.runner.options import RunOptions
from fedloom.runner.parallel import Job, JobEvents, run_parallel
from fedloom.runner.resume import check_folder, finished
from fedloom.runner.run_data import check_roster
from fedloom.runner.run_experiment import run_experiment
from fedloom.runs.folder import RunFolder
from fedloom.storage import is_url


def complete(run: RunFolder, experiment: Experiment, report: bool = True) -> bool:
    """Return whether a run is finished and has its report, if one is wanted, or is fully published."""
    if finished(run, experiment) is None:
        return False
    if (run.path / "published.json").exists():  # publishing finishes after the report
        return bool(run.json("published.json").get("finished", False))
    return not report or (run.path / "report.html").exists() or find_spec("matplotlib") is None


class SweepObserver:
    """Callbacks for sweep progress; override the ones you need. Points are counted from 1."""

    def begins(self, number: int, points: int, point: Point) -> RunObserver:
        """Handle the start of a run in this process; return its observer."""
        return RunObserver()

    def begins_beside(self, number: int, points: int, point: Point) -> None:
        """Handle the start of a run in a separate process."""

    def done(self, number: int, points: int, point: Point) -> None:
        """Handle the end of a successful run in a separate process."""

    def notice(self, number: int, points: int, point: Point, text: str) -> None:
        """Handle a one-line message for the user from a run in a separate process."""

    def stopped(self, number: int, points: int, point: Point, round: int) -> None:
        """Handle a run that a search has stopped after this round."""

    def finished_before(self, number: int, points: int, point: Point) -> None:
        """Handle a run that was already finished and is skipped."""

    def failed(self, number: int, points: int, point: Point, error: FedloomError) -> None:
        """Handle a failed run; the others continue."""


def run_sweep(
    points: Sequence[Point],
    folder: Path,
    options: RunOptions,
    observer: SweepObserver | None = None,
    *,
    parallel: int = 1,
    ended: Callable[[Path], None] | None = None,
) -> None:
    """Run every point that is not finished yet as :func:`run_points`; a failed run does not stop the others.

    ``ended`` is called with the folder once all points have run, unless all of them failed.

    Raise FedloomError if runs failed, after all have been tried; of the class of the first failure.
    """
    failures = run_points(points, folder, options, observer, parallel=parallel)
    if ended is not None and len(failures) < len(points):
        ended(folder)
    if failures:
        first, *_ = failures.values()
        listed = "\n".join(f"  {name}: {error}" for name, error in failures.items())
        raise type(first)(f"{len(failures)} of {pluralize(len(points), 'run')} failed:\n{listed}")


def run_points(
    points: Sequence[Point],
    folder: Path,
    options: RunOptions,
    observer: SweepObserver | None = None,
    *,
    parallel: int = 1,
) -> dict[str, FedloomError]:
    """Run every point that is not finished yet; return the errors of failed runs by folder name.

    Parameters
    ----------
    folder
        Folder that holds one folder per run.
    options
        Options of each run; the sweep sets ``out``, ``name`` and ``replay``, and publishes below ``publish``.
    parallel
        Number of concurrent runs. If above 1, each has a process with its own share of the cores; the results are the
        same, and no failure ends the sweep. If 1, a run that ends in :class:`QuorumError`, e.g. because it diverged,
        counts as a result; any other failure ends the sweep.

    Raise ExperimentError if a folder is in use, or a method cannot train with a point's clients; raised before anything
    runs. Raise InterruptedRun if the sweep was stopped.
    """
    observer = observer or SweepObserver()
    _check_sweep(points, folder, options, parallel)
    left = []
    for number, point in enumerate(points, start=1):
        if complete(RunFolder(folder / point.name), point.experiment, options.report):
            observer.finished_before(number, len(points), point)
        else:
            left.append((number, point))
    for _, point in left:
        try:
            check_roster(point.experiment, options)
        except ExperimentError as error:
            raise ExperimentError(f"at {point.name}: {error}") from error
    if parallel == 1:
        return _one_by_one(left, len(points), folder, options, observer)
    return _in_parallel(left, len(points), folder, options, observer, parallel)


def _check_sweep(points: Sequence[Point], folder: Path, options: RunOptions, parallel: int) -> None:
    """Check the folders and the processes of a sweep before anything runs."""
    check_parallel(parallel, [point.experiment for point in points])
    check_folder_of_runs(folder, options)
    for point in points:
        check_folder(RunFolder(folder / point.name), point.experiment, options.resume)


def check_parallel(parallel: int, experiments: Sequence[Experiment]) -> None:
    """Raise ExperimentError if the experiments cannot run in this many processes."""
    if parallel < 1:
        raise ExperimentError(
            f"{argument('parallel')} must be 1 or more (got {parallel}).", key="parallel", found=parallel
        )
    if parallel > 1 and any(name.startswith(MEMORY) for e in experiments for name in e.code):
        raise ExperimentError(
            f"{argument('parallel')} is {parallel}, but only this process has the module or metric in memory: leave it "
            "at 1, or name them as package:function, which every process can import.",
            key="parallel",
            found=parallel,
        )


def check_folder_of_runs(folder: Path, options: RunOptions) -> None:
    """Raise ExperimentError if the folder is in use for anything but the runs that are resumed."""
    if (folder / "experiment.yaml").exists():
        raise ExperimentError(
            f"{argument('out')} is {folder}, the folder of a run; choose that of a sweep or search, or a new one.",
            key="out",
        )
    if not options.resume and folder.is_dir() and any(folder.iterdir()):
        raise ExperimentError(
            f"{folder} already holds runs.",
            hint=f"continue with {argument('resume')}, or choose another folder ({argument('out')})",
            key="out",
        )


def _one_by_one(
    left: Sequence[tuple[int, Point]], count: int, folder: Path, options: RunOptions, observer: SweepObserver
) -> dict[str, FedloomError]:
    failures: dict[str, FedloomError] = {}
    for number, point in left:
        try:
            run_experiment(point.experiment, options_of(options, folder, point), observer.begins(number, count, point))
        except QuorumError as error:  # e.g. from too large a step size, which is a result too
            observer.failed(number, count, point, error)
            failures[point.name] = error
        except InterruptedRun as error:
            raise InterruptedRun(f"{error} (run {number} of {count}, {point.name}; {number - 1} done)") from error
        gc.collect()  # a run's objects form cycles; uncollected, they would grow to gigabytes over dozens of runs
    return failures


def _in_parallel(
    left: Sequence[tuple[int, Point]],
    count: int,
    folder: Path,
    options: RunOptions,
    observer: SweepObserver,
    parallel: int,
) -> dict[str, FedloomError]:
    numbers = {point.name: (number, point) for number, point in left}
    failures: dict[str, FedloomError] = {}

    def began(name: str) -> None:
        number, point = numbers[name]
        observer.begins_beside(number, count, point)

    def over(name: str, error: FedloomError | None) -> None:
        number, point = numbers[name]
        if error is None:
            observer.done(number, count, point)
        else:
            failures[name] = error
            observer.failed(number, count, point, error)

    def notice(name: str, text: str) -> None:
        number, point = numbers[name]
        observer.notice(number, count, point, text)

    jobs = [Job(point.name, point.experiment, options_of(options, folder, point)) for _, point in left]
    run_parallel(jobs, len(jobs), parallel, JobEvents(began, notice, over), signals=options.signals)
    return {point.name: failures[point.name] for _, point in left if point.name in failures}


def options_of(options: RunOptions, folder: Path, point: Point) -> RunOptions:
    """Return the options of one run of a sweep or search in a folder."""
    name = f"{folder.name}/{point.name}"
    publish, storage = options.publish, point.experiment.storage
    if publish is not None:
        publish = f"{publish.rstrip('/')}/{point.name}"
    elif storage is not None and is_url(storage):
        publish = f"{storage.rstrip('/')}/runs/{name}"
    return replace(options, out=folder / point.name, name=name, publish=publish)
