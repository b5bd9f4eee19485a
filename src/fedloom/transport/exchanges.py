"""The aggregator's books: conversations that are open, exchanges that wait for answers, workers that are connected.

All of it belongs to the event loop's thread, except the inbox of an exchange, from which the calling thread reads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.federation.carrier import Call, ConversationKey, Lost
from fedloom.federation.roster import Member
from fedloom.federation.validation import TensorSpec
from fedloom.messages import Message
from fedloom.transport import stream
from fedloom.transport.codec import Assembler, Cutter, WireError, memory, serialize
from fedloom.transport.limits import Budget
from fedloom.transport.stream import Outbox
from fedloom.transport.wire import federation_pb2 as wire


class Clients(Collection[str]):
    """Some of a run's clients, in the memory of a bit for each client of the run.

    Parameters
    ----------
    index
        The position of each client of the run.
    ids
        Which of them; an id may repeat.

    Raises
    ------
    KeyError
        If the run has no such client.
    """

    def __init__(self, index: Mapping[str, int], ids: Iterable[str]) -> None:
        self._index = index
        self._bits = bytearray((len(index) + 7) // 8)
        for client in ids:
            i = index[client]
            self._bits[i >> 3] |= 1 << (i & 7)
        self._count = int.from_bytes(self._bits, "little").bit_count()

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """For each client of the run, 1 or 0."""
        return np.unpackbits(np.frombuffer(self._bits, np.uint8), count=len(self._index), bitorder="little")

    def __contains__(self, client: object) -> bool:
        i = self._index.get(client)  # type: ignore[call-overload]
        return i is not None and bool(self._bits[i >> 3] >> (i & 7) & 1)

    def __iter__(self) -> Iterator[str]:
        return (client for client in self._index if client in self)

    def __len__(self) -> int:
        return self._count


LEAST_PATIENCE_S = 2.0
HEARTBEAT = serialize(wire.AggregatorPart(heartbeat=wire.Heartbeat()))


@dataclass(frozen=True)
class WorkerInfo:
    """A connected worker, as it introduced itself; ``members`` are its clients, where they have data of their own."""

    name: str
    incarnation: str
    clients: Collection[str]
    device: str
    members: tuple[Member, ...] = ()


@dataclass(eq=False)
class Arrival:
    """A reply that is coming in, of the rows that are still awaited from it, each with its place in the reply."""

    link: Link
    number: int
    exchange: Exchange
    rows: dict[int, int]
    cls: type[Message]
    assembler: Assembler


@dataclass(eq=False)
class Link:
    """The stream of one connected worker."""

    worker: WorkerInfo
    owner: str | None = None  # the identity that it is of, where there are any
    outbox: Outbox = field(default_factory=lambda: Outbox(HEARTBEAT))
    cutter: Cutter = field(default_factory=lambda: Cutter(wire.AggregatorPart))
    held: dict[ConversationKey, dict[int, int]] = field(default_factory=dict)
    """Of each row, the last exchange that the worker has: as it said when it joined, or as sent on this stream."""
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    ignored: set[int] = field(default_factory=set)  # transfers that were refused and have not ended yet
    allowance: int = 64  # of parts that are refused or late; each row that the worker is asked for adds to it
    joined_at: float = field(default_factory=time.monotonic)
    sign_at: float = field(default_factory=time.monotonic)  # when something last went either way
    proven: bool = False  # it has answered something
    silent: int = 0  # exchanges in a row that it answered nothing of
    rests_until: float = 0.0  # till then others are dealt rows before it
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fault: WireError | None = None
    heartbeats: Budget = field(default_factory=lambda: Budget(10, 10 / stream.HEARTBEAT_S))
    """Of parts that say nothing but that the worker is there, which is no sign that it does anything."""

    def end(self, fault: WireError) -> None:
        """Let the stream end, and say why."""
        self.fault = self.fault or fault
        self.ended.set()

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.worker.name


@dataclass(frozen=True, eq=False)
class Arrived:
    """A row of a reply that has come in whole; its values are not checked yet."""

    worker: str
    cls: type[Message]
    assembler: Assembler
    place: int

    def message(self) -> Message:
        """The row's answer, ``[1, ...]`` (see :meth:`Assembler.message`)."""
        return self.assembler.message(self.cls, self.place)


class Exchange:
    """One call and what has become of its rows."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.begun = time.monotonic()
        self.deadline = None if call.deadline_s is None else self.begun + call.deadline_s
        self.inbox: SimpleQueue[tuple[int, Arrived | Lost] | Exception] = SimpleQueue()
        self.client = dict(zip(call.rows, call.clients, strict=True))
        self.outstanding = set(call.rows)
        self.sent: dict[int, Link] = {}  # whom each outstanding row was sent to and is awaited from
        self.second: dict[int, Link] = {}  # who was asked, too, since the first had done nothing for long
        self.arriving: dict[tuple[int, Link], Arrival] = {}
        self.asked: dict[Link, float] = {}  # since when each is awaited: it was asked, or answered a row
        self.answered: set[Link] = set()
        self.longest_s = 0.0  # that anybody took for an answer
        self.usual_s = 0.0  # that was the longest before
        self.finished = threading.Event()  # nobody waits for it any more, and that has been noted
        self.missing: Counter[tuple[Link, int]] = Counter()  # how often a stream said that it lacks a row
        self.unserved: tuple[str, ...] = ()  # clients that were last said to have no worker
        self._position = {row: i for i, row in enumerate(call.rows)}
        self._blocks: dict[tuple[type[Message], str, torch.dtype], Tensor] = {}

    def storage(
        self, cls: type[Message], rows: Sequence[int], apart: Collection[int] = ()
    ) -> Callable[[TensorSpec], list[Tensor]]:
        """Where rows' answers are put together: fields with one row per client in one block for all rows.

        So the answers of a cohort, once all are there, are stacked already (``fedloom.messages.stack``). Rows that are
        ``apart`` have memory of their own.
        """

        def pieces(spec: TensorSpec) -> list[Tensor]:
            if not spec.per_client:
                return [memory(spec.nbytes)]
            nbytes = spec.nbytes // len(rows)
            key = (cls, spec.name, spec.dtype)
            if key not in self._blocks and len(apart) < len(rows):
                self._blocks[key] = memory(len(self._position) * nbytes).view(len(self._position), nbytes)
            return [memory(nbytes) if row in apart else self._blocks[key][self._position[row]] for row in rows]

        return pieces

    def remaining_s(self) -> float | None:
        """Seconds left, not below zero; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def awaits(self, row: int, link: Link) -> bool:
        """Whether an answer of a row is awaited from this stream."""
        return row in self.outstanding and (self.sent.get(row) is link or self.second.get(row) is link)

    def comes_twice(self, row: int) -> bool:
        """Whether an answer of an awaited row is arriving already."""
        return any((row, link) in self.arriving for link in (self.sent[row], self.second.get(row)) if link is not None)

    def patience_s(self) -> float | None:
        """After how long without a sign others are asked, too; None where nothing says how long is long."""
        if longest_s := self.longest_s or self.usual_s:
            return max(LEAST_PATIENCE_S, 4 * longest_s)
        return None if self.call.deadline_s is None else self.call.deadline_s / 4

    def let_go(self, link: Link, row: int) -> bool:
        """Expect nothing of this stream for a row any more; whether another one is asked for it."""
        if self.second.get(row) is link:
            del self.second[row]
        elif self.sent.get(row) is link and row in self.second:
            self.sent[row] = self.second.pop(row)
        else:
            return False
        return True

    def waiting(self) -> tuple[str, ...]:
        """Return the clients that are awaited and that nobody works for, each once, in order."""
        rows = sorted(row for row in self.outstanding if row not in self.sent)
        return tuple(dict.fromkeys(self.client[row] for row in rows))

    def expect_no_more(self, row: int) -> None:
        """A row has its outcome: whatever else comes for it is late."""
        self.outstanding.discard(row)
        self.sent.pop(row, None)
        self.second.pop(row, None)


class OpenConversation:
    """A conversation that has been opened and not closed."""

    def __init__(self, key: ConversationKey) -> None:
        self.key = key
        self.calls: list[Call] = []  # kept until close, for a worker that lacks them
        self.current: Exchange | None = None
        self.rows: frozenset[int] = frozenset()  # of the whole cohort
        self.holders: dict[int, str] = {}  # the worker that each row stays with
        self._asked: set[tuple[int, int]] = set()  # exchange, row

    def post(self, exchange: Exchange) -> None:
        """Start the next exchange.

        Raises
        ------
        ValueError
            If it is not the next one, or the last one still runs.
        """
        if self.current is not None or exchange.call.exchange != len(self.calls):
            state = "is still running" if self.current is not None else "is over"
            raise ValueError(
                f"{self.key}: found exchange {exchange.call.exchange}; exchange {len(self.calls) - 1} {state}"
            )
        self.calls.append(exchange.call)
        self.rows = self.rows.union(exchange.call.rows)
        self.current = exchange

    def ask(self, rows: Iterable[int]) -> list[int]:
        """Note that these rows are asked for the answer of the current exchange; return those that were before."""
        asked = {(len(self.calls) - 1, row) for row in rows}
        again = sorted(row for _, row in asked & self._asked)
        self._asked |= asked
        return again

    def moves_to(self, link: Link, rows: list[int]) -> dict[int, list[int]]:
        """Note that a worker goes on with these rows; return the last exchange that it has, -1 for none -> rows."""
        held = link.held.setdefault(self.key, {})
        reached: dict[int, list[int]] = {}
        for row in rows:
            reached.setdefault(held.get(row, -1), []).append(row)
            held[row] = len(self.calls) - 1
            self.holders[row] = link.name
        return reached
