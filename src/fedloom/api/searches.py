"""Hyperparameter search in Python: ``fedloom.search``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api.calls import restored, with_module
from fedloom.api.run import Run, RunSequence
from fedloom.core.options import with_keywords
from fedloom.core.words import pluralize
from fedloom.engine.options import JobOptions, RunOptions

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedloom.engine.jobs import JobObserver
    from fedloom.experiment import Experiment
    from fedloom.experiment.search_space import Make, SearchPlan, SearchSpace
    from fedloom.tuning.search import SearchResult


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
    chosen_texts
        Its values as texts, by dotted key.
    """

    def __init__(self, result: SearchResult) -> None:
        folder = result.folder
        super().__init__(folder, (Run(folder / trial.name) for trial in result.trials if trial.state == "done"))
        self.summary = result.summary
        self.chosen = Run(folder / result.chosen.name)
        self.chosen_texts = dict(result.chosen.texts)

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

        columns = ("trial", "state", "validation", "epsilon")
        lines = [{**{k: t[k] for k in columns}, **t["parameters"]} for t in self.summary["trials"]]
        return frame_from_lines(lines, "Search.table").set_index("trial")

    def __repr__(self) -> str:
        return f"<{pluralize(len(self.summary['trials']), 'trial')} in {self.folder}, chosen: {self.parameters}>"


@with_keywords(JobOptions)
def search(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    space: SearchSpace | Mapping[str, Any] | str | Path,
    /,
    *,
    options: JobOptions,
    trials: int | None = None,
    parallel: int = 1,
    progress: bool = True,
    **overrides: Any,
) -> Search:
    """Find the values of an experiment's keys that are best on validation data (docs/search.md).

    Parameters
    ----------
    experiment, overrides
        As in :func:`run`.
    space
        File of the search space, or its content as a mapping: ``{"parameters": {"algorithm.local.lr": {"min": 1e-3,
        "max": 1, "log": True}}, "sampler": "tpe", "early_stopping": "median"}``.
    {options}
    trials
        Number of trials, which may grow when a search is resumed; None: the space's, or 20, or with sampler ``grid``
        all combinations.
    parallel
        Number of concurrent trials, each in a process with its share of the cores. With 1, the same seed gives the
        same trials.
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

    stored = experiments.begun_in(options.out) if options.out is not None and options.resume else None
    search_space = read_space(space, trials=trials)
    e = experiments.of(experiment, stored=stored, **with_module(overrides))

    def make(changes: Sequence[str]) -> Experiment:
        return experiments.of(e, changes, stored=stored)

    observer = SweepWatch(choosing=True) if progress else None
    return carry_out_search(plan_search(search_space, make), make, options, observer, parallel)


def carry_out_search(
    plan: SearchPlan, make: Make, options: JobOptions, observer: JobObserver | None, parallel: int
) -> Search:
    """Run a search with these options, and write its page; trials get no reports."""
    from importlib.util import find_spec

    from fedloom.reporting.search_page import write_search_page
    from fedloom.tuning.search import run_search

    e = make(())
    folder = options.out or e.runs / f"{e.name}-search"
    with restored():
        of_trials = RunOptions(**vars(options), report=False, signals=True)
        result = run_search(plan, make, folder, of_trials, observer, parallel=parallel)
    if find_spec("matplotlib") is not None:
        write_search_page(folder, result.summary)
    return Search(result)
