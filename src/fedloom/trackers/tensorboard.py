"""TensorBoard tracker; ``tensorboard --logdir runs`` shows all runs in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from fedloom.trackers.numbers import NumberTracker

if TYPE_CHECKING:
    from fedloom.experiment import Experiment


class TensorBoard(NumberTracker):
    """Tracker that writes to ``tensorboard/`` in the run's folder; repeated rounds replace earlier ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Write the experiment, unless it has been written before."""
        if not self._folder.exists():
            text = experiment.resolved_yaml().replace("\n", "\n    ")
            self._open(None).add_text("experiment", f"    {text}", 0)

    def resumed(self, round: int) -> None:
        """Hide later rounds."""
        self.ended()
        self._open(round + 1)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Write an evaluation's numbers and flush them."""
        super().evaluated(line)
        self._writer.flush()

    def ended(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int | None) -> Any:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
        return self._writer

    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers."""
        writer = self._open(None)
        for name, value in numbers.items():
            writer.add_scalar(name, value, round)
