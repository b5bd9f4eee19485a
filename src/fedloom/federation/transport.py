"""Protocol that carries one exchange of a conversation to the clients, and their answers back.

The round loop uses only this protocol. Both the in-process transport and the gRPC transport implement it, which is why
both give the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedloom.federation.silence import Silence
from fedloom.federation.states import Versions
from fedloom.messages import Message

TRAIN, EVALUATE = "train", "evaluate"
"""Purposes of conversations."""


@dataclass(frozen=True, order=True)
class ConversationKey:
    """Key of a conversation within a run: round, attempt at that round, number within the attempt, purpose.

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
        Conversation, and number of this exchange in it, from 0 (the opening).
    rows
        Positions in the cohort, ascending; the i-th row of ``message`` is for the client ``clients[i]``.
    clients
        Client ids, one per row; an id may repeat.
    message
        Message to send: row fields have ``len(rows)`` rows.
    shapes
        Allowed answers: message class -> field -> trailing shape (dtype is that of the run).
    deadline_s
        Seconds from now until a row without a valid answer is lost; None waits forever.
    states
        In an opening of a method with client states: their versions, one per row.
    trace
        Trace context of the exchange's span, if the run is traced (:func:`fedloom.core.tracing.here`).
    told_again
        For private answers: called before another worker is asked because the first one is gone.
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
    """A row without a valid answer, with the reason in one line; a bug is not caused by the client."""

    reason: str
    is_bug: bool = False


class MissingConversation(Exception):
    """Rows have no conversation at this exchange here: its earlier messages must be sent and replayed first."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"no conversation for rows {list(rows)}")
        self.rows = tuple(rows)


@dataclass
class Traffic:
    """Measured bytes on the wire since the start, in both directions; None where there is no wire."""

    up: int | None = None
    down: int | None = None


@dataclass
class Refusals:
    """Number of refused or dropped parts so far, by reason; each attempt's share is written to the journal."""

    counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, reason: str) -> None:
        """Count one refusal; callable from any thread."""
        with self._lock:
            self.counts[reason] = self.counts.get(reason, 0) + 1


class Transport(Protocol):
    """Carries exchanges to clients."""

    @property
    def refusals(self) -> Refusals:
        """Refused or dropped parts so far."""

    @property
    def silence(self) -> Silence:
        """Clients that missed a deadline."""

    @property
    def traffic(self) -> Traffic:
        """Bytes so far: ``up`` from workers to aggregator, ``down`` from aggregator to workers."""

    def exchange(self, call: Call) -> Sequence[Message | Lost]:
        """Deliver a call and return one answer per row, in its order, each a message with one row.

        Every answer has been checked: class, shapes, dtype and finiteness. A row that failed is ``Lost``.
        """

    def close(self, key: ConversationKey) -> None:
        """End a conversation: the clients' coroutines receive GeneratorExit. Idempotent."""
