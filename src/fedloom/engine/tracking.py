"""Trackers of runs, and their isolation from the run."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from traceback import format_exception
from typing import TYPE_CHECKING, Any, TypeAlias

from fedloom.core.plugins import entries, missing_part
from fedloom.core.processes import tell_notice
from fedloom.engine.observer import RunObserver
from fedloom.errors import ExperimentError, without_secrets

if TYPE_CHECKING:
    from fedloom.experiment import Experiment
    from fedloom.federation.evaluator import Observer
    from fedloom.runs.journal import Attempt

GROUP = "fedloom.observers"

TRACK = "FEDLOOM_TRACK"
"""Environment variable that names further trackers, separated by spaces."""

log = logging.getLogger("fedloom.run")

Tracker: TypeAlias = Callable[[Path], RunObserver]
"""Factory of a run's observer; called with the run's folder."""

Call: TypeAlias = Callable[[RunObserver], None]

CALL_S = 60.0
"""Maximum duration of a call of a tracker, in seconds; it is then given up."""

STOP_S = 5.0
"""Maximum time in which a tracker may finish when the run has been asked to stop, in seconds."""

MOST_WAITING = 1000
"""Maximum number of calls that wait for a tracker; a run that is so far ahead waits for it."""

CHECK_S = 0.05
"""Interval between checks of a tracker that is waited for, in seconds."""


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
            if reason := missing_part(error):
                raise ExperimentError(f"tracking: {reason}", key="tracking") from error
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


class TrackerThread:
    """Tracker in a thread of its own, beside the run.

    The first call creates the tracker; calls wait in a queue and are made in order. The tracker has failed when a call
    raises an exception, or takes longer than ``CALL_S``; later calls are then skipped.

    Attributes
    ----------
    failure
        Reason for which the tracker has failed; None if it works.
    logged
        Number of completed calls that were ``counted``.
    """

    def __init__(self, name: str, make: Callable[[], RunObserver]) -> None:
        self.failure: BaseException | None = None
        self.logged = 0
        self._make = make
        self._began: float | None = None
        self._calls: Queue[tuple[Call, bool]] = Queue(MOST_WAITING)
        threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True).start()

    def put(self, call: Call, *, counted: bool = False) -> None:
        """Queue a call; wait for the tracker only if ``MOST_WAITING`` calls are waiting, and not once it has failed."""
        while self.works():
            with suppress(Full):
                self._calls.put((call, counted), timeout=CHECK_S)
                break

    def works(self) -> bool:
        """Return whether the tracker has not failed."""
        began = self._began
        if self.failure is None and began is not None and time.monotonic() - began > CALL_S:
            self.failure = TimeoutError(f"it has not returned for {CALL_S:g} s")
        return self.failure is None

    def finish(self, within_s: float = math.inf) -> None:
        """Wait until all calls have been made; the tracker fails if that takes longer."""
        end = time.monotonic() + within_s
        while self.works() and self._calls.unfinished_tasks:
            if time.monotonic() > end:
                self.failure = TimeoutError("the run has stopped")
            time.sleep(CHECK_S)

    def _run(self) -> None:
        tracker: RunObserver | None = None
        while self.failure is None:
            call, counted = self._calls.get()
            self._began = time.monotonic()
            try:
                tracker = tracker or self._make()
                call(tracker)
                self.logged += counted
            except Exception as error:
                self.failure = self.failure or error
            self._began = None
            self._calls.task_done()


class TrackerObserver(RunObserver):
    """Observer that forwards to another observer, to watchers, and to trackers, and drops trackers that fail.

    The observer is called first, and is notified when a tracker fails. Trackers are created by their factories, and
    notified of the start, once the run has a folder. They run beside the run (:class:`TrackerThread`), which does not
    wait for them before its end.
    """

    def __init__(self, observer: RunObserver, trackers: Mapping[str, Tracker], folder: Path) -> None:
        self._observer = observer
        self._watchers: list[Observer] = []
        self._waiting = dict(trackers)
        self._trackers: dict[str, TrackerThread] = {}
        self._failed: dict[str, TrackerThread] = {}
        self._told = 0
        self._finish_s = math.inf
        self._folder = folder
        self._begun: tuple[Experiment, int, str] | None = None

    def add(self, watcher: Observer) -> None:
        """Forward the progress of rounds and evaluations to one more observer."""
        self._watchers.append(watcher)

    def started(self, experiment: Experiment, clients: int, location: str) -> None:
        """Notify the observer; trackers are notified later."""
        self._begun = experiment, clients, location
        self._observer.started(experiment, clients, location)

    def waiting_for_workers(self, address: str, partition: str, states: str | None) -> None:
        """Notify the observer."""
        self._observer.waiting_for_workers(address, partition, states)

    def stopping(self, *, after_round: bool) -> None:
        """Notify the observer; the end of the run then waits for no tracker longer than ``STOP_S``."""
        self._finish_s = STOP_S
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
        self._forward(lambda observer: observer.round_done(attempt, rounds), is_counted=True)

    def attempt_failed(self, attempt: Attempt, attempts: int) -> None:
        """Notify everyone."""
        self._forward(lambda observer: observer.attempt_failed(attempt, attempts))

    def evaluating(self, round: int, count: int, clients: int) -> None:
        """Notify everyone."""
        self._forward(lambda observer: observer.evaluating(round, count, clients))

    def evaluated(self, line: dict[str, Any]) -> None:
        """Notify the observer, the watchers and the trackers, each with its own copy."""
        line = copy.deepcopy(line)  # trackers read it later
        self._forward(lambda observer: observer.evaluated(copy.deepcopy(line)), is_counted=True)

    def ended(self) -> None:
        """Notify the observer and the trackers, wait for those that work, and say what the others have not logged."""
        self._waiting.clear()
        self._notify(lambda tracker: tracker.ended())
        for tracker in self._trackers.values():
            tracker.finish(self._finish_s)
        self._drop_failed()
        for name, tracker in self._failed.items():
            if lost_count := self._told - tracker.logged:
                self.notice(
                    f"tracking: {name} did not log {lost_count} of {self._told} rounds and evaluations; "
                    "metrics.jsonl and journal.jsonl in the run's folder have them all"
                )
        self._observer.ended()

    def _forward(self, call: Callable[[Observer], None], *, is_counted: bool = False) -> None:
        self._told += is_counted
        call(self._observer)
        self._notify(call, is_counted=is_counted)
        for watcher in self._watchers:
            call(watcher)

    def _notify(self, call: Call, *, is_counted: bool = False) -> None:
        for name, make in self._waiting.items():
            self._trackers[name] = TrackerThread(name, partial(self._begin, make))
        self._waiting.clear()
        for tracker in self._trackers.values():
            tracker.put(call, counted=is_counted)
        self._drop_failed()

    def _begin(self, make: Tracker) -> RunObserver:
        tracker = make(self._folder)
        if self._begun is not None:
            tracker.started(*self._begun)
        return tracker

    def _drop_failed(self) -> None:
        for name, tracker in list(self._trackers.items()):
            if tracker.works():
                continue
            self._failed[name] = self._trackers.pop(name)
            error = tracker.failure
            # As text: a handler of the user's own would show the exception with a password in its URL.
            text = "" if error is None else "".join(format_exception(error)).rstrip()
            log.warning("tracker %s failed\n%s", name, without_secrets(text))
            reason = without_secrets((str(error).splitlines() or [""])[0])
            self.notice(
                f"tracking: {name} failed and is disabled for the rest of the run ({type(error).__name__}: {reason})"
            )
