"""One experiment at every point of a grid of settings and seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fedloom.errors import ExperimentError, InterruptedRun, QuorumError
from fedloom.experiment import Experiment, Point
from fedloom.federation.folder import RunFolder
from fedloom.runner.observer import RunObserver
from fedloom.runner.options import RunOptions
from fedloom.runner.resume import check_folder, finished
from fedloom.runner.run_experiment import run_experiment
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

    def finished_before(self, number: int, points: int, point: Point) -> None:
        """A run was finished before, and is left as it is."""

    def failed(self, number: int, points: int, point: Point, error: QuorumError) -> None:
        """A run failed, and the next one begins."""


def run_sweep(
    points: Sequence[Point],
    folder: Path,
    options: RunOptions,
    observer: SweepObserver | None = None,
    *,
    ended: Callable[[Path], None] | None = None,
) -> None:
    """Run every point that is not finished yet; one that fails does not keep the others from running.

    Parameters
    ----------
    folder
        Has a folder for each point's run.
    options
        For each run; ``out``, ``name`` and ``replay`` are the sweep's own, ``publish`` is where all of it goes.
    ended
        Called with ``folder`` once all points have run and at least one has not failed.

    Raises
    ------
    ExperimentError
        If a folder is taken, before anything runs.
    QuorumError
        If runs failed, once all have been tried.
    InterruptedRun
        If the sweep was stopped.
    """
    observer = observer or SweepObserver()
    if (folder / "experiment.yaml").exists():
        raise ExperimentError(f"--out: found {folder}, which is a run; allowed: a sweep's folder, or a new one")
    if not options.resume and folder.is_dir() and any(folder.iterdir()):
        raise ExperimentError(
            f"{folder}: found a sweep there already", hint="go on with --resume, or choose another folder with --out"
        )
    for point in points:  # all folders fit before anything runs
        check_folder(RunFolder(folder / point.name), point.experiment, options.resume)
    failures: list[QuorumError] = []
    for number, point in enumerate(points, start=1):
        if complete(RunFolder(folder / point.name), point.experiment, options.report):
            observer.finished_before(number, len(points), point)
            continue
        its_own = replace(
            options,
            out=folder / point.name,
            name=f"{folder.name}/{point.name}",
            publish=f"{options.publish.rstrip('/')}/{point.name}" if options.publish else None,
        )
        try:
            run_experiment(point.experiment, its_own, observer.begins(number, len(points), point))
        except QuorumError as error:  # as after a step size that is too large: a result, too
            observer.failed(number, len(points), point, error)
            failures.append(error)
        except InterruptedRun as error:
            raise InterruptedRun(f"{error} (run {number} of {len(points)}, {point.name}; {number - 1} done)") from error
    if ended is not None and len(failures) < len(points):
        ended(folder)
    if failures:
        raise QuorumError(f"{len(failures)} of {counted(len(points), 'run')} failed; the first: {failures[0]}")
