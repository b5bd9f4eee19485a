"""Requests of one stream from the aggregator, and the cache of a worker's answers to them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fedloom.core.words import REASON_CHARACTERS
from fedloom.errors import DataError
from fedloom.federation.transport import ConversationKey, Gate, Lost
from fedloom.messages import Message
from fedloom.transport.codec import (
    CHUNK_BYTES,
    Assembler,
    Cutter,
    Encoded,
    group_answers,
    join_answers,
    read_specs,
)
from fedloom.transport.frames import ChunkView, Refusal, WireError, serialize
from fedloom.transport.resuming import Partial, Sending, Transfer, transfer_of
from fedloom.transport.stream import HELD_CONVERSATIONS, Joined, Outbox, key_from_wire, key_to_wire
from fedloom.transport.versions import PROTOCOL
from fedloom.transport.wire import federation_pb2 as wire

REQUEST_BYTES = 4 << 30  # maximum memory of one request


HEARTBEAT = serialize(wire.WorkerPart(heartbeat=wire.Heartbeat()))


@dataclass(frozen=True, eq=False)
class WorkerRequest:
    """Request from the aggregator."""

    incarnation: str
    """Id of the aggregator process that sent it."""
    key: ConversationKey
    envelope: wire.Envelope
    assembler: Assembler | None
    """Content of the request; None if it exceeded :data:`REQUEST_BYTES`, or was ``forbidden``, and was skipped."""
    expires: float | None
    """Deadline on the monotonic clock; None if there is none."""
    forbidden: str | None = None
    """Reason why the member's policy does not allow its traffic; None if it does."""

    @property
    def expired(self) -> bool:
        """True if the deadline has passed."""
        return self.expires is not None and time.monotonic() > self.expires

    def message(self, vocabulary: Mapping[str, type[Message]]) -> Message:
        """Decode its message.

        Raise WireError if the message was too large, is not in the vocabulary, or its tensors are not one row per
        client; DataError if it is forbidden.
        """
        envelope, assembler = self.envelope, self.assembler
        cls = vocabulary.get(envelope.message)
        if cls is None:
            raise WireError(Refusal.SHAPE, f"unknown message {envelope.message[:80]!r}")
        if self.forbidden is not None:
            raise DataError(self.forbidden)
        if assembler is None:
            raise WireError(
                Refusal.SIZE, f"more than {REQUEST_BYTES} bytes; start more workers, so that each receives fewer rows"
            )
        message = assembler.message(cls)
        per_client = {field.name for field in message.fields() if field.per_client}
        for name, tensor in message.tensors().items():
            if name in per_client and (tensor.ndim == 0 or tensor.shape[0] != len(envelope.rows)):
                raise WireError(
                    Refusal.SHAPE,
                    f"{envelope.message}.{name} has shape {tuple(tensor.shape)}, expected {len(envelope.rows)} rows",
                )
        return message


class RequestReader:
    """Assembles the requests of one stream after another, and keeps those that a stream has left incomplete."""

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate
        self._arriving: dict[int, WorkerRequest] = {}
        self._partials: dict[Transfer, Partial] = {}

    def interrupt(self) -> None:
        """Keep what a stream that has ended leaves incomplete, newest last, in no more memory than one request."""
        for request in self._arriving.values():
            assembler, transfer = request.assembler, transfer_of(request.envelope)
            if assembler is not None and assembler.received >= CHUNK_BYTES:
                self._partials[transfer] = Partial(transfer, request.envelope.message, assembler)
        self._arriving.clear()
        while sum(partial.assembler.total for partial in self._partials.values()) > REQUEST_BYTES:
            del self._partials[next(iter(self._partials))]

    def partials(self) -> Iterator[wire.Partial]:
        """Yield reports on incomplete requests."""
        for partial in self._partials.values():
            yield partial.to_wire()

    def close(self, key: ConversationKey) -> None:
        """Forget the incomplete requests of a conversation."""
        self._partials = {transfer: partial for transfer, partial in self._partials.items() if transfer[0] != key}

    def forget(self) -> None:
        """Forget all incomplete requests."""
        self._partials.clear()

    def begin(self, begin: wire.Begin) -> None:
        """Begin to receive a request."""
        envelope = begin.envelope
        if len(envelope.rows) != len(envelope.clients):
            raise WireError(Refusal.CLIENT, f"{len(envelope.rows)} rows and {len(envelope.clients)} clients")
        if envelope.states and len(envelope.states) != len(envelope.rows):
            raise WireError(Refusal.CLIENT, f"{len(envelope.rows)} rows and {len(envelope.states)} client states")
        key = key_from_wire(envelope.conversation)
        size = max(0, begin.total_bytes - begin.offset)
        forbidden = None if self._gate is None else self._gate.charge(key, size)
        fits = begin.total_bytes <= REQUEST_BYTES and forbidden is None
        assembler = self._assembler(begin) if fits else None
        expires = time.monotonic() + begin.remaining_s if begin.HasField("remaining_s") else None
        self._arriving[begin.transfer] = WorkerRequest(
            envelope.incarnation, key, envelope, assembler, expires, forbidden
        )

    def _assembler(self, begin: wire.Begin) -> Assembler:
        """Return new memory for a request, or that of an incomplete one which it continues."""
        specs, partial = read_specs(begin.envelope), self._partials.pop(transfer_of(begin.envelope), None)
        if not begin.offset:
            return Assembler(begin, specs, REQUEST_BYTES)
        if partial is None or not partial.continues(begin, specs):
            raise WireError(Refusal.ORDER, f"a request that begins at offset {begin.offset}, which was not reported")
        return partial.assembler

    def add(self, chunk: wire.Chunk | ChunkView) -> None:
        """Add a chunk of a request."""
        assembler = self._arrival(chunk.transfer).assembler
        if assembler is not None:
            assembler.add(chunk)

    def end(self, number: int) -> WorkerRequest:
        """Return a request that has been received completely."""
        request = self._arrival(number)
        if request.assembler is not None:
            request.assembler.end()
        return self._arriving.pop(number)

    def _arrival(self, number: int) -> WorkerRequest:
        if number not in self._arriving:
            raise WireError(Refusal.UNKNOWN_TRANSFER, f"transfer {number}")
        return self._arriving[number]


@dataclass(eq=False)
class _Page:
    """Exchanges received in a conversation, and the answers to the last exchange of each row."""

    exchanges: dict[int, int] = field(default_factory=dict)
    answers: dict[int, tuple[str, Encoded | Lost]] = field(default_factory=dict)
    """Client by row, with its answer or the reason why there is none."""
    sending: dict[int, Sending] = field(default_factory=dict)
    """Records of large answers, by row."""


class AnswerBook:
    """Exchanges and answers of the open conversations, and the outbox that answers leave by.

    Belongs to the event loop's thread, except ``ready`` and ``incarnation``.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate
        self.run = self.incarnation = ""
        """Run and aggregator process that admitted this worker last; empty before the first admission."""
        self.protocol = PROTOCOL
        """Version of the protocol of the current stream."""
        self.outbox: Outbox | None = None
        """Outbox of the current stream. Without one (None) nothing is sent, and the aggregator will ask again."""
        self.ready: deque[tuple[WorkerRequest, int, str, Encoded | Lost]] = deque()
        """Answers that are ready to be sent: request, row, client, answer."""
        self._pages: dict[ConversationKey, _Page] = {}
        self._cutter = Cutter(wire.WorkerPart)

    def open(self, welcome: Joined) -> Outbox:
        """Begin a stream and return its outbox; pages that belong to another aggregator process are removed."""
        if self.incarnation != welcome.incarnation:
            self._pages.clear()
        self.outbox, self.incarnation, self.run = Outbox(HEARTBEAT), welcome.incarnation, welcome.run
        self.protocol = welcome.protocol
        return self.outbox

    def held(self) -> Iterator[wire.Held]:
        """Yield the exchanges that have been received completely."""
        for key, page in self._pages.items():
            for exchange in sorted(set(page.exchanges.values())):
                rows = [row for row, last_exchange in page.exchanges.items() if last_exchange == exchange]
                yield wire.Held(conversation=key_to_wire(key), exchange=exchange, rows=rows)

    def received(self, request: WorkerRequest) -> None:
        """Record a completely received request."""
        page = self._pages.setdefault(request.key, _Page())
        for row in request.envelope.rows:
            if page.exchanges.get(row) != request.envelope.exchange:
                page.answers.pop(row, None)
            page.exchanges[row] = request.envelope.exchange
        while len(self._pages) > HELD_CONVERSATIONS:
            del self._pages[next(iter(self._pages))]

    def close(self, key: ConversationKey) -> None:
        """Forget a conversation."""
        self._pages.pop(key, None)

    def forget(self) -> None:
        """Forget all conversations; they are sent again to a worker that returns."""
        self._pages.clear()

    def send_ready(self) -> None:
        """Send the answers that are ready, and keep them."""
        by_exchange: dict[tuple[ConversationKey, int], list[int]] = {}
        while self.ready:
            request, row, client, answer = self.ready.popleft()
            page, exchange = self._pages.get(request.key), request.envelope.exchange
            if self.incarnation != request.incarnation or page is None or page.exchanges.get(row) != exchange:
                continue  # the answer is obsolete
            page.answers[row] = (client, answer)
            by_exchange.setdefault((request.key, exchange), []).append(row)
        for (key, exchange), rows in by_exchange.items():
            self._send(key, exchange, rows)

    def send_again(self, request: wire.Again) -> None:
        """Resend answers; those that are not ready yet follow when they are."""
        key = key_from_wire(request.conversation)
        page = self._pages.get(key, _Page())
        incomplete = [row for row in request.rows if page.exchanges.get(row) != request.exchange]
        ready = [row for row in request.rows if row in page.answers and page.exchanges[row] == request.exchange]
        self._send(key, request.exchange, ready, {row: part for part in request.partial for row in part.rows})
        if incomplete:
            self._send_missing(key, request.exchange, incomplete)

    def send_lacking(self, request: WorkerRequest, rows: Sequence[int]) -> None:
        """Report that this worker has no conversation for these rows."""
        if self.incarnation != request.incarnation:
            return
        page = self._pages.get(request.key)
        if page is not None:
            for row in rows:
                page.exchanges.pop(row, None)
        self._send_missing(request.key, request.envelope.exchange, rows)

    def send_too_late(self, request: WorkerRequest) -> None:
        """Report that an obsolete request was dropped, so that the worker does not appear to hang."""
        if self.incarnation == request.incarnation and self.outbox is not None and request.envelope.rows:
            row, exchange = request.envelope.rows[0], request.envelope.exchange
            self._send_lost(None, request.key, exchange, row, Lost("it took too long"))

    def _send(
        self,
        key: ConversationKey,
        exchange: int,
        rows: Iterable[int],
        reports: Mapping[int, wire.Partial] = MappingProxyType({}),
    ) -> None:
        """Send the answers of rows; small ones share a transfer that fits into a chunk, large ones may continue."""
        messages: list[tuple[int, str, Encoded]] = []
        for row in sorted(set(rows)):
            client, answer = self._pages[key].answers[row]
            if isinstance(answer, Encoded):
                messages.append((row, client, answer))
            else:
                self._send_lost(key, key, exchange, row, answer)
        for part in group_answers([answer for _, _, answer in messages]):
            numbers, clients, answers = zip(*messages[part.start : part.stop], strict=True)
            size, sending = sum(answer.nbytes for answer in answers), None
            if size > CHUNK_BYTES:
                (row,), records = numbers, self._pages[key].sending
                transfer = key, exchange, (row,)
                sending = Sending(self.incarnation, transfer, answers[0], records.get(row), reports.get(row))
                records[row], size = sending, size - sending.offset
            if self._gate is not None and (reason := self._gate.charge(key, size)) is not None:
                for row in numbers:
                    self._send_lost(key, key, exchange, row, Lost(reason))
                continue
            envelope = wire.Envelope(
                run=self.run,
                incarnation=self.incarnation,
                conversation=key_to_wire(key),
                exchange=exchange,
                rows=numbers,
                clients=clients,
            )
            if self.outbox is not None:
                self.outbox.put(key, self._cutter.parts(envelope, join_answers(answers), sending=sending))

    def _send_lost(
        self, lane: ConversationKey | None, key: ConversationKey, exchange: int, row: int, lost: Lost
    ) -> None:
        wire_key, reason = key_to_wire(key), lost.reason[:REASON_CHARACTERS]
        part = wire.RowLost(conversation=wire_key, exchange=exchange, row=row, reason=reason, bug=lost.is_bug)
        if self.outbox is not None:
            self.outbox.put_part(lane, wire.WorkerPart(row_lost=part))

    def _send_missing(self, key: ConversationKey, exchange: int, rows: Sequence[int]) -> None:
        missing = wire.Missing(conversation=key_to_wire(key), exchange=exchange, rows=rows)
        if self.outbox is not None:
            self.outbox.put_part(key, wire.WorkerPart(missing=missing))
