"""Hyperparameter search on this machine: trials are ordinary runs, and only validation data choose among them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.core.words import pluralize
from fedloom.engine.jobs import Job, JobObserver
from fedloom.engine.options import RunOptions
from fedloom.engine.run_data import check_roster
from fedloom.errors import ExperimentError, FedloomError, QuorumError, argument
from fedloom.experiment import Experiment
from fedloom.experiment.search_space import Make, SearchPlan
from fedloom.experiment.yaml_reader import parse_yaml
from fedloom.runs.files import EXPERIMENT, SUMMARY, RunFiles
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import GROUPS, Headline, headline_of, validation_value, values_of
from fedloom.tuning.parallel import EarlyStop, Jobs, run_jobs
from fedloom.tuning.sweep import check_folder_of_runs, check_parallel, job_options
from fedloom.tuning.trials import LOG, Schedule, Trial, Trials, import_optuna

SEARCH = "search.json"


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes
    ----------
    folder
        Folder with a run's folder for each trial, and ``search.json``.
    trials
        All trials, in the order in which they were drawn.
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
    observer: JobObserver | None = None,
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
    check_folder_of_runs(folder, options)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / LOG).exists():
        raise ExperimentError(
            f"{argument('out')} is {folder}, which holds no search to continue; choose a new folder.", key="out"
        )
    check_roster(base, options)
    files = RunFiles(folder)
    with files.held():
        search = _Search(plan, make, files, options, observer or JobObserver(), base, parallel)
        run_jobs(search, parallel, signals=options.signals)
        return search.result()


class _Search(Jobs):
    """Search in progress."""

    def __init__(
        self,
        plan: SearchPlan,
        make: Make,
        files: RunFiles,
        options: RunOptions,
        observer: JobObserver,
        base: Experiment,
        parallel: int,
    ) -> None:
        self.count, self.observer = plan.trials, observer
        self._plan, self._make, self._files, self._options = plan, make, files, options
        self._base, self._parallel = base, parallel
        digest = hashlib.sha256(base.shared_json().encode()).hexdigest()
        self._trials = Trials(plan, files.path, digest, Schedule(base.federation.rounds, base.evaluation.every))
        self._headline: Headline | None = None
        self._failures: dict[str, FedloomError] = {}  # by trial, of those to be repeated
        for trial in self._trials.all:
            if (last := RunFolder(files.path / trial.name).last_evaluation()) is not None:
                self._headline = headline_of(last[0])
            if trial.state != "running":
                observer.ended(self._job(trial, base), "already finished")

    def __iter__(self) -> Iterator[Job]:
        """Yield the trials to run: first those in progress, then new ones, drawn on demand."""
        for trial in self._trials.unfinished:
            if (job := self._started(trial)) is None:
                continue
            if trial.behind and max(trial.measured) != job.experiment.federation.rounds:  # killed before it was stopped
                self._stop(job)
            else:
                yield job
        while len(self._trials.all) < self._plan.trials:
            if (job := self._started(self._trials.draw())) is not None:
                yield job

    def evaluated(self, job: Job, line: Mapping[str, Any]) -> bool:
        """Record an evaluation; return whether the trial should be stopped."""
        trial = self._trials.all[job.number - 1]
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
        return trial.behind and line["round"] != job.experiment.federation.rounds

    def ended(self, job: Job, error: FedloomError | None) -> None:
        """Record the end of a trial; raise an error that further trials would meet, too."""
        others = any(trial.state in ("done", "stopped") for trial in self._trials.all)
        if error is None:
            self._finish(job)
        elif isinstance(error, EarlyStop):
            self._stop(job)
        elif isinstance(error, QuorumError) or (isinstance(error, ExperimentError) and others):
            self._fail(job, error)  # because of its values, as when training diverges
        elif isinstance(error, ExperimentError):
            raise error
        else:
            self._failures[job.name] = error
            self.observer.ended(job, f"failed: {error}", error)

    def result(self) -> SearchResult:
        """Choose a trial and write ``search.json``; raise if there is none to choose, or a trial must be repeated."""
        best = self._trials.best()
        self._write(best)
        if self._failures:
            first, *_ = self._failures.values()
            listing = "\n".join(f"  {name}: {error}" for name, error in self._failures.items())
            raise type(first)(
                f"{pluralize(len(self._failures), 'trial')} could not be completed:\n{listing}",
                hint=f"fix the cause and continue with {argument('resume')}",
            )
        if best is None or self._headline is None:
            errors = [f"  {trial.name}: {trial.error}" for trial in self._trials.all if trial.error is not None]
            raise QuorumError("\n".join(["No trial was completed within the bounds of the search.", *errors]))
        trials = tuple(self._trials.all)
        return SearchResult(self._files.path, trials, best, self._headline, self._files.json(SEARCH))

    def _started(self, trial: Trial) -> Job | None:
        """Return the run of a trial; if its values cannot be combined, record its failure and return None."""
        try:
            e = self._make(self._plan.overrides(trial.texts))
        except ExperimentError as error:
            self._fail(self._job(trial, self._base), error)
            return None
        job = self._job(trial, e)
        has_started = job.folder.has(EXPERIMENT)
        if has_started and job.folder.is_held():
            raise ExperimentError(f"{job.folder.path} is in use: a process of the killed search is still running.")
        return replace(job, options=replace(job.options, resume=has_started))

    def _job(self, trial: Trial, e: Experiment) -> Job:
        options = job_options(self._options, self._files.path, trial.name, e)
        return Job(trial.number, self._plan.trials, trial.name, trial.label, e, options)

    def _finish(self, job: Job) -> None:
        last = job.folder.last_evaluation()
        value = None if last is None else validation_value(last[0])
        if value is None or not math.isfinite(value):
            self._fail(job, QuorumError("no client was evaluated on validation data in the last round"))
            return
        assert self._headline is not None
        privacy = job.folder.json(SUMMARY).get("training_privacy") or {}
        trial = self._trials.all[job.number - 1]
        self._trials.end(trial, "done", score=self._headline.sign * value, epsilon=privacy.get("epsilon"))
        self._write()

    def _stop(self, job: Job) -> None:
        trial = self._trials.all[job.number - 1]
        self._trials.end(trial, "stopped")
        self._write()
        self.observer.ended(job, f"stopped after round {max(trial.measured)}")

    def _fail(self, job: Job, error: FedloomError) -> None:
        self._trials.end(self._trials.all[job.number - 1], "failed", error=error.message)
        self._write()
        self.observer.ended(job, f"failed: {error}", error)

    def _write(self, best_trial: Trial | None = None) -> None:
        space, headline = self._plan.space, self._headline
        document = {
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
        best = None if best_trial is None else {**self._described(best_trial), "test": self._test(best_trial)}
        self._files.write_json(SEARCH, {**document, "chosen": best})

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
