"""Requests to stop a run: by signal, by an operator, or for lack of watchers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedloom.core.processes import termination_requested
from fedloom.engine.observer import RunObserver
from fedloom.errors import AbandonedError, FedloomError, argument
from fedloom.federation.monitor import Monitor

STOP_GRACE_S = 15.0


class StopRequest:
    """Request to stop a run after the current round; after a grace period, or a second request, at once.

    Attributes
    ----------
    event
        Set when the run must end; the round loop checks it.
    reason
        Error that the run then raises, in place of an interruption.
    training
        True while a round is in progress that is worth waiting for.
    abort
        Makes the round loop's pending exchange fail, so that the loop sees the event.
    """

    def __init__(self, observer: RunObserver | None = None, monitor: Monitor | None = None) -> None:
        self._monitor = monitor or Monitor()
        self.event = threading.Event()
        self.reason: FedloomError | None = None
        self.training = False
        self.abort: Callable[[], None] = lambda: None
        self._observer = observer or RunObserver()
        self._timers: list[threading.Timer] = []

    def ask(self, reason: FedloomError | None = None, *, grace_s: float | None = STOP_GRACE_S) -> None:
        """Ask the run to stop.

        ``grace_s`` limits the wait for the current round; None: wait until it has ended.
        """
        again = self.event.is_set()
        self.reason = self.reason or reason
        self.event.set()
        self._monitor.stopping()
        if self.training and not again and grace_s is None:
            return
        # In a separate thread: the code that a signal handler interrupts may hold a lock that abort needs.
        timer = threading.Timer((grace_s or 0.0) if self.training and not again else 0.0, lambda: self.abort())
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def operator(self, now: bool) -> None:
        """Stop at an operator's request: at once if ``now``, else after the current round, however long it takes."""
        self._observer.stopping(after_round=self.training and not now)
        self.ask(grace_s=0.0 if now else None)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Stop the run on SIGINT or SIGTERM, and at once on a second signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: Any) -> None:
            again = self.event.is_set()
            self.ask()
            if again:
                raise KeyboardInterrupt
            self._observer.stopping(after_round=self.training)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        if termination_requested.is_set():
            self.ask()
        try:
            yield
        finally:
            for timer in self._timers:
                timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self) -> None:
        """Wait for SIGINT or SIGTERM after the run has ended."""
        self.training, self.abort = False, lambda: None
        with self.signals():
            while not self.event.wait(0.5):  # a signal handled in another thread does not wake this one
                continue

    @contextmanager
    def when_unwatched(self, unwatched_s: Callable[[], float], after_s: float | None) -> Iterator[None]:
        """Stop the run after this many seconds without a watcher; None: never."""
        if after_s is None:
            yield
            return
        over = threading.Event()

        def look() -> None:
            while not over.wait(min(1.0, after_s / 4)):
                if unwatched_s() >= after_s:
                    self.ask(
                        AbandonedError(
                            f"the run has had no watcher for {after_s:g} s ({argument('orphan_after')})",
                            hint=f"the launcher has stopped; start it again, and continue with {argument('resume')}",
                        )
                    )
                    return

        watch = threading.Thread(target=look, name="orphan", daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()
