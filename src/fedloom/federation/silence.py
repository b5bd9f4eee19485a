"""Silent and refusing clients, and the consequences for draws and evaluations.

A silent client missed a deadline and has shown no sign of life since. Signs of life are that its worker rejoins, or
sends anything about a request, even too late. A refusing client answered a request of a round, without taking part in
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

PATIENCE = 3
"""Deadlines that one evaluation waits for silent clients before asking only those that have answered before."""

UNRELIABLE = 2
"""Lowest rank of clients that are drawn only if there are too few others."""

FIRST_REST_S, LONGEST_REST_S = 10.0, 3_600.0
"""Seconds for which a refusing client or owner is drawn after others; doubled with each further refusal."""

MOST_RESTING = 100_000
"""Maximum number of refusing clients or owners remembered; the oldest are forgotten first."""

NO_SIGN = "it missed an earlier deadline and has been silent since"
NEVER_ANSWERED = f"it has never answered, and this evaluation has already waited for {PATIENCE} deadlines"


class _Resting:
    """Names on hold, twice as long after each refusal, until they take part again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rests: dict[str, tuple[int, float]] = {}  # number of refusals, and end of the rest

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            count = self._rests.pop(name, (0, 0.0))[0]
            self._rests[name] = count + 1, self._clock() + min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(count, 20))
        while len(self._rests) > MOST_RESTING:
            del self._rests[next(iter(self._rests))]

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            self._rests.pop(name, None)

    def now(self) -> set[str]:
        """Return the names currently on hold."""
        now = self._clock()
        return {name for name, (_, ends) in self._rests.items() if now < ends}


class Silence:
    """Record of answering, silent and refusing clients. Thread-safe.

    It grows with the connected clients, and belongs to one process: a client that joins another aggregator, or this one
    after a restart, starts with a clean record.

    Parameters
    ----------
    clock
        Clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waited_s = 0.0
        """Total seconds of all exchanges in which a client missed the deadline."""
        self._lock = threading.Lock()
        self._silent: set[str] = set()
        self._heard: set[str] = set()  # answered the last request
        self._places: dict[str, tuple[str, str]] = {}  # worker and owner of clients that only one worker serves
        # owners without any answer in the last exchange in which their clients were asked
        self._owing: set[str] = set()
        self._refusing, self._refusing_owners = _Resting(clock), _Resting(clock)

    def join(self, members: Iterable[str], worker: str, owner: str | None) -> None:
        """Record the worker and owner of clients that no other worker may serve; they start with a clean record."""
        with self._lock:
            for client in members:
                self._heard.discard(client)
                self._places[client] = worker, owner or worker

    def leave(self, members: Iterable[str]) -> None:
        """Forget clients of a disconnected worker."""
        members = tuple(members)
        with self._lock:
            for client in members:
                self._places.pop(client, None)
                self._heard.discard(client)
                self._silent.discard(client)
            self._refusing.discard(members)

    def sign(self, clients: Collection[str], worker: str, owner: str | None) -> None:
        """Record that the worker of these clients is alive."""
        with self._lock:
            self._owing.discard(owner or worker)
            self._silent = {client for client in self._silent if client not in clients}

    def end(self, clients: Collection[str], silent: Collection[str], seconds: float) -> None:
        """Record the end of an exchange; a worker without any answer makes all its own clients silent."""
        with self._lock:
            self._heard.update(clients)
            self._silent.difference_update(clients)
            alive = self._places_of(clients)
            self._owing -= {owner for _, owner in alive}
            if not silent:
                return
            self.waited_s += seconds
            mute = self._places_of(silent)
            self._owing |= {owner for _, owner in mute} - {owner for _, owner in alive}
            workers = {worker for worker, _ in mute} - {worker for worker, _ in alive}
            self._silent.update(silent)
            self._silent.update(client for client, (worker, _) in self._places.items() if worker in workers)
            self._heard -= self._silent

    def _places_of(self, clients: Collection[str]) -> set[tuple[str, str]]:
        return {self._places[client] for client in clients if client in self._places}

    def refuse(self, clients_lost: Collection[str], clients_answered: Collection[str]) -> None:
        """Record the clients lost by a failed attempt at a round, except silent ones, and those that completed it.

        Refusing clients are put on hold, and so are all clients of an owner without any answer, whatever they answer
        outside rounds, and even if they join again.
        """
        with self._lock:
            rejecting = [client for client in clients_lost if client not in self._silent]
            owners = {owner for _, owner in self._places_of(clients_answered)}
            self._refusing.add(rejecting)
            self._refusing_owners.add({owner for _, owner in self._places_of(rejecting)} - owners)

    def take_part(self, clients: Collection[str]) -> None:
        """Record the clients that completed a round: they and their owners no longer count as refusing."""
        with self._lock:
            self._refusing.discard(clients)
            self._refusing_owners.discard({owner for _, owner in self._places_of(clients)})

    @property
    def refusing(self) -> frozenset[str]:
        """Clients that refuse to take part in rounds now."""
        with self._lock:
            return frozenset(self._refusing_now())

    def _refusing_now(self) -> set[str]:
        clients, owners = self._refusing.now(), self._refusing_owners.now()
        if not owners:
            return clients
        return clients.union(client for client, (_, owner) in self._places.items() if owner in owners)

    @property
    def silent(self) -> frozenset[str]:
        """Clients that are silent now."""
        with self._lock:
            return frozenset(self._silent)

    def groups(self, roster: Sequence[str], least: int, clients_lost: Collection[str] = ()) -> list[Sequence[str]]:
        """Return groups of a roster, in its order, that a cohort is filled from, one group after the other.

        One group of all clients, if none is silent, refuses or is lost. Otherwise silent and refusing clients, and
        those of an owner whose clients have all been silent in their last exchange, are in a group only if the others
        are fewer than ``least``: a cohort that is smaller is better than one in which they take the place of others.

        ``least`` clients must answer. Clients that earlier attempts at this round lost come last, with their owners,
        as if they were silent; clients that have answered before come first.
        """
        with self._lock:
            rejecting = self._refusing_now()
            if not clients_lost and not self._owing and self._silent.union(rejecting).isdisjoint(roster):
                return [roster]
            owing = self._owing | {self._places[client][1] for client in clients_lost if client in self._places}
            by_rank: list[list[str]] = [[] for _ in range(4)]
            for client in roster:
                rank = self._rank(client, owing, clients_lost)
                by_rank[max(rank, UNRELIABLE) if client in rejecting else rank].append(client)
        groups: list[Sequence[str]] = []
        for rank, group in enumerate(by_rank):
            if rank < UNRELIABLE or sum(map(len, groups)) < least:
                groups.append(group)
        return groups

    def _rank(self, client: str, owing: Collection[str], clients_lost: Collection[str]) -> int:
        if client in self._silent:
            return UNRELIABLE + 1
        if client in self._places and self._places[client][1] in owing:
            return UNRELIABLE
        return 1 if clients_lost and (client in clients_lost or client not in self._heard) else 0

    def skipped(self, clients: Sequence[str], waited_s: float, deadline_s: float) -> dict[str, str]:
        """Return the clients that an evaluation skips, and why, after ``waited_s`` seconds for silent clients."""
        with self._lock:
            reasons = dict.fromkeys((client for client in clients if client in self._silent), NO_SIGN)
            if waited_s >= PATIENCE * deadline_s:
                new = (client for client in clients if client not in self._heard and client not in reasons)
                reasons |= dict.fromkeys(new, NEVER_ANSWERED)
            return reasons
