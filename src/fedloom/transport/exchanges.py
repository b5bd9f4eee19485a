"""State of the aggregator: open conversations, exchanges that wait for answers, connected workers.

All of it belongs to the event loop's thread, except the inbox of an exchange, which the calling thread reads.
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

from fedloom.federation.roster import AvailableClients, Member
from fedloom.federation.transport import Call, ConversationKey, Lost
from fedloom.federation.validation import TensorSpec
from fedloom.messages import Message
from fedloom.transport import stream
from fedloom.transport.codec import CHUNK_BYTES, Assembler, Cutter, memory
from fedloom.transport.frames import Refusal, WireError, serialize
from fedloom.transport.limits import TokenBucket
from fedloom.transport.resuming import Partial, Sending, Transfer
from fedloom.transport.stream import Outbox, key_from_wire
from fedloom.transport.versions import PROTOCOL
from fedloom.transport.wire import federation_pb2 as wire

LEAST_PATIENCE_S = 2.0

HEARTBEAT = serialize(wire.AggregatorPart(heartbeat=wire.Heartbeat()))


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """Run that an aggregator serves."""

    name: str
    incarnation: str
    """Id of this aggregator process; replies to another one are refused."""
    experiment: str
    """Shared part of the experiment, as JSON; sent to every worker in its Welcome."""
    algorithm: str
    version: int
    """Version of the algorithm that a worker must have to be admitted."""
    vocabulary: Mapping[str, type[Message]]
    """Message classes allowed in replies, by class name."""
    dtype: torch.dtype
    """Type of the run's floating-point numbers."""
    clients: Collection[str]
    """Ids of all clients of the run, seen and unseen. A worker that names any other client is refused."""
    roster: Collection[str] = ()
    """Clients that train; an observer may not answer for them."""
    presence: AvailableClients | None = None
    """Record of connected clients in an open federation; None in any other."""
    classes: int = 0
    """Number of classes C, where ``presence`` is given."""


class Clients(Collection[str]):
    """Subset of a run's clients, stored as one bit per client of the run.

    Parameters
    ----------
    index
        Position of each client of the run.
    ids
        Clients in the subset; an id may repeat.

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
        """1 for each client of the run in the subset, 0 for the others."""
        return np.unpackbits(np.frombuffer(self._bits, np.uint8), count=len(self._index), bitorder="little")

    def __contains__(self, client: object) -> bool:
        i = self._index.get(client)  # type: ignore[call-overload]
        return i is not None and bool(self._bits[i >> 3] >> (i & 7) & 1)

    def __iter__(self) -> Iterator[str]:
        return (client for client in self._index if client in self)

    def __len__(self) -> int:
        return self._count


@dataclass(frozen=True)
class WorkerInfo:
    """Connected worker, as described in its Hello; ``members`` are its clients if they have their own data."""

    name: str
    incarnation: str
    clients: Collection[str]
    device: str
    members: tuple[Member, ...] = ()
    package: str = ""


@dataclass(eq=False)
class Arrival:
    """Reply in transit, with those of its rows that are still awaited, each with its position in the reply."""

    link: Link
    number: int
    exchange: Exchange
    rows: dict[int, int]
    cls: type[Message]
    assembler: Assembler
    is_alone: bool
    """True if the reply has one row."""


@dataclass(eq=False)
class Link:
    """Stream of one connected worker."""

    worker: WorkerInfo
    owner: str | None = None  # name of its identity, if any
    protocol: int = PROTOCOL
    """Version of the protocol that both sides use."""
    outbox: Outbox = field(default_factory=lambda: Outbox(HEARTBEAT))
    cutter: Cutter = field(default_factory=lambda: Cutter(wire.AggregatorPart))
    held: dict[ConversationKey, dict[int, int]] = field(default_factory=dict)
    """Last exchange of each row that the worker has: as it reported on joining, or as sent on this stream."""
    reported: dict[Transfer, wire.Partial] = field(default_factory=dict)
    """Credible reports of the worker on requests that its earlier streams have left incomplete."""
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    ignored: set[int] = field(default_factory=set)  # refused transfers that have not ended yet
    allowance: int = 64  # refused or late parts still tolerated; each row requested adds to it
    joined_at: float = field(default_factory=time.monotonic)
    # when a frame was last sent or received, heartbeats excluded
    sign_at: float = field(default_factory=time.monotonic)
    proven: bool = False  # has answered at least one row
    silent: int = 0  # consecutive exchanges in which it answered nothing
    rests_until: float = 0.0  # until then, other workers are preferred when rows are dealt
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    fault: WireError | None = None
    declined: str | None = None
    """Reason why the worker's member does not take part; None while it does."""
    withheld: str = ""
    """Measurements that its member keeps, and the reason."""
    heartbeats: TokenBucket = field(default_factory=lambda: TokenBucket(10, 10 / stream.HEARTBEAT_S))
    """Limit on heartbeats from the worker."""

    def end(self, fault: WireError) -> None:
        """End the stream with this error, unless it has one already."""
        self.fault = self.fault or fault
        self.ended.set()

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self.worker.name

    @property
    def process(self) -> tuple[str, str]:
        """Name and incarnation of the worker."""
        return self.worker.name, self.worker.incarnation


@dataclass(frozen=True, eq=False)
class Arrived:
    """Row of a completely received reply; its values are not checked yet."""

    worker: str
    cls: type[Message]
    assembler: Assembler
    place: int

    def message(self) -> Message:
        """Return the row's answer, ``[1, ...]`` (see :meth:`Assembler.message`)."""
        return self.assembler.message(self.cls, self.place)


class Exchange:
    """Call to clients, and the state of its rows."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.started = time.monotonic()
        self.deadline = None if call.deadline_s is None else self.started + call.deadline_s
        self.inbox: SimpleQueue[tuple[int, Arrived | Lost] | Exception] = SimpleQueue()
        self.client = dict(zip(call.rows, call.clients, strict=True))
        self.outstanding = set(call.rows)
        self.sent: dict[int, Link] = {}  # link that each outstanding row was sent to and is awaited from
        self.second: dict[int, Link] = {}  # second link asked for a row, after the first showed no sign of progress
        self.arriving: dict[tuple[int, Link], Arrival] = {}
        # by row: the process that sent a large answer, and what its broken stream has left
        self.partials: dict[int, tuple[tuple[str, str], Partial]] = {}
        self.asked_at: dict[Link, float] = {}  # when each link was asked or last answered a row
        self.answered: set[Link] = set()
        self.longest_s = 0.0  # longest time that a link took to answer
        self.usual_s = 0.0  # longest time in the previous exchange of this kind
        self.finished = threading.Event()  # no thread waits for it, and silent clients are recorded
        self.missing: Counter[tuple[Link, int]] = Counter()  # how often a link reported that it lacks a row
        self.unserved: tuple[str, ...] = ()  # clients last reported to have no worker
        self._position = {row: i for i, row in enumerate(call.rows)}
        self._blocks: dict[tuple[type[Message], str, torch.dtype], Tensor] = {}

    def storage(
        self, cls: type[Message], rows: Sequence[int], apart: Collection[int] = ()
    ) -> Callable[[TensorSpec], list[Tensor]]:
        """Return an allocator for rows' answers that puts each field with one row per client into one block.

        Once all answers of a cohort have arrived, they need not be stacked (``fedloom.messages.stack``). Rows in
        ``apart`` have memory of their own.
        """

        def pieces(spec: TensorSpec) -> list[Tensor]:
            if not spec.per_client:
                return [memory(spec.nbytes)]
            nbytes = spec.nbytes // len(rows)
            key = (cls, spec.name, spec.dtype)
            if key not in self._blocks and len(apart) < len(rows):
                self._blocks[key] = memory(len(self._position) * nbytes).view(len(self._position), nbytes)
            first, last = self._position[rows[0]], self._position[rows[-1]]
            if not apart and last - first == len(rows) - 1:  # adjacent, because rows ascend
                return [self._blocks[key][first : last + 1].view(-1)]
            return [memory(nbytes) if row in apart else self._blocks[key][self._position[row]] for row in rows]

        return pieces

    def remaining_s(self) -> float | None:
        """Return the seconds left, at least 0; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def awaits(self, row: int, link: Link) -> bool:
        """Return whether an answer for a row is awaited from this stream."""
        return row in self.outstanding and (self.sent.get(row) is link or self.second.get(row) is link)

    def keep_partial(self, arrival: Arrival) -> None:
        """Keep a large answer that a broken stream has left incomplete, while its row is asked of no other stream."""
        row, assembler = next(iter(arrival.rows), -1), arrival.assembler
        is_large = arrival.is_alone and assembler.received >= CHUNK_BYTES
        if is_large and arrival.link.protocol >= 10 and row in self.outstanding and row not in self.sent:
            transfer = self.call.key, self.call.exchange, (row,)
            self.partials[row] = arrival.link.process, Partial(transfer, arrival.cls.__name__, assembler)

    def partial(self, link: Link, row: int) -> Partial | None:
        """Return what an earlier stream of this worker process has left of an answer."""
        process, partial = self.partials.get(row, (None, None))
        return partial if process == link.process else None

    def drop_partials(self, link: Link, rows: Iterable[int]) -> None:
        """Drop incomplete answers that are about to be replaced by those of this stream, unless they may continue."""
        for row in rows if self.partials else ():
            asked = (self.sent.get(row), self.second.get(row))
            if all(other is link or other is None or self.partial(other, row) is None for other in asked):
                self.partials.pop(row, None)

    def arrives_already(self, row: int) -> bool:
        """Return whether an answer for an awaited row is arriving already, or may continue."""
        streams = (self.sent[row], self.second.get(row)) if self.arriving else ()
        return row in self.partials or any((row, link) in self.arriving for link in streams if link is not None)

    def patience_s(self) -> float | None:
        """Return the time without progress after which another worker is asked, too; None if there is no estimate."""
        if longest_s := self.longest_s or self.usual_s:
            return max(LEAST_PATIENCE_S, 4 * longest_s)
        return None if self.call.deadline_s is None else self.call.deadline_s / 4

    def let_go(self, link: Link, row: int) -> bool:
        """Stop expecting a row from this stream if another stream is asked for it, too; return whether one is."""
        if self.second.get(row) is link:
            del self.second[row]
        elif self.sent.get(row) is link and row in self.second:
            self.sent[row] = self.second.pop(row)
        else:
            return False
        return True

    def waiting(self) -> tuple[str, ...]:
        """Return the awaited clients that no worker is working on, each once, in row order."""
        rows = sorted(row for row in self.outstanding if row not in self.sent)
        return tuple(dict.fromkeys(self.client[row] for row in rows))

    def expect_no_more(self, row: int) -> None:
        """Settle a row: anything else that arrives for it is late."""
        self.outstanding.discard(row)
        self.sent.pop(row, None)
        self.second.pop(row, None)
        self.partials.pop(row, None)


class OpenConversation:
    """Conversation that has been opened and not closed."""

    def __init__(self, key: ConversationKey) -> None:
        self.key = key
        self.calls: list[Call] = []  # kept until the conversation is closed, for workers that lack them
        self.current: Exchange | None = None
        self.rows: frozenset[int] = frozenset()  # all rows of the cohort
        self.holders: dict[int, str] = {}  # worker that each row stays with
        self.sending: dict[tuple[int, int], Sending] = {}  # last large request, by exchange and first row
        self._requests: set[tuple[int, int]] = set()  # exchange, row

    def post(self, exchange: Exchange) -> None:
        """Start the next exchange.

        Raise ValueError if it is not the next one, or the previous one is still running.
        """
        if self.current is not None or exchange.call.exchange != len(self.calls):
            state = "is still running" if self.current is not None else "is over"
            raise ValueError(
                f"{self.key}: exchange {exchange.call.exchange} is out of order; exchange {len(self.calls) - 1} {state}"
            )
        self.calls.append(exchange.call)
        self.rows = self.rows.union(exchange.call.rows)
        self.current = exchange

    def ask(self, rows: Iterable[int]) -> list[int]:
        """Record that these rows are asked to answer the current exchange; return those that were asked before."""
        requests = {(len(self.calls) - 1, row) for row in rows}
        repeated_rows = sorted(row for _, row in requests & self._requests)
        self._requests |= requests
        return repeated_rows

    def moves_to(self, link: Link, rows: list[int]) -> dict[int, list[int]]:
        """Record that a worker continues with these rows; return them by the last exchange that it has (-1: none)."""
        held_rows = link.held.setdefault(self.key, {})
        rows_by_exchange: dict[int, list[int]] = {}
        for row in rows:
            rows_by_exchange.setdefault(held_rows.get(row, -1), []).append(row)
            held_rows[row] = len(self.calls) - 1
            self.holders[row] = link.name
        return rows_by_exchange


class Conversations:
    """Open conversations by key. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._open: dict[ConversationKey, OpenConversation] = {}
        self._newest: tuple[int, int, int] = (-1, -1, -1)

    def __iter__(self) -> Iterator[OpenConversation]:
        return iter(self._open.values())

    def running(self) -> Iterator[tuple[OpenConversation, Exchange]]:
        """Yield the conversations with a running exchange, and that exchange."""
        for conversation in self:
            if conversation.current is not None:
                yield conversation, conversation.current

    def get(self, key: ConversationKey) -> OpenConversation | None:
        """Return the conversation with this key if it is open."""
        return self._open.get(key)

    def start(self, exchange: Exchange) -> OpenConversation:
        """Start an exchange and return its conversation, which the first exchange opens.

        Raise ValueError if the conversation is not open, or this is not its next exchange.
        """
        key, number = exchange.call.key, exchange.call.exchange
        if number == 0 and key not in self._open:
            self._open[key] = OpenConversation(key)
            self._newest = max(self._newest, (key.round, key.attempt, key.conversation))
        if key not in self._open:
            raise ValueError(f"{key}: exchange {number} of a conversation that is not open")
        self._open[key].post(exchange)
        return self._open[key]

    def pop(self, key: ConversationKey) -> OpenConversation | None:
        """Remove a conversation and return it; None if it is not open."""
        return self._open.pop(key, None)

    def find(self, wire_key: wire.ConversationKey, number: int) -> Exchange:
        """Return the running exchange with this key and number.

        Raise WireError if no such exchange is running.
        """
        key = key_from_wire(wire_key)
        conversation = self._open.get(key)
        if conversation is None:
            old = (key.round, key.attempt, key.conversation) <= self._newest
            raise WireError(Refusal.LATE if old else Refusal.CONVERSATION, f"{key_text(key)} is not open")
        exchange = conversation.current
        if exchange is None or exchange.call.exchange != number:
            old = number < len(conversation.calls)
            raise WireError(Refusal.LATE if old else Refusal.CONVERSATION, f"{key_text(key)}, exchange {number}")
        return exchange


def check_awaited(link: Link, exchange: Exchange, row: int) -> None:
    """Raise WireError if a row is not awaited from this stream."""
    arriving = (row, link) in exchange.arriving
    if row in exchange.outstanding and exchange.awaits(row, link) and not arriving:
        return
    request = f"exchange {exchange.call.exchange} of {key_text(exchange.call.key)}"
    if row not in exchange.client:
        raise WireError(Refusal.CLIENT, f"row {row} is not in {request}")
    raise WireError(Refusal.LATE, f"row {row}, {request}{' is arriving already' if arriving else ''}")


def key_text(key: ConversationKey) -> str:
    """Return a conversation's key for messages; its purpose may come from a peer and is shortened."""
    return f"round {key.round}, attempt {key.attempt}, conversation {key.conversation} ({key.purpose[:20]})"


def deal(
    clients: Sequence[str], workers: Mapping[str, Collection[str]], loads: Mapping[str, int] | None = None
) -> dict[str, list[int]]:
    """Assign the rows of a cohort to workers: in order, in equal shares (±1) among the workers that may serve them.

    A client whose data exist in only one place is served there; the other rows even out the shares. The result depends
    only on the arguments, not on the order in which workers joined.

    ``workers`` maps each worker to the clients that it may serve (sets, because membership is tested once per row and
    worker), and ``loads`` to the rows that it is busy with. The result maps workers to positions in ``clients``,
    ascending; a row that no worker may serve is in no share.
    """
    names = sorted(workers)
    load = {name: 0 if loads is None else loads.get(name, 0) for name in names}
    shares: dict[str, list[int]] = {name: [] for name in names}

    # Deal rows with the same candidates together, those with the fewest candidates first.
    alike: dict[tuple[str, ...], list[int]] = {}
    for row, client in enumerate(clients):
        alike.setdefault(tuple(name for name in names if client in workers[name]), []).append(row)
    for candidates, group in sorted(alike.items(), key=lambda item: (len(item[0]), item[1][0])):
        start = 0
        for name, share in _even_out([load[name] for name in candidates], candidates, len(group)):
            shares[name] += group[start : start + share]
            load[name] += share
            start += share
    return {name: sorted(share) for name, share in shares.items() if share}


def _even_out(loads: Sequence[int], names: Sequence[str], rows: int) -> list[tuple[str, int]]:
    """Split ``rows`` so that the final loads are as equal as possible; ties go to the earlier name."""
    shares = [0] * len(names)
    for _ in range(rows if names else 0):
        least = min(range(len(names)), key=lambda i: loads[i] + shares[i])
        shares[least] += 1
    return list(zip(names, shares, strict=True))
