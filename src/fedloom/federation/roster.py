"""Roster of participating clients: in a closed run, in an open federation, and in the replay of one from its journal.

In an open federation workers announce their clients, which join and leave. Changes take effect at the boundary of a
round, and are written to the journal with the attempt or evaluation that begins there.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.core.words import pluralize
from fedloom.data.manifest import SPLITS, ClientEntry, Manifest
from fedloom.errors import DataError, InterruptedRun, argument
from fedloom.federation.monitor import Monitor
from fedloom.federation.silence import Silence
from fedloom.runs.journal import Replay, fold

UNKNOWN = "0" * 64
"""Placeholder for the hash of a shard that its owner does not disclose."""

POLL_S = 0.2
"""Interval for noticing a stop, a pause, or a client that has been absent for too long."""

Hold = Callable[[], None]
"""Function that returns once no pause is requested."""


def no_pause() -> None:
    """Return at once: no pause can be requested."""


@dataclass(frozen=True)
class Member:
    """Announcement of a client with its own data.

    Its owner chooses its id. ``train``, ``validation`` and ``test`` are numbers of examples. An ``observer`` is
    measured and gets models, but never trains. ``class_counts`` are training examples of each class; empty: unknown.
    """

    id: str
    train: int
    validation: int
    test: int
    labelled: bool = True
    observer: bool = False
    class_counts: tuple[int, ...] = ()

    def entry(self, classes: int) -> ClientEntry:
        """Return its entry in a manifest."""
        nothing = (0,) * classes
        counts = dict.fromkeys(SPLITS, nothing) | {"train": self.class_counts or nothing}
        return ClientEntry(self.id, not self.observer, self.train, self.validation, self.test, counts, UNKNOWN)

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Member:
        """Return the member in a line of a journal.

        Raise DataError if the line has no valid member.
        """
        try:
            return cls(**{**line, "class_counts": tuple(line["class_counts"])})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"the journal was not written by this version: invalid entry of a client that joined ({error})"
            ) from error


@dataclass(frozen=True)
class Change:
    """Clients that joined and left at a boundary; a client with changed data did both."""

    joined: tuple[Member, ...] = ()
    left: tuple[str, ...] = ()

    def as_lines(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return ``joined`` and ``left`` in the journal's format."""
        return [asdict(member) for member in self.joined], list(self.left)


def between(before: Mapping[str, Member], after: Mapping[str, Member]) -> Change:
    """Return the change from one roster to another, sorted by id."""
    return Change(
        tuple(member for name, member in sorted(after.items()) if before.get(name) != member),
        tuple(name for name, member in sorted(before.items()) if after.get(name) != member),
    )


class Roster:
    """Clients that take part: here a fixed population, a partition or packed folders that are available locally."""

    fixed = True
    """True if clients never join or leave."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def settle(self, round: int, *, evaluating: bool, hold: Hold = no_pause) -> Change:
        """Update the roster before the next attempt at a round, or the evaluation after it, and return the change.

        ``hold`` is called first, and again after each wait for clients.
        """
        hold()
        return Change()

    def here(self) -> tuple[str, ...]:
        """Return the ids of available clients in manifest order; rounds sample from the training clients among them."""
        return tuple(entry.id for entry in self.manifest.clients)

    def waits_for_others(self, round: int) -> bool:
        """Return whether failed attempts at a round are not counted yet, because more clients may still join."""
        return False

    def restore(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the roster of the round that a run continues from, as recorded in its journal."""


class _ChangingRoster(Roster):
    """Members by id, and a manifest of them."""

    fixed = False

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(dataclasses.replace(manifest, clients=()))
        self._members: dict[str, Member] = {}

    def _become(self, members: Mapping[str, Member]) -> Change:
        change = between(self._members, members)
        if change != Change():
            self._members = dict(sorted(members.items()))
            entries = tuple(member.entry(self.manifest.spec.classes) for member in self._members.values())
            self.manifest = dataclasses.replace(self.manifest, clients=entries)
        return change

    def restore(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore an earlier roster."""
        self._become({name: Member.read(member) for name, member in members.items()})


class ReplayedRoster(_ChangingRoster):
    """Roster of a replayed run, as recorded in its journal, which also determines the clients that are asked."""

    def __init__(self, manifest: Manifest, replay: Replay) -> None:
        super().__init__(manifest)
        self._replay = replay

    def settle(self, round: int, *, evaluating: bool, hold: Hold = no_pause) -> Change:
        """Apply the changes in the journal up to this attempt or evaluation."""
        hold()
        members: dict[str, Mapping[str, Any]] = {name: asdict(member) for name, member in self._members.items()}
        for joined, left in self._replay.changes(round, evaluating=evaluating):
            fold(members, joined, left)
        return self._become({name: Member.read(member) for name, member in members.items()})


class AvailableClients:
    """Connected clients: written by the aggregator's event loop, read by the thread that runs the rounds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: dict[str, Member] = {}
        self._gone_at: dict[str, float] = {}
        self._training = 0  # number of connected clients that train
        self._changes = 0
        self._over = False

    def change(self, joined: Iterable[Member], left: Iterable[Member]) -> None:
        """Remove clients that left and add those that joined; a client may be in both."""
        now = time.monotonic()
        with self._changed:
            for member in left:
                self._training -= not self._here.pop(member.id).observer
                self._gone_at[member.id] = now
            for member in joined:
                self._here[member.id] = member
                self._training += not member.observer
                self._gone_at.pop(member.id, None)
            self._changes += 1
            self._changed.notify_all()

    def forget(self, clients: Iterable[str]) -> None:
        """Let absent clients leave the roster at once."""
        with self._changed:
            self._gone_at.update(dict.fromkeys((client for client in clients if client not in self._here), -math.inf))
            self._changes += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Record that no more clients will join."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def count(self, silent: Collection[str] = ()) -> tuple[int, int]:
        """Return how many training clients are connected and not silent, and the number of changes so far.

        Raise InterruptedRun if no more clients will join.
        """
        with self._changed:
            if self._over:
                raise _stopped()
            here = (self._here.get(client) for client in silent)
            return self._training - sum(member is not None and not member.observer for member in here), self._changes

    def now(self) -> tuple[Mapping[str, Member], Mapping[str, float]]:
        """Return the connected clients, and when each absent one left, on the monotonic clock."""
        with self._changed:
            return dict(self._here), dict(self._gone_at)

    def wait(self, seconds: float) -> None:
        """Wait for a change of the connected clients, for at most ``seconds``."""
        with self._changed:
            if not self._over:
                self._changed.wait(seconds)


class OpenRoster(_ChangingRoster):
    """Roster of an open federation: clients stay in it until they have been absent for too long.

    Parameters
    ----------
    manifest
        Description of every client's data; its clients are ignored.
    min_clients
        Number of connected training clients below which rounds wait.
    heartbeat_timeout_s
        Time after which an absent client leaves the roster.
    say
        Receives a message when rounds wait, and when they continue.
    silence
        Clients that miss deadlines or refuse to take part, on which rounds do not rely.
    min_replies
        Number of clients that must answer for a round to count.
    """

    def __init__(
        self,
        manifest: Manifest,
        presence: AvailableClients,
        min_clients: int,
        heartbeat_timeout_s: float,
        stop: threading.Event,
        say: Callable[[str], None],
        monitor: Monitor | None = None,
        silence: Silence | None = None,
        min_replies: int = 1,
    ) -> None:
        super().__init__(manifest)
        self._silence = silence or Silence()
        self._monitor = monitor or Monitor()
        self._presence = presence
        self._min_clients = min_clients
        self._min_replies = min_replies
        self._waits_until: tuple[int, float] = (0, 0.0)  # round, and the end of its wait for other clients
        self._absent_after_s = heartbeat_timeout_s
        self._stop = stop
        self._say = say
        self._begun = time.monotonic()
        self._here: tuple[str, ...] = ()
        self._settled: int | None = None  # number of changes when the roster was last settled
        self._next_leaves = math.inf  # when the next absent client leaves the roster

    def restore(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore an earlier roster."""
        super().restore(members)
        self._settled = None

    def settle(self, round: int, *, evaluating: bool, hold: Hold = no_pause) -> Change:
        """Update the roster once enough training clients are connected, and return the change.

        Raise InterruptedRun if the run is stopped while it waits.
        """
        changes = self._wait_for_clients(round, evaluating, hold)
        now = time.monotonic()
        if changes == self._settled and now < self._next_leaves:
            return Change()  # keeps the cost independent of the number of clients
        here, gone_at = self._presence.now()
        leaves = {
            name: gone_at.get(name, self._begun) + self._absent_after_s for name in self._members if name not in here
        }
        away = {name: self._members[name] for name, when in leaves.items() if when > now}
        self._settled, self._next_leaves = changes, min((leaves[name] for name in away), default=math.inf)
        self._here = tuple(sorted(here))
        return self._become({**away, **here})

    def _wait_for_clients(self, round: int, evaluating: bool, hold: Hold) -> int:
        """Wait until enough training clients are connected; return the number of changes so far."""
        waited = False
        while True:
            hold()
            silent, refusing = self._silence.silent, frozenset() if evaluating else self._silence.refusing
            training, changes = self._presence.count(silent)
            willing = self._presence.count(silent | refusing)[0] if refusing else training
            enough = training >= self._min_clients and (
                willing >= max(self._min_clients, self._min_replies)
                or willing == training
                or not self.waits_for_others(round)
            )
            if enough:
                if waited:
                    self._say(f"continuing with {pluralize(training, 'client')}")
                return changes
            if not waited:
                when = f"{'after' if evaluating else 'before'} round {round}"
                why = (
                    f"waiting {when}: {pluralize(willing, 'client')} to train with, federation.min_clients is "
                    f"{self._min_clients}{_unavailable(len(silent), training - willing)}"
                )
                self._say(why)
                self._monitor.enter("waiting", why)
                waited = True
            if self._stop.is_set():
                raise _stopped()
            self._presence.wait(POLL_S)

    def waits_for_others(self, round: int) -> bool:
        """Return whether a round still waits for willing clients.

        It waits for ``heartbeat_timeout_s``, from its first failed attempt or from the time when too few of them were
        connected.
        """
        if self._waits_until[0] != round:
            self._waits_until = round, time.monotonic() + self._absent_after_s
        return time.monotonic() < self._waits_until[1]

    def here(self) -> tuple[str, ...]:
        """Return the clients that were connected when the roster was last settled."""
        return self._here


def _unavailable(silent: int, refusing: int) -> str:
    why = f"; {pluralize(silent, 'client')} missed a deadline and have been silent since" if silent else ""
    return why + (f"; {pluralize(refusing, 'client')} refused to take part" if refusing else "")


def _stopped() -> InterruptedRun:
    return InterruptedRun(f"stopped while waiting for clients; continue with {argument('resume')}")
