"""Weights & Biases tracker, offline unless ``WANDB_MODE`` is set; ``wandb sync RUN/wandb/offline-run-*`` uploads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb

from fedloom.trackers.numbers import NumberTracker

if TYPE_CHECKING:
    from fedloom.experiment import Experiment


class WandB(NumberTracker):
    """Tracker that logs to ``wandb/`` in the run's folder; ``WANDB_PROJECT`` names the project."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Any = None

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Start a W&B run."""
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

    def ended(self) -> None:
        """End the W&B run."""
        self._run.finish()

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers."""
        self._run.log({"round": round, **numbers})
