"""Worker side of the wire protocol: connects to the aggregator, receives requests, streams answers back (docs/wire.md).

The stream lives on an event loop in a thread of its own. All work of a session, and thus all torch work, happens in the
thread that called :func:`serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import grpc

import fedloom
from fedloom import tracing
from fedloom.errors import AbandonedError, DataError, FedloomError, RefusedError, argument
from fedloom.federation.carrier import ConversationKey, Lost, MissingConversation
from fedloom.federation.roster import Member
from fedloom.federation.states import Versions
from fedloom.messages import Message
from fedloom.transport import dial, stream
from fedloom.transport.address import split_address
from fedloom.transport.bandwidth import Bandwidth, Line
from fedloom.transport.codec import (
    FRAME_BYTES,
    SEAL,
    SEAL_BYTES,
    Assembler,
    Cutter,
    Encoded,
    Pieces,
    Refusal,
    WireError,
    encode,
    joined,
    parse,
    read,
    read_specs,
    sealed,
    serialize,
    together,
)
from fedloom.transport.failures import FINAL, REFUSALS, RETRYABLE, described, hint
from fedloom.transport.stream import (
    CHANNEL_OPTIONS,
    HELD_CONVERSATIONS,
    LAST_BACKOFF_S,
    LIMITED,
    METHOD,
    PROTOCOL,
    SERVICE,
    Outbox,
    key_from_wire,
    key_to_wire,
    states_from_wire,
)
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.trust.options import ClientCredentials, Credentials
from fedloom.words import REASON_CHARACTERS, printable

log = logging.getLogger("fedloom.transport.worker")

WELCOME_TIMEOUT_S = 30.0  # from connecting to the Welcome
FIRST_BACKOFF_S = 0.1
FIRST_NOTICE_S = 5.0  # when to log that we are still trying to connect; the interval doubles each time
CERTAIN = 3  # consecutive failed verifications that count as final: bits flip in handshakes, too
CHANGED_S = 1.0  # how often certificate and token files are checked for changes
GATHER_S = 0.001  # how long an answer waits to be sent with others while the next is computed
NOTICE_S = 0.2  # how soon a stop event is noticed while idle
HEARTBEAT = serialize(wire.WorkerPart(heartbeat=wire.Heartbeat()))
REQUEST_BYTES = 4 << 30  # maximum memory of one request


@dataclass(frozen=True)
class Introduction:
    """Introduction of a worker to the aggregator.

    Attributes
    ----------
    worker
        Name, unique in the federation; a restarted worker returns under the same name.
    clients
        Ids of the clients that it may serve.
    algorithms
        Names and versions of its algorithms.
    device
        Device that it computes on.
    incarnation
        Id of this process: conversations are kept as long as it stays the same.
    members
        Announcements of the clients, in the same order, where they bring data of their own.
    """

    worker: str
    clients: Sequence[str]
    algorithms: Mapping[str, int]
    device: str = "cpu"
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    members: Sequence[Member] = ()


@dataclass(frozen=True)
class Joined:
    """Welcome received from the aggregator: the run, the id of the aggregator's process, the experiment (JSON)."""

    run: str
    incarnation: str
    experiment: str


class Session(Protocol):
    """Clients' side of all conversations with one incarnation of the aggregator."""

    @property
    def vocabulary(self) -> Mapping[str, type[Message]]:
        """Messages that may be sent to clients, by class name."""

    def answer(
        self,
        key: ConversationKey,
        exchange: int,
        rows: Sequence[int],
        clients: Sequence[str],
        message: Message,
        states: Sequence[Versions] = (),
    ) -> Iterator[tuple[int, Message | Lost]]:
        """Yield each row's answer as soon as it is ready: (position in the cohort, message of one row or Lost).

        If the last exchange of a row is requested again, its answer is yielded again without recomputation. An opening
        (exchange 0) that is not the last exchange of a row restarts the row.

        Raises
        ------
        MissingConversation
            Before any work, if rows have not taken part in the previous exchange here.
        """

    def close(self, key: ConversationKey) -> None:
        """End a conversation. Idempotent."""


@dataclass(frozen=True, eq=False)
class _Request:
    """A request that has been received completely."""

    incarnation: str
    key: ConversationKey
    envelope: wire.Envelope
    assembler: Assembler | None  # None if the request exceeded REQUEST_BYTES and was skipped
    expires: float | None  # on the monotonic clock


@dataclass(eq=False)
class _Book:
    """Exchanges received in a conversation, and the answers to the last exchange of each row."""

    exchanges: dict[int, int] = field(default_factory=dict)
    answers: dict[int, tuple[str, Encoded | Lost]] = field(default_factory=dict)
    """By row: the client, and its answer or the reason why there is none."""


@dataclass(frozen=True)
class _Close:
    key: ConversationKey


class _LaterError(ConnectionError):
    """The aggregator is reachable but asks us to reconnect later."""


class _Finished:
    """Goodbye from the aggregator: the run is over."""


_Event = Joined | _Request | _Close | _Finished | BaseException


def serve(
    address: str,
    introduction: Introduction,
    *,
    make_session: Callable[[Joined], Session],
    stop: threading.Event,
    reconnect_s: float = 60.0,
    credentials: Credentials | None = None,
    bandwidth: Bandwidth | None = None,
) -> bool:
    """Serve clients until the run is over or ``stop`` is set; return whether the run is over.

    Parameters
    ----------
    address
        ``host:port`` of the aggregator.
    introduction
        Sent to the aggregator on joining.
    make_session
        Called in this thread when an aggregator, or a new incarnation of it, has admitted us. A session survives a
        broken connection, but not the aggregator's process.
    stop
        Set by a signal handler to leave at once, without finishing any work.
    reconnect_s
        Seconds to keep trying to reach an aggregator that is gone; infinity means forever.
    credentials
        Credentials to connect with; without them, the connection is plaintext and anonymous.
    bandwidth
        Bandwidth limit; None for no limit.

    Raises
    ------
    RefusedError
        If the aggregator refuses our protocol, package or algorithm version, or our identity. If either side cannot
        verify the other: at once if the aggregator has never admitted us, otherwise after ``reconnect_s`` seconds,
        because certificates may be about to be renewed.
    ExperimentError
        If a token would be sent in plaintext to another machine.
    DataError
        If we may serve a client that the run does not have.
    AbandonedError
        If the aggregator is gone for ``reconnect_s`` seconds.
    Exception
        Any other error that ended the stream's thread, such as lack of memory.
    """
    connection = _Connection(address, introduction, reconnect_s, credentials or Credentials(), bandwidth)
    connection.start()
    try:
        return _work(connection, make_session, stop)
    finally:
        connection.stop()


def _work(connection: _Connection, make_session: Callable[[Joined], Session], stop: threading.Event) -> bool:
    joined: Joined | None = None
    session: Session | None = None
    while not stop.is_set():
        try:
            event = connection.events.get(timeout=NOTICE_S)
        except queue.Empty:
            continue
        match event:
            case BaseException():
                raise event
            case _Finished():
                return True
            case Joined():
                if session is None or joined is None or event.incarnation != joined.incarnation:
                    session = make_session(event)
                joined = event
            case _Request():
                if session is not None and joined is not None and event.incarnation == joined.incarnation:
                    with tracing.within(event.envelope.trace):
                        if not _answer(connection, session, event, stop) and _is_over(connection, event):
                            connection.too_late(event)
            case _Close():
                if session is not None:
                    session.close(event.key)
                connection.closed.discard(event.key)
    return False


def _answer(connection: _Connection, session: Session, request: _Request, stop: threading.Event) -> bool:
    """Compute a request's answers, sending each as soon as it is ready; return False if it was no longer needed."""
    if _pointless(connection, request, stop):
        return False
    envelope, key = request.envelope, request.key
    rows, clients = list(envelope.rows), list(envelope.clients)
    try:
        message = _decode(session, request)
    except WireError as error:
        for i, row in enumerate(rows):
            connection.reply(request, row, clients[i], Lost(f"the worker cannot read the request: {error}"))
        return True
    name = dict(zip(rows, clients, strict=True))
    asked = list(range(len(rows)))
    while asked:
        part = [rows[i] for i in asked]
        answers = session.answer(
            key,
            envelope.exchange,
            part,
            [clients[i] for i in asked],
            message.select(asked),
            [states_from_wire(envelope.states[i]) for i in asked] if envelope.states else (),
        )
        try:
            for row, answer in answers:
                if not envelope.replay:
                    connection.reply(request, row, name[row], answer)
                if _pointless(connection, request, stop):
                    return False
            connection.flush()
            return True
        except MissingConversation as missing:
            lacking = set(missing.rows)
            if not lacking & set(part):
                raise
            connection.missing(request, [row for row in part if row in lacking])
            asked = [i for i in asked if rows[i] not in lacking]
        finally:
            close = getattr(answers, "close", None)
            if close is not None:
                close()
    return True


def _decode(session: Session, request: _Request) -> Message:
    envelope = request.envelope
    cls = session.vocabulary.get(envelope.message)
    if cls is None:
        raise WireError(Refusal.SHAPE, f"unknown message {envelope.message[:80]!r}")
    if request.assembler is None:
        raise WireError(Refusal.SIZE, f"more than {REQUEST_BYTES} bytes; with more workers each is sent fewer rows")
    message = request.assembler.message(cls)
    for tensor_name, tensor in message.tensors().items():
        per_client = next(f.per_client for f in message.fields() if f.name == tensor_name)
        if per_client and (tensor.ndim == 0 or tensor.shape[0] != len(envelope.rows)):
            raise WireError(
                Refusal.SHAPE,
                f"{envelope.message}.{tensor_name} has shape {tuple(tensor.shape)}, expected {len(envelope.rows)} rows",
            )
    return message


def _pointless(connection: _Connection, request: _Request, stop: threading.Event) -> bool:
    """Return whether the rest of a request is pointless: stopping, closed, expired, or from another aggregator."""
    return stop.is_set() or _is_over(connection, request) or connection.incarnation != request.incarnation


def _is_over(connection: _Connection, request: _Request) -> bool:
    """Return whether a request's deadline has passed or its conversation is closed."""
    expired = request.expires is not None and time.monotonic() > request.expires
    return expired or request.key in connection.closed


class _Connection:
    """Stream to the aggregator, kept open in a thread of its own and turned into events."""

    def __init__(
        self,
        address: str,
        introduction: Introduction,
        reconnect_s: float,
        credentials: Credentials,
        bandwidth: Bandwidth | None,
    ) -> None:
        self.events: SimpleQueue[_Event] = SimpleQueue()
        self.closed: set[ConversationKey] = set()  # closed by the aggregator, not yet by the session
        self.incarnation = ""  # of the aggregator that admitted us last
        self._address = address
        self._reconnect_s = reconnect_s
        self._credentials = credentials
        self._shown = credentials.current  # credentials of the last connection attempt
        self._up, self._down = Line(bandwidth and bandwidth.up), Line(bandwidth and bandwidth.down)
        self._options = CHANNEL_OPTIONS if bandwidth is None else (*CHANNEL_OPTIONS, *LIMITED)
        self._outbox: Outbox | None = None
        self._cutter = Cutter(wire.WorkerPart)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._run_name = ""
        self._replies: deque[tuple[_Request, int, str, Encoded | Lost]] = deque()  # in transit between the threads
        self._gathering = False  # the loop knows that there are replies to send
        self._books: dict[ConversationKey, _Book] = {}  # owned by the event loop, like the outbox
        self._thread = threading.Thread(target=self._run, name="worker-stream", daemon=True)
        self._hello = wire.Hello(
            protocol=PROTOCOL,
            package=fedloom.__version__,
            worker=introduction.worker,
            incarnation=introduction.incarnation,
            clients=introduction.clients,
            device=introduction.device,
            algorithms=dict(introduction.algorithms),
            announced=[
                wire.Announced(
                    train=member.train,
                    validation=member.validation,
                    test=member.test,
                    labelled=member.labelled,
                    observer=member.observer,
                    class_counts=member.class_counts,
                )
                for member in introduction.members
            ],
        )
        takes = len(self._introduction())
        if takes > FRAME_BYTES:
            raise RefusedError(
                f"worker {introduction.worker}: introducing {len(introduction.clients)} clients takes "
                f"{takes} bytes, allowed: {FRAME_BYTES}",
                hint="let several workers serve fewer clients each",
            )

    # ---- used by the session's thread

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Leave, and wait until the thread has ended."""
        if self._loop is not None and self._task is not None:
            try:
                self._loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:
                log.debug("the stream's event loop had ended already")
        self._thread.join()

    def reply(self, request: _Request, row: int, client: str, answer: Message | Lost) -> None:
        """Send one row's answer, keeping it until the row moves on, in case the aggregator asks for it again.

        Waking the stream's thread costs as much as a small answer, so answers of the next ``GATHER_S`` are sent
        together; :meth:`flush` sends all that are ready.
        """
        self._replies.append((request, row, client, answer if isinstance(answer, Lost) else encode(answer)))
        if not self._gathering:
            self._gathering = True
            self._post(self._gather)

    def flush(self) -> None:
        """Send the answers that are ready now."""
        if self._replies:
            self._post(self._send_replies)

    def too_late(self, request: _Request) -> None:
        """Report that we have dropped an obsolete request: silence would be taken for a hanging worker."""
        self._post(self._late, request)

    def missing(self, request: _Request, rows: Iterable[int]) -> None:
        """Report that the conversation of these rows is not held here."""
        self._post(self._lacking, request, list(rows))

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("an answer came after the stream's event loop had ended")

    # ---- the event loop's thread

    def _introduction(self) -> bytes:
        """Return the Hello: who we are, and which open conversations we have received completely, as far as we know."""
        hello = wire.Hello(held_of=self.incarnation)
        hello.MergeFrom(self._hello)
        for key, book in self._books.items():
            for exchange in sorted(set(book.exchanges.values())):
                rows = [row for row, reached in book.exchanges.items() if reached == exchange]
                hello.held.append(wire.Held(conversation=key_to_wire(key), exchange=exchange, rows=rows))
        data = sealed(serialize(wire.WorkerPart(hello=hello)))
        if len(data) > FRAME_BYTES and hello.held:  # then the conversations are sent once more
            return sealed(serialize(wire.WorkerPart(hello=self._hello)))
        return data

    def _received(self, request: _Request) -> None:
        """Record a completely received request, and hand it to the session."""
        book = self._books.setdefault(request.key, _Book())
        for row in request.envelope.rows:
            if book.exchanges.get(row) != request.envelope.exchange:
                book.answers.pop(row, None)
            book.exchanges[row] = request.envelope.exchange
        while len(self._books) > HELD_CONVERSATIONS:
            del self._books[next(iter(self._books))]
        self.events.put(request)

    def _gather(self) -> None:
        assert self._loop is not None
        self._loop.call_later(GATHER_S, self._send_replies)

    def _send_replies(self) -> None:
        """Send the answers that are ready."""
        self._gathering = False  # before they are taken: one that comes meanwhile is sent now or next time
        ready: dict[tuple[ConversationKey, int], list[int]] = {}
        while self._replies:
            request, row, client, answer = self._replies.popleft()
            book, exchange = self._books.get(request.key), request.envelope.exchange
            if self.incarnation != request.incarnation or book is None or book.exchanges.get(row) != exchange:
                continue  # the answer is obsolete
            book.answers[row] = (client, answer)
            ready.setdefault((request.key, exchange), []).append(row)
        for (key, exchange), rows in ready.items():
            self._send(key, exchange, rows)

    def _late(self, request: _Request) -> None:
        if self.incarnation == request.incarnation and self._outbox is not None and request.envelope.rows:
            at = key_to_wire(request.key), request.envelope.exchange, request.envelope.rows[0]
            lost = wire.RowLost(conversation=at[0], exchange=at[1], row=at[2], reason="it took too long")
            self._outbox.put(None, iter((serialize(wire.WorkerPart(row_lost=lost)),)))

    def _lacking(self, request: _Request, rows: Sequence[int]) -> None:
        if self.incarnation != request.incarnation:
            return
        book = self._books.get(request.key)
        if book is not None:
            for row in rows:
                book.exchanges.pop(row, None)
        self._say_missing(request.key, request.envelope.exchange, rows)

    def _again(self, again: wire.Again) -> None:
        """Resend answers; those that are not ready yet follow when they are."""
        key = key_from_wire(again.conversation)
        book = self._books.get(key, _Book())
        lacking = [row for row in again.rows if book.exchanges.get(row) != again.exchange]
        there = [row for row in again.rows if row in book.answers and book.exchanges[row] == again.exchange]
        self._send(key, again.exchange, there)
        if lacking:
            self._say_missing(key, again.exchange, lacking)

    def _send(self, key: ConversationKey, exchange: int, rows: Iterable[int]) -> None:
        """Send the answers of rows, or the reasons why there are none.

        Without a connection, nothing is sent; the aggregator will ask again. Small answers are sent together, one
        transfer for as many as fit into a chunk.
        """
        found: list[tuple[int, str, Encoded]] = []
        for row in sorted(set(rows)):
            client, answer = self._books[key].answers[row]
            if isinstance(answer, Encoded):
                found.append((row, client, answer))
                continue
            at, reason = key_to_wire(key), answer.reason[:REASON_CHARACTERS]
            lost = wire.RowLost(conversation=at, exchange=exchange, row=row, reason=reason, bug=answer.is_bug)
            self._put(key, iter((serialize(wire.WorkerPart(row_lost=lost)),)))
        for those in together([answer for _, _, answer in found]):
            numbers, clients, answers = zip(*found[those.start : those.stop], strict=True)
            envelope = wire.Envelope(
                run=self._run_name,
                incarnation=self.incarnation,
                conversation=key_to_wire(key),
                exchange=exchange,
                rows=numbers,
                clients=clients,
            )
            self._put(key, self._cutter.parts(envelope, joined(answers)))

    def _say_missing(self, key: ConversationKey, exchange: int, rows: Sequence[int]) -> None:
        missing = wire.Missing(conversation=key_to_wire(key), exchange=exchange, rows=rows)
        self._put(key, iter((serialize(wire.WorkerPart(missing=missing)),)))

    def _put(self, key: ConversationKey, parts: Iterator[Pieces]) -> None:
        if self._outbox is not None:
            self._outbox.put(key, parts)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            log.debug("left")
        except BaseException as error:  # otherwise the session's thread would wait forever
            self.events.put(error)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._ready.set()
        last_seen = time.monotonic()
        attempt = doubts = 0
        told: set[str] = set()  # reasons for the missing connection logged so far
        next_notice = FIRST_NOTICE_S
        refused: RefusedError | None = None  # by the last aggregator reached
        while True:
            seen, reason = False, ""
            try:
                seen, finished = await self._hold()
                if finished:
                    self.events.put(_Finished())
                    return
                reason, refused = "the stream ended", None
            except _Distrust as error:
                reason = str(error)
                refused = error.refused if error.certain or not self.incarnation else None
                doubts = doubts + 1 if error.certain else 0
                if doubts >= CERTAIN and not self.incarnation:
                    self.events.put(error.refused)
                    return
            except FedloomError as error:
                if isinstance(error, RefusedError) and self._credentials.current != self._shown:
                    continue  # retry with the current content of the files
                self.events.put(error)
                return
            except (grpc.RpcError, ConnectionError, TimeoutError, WireError) as error:
                reason = _describe(error)
                if isinstance(error, _LaterError):
                    last_seen = time.monotonic()
                if self._outbox is not None or not _is_cut_short(error):
                    refused = None
            lost = seen or self._outbox is not None
            if lost:
                self._outbox, last_seen, attempt = None, time.monotonic(), 0
                told, next_notice = set(), FIRST_NOTICE_S
            gone_s = time.monotonic() - last_seen
            left = self._reconnect_s - gone_s
            if left <= 0:
                self.events.put(
                    refused
                    or AbandonedError(
                        f"the aggregator at {self._address} is gone for {self._reconnect_s:g} s: {reason}",
                        hint="start it again (`fedloom aggregator`), then this worker",
                    )
                )
                return
            if reason not in told:
                told.add(reason)
                what = "lost the aggregator at %s (%s), reconnecting" if lost else "no aggregator at %s (%s), dialling"
                log.info(f"{what} for %.0f s", self._address, reason, left)
            elif gone_s >= next_notice:
                next_notice = 2 * gone_s
                log.info("no aggregator at %s, still trying, %.0f s", self._address, gone_s)
            backoff = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2**attempt)
            attempt = min(attempt + 1, 16)
            await asyncio.sleep(min(left, backoff * random.uniform(0.5, 1.0)))

    async def _hold(self) -> tuple[bool, bool]:
        """Connect, and hold one stream until it ends; return (whether we were admitted, whether the run is over).

        Raises
        ------
        RefusedError, DataError
            If the aggregator does not admit us.
        grpc.RpcError, ConnectionError, TimeoutError, WireError
            If there is no aggregator, it does not answer, or it sends an invalid frame.
        """
        await self._up.free()  # the bandwidth limit must not delay a Hello
        self._shown = self._show()
        async with dial.channel(self._address, self._shown, self._options) as channel:

            async def write(frame: bytes) -> None:
                await self._up.free()
                self._up.charge(len(frame))
                await call.write(frame)

            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=dial.metadata(self._shown))
            tasks: list[asyncio.Task[Any]] = []
            try:
                async with asyncio.timeout(WELCOME_TIMEOUT_S):  # includes writing, which blocks on a dead connection
                    await write(self._introduction())
                    data = await self._next(call)
                first = _first(data)
                if first.WhichOneof("part") == "refused":
                    raise _refused(self._address, first.refused)
                if first.WhichOneof("part") != "welcome":
                    raise WireError(Refusal.GARBAGE, "the first part was no Welcome")
                welcome = first.welcome
                if self.incarnation != welcome.incarnation:
                    self._books.clear()  # they belonged to another aggregator
                self._outbox, self.incarnation, self._run_name = Outbox(HEARTBEAT), welcome.incarnation, welcome.run
                self.events.put(Joined(welcome.run, welcome.incarnation, welcome.experiment))
                log.info("joined run %s at %s", welcome.run, self._address)
                reader = asyncio.create_task(self._read(call))
                tasks += [reader, asyncio.create_task(self._outbox.drain(write))]
                changed = asyncio.create_task(self._changed())
                tasks.append(changed)
                await asyncio.wait((reader, changed), return_when=asyncio.FIRST_COMPLETED)
                if changed.done() and (not reader.done() or reader.exception() is not None):
                    return True, False
                return True, reader.result()
            except grpc.aio.AioRpcError as error:
                raise self._failed(error.code(), error.details(), error.trailing_metadata()) or error from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                call.cancel()

    def _show(self) -> ClientCredentials:
        """Return our credentials; if our certificate has expired, raise _Distrust, which may be retried."""
        try:
            return self._credentials.show(split_address(self._address, what="the aggregator", lowest=1)[0])
        except RefusedError as error:
            raise _Distrust(str(error), error, certain=True) from None

    async def _changed(self) -> None:
        """Return when our credentials have changed, which requires a new channel; conversations continue on it."""
        while await asyncio.to_thread(lambda: self._credentials.current) == self._shown:
            await asyncio.sleep(CHANGED_S)
        log.info("reconnecting with the current content of the files")

    def _failed(self, code: grpc.StatusCode, details: str | None, told: Iterable[tuple[str, Any]]) -> Exception | None:
        """Return the error for a call that failed because one side rejected the other, or that can be retried later.

        Return None for any other failure.
        """
        if code in REFUSALS:
            words = described(code, details)
            refused = RefusedError(f"{self._address} refused the stream: {words}", hint=hint(code))
            unknown = code is grpc.StatusCode.UNAUTHENTICATED and all(key != FINAL for key, _ in told)
            return _Distrust(words, refused, certain=True) if unknown and self.incarnation else refused
        if code in RETRYABLE:
            return _LaterError(described(code, details))
        certain = dial.distrust(self._address, self._shown, code, details)
        perhaps = None if self._outbox is not None else dial.closed_after_handshake(self._shown, code, details)
        if not (reason := certain or perhaps):
            plain = dial.perhaps_tls(self._shown, code, details)
            return None if plain is None else ConnectionError(plain)
        refused = RefusedError(f"the aggregator at {self._address}: {reason}", hint="see docs/security.md")
        return _Distrust(reason, refused, certain=certain is not None)

    async def _next(self, call: Any) -> bytes:
        async with asyncio.timeout(stream.SILENCE_S):
            data = await call.read()
        self._down.charge(len(data))
        if data is grpc.aio.EOF:
            code = await call.code()
            details = await call.details()
            told = await call.trailing_metadata()
            raise self._failed(code, details, told or ()) or ConnectionError(described(code, details))
        return bytes(data)

    async def _read(self, call: Any) -> bool:
        """Read frames until the stream ends; return whether the run is over."""
        arrivals: dict[int, _Request] = {}
        while True:
            await self._down.free()
            for kind, part in read(wire.AggregatorFrame, await self._next(call)):
                match kind:
                    case "begin":
                        arrivals[part.transfer] = self._begin(part)
                    case "chunk":
                        request = _arrival(arrivals, part.transfer)
                        if request.assembler is not None:
                            request.assembler.add(part)
                    case "end":
                        request = _arrival(arrivals, part.transfer)
                        if request.assembler is not None:
                            request.assembler.end()
                        del arrivals[part.transfer]
                        self._received(request)
                    case "again":
                        self._again(part)
                    case "close":
                        key = key_from_wire(part.conversation)
                        self._books.pop(key, None)
                        self.closed.add(key)
                        self.events.put(_Close(key))
                    case "transfer_refused":
                        log.warning("the aggregator refused a reply: %s", printable(part.reason, REASON_CHARACTERS))
                    case "refused":
                        raise _refused(self._address, part)
                    case "goodbye":
                        return True
                    case "heartbeat":
                        continue
                    case other:
                        raise WireError(Refusal.GARBAGE, f"a {other} in the middle of a stream")

    def _begin(self, begin: wire.Begin) -> _Request:
        envelope = begin.envelope
        if len(envelope.rows) != len(envelope.clients):
            raise WireError(Refusal.CLIENT, f"{len(envelope.rows)} rows and {len(envelope.clients)} clients")
        if envelope.states and len(envelope.states) != len(envelope.rows):
            raise WireError(Refusal.CLIENT, f"{len(envelope.rows)} rows and {len(envelope.states)} client states")
        fits = begin.total_bytes <= REQUEST_BYTES
        assembler = Assembler(begin, read_specs(envelope), REQUEST_BYTES) if fits else None
        expires = time.monotonic() + begin.remaining_s if begin.HasField("remaining_s") else None
        key = key_from_wire(envelope.conversation)
        return _Request(envelope.incarnation, key, envelope, assembler, expires)


class _Distrust(ConnectionError):
    """One side could not verify the other; ``refused`` ends the worker if that persists."""

    def __init__(self, reason: str, refused: RefusedError, *, certain: bool) -> None:
        super().__init__(reason)
        self.refused = refused
        self.certain = certain


def _arrival(arrivals: dict[int, _Request], number: int) -> _Request:
    if number not in arrivals:
        raise WireError(Refusal.UNKNOWN_TRANSFER, f"transfer {number}")
    return arrivals[number]


def _first(data: bytes) -> wire.AggregatorPart:
    """Return the first part of a stream; of protocol 1, which has no seals, only a refusal is read."""
    if data[-SEAL_BYTES : 1 - SEAL_BYTES] != SEAL:
        with contextlib.suppress(WireError):
            part = parse(wire.AggregatorFrame, data, seal=False).parts[0]
            if part.refused.code == wire.REFUSAL_CODE_PROTOCOL:
                return part
    return parse(wire.AggregatorFrame, data).parts[0]


def _refused(address: str, refused: wire.Refused) -> FedloomError:
    hints = {
        wire.REFUSAL_CODE_PROTOCOL: "install the same version of fedloom on both sides",
        wire.REFUSAL_CODE_PACKAGE: "install the same version of fedloom on both sides",
        wire.REFUSAL_CODE_ALGORITHM: "install the same version of the algorithm's package on both sides",
        wire.REFUSAL_CODE_REPLACED: f"give every worker a name of its own with {argument('name')}",
    }
    reason = printable(refused.reason, REASON_CHARACTERS)
    if refused.code == wire.REFUSAL_CODE_CLIENTS:
        return DataError(
            f"the aggregator at {address} refused: {reason}",
            hint="make the partition with the aggregator's experiment file: fedloom partition EXPERIMENT",
        )
    return RefusedError(f"the aggregator at {address} refused: {reason}", hint=hints.get(refused.code))


def _is_cut_short(error: Exception) -> bool:
    """Return whether a call ended while we were writing, in which case gRPC does not always report its status."""
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.INTERNAL


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        log.debug("gRPC says: %s %s", error.code().name, error.details())
        return described(error.code(), error.details())
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) or type(error).__name__
