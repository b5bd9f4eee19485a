"""``fedloom.run``, ``sweep``, ``load``, ``compare`` and ``fetch``: what one does with FedLoom, as functions."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api.run import Comparison, Run, Sweep
from fedloom.errors import ExperimentError

if TYPE_CHECKING:
    from torch import nn

    from fedloom.experiment import Experiment, Point
    from fedloom.runner.observer import RunObserver
    from fedloom.runner.options import RunOptions
    from fedloom.runner.sweep import SweepObserver


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    /,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    replay: str | Path | None = None,
    partition: str | Path | None = None,
    packed: str | Path | Iterable[str | Path] = (),
    observe: str | Path | Iterable[str | Path] = (),
    publish: str | None = None,
    report: bool = True,
    track: str | Iterable[str] = (),
    progress: bool | RunObserver = True,
    **overrides: Any,
) -> Run:
    """Run an experiment on this machine, from its data to its report.

    An interruption (Ctrl-C, "interrupt the kernel") stops it after the round at hand; ``resume=True`` goes on.

    Parameters
    ----------
    experiment
        The path or URL of an experiment file; its content as a mapping, in which sections may be objects; or an
        :class:`fedloom.Experiment`.
    out
        The run's folder; None: ``runs/NAME-ALGORITHM-seedN``.
    resume
        Go on from the last checkpoint of the folder, or return the run as it is if it has come to its end.
    replay
        The folder of a run whose journal is repeated.
    partition
        Folder or URL of a partition that was made before; None: the experiment's is made.
    packed, observe
        With ``data.own``, folders of packed clients: of those that train, and of those that are measured alone.
    publish
        URL of a store to publish the run at as it goes.
    report
        Write the report at the end: two seconds, which many small runs save; :meth:`Run.report` writes it later.
    track
        Trackers beside those of the experiment: ``["tensorboard"]`` (docs/tracking.md).
    progress
        Show how it goes, on a terminal or in a notebook; or who is told instead.
    overrides
        Keys of the experiment, with two underscores for each dot: ``seed=2``, ``federation__rounds=10``. A mapping
        replaces what the key has. ``data`` may be a :class:`fedloom.Federated`, and ``model`` an ``nn.Module``, from
        which training starts, in this process.

    Returns
    -------
    Run
        The finished run.

    Raises
    ------
    ExperimentError
        If anything in the experiment is not allowed, or the folder is taken; nothing has been written then.
    FedloomError
        Of the class of what went wrong (docs/exit-codes.md).

    Examples
    --------
    ::

        run = fedloom.run("experiments/quickstart.yaml", seed=2, federation__rounds=10)
        run.history["unseen.accuracy_mean"].plot()
    """
    from fedloom import experiment as experiments

    options = _options(out, resume, partition, packed, observe, publish, report, track, replay)
    e = experiments.of(experiment, begun=options.out if resume else None, **with_module(overrides))
    return carry_out(e, options, progress)


def carry_out(experiment: Experiment, options: RunOptions, progress: bool | RunObserver = True) -> Run:
    """Run a checked experiment, as the options say."""
    from fedloom.api.watch import Watch
    from fedloom.runner.observer import RunObserver
    from fedloom.runner.run_experiment import run_experiment

    observer = progress if isinstance(progress, RunObserver) else Watch() if progress else None
    with _as_before():
        found = run_experiment(experiment, options, observer)
    return Run(found.folder)


def sweep(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    /,
    *,
    grid: Mapping[str, Iterable[Any]] | None = None,
    seeds: Iterable[int] | str | None = None,
    parallel: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    partition: str | Path | None = None,
    packed: str | Path | Iterable[str | Path] = (),
    observe: str | Path | Iterable[str | Path] = (),
    publish: str | None = None,
    report: bool = True,
    track: str | Iterable[str] = (),
    progress: bool = True,
    **overrides: Any,
) -> Sweep:
    """Run an experiment at every point of a grid of settings and seeds.

    Parameters
    ----------
    experiment, partition, packed, observe, publish, report, track, overrides
        As of :func:`run`.
    grid
        Values by key, with dots or two underscores: ``{"algorithm.local.lr": [0.01, 0.1]}``; the runs are the product.
    seeds
        ``[1, 2, 3]``, or ``"1-3"``; None: the experiment's.
    parallel
        Runs side by side, each in a process with its share of the cores. Numbers do not depend on it.
    out
        A folder in which each run has its own; None: ``runs/NAME-sweep``.
    resume
        Leave finished runs as they are, and go on with the others.
    progress
        Show how it goes.

    Returns
    -------
    Sweep
        The finished runs, and why others failed: a run that fails does not keep the others from running.

    Raises
    ------
    ExperimentError
        If a point is not allowed, or a folder is taken; before anything runs.
    """
    from fedloom import experiment as experiments
    from fedloom.errors import ExperimentError
    from fedloom.experiment.loading import plain

    axes = []
    for key, values in (grid or {}).items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise ExperimentError(f"grid[{key!r}]: found {values!r}; allowed: a list of values")
        found = ",".join(experiments.as_yaml(plain(value, f"grid[{key!r}]")) for value in values)
        axes.append(f"{key.replace('__', '.')}={found}")
    if not isinstance(seeds, str | Iterable | None):
        raise ExperimentError(f"seeds: found {seeds!r}; allowed: [1, 2, 3], or '1-3'")
    asked = seeds if seeds is None or isinstance(seeds, str) else ",".join(map(str, seeds))
    if asked is None and not axes:
        raise ExperimentError("sweep: found neither grid nor seeds; allowed: one of them, or both")
    options = _options(out, resume, partition, packed, observe, publish, report, track, None)
    begun = experiments.begun_in(options.out) if resume else None
    e = experiments.of(experiment, begun=begun, **with_module(overrides))
    points = experiments.points(e, (), asked, axes, begun=begun)
    return carry_out_sweep(points, options, _sweep_watch(choosing=bool(axes)) if progress else None, parallel)


def carry_out_sweep(
    points: Sequence[Point], options: RunOptions, observer: SweepObserver | None, parallel: int
) -> Sweep:
    """Run the points of a sweep, as the options say."""
    from fedloom.runner.sweep import run_points

    e = points[0].experiment
    folder = options.out or e.runs / f"{e.name}-sweep"
    with _as_before():
        failures = run_points(points, folder, options, observer, parallel=parallel)
    done = [Run(folder / point.name) for point in points if point.name not in failures]
    return Sweep(folder, done, failures)


def load(where: str | Path, *, model: nn.Module | str | None = None) -> Run:
    """Return a run, finished or not, from its folder or from the URL where it is published.

    Parameters
    ----------
    model
        The module that the run's clients trained, where another process had it in memory; its weights do not matter.
        Or the ``package:function`` that the run names as ``model.factory``: this process may call it then. A factory
        that only the run names is code of whoever made the run, and is not called.

    Raises
    ------
    DataError
        If there is no run.
    ExperimentError
        If the module or factory is not the one that the run trained.
    StorageError, RefusedError
        If the store of a URL cannot be used.
    """
    run = Run(where)
    if isinstance(model, str):
        from fedloom.models.factories import permit_factory

        if model != run.factory:
            raise ExperimentError(f"model must be the factory that the run trained, {run.factory} (got {model!r}).")
        permit_factory(model)
    elif model is not None:
        from fedloom.models.module import remember

        remember(model, run.factory or "a network that FedLoom has")
    return run


def compare(
    runs: Run | Sweep | str | Path | Iterable[Run | Sweep | str | Path], *, against: str | None = None
) -> Comparison:
    """Put finished runs side by side; runs that differ in the seed alone are one row.

    Parameters
    ----------
    runs
        Runs, sweeps, or folders of them.
    against
        The method, or the label of a row, that the others are tested against; None: the best on validation.

    Raises
    ------
    DataError
        If one is not finished.
    ExperimentError
        If they cannot be compared.
    """
    folders: list[str | Path] = []
    for one in [runs] if isinstance(runs, Run | Sweep | str | Path) else runs:
        folders += [one] if isinstance(one, str | Path) else [one.folder]
    if not folders:
        raise ExperimentError("runs: found none; allowed: runs, sweeps, or folders of them")
    return Comparison(folders, against)


def fetch(name: str, root: str | Path | None = None) -> Path:
    """Fetch a data set, and return its folder; what is there already is only checked.

    Parameters
    ----------
    name
        Such as ``fashion-mnist`` (docs/data-sources.md).
    root
        Folder for data; None: ``$FEDLOOM_DATA``, else ``~/.cache/fedloom``.

    Raises
    ------
    DataError
        If there is no data set of that name, or it cannot be had: what was tried, and what to do.
    """
    from fedloom.api.progress import progress
    from fedloom.data import sources

    source = sources.find(name)
    with progress(bytes_counted=True) as tell:
        return sources.fetch(source, root, on_progress=lambda now: tell(f"{name}: {now.doing}", now.done, now.total))


def with_module(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides in which a model that is an ``nn.Module`` is named; only this process has it, which then does all."""
    if isinstance(overrides.get("model"), Mapping | str | None) or hasattr(overrides["model"], "model_dump"):
        return dict(overrides)
    from fedloom.models.module import remember

    section = {"name": "module", "factory": remember(overrides["model"])}
    return {"runtime__workers": 0, **overrides, "model": section}


def _options(
    out: str | Path | None,
    resume: bool,
    partition: str | Path | None,
    packed: str | Path | Iterable[str | Path],
    observe: str | Path | Iterable[str | Path],
    publish: str | None,
    report: bool,
    track: str | Iterable[str],
    replay: str | Path | None,
) -> RunOptions:
    from fedloom.runner.options import RunOptions

    return RunOptions(
        out=None if out is None else Path(out),
        resume=resume,
        replay=None if replay is None else Path(replay),
        partition=None if partition is None else str(partition),
        data=tuple(map(Path, _several(packed))),
        observe=tuple(map(Path, _several(observe))),
        publish=publish,
        report=report,
        track=tuple(map(str, _several(track))),
        signals=True,
    )


def _several(one_or_more: str | Path | Iterable[str | Path]) -> Iterable[str | Path]:
    return [one_or_more] if isinstance(one_or_more, str | Path) else one_or_more


def _sweep_watch(*, choosing: bool) -> SweepObserver:
    from fedloom.api.watch import SweepWatch

    return SweepWatch(choosing=choosing)


@contextmanager
def _as_before() -> Iterator[None]:
    """Leave torch and the garbage collector as they were: a run sets them for its process."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        gc.unfreeze()
