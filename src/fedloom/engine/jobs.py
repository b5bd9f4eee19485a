"""Runs that are executed together, and callbacks for their progress."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.errors import FedloomError
from fedloom.experiment import Experiment
from fedloom.runs.folder import RunFolder


@dataclass(frozen=True)
class Job:
    """Run to execute, as number ``number`` of ``count``, counted from 1.

    ``name`` is the name of its folder, and ``label`` what users read.
    """

    number: int
    count: int
    name: str
    label: str
    experiment: Experiment
    options: RunOptions

    @property
    def folder(self) -> RunFolder:
        """Folder of the run."""
        assert self.options.out is not None
        return RunFolder(self.options.out)


class JobObserver:
    """Callbacks for the progress of several runs; override the ones you need."""

    def begins(self, job: Job, *, beside: bool) -> RunObserver:
        """Handle the start of a run, in this process or ``beside`` it; return the observer of one in this process."""
        return RunObserver()

    def ended(self, job: Job, outcome: str, error: FedloomError | None = None) -> None:
        """Handle the end of a run: ``done``, ``already finished``, ``stopped after round 3`` or ``failed: REASON``."""

    def notice(self, job: Job, text: str) -> None:
        """Handle a one-line message for the user from a run in a separate process."""
