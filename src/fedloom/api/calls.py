"""Functions of the API: ``run``, ``sweep``, ``load``, ``compare``, ``personalize``, ``privacy_cost`` and ``fetch``."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fedloom.api.run import Comparison, Run, Sweep
from fedloom.core.home import expanded
from fedloom.core.options import with_keywords
from fedloom.engine.options import PrivacyQuestion, RunOptions
from fedloom.errors import ExperimentError
from fedloom.serving.personalization import PersonalizationRequest

if TYPE_CHECKING:
    from torch import nn

    from fedloom.engine.observer import RunObserver
    from fedloom.experiment import Experiment
    from fedloom.ledger.privacy_cost import PrivacyCost
    from fedloom.serving.personal_model import PersonalModel

P = ParamSpec("P")
R = TypeVar("R")
Request = TypeVar("Request")


@with_keywords(RunOptions)
def run(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    /,
    *,
    options: RunOptions,
    progress: bool | RunObserver = True,
    **overrides: Any,
) -> Run:
    """Run an experiment on this machine, from its data to its report.

    An interruption (Ctrl-C, or "interrupt the kernel") stops the run after the current round; ``resume=True``
    continues it.

    Parameters
    ----------
    experiment
        Path or URL of an experiment file; its content as a mapping, whose sections may be objects; or a
        :class:`fedloom.Experiment`.
    {options}
    progress
        Show progress on a terminal or in a notebook; or an observer to notify instead.
    overrides
        Keys of the experiment, with two underscores for each dot: ``seed=2``, ``federation__rounds=10``. A mapping
        replaces the whole value. ``data`` may be a :class:`fedloom.Federated`, and ``model`` an ``nn.Module``, whose
        weights are the initial model; the run then stays in this process. ``augment=`` takes transforms of
        ``torchvision.transforms.v2``, which change the training images (``data.augment``).

    Returns
    -------
    Run
        The finished run.

    Raises
    ------
    ExperimentError
        If the experiment is invalid or the folder is in use; nothing has been written then.
    FedloomError
        Any other error, of the class that describes what went wrong (docs/troubleshooting.md).

    Examples
    --------
    ::

        run = fedloom.run("experiments/quickstart.yaml", seed=2, federation__rounds=10)
        run.history["unseen.accuracy_mean"].plot()
    """
    from fedloom import experiment as experiments
    from fedloom.engine.run_experiment import run_experiment

    e = experiments.of(experiment, stored=options.out if options.resume else None, **with_module(overrides))
    with restored():
        try:
            folder = run_experiment(e, replace(options, signals=True), observer_of(progress)).folder
        finally:
            gc.collect()  # a run's objects form cycles; uncollected, they grow by hundreds of megabytes a run
    return Run(folder)


def observer_of(progress: bool | RunObserver) -> RunObserver | None:
    """Return the observer that shows the progress of a run, or the one given; None for no progress."""
    from fedloom.api.watch import Watch
    from fedloom.engine.observer import RunObserver

    return progress if isinstance(progress, RunObserver) else Watch() if progress else None


@with_keywords(RunOptions, excluded=("replay",))
def sweep(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    /,
    *,
    options: RunOptions,
    grid: Mapping[str, Iterable[Any]] | None = None,
    seeds: Iterable[int] | str | None = None,
    parallel: int = 1,
    progress: bool = True,
    **overrides: Any,
) -> Sweep:
    """Run an experiment at every point of a grid of settings and seeds.

    Parameters
    ----------
    experiment, overrides
        As in :func:`run`.
    {options}
    grid
        Values by key, with dots or two underscores: ``{"algorithm.local.lr": [0.01, 0.1]}``. All combinations are run.
    seeds
        ``[1, 2, 3]`` or ``"1-3"``; None: the experiment's seed.
    parallel
        Number of concurrent runs, each in a process with its share of the cores. The results do not depend on it.
    progress
        Show progress.

    Returns
    -------
    Sweep
        The finished runs, and the errors of the others: a failed run does not stop the rest.

    Raises
    ------
    ExperimentError
        If a point is invalid or a folder is in use; raised before anything runs.
    """
    from fedloom import experiment as experiments
    from fedloom.api.watch import SweepWatch
    from fedloom.experiment.loading import plain_value
    from fedloom.tuning.sweep import run_points

    axes = []
    for key, values in (grid or {}).items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise ExperimentError(f"grid[{key!r}] must be a list of values (got {values!r}).", key="grid")
        texts = ",".join(experiments.as_yaml(plain_value(value, f"grid[{key!r}]")) for value in values)
        axes.append(f"{key.replace('__', '.')}={texts}")
    if not isinstance(seeds, str | Iterable | None):
        raise ExperimentError(f"seeds must be numbers, such as [1, 2, 3] or '1-3' (got {seeds!r}).", key="seeds")
    if seeds is not None and not isinstance(seeds, str):
        seeds = ",".join(map(str, seeds))
    if seeds is None and not axes:
        raise ExperimentError("A sweep needs grid or seeds, or both.", key="grid")
    stored = experiments.begun_in(options.out) if options.resume else None
    e = experiments.of(experiment, stored=stored, **with_module(overrides))
    points = experiments.points(e, (), seeds, axes, stored=stored)
    folder = options.out or points[0].experiment.runs / f"{points[0].experiment.name}-sweep"
    observer = SweepWatch(choosing=bool(axes)) if progress else None
    with restored():
        failures = run_points(points, folder, replace(options, signals=True), observer, parallel=parallel)
    runs = [Run(folder / point.name) for point in points if point.name not in failures]
    return Sweep(folder, runs, failures)


def load(where: str | Path, *, model: nn.Module | str | None = None) -> Run:
    """Return a run, finished or not, from its folder or from the URL that it is published at.

    Parameters
    ----------
    model
        The module that the run's clients trained, if another process had it in memory; its weights are ignored. Or
        the run's ``model.factory``, as ``package:function``, which permits this process to call it. A factory that only
        the run names is code of the run's author and is not called.

    Raises
    ------
    DataError
        If there is no such run.
    ExperimentError
        If the module or factory is not the one that the run used.
    StorageError, RefusedError
        If the URL's store cannot be used.
    """
    run = Run(where)
    if isinstance(model, str):
        from fedloom.models.factories import permit_factory

        if model != run.factory:
            raise ExperimentError(f"model must be the factory that the run trained, {run.factory} (got {model!r}).")
        permit_factory(model)
    elif model is not None:
        from fedloom.models.module import remember

        remember(model, run.factory or "a built-in network")
    return run


def compare(
    runs: Run | Sweep | str | Path | Iterable[Run | Sweep | str | Path], *, against: str | None = None
) -> Comparison:
    """Compare finished runs; runs that differ only in the seed form one row.

    Parameters
    ----------
    runs
        Runs, sweeps, or folders that hold them.
    against
        Baseline for the tests: a method, or a row's label; None: the best on validation.

    Raises
    ------
    DataError
        If a run is not finished.
    ExperimentError
        If the runs cannot be compared.
    """
    folders: list[str | Path] = []
    for one in [runs] if isinstance(runs, Run | Sweep | str | Path) else runs:
        folders += [one] if isinstance(one, str | Path) else [one.folder]
    if not folders:
        raise ExperimentError("Give at least one run, sweep, or folder that holds runs.", key="runs")
    return Comparison(folders, against)


def _with_parameters_of(request: Callable[P, Request]) -> Callable[[Callable[[Request], R]], Callable[P, R]]:
    """Return a decorator that gives a function of a request the parameters of the request's class."""

    def decorate(function: Callable[[Request], R]) -> Callable[P, R]:
        signature = inspect.signature(request)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            signature.bind(*args, **kwargs)  # raises TypeError
            return function(request(*args, **kwargs))

        returned = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate


@_with_parameters_of(PersonalizationRequest)
def personalize(request: PersonalizationRequest) -> PersonalModel:
    """Get a model for a client that took no part in a run, from the run's server or folder (docs/serving.md).

    Parameters
    ----------
    where
        Address ``HOST:PORT`` of `fedloom serve` or of an aggregator, a run's folder, or the URL of a published run.
    x, y
        Raw examples ``[n, *input_shape]`` and labels ``[n]``: pixels from 0 to 255, features and tokens unchanged.
        Labels are names of the run's classes, or class positions from 0 (integers are names where the classes are
        integers). Omit ``y`` where the method needs no labels.
    data
        Folder made by `fedloom data pack`, instead of ``x`` and ``y``.
    client
        Client id, which seeds the random numbers: the same data and id give the same model.
    checkpoint
        ``last``, a round, or, from a run, ``best``.
    predictor
        ``personal``, or another predictor of the method.
    epsilon, delta, clip
        (ε, δ)-differential privacy of what is disclosed of the data, with each example's embedding clipped to
        norm C (docs/serving.md). Without ``epsilon``, the run's training setting applies.
    ledger, budget
        File that records the privacy spent, and the largest total ε allowed. A request that would exceed
        the budget is refused before anything is disclosed.
    timeout_s
        Seconds to wait for a server's answer; a busy server is retried until then.
    credentials, token, insecure
        Credentials for a server: a folder with those of ``ca.crt``, ``tls.crt``, ``tls.key`` and ``token`` that it
        requires; a token instead of the folder's; and whether a token may be sent in plaintext. What is not given
        comes from the environment (docs/security.md).

    Returns
    -------
    PersonalModel
        PyTorch module: raw inputs in, probabilities out.

    Raises
    ------
    DataError
        If the data do not match the run's kind, or the run or round does not exist.
    ExperimentError
        If an argument is not allowed.
    RefusedError
        If the server refuses the credentials.
    QuorumError
        If no model arrives in time.

    Examples
    --------
    ::

        model = fedloom.personalize("models.example.org:7733", x, y, credentials="hospital-c")
        model(x).argmax(1)
    """
    from fedloom.serving.personal import request_model

    return request_model(request)


@_with_parameters_of(PersonalizationRequest)
async def personalize_async(request: PersonalizationRequest) -> PersonalModel:
    """Get a model as :func:`personalize` does, as a coroutine."""
    from fedloom.serving.personal import request_model_async

    return await request_model_async(request)


@with_keywords(PrivacyQuestion)
def privacy_cost(
    experiment: Experiment | Mapping[str, Any] | str | Path, /, *, options: PrivacyQuestion, **overrides: Any
) -> PrivacyCost:
    """Return the privacy cost of an experiment's training, like ``fedloom privacy``; nothing is trained.

    Parameters
    ----------
    experiment, overrides
        As in :func:`run`; the experiment has ``federation.privacy``.
    {options}

    Returns
    -------
    PrivacyCost
        ε by rounds, noise multiplier, size of the noise beside updates, and the same in sentences (``print`` it).

    Raises
    ------
    ExperimentError
        If the experiment is invalid or not private, or a number of clients or examples is missing.
    """
    from fedloom import experiment as experiments
    from fedloom.ledger.privacy_cost import cost_of

    return cost_of(experiments.of(experiment, **with_module(overrides)), options)


def fetch(name: str, root: str | Path | None = None) -> Path:
    """Download a data set and return its folder; existing files are only verified.

    Parameters
    ----------
    name
        Name of the data set, such as ``fashion-mnist`` (docs/data.md).
    root
        Data folder; None: ``$FEDLOOM_DATA``, else ``~/.cache/fedloom``.

    Raises
    ------
    DataError
        If there is no data set of that name, or it cannot be obtained; the message lists what was tried.
    """
    from fedloom.api.progress import show_progress
    from fedloom.data import datasets

    source = datasets.find_dataset(name)
    with show_progress(bytes_counted=True) as report:
        return datasets.fetch_dataset(
            source, root, on_progress=lambda now: report(f"{name}: {now.doing}", now.done, now.total)
        )


def with_module(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides in the form that a file holds.

    An ``nn.Module`` as the model is replaced by a name, which only this process can resolve; ``augment`` by the
    description of its transforms, ``data.augment``.
    """
    if "augment" in overrides:
        from fedloom.data.augment import describe_transforms

        rest = {key: value for key, value in overrides.items() if key != "augment"}
        overrides = {**rest, "data__augment": describe_transforms(overrides["augment"])}
    if isinstance(overrides.get("model"), Mapping | str | None) or hasattr(overrides["model"], "model_dump"):
        return dict(overrides)
    from fedloom.models.module import remember

    section = {"name": "module", "factory": remember(overrides["model"])}
    return {"runtime__workers": 0, **overrides, "model": section}


def folders(one_or_more: str | Path | Iterable[str | Path]) -> tuple[Path, ...]:
    """Return the folders that an argument names."""
    return tuple(map(expanded, [one_or_more] if isinstance(one_or_more, str | Path) else one_or_more))


@contextmanager
def restored() -> Iterator[None]:
    """Restore the settings of torch that a run changes."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it takes a second, for an import
            torch.use_deterministic_algorithms(deterministic)
