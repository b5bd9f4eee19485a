"""MLflow tracker: logs to ``MLFLOW_TRACKING_URI``, experiment ``MLFLOW_EXPERIMENT_NAME`` or ``fedloom``."""

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

from fedloom.core.words import dotted_keys
from fedloom.runs.folder import RunFolder
from fedloom.trackers.numbers import NumberTracker

if TYPE_CHECKING:
    from fedloom.experiment import Experiment

NAME = "mlflow.txt"
"""File with the run's MLflow id, so that a resumed run continues there."""

LONGEST = 500
"""Maximum length of a parameter's value, in characters."""

MOST = 100
"""Maximum number of parameters per call."""


class MLflow(NumberTracker):
    """Tracker that logs settings as parameters, and numbers as metrics by round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        beside = os.open(folder.parent, os.O_RDONLY)
        try:  # MLflow creates a new database's tables; two runs of a sweep must not do so at once
            with suppress(OSError):  # some network file systems do not lock folders
                fcntl.flock(beside, fcntl.LOCK_EX)
            self._client = MlflowClient()
        finally:
            os.close(beside)
        self._run = ""

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Start an MLflow run, or continue the earlier one."""
        id_file = self._folder / NAME
        if id_file.exists():
            self._run = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        group = self._client.get_experiment_by_name(name)
        try:
            number = group.experiment_id if group is not None else self._client.create_experiment(name)
        except MlflowException:  # another run has just created it
            number = self._client.get_experiment_by_name(name).experiment_id
        self._run = self._client.create_run(
            number, run_name=self._folder.name, tags={"fedloom.folder": location}
        ).info.run_id
        settings = dotted_keys(experiment.model_dump(mode="json"))
        params = [Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        for start in range(0, len(params), MOST):
            self._client.log_batch(self._run, params=params[start : start + MOST])
        id_file.write_text(f"{self._run}\n", encoding="utf-8")

    def ended(self) -> None:
        """End the MLflow run."""
        finished = RunFolder(self._folder).is_finished
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, round) for name, value in numbers.items()])
