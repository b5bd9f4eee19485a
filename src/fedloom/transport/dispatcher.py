"""Dispatcher of the aggregator: decides which worker is asked for which row, and handles its answers.

All of it runs on the event loop's thread (except :meth:`Dispatcher.refuse` and :meth:`Dispatcher.count`) and never
blocks; the server in ``aggregator.py`` moves the bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise

import torch

from fedloom.errors import FedloomError
from fedloom.federation.activity import Awaited
from fedloom.federation.carrier import Call, ConversationKey, Lost, Refusals
from fedloom.federation.client_side import TRAIN
from fedloom.federation.placement import deal
from fedloom.federation.silence import Silence
from fedloom.federation.validation import mismatch
from fedloom.messages import Message
from fedloom.transport.codec import (
    CHUNK_BYTES,
    Assembler,
    Data,
    Pieces,
    Refusal,
    WireError,
    encode,
    read,
    read_specs,
    serialize,
)
from fedloom.transport.exchanges import Arrival, Arrived, Exchange, Link, OpenConversation, WorkerInfo
from fedloom.transport.limits import TokenBucket
from fedloom.transport.stream import HELD_CONVERSATIONS, key_from_wire, key_to_wire, states_to_wire
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.words import REASON_CHARACTERS, pluralize, printable

log = logging.getLogger("fedloom.transport.aggregator")

REPLAYS = 3  # how often a stream may report that it lacks what it was just sent
ALLOWED_PER_ROW = 4  # refused or late parts: a late reply is two parts, and may have been requested again
UNREAD_REFUSALS = 16
UNREAD_LANES = 256
STOPPED = "the aggregator stopped"


class Dispatcher:
    """Connects exchanges with workers.

    Parameters
    ----------
    run, incarnation, vocabulary, dtype
        See ``Aggregator``.
    publish
        Called with the worker that has joined, the one that has left, or both.
    say
        Called with urgent messages for a person: awaited clients that have no worker, and the deadline.
    """

    def __init__(
        self,
        run: str,
        incarnation: str,
        vocabulary: Mapping[str, type[Message]],
        dtype: torch.dtype,
        publish: Callable[[WorkerInfo | None, WorkerInfo | None], None],
        say: Callable[[str], None],
    ) -> None:
        self.refusals = Refusals()
        self.silence = Silence()
        self._counting = threading.Lock()
        self._run = run
        self._incarnation = incarnation
        self._vocabulary = dict(vocabulary)
        self._dtype = dtype
        self._publish = publish
        self._say = say
        self._stopping = False
        self._finished = False
        self._links: dict[str, Link] = {}
        self._claims: dict[str, str] = {}  # the worker that serves each client with data of its own; exclusive
        self._conversations: dict[ConversationKey, OpenConversation] = {}
        self._newest: tuple[int, int, int] = (-1, -1, -1)
        self._longest_s: dict[tuple[str, int], float] = {}  # longest time to an answer, by purpose and exchange
        self._settled: list[tuple[Exchange, int, Arrived | Lost]] = []  # outcomes settled by the current frame
        self._useless = TokenBucket(20_000, 1_000)  # refused and late parts of all streams together

    # ---- state

    def links(self) -> list[Link]:
        """Return the streams of connected workers, by name."""
        return [self._links[name] for name in sorted(self._links)]

    def awaiting(self) -> Iterator[Awaited]:
        """Yield the answers that are awaited."""
        now, wall = time.monotonic(), time.time()
        for conversation in self._conversations.values():
            exchange = conversation.current
            if exchange is None:
                continue
            patience = exchange.patience_s()
            long = patience is not None and now - exchange.begun > patience
            deadline = None if exchange.deadline is None else wall + exchange.deadline - now
            for row in exchange.outstanding:
                link = exchange.sent.get(row)
                worker, late = None if link is None else link.name, link is None or long
                yield Awaited(exchange.client[row], worker, wall - (now - exchange.begun), deadline, late)

    # ---- workers

    def enter(self, link: Link, held: Iterable[wire.Held] = ()) -> None:
        """Add the stream of a worker that has joined; it replaces an older stream of that worker and gets waiting rows.

        Parameters
        ----------
        held
            Exchanges that the worker says it has from earlier streams.
        """
        if self._stopping:
            self._end(link)
            return
        old = self._links.pop(link.name, None)
        if old is not None:
            # same identity, or the newer one would have been refused
            if old.worker.incarnation != link.worker.incarnation:
                reason = f"another process joined as worker {link.name!r}; names must be unique"
                refused = wire.Refused(code=wire.REFUSAL_CODE_REPLACED, reason=reason)
                old.outbox.put(None, _one(wire.AggregatorPart(refused=refused)))
            old.outbox.close()
            self._release(old)
        self._links[link.name] = link
        self._sign(link)
        self.silence.join((member.id for member in link.worker.members), link.name, link.owner)
        self._claims.update((member.id, link.name) for member in link.worker.members)
        for told in islice(held, HELD_CONVERSATIONS):
            self._believe(link, told)
        served = pluralize(len(link.worker.clients), "client")
        log.info("worker %s (%s, %s) joined", link.name, link.worker.device, served, extra={"worker": link.name})
        self._publish(link.worker, None if old is None else old.worker)
        self._dispatch_all()

    def _sign(self, link: Link) -> None:
        """Record that a worker is alive."""
        self.silence.sign(link.worker.clients, link.name, link.owner)

    def taken(self, name: str, incarnation: str, owner: str | None) -> bool:
        """Return whether a worker name belongs to another identity, or without identities to another process.

        Keepalive detects processes that are gone.
        """
        link = self._links.get(name)
        if link is None or self._stopping:
            return False
        return link.worker.incarnation != incarnation if owner is None else link.owner != owner

    def _believe(self, link: Link, told: wire.Held) -> None:
        """Record which exchanges a worker says it has; notify it if the conversation was closed while it was away."""
        key = key_from_wire(told.conversation)
        conversation = self._conversations.get(key)
        if conversation is None:
            link.outbox.put(key, _one(_closed(key)))
        elif told.exchange < len(conversation.calls):
            link.held[key] = dict.fromkeys(conversation.rows.intersection(told.rows), told.exchange)

    def claimed(self, worker: str, clients: Iterable[str]) -> str | None:
        """Return the first of the clients that another worker serves; None if there is none."""
        return next((client for client in clients if self._claims.get(client, worker) != worker), None)

    def announced(self, owner: str, besides: str) -> int:
        """Return how many clients with data of their own an owner's workers have announced, excluding one worker."""
        links = self._links.values()
        return sum(len(link.worker.members) for link in links if link.owner == owner and link.name != besides)

    def rename(self, incarnation: str) -> None:
        """Switch to another incarnation: all streams end, and workers reconnect to learn of it."""
        self._incarnation = incarnation
        for link in self._links.values():
            link.outbox.close()

    def leave(self, link: Link) -> None:
        """Remove a worker's stream that has ended; its rows go to another worker, or wait."""
        if self._links.get(link.name) is not link:
            return  # replaced by a newer stream
        del self._links[link.name]
        log.info("worker %s left", link.name, extra={"worker": link.name})
        self._publish(None, link.worker)
        self._release(link)
        self._dispatch_all(f"worker {link.name} left: ")

    def _release(self, link: Link) -> None:
        """Take back the rows awaited from this stream, and release its clients."""
        for member in link.worker.members:
            self._claims.pop(member.id, None)
        self.silence.leave(member.id for member in link.worker.members)
        for arrival in link.arrivals.values():
            for row in arrival.rows:
                del arrival.exchange.arriving[row, link]
        link.arrivals.clear()
        for conversation in self._conversations.values():
            exchange = conversation.current
            if exchange is not None:
                for row in exchange.outstanding:
                    if not exchange.let_go(link, row) and exchange.sent.get(row) is link:
                        del exchange.sent[row]

    def stop(self, finished: bool) -> None:
        """End all streams, with a goodbye if the run is over, and lose all awaited rows. Idempotent."""
        self._stopping, self._finished = True, self._finished or finished
        for link in self._links.values():
            self._end(link)
        for conversation in self._conversations.values():
            if conversation.current is not None:
                self._lose(conversation.current, STOPPED)

    def _end(self, link: Link) -> None:
        """End a stream; a worker that knows that the run is over does not reconnect."""
        if self._finished:
            link.outbox.put(None, _one(wire.AggregatorPart(goodbye=wire.Goodbye())))
        link.outbox.close()

    # ---- refusing

    def refuse(self, error: WireError, exchange: Exchange, row: int, worker: str) -> str:
        """Count and log a refused reply; return the reason."""
        self.count(error.refusal)
        key = exchange.call.key
        log.warning(
            "refused the reply of client %s (round %d, attempt %d, exchange %d, worker %s): %s",
            exchange.client[row], key.round, key.attempt, exchange.call.exchange, worker, error,
            extra={
                "client": exchange.client[row], "round": key.round, "attempt": key.attempt,
                "exchange": exchange.call.exchange, "worker": worker,
            },
        )  # fmt: skip
        return str(error)

    def count(self, refusal: Refusal) -> None:
        """Count one refusal; callable from any thread."""
        with self._counting:
            self.refusals.count(refusal)

    # ---- sending

    def open(self, exchange: Exchange) -> None:
        """Start an exchange; the first one opens its conversation."""
        key = exchange.call.key
        try:
            if exchange.call.exchange == 0 and key not in self._conversations:
                self._conversations[key] = OpenConversation(key)
                self._newest = max(self._newest, (key.round, key.attempt, key.conversation))
            if key not in self._conversations:
                raise ValueError(f"{key}: exchange {exchange.call.exchange} of a conversation that is not open")
            self._conversations[key].post(exchange)
            longest = self._longest_s.get((key.purpose, exchange.call.exchange))
            exchange.usual_s = max(self._longest_s.values(), default=0.0) if longest is None else longest
            if self._stopping:
                self._lose(exchange, STOPPED)
            self._dispatch(self._conversations[key])
        except Exception as error:
            exchange.inbox.put(error)  # raised in the thread that called exchange()

    @staticmethod
    def _lose(exchange: Exchange, reason: str) -> None:
        for row in sorted(exchange.outstanding):
            exchange.expect_no_more(row)
            exchange.inbox.put((row, Lost(reason)))

    def finish(self, exchange: Exchange) -> None:
        """Close an exchange that no thread waits for any more: anything that still arrives for it is late."""
        if exchange.remaining_s() == 0.0 or not exchange.outstanding:
            silent = [exchange.client[row] for row in exchange.outstanding]
            answered = [client for row, client in exchange.client.items() if row not in exchange.outstanding]
            self.silence.end(answered, silent, time.monotonic() - exchange.begun)
        exchange.finished.set()
        conversation = self._conversations.get(exchange.call.key)
        if conversation is not None and conversation.current is exchange:
            conversation.current = None
        for arrival in set(exchange.arriving.values()):
            del arrival.link.arrivals[arrival.number]
            arrival.link.ignored.add(arrival.number)
            self.count(Refusal.LATE)
        exchange.arriving.clear()
        if exchange.longest_s:
            self._longest_s[exchange.call.key.purpose, exchange.call.exchange] = exchange.longest_s
        now, patience = time.monotonic(), exchange.patience_s()
        for link, since in exchange.asked.items():
            if link not in exchange.answered and patience is not None and now - since > patience:
                link.silent += 1
                link.rests_until = now + min(300.0, 5.0 * 2**link.silent)

    def ask_others(self) -> None:
        """Ask idle workers for rows that have shown no sign of progress for long, once for each row."""
        busy = {
            link
            for conversation in self._conversations.values()
            if conversation.current is not None
            for link in (*conversation.current.sent.values(), *conversation.current.second.values())
        }
        free = [link for link in self._links.values() if link not in busy and not link.silent]
        proven = [link for link in free if link.proven]  # preferred to idle workers that have never answered
        idle = {link.name: link.worker.clients for link in proven or free}
        for conversation in self._conversations.values() if idle else ():
            exchange = conversation.current
            patience = None if exchange is None else exchange.patience_s()
            if exchange is None or patience is None:
                continue
            before = time.monotonic() - patience
            rows = [
                row
                for row, link in sorted(exchange.sent.items())
                if row not in exchange.second and max(link.sign_at, exchange.asked.get(link, 0.0)) < before
            ]
            for name, positions in deal([exchange.client[row] for row in rows], idle).items():
                self._send(conversation, exchange, self._links[name], [rows[i] for i in positions], exchange.second)
                del idle[name]

    def close(self, key: ConversationKey) -> None:
        """Forget a conversation, and notify the workers that hold rows of it."""
        conversation = self._conversations.pop(key, None)
        if conversation is None:
            return
        if conversation.current is not None:
            for row, link in list(conversation.current.arriving):
                self._drop_arrival(conversation.current, row, link)
            self._lose(conversation.current, "the conversation was closed")
        for link in self._links.values():
            if link.held.pop(key, None) is not None:
                link.outbox.drop(key)
                link.outbox.put(key, _one(_closed(key)))
                if link.outbox.lanes > UNREAD_LANES:
                    link.end(WireError(Refusal.UNREAD, f"{link.outbox.lanes} conversations"))

    def _dispatch_all(self, because: str = "") -> None:
        for conversation in self._conversations.values():
            if conversation.current is not None:
                self._dispatch(conversation, because)

    def _dispatch(self, conversation: OpenConversation, because: str = "") -> None:
        """Send the outstanding rows that no worker is working on to workers that may serve them, if there are any."""
        exchange = conversation.current
        assert exchange is not None
        if len(exchange.sent) == len(exchange.outstanding) and not exchange.unserved:
            return  # makes a joining worker cost nothing
        shares: dict[str, list[int]] = {}
        free = []
        for row in exchange.call.rows:
            if row not in exchange.outstanding or row in exchange.sent:
                continue
            client = exchange.client[row]
            # A row stays with its worker as long as that is connected.
            holder = self._links.get(self._claims.get(client) or conversation.holders.get(row, ""))
            if holder is not None and client in holder.worker.clients:
                shares.setdefault(holder.name, []).append(row)
            else:
                free.append(row)
        loads = Counter(link.name for link in exchange.sent.values())
        loads.update({name: len(rows) for name, rows in shares.items()})
        now = time.monotonic()
        for rested in (True, False) if free else ():  # resting workers get only rows that no other may serve
            candidates = {
                name: link.worker.clients for name, link in self._links.items() if not rested or link.rests_until <= now
            }
            dealt = deal([exchange.client[row] for row in free], candidates, loads)
            for name, positions in dealt.items():
                shares.setdefault(name, []).extend(free[position] for position in positions)
            given = {free[position] for positions in dealt.values() for position in positions}
            free = [row for row in free if row not in given]
            if not free:
                break
        for name, rows in shares.items():
            self._send(conversation, exchange, self._links[name], sorted(rows))
        self._say_unserved(exchange, because)

    def _say_unserved(self, exchange: Exchange, because: str) -> None:
        """Report a change in the clients that have no worker."""
        before, exchange.unserved = exchange.unserved, exchange.waiting()
        if exchange.unserved == before or self._stopping:
            return
        if not exchange.unserved:
            self._say("every client has a worker again")
            return
        names = ", ".join(exchange.unserved[:3])
        more = f" and {len(exchange.unserved) - 3} more" if len(exchange.unserved) > 3 else ""
        left = exchange.remaining_s()
        until = "waiting for one"
        if left is not None:
            at = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
            until = f"waiting for one until {at}, {left:.0f} s (federation.deadline_s)"
        key, asked = exchange.call.key, len(set(exchange.call.clients))
        when = f"round {key.round}, attempt {key.attempt}" if key.purpose == TRAIN else f"after round {key.round}"
        who = f"{len(exchange.unserved)} of {pluralize(asked, 'client')} ({names}{more})"
        self._say(f"{because}{when}: no worker for {who}; {until}")

    def _send(
        self,
        conversation: OpenConversation,
        exchange: Exchange,
        link: Link,
        rows: list[int],
        whom: dict[int, Link] | None = None,
    ) -> None:
        """Request these rows from a worker, after replaying earlier exchanges that it lacks."""
        reached = conversation.moves_to(link, rows)
        asked = reached.pop(exchange.call.exchange, [])
        for last, those in sorted(reached.items()):
            earlier = conversation.calls[last + 1 : -1]
            if earlier:
                log.info("replaying %d exchanges of %d rows on worker %s", len(earlier), len(those), link.name)
            for past in earlier:
                self._put(link, past, those, replay=True, remaining_s=None)
        call = exchange.call
        link.allowance += ALLOWED_PER_ROW * len(rows)
        new = sorted(set(rows).difference(asked))
        if new:
            if call.told_again is not None and (told := conversation.ask(new)):
                try:
                    call.told_again([exchange.client[row] for row in told])
                except FedloomError as error:  # a request that cannot be accounted for is not sent
                    exchange.inbox.put(error)
                    return
            self._put(link, call, new, replay=False, remaining_s=exchange.remaining_s())
        if asked:
            again = wire.Again(conversation=key_to_wire(call.key), exchange=call.exchange, rows=asked)
            link.outbox.put(call.key, _one(wire.AggregatorPart(again=again)))
        exchange.asked[link] = time.monotonic()
        for row in rows:
            (exchange.sent if whom is None else whom)[row] = link

    def _put(self, link: Link, call: Call, rows: Sequence[int], replay: bool, remaining_s: float | None) -> None:
        position = {row: i for i, row in enumerate(call.rows)}
        index = [position[row] for row in rows]
        envelope = wire.Envelope(
            run=self._run,
            incarnation=self._incarnation,
            conversation=key_to_wire(call.key),
            exchange=call.exchange,
            rows=rows,
            clients=[call.clients[i] for i in index],
            replay=replay,
            states=[states_to_wire(call.states[i]) for i in index] if call.states else (),
            trace=call.trace,
        )
        link.outbox.put(call.key, link.cutter.parts(envelope, encode(call.message.select(index)), remaining_s))

    # ---- receiving

    def take(self, link: Link, data: bytes) -> None:
        """Process one frame from a worker.

        Settled rows are handed on after the whole frame. Otherwise the calling thread would wake for each row and
        alternate with this one, which costs more than the rows.

        Raises
        ------
        WireError
            If the worker's stream has to end.
        """
        try:
            self._take(link, data)
        finally:
            for exchange, row, outcome in self._settled:
                exchange.inbox.put((row, outcome))
            self._settled.clear()

    def _take(self, link: Link, data: bytes) -> None:
        for kind, part in read(wire.WorkerFrame, data):
            if kind != "heartbeat":  # an idle worker sends heartbeats
                link.sign_at = time.monotonic()
            match kind:
                case "begin":
                    self._begin(link, part)
                case "chunk":
                    self._continue(link, part.transfer, part)
                case "end":
                    self._continue(link, part.transfer, part)
                case "missing":
                    self._missing(link, part)
                case "row_lost":
                    self._row_lost(link, part)
                case "heartbeat":
                    if not link.heartbeats.spend():
                        raise WireError(Refusal.FLOOD, f"worker {link.name}")
                case other:
                    raise WireError(Refusal.GARBAGE, f"a {other} in the middle of a stream")

    def _begin(self, link: Link, begin: wire.Begin) -> None:
        number = begin.transfer
        if number in link.arrivals or number in link.ignored:
            self._refuse_transfer(link, number, WireError(Refusal.REPEATED_BEGIN, f"transfer {number}"))
            return
        try:
            exchange, rows = self._awaited(link, begin.envelope)
        except WireError as error:  # addressed to nothing awaited: no row is lost by it
            if error.refusal is Refusal.LATE:
                self._sign(link)
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

    def _awaited(self, link: Link, envelope: wire.Envelope) -> tuple[Exchange, dict[int, int]]:
        """Return the exchange that a reply belongs to and its awaited rows, with their positions in the reply.

        Raises
        ------
        WireError
            If none of the rows is awaited.
        """
        if (envelope.run, envelope.incarnation) != (self._run, self._incarnation):
            found = f"{envelope.run[:80]}/{envelope.incarnation[:80]}"
            raise WireError(Refusal.RUN, f"{found}, expected {self._run}/{self._incarnation}")
        rows = list(envelope.rows)
        if not rows or len(envelope.clients) != len(rows) or any(a >= b for a, b in pairwise(rows)):
            raise WireError(
                Refusal.CLIENT,
                f"rows {rows[:5]} of {len(envelope.clients)} clients, expected ascending rows, a client for each",
            )
        exchange = self._current(envelope.conversation, envelope.exchange)
        awaited: dict[int, int] = {}
        late: list[WireError] = []
        for place, row in enumerate(rows):
            try:
                self._check_awaited(link, exchange, row)
                awaited[row] = place
            except WireError as error:
                if error.refusal is not Refusal.LATE:
                    raise
                late.append(error)
        if not awaited:
            raise late[0]
        for dropped in late:
            self.count(dropped.refusal)
        return exchange, awaited

    def _current(self, wire_key: wire.ConversationKey, number: int) -> Exchange:
        """Return the running exchange with this key and number.

        Raises
        ------
        WireError
            If no such exchange is running.
        """
        key = key_from_wire(wire_key)
        conversation = self._conversations.get(key)
        if conversation is None:
            old = (key.round, key.attempt, key.conversation) <= self._newest
            raise WireError(Refusal.LATE if old else Refusal.CONVERSATION, f"{_name(key)} is not open")
        exchange = conversation.current
        if exchange is None or exchange.call.exchange != number:
            old = number < len(conversation.calls)
            raise WireError(Refusal.LATE if old else Refusal.CONVERSATION, f"{_name(key)}, exchange {number}")
        return exchange

    @staticmethod
    def _check_awaited(link: Link, exchange: Exchange, row: int) -> None:
        """Raise WireError if a row is not awaited from this stream."""
        if row in exchange.outstanding and exchange.awaits(row, link) and (row, link) not in exchange.arriving:
            return
        where = f"exchange {exchange.call.exchange} of {_name(exchange.call.key)}"
        if row not in exchange.client:
            raise WireError(Refusal.CLIENT, f"row {row} is not in {where}")
        again = " is arriving already" if (row, link) in exchange.arriving else ""
        raise WireError(Refusal.LATE, f"row {row}, {where}{again}")

    def _accept(self, link: Link, begin: wire.Begin, exchange: Exchange, rows: dict[int, int]) -> Arrival:
        """Check what a reply announces before allocating memory for it."""
        envelope = begin.envelope
        expected = [exchange.client[row] for row in envelope.rows]
        if list(envelope.clients) != expected:
            found = [client[:80] for client in envelope.clients[:3]]
            raise WireError(
                Refusal.CLIENT, f"clients {found}, expected {expected[:3]} in rows {list(envelope.rows[:3])}"
            )
        cls = self._vocabulary.get(envelope.message)
        if cls is None:
            allowed = ", ".join(sorted(allowed.__name__ for allowed in exchange.call.shapes))
            raise WireError(Refusal.SHAPE, f"unknown message {envelope.message[:80]!r} (allowed: {allowed})")
        specs = read_specs(envelope)
        wrong = mismatch(cls, specs, exchange.call.shapes, self._dtype, len(expected))
        if wrong is None and len(expected) > 1 and not all(spec.per_client for spec in specs):
            wrong = f"{cls.__name__} has a broadcast: expected one row in a reply"
        if wrong is not None:
            raise WireError(Refusal.SHAPE, wrong[:REASON_CHARACTERS])
        limit = sum(spec.nbytes for spec in specs)
        # Rows that are late, or also awaited from another stream, must not use the memory of an answer that may count.
        apart = {row for row in envelope.rows if row not in rows or exchange.comes_twice(row)}
        memory = exchange.storage(cls, envelope.rows, apart)
        return Arrival(link, begin.transfer, exchange, rows, cls, Assembler(begin, specs, limit, memory))

    def _continue(self, link: Link, number: int, part: wire.Chunk | Data | wire.End) -> None:
        """Process a chunk or the end of a transfer."""
        arrival = link.arrivals.get(number)
        if arrival is None:
            if number not in link.ignored:
                self._refuse_transfer(link, number, WireError(Refusal.UNKNOWN_TRANSFER, f"transfer {number}"))
            elif isinstance(part, Data) and len(part.data) < CHUNK_BYTES:
                self._spend(link)  # only the last chunk of a transfer is short
            if isinstance(part, wire.End):
                link.ignored.discard(number)
            return
        try:
            if not isinstance(part, wire.End):
                arrival.assembler.add(part)
                return
            arrival.assembler.end()
        except WireError as error:
            self._refuse_transfer(link, number, error)
            if isinstance(part, wire.End):
                link.ignored.discard(number)
            return
        del link.arrivals[number]
        for row, place in arrival.rows.items():
            del arrival.exchange.arriving[row, link]
            self._settle(link, arrival.exchange, row, Arrived(link.name, arrival.cls, arrival.assembler, place))

    def _settle(self, link: Link, exchange: Exchange, row: int, outcome: Arrived | Lost) -> None:
        """Hand on the outcome of a row; a second outcome from another stream will be late."""
        now = time.monotonic()
        exchange.longest_s = max(exchange.longest_s, now - exchange.asked[link])
        exchange.asked[link] = now
        exchange.answered.add(link)
        link.proven, link.silent, link.rests_until = True, 0, 0.0
        self._conversations[exchange.call.key].holders[row] = link.name
        for other in (exchange.sent.get(row), exchange.second.get(row)):
            if other is not None:
                self._drop_arrival(exchange, row, other)
        exchange.expect_no_more(row)
        self._settled.append((exchange, row, outcome))

    def _drop_arrival(self, exchange: Exchange, row: int, link: Link) -> None:
        """Stop storing what a stream sends for a row: its memory may hold another answer."""
        arrival = exchange.arriving.pop((row, link), None)
        if arrival is not None:
            arrival.assembler.forget(arrival.rows.pop(row))
            if not arrival.rows:
                del link.arrivals[arrival.number]
                link.ignored.add(arrival.number)
            self.count(Refusal.LATE)

    def _let_go(self, exchange: Exchange, row: int, link: Link) -> bool:
        """Stop expecting a row from a stream if another stream is asked for it, too; return whether one is."""
        other = exchange.let_go(link, row)
        if other:
            self._drop_arrival(exchange, row, link)
        return other

    def _refuse_transfer(self, link: Link, number: int, error: WireError) -> None:
        """Refuse a transfer; the rows that it carried are lost, the stream continues."""
        arrival = link.arrivals.pop(number, None)
        if arrival is not None:
            for row in arrival.rows:
                del arrival.exchange.arriving[row, link]
            self._lose_rows(link, arrival.exchange, arrival.rows, error)
        else:
            self.count(error.refusal)
            log.log(
                logging.INFO if error.refusal is Refusal.LATE else logging.WARNING,
                "dropped transfer %d of worker %s: %s", number, link.name, error,
            )  # fmt: skip
        self._ignore(link, number, error)

    def _lose_rows(self, link: Link, exchange: Exchange, rows: Iterable[int], error: WireError) -> None:
        """Lose rows whose reply was refused, except those that another stream is asked for, too."""
        for row in rows:
            reason = self.refuse(error, exchange, row, link.name)
            if not self._let_go(exchange, row, link):
                self._settle(link, exchange, row, Lost(reason))

    def _ignore(self, link: Link, number: int, error: WireError) -> None:
        """Skip the rest of a transfer, and notify the worker if the transfer was faulty."""
        link.ignored.add(number)
        self._spend(link)
        if error.refusal is not Refusal.LATE and link.outbox.waiting(None) < UNREAD_REFUSALS:
            refused = wire.TransferRefused(transfer=number, reason=str(error)[:REASON_CHARACTERS])
            link.outbox.put(None, _one(wire.AggregatorPart(transfer_refused=refused)))

    def _spend(self, link: Link) -> None:
        """Charge a useless part to the budgets of its stream and of all streams together.

        Raises
        ------
        WireError
            If a budget is exhausted: the stream has to end.
        """
        link.allowance -= 1
        if link.allowance < 0:
            raise WireError(Refusal.FLOOD, f"worker {link.name}")
        if not self._useless.spend():
            raise WireError(Refusal.FLOOD, "all workers together")

    def _missing(self, link: Link, missing: wire.Missing) -> None:
        """Resend the earlier messages of a conversation to a worker that lacks them, and repeat the request."""
        asked = []
        for row in missing.rows:
            try:
                exchange = self._current(missing.conversation, missing.exchange)
                self._check_awaited(link, exchange, row)
            except WireError as error:
                self.count(error.refusal)
                self._spend(link)
                continue
            exchange.missing[link, row] += 1
            if exchange.missing[link, row] > REPLAYS:
                raise WireError(Refusal.LACKING, f"row {row} of {_name(exchange.call.key)}, sent {REPLAYS} times")
            if not self._let_go(exchange, row, link):
                self._drop_arrival(exchange, row, link)
                exchange.sent.pop(row)
                asked.append(row)
        if asked:
            conversation = self._conversations[key_from_wire(missing.conversation)]
            for row in asked:
                link.held[conversation.key].pop(row, None)
            self._dispatch(conversation)

    def _row_lost(self, link: Link, lost: wire.RowLost) -> None:
        row = lost.row
        try:
            exchange = self._current(lost.conversation, lost.exchange)
            self._check_awaited(link, exchange, row)
        except WireError as error:
            if error.refusal is Refusal.LATE:
                self._sign(link)
            self.count(error.refusal)
            self._spend(link)
            return
        if self._let_go(exchange, row, link):
            return  # the other stream will settle the row
        reason = printable(lost.reason, REASON_CHARACTERS) or "the worker gave no reason"
        self._settle(link, exchange, row, Lost(reason, is_bug=lost.bug))


def _one(part: wire.AggregatorPart) -> Iterator[Pieces]:
    return iter((serialize(part),))


def _closed(key: ConversationKey) -> wire.AggregatorPart:
    return wire.AggregatorPart(close=wire.CloseConversation(conversation=key_to_wire(key)))


def _name(key: ConversationKey) -> str:
    return f"round {key.round}, attempt {key.attempt}, conversation {key.conversation} ({key.purpose[:20]})"
