"""Dispatcher of the aggregator, which decides which worker is asked for each row.

All of it runs on the event loop's thread and never blocks; the server in ``aggregator.py`` moves the bytes, and
``receiver.py`` handles the answers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

from fedloom.core.words import first_of, pluralize
from fedloom.errors import FedloomError
from fedloom.federation.activity import Awaited
from fedloom.federation.silence import Silence
from fedloom.federation.transport import TRAIN, Call, ConversationKey, Lost, Refusals
from fedloom.transport.codec import CHUNK_BYTES, encode
from fedloom.transport.exchanges import Conversations, Exchange, Link, OpenConversation, ServedRun, WorkerInfo, deal
from fedloom.transport.frames import Refusal, WireError
from fedloom.transport.receiver import Receiver
from fedloom.transport.resuming import Sending, transfer_of
from fedloom.transport.stream import HELD_CONVERSATIONS, key_from_wire, key_to_wire, states_to_wire
from fedloom.transport.wire import federation_pb2 as wire

log = logging.getLogger("fedloom.transport.aggregator")

ALLOWED_PER_ROW = 4  # refused or late parts; a late reply has two parts, and may have been requested twice
UNREAD_LANES = 256
MOST_AWAY = 1_000  # workers that are remembered as having declined, or as too new
STOPPED = "the aggregator stopped"


class Dispatcher:
    """Connects exchanges with workers.

    Parameters
    ----------
    publish
        Called with the worker that has joined, the one that has left, or both.
    say
        Called with urgent messages for the user: awaited clients that have no worker, and the deadline.
    """

    def __init__(
        self,
        run: ServedRun,
        publish: Callable[[WorkerInfo | None, WorkerInfo | None], None],
        say: Callable[[str], None],
    ) -> None:
        self.refusals = Refusals()
        self.silence = Silence()
        self._run = run.name
        self._publish = publish
        self._say = say
        self._stopping = False
        self._finished = False
        self._links: dict[str, Link] = {}
        self.declined: dict[str, str] = {}
        """Reasons of workers whose members do not take part, by name, until they join again."""
        self.too_new: dict[str, str] = {}
        """Versions of workers that wait until this aggregator is upgraded, by name, until they join."""
        self._claims: dict[str, str] = {}  # the worker that serves each client with data of its own; exclusive
        self._conversations = Conversations()
        self._longest_s: dict[tuple[str, int], float] = {}  # longest time to an answer, by purpose and exchange
        self.receiver = Receiver(run, self._conversations, self.refusals, self.silence, self._dispatch)

    # ---- state

    def links(self) -> list[Link]:
        """Return the streams of connected workers, by name."""
        return [self._links[name] for name in sorted(self._links)]

    def awaiting(self) -> Iterator[Awaited]:
        """Yield the answers that are awaited."""
        now, wall = time.monotonic(), time.time()
        for _, exchange in self._conversations.running():
            patience = exchange.patience_s()
            long = patience is not None and now - exchange.started > patience
            deadline = None if exchange.deadline is None else wall + exchange.deadline - now
            for row in exchange.outstanding:
                link = exchange.sent.get(row)
                worker, late = None if link is None else link.name, link is None or long
                yield Awaited(exchange.client[row], worker, wall - (now - exchange.started), deadline, late)

    def taken(self, name: str, incarnation: str, owner: str | None) -> bool:
        """Return whether a worker name belongs to another identity, or without identities to another process.

        Keepalive detects processes that have disappeared.
        """
        link = self._links.get(name)
        if link is None or self._stopping:
            return False
        return link.worker.incarnation != incarnation if owner is None else link.owner != owner

    def claimed(self, worker: str, clients: Iterable[str]) -> str | None:
        """Return the first of the clients that another worker serves; None if there is none."""
        return next((client for client in clients if self._claims.get(client, worker) != worker), None)

    def announced(self, owner: str, besides: str) -> int:
        """Return how many clients with data of their own an owner's workers have announced, excluding one worker."""
        links = self._links.values()
        return sum(len(link.worker.members) for link in links if link.owner == owner and link.name != besides)

    # ---- workers

    def enter(self, link: Link, held: Iterable[wire.Held] = (), partial: Iterable[wire.Partial] = ()) -> None:
        """Add the stream of a worker that has joined; it replaces an older stream of that worker and gets waiting rows.

        ``held`` are the exchanges of earlier streams that the worker reports as received, ``partial`` the requests
        that it has received in part.
        """
        if self._stopping:
            self._end(link)
            return
        old = self._links.pop(link.name, None)
        if old is not None:
            self._replace(old, link)
        self._links[link.name] = link
        self.declined.pop(link.name, None)
        self.too_new.pop(link.name, None)
        self.silence.sign(link.worker.clients, link.name, link.owner)
        self.silence.join((member.id for member in link.worker.members), link.name, link.owner)
        self._claims.update((member.id, link.name) for member in link.worker.members)
        for conversation in islice(held, HELD_CONVERSATIONS):
            self._note_held(link, conversation)
        for report in islice(partial, HELD_CONVERSATIONS):
            self._note_partial(link, report)
        worker, count = link.worker, pluralize(len(link.worker.clients), "client")
        about = f"{worker.device}, {count}, fedloom {worker.package}, protocol {link.protocol}"
        log.info("worker %s (%s) joined", link.name, about, extra={"worker": link.name})
        self._publish(link.worker, None if old is None else old.worker)
        self._dispatch_all()

    def _replace(self, old: Link, link: Link) -> None:
        """End an older stream of a worker; it has the same identity, or the newer one would have been refused."""
        if old.worker.incarnation != link.worker.incarnation:
            reason = f"another process joined as worker {link.name!r}; names must be unique"
            refusal = wire.Refused(code=wire.REFUSAL_CODE_REPLACED, reason=reason)
            old.outbox.put_part(None, wire.AggregatorPart(refused=refusal))
        old.outbox.close()
        self._release(old)

    def _note_held(self, link: Link, reported: wire.Held) -> None:
        """Record the exchanges that a worker reports; notify it if the conversation was closed while it was away."""
        key = key_from_wire(reported.conversation)
        conversation = self._conversations.get(key)
        if conversation is None:
            link.outbox.put_part(key, _closed(key))
        elif reported.exchange < len(conversation.calls):
            link.held[key] = dict.fromkeys(conversation.rows.intersection(reported.rows), reported.exchange)

    def _note_partial(self, link: Link, report: wire.Partial) -> None:
        """Record a request that a worker has received in part; notify it if the conversation was closed meanwhile."""
        key, exchange, rows = transfer = transfer_of(report)
        conversation = self._conversations.get(key)
        if conversation is None:
            link.outbox.put_part(key, _closed(key))
            return
        sending = conversation.sending.get((exchange, rows[0])) if rows else None
        if sending is not None and sending.allows(link.process, report):
            link.reported[transfer] = report

    def rename(self, incarnation: str) -> None:
        """Switch to another incarnation: all streams end, and workers reconnect to get the new Welcome."""
        self.receiver.incarnation = incarnation
        for link in self._links.values():
            link.outbox.close()

    def leave(self, link: Link) -> None:
        """Remove a worker's stream that has ended; its rows go to another worker, or wait."""
        if self._links.get(link.name) is not link:
            return  # replaced by a newer stream
        del self._links[link.name]
        log.info("worker %s left", link.name, extra={"worker": link.name})
        self._publish(None, link.worker)
        if link.declined is not None:
            self._note_declined(link, link.declined)
        self._release(link)
        self._dispatch_all(f"worker {link.name} left: ")

    def _note_declined(self, link: Link, reason: str) -> None:
        """Record that a member does not take part, and lose the rows that only it could answer."""
        _remember(self.declined, link.name, reason)
        own = {member.id for member in link.worker.members}
        for _, exchange in self._conversations.running():
            for row in [row for row in exchange.outstanding if exchange.client[row] in own]:
                exchange.expect_no_more(row)
                exchange.inbox.put((row, Lost(reason)))

    def note_too_new(self, name: str, reason: str) -> None:
        """Record that a worker waits until this aggregator is upgraded, unless a worker of this name is connected."""
        if name not in self._links:
            _remember(self.too_new, name, reason)

    def _release(self, link: Link) -> None:
        """Take back the rows awaited from this stream, and release its clients."""
        for member in link.worker.members:
            self._claims.pop(member.id, None)
        self.silence.leave(member.id for member in link.worker.members)
        arrivals = list(link.arrivals.values())
        link.arrivals.clear()
        for arrival in arrivals:
            for row in arrival.rows:
                del arrival.exchange.arriving[row, link]
        for _, exchange in self._conversations.running():
            for row in exchange.outstanding:
                if not exchange.let_go(link, row) and exchange.sent.get(row) is link:
                    del exchange.sent[row]
        for arrival in arrivals:
            arrival.exchange.keep_partial(arrival)

    def stop(self, finished: bool) -> None:
        """End all streams, with a goodbye if the run is over, and lose all awaited rows. Idempotent."""
        self._stopping, self._finished = True, self._finished or finished
        for link in self._links.values():
            self._end(link)
        for _, exchange in self._conversations.running():
            self._lose(exchange, STOPPED)

    def _end(self, link: Link) -> None:
        """End a stream; if the run is over, a goodbye keeps the worker from reconnecting."""
        if self._finished:
            link.outbox.put_part(None, wire.AggregatorPart(goodbye=wire.Goodbye()))
        link.outbox.close()

    # ---- exchanges

    def open(self, exchange: Exchange) -> None:
        """Start an exchange; the first one opens its conversation."""
        try:
            conversation = self._conversations.start(exchange)
            longest = self._longest_s.get((exchange.call.key.purpose, exchange.call.exchange))
            exchange.usual_s = max(self._longest_s.values(), default=0.0) if longest is None else longest
            if self._stopping:
                self._lose(exchange, STOPPED)
            self._dispatch(conversation)
        except Exception as error:
            exchange.inbox.put(error)  # raised in the thread that called exchange()

    @staticmethod
    def _lose(exchange: Exchange, reason: str) -> None:
        for row in sorted(exchange.outstanding):
            exchange.expect_no_more(row)
            exchange.inbox.put((row, Lost(reason)))

    def finish(self, exchange: Exchange) -> None:
        """Close an exchange that no thread waits for: anything that still arrives for it is late."""
        if exchange.remaining_s() == 0.0 or not exchange.outstanding:
            silent = [exchange.client[row] for row in exchange.outstanding]
            clients = [client for row, client in exchange.client.items() if row not in exchange.outstanding]
            self.silence.end(clients, silent, time.monotonic() - exchange.started)
        exchange.finished.set()
        conversation = self._conversations.get(exchange.call.key)
        if conversation is not None and conversation.current is exchange:
            conversation.current = None
        for arrival in set(exchange.arriving.values()):
            del arrival.link.arrivals[arrival.number]
            arrival.link.ignored.add(arrival.number)
            self.refusals.count(Refusal.LATE)
        exchange.arriving.clear()
        exchange.partials.clear()
        if exchange.longest_s:
            self._longest_s[exchange.call.key.purpose, exchange.call.exchange] = exchange.longest_s
        _let_silent_rest(exchange)

    def close(self, key: ConversationKey) -> None:
        """Forget a conversation, and notify the workers that hold rows of it."""
        conversation = self._conversations.pop(key)
        if conversation is None:
            return
        if conversation.current is not None:
            for row, link in list(conversation.current.arriving):
                self.receiver.drop_arrival(conversation.current, row, link)
            self._lose(conversation.current, "the conversation was closed")
        for link in self._links.values():
            if link.held.pop(key, None) is not None:
                link.outbox.drop(key)
                link.outbox.put_part(key, _closed(key))
                if link.outbox.lanes > UNREAD_LANES:
                    link.end(WireError(Refusal.UNREAD, f"{link.outbox.lanes} conversations"))

    # ---- choosing workers

    def ask_others(self) -> None:
        """Ask idle workers for rows that have shown no sign of progress for long, once for each row."""
        idle = self._idle_workers()
        if not idle:
            return
        for conversation, exchange in self._conversations.running():
            rows = _stalled(exchange)
            for name, positions in deal([exchange.client[row] for row in rows], idle).items():
                self._send(conversation, exchange, self._links[name], [rows[i] for i in positions], exchange.second)
                del idle[name]

    def _idle_workers(self) -> dict[str, Collection[str]]:
        """Return the clients of idle workers, of proven ones if there are any."""
        busy = {
            link
            for _, exchange in self._conversations.running()
            for link in (*exchange.sent.values(), *exchange.second.values())
        }
        free = [link for link in self._links.values() if link not in busy and not link.silent]
        proven = [link for link in free if link.proven]
        return {link.name: link.worker.clients for link in proven or free}

    def _dispatch_all(self, because: str = "") -> None:
        for conversation, _ in self._conversations.running():
            self._dispatch(conversation, because)

    def _dispatch(self, conversation: OpenConversation, because: str = "") -> None:
        """Send the outstanding rows that no worker is working on to workers that may serve them, if there are any."""
        exchange = conversation.current
        assert exchange is not None
        if len(exchange.sent) == len(exchange.outstanding) and not exchange.unserved:
            return  # keeps the cost of a joining worker low
        shares, free = self._held(conversation, exchange)
        if free:
            self._deal(exchange, free, shares)
        for name, rows in shares.items():
            self._send(conversation, exchange, self._links[name], sorted(rows))
        self._say_unserved(exchange, because)

    def _held(self, conversation: OpenConversation, exchange: Exchange) -> tuple[dict[str, list[int]], list[int]]:
        """Return the rows to send by the worker that holds them, and those that no connected worker holds."""
        rows_by_worker: dict[str, list[int]] = {}
        free: list[int] = []
        for row in exchange.call.rows:
            if row not in exchange.outstanding or row in exchange.sent:
                continue
            client = exchange.client[row]
            holder = self._links.get(self._claims.get(client) or conversation.holders.get(row, ""))
            if holder is not None and client in holder.worker.clients:
                rows_by_worker.setdefault(holder.name, []).append(row)
            else:
                free.append(row)
        return rows_by_worker, free

    def _deal(self, exchange: Exchange, free: list[int], shares: dict[str, list[int]]) -> None:
        """Add rows to workers' shares; resting workers get only rows that no other may serve."""
        loads = Counter(link.name for link in exchange.sent.values())
        loads.update({name: len(rows) for name, rows in shares.items()})
        now = time.monotonic()
        rested = {name: link.worker.clients for name, link in self._links.items() if link.rests_until <= now}
        everyone = {name: link.worker.clients for name, link in self._links.items()}
        for workers in (rested, everyone):
            dealt = deal([exchange.client[row] for row in free], workers, loads)
            rows_by_link = {name: [free[i] for i in positions] for name, positions in dealt.items()}
            for name, rows in rows_by_link.items():
                shares.setdefault(name, []).extend(rows)
            free = sorted(set(free).difference(*rows_by_link.values()))

    def _say_unserved(self, exchange: Exchange, because: str) -> None:
        unserved_before, exchange.unserved = exchange.unserved, exchange.waiting()
        if exchange.unserved == unserved_before or self._stopping:
            return
        if not exchange.unserved:
            self._say("every client has a worker again")
            return
        seconds = exchange.remaining_s()
        until = "waiting for one"
        if seconds is not None:
            deadline = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
            until = f"waiting for one until {deadline}, {seconds:.0f} s (federation.deadline_s)"
        key, count = exchange.call.key, len(set(exchange.call.clients))
        moment = f"round {key.round}, attempt {key.attempt}" if key.purpose == TRAIN else f"after round {key.round}"
        subject = f"{len(exchange.unserved)} of {pluralize(count, 'client')} ({first_of(exchange.unserved, 3)})"
        self._say(f"{because}{moment}: no worker for {subject}; {until}")

    # ---- sending

    def _send(
        self,
        conversation: OpenConversation,
        exchange: Exchange,
        link: Link,
        rows: list[int],
        whom: dict[int, Link] | None = None,
    ) -> None:
        """Request these rows from a worker, after replaying earlier exchanges that it lacks."""
        call = exchange.call
        rows_by_exchange = conversation.moves_to(link, rows)
        answered_rows = rows_by_exchange.pop(call.exchange, [])
        for last, those in sorted(rows_by_exchange.items()):
            self._replay(conversation.calls[last + 1 : -1], link, those)
        link.allowance += ALLOWED_PER_ROW * len(rows)
        new = sorted(set(rows).difference(answered_rows))
        if new:
            if call.told_again is not None and (repeated_rows := conversation.ask(new)):
                try:
                    call.told_again([exchange.client[row] for row in repeated_rows])
                except FedloomError as error:  # a request that cannot be accounted for is not sent
                    exchange.inbox.put(error)
                    return
            self._put(link, call, new, replay=False, remaining_s=exchange.remaining_s())
        if answered_rows:
            partials = [partial for row in answered_rows if (partial := exchange.partial(link, row)) is not None]
            resend = wire.Again(
                conversation=key_to_wire(call.key),
                exchange=call.exchange,
                rows=answered_rows,
                partial=[partial.to_wire() for partial in partials],
            )
            link.outbox.put_part(call.key, wire.AggregatorPart(again=resend))
        exchange.asked_at[link] = time.monotonic()
        for row in rows:
            (exchange.sent if whom is None else whom)[row] = link

    def _replay(self, earlier: Sequence[Call], link: Link, rows: list[int]) -> None:
        if earlier:
            log.info("replaying %d exchanges of %d rows on worker %s", len(earlier), len(rows), link.name)
        for past in earlier:
            self._put(link, past, rows, replay=True, remaining_s=None)

    def _put(self, link: Link, call: Call, rows: Sequence[int], replay: bool, remaining_s: float | None) -> None:
        position = {row: i for i, row in enumerate(call.rows)}
        index = [position[row] for row in rows]
        envelope = wire.Envelope(
            run=self._run,
            incarnation=self.receiver.incarnation,
            conversation=key_to_wire(call.key),
            exchange=call.exchange,
            rows=rows,
            clients=[call.clients[i] for i in index],
            replay=replay,
            states=[states_to_wire(call.states[i]) for i in index] if call.states else (),
            trace=call.trace,
        )
        encoded, sending = encode(call.message.select(index)), None
        conversation = self._conversations.get(call.key)
        if encoded.nbytes > CHUNK_BYTES and conversation is not None:
            transfer, place = (call.key, call.exchange, tuple(rows)), (call.exchange, rows[0])
            before, report = conversation.sending.get(place), link.reported.pop(transfer, None)
            sending = conversation.sending[place] = Sending(link.process, transfer, encoded, before, report)
        link.outbox.put(call.key, link.cutter.parts(envelope, encoded, remaining_s, sending))


def _stalled(exchange: Exchange) -> list[int]:
    """Return the rows that have shown no sign of progress for long and were requested from one worker only."""
    patience = exchange.patience_s()
    if patience is None:
        return []
    latest = time.monotonic() - patience
    return [
        row
        for row, link in sorted(exchange.sent.items())
        if row not in exchange.second and max(link.sign_at, exchange.asked_at.get(link, 0.0)) < latest
    ]


def _let_silent_rest(exchange: Exchange) -> None:
    """Put workers without any answer on hold, twice as long after each such exchange."""
    now, patience = time.monotonic(), exchange.patience_s()
    for link, since in exchange.asked_at.items():
        if link not in exchange.answered and patience is not None and now - since > patience:
            link.silent += 1
            link.rests_until = now + min(300.0, 5.0 * 2**link.silent)


def _remember(reasons: dict[str, str], name: str, reason: str) -> None:
    """Record the reason why a worker is away, and forget the oldest reasons if there are very many."""
    reasons[name] = reason
    while len(reasons) > MOST_AWAY:
        del reasons[next(iter(reasons))]


def _closed(key: ConversationKey) -> wire.AggregatorPart:
    return wire.AggregatorPart(close=wire.CloseConversation(conversation=key_to_wire(key)))
