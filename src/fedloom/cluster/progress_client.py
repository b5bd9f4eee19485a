"""Client that follows an aggregator's progress; watching also shows the aggregator that it has a launcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedloom.errors import ExperimentError, RefusedError
from fedloom.transport.progress import Progress, follow
from fedloom.trust.options import ClientOptions, Credentials
from fedloom.words import pluralize

LINE_EVERY_S = 10.0
CONNECT_S = 10.0
RETRY_INTERVAL_S = 1.0
DOUBT_AFTER_S = 60.0


def launchers_credentials() -> Credentials:
    """Return a launcher's credentials, from the environment as for a worker; plaintext is allowed, as on pod networks.

    Raises
    ------
    RefusedError, ExperimentError
        If the environment's token or certificate is invalid.
    """
    return Credentials(ClientOptions.of(insecure=True))


class ProgressClient:
    """Reporter of a run's progress, through restarts of its aggregator.

    Parameters
    ----------
    address
        ``host:port`` of the aggregator.
    say
        Called with lines of progress for the user.
    orphan_after_s
        Seconds without a watcher after which the aggregator ends; None is never.

    Attributes
    ----------
    latest
        Latest progress from the aggregator; None before the first.
    """

    def __init__(self, address: str, say: Callable[[str], None], *, orphan_after_s: float | None = None) -> None:
        self.latest: Progress | None = None
        self._orphan_after_s = orphan_after_s
        self._doubt_after_s = min(DOUBT_AFTER_S, (orphan_after_s or 2 * DOUBT_AFTER_S) / 2)
        self._address = address
        self._say = say
        self._stopping = threading.Event()
        self._said_at = -LINE_EVERY_S
        self._heard_at = time.monotonic()
        self._doubted = False

    @property
    def under_way(self) -> bool:
        """True once the rounds have started; the aggregator then decides which workers it can do without."""
        return self.latest is not None and self.latest.state not in ("waiting", "failed")

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the progress in a separate thread during the block."""
        # Not joined: it may be connecting, and has no state to keep.
        threading.Thread(target=self._follow, name="follow", daemon=True).start()
        try:
            yield
        finally:
            self._stopping.set()

    def _follow(self) -> None:
        refused = ""  # why, as far as that has been said
        while not self._stopping.is_set():
            try:
                for progress in follow(self._address, connect_s=CONNECT_S, credentials=launchers_credentials()):
                    if self._stopping.is_set():
                        return
                    self._heard_at, self._doubted, refused = time.monotonic(), False, ""
                    self._tell(progress)
                    self.latest = progress
                if self.latest is not None and self.latest.state == "finished":
                    return
            except ExperimentError as error:  # of the environment, which stays as it is
                self._say(f"progress is not shown: {error}{self._warning()}")
                return
            except RefusedError as error:  # perhaps until a file of tokens or identities has been refreshed
                if str(error) != refused:
                    refused = str(error)
                    self._say(f"progress is not shown for now: {error}{self._warning()}")
            except ConnectionError as error:  # not there yet, or about to be replaced
                if not self._doubted and time.monotonic() - self._heard_at > self._doubt_after_s:
                    self._doubted = True
                    self._say(f"no progress is shown: {error}{self._warning()}")
            self._stopping.wait(RETRY_INTERVAL_S)

    def _warning(self) -> str:
        if self._orphan_after_s is None:
            return ""
        return (
            f"\nan aggregator that runs and is not watched ends after {self._orphan_after_s:g} s "
            "(cluster.orphan_after_s)"
        )

    def _tell(self, now: Progress) -> None:
        before = self.latest
        if now.evaluated is not None:
            self._say(f"after round {now.evaluated['round']}: {_measured(now.evaluated)}")
        changed = before is None or (now.state, now.workers) != (before.state, before.workers)
        moved = before is None or (now.round, now.message) != (before.round, before.message)
        urgent = moved and now.state in ("waiting", "failed")
        if changed or urgent or (moved and time.monotonic() - self._said_at >= LINE_EVERY_S):
            self._said_at = time.monotonic()
            unserved = (
                f", {pluralize(now.clients_unserved, 'client')} without a worker"
                if now.clients_unserved and now.state == "waiting"
                else ""
            )
            message = f": {now.message}" if now.message else ""
            self._say(f"{now.state}: round {now.round}/{now.rounds}, workers: {now.workers}{unserved}{message}")


def _measured(line: dict[str, object]) -> str:
    """Return the accuracies of an evaluation, or the losses for data without classes."""
    parts, what = [], "pooled test accuracy"
    for name in ("seen", "unseen", "global"):
        group = line.get(name)
        if isinstance(group, dict):
            accuracy = group.get("accuracy_pooled")
            what = "mean test loss" if accuracy is None else what
            parts.append(f"{name} {group['loss_mean'] if accuracy is None else accuracy:.4f}")
    return f"{what} {', '.join(parts)}"
