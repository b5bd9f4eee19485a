"""Katib tracker: the file that Katib's collector reads in the pod of a trial (docs/search.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.engine.observer import RunObserver
from fedloom.runs.folder import RunFolder
from fedloom.trackers.katib_lines import KATIB_FILE, METRICS_PATH, katib_lines

if TYPE_CHECKING:
    from fedloom.experiment import Experiment


class Katib(RunObserver):
    """Tracker that writes the headline metric on validation examples, and the ε of training, after each evaluation.

    The evaluation before training is left out, since early stopping counts lines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = Path(os.environ.get(KATIB_FILE) or METRICS_PATH)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")
        self._trains = True

    def started(self, experiment: Experiment, clients: int, where: str) -> None:
        """Record whether the run trains."""
        self._trains = experiment.federation.rounds != 0

    def resumed(self, round: int) -> None:
        """Write the evaluations that an earlier process made."""
        for line in RunFolder(self._folder).evaluations():
            if line["round"] <= round:
                self.evaluated(line)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Write the numbers of an evaluation."""
        if line["round"] > 0 or not self._trains:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(katib_lines(line))
