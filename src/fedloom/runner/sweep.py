"""One experiment at every point of a grid of settings and seeds, one run after another or several side by side."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fedloom.errors import ExperimentError, FedloomError, InterruptedRun, QuorumError, argument
from fedloom.experiment import Experiment, Point
from fedloom.federation.folder import RunFolder
from fedloom.models.module import MEMORY
from fedloom.runner.observer import RunObserver
from fedloom.runner.options import RunOptions
from fedloom.runner.resume import check_folder, finished
from fedloom.runner.run_experiment import check_roster, run_experiment
from fedloom.runner.side_by_side import Job, run_side_by_side
from fedloom.storage import is_url
from fedloom.words import counted


def complete(run: RunFolder, experiment: Experiment, report: bool = True) -> bool:
    """Whether a run is finished, and has its report where one is wanted, or is published as a whole."""
    if finished(run, experiment) is None:
        return False
    if (run.path / "published.json").exists():  # the report, too, is made before that
        return bool(run.json("published.json").get("finished", False))
    return not report or (run.path / "report.html").exists() or find_spec("matplotlib") is None


class SweepObserver:
    """Is told how a sweep goes; override what you want to know. Points are counted from 1."""

    def begins(self, number: int, points: int, point: Point) -> RunObserver:
        """A run begins; whoever is returned is told how it goes."""
        return RunObserver()

    def begins_beside(self, number: int, points: int, point: Point) -> None:
        """A run begins in a process of its own, beside others."""

    def done(self, number: int, points: int, point: Point) -> None:
        """A run that began beside others is finished."""

    def notice(self, number: int, points: int, point: Point, text: str) -> None:
        """Something that a person should know of a run beside others, in one line."""

    def finished_before(self, number: int, points: int, point: Point) -> None:
        """A run was finished before, and is left as it is."""

    def failed(self, number: int, points: int, point: Point, error: FedloomError) -> None:
        """A run failed, and the others go on."""


def run_sweep(
    points: Sequence[Point],
    folder: Path,
    options: RunOptions,
    observer: SweepObserver | None = None,
    *,
    parallel: int = 1,
    ended: Callable[[Path], None] | None = None,
) -> None:
    """Run every point that is not finished yet; one that fails does not keep the others from running.

    Parameters
    ----------
    folder, options, parallel
        As of :func:`run_points`.
    ended
        Called with ``folder`` once all points have run and at least one has not failed.

    Raises
    ------
    ExperimentError
        If a folder is taken, before anything runs.
    FedloomError
        If runs failed, once all have been tried: of the class of the first.
    InterruptedRun
        If the sweep was stopped.
    """
    failures = run_points(points, folder, options, observer, parallel=parallel)
    if ended is not None and len(failures) < len(points):
        ended(folder)
    if failures:
        first, *_ = failures.values()
        said = "\n".join(f"  {name}: {error}" for name, error in failures.items())
        raise type(first)(f"{len(failures)} of {counted(len(points), 'run')} failed:\n{said}")


def run_points(
    points: Sequence[Point],
    folder: Path,
    options: RunOptions,
    observer: SweepObserver | None = None,
    *,
    parallel: int = 1,
) -> dict[str, FedloomError]:
    """Run every point that is not finished yet, and return why some failed, by the names of their folders.

    Parameters
    ----------
    folder
        Has a folder for each point's run.
    options
        For each run; ``out``, ``name`` and ``replay`` are the sweep's own, ``publish`` is where all of it goes.
    parallel
        Runs at a time. Several have a process each, with a share of the cores of its own; their numbers are the same.
        One by one, a run's failure is a result when it has trained and come to nothing (:class:`QuorumError`), and ends
        the sweep else; side by side, no failure ends it.

    Raises
    ------
    ExperimentError
        If a folder is taken, or a method cannot train with a point's clients, before anything runs.
    InterruptedRun
        If the sweep was stopped.
    """
    observer = observer or SweepObserver()
    if parallel < 1:
        raise ExperimentError(
            f"{argument('parallel')} must be 1 or more (got {parallel}).", key="parallel", found=parallel
        )
    if parallel > 1 and any(str(getattr(p.experiment.model, "factory", "")).startswith(MEMORY) for p in points):
        raise ExperimentError(
            f"{argument('parallel')} is {parallel}, but only this process has the module in memory: leave it at 1, or "
            "give a model.factory that every process can import.",
            key="parallel",
            found=parallel,
        )
    if (folder / "experiment.yaml").exists():
        raise ExperimentError(
            f"{argument('out')} is {folder}, the folder of a run; choose that of a sweep, or a new one.", key="out"
        )
    if not options.resume and folder.is_dir() and any(folder.iterdir()):
        raise ExperimentError(
            f"{folder}: found a sweep there already",
            hint=f"go on with {argument('resume')}, or choose another folder ({argument('out')})",
        )
    for point in points:  # all folders fit before anything runs
        check_folder(RunFolder(folder / point.name), point.experiment, options.resume)
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
    return _side_by_side(left, len(points), folder, options, observer, parallel)


def _one_by_one(
    left: Sequence[tuple[int, Point]], count: int, folder: Path, options: RunOptions, observer: SweepObserver
) -> dict[str, FedloomError]:
    failures: dict[str, FedloomError] = {}
    for number, point in left:
        try:
            run_experiment(point.experiment, _of_point(options, folder, point), observer.begins(number, count, point))
        except QuorumError as error:  # as after a step size that is too large: a result, too
            observer.failed(number, count, point, error)
            failures[point.name] = error
        except InterruptedRun as error:
            raise InterruptedRun(f"{error} (run {number} of {count}, {point.name}; {number - 1} done)") from error
        gc.collect()  # what a run held is in cycles, whose turn would come after dozens of runs: gigabytes
    return failures


def _side_by_side(
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

    jobs = [Job(point.name, point.experiment, _of_point(options, folder, point)) for _, point in left]
    run_side_by_side(jobs, parallel, began, over, notice, signals=options.signals)
    return {point.name: failures[point.name] for _, point in left if point.name in failures}


def _of_point(options: RunOptions, folder: Path, point: Point) -> RunOptions:
    """The options of one run of a sweep."""
    name = f"{folder.name}/{point.name}"
    publish, storage = options.publish, point.experiment.storage
    if publish is not None:
        publish = f"{publish.rstrip('/')}/{point.name}"
    elif storage is not None and is_url(storage):
        publish = f"{storage.rstrip('/')}/runs/{name}"
    return replace(options, out=folder / point.name, name=name, publish=publish)
