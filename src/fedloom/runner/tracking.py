"""Trackers of runs, and their isolation from the run."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any, TypeAlias

from fedloom.core.plugins import entries
from fedloom.core.processes import tell_notice
from fedloom.errors import ExperimentError, without_secrets
from fedloom.runner.observer import RunObserver

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.federation.loop_config import Observer
    from fedloom.runs.journal import Attempt

GROUP = "fedloom.observers"

log = logging.getLogger("fedloom.run")

Tracker: TypeAlias = Callable[[Path], RunObserver]
"""Factory of a run's observer; called with the run's folder."""


def find_trackers(names: Iterable[str]) -> dict[str, Tracker]:
    """Return trackers by name.

    Raise ExperimentError if there is no tracker of a name, or its dependencies are not installed.
    """
    known = {point.name: point for point in entries(GROUP)}
    found: dict[str, Tracker] = {}
    for name in names:
        if name not in known:
            raise ExperimentError(
                f"tracking names {name!r}, which is not installed; choose from {', '.join(known)}.",
                key="tracking",
                found=name,
                allowed=list(known),
            )
        try:
            found[name] = known[name].load()
        except ImportError as error:
            missing = (error.name or str(error)).partition(".")[0]
            hint = f"pip install 'fedloom[{name}]'" if known[name].value.startswith("fedloom.") else None
            raise ExperimentError(
                f"tracking names {name}, which needs the package {missing}, which is not installed.",
                hint=hint,
                key="tracking",
            ) from error
        except Exception as error:
            raise ExperimentError(
                f"tracking names {name} = {known[name].value} which cannot be loaded: {type(error).__name__}: {error}",
                key="tracking",
            ) from error
    return found


class TrackerObserver(RunObserver):
    """Observer that forwards to another observer, to watchers, and to trackers, and drops trackers that fail.

    The observer is called first, and is notified when a tracker fails. Trackers are created by their factories, and
    notified of the start, once the run has a folder.
    """

    def __init__(self, observer: RunObserver, trackers: Mapping[str, Tracker], folder: Path) -> None:
        self._observer = observer
        self._watchers: list[Observer] = []
        self._waiting = dict(trackers)
        self._trackers: dict[str, RunObserver] = {}
        self._folder = folder
        self._begun: tuple[Experiment, int, str] | None = None

    def add(self, watcher: Observer) -> None:
        """Forward the progress of rounds and evaluations to one more observer."""
        self._watchers.append(watcher)

    def started(self, experiment: Experiment, clients: int, where: str) -> None:
        """Notify the observer; trackers are notified later."""
        self._begun = experiment, clients, where
        self._observer.started(experiment, clients, where)

    def waiting_for_workers(self, address: str, partition: str, states: str | None) -> None:
        """Notify the observer."""
        self._observer.waiting_for_workers(address, partition, states)

    def stopping(self, *, after_round: bool) -> None:
        """Notify the observer."""
        self._observer.stopping(after_round=after_round)

    def notice(self, text: str) -> None:
        """Notify the observer and the parent process."""
        tell_notice(text)
        self._observer.notice(text)

    def resumed(self, round: int) -> None:
        """Notify the observer and the trackers."""
        self._observer.resumed(round)
        self._notify(lambda tracker: tracker.resumed(round))

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Notify everyone."""
        self._forward(lambda observer: observer.round_done(attempt, rounds))

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Notify everyone."""
        self._forward(lambda observer: observer.attempt_failed(attempt, attempts))

    def evaluating(self, round: int, done: int, clients: int) -> None:
        """Notify everyone."""
        self._forward(lambda observer: observer.evaluating(round, done, clients))

    def evaluated(self, line: dict[str, Any]) -> None:
        """Notify the observer, the watchers and the trackers, each with its own copy."""
        self._forward(lambda observer: observer.evaluated(copy.deepcopy(line)))

    def ended(self) -> None:
        """Notify the observer and the started trackers."""
        self._waiting.clear()
        self._notify(lambda tracker: tracker.ended())
        self._observer.ended()

    def _forward(self, call: Callable[[Observer], None]) -> None:
        call(self._observer)
        self._notify(call)
        for watcher in self._watchers:
            call(watcher)

    def _notify(self, call: Callable[[RunObserver], None]) -> None:
        for name, make in list(self._waiting.items()):
            del self._waiting[name]
            self._safely(name, partial(self._begin, name, make))
        for name, tracker in list(self._trackers.items()):
            self._safely(name, partial(call, tracker))

    def _begin(self, name: str, make: Tracker) -> None:
        tracker = make(self._folder)
        if self._begun is not None:
            tracker.started(*self._begun)
        self._trackers[name] = tracker

    def _safely(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._trackers.pop(name, None)
            # As text: a handler of the user's own would show the exception with a password in its URL.
            log.warning("tracker %s failed\n%s", name, without_secrets("".join(format_exception(error)).rstrip()))
            reason = without_secrets((str(error).splitlines() or [""])[0])
            self.notice(
                f"tracking: {name} failed and is disabled for the rest of the run ({type(error).__name__}: {reason})"
            )


class NumberTracker(RunObserver, ABC):
    """Tracker that receives numbers by round, from training and from evaluations."""

    @abstractmethod
    def add(self, round: int, numbers: Mapping[str, float]) -> None:
        """Record numbers of a round, by names such as ``train/loss`` and ``seen/accuracy_mean``."""

    def round_done(self, attempt: Attempt, rounds: int | None) -> None:
        """Record the numbers of a round's training."""
        self.add(attempt.round, attempt_numbers(attempt))

    def evaluated(self, line: dict[str, Any]) -> None:
        """Record the numbers of an evaluation."""
        self.add(line["round"], evaluation_numbers(line))


def attempt_numbers(attempt: Any) -> dict[str, float]:
    """Return the numbers of a round: ``train/loss`` and other statistics, seconds, bytes."""
    found = {f"train/{name}": float(value) for name, value in attempt.statistics.items()}
    found["round/seconds"] = attempt.seconds
    found |= {f"round/{name}_s": seconds for name, seconds in attempt.phases.items()}
    for name in ("payload_up", "payload_down", "wire_up", "wire_down"):
        if (value := getattr(attempt, name)) is not None:
            found[f"round/{name}"] = float(value)
    return found


def evaluation_numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of an evaluation, named like ``seen/accuracy_mean``, without those of training."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if name == "train" and not prefix:
            continue
        if isinstance(value, Mapping):
            found |= evaluation_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or name != "round"):
            found[f"{prefix}{name}" if prefix else f"evaluation/{name}"] = float(value)
    return found
