"""MLflow: where ``MLFLOW_TRACKING_URI`` says, in the experiment ``MLFLOW_EXPERIMENT_NAME``, or ``fedloom``."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from fedloom.runner.tracking import NumberTracker, of_settings

if TYPE_CHECKING:
    from fedloom.experiment import Experiment

NAME = "mlflow.txt"
"""Holds the id that MLflow gave the run, so that a resumed one goes on there."""

LONGEST = 500
"""Characters of a parameter's value."""

MOST = 100
"""Parameters in one call."""


class MLflow(NumberTracker):
    """Logs settings as parameters and numbers as metrics by round.

    Parameters
    ----------
    folder
        The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        beside = os.open(folder.parent, os.O_RDONLY)
        try:  # MLflow makes the tables of a new database, which two runs of a sweep cannot do at once
            with suppress(OSError):  # some network file systems do not lock folders
                fcntl.flock(beside, fcntl.LOCK_EX)
            self._client = MlflowClient()
        finally:
            os.close(beside)
        self._run = ""

    def started(self, experiment: Experiment, clients: int, where: str) -> None:
        """Begin a run there, or go on with that of before."""
        kept = self._folder / NAME
        if kept.exists():
            self._run = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        found = self._client.get_experiment_by_name(name)
        try:
            number = found.experiment_id if found is not None else self._client.create_experiment(name)
        except MlflowException:  # another run has made it meanwhile
            number = self._client.get_experiment_by_name(name).experiment_id
        self._run = self._client.create_run(
            number, run_name=self._folder.name, tags={"fedloom.folder": where}
        ).info.run_id
        settings = of_settings(experiment.model_dump(mode="json"))
        params = [Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        for start in range(0, len(params), MOST):
            self._client.log_batch(self._run, params=params[start : start + MOST])
        kept.write_text(f"{self._run}\n", encoding="utf-8")

    def ended(self) -> None:
        """End the run there."""
        done = (self._folder / "summary.json").exists()
        self._client.set_terminated(self._run, "FINISHED" if done else "KILLED")

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write them."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, round) for name, value in numbers.items()])
