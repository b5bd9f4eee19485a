"""Receiving end of workers' streams: checks, assembles and settles their answers.

A frame passes through :meth:`Receiver.take` from its first part to the settled rows. All of it runs on the event loop's
thread and never blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedloom.core.words import REASON_CHARACTERS, printable
from fedloom.federation.silence import Silence
from fedloom.federation.transport import Lost, Refusals
from fedloom.federation.validation import TensorSpec, mismatch
from fedloom.messages import Message
from fedloom.transport.codec import CHUNK_BYTES, Assembler, read_specs
from fedloom.transport.exchanges import (
    Arrival,
    Arrived,
    Conversations,
    Exchange,
    Link,
    OpenConversation,
    ServedRun,
    check_awaited,
    key_text,
)
from fedloom.transport.frames import ChunkView, Refusal, WireError, read_parts
from fedloom.transport.limits import TokenBucket
from fedloom.transport.stream import key_from_wire
from fedloom.transport.wire import federation_pb2 as wire

log = logging.getLogger("fedloom.transport.aggregator")

REPLAYS = 3  # how often a stream may report that it lacks what it was just sent
UNREAD_REFUSALS = 16


class Receiver:
    """Turns workers' frames into settled rows of exchanges.

    It calls ``resend`` with a conversation of which a worker lacks rows.
    """

    def __init__(
        self,
        run: ServedRun,
        conversations: Conversations,
        refusals: Refusals,
        silence: Silence,
        resend: Callable[[OpenConversation], None],
    ) -> None:
        self.incarnation = run.incarnation
        self._run = run
        self._conversations = conversations
        self._refusals = refusals
        self._silence = silence
        self._resend = resend
        self._settled: list[tuple[Exchange, int, Arrived | Lost]] = []  # outcomes settled by the current frame
        self._useless = TokenBucket(20_000, 1_000)  # refused and late parts of all streams together

    def take(self, link: Link, data: bytes) -> None:
        """Process one frame from a worker.

        Settled rows are delivered after the whole frame. Otherwise the calling thread would wake for each row and
        alternate with this one, which costs more than the rows.

        Raise WireError if the worker's stream has to end.
        """
        try:
            for kind, part in read_parts(wire.WorkerFrame, data):
                self._take_part(link, kind, part)
        finally:
            for exchange, row, outcome in self._settled:
                exchange.inbox.put((row, outcome))
            self._settled.clear()

    def _take_part(self, link: Link, kind: str, part: Any) -> None:
        if kind == "heartbeat":  # an idle worker sends heartbeats
            if not link.heartbeats.spend():
                raise WireError(Refusal.FLOOD, f"worker {link.name}")
            return
        link.sign_at = time.monotonic()
        match kind:
            case "begin":
                self._begin(link, part)
            case "chunk":
                self._chunk(link, part)
            case "end":
                self._end(link, part.transfer)
            case "missing":
                self._missing(link, part)
            case "row_lost":
                self._row_lost(link, part)
            case "declined":
                link.declined = printable(part.reason, REASON_CHARACTERS) or "no reason"
                raise WireError(Refusal.DECLINED, f"worker {link.name}: {link.declined}")
            case "withheld":
                self._spend(link)
                if not link.withheld:
                    log.info("worker %s: %s", link.name, printable(part.reason, REASON_CHARACTERS))
                link.withheld = printable(part.reason, REASON_CHARACTERS)
            case other:
                raise WireError(Refusal.GARBAGE, f"a {other} in the middle of a stream")

    # ---- transfers

    def _begin(self, link: Link, begin: wire.Begin) -> None:
        number = begin.transfer
        if number in link.arrivals or number in link.ignored:
            self._refuse_transfer(link, number, WireError(Refusal.REPEATED_BEGIN, f"transfer {number}"))
            return
        try:
            exchange, rows = self._awaited_rows(link, begin.envelope)
        except WireError as error:  # no awaited row is addressed, so none is lost
            self._note_sign(link, error)
            self._refuse_transfer(link, number, error)
            return
        try:
            arrival = self._accept(link, begin, exchange, rows)
        except WireError as error:
            self._lose_rows(link, exchange, rows, error)
            self._ignore(link, number, error)
            return
        link.arrivals[number] = arrival
        exchange.arriving.update(dict.fromkeys(((row, link) for row in rows), arrival))

    def _awaited_rows(self, link: Link, envelope: wire.Envelope) -> tuple[Exchange, dict[int, int]]:
        """Return the exchange that a reply belongs to and its awaited rows, with their positions in the reply.

        Raise WireError if none of the rows is awaited.
        """
        if (envelope.run, envelope.incarnation) != (self._run.name, self.incarnation):
            run = f"{envelope.run[:80]}/{envelope.incarnation[:80]}"
            raise WireError(Refusal.RUN, f"{run}, expected {self._run.name}/{self.incarnation}")
        rows = list(envelope.rows)
        if not rows or len(envelope.clients) != len(rows) or any(a >= b for a, b in pairwise(rows)):
            raise WireError(
                Refusal.CLIENT,
                f"rows {rows[:5]} of {len(envelope.clients)} clients, expected ascending rows with one client each",
            )
        exchange = self._conversations.find(envelope.conversation, envelope.exchange)
        awaited_rows: dict[int, int] = {}
        late: list[WireError] = []
        for place, row in enumerate(rows):
            try:
                check_awaited(link, exchange, row)
                awaited_rows[row] = place
            except WireError as error:
                if error.refusal is not Refusal.LATE:
                    raise
                late.append(error)
        if not awaited_rows:
            raise late[0]
        for dropped in late:
            self._refusals.count(dropped.refusal)
        return exchange, awaited_rows

    def _accept(self, link: Link, begin: wire.Begin, exchange: Exchange, rows: dict[int, int]) -> Arrival:
        """Check what a reply announces before allocating memory for it."""
        envelope = begin.envelope
        expected = [exchange.client[row] for row in envelope.rows]
        if list(envelope.clients) != expected:
            names = [client[:80] for client in envelope.clients[:3]]
            raise WireError(
                Refusal.CLIENT, f"clients {names}, expected {expected[:3]} in rows {list(envelope.rows[:3])}"
            )
        cls, specs = self._answer_form(exchange, envelope)
        if begin.offset:
            assembler = self._continued(link, begin, exchange, specs)
            return Arrival(link, begin.transfer, exchange, rows, cls, assembler, is_alone=True)
        exchange.drop_partials(link, rows)
        # Rows that are late, or also awaited from another stream, must not use the memory of an answer that may count.
        apart = {row for row in envelope.rows if row not in rows or exchange.arrives_already(row)}
        memory = exchange.storage(cls, envelope.rows, apart)
        limit = sum(spec.nbytes for spec in specs)
        assembler = Assembler(begin, specs, limit, memory)
        return Arrival(link, begin.transfer, exchange, rows, cls, assembler, is_alone=len(envelope.rows) == 1)

    @staticmethod
    def _continued(link: Link, begin: wire.Begin, exchange: Exchange, specs: Sequence[TensorSpec]) -> Assembler:
        """Return the memory of an incomplete answer that a reply continues; raise WireError if there is none."""
        row = begin.envelope.rows[0]
        partial = exchange.partial(link, row)
        if partial is None or not partial.continues(begin, specs):
            raise WireError(Refusal.ORDER, f"a reply that begins at offset {begin.offset}, which was not asked for")
        del exchange.partials[row]
        return partial.assembler

    def _answer_form(self, exchange: Exchange, envelope: wire.Envelope) -> tuple[type[Message], Sequence[TensorSpec]]:
        """Return the class and tensors that a reply announces; raise WireError if the exchange does not allow them."""
        cls = self._run.vocabulary.get(envelope.message)
        if cls is None:
            allowed = ", ".join(sorted(allowed.__name__ for allowed in exchange.call.shapes))
            raise WireError(Refusal.SHAPE, f"unknown message {envelope.message[:80]!r}, expected {allowed}")
        specs, count = read_specs(envelope), len(envelope.rows)
        wrong = mismatch(cls, specs, exchange.call.shapes, self._run.dtype, count)
        if wrong is None and count > 1 and not all(spec.per_client for spec in specs):
            wrong = f"{cls.__name__} has a broadcast: expected one row in a reply"
        if wrong is not None:
            raise WireError(Refusal.SHAPE, wrong[:REASON_CHARACTERS])
        return cls, specs

    def _chunk(self, link: Link, chunk: wire.Chunk | ChunkView) -> None:
        arrival = link.arrivals.get(chunk.transfer)
        if arrival is not None:
            try:
                arrival.assembler.add(chunk)
            except WireError as error:
                self._refuse_transfer(link, chunk.transfer, error)
        elif chunk.transfer not in link.ignored:
            self._refuse_unknown(link, chunk.transfer)
        elif isinstance(chunk, ChunkView) and len(chunk.data) < CHUNK_BYTES:
            self._spend(link)  # only the last chunk of a transfer is short

    def _end(self, link: Link, number: int) -> None:
        arrival = link.arrivals.get(number)
        if arrival is None:
            if number not in link.ignored:
                self._refuse_unknown(link, number)
            link.ignored.discard(number)
            return
        try:
            arrival.assembler.end()
        except WireError as error:
            self._refuse_transfer(link, number, error)
            link.ignored.discard(number)
            return
        del link.arrivals[number]
        for row in arrival.rows:
            del arrival.exchange.arriving[row, link]
        answers = {
            row: Arrived(link.name, arrival.cls, arrival.assembler, place) for row, place in arrival.rows.items()
        }
        self._settle(link, arrival.exchange, answers)

    # ---- rows

    def _settle(self, link: Link, exchange: Exchange, outcomes: Mapping[int, Arrived | Lost]) -> None:
        """Deliver the outcomes of rows; a second outcome from another stream will be late."""
        now = time.monotonic()
        exchange.longest_s = max(exchange.longest_s, now - exchange.asked_at[link])
        exchange.asked_at[link] = now
        exchange.answered.add(link)
        link.proven, link.silent, link.rests_until = True, 0, 0.0
        conversation = self._conversations.get(exchange.call.key)
        assert conversation is not None
        for row, outcome in outcomes.items():
            conversation.holders[row] = link.name
            for other in (exchange.sent.get(row), exchange.second.get(row)) if exchange.arriving else ():
                if other is not None:
                    self.drop_arrival(exchange, row, other)
            exchange.expect_no_more(row)
            self._settled.append((exchange, row, outcome))

    def drop_arrival(self, exchange: Exchange, row: int, link: Link) -> None:
        """Stop storing what a stream sends for a row: its memory may hold another answer."""
        arrival = exchange.arriving.pop((row, link), None)
        if arrival is not None:
            arrival.assembler.forget(arrival.rows.pop(row))
            if not arrival.rows:
                del link.arrivals[arrival.number]
                link.ignored.add(arrival.number)
            self._refusals.count(Refusal.LATE)

    def _let_go(self, exchange: Exchange, row: int, link: Link) -> bool:
        """Stop expecting a row from a stream if another stream is asked for it, too; return whether one is."""
        other = exchange.let_go(link, row)
        if other:
            self.drop_arrival(exchange, row, link)
        return other

    def _missing(self, link: Link, missing: wire.Missing) -> None:
        """Resend the earlier messages of a conversation to a worker that lacks them, and repeat the request."""
        is_incomplete = False
        for row in missing.rows:
            try:
                exchange = self._conversations.find(missing.conversation, missing.exchange)
                check_awaited(link, exchange, row)
            except WireError as error:
                self._refusals.count(error.refusal)
                self._spend(link)
                continue
            exchange.missing[link, row] += 1
            if exchange.missing[link, row] > REPLAYS:
                raise WireError(Refusal.LACKING, f"row {row} of {key_text(exchange.call.key)}, sent {REPLAYS} times")
            if not self._let_go(exchange, row, link):
                self.drop_arrival(exchange, row, link)
                exchange.sent.pop(row)
                link.held[exchange.call.key].pop(row, None)
                is_incomplete = True
        conversation = self._conversations.get(key_from_wire(missing.conversation))
        if is_incomplete and conversation is not None:
            self._resend(conversation)

    def _row_lost(self, link: Link, message: wire.RowLost) -> None:
        try:
            exchange = self._conversations.find(message.conversation, message.exchange)
            check_awaited(link, exchange, message.row)
        except WireError as error:
            self._note_sign(link, error)
            self._refusals.count(error.refusal)
            self._spend(link)
            return
        if not self._let_go(exchange, message.row, link):  # else the other stream will settle the row
            reason = printable(message.reason, REASON_CHARACTERS) or "the worker gave no reason"
            self._settle(link, exchange, {message.row: Lost(reason, is_bug=message.bug)})

    # ---- refusals

    def refuse(self, error: WireError, exchange: Exchange, row: int, worker: str) -> str:
        """Count and log a refused reply, from any thread; return the reason."""
        self._refusals.count(error.refusal)
        key = exchange.call.key
        details = {
            "client": exchange.client[row],
            "round": key.round,
            "attempt": key.attempt,
            "exchange": exchange.call.exchange,
            "worker": worker,
        }
        log.warning(
            "refused the reply of client %s (round %d, attempt %d, exchange %d, worker %s): %s",
            *details.values(), error, extra=details,
        )  # fmt: skip
        return str(error)

    def _refuse_transfer(self, link: Link, number: int, error: WireError) -> None:
        """Refuse a transfer; the rows that it carried are lost, the stream continues."""
        arrival = link.arrivals.pop(number, None)
        if arrival is not None:
            for row in arrival.rows:
                del arrival.exchange.arriving[row, link]
            self._lose_rows(link, arrival.exchange, arrival.rows, error)
        else:
            self._refusals.count(error.refusal)
            level = logging.INFO if error.refusal is Refusal.LATE else logging.WARNING
            log.log(level, "dropped transfer %d of worker %s: %s", number, link.name, error)
        self._ignore(link, number, error)

    def _refuse_unknown(self, link: Link, number: int) -> None:
        self._refuse_transfer(link, number, WireError(Refusal.UNKNOWN_TRANSFER, f"transfer {number}"))

    def _lose_rows(self, link: Link, exchange: Exchange, rows: Iterable[int], error: WireError) -> None:
        """Lose rows whose reply was refused, except those that another stream is asked for, too."""
        for row in rows:
            reason = self.refuse(error, exchange, row, link.name)
            if not self._let_go(exchange, row, link):
                self._settle(link, exchange, {row: Lost(reason)})

    def _ignore(self, link: Link, number: int, error: WireError) -> None:
        """Skip the rest of a transfer, and notify the worker if the transfer was faulty."""
        link.ignored.add(number)
        self._spend(link)
        if error.refusal is not Refusal.LATE and link.outbox.waiting(None) < UNREAD_REFUSALS:
            refusal = wire.TransferRefused(transfer=number, reason=str(error)[:REASON_CHARACTERS])
            link.outbox.put_part(None, wire.AggregatorPart(transfer_refused=refusal))

    def _note_sign(self, link: Link, error: WireError) -> None:
        """Record that a worker is alive if its answer is only late."""
        if error.refusal is Refusal.LATE:
            self._silence.sign(link.worker.clients, link.name, link.owner)

    def _spend(self, link: Link) -> None:
        """Charge a useless part to the budgets of its stream and of all streams together.

        Raise WireError if a budget is exhausted: the stream has to end.
        """
        link.allowance -= 1
        if link.allowance < 0:
            raise WireError(Refusal.FLOOD, f"worker {link.name}")
        if not self._useless.spend():
            raise WireError(Refusal.FLOOD, "all workers together")
