"""Journal of attempts: their cohorts, lost clients and cost.

``journal.jsonl`` has one object per attempt at a round, and one per evaluation that lost a client. ``fedloom run
--replay RUN`` forms the same cohorts and loses the same rows at the same exchanges, and so repeats a run bit for bit,
faults included.
"""

from __future__ import annotations

import mmap
import time
from array import array
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedloom.errors import DataError, argument
from fedloom.runs.files import JOURNAL, METRICS, RELEASES, Placed, as_object
from fedloom.runs.folder import RunFolder

DONE = "done"
EVALUATED = "evaluated"
BURNT = "burnt"
"""Outcome of a round that is left out: its clients may have revealed a sum that did not count, and reveal no other."""
SPENT = "budget spent"
"""Outcome of an attempt that was not made, because it would exceed the budget of the clients' privacy."""


@dataclass(frozen=True, order=True)
class Version:
    """Key of a client's state: the round, attempt, conversation, row and aggregator life that it was kept in."""

    round: int
    attempt: int
    conversation: int
    row: int
    life: int = 0

    def __str__(self) -> str:
        return f"{self.round}-{self.attempt}-{self.conversation}-{self.row}-{self.life}"


@dataclass
class Loss:
    """Row that left a conversation: its position, the exchange it did not answer, and the reason."""

    row: int
    client: str
    exchange: int
    reason: str


@dataclass
class ConversationRecord:
    """Cohort, and the rows that it lost."""

    clients: list[str]
    lost: list[Loss] = field(default_factory=list)


@dataclass
class Attempt:
    """Attempt at a round, or an evaluation (attempt 0).

    ``outcome`` is ``done``, ``burnt``, ``evaluated``, or the reason for a failure. ``phases`` are seconds by message
    sent, and ``server`` for the rest; ``statistics`` include ``client_steps``, local SGD steps. ``payload_*`` are bytes
    of tensors as the papers count them, ``wire_*`` measured bytes; None in process. ``life`` identifies the aggregator
    process that made it (:class:`Journal`).

    In an open federation, ``joined`` and ``left`` are the changes of the roster just before, and ``experiment`` is the
    shared part of the experiment (JSON) if it has changed. ``paused`` describes an operator's pause just before: ``by``
    whom, and how many ``seconds``. ``follows`` maps each line file to the digest of its last line when this one was
    written. A line omits these fields where they are empty.
    """

    round: int
    attempt: int
    outcome: str = DONE
    conversations: list[ConversationRecord] = field(default_factory=list)
    statistics: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    payload_up: int = 0
    payload_down: int = 0
    wire_up: int | None = None
    wire_down: int | None = None
    refused: dict[str, int] = field(default_factory=dict)
    life: int = 0
    joined: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    experiment: str = ""
    paused: dict[str, Any] = field(default_factory=dict)
    follows: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """True if the round ends with this attempt."""
        return self.outcome in (DONE, BURNT)

    @property
    def losses(self) -> dict[str, str]:
        """Lost clients with the reasons."""
        return {loss.client: loss.reason for conversation in self.conversations for loss in conversation.lost}

    @property
    def answered(self) -> set[str]:
        """Clients that were asked and not lost."""
        return {client for conversation in self.conversations for client in conversation.clients} - self.losses.keys()


@dataclass
class Costs:
    """Total costs of the completed rounds; ``seconds`` include failed attempts.

    ``wire_*`` is None once a round has not been measured.
    """

    payload_up: int = 0
    payload_down: int = 0
    wire_up: int | None = 0
    wire_down: int | None = 0
    client_steps: float = 0.0
    seconds: float = 0.0

    def add(self, attempt: Attempt) -> None:
        """Add an attempt."""
        self.seconds += attempt.seconds
        if attempt.outcome != DONE:
            return
        self.payload_up += attempt.payload_up
        self.payload_down += attempt.payload_down
        self.wire_up = added(self.wire_up, attempt.wire_up)
        self.wire_down = added(self.wire_down, attempt.wire_down)
        self.client_steps += attempt.statistics["client_steps"]


def added(total: int | None, addend: int | None) -> int | None:
    """Return the sum of two byte counts; None if either was not measured."""
    return None if total is None or addend is None else total + addend


class Journal:
    """Journal of a run, appended to as rounds end.

    Attempts are kept only in the file. Only what the loop needs of them is kept in memory; its size does not grow with
    the number of rounds.

    Attributes
    ----------
    life
        Id of the aggregator process that appends to it: milliseconds since 1970 at its start, and greater than any life
        in the journal. It is in the names of client states, so two aggregators that run the same round use different
        files.
    costs
        Costs of all rounds so far.
    counted_rounds, whole
        Number of attempts that became rounds, and the last round up to which none is missing.
    members, ever
        In an open federation: the roster after the last line, as announced on joining; and all clients ever in it.
    experiment
        Experiment of an open federation after the last line; empty in a closed run.
    follows
        Digest of each line file's last line, as of the journal's last line.
    needed
        Rounds other than the last for which versions of client states are requested: those of checkpoints.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.life = time.time_ns() // 1_000_000
        self.costs = Costs()
        self.counted_rounds = self.whole = 0
        self.needed: Collection[int] = ()
        self._kept: dict[str, list[Version]] = {}
        self._losses = array("d")
        self._end = 0
        self.members: dict[str, Mapping[str, Any]] = {}
        self.ever: set[str] = set()
        self.experiment = ""
        self.follows: dict[str, str] = {}

    def _note(self, attempt: Attempt) -> None:
        self.costs.add(attempt)
        fold(self.members, attempt.joined, attempt.left)
        self.ever.update(member["id"] for member in attempt.joined if not member["observer"])
        self.experiment = attempt.experiment or self.experiment
        self.follows = attempt.follows
        if attempt.counts:
            self._count(attempt)

    def _count(self, attempt: Attempt) -> None:
        if self.whole == self.counted_rounds and attempt.round == self.whole + 1:
            self.whole += 1
        self.counted_rounds += 1
        if "loss" in attempt.statistics:
            self._losses.append(attempt.statistics["loss"])
        for number, conversation in enumerate(attempt.conversations):
            lost_rows = {loss.row for loss in conversation.lost}
            for row, client in enumerate(conversation.clients):
                if row not in lost_rows:
                    self._keep(client, Version(attempt.round, attempt.attempt, number, row, attempt.life))

    def _keep(self, client: str, version: Version) -> None:
        """Store the version that a client starts from now, and those that it starts from at checkpoints."""
        versions = self._kept.get(client, [])
        places = {_at(versions, round) for round in self.needed}
        self._kept[client] = [*(old for old in versions if old in places), version]

    def version(self, client: str, round: int) -> Version | None:
        """Return the state that a client kept in the last round up to this one that counted it; None before the first.

        ``round`` must be the last round or one of ``needed``.
        """
        return _at(self._kept.get(client, []), round)

    def last_round(self, client: str) -> int | None:
        """Return the last round that counted a client; None before the first. Callable from any thread."""
        versions = self._kept.get(client)
        return versions[-1].round if versions else None

    def train_loss(self) -> float | None:
        """Return the mean training loss of the rounds since the previous call; None without one."""
        losses, self._losses = self._losses, array("d")
        return sum(losses) / len(losses) if losses else None

    def append(self, attempt: Attempt) -> None:
        """Append an attempt, marked with this aggregator's ``life``."""
        attempt.life = self.life
        attempt.follows = self._folder.last_digests(METRICS, RELEASES)
        # asdict would copy each of a hundred thousand ids.
        conversations = [
            {"clients": conversation.clients, "lost": [vars(loss) for loss in conversation.lost]}
            for conversation in attempt.conversations
        ]
        line = {**vars(attempt), "conversations": conversations}
        self._folder.append(JOURNAL, {key: value for key, value in line.items() if value or key not in _OPTIONAL})
        self._note(attempt)

    def rewind(self) -> None:
        """Remove everything after the rounds that were read: later rounds run again."""
        self._folder.line_file(JOURNAL).cut(self._end)

    @classmethod
    def read(
        cls, folder: RunFolder, upto: int | None = None, rounds_needed: Collection[int] = (), last_evaluation: int = 0
    ) -> Journal:
        """Read the journal of a run up to a round, line by line; a half-written last line is ignored.

        Versions are kept for the last round and for ``rounds_needed``. Training losses of rounds after
        ``last_evaluation``, the last evaluated round, have yet to be reported.

        Raise DataError if a line is not an attempt, or is damaged.
        """
        journal = cls(folder)
        journal.needed = rounds_needed
        is_wanted = True
        for attempt, line in _attempts(folder):
            journal.life = max(journal.life, attempt.life + 1)
            is_wanted = is_wanted and (upto is None or attempt.round <= upto)
            if is_wanted:
                journal._note(attempt)
                journal._end = line.end
                if attempt.round <= last_evaluation:
                    journal.train_loss()
        return journal

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts in the file, read again at each access."""
        return [attempt for attempt, _ in _attempts(self._folder)]

    def counted(self) -> list[Attempt]:
        """Return the attempts that became rounds, read again from the file."""
        return [attempt for attempt in self.attempts if attempt.counts]


_OPTIONAL = ("joined", "left", "experiment", "paused", "follows")


def fold(
    members: dict[str, Mapping[str, Any]], arrivals: Iterable[Mapping[str, Any]], departures: Iterable[str]
) -> None:
    """Apply the roster changes of a journal line to a roster, by id."""
    for name in departures:
        members.pop(name, None)
    members.update({member["id"]: member for member in arrivals})


def _at(versions: Sequence[Version], round: int) -> Version | None:
    """Return the last of a client's versions up to a round."""
    position = bisect(versions, round, key=lambda version: version.round)
    return versions[position - 1] if position else None


class ReplayedExperiment(NamedTuple):
    """Experiment in a journal: its text, the round of its first line, and whether that line is an evaluation."""

    text: str
    round: int
    is_evaluation: bool


class Replay:
    """Index of a journal for repeating its rounds: the positions of its lines, eight bytes per round.

    The file is read as it is now, even if it is replaced later.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._starts = array("q")  # the line of round t is at t - 1
        self._evaluations: dict[int, int] = {}
        self._changes = array("q")  # lines with roster changes
        self._taken = 0
        self.experiments: list[ReplayedExperiment] = []
        for attempt, line in _attempts(folder):
            if attempt.joined or attempt.left:
                self._changes.append(line.start)
            if attempt.experiment:
                first = ReplayedExperiment(attempt.experiment, attempt.round, is_evaluation=attempt.attempt == 0)
                self.experiments.append(first)
            if attempt.outcome == EVALUATED:
                self._evaluations[attempt.round] = line.start
            elif attempt.counts and attempt.round == len(self._starts) + 1:
                self._starts.append(line.start)
        path = folder.path / JOURNAL
        self._lines: mmap.mmap | None = None
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def attempt(self, round: int) -> Attempt:
        """Return the attempt that became a round; raise DataError if the journal ends before it."""
        if round > len(self._starts):
            raise DataError(
                f"the replayed journal has no round {round} (it ends with round {len(self._starts)})",
                hint=f"replay no more rounds than it has: {argument('set')}federation.rounds=...",
            )
        return self._read(self._starts[round - 1])

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self._starts)

    @property
    def is_open(self) -> bool:
        """True for the journal of an open federation."""
        return bool(self._changes)

    def changes(self, round: int, *, evaluating: bool) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
        """Yield (joined, left) line by line, up to the attempt that became a round, or the evaluation after it.

        Changes that an earlier call has yielded are not repeated.
        """
        if evaluating:
            upto = self._evaluations.get(round, -1)
        else:
            upto = self._starts[round - 1] if round <= len(self._starts) else -1
        while self._taken < len(self._changes) and self._changes[self._taken] <= upto:
            attempt = self._read(self._changes[self._taken])
            self._taken += 1
            yield attempt.joined, attempt.left

    def evaluation(self, round: int) -> Attempt | None:
        """Return the evaluation after a round, if it lost a client or belongs to an open federation."""
        start = self._evaluations.get(round)
        return None if start is None else self._read(start)

    def _read(self, start: int) -> Attempt:
        assert self._lines is not None
        line = as_object(self._lines[start : self._lines.find(b"\n", start)]) or {}  # its digest has been checked
        return attempt_of({key: value for key, value in line.items() if key != "digest"}, self._folder)


def _attempts(folder: RunFolder) -> Iterator[tuple[Attempt, Placed]]:
    """Yield the attempts in a folder's journal and their positions; a last line cut short by a crash is skipped."""
    for line in folder.placed(JOURNAL):
        if line.object is not None:
            yield attempt_of(line.object, folder), line


def attempt_of(line: dict[str, Any], folder: RunFolder) -> Attempt:
    """Return the attempt in a line of a folder's journal; raise DataError if the line is not one."""
    try:
        conversations = [
            ConversationRecord(record["clients"], [Loss(**loss) for loss in record["lost"]])
            for record in line["conversations"]
        ]
        return Attempt(**{**line, "conversations": conversations})
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder.path / JOURNAL} is not a journal of this version ({error})") from error


def lost_rows(record: ConversationRecord, exchange: int) -> Sequence[Loss]:
    """Return the rows that were lost at one exchange."""
    return [loss for loss in record.lost if loss.exchange == exchange]
