"""Runs of one experiment over a grid of settings and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from fedloom.core.urls import is_url
from fedloom.core.words import pluralize
from fedloom.engine.jobs import Job, JobObserver
from fedloom.engine.options import RunOptions
from fedloom.engine.resume import check_folder, finished
from fedloom.engine.run_data import check_roster
from fedloom.errors import ExperimentError, FedloomError, argument
from fedloom.experiment import Experiment, Point
from fedloom.models.module import MEMORY
from fedloom.runs.folder import RunFolder
from fedloom.tuning.parallel import Jobs, run_jobs


def complete(run: RunFolder, experiment: Experiment, report: bool = True) -> bool:
    """Return whether a run is finished and has its report, if one is wanted, or is fully published."""
    if finished(run, experiment) is None:
        return False
    if (run.path / "published.json").exists():  # publishing finishes after the report
        return bool(run.json("published.json").get("finished", False))
    return not report or (run.path / "report.html").exists() or find_spec("matplotlib") is None


def failed_sweep(failures: Mapping[str, FedloomError], count: int) -> FedloomError:
    """Return the error of a sweep of ``count`` runs with these failures; of the class of the first one."""
    first = next(iter(failures.values()))
    listing = "\n".join(f"  {name}: {error}" for name, error in failures.items())
    return type(first)(f"{len(failures)} of {pluralize(count, 'run')} failed:\n{listing}")


def run_points(
    points: Sequence[Point],
    folder: Path,
    options: RunOptions,
    observer: JobObserver | None = None,
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
        same. A failed run, e.g. one that diverged, counts as a result, and does not end the sweep.

    Raise ExperimentError if a folder is in use, or a method cannot train with a point's clients; raised before anything
    runs. Raise InterruptedRun if the sweep was stopped.
    """
    check_parallel(parallel, [point.experiment for point in points])
    check_folder_of_runs(folder, options)
    for point in points:
        check_folder(RunFolder(folder / point.name), point.experiment, options.resume)
    sweep = _Sweep(points, folder, options, observer or JobObserver())
    run_jobs(sweep, parallel, signals=options.signals)
    return {point.name: sweep.failures[point.name] for point in points if point.name in sweep.failures}


class _Sweep(Jobs):
    """Points that are not finished yet."""

    def __init__(self, points: Sequence[Point], folder: Path, options: RunOptions, observer: JobObserver) -> None:
        self.count, self.observer = len(points), observer
        self.failures: dict[str, FedloomError] = {}
        self._waiting = list[Job]()
        for number, point in enumerate(points, start=1):
            e = point.experiment
            job = Job(number, len(points), point.name, point.name, e, job_options(options, folder, point.name, e))
            if complete(job.folder, e, options.report):
                observer.ended(job, "already finished")
                continue
            try:
                check_roster(e, options)
            except ExperimentError as error:
                raise ExperimentError(f"at {point.name}: {error}") from error
            self._waiting.append(job)

    def __iter__(self) -> Iterator[Job]:
        """Yield the runs."""
        return iter(self._waiting)

    def ended(self, job: Job, error: FedloomError | None) -> None:
        """Record a failure."""
        if error is not None:
            self.failures[job.name] = error
            self.observer.ended(job, f"failed: {error}", error)


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


def job_options(options: RunOptions, folder: Path, name: str, e: Experiment) -> RunOptions:
    """Return the options of one run of a sweep or search in a folder."""
    publish = options.publish
    if publish is not None:
        publish = f"{publish.rstrip('/')}/{name}"
    elif e.storage is not None and is_url(e.storage):
        publish = f"{e.storage.rstrip('/')}/runs/{folder.name}/{name}"
    return replace(options, out=folder / name, name=f"{folder.name}/{name}", publish=publish)
