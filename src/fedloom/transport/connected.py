"""Record of the connected workers, on which other threads wait, and the status of a live federation."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from fedloom.core.words import first_of, pluralize
from fedloom.errors import QuorumError
from fedloom.federation.activity import Activity, Connected, ConnectedWorker, RosterClient
from fedloom.federation.monitor import Monitor
from fedloom.transport.dispatcher import Dispatcher
from fedloom.transport.exchanges import Clients, Link, WorkerInfo
from fedloom.transport.stream import LAST_BACKOFF_S
from fedloom.transport.worker_streams import ByteCount

LINGER_S = 2 * LAST_BACKOFF_S  # a worker that has lost its connection reconnects within this time


class ConnectedWorkers:
    """Connected workers, and the number of them that may serve each client of a run. Thread-safe."""

    def __init__(self, clients: Iterable[str]) -> None:
        self.index = {client: i for i, client in enumerate(clients)}
        self._changed = threading.Condition()  # reentrant
        self._workers: dict[str, WorkerInfo] = {}
        self._served = np.zeros(len(self.index), np.int32)  # workers that may serve each client
        self._left_at: dict[str, float] = {}  # when each absent worker left
        self._ended = False
        self._started_at = time.monotonic()

    def change(self, joined: WorkerInfo | None, left: WorkerInfo | None) -> None:
        """Remove the worker that left, and add the one that joined."""
        with self._changed:
            if left is not None:
                if isinstance(left.clients, Clients):
                    self._served -= left.clients.mask
                del self._workers[left.name]
                if not self._ended:
                    self._left_at[left.name] = time.monotonic()
            if joined is not None:
                if isinstance(joined.clients, Clients):
                    self._served += joined.clients.mask
                self._workers[joined.name] = joined
                self._left_at.pop(joined.name, None)
            self._changed.notify_all()

    def end(self) -> None:
        """Record that workers are shut down from now on."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def learned(self, name: str) -> None:
        """Record that a worker that joined after the shutdown has been notified of the end of the run."""
        with self._changed:
            if self._ended:
                self._left_at.pop(name, None)
                self._changed.notify_all()

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the connected workers, by name."""
        with self._changed:
            return tuple(self._workers[name] for name in sorted(self._workers))

    def counts(self) -> tuple[int, int]:
        """Return the number of connected workers, and of clients that none of them may serve."""
        with self._changed:
            return len(self._workers), int((self._served == 0).sum())

    def unserved(self, clients: Iterable[str]) -> tuple[str, ...]:
        """Return the given clients that no connected worker may serve, in the given order."""
        with self._changed:
            if self._served.all():
                return tuple(client for client in clients if client not in self.index)
            served = {client for client, i in self.index.items() if self._served[i]}
        return tuple(client for client in clients if client not in served)

    def wait_for(self, clients: Collection[str], timeout_s: float, workers: int) -> None:
        """Wait for workers and their clients (see ``Aggregator.wait_for``)."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                missing = self.unserved(sorted(clients))
                if self._ended:
                    raise QuorumError("the aggregator was stopped while waiting for workers")
                if not missing and len(self._workers) >= workers:
                    return
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._too_few(missing, clients, timeout_s, workers)
                self._changed.wait(remaining)

    def _too_few(self, missing: Sequence[str], clients: Collection[str], timeout_s: float, workers: int) -> QuorumError:
        if missing:
            reason = f"no worker serves {len(missing)} of {pluralize(len(clients), 'client')}: {first_of(missing, 5)}"
        else:
            reason = f"{len(self._workers)} of {pluralize(workers, 'worker')} joined"
        return QuorumError(
            f"after {timeout_s:g} s {reason} (connected workers: {first_of(sorted(self._workers), 20) or 'none'})",
            hint="start a `fedloom worker` that has their shards, or check the workers' logs",
        )

    def drain(self, resumed: bool) -> None:
        """Wait for workers that have not been notified of the end of the run yet (see ``Aggregator.drain``)."""
        with self._changed:
            while True:
                last = max(self._left_at.values(), default=-math.inf)
                since = max(last, self._started_at) if resumed else last
                remaining = since + LINGER_S - time.monotonic()
                if remaining <= 0:
                    return
                self._changed.wait(remaining)


class LiveStatus:
    """Source of a live federation's status; it ``is_open`` if clients have their own data, and join and leave.

    Belongs to the event loop's thread.
    """

    def __init__(
        self, monitor: Monitor, dispatcher: Dispatcher, connected: ConnectedWorkers, traffic: ByteCount, is_open: bool
    ) -> None:
        self._monitor = monitor
        self._dispatcher = dispatcher
        self._connected = connected
        self._traffic = traffic
        self._is_open = is_open

    def activity(self) -> Activity:
        """Return the state of the federation."""
        offset = time.time() - time.monotonic()  # wall-clock time at zero of the monotonic clock
        workers = tuple(
            ConnectedWorker(
                link.name,
                link.owner,
                link.worker.device,
                len(link.worker.clients),
                offset + link.joined_at,
                offset + link.sign_at,
                link.worker.package,
                link.protocol,
                link.withheld,
            )
            for link in self._dispatcher.links()
        )
        refusals, awaiting = dict(self._dispatcher.refusals.counts), tuple(self._dispatcher.awaiting())
        traffic, declined, too_new = self._traffic, dict(self._dispatcher.declined), dict(self._dispatcher.too_new)
        return self._monitor.now(
            Connected(workers, awaiting, self._served(), refusals, traffic.up, traffic.down, declined, too_new)
        )

    def _served(self) -> int:
        """Return how many clients of the roster are served by a connected worker."""
        if not self._is_open:
            return len(self._connected.index) - self._connected.counts()[1]
        roster = self._monitor.roster
        return sum(member.id in roster for link in self._dispatcher.links() for member in link.worker.members)

    def roster_clients(self) -> Iterator[RosterClient]:
        """Yield the clients of the roster, sorted by id."""
        monitor, serving = self._monitor, self._serving()
        roster = monitor.roster
        awaited = {each.client: each.since for each in self._dispatcher.awaiting()}
        for client in sorted(roster):
            entry, link = roster[client], serving.get(client)
            yield RosterClient(
                client,
                observes=not entry.seen,
                connected=link is not None,
                worker=None if link is None else link.name,
                identity=None if link is None else link.owner,
                examples=entry.train,
                last_round=monitor.last_round(client),
                awaited_since=awaited.get(client),
            )

    def _serving(self) -> dict[str, Link]:
        links = self._dispatcher.links()
        if self._is_open:
            return {client: link for link in links for client in link.worker.clients}
        index = self._connected.index
        first = np.full(len(index), -1)
        for i, link in enumerate(links):
            if isinstance(link.worker.clients, Clients):
                first[(link.worker.clients.mask > 0) & (first < 0)] = i
        return {client: links[first[i]] for client, i in index.items() if first[i] >= 0}
