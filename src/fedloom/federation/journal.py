"""The journal: each attempt's cohorts, where each client was lost, and what the round cost.

``journal.jsonl`` has one object per attempt at a round, and one per evaluation that lost a client. ``fedloom run
--replay RUN`` holds the same cohorts and loses the same rows at the same exchanges, and so repeats a run to the bit,
faults included.
"""

from __future__ import annotations

import json
import time
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedloom.errors import DataError
from fedloom.federation.folder import RunFolder
from fedloom.federation.states import Version

DONE = "done"
EVALUATED = "evaluated"


@dataclass
class Loss:
    """One row that left a conversation: its position, the exchange it did not answer, and why."""

    row: int
    client: str
    exchange: int
    reason: str


@dataclass
class ConversationRecord:
    """A cohort, and the rows that it lost."""

    clients: list[str]
    lost: list[Loss] = field(default_factory=list)


@dataclass
class Attempt:
    """One attempt at a round, or an evaluation (attempt 0).

    ``outcome`` is ``done``, ``evaluated``, or why the attempt failed.
    ``phases`` are seconds by message sent, and ``server`` for the rest; ``steps`` are local SGD steps. ``payload_*``
    are tensor bytes as the papers count them, ``wire_*`` bytes measured; None in process. ``life`` is that of the
    aggregator that made it (:class:`Journal`).
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


class Journal:
    """The journal of a run, appended as rounds end.

    Attributes
    ----------
    life
        Of the aggregator that appends to it: ms since 1970 at its start, and more than any life in the journal. Client
        states are named by it, so that two aggregators that held the same round never mean one file.
    """

    def __init__(self, folder: RunFolder, attempts: Iterable[Attempt] = ()) -> None:
        self._folder = folder
        self.life = time.time_ns() // 1_000_000
        self.attempts: list[Attempt] = []
        self._kept: dict[str, list[Version]] = {}
        for attempt in attempts:
            self._note(attempt)
            self.life = max(self.life, attempt.life + 1)

    def _note(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        if attempt.outcome != DONE:
            return
        for number, conversation in enumerate(attempt.conversations):
            lost = {loss.row for loss in conversation.lost}
            for row, client in enumerate(conversation.clients):
                if row not in lost:
                    version = Version(attempt.round, attempt.attempt, number, row, attempt.life)
                    self._kept.setdefault(client, []).append(version)

    def version(self, client: str, round: int) -> Version | None:
        """The state that a client kept in the last round, up to this one, that counted it; None before the first."""
        kept = self._kept.get(client, [])
        at = bisect(kept, round, key=lambda version: version.round)
        return kept[at - 1] if at else None

    def append(self, attempt: Attempt) -> None:
        """Write an attempt down, as one of this life."""
        attempt.life = self.life
        self._note(attempt)
        self._folder.append("journal.jsonl", asdict(attempt))

    def rewind(self, round: int) -> None:
        """Forget what came after a round: those rounds run again."""
        before, self.attempts, self._kept = self.attempts, [], {}
        for attempt in before:
            if attempt.round <= round:
                self._note(attempt)
        self._folder.rewrite("journal.jsonl", [asdict(attempt) for attempt in self.attempts])

    def counted(self) -> list[Attempt]:
        """The attempts that became rounds."""
        return [attempt for attempt in self.attempts if attempt.outcome == DONE]

    @classmethod
    def read(cls, folder: RunFolder) -> Journal:
        """Read the journal of a run; a half-written last line is as good as none.

        Raises
        ------
        DataError
            If a line is not an attempt.
        """
        return cls(folder, [_attempt(line, folder) for line in folder.lines("journal.jsonl")])


class Replay:
    """What a journal says about the rounds to repeat."""

    def __init__(self, journal: Journal) -> None:
        self._rounds = {attempt.round: attempt for attempt in journal.counted()}
        self._evaluations = {attempt.round: attempt for attempt in journal.attempts if attempt.outcome == EVALUATED}

    def attempt(self, round: int) -> Attempt:
        """The attempt that became a round.

        Raises
        ------
        DataError
            If the journal does not reach that far.
        """
        if round not in self._rounds:
            raise DataError(
                f"the journal to replay has no round {round} (it ends with round {max(self._rounds, default=0)})",
                hint="replay no more rounds than it has: --set federation.rounds=...",
            )
        return self._rounds[round]

    def evaluation(self, round: int) -> Attempt | None:
        """The evaluation after a round, if it lost a client."""
        return self._evaluations.get(round)


def _attempt(line: dict[str, Any], folder: RunFolder) -> Attempt:
    try:
        conversations = [
            ConversationRecord(record["clients"], [Loss(**loss) for loss in record["lost"]])
            for record in line["conversations"]
        ]
        return Attempt(**{**line, "conversations": conversations})
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder.path / 'journal.jsonl'}: not a journal of this version ({error})") from error


def lost_rows(record: ConversationRecord, exchange: int) -> Sequence[Loss]:
    """The rows that a journal lost at one exchange."""
    return [loss for loss in record.lost if loss.exchange == exchange]


def dump(attempt: Attempt) -> str:
    """One line, for logs and tests."""
    return json.dumps(asdict(attempt), sort_keys=True)
