"""How a run is asked to stop: by a signal, or because nobody watches it any more."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedloom.errors import AbandonedError, FedloomError, argument
from fedloom.federation.activity import Monitor
from fedloom.runner.observer import RunObserver

STOP_GRACE_S = 15.0


class StopRequest:
    """Ends a run after the round at hand; after a grace, or when asked again, at once.

    Parameters
    ----------
    observer
        Is told when the run is asked to stop by a signal or an operator.
    monitor
        Is told that it is asked to stop, whoever asks.

    Attributes
    ----------
    event
        Set when the run is to end; the round loop looks at it.
    reason
        What the run then ends with, if not with an interruption.
    training
        Whether there is a round at hand that is worth waiting for.
    abort
        Loses what the round loop waits for, so that it sees the event.
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
        """Ask the run to stop; ``grace_s`` is how long it waits for the round at hand, None: until that has ended."""
        again = self.event.is_set()
        self.reason = self.reason or reason
        self.event.set()
        self._monitor.stopping()
        if self.training and not again and grace_s is None:
            return
        # In a thread of its own: what a signal handler interrupts may hold what abort needs.
        timer = threading.Timer((grace_s or 0.0) if self.training and not again else 0.0, lambda: self.abort())
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def operator(self, now: bool) -> None:
        """Stop as an operator asks, who kills nothing: after the round at hand, however long it takes, or at once."""
        self._observer.stopping(after_round=self.training and not now)
        self.ask(grace_s=0.0 if now else None)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the run; a second one ends it at once."""
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
        try:
            yield
        finally:
            for timer in self._timers:
                timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self) -> None:
        """Wait, when there is nothing left to stop, for SIGINT or SIGTERM."""
        self.training, self.abort = False, lambda: None
        with self.signals():
            while not self.event.wait(0.5):  # of a signal that another thread got, nobody is woken
                continue

    @contextmanager
    def when_unwatched(self, unwatched_s: Callable[[], float], after_s: float | None) -> Iterator[None]:
        """Stop the run once nobody has watched it for so many seconds; None: nobody need watch."""
        over = threading.Event()

        def look() -> None:
            assert after_s is not None
            while not over.wait(min(1.0, after_s / 4)):
                if unwatched_s() >= after_s:
                    self.ask(
                        AbandonedError(
                            f"nobody has watched the run for {after_s:g} s ({argument('orphan_after')})",
                            hint=f"what started it is gone; start it again, and go on with {argument('resume')}",
                        )
                    )
                    return

        watch = threading.Thread(target=look, name="orphan", daemon=True)
        if after_s is not None:
            watch.start()
        try:
            yield
        finally:
            over.set()
            if after_s is not None:
                watch.join()
