"""Weights & Biases, offline unless ``WANDB_MODE`` says otherwise: ``wandb sync RUN/wandb/offline-run-*`` sends it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb

from fedloom.runner.observer import RunObserver
from fedloom.runner.tracking import of_attempt, of_line

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.federation.journal import Attempt


class WandB(RunObserver):
    """Logs settings and numbers to ``wandb/`` in the run's folder; ``WANDB_PROJECT`` names the project.

    Parameters
    ----------
    folder
        The run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None

    def started(self, experiment: Experiment, clients: int, where: str) -> None:
        """Begin a run there."""
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedloom"),
            name=self._folder.name,
            dir=str(self._folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=experiment.model_dump(mode="json"),
            reinit="create_new",
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Log the numbers of a round."""
        self._add(attempt.round, of_attempt(attempt))

    def evaluated(self, line: dict[str, Any]) -> None:
        """Log the numbers of an evaluation."""
        self._add(line["round"], of_line(line))

    def ended(self) -> None:
        """End the run there."""
        self._run.finish()

    def _add(self, round: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"round": round, **numbers})
