"""Execution of a run from experiment to report, for ``fedloom run`` and ``fedloom aggregator``."""

from __future__ import annotations

from fedloom.experiment import Experiment
from fedloom.runner.closed_run import run_closed
from fedloom.runner.engine import Engine, RunResult
from fedloom.runner.finished_run import run_finished
from fedloom.runner.observer import RunObserver
from fedloom.runner.open_run import run_open
from fedloom.runner.options import RunOptions
from fedloom.runner.replay import run_replay


def run_experiment(
    experiment: Experiment, options: RunOptions | None = None, observer: RunObserver | None = None
) -> RunResult:
    """Run an experiment, from its data to its report.

    Parameters
    ----------
    experiment
        Experiment to run (:func:`fedloom.experiment.load_experiment`).
    options
        Execution options; by default, a folder named after the experiment, and workers as in ``runtime``.
    observer
        Receives the run's progress.

    Raises
    ------
    FedloomError
        An error of the class that describes what went wrong (docs/exit-codes.md).
    """
    engine = Engine(experiment, options or RunOptions(), observer or RunObserver())
    with engine.opened():
        if engine.finished is not None:
            return run_finished(engine, engine.finished)
        if engine.is_open:
            return run_open(engine)
        if engine.replay is not None and engine.replay.is_open:
            return run_replay(engine, engine.replay)
        return run_closed(engine)
