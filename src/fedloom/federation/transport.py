"""Protocol that carries one exchange of a conversation to the clients, and their answers back.

The round loop uses only this protocol. Both the in-process transport and the gRPC transport implement it, which is why
both give the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedloom.data.federated import ClientData
from fedloom.errors import FedloomError, RefusedError
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.silence import Silence
from fedloom.federation.states import Versions
from fedloom.messages import Message, Metrics, Shapes
from fedloom.models.predictors import Predictors

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
    """One exchange with some rows of a cohort."""

    key: ConversationKey
    exchange: int
    """Number of the exchange in the conversation, from 0 (the opening)."""
    rows: tuple[int, ...]
    """Positions in the cohort, ascending; the i-th row of ``message`` is for the client ``clients[i]``."""
    clients: tuple[str, ...]
    """Client ids, one per row; an id may repeat."""
    message: Message
    """Message whose row fields have ``len(rows)`` rows."""
    shapes: Shapes
    """Allowed answers: trailing shape of each field by message class; the dtype is that of the run."""
    deadline_s: float | None = None
    """Seconds from now until a row without a valid answer is lost; None waits forever."""
    states: tuple[Versions, ...] = ()
    """In the opening of a method with client states, the version of each row's state."""
    trace: str = ""
    """Trace context of the exchange's span, if the run is traced (:func:`fedloom.core.tracing.here`)."""
    told_again: Callable[[Sequence[str]], None] | None = None
    """For private answers, called with the clients that another worker is about to be asked for again."""


@dataclass(frozen=True)
class Lost:
    """A row without a valid answer, with the reason in one line; a bug is not caused by the client."""

    reason: str
    is_bug: bool = False


class Declined(RefusedError):
    """The member's policy does not allow the run; the worker disconnects, and may join later."""


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


class ModelKeeper(Protocol):
    """Keeper of the models that clients of this process get in evaluations."""

    def keep(self, round: int, clients: Sequence[ClientData], models: Predictors) -> None:
        """Keep the models of a group of clients after a round; errors of storage are logged, not raised."""


class AnswerHolder(Protocol):
    """Holder of answers of which the aggregator may learn only a sum; rows are positions in a cohort."""

    def begin(self, key: ConversationKey, rows: Sequence[int], states: Sequence[Mapping[str, Tensor] | None]) -> None:
        """Begin the conversation of some rows, each from a state of its client."""

    def hear(self, key: ConversationKey, rows: Sequence[int], message: Message) -> None:
        """Note a message that these rows answer next."""

    def covers(self, answer: Message) -> bool:
        """Return whether the aggregator uses only the sum of answers of this class."""

    def hold(
        self, key: ConversationKey, row: int, client: ClientData, request: Message, answer: Message, *, varies: bool
    ) -> Message:
        """Return the message to send in place of a one-row answer, which ``varies`` with the round.

        Raise DataError if its values cannot be summed.
        """

    def is_step(self, message: Message) -> bool:
        """Return whether a message is a step of a sum."""

    def step(self, key: ConversationKey, row: int, client: str, message: Message) -> Message:
        """Return a client's answer to one step of the sum of its answer.

        Raise RefusedError if an honest aggregator would not send this message.
        """

    def close(self, key: ConversationKey) -> None:
        """Forget a conversation."""


class Gate(Protocol):
    """Conditions of a member under which its worker is connected. Callable from any thread."""

    @property
    def ended(self) -> FedloomError | None:
        """Error that ends the worker, because the run can never be allowed; None otherwise."""

    @property
    def withheld(self) -> str:
        """Measurements that the member keeps, and the reason, for the aggregator; empty if there are none."""

    def closed(self) -> str | None:
        """Return why the worker must not be connected now; None if it may be."""

    def count(self, size: int, *, sending: bool) -> bool:
        """Count a frame on the wire; return False, without counting, if it must not be sent."""

    def charge(self, key: ConversationKey, size: int) -> str | None:
        """Count a message that is about to be sent or received; return why it must not be, without counting it."""


class Guard(Protocol):
    """Policy of a member about questions to its clients, and their answers."""

    def question(self, key: ConversationKey, message: Message, *, trains: bool) -> None:
        """Raise DataError if a message must not be answered. ``trains`` follows from the class of the opening."""

    def opens(self, key: ConversationKey, client: str) -> None:
        """Count what the opening of a conversation costs a client; raise DataError if that is too much."""

    def answer(self, key: ConversationKey, client: str, message: Message, *, trains: bool, summed: bool) -> None:
        """Raise DataError if an answer must not leave. ``summed``: the aggregator learns only a sum of it."""

    def cohort(self, members: int, weaker: str | None) -> None:
        """Raise RefusedError if a secure sum over so many members, with a ``weaker`` graph, must not be joined."""

    def withhold(self, measured: Metrics, plan: EvaluationPlan) -> Metrics:
        """Return measurements with zeros in place of those that must not leave."""
