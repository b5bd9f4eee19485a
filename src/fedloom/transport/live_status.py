"""Status of a live federation: the monitor's state, extended by the aggregator's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from fedloom.federation.activity import Activity, Connected, ConnectedWorker, RosterClient
from fedloom.federation.monitor import Monitor
from fedloom.transport.connected import ConnectedWorkers
from fedloom.transport.dispatcher import Dispatcher
from fedloom.transport.exchanges import Clients, Link
from fedloom.transport.worker_streams import ByteCount


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
            )
            for link in self._dispatcher.links()
        )
        refusals, awaiting = dict(self._dispatcher.refusals.counts), tuple(self._dispatcher.awaiting())
        traffic = self._traffic
        return self._monitor.now(Connected(workers, awaiting, self._served(), refusals, traffic.up, traffic.down))

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
