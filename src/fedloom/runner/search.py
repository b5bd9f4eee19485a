"""Hyperparameter search on this machine: trials are ordinary runs, and only validation data choose among them."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.core.words import pluralize
from fedloom.errors import ExperimentError, FedloomError, InterruptedRun, QuorumError, argument
from fedloom.experiment import Experiment, Point
from fedloom.experiment.search_space import Make, SearchPlan
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.runner.observer import RunObserver
from fedloom.runner.options import RunOptions
from fedloom.runner.parallel import Job, JobEvents, run_parallel
from fedloom.runner.run_data import check_roster
from fedloom.runner.run_experiment import run_experiment
from fedloom.runner.sweep import SweepObserver, check_folder_of_runs, check_parallel, options_of
from fedloom.runner.trials import LOG, Schedule, Trial, Trials, import_optuna
from fedloom.runs.files import EXPERIMENT, METRICS, SUMMARY, RunFiles
from fedloom.runs.folder import RunFolder
from fedloom.tasks.headline import GROUPS, headline_of, validation_value, values_of
from fedloom.tasks.names import Headline

SEARCH = "search.json"


class TrialStopped(InterruptedRun):
    """Early end of a trial that has fallen behind."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes
    ----------
    folder
        Folder with a run's folder for each trial, and ``search.json``.
    trials
        All trials, in the order in which they were asked for.
    chosen
        Trial that is best on validation data.
    headline
        Metric that ranks the trials.
    summary
        Content of ``search.json``.
    """

    folder: Path
    trials: tuple[Trial, ...]
    chosen: Trial
    headline: Headline
    summary: dict[str, Any]


def run_search(
    plan: SearchPlan,
    make: Make,
    folder: Path,
    options: RunOptions,
    observer: SweepObserver | None = None,
    *,
    parallel: int = 1,
) -> SearchResult:
    """Run the trials of a search that are not finished yet, and choose one on validation data.

    Test data play no part in the choice: ``search.json`` has test results of the chosen trial only.

    Parameters
    ----------
    plan
        Checked search (:func:`fedloom.experiment.search_space.plan_search`).
    make
        Returns the experiment with overrides.
    folder
        Folder of the search.
    options
        Options of each run; the search sets ``out``, ``name``, ``resume`` and ``watcher``, and publishes below
        ``publish``. With ``resume``, the search in the folder continues; its number of trials may grow.
    parallel
        Number of concurrent trials. If 1, the same seed gives the same trials; if more, they depend on which trial ends
        first, unless the sampler is random or grid.

    Raise ExperimentError if the folder is in use, or the clients have no validation examples; InterruptedRun if the
    search was stopped; FedloomError if no trial was completed, or a run failed for a reason other than its values (a
    resumed search repeats such a trial).
    """
    import_optuna()
    base = make(plan.fixed)
    check_parallel(parallel, [base])
    _check_folder(folder, options)
    check_roster(base, options)
    files = RunFiles(folder)
    with files.held():
        search = _Search(plan, make, files, options, observer or SweepObserver(), base)
        search.run(parallel)
        return search.result()


class _Search:
    """Search in progress."""

    def __init__(
        self,
        plan: SearchPlan,
        make: Make,
        files: RunFiles,
        options: RunOptions,
        observer: SweepObserver,
        base: Experiment,
    ) -> None:
        self._plan, self._make, self._files, self._options, self._observer = plan, make, files, options, observer
        self._base = base
        digest = hashlib.sha256(base.shared_json().encode()).hexdigest()
        schedule = Schedule(base.federation.rounds, base.evaluation.every)
        self._trials = Trials(plan, files, digest, schedule)
        self._headline: Headline | None = None
        self._parallel = 1
        self._failures: dict[str, FedloomError] = {}  # by trial, of those to be repeated

    def run(self, parallel: int) -> None:
        """Run the remaining trials."""
        self._parallel = parallel
        for trial in self._trials.all:
            if (last := RunFolder(self._files.path / trial.name).last_evaluation()) is not None:
                self._headline = headline_of(last[0])
            if trial.state != "running":
                self._observer.finished_before(*self._shown(trial, self._base))
        if parallel == 1:
            self._one_by_one()
        else:
            self._in_parallel()

    def result(self) -> SearchResult:
        """Choose a trial and write ``search.json``; raise if there is none to choose, or a trial must be repeated."""
        chosen = self._trials.best()
        self._write(chosen)
        if self._failures:
            first, *_ = self._failures.values()
            listed = "\n".join(f"  {name}: {error}" for name, error in self._failures.items())
            raise type(first)(
                f"{pluralize(len(self._failures), 'trial')} could not be completed:\n{listed}",
                hint=f"fix the cause and continue with {argument('resume')}",
            )
        if chosen is None or self._headline is None:
            errors = [f"  {trial.name}: {trial.error}" for trial in self._trials.all if trial.error is not None]
            raise QuorumError("\n".join(["No trial was completed within the bounds of the search.", *errors]))
        trials = tuple(self._trials.all)
        return SearchResult(self._files.path, trials, chosen, self._headline, self._files.json(SEARCH))

    def _remaining(self) -> Iterator[tuple[Trial, Experiment]]:
        """Yield the trials to run, with their experiments: first those in progress, then new ones, drawn on demand."""
        for trial in self._trials.unfinished:
            if (e := self._experiment(trial)) is None:
                continue
            if trial.behind and max(trial.measured) != e.federation.rounds:  # killed before the trial was stopped
                self._stop(trial)
            else:
                yield trial, e
        while len(self._trials.all) < self._plan.trials:
            trial = self._trials.ask()
            if (e := self._experiment(trial)) is not None:
                yield trial, e

    def _experiment(self, trial: Trial) -> Experiment | None:
        """Return the experiment of a trial; if its values cannot be combined, record its failure and return None."""
        try:
            return self._make(self._plan.overrides(trial.texts))
        except ExperimentError as error:
            self._fail(trial, error, self._base)
            return None

    def _one_by_one(self) -> None:
        for trial, e in self._remaining():
            options = replace(self._options_of(trial, e), watcher=_Measuring(self._measured, trial, e))
            try:
                run_experiment(e, options, self._observer.begins(*self._shown(trial, e)))
            except TrialStopped:
                self._stop(trial)
            except (QuorumError, ExperimentError) as error:
                if not self._is_due_to_values(error):
                    raise
                self._fail(trial, error, e)
            except InterruptedRun as error:
                done = sum(one.state != "running" for one in self._trials.all)
                raise InterruptedRun(f"{error} ({trial.name} of {self._plan.trials}; {done} done)") from error
            else:
                self._finish(trial, e)
            gc.collect()  # a run's objects form cycles; uncollected, they would grow to gigabytes over dozens of runs

    def _in_parallel(self) -> None:
        running: dict[str, tuple[Trial, Experiment]] = {}
        behind: set[str] = set()
        sizes: dict[str, int] = {}

        def jobs() -> Iterator[Job]:
            for trial, e in self._remaining():
                running[trial.name] = trial, e
                yield Job(trial.name, e, self._options_of(trial, e))

        def enough(name: str) -> bool:
            trial, e = running[name]
            metrics = self._files.path / name / METRICS
            size = metrics.stat().st_size if metrics.exists() else 0
            if size != sizes.get(name, 0):
                sizes[name] = size
                if self._catch_up(trial, e):
                    behind.add(name)
            return name in behind

        def over(name: str, error: FedloomError | None) -> None:
            trial, e = running[name]
            if error is None:
                self._finish(trial, e)
                self._observer.done(*self._shown(trial, e))
            elif isinstance(error, InterruptedRun) and name in behind:
                self._stop(trial)
            elif self._is_due_to_values(error):
                self._fail(trial, error, e)
            else:
                self._failures[name] = error
                self._observer.failed(*self._shown(trial, e), error)

        def began(name: str) -> None:
            self._observer.begins_beside(*self._shown(*running[name]))

        def notice(name: str, text: str) -> None:
            self._observer.notice(*self._shown(*running[name]), text)

        events = JobEvents(began, notice, over, enough)
        run_parallel(jobs(), self._plan.trials, self._parallel, events, signals=self._options.signals)

    def _is_due_to_values(self, error: FedloomError) -> bool:
        """Return whether a trial's values caused its failure, as when training diverges; such a failure is a result.

        An invalid setting counts as such a cause only if other trials could run.
        """
        others = any(trial.state in ("done", "stopped") for trial in self._trials.all)
        return isinstance(error, QuorumError) or (isinstance(error, ExperimentError) and others)

    def _shown(self, trial: Trial, e: Experiment) -> tuple[int, int, Point]:
        """Return the arguments of an observer's callbacks: a trial's number, the number of trials, and the trial."""
        return trial.number, self._plan.trials, Point(trial.label, (), e)

    def _options_of(self, trial: Trial, e: Experiment) -> RunOptions:
        folder = self._files.path
        options = options_of(self._options, folder, Point(trial.name, (), e))
        begun = (folder / trial.name / EXPERIMENT).exists()
        if begun and RunFiles(folder / trial.name).is_held():
            raise ExperimentError(f"{folder / trial.name} is in use: a process of the killed search is still running.")
        return replace(options, resume=begun)

    def _measured(self, trial: Trial, line: Mapping[str, Any], rounds: int | None) -> bool:
        """Record an evaluation; return whether the trial should be stopped."""
        self._headline = headline_of(line)
        value = validation_value(line)
        if value is None and not line["left_out"]["absent"]:
            raise ExperimentError(
                "The search chooses by validation data, and the clients have no validation examples.",
                hint="set data.validation_fraction, or pack the clients' data with validation examples",
                key="data.validation_fraction",
            )
        if value is None or not math.isfinite(value) or line["round"] == 0:  # before training, trials do not differ
            return False
        self._trials.measure(trial, line["round"], self._headline.sign * value)
        return trial.behind and line["round"] != rounds

    def _catch_up(self, trial: Trial, e: Experiment) -> bool:
        """Record the evaluations in a trial's folder; return whether the last one should stop the trial."""
        lines = RunFolder(self._files.path / trial.name).evaluations()
        return any([self._measured(trial, line, e.federation.rounds) for line in lines][-1:])

    def _finish(self, trial: Trial, e: Experiment) -> None:
        run = RunFolder(self._files.path / trial.name)
        self._catch_up(trial, e)
        last = run.last_evaluation()
        value = None if last is None else validation_value(last[0])
        if value is None or not math.isfinite(value):
            self._fail(trial, QuorumError("no client was evaluated on validation data in the last round"), e)
            return
        assert self._headline is not None
        privacy = run.json(SUMMARY).get("training_privacy") or {}
        self._trials.end(trial, "done", score=self._headline.sign * value, epsilon=privacy.get("epsilon"))
        self._write()

    def _stop(self, trial: Trial) -> None:
        self._trials.end(trial, "stopped")
        self._write()
        self._observer.stopped(*self._shown(trial, self._base), max(trial.measured))

    def _fail(self, trial: Trial, error: FedloomError, e: Experiment) -> None:
        self._trials.end(trial, "failed", error=error.message)
        self._write()
        self._observer.failed(*self._shown(trial, e), error)

    def _write(self, chosen: Trial | None = None) -> None:
        space, headline = self._plan.space, self._headline
        about = {
            "experiment": self._base.name,
            "sampler": space.sampler,
            "seed": space.seed,
            "early_stopping": space.early_stopping,
            "epsilon": space.epsilon,
            "trials_planned": self._plan.trials,
            "parallel": self._parallel,
            "objective": None if headline is None else {"on": "validation", **headline._asdict()},
            "trials": [self._described(trial) for trial in self._trials.all],
        }
        found = None if chosen is None else {**self._described(chosen), "test": self._test(chosen)}
        self._files.write_json(SEARCH, {**about, "chosen": found})

    def _described(self, trial: Trial) -> dict[str, Any]:
        sign = 1 if self._headline is None else self._headline.sign
        return {
            "trial": trial.number,
            "folder": trial.name,
            "state": trial.state,
            "parameters": {key: parse_yaml(text, key)[0] for key, text in trial.texts.items()},
            "validation": None if trial.score is None else sign * trial.score,
            "validation_by_round": {str(round): sign * score for round, score in trial.measured.items()},
            "epsilon": trial.epsilon,
            "error": trial.error,
        }

    def _test(self, trial: Trial) -> dict[str, Any]:
        """Return the chosen trial's test results: the headline metric of each group of clients."""
        summary = RunFolder(self._files.path / trial.name).json(SUMMARY)
        headline = headline_of(summary)
        return {group: values_of(summary[group], headline)._asdict() for group in GROUPS if summary[group] is not None}


class _Measuring(RunObserver):
    """Observer that passes the evaluations of a trial to its search, and stops the trial if it falls behind."""

    def __init__(
        self, measured: Callable[[Trial, Mapping[str, Any], int | None], bool], trial: Trial, e: Experiment
    ) -> None:
        self._measured, self._trial, self._rounds = measured, trial, e.federation.rounds

    def evaluated(self, line: dict[str, Any]) -> None:
        """Record the evaluation; raise TrialStopped if the trial has fallen behind."""
        if self._measured(self._trial, line, self._rounds):
            raise TrialStopped(f"{self._trial.name} was stopped after round {line['round']}: it has fallen behind")


def _check_folder(folder: Path, options: RunOptions) -> None:
    check_folder_of_runs(folder, options)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / LOG).exists():
        raise ExperimentError(
            f"{argument('out')} is {folder}, which holds no search to continue; choose a new folder.", key="out"
        )
