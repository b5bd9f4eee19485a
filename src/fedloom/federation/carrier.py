"""What carries one exchange of a conversation to the clients and their answers back.

The round loop talks to this protocol alone; the in-process carrier and the gRPC carrier implement it, which is
why both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedloom.federation.silence import Silence
from fedloom.federation.states import Versions
from fedloom.messages import Message


@dataclass(frozen=True, order=True)
class ConversationKey:
    """Names a conversation within a run: round, attempt at that round, number within the attempt, purpose.

    ``purpose`` is ``train`` or ``evaluate``; it separates the random generators of the two.
    """

    round: int
    attempt: int
    conversation: int
    purpose: str


@dataclass(frozen=True, eq=False)
class Call:
    """One exchange with some rows of a cohort.

    Attributes
    ----------
    key, exchange
        The conversation, and the number of this exchange in it, from 0 (the opening).
    rows
        Positions in the cohort, ascending; the i-th row of ``message`` is for the client ``clients[i]``.
    clients
        Client ids, one per row; an id may repeat.
    message
        What is sent: row fields have ``len(rows)`` rows.
    shapes
        What may come back: message class -> field -> trailing shape (dtype is that of the run).
    deadline_s
        Seconds from now until a row without a valid answer is lost; None waits for ever.
    states
        In an opening of a method whose clients keep a state: which version of it, one per row.
    trace
        Of the exchange's span, where the run is traced (:func:`fedloom.tracing.here`).
    told_again
        Where the answers are private: called before clients are asked for another one, since the worker that was asked
        first is gone.
    """

    key: ConversationKey
    exchange: int
    rows: tuple[int, ...]
    clients: tuple[str, ...]
    message: Message
    shapes: Mapping[type[Message], Mapping[str, tuple[int, ...]]]
    deadline_s: float | None = None
    states: tuple[Versions, ...] = ()
    trace: str = ""
    told_again: Callable[[Sequence[str]], None] | None = None


@dataclass(frozen=True)
class Lost:
    """A row that gave no valid answer.

    Attributes
    ----------
    reason
        One line: quantity and cause.
    is_bug
        True if the cause says nothing of the client (``federation.bugs``).
    """

    reason: str
    is_bug: bool = False


class MissingConversation(Exception):
    """These rows have no conversation at this exchange here: its earlier messages must be sent first, and replayed."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"no conversation for rows {list(rows)}")
        self.rows = tuple(rows)


@dataclass
class Traffic:
    """Bytes on the wire since the start, both directions, as measured; None where there is no wire."""

    up: int | None = None
    down: int | None = None


@dataclass
class Refusals:
    """What was refused or dropped so far, by reason; each attempt's share is written to the journal."""

    counts: dict[str, int] = field(default_factory=dict)

    def count(self, reason: str) -> None:
        """Count one more."""
        self.counts[reason] = self.counts.get(reason, 0) + 1


class Carrier(Protocol):
    """Carries exchanges to clients."""

    @property
    def refusals(self) -> Refusals:
        """What was refused or dropped so far."""

    @property
    def silence(self) -> Silence:
        """Clients that let a deadline pass."""

    @property
    def traffic(self) -> Traffic:
        """Bytes so far: ``up`` from workers to aggregator, ``down`` from aggregator to workers."""

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        """Deliver and wait; one answer per row of the call, in its order, each a message with one row.

        Every answer has been checked: class, shapes, dtype and finiteness. A row that failed is ``Lost``.
        """

    def close(self, key: ConversationKey) -> None:
        """End a conversation: the clients' coroutines see GeneratorExit. Idempotent."""
