"""Hyperparameter search in Python: ``fedloom.search``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api.calls import restored, run_options, with_module
from fedloom.api.run import Run, RunSequence
from fedloom.core.words import pluralize

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedloom.experiment import Experiment
    from fedloom.experiment.search_space import Make, SearchPlan, SearchSpace
    from fedloom.runner.options import RunOptions
    from fedloom.runner.parallel import JobObserver
    from fedloom.runner.search import SearchResult


class Search(RunSequence):
    """Completed trials of a search, in the order in which they were tried.

    Attributes
    ----------
    folder
        Folder with a run's folder for each trial, ``search.json`` and ``search.html``.
    summary
        Content of ``search.json``: all trials, also stopped and failed ones, and the chosen one with its test results.
    chosen
        Run that is best on validation data; its summary has the test results.
    """

    def __init__(self, found: SearchResult) -> None:
        super().__init__(
            found.folder, (Run(found.folder / trial.name) for trial in found.trials if trial.state == "done")
        )
        self.summary = found.summary
        self.chosen = Run(found.folder / found.chosen.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """Values of the chosen trial, by dotted key."""
        return dict(self.summary["chosen"]["parameters"])

    @property
    def table(self) -> DataFrame:
        """Row for each trial: its values, its state, and the metric on validation data; no test results.

        Raises
        ------
        ExperimentError
            If pandas is not installed.
        """
        from fedloom.api.frames import frame_from_lines

        shown = ("trial", "state", "validation", "epsilon")
        lines = [{**{k: t[k] for k in shown}, **t["parameters"]} for t in self.summary["trials"]]
        return frame_from_lines(lines, "Search.table").set_index("trial")

    def __repr__(self) -> str:
        return f"<{pluralize(len(self.summary['trials']), 'trial')} in {self.folder}, chosen: {self.parameters}>"


def search(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    space: SearchSpace | Mapping[str, Any] | str | Path,
    /,
    *,
    trials: int | None = None,
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
) -> Search:
    """Find the values of an experiment's keys that are best on validation data (docs/search.md).

    Parameters
    ----------
    experiment, partition, packed, observe, publish, track, overrides
        As in :func:`run`.
    space
        File of the search space, or its content as a mapping: ``{"parameters": {"algorithm.local.lr": {"min": 1e-3,
        "max": 1, "log": True}}, "sampler": "tpe", "early_stopping": "median"}``.
    trials
        Number of trials; None: the space's, or 20, or with sampler ``grid`` all combinations.
    parallel
        Number of concurrent trials, each in a process with its share of the cores. With 1, the same seed gives the
        same trials.
    out
        Folder that holds one folder per trial; None: ``runs/NAME-search``.
    resume
        Continue the search in the folder; finished trials are kept, and their number may grow.
    report
        Write a report of each trial, and a page of the search.
    progress
        Show progress.

    Returns
    -------
    Search
        The trials, and the chosen one.

    Raises
    ------
    ExperimentError
        If the space or the experiment is invalid, the experiment refuses an end of a range or a choice, or the folder
        is in use; raised before anything runs.
    FedloomError
        If no trial was completed.

    Examples
    --------
    ::

        found = fedloom.search("experiments/vowel.yaml", "space.yaml", trials=20, algorithm__personalize_steps=10)
        found.parameters, found.chosen.summary["unseen"]
    """
    from fedloom import experiment as experiments
    from fedloom.api.watch import SweepWatch
    from fedloom.experiment.search_space import plan_search, read_space

    options = run_options(out, resume, partition, packed, observe, publish, report, track, None)
    begun = experiments.begun_in(options.out) if options.out is not None and resume else None
    asked = read_space(space, trials=trials)
    e = experiments.of(experiment, begun=begun, **with_module(overrides))

    def make(changes: Sequence[str]) -> Experiment:
        return experiments.of(e, changes, begun=begun)

    observer = SweepWatch(choosing=True) if progress else None
    return Search(carry_out_search(plan_search(asked, make), make, options, observer, parallel))


def carry_out_search(
    plan: SearchPlan, make: Make, options: RunOptions, observer: JobObserver | None, parallel: int
) -> SearchResult:
    """Run a search with these options, and write its page."""
    from importlib.util import find_spec

    from fedloom.reporting.search_page import write_search_page
    from fedloom.runner.search import run_search

    e = make(())
    folder = options.out or e.runs / f"{e.name}-search"
    with restored():
        found = run_search(plan, make, folder, options, observer, parallel=parallel)
    if options.report and find_spec("matplotlib") is not None:
        write_search_page(folder, found.summary)
    return found
