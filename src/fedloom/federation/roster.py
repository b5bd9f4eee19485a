"""The roster: who takes part, in a closed run, in an open federation, and when the journal of one is replayed.

In an open federation workers announce their clients, and clients come and go. Who came and who left is settled at the
boundary of a round, and written into the journal with the attempt or evaluation that began there.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fedloom.data.manifest import SPLITS, ClientEntry, Manifest
from fedloom.errors import DataError, InterruptedRun, argument
from fedloom.federation.activity import Monitor
from fedloom.federation.journal import Replay, fold
from fedloom.federation.silence import Silence
from fedloom.words import counted

UNKNOWN = "0" * 64
"""In place of the hash of a shard whose owner does not tell it."""

POLL_S = 0.2
"""How soon a stop, a pause, or a client that has been absent for too long, is noticed while nothing else happens."""

Hold = Callable[[], None]
"""Returns once nobody wants rounds to pause."""


def no_pause() -> None:
    """Nobody can ask for a pause."""


@dataclass(frozen=True)
class Member:
    """What an aggregator is told of a client with data of its own.

    Attributes
    ----------
    id
        Chosen by its owner.
    train, validation, test
        Number of examples in each split.
    labelled
        Whether they have labels.
    observer
        Whether it is measured and gets models, and never trains.
    class_counts
        Training examples of each class; empty where that is not told.
    """

    id: str
    train: int
    validation: int
    test: int
    labelled: bool = True
    observer: bool = False
    class_counts: tuple[int, ...] = ()

    def entry(self, classes: int) -> ClientEntry:
        """Return what a manifest says of it."""
        nothing = (0,) * classes
        counts = dict.fromkeys(SPLITS, nothing) | {"train": self.class_counts or nothing}
        return ClientEntry(self.id, not self.observer, self.train, self.validation, self.test, counts, UNKNOWN)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Member:
        """Return the member that a line of a journal tells of.

        Raises
        ------
        DataError
            If it tells of none.
        """
        try:
            return cls(**{**told, "class_counts": tuple(told["class_counts"])})
        except (KeyError, TypeError) as error:
            raise DataError(f"the journal is not one of this version: a client that joined ({error})") from error


@dataclass(frozen=True)
class Change:
    """Who joined and who left at a boundary; a client whose data are others than before did both."""

    joined: tuple[Member, ...] = ()
    left: tuple[str, ...] = ()

    def as_lines(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return ``joined`` and ``left`` as the journal has them."""
        return [asdict(member) for member in self.joined], list(self.left)


def between(before: Mapping[str, Member], after: Mapping[str, Member]) -> Change:
    """Return what changed between two rosters, in the order of ids."""
    return Change(
        tuple(member for name, member in sorted(after.items()) if before.get(name) != member),
        tuple(name for name, member in sorted(before.items()) if after.get(name) != member),
    )


class Roster(Protocol):
    """Who takes part.

    Attributes
    ----------
    manifest
        Of those who are in the roster now.
    fixed
        Whether nobody comes or goes.
    """

    manifest: Manifest
    fixed: bool

    def settle(self, round: int, *, evaluating: bool, hold: Hold = no_pause) -> Change:
        """Take in who came and who left before the next attempt at a round, or the evaluation after it.

        ``hold`` is called before that, and again whenever others have been waited for.
        """

    def here(self) -> tuple[str, ...]:
        """Ids of those who can be asked now, in manifest order: a round draws from those of them who train."""

    def restore(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Go back to the roster of the round that a run goes on from, as its journal tells of it."""


class FixedRoster:
    """Everyone is known, and stays: a partition, or packed folders that are at hand."""

    fixed = True

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._everyone = tuple(entry.id for entry in manifest.clients)

    def settle(self, round: int, *, evaluating: bool, hold: Hold = no_pause) -> Change:
        """Nobody comes or goes."""
        hold()
        return Change()

    def here(self) -> tuple[str, ...]:
        """Everyone."""
        return self._everyone

    def restore(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Nothing has changed."""


class _ChangingRoster:
    """Members by id, and a manifest of them."""

    fixed = False

    def __init__(self, manifest: Manifest) -> None:
        self._members: dict[str, Member] = {}
        self.manifest = dataclasses.replace(manifest, clients=())

    def _become(self, members: Mapping[str, Member]) -> Change:
        change = between(self._members, members)
        if change != Change():
            self._members = dict(sorted(members.items()))
            entries = tuple(member.entry(self.manifest.classes) for member in self._members.values())
            self.manifest = dataclasses.replace(self.manifest, clients=entries)
        return change

    def restore(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Go back to an earlier roster."""
        self._become({name: Member.read(told) for name, told in members.items()})


class ReplayedRoster(_ChangingRoster):
    """Who took part in a run that is replayed, as its journal says."""

    def __init__(self, manifest: Manifest, replay: Replay) -> None:
        super().__init__(manifest)
        self._replay = replay

    def settle(self, round: int, *, evaluating: bool, hold: Hold = no_pause) -> Change:
        """Take in what the journal says up to this attempt, or this evaluation."""
        hold()
        told: dict[str, Mapping[str, Any]] = {name: asdict(member) for name, member in self._members.items()}
        for joined, left in self._replay.changes(round, evaluating=evaluating):
            fold(told, joined, left)
        return self._become({name: Member.read(member) for name, member in told.items()})

    def here(self) -> tuple[str, ...]:
        """Everyone: whom the journal asked is asked."""
        return tuple(self._members)


class Presence:
    """Who is connected: written by the aggregator's event loop, read by the thread that runs the rounds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: dict[str, Member] = {}
        self._gone_at: dict[str, float] = {}
        self._training = 0  # of those who are here
        self._changes = 0
        self._over = False

    def change(self, come: Iterable[Member], gone: Iterable[Member]) -> None:
        """Some have left, and some have come, perhaps the same."""
        now = time.monotonic()
        with self._changed:
            for member in gone:
                self._training -= not self._here.pop(member.id).observer
                self._gone_at[member.id] = now
            for member in come:
                self._here[member.id] = member
                self._training += not member.observer
                self._gone_at.pop(member.id, None)
            self._changes += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody will come any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def count(self, silent: Collection[str] = ()) -> tuple[int, int]:
        """Return how many who train are connected and not silent, and how often anybody has come or gone so far.

        Raises
        ------
        InterruptedRun
            If nobody will come any more.
        """
        with self._changed:
            if self._over:
                raise InterruptedRun(f"stopped while waiting for clients; go on with {argument('resume')}")
            here = (self._here.get(client) for client in silent)
            return self._training - sum(member is not None and not member.observer for member in here), self._changes

    def now(self) -> tuple[Mapping[str, Member], Mapping[str, float]]:
        """Return who is connected, and since when, on the monotonic clock, others are not."""
        with self._changed:
            return dict(self._here), dict(self._gone_at)

    def wait(self, seconds: float) -> None:
        """Wait until others are connected, but no longer than that."""
        with self._changed:
            if not self._over:
                self._changed.wait(seconds)


class OpenRoster(_ChangingRoster):
    """Who takes part in an open federation: those who come, until they have been absent for too long.

    Parameters
    ----------
    manifest
        What every client's data are like; its clients do not count.
    presence
        Who is connected.
    min_clients
        Clients that train and are connected, below which rounds wait.
    absent_after_s
        How long a client may be away before it leaves the roster.
    stop
        Set to end the run.
    say
        Is told when rounds wait, and when they go on.
    monitor
        Is told that they wait.
    silence
        Clients that let deadlines pass: rounds wait for others than them.
    """

    def __init__(
        self,
        manifest: Manifest,
        presence: Presence,
        min_clients: int,
        absent_after_s: float,
        stop: threading.Event,
        say: Callable[[str], None],
        monitor: Monitor | None = None,
        silence: Silence | None = None,
    ) -> None:
        super().__init__(manifest)
        self._silence = silence or Silence()
        self._monitor = monitor or Monitor()
        self._presence = presence
        self._min_clients = min_clients
        self._absent_after_s = absent_after_s
        self._stop = stop
        self._say = say
        self._begun = time.monotonic()
        self._here: tuple[str, ...] = ()
        self._settled: int | None = None  # how often anybody had come or gone then
        self._next_leaves = math.inf  # when who is away will have been away for too long

    def restore(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Go back to an earlier roster."""
        super().restore(members)
        self._settled = None

    def settle(self, round: int, *, evaluating: bool, hold: Hold = no_pause) -> Change:
        """Take in who came and who left, once enough clients that train are connected.

        Raises
        ------
        InterruptedRun
            If the run is stopped while it waits.
        """
        waited = False
        while True:
            hold()
            silent = self._silence.silent
            training, changes = self._presence.count(silent)
            if training >= self._min_clients:
                break
            if not waited:
                when = f"after round {round}" if evaluating else f"before round {round}"
                why = (
                    f"waiting {when}: {counted(training, 'client')} to train with, federation.min_clients is "
                    f"{self._min_clients}{_besides(len(silent))}"
                )
                self._say(why)
                self._monitor.enter("waiting", why)
                waited = True
            if self._stop.is_set():
                raise InterruptedRun(f"stopped while waiting for clients; go on with {argument('resume')}")
            self._presence.wait(POLL_S)
        if waited:
            self._say(f"going on with {counted(training, 'client')}")
        now = time.monotonic()
        if changes == self._settled and now < self._next_leaves:
            return Change()  # which costs the same for any number of clients
        here, gone_at = self._presence.now()
        leaves = {
            name: gone_at.get(name, self._begun) + self._absent_after_s for name in self._members if name not in here
        }
        away = {name: self._members[name] for name, when in leaves.items() if when > now}
        self._settled, self._next_leaves = changes, min((leaves[name] for name in away), default=math.inf)
        self._here = tuple(sorted(here))
        return self._become({**away, **here})

    def here(self) -> tuple[str, ...]:
        """Those who were connected when the roster was last settled."""
        return self._here


def _besides(silent: int) -> str:
    return f"; {counted(silent, 'client')} let a deadline pass and gave no sign of life since" if silent else ""
