"""Connection of a worker to the aggregator, kept open in its own thread and turned into events."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc

from fedloom.core.words import REASON_CHARACTERS, printable
from fedloom.errors import FedloomError, RefusedError
from fedloom.federation.standing import Standing
from fedloom.federation.transport import ConversationKey, Gate, Lost
from fedloom.federation.worker_record import WorkerRecord
from fedloom.messages import Message
from fedloom.security.options import Credentials
from fedloom.transport import dial, stream
from fedloom.transport.absence import DISCONNECTED, Absence
from fedloom.transport.codec import encode
from fedloom.transport.dial import CHANNEL_OPTIONS, FINAL, LIMITED, REFUSALS, RETRYABLE, connection_failure, hint
from fedloom.transport.frame_meter import FrameMeter
from fedloom.transport.frames import FRAME_BYTES, Refusal, WireError, read_parts, seal_frame, serialize
from fedloom.transport.limits import Bandwidth, BandwidthLimiter
from fedloom.transport.stream import (
    METHOD,
    SERVICE,
    Introduction,
    Joined,
    key_from_wire,
    parse_welcome,
    refusal_error,
)
from fedloom.transport.versions import FIXED, SPOKEN, PredecessorError, UpgradeAwaitedError
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.transport.worker_requests import AnswerBook, RequestReader, WorkerRequest

log = logging.getLogger("fedloom.transport.worker")

WELCOME_TIMEOUT_S = 30.0  # from connecting to the Welcome
CERTAIN = 3  # consecutive failed verifications that count as final: a transmission error can break a handshake, too
LEAVE_S = 5.0  # how long we wait for an aggregator to end the stream that we leave
DECLINED_S = 0.1  # how often a member's conditions are checked
CHANGED_S = 1.0  # how often certificate and token files are checked for changes
UPGRADE_S = 30.0  # how long a worker that is too new waits before it asks again
GATHER_S = 0.01  # how long an answer waits to be sent with others while the next is computed


@dataclass(frozen=True)
class Close:
    """End of a conversation, announced by the aggregator."""

    key: ConversationKey


class Finished:
    """End of the run, announced by the aggregator."""


class _RetryLaterError(ConnectionError):
    """The aggregator is reachable but asks us to reconnect later."""


class _VerificationError(ConnectionError):
    """Failure of one side to verify the other; ``refused`` ends the worker if it persists."""

    def __init__(self, reason: str, error: RefusedError, *, certain: bool) -> None:
        super().__init__(reason)
        self.refused = error
        self.certain = certain


class WorkerConnection:
    """Stream to the aggregator, kept open in its own thread and turned into events."""

    def __init__(
        self,
        address: str,
        introduction: Introduction,
        reconnect_s: float,
        credentials: Credentials,
        bandwidth: Bandwidth | None,
        gate: Gate | None,
        record: WorkerRecord,
        health: str | None,
    ) -> None:
        self.events: SimpleQueue[Joined | WorkerRequest | Close | Finished | BaseException] = SimpleQueue()
        """Events for the session's thread; an error ends the worker."""
        self.closed: set[ConversationKey] = set()
        """Conversations closed by the aggregator, not yet by the session."""
        self._address = address
        self._reconnect_s = reconnect_s
        self._credentials = credentials
        self.record = record
        self._health = health
        self._connection: dial.ServerConnection | None = None  # the last one that we have tried
        self._up = BandwidthLimiter(bandwidth and bandwidth.up)
        self._down = BandwidthLimiter(bandwidth and bandwidth.down)
        self._options = CHANNEL_OPTIONS if bandwidth is None else (*CHANNEL_OPTIONS, *LIMITED)
        self._failed_verifications = 0  # consecutive
        self._refused: RefusedError | None = None  # refusal by the last aggregator reached
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._gate = gate
        self._declined: str | None = None  # reason to leave the aggregator that has admitted us
        self._book = AnswerBook(gate)
        self._requests = RequestReader(gate)
        self._gathering = False  # the loop will send the answers that are ready
        self._thread = threading.Thread(target=self._run, name="worker-stream", daemon=True)
        self._introduction = introduction
        self._spoken = SPOKEN  # protocols that the next Hello names
        self._awaited = ""  # why the aggregator must be upgraded, as last logged
        size = len(self._hello())
        if size > FRAME_BYTES:
            raise RefusedError(
                f"worker {introduction.worker}: introducing {len(introduction.clients)} clients takes "
                f"{size} bytes; at most {FRAME_BYTES} fit into one frame",
                hint="let several workers serve fewer clients each",
            )

    # ---- used by the session's thread

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Disconnect, and wait until the thread has ended."""
        if self._loop is not None and self._task is not None:
            try:
                self._loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:
                log.debug("the stream's event loop had ended already")
        self._thread.join()

    @property
    def incarnation(self) -> str:
        """Id of the aggregator process that admitted us last; empty before the first."""
        return self._book.incarnation

    def is_over(self, request: WorkerRequest) -> bool:
        """Return whether a request's deadline has passed or its conversation is closed."""
        return request.expired or request.key in self.closed

    def reply(self, request: WorkerRequest, row: int, client: str, answer: Message | Lost) -> None:
        """Send one row's answer.

        Waking the stream's thread costs as much as a small answer, so answers of the next ``GATHER_S`` are sent
        together; :meth:`flush` sends all that are ready.
        """
        self._book.ready.append((request, row, client, answer if isinstance(answer, Lost) else encode(answer)))
        if isinstance(answer, Lost):
            self.record.lost(client, answer.reason)
        if not self._gathering:
            self._gathering = True
            self._post(self._gather)

    def flush(self) -> None:
        """Send the answers that are ready now."""
        if self._book.ready:
            self._post(self._send_ready)

    def decline(self, reason: str) -> None:
        """Leave the aggregator, and connect again once the member's gate is open."""
        self._declined = reason

    def too_late(self, request: WorkerRequest) -> None:
        """Report that we have dropped an obsolete request."""
        self._post(self._book.send_too_late, request)

    def missing(self, request: WorkerRequest, rows: Iterable[int]) -> None:
        """Report that this worker has no conversation for these rows."""
        self._post(self._book.send_lacking, request, list(rows))

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("an answer came after the stream's event loop had ended")

    # ---- the event loop's thread

    def _hello(self) -> bytes:
        """Return the Hello: our identity, and what we have received of the open conversations."""
        hello = self._introduction.hello(self._spoken)
        alone = seal_frame(serialize(wire.WorkerPart(hello=hello)))
        received = wire.Hello(held_of=self.incarnation, held=self._book.held(), partial=self._requests.partials())
        hello.MergeFrom(received)
        data = seal_frame(serialize(wire.WorkerPart(hello=hello)))
        return alone if len(data) > FRAME_BYTES else data  # too long: the conversations are sent again instead

    def _gather(self) -> None:
        assert self._loop is not None
        self._loop.call_later(GATHER_S, self._send_ready)

    def _send_ready(self) -> None:
        self._gathering = False  # before they are taken: an answer that is added meanwhile is sent now or next time
        self._book.send_ready()

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
        if self._health is not None:
            from fedloom.transport.server import Health, Probes  # slow to import

            probes = Probes.start(self._health, Health(ready=lambda: self._book.outbox is not None))
        try:
            self.events.put(await self._connect_until_over())
        finally:
            if self._health is not None:
                await probes.stop()

    async def _connect_until_over(self) -> Finished | FedloomError:
        """Open one stream after another; return the end of the run, or the error that ends the worker."""
        absence = Absence(self._address, self._reconnect_s)
        while True:
            if self._gate is not None and await self._opened(self._gate):
                absence = Absence(self._address, self._reconnect_s)
            if self._gate is not None and self._gate.ended is not None:
                return self._gate.ended
            self._spoken = SPOKEN
            is_over = await self._hold_once(absence)
            if isinstance(is_over, Finished | FedloomError):
                return is_over
            if is_over is None:
                absence = Absence(self._address, self._reconnect_s)
                continue
            was_up, self._book.outbox = self._book.outbox is not None, None
            if was_up:
                absence = Absence(self._address, self._reconnect_s)
            if absence.left_s <= 0:
                return self._refused or absence.error(is_over)
            self.record.disconnected(is_over)
            absence.log(is_over, was_up=was_up)
            await asyncio.sleep(absence.backoff_s())

    async def _opened(self, gate: Gate) -> bool:
        """Wait until the worker may be connected, or must end; return whether that took time."""
        logged = ""
        while gate.ended is None and (reason := await asyncio.to_thread(gate.closed)) is not None:
            if reason != logged:
                self.record.disconnected(reason, allowed=False)
                log.info("not connected: %s", reason, extra=DISCONNECTED)
                logged = reason
            await asyncio.sleep(CHANGED_S)
        return bool(logged)

    async def _hold_once(self, absence: Absence) -> Finished | FedloomError | str | None:
        """Serve one stream; return the end of the run, the error that ends the worker, or the reason to reconnect.

        Return None after waiting for the aggregator to be upgraded.
        """
        try:
            if await self._hold():
                return Finished()
            self._refused = None
            return "the stream ended"
        except _VerificationError as error:
            self._refused = error.refused if error.certain or not self.incarnation else None
            self._failed_verifications = self._failed_verifications + 1 if error.certain else 0
            return error.refused if self._failed_verifications >= CERTAIN and not self.incarnation else str(error)
        except FedloomError as error:
            has_changed = self._connection is not None and self._credentials.current != self._connection.shown
            if isinstance(error, RefusedError) and has_changed:
                return str(error)  # connect again with the current content of the files
            return error
        except PredecessorError:
            self._spoken = FIXED
            return await self._hold_once(absence)
        except UpgradeAwaitedError as error:
            if str(error) != self._awaited:
                text = "waiting for the aggregator at %s to be upgraded: %s"
                log.warning(text, self._address, error, extra=DISCONNECTED)
                self.record.disconnected(f"waiting for the aggregator to be upgraded: {error}")
            self._awaited = str(error)
            self._refused = None
            await asyncio.sleep(UPGRADE_S)
            return None
        except (grpc.RpcError, ConnectionError, TimeoutError, WireError) as error:
            if isinstance(error, _RetryLaterError):
                absence.last_seen = time.monotonic()
            if self._book.outbox is not None or not _is_cut_short(error):
                self._refused = None
            return _describe(error)

    async def _hold(self) -> bool:
        """Connect, and hold one stream until it ends; return whether the run is over.

        Raises
        ------
        RefusedError, DataError
            If the aggregator does not admit us.
        grpc.RpcError, ConnectionError, TimeoutError, WireError
            If there is no aggregator, it does not answer, or it sends an invalid frame.
        """
        self._declined = None
        await self._up.free()  # the bandwidth limit must not delay a Hello
        try:
            connection = self._connection = dial.ServerConnection(self._address, self._credentials, self._options)
        except RefusedError as error:  # our certificate has expired
            raise _VerificationError(str(error), error, certain=True) from None
        sent, self._received = FrameMeter(self.record, sending=True), FrameMeter(self.record, sending=False)
        async with connection.channel as channel:

            async def write(frame: bytes) -> None:
                if self._gate is not None and not self._gate.count(len(frame), sending=True):
                    return
                with sent.writing(frame):
                    await self._up.free()
                    self._up.charge(len(frame))
                    await call.write(frame)

            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=connection.metadata)
            tasks: list[asyncio.Task[Any]] = []
            try:
                async with asyncio.timeout(WELCOME_TIMEOUT_S):  # includes writing, which blocks on a dead connection
                    await write(self._hello())
                    data = await self._next(call)
                    joined = parse_welcome(self._address, data, self._spoken, self._introduction.algorithms)
                if joined.incarnation != self.incarnation:
                    self._requests.forget()
                outbox = self._book.open(joined)
                self.events.put(joined)
                self._awaited = ""
                self.record.joined(joined.run)
                text, event = "joined run %s at %s, protocol %d", {"data": {"event": "joined"}}
                log.info(text, joined.run, self._address, joined.protocol, extra=event)
                reader, watcher = (
                    asyncio.create_task(self._read(call)),
                    asyncio.create_task(self._changed(connection, joined.protocol)),
                )
                tasks += [reader, watcher, asyncio.create_task(outbox.drain(write))]
                await asyncio.wait((reader, watcher), return_when=asyncio.FIRST_COMPLETED)
                if watcher.done() and (not reader.done() or reader.exception() is not None):
                    if watcher.exception() is None and (reason := watcher.result()) is not None:
                        await self._decline(outbox, reader, reason)
                    return False
                return reader.result()
            except grpc.aio.AioRpcError as error:
                raise self._failed(error.code(), error.details(), error.trailing_metadata()) or error from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._requests.interrupt()
                call.cancel()

    async def _changed(self, connection: dial.ServerConnection, protocol: int) -> str | None:
        """Return once our credentials have changed, or the reason once the member's gate is closed.

        Tell the aggregator meanwhile what the member withholds. Conversations continue on a new channel.
        """
        told = ""
        while await asyncio.to_thread(lambda: self._credentials.current) == connection.shown:
            if self._gate is not None and (reason := self._declined or await asyncio.to_thread(self._gate.closed)):
                return reason
            if self._gate is not None and self._gate.withheld != told and protocol >= 10 and self._book.outbox:
                told = self._gate.withheld
                withheld = wire.Withheld(reason=printable(told, REASON_CHARACTERS))
                self._book.outbox.put_part(None, wire.WorkerPart(withheld=withheld))
            await asyncio.sleep(CHANGED_S if self._gate is None else DECLINED_S)
        log.info("reconnecting with the current content of the files")
        return None

    async def _decline(self, outbox: stream.Outbox, reader: asyncio.Task[bool], reason: str) -> None:
        """Tell the aggregator why we leave, in place of all that waits to be sent; it ends the stream."""
        log.info("leaving the aggregator at %s: %s", self._address, reason, extra=DISCONNECTED)
        self._book.forget()
        self._requests.forget()
        outbox.clear()
        declined = wire.Declined(reason=printable(reason, REASON_CHARACTERS))
        outbox.put_part(None, wire.WorkerPart(declined=declined))
        await asyncio.wait((reader,), timeout=LEAVE_S)

    def _failed(
        self, code: grpc.StatusCode, details: str | None, metadata: Iterable[tuple[str, Any]]
    ) -> Exception | None:
        """Return the error for a call that failed because one side rejected the other, or that can be retried later.

        Return None for any other failure.
        """
        if code in REFUSALS:
            words = connection_failure(code, details)
            error = RefusedError(f"{self._address} refused the stream: {words}", hint=hint(code))
            unknown = code is grpc.StatusCode.UNAUTHENTICATED and all(key != FINAL for key, _ in metadata)
            return _VerificationError(words, error, certain=True) if unknown and self.incarnation else error
        if code in RETRYABLE:
            return _RetryLaterError(connection_failure(code, details))
        connection = self._connection
        assert connection is not None
        certain = connection.distrust(code, details)
        perhaps = None if self._book.outbox is not None else connection.closed_after_handshake(code, details)
        if not (reason := certain or perhaps):
            plain = connection.perhaps_tls(code, details)
            return None if plain is None else ConnectionError(plain)
        error = RefusedError(f"the aggregator at {self._address}: {reason}", hint="see docs/security.md")
        return _VerificationError(reason, error, certain=certain is not None)

    async def _next(self, call: Any) -> bytes:
        async with asyncio.timeout(stream.SILENCE_S):
            data = await call.read()
        self._down.charge(len(data))
        if self._gate is not None:
            self._gate.count(len(data), sending=False)
        if data is grpc.aio.EOF:
            code, details, metadata = await call.code(), await call.details(), await call.trailing_metadata()
            raise self._failed(code, details, metadata or ()) or ConnectionError(connection_failure(code, details))
        self._received.count(data)
        return bytes(data)

    async def _read(self, call: Any) -> bool:
        """Read frames until the stream ends; return whether the run is over."""
        while True:
            await self._down.free()
            for kind, part in read_parts(wire.AggregatorFrame, await self._next(call)):
                if kind == "goodbye":
                    return True
                self._take(kind, part)

    def _take(self, kind: str, part: Any) -> None:
        match kind:
            case "begin":
                self._requests.begin(part)
            case "chunk":
                self._requests.add(part)
            case "end":
                request = self._requests.end(part.transfer)
                self._book.received(request)
                self.events.put(request)
            case "again":
                self._book.send_again(part)
            case "close":
                key = key_from_wire(part.conversation)
                self._book.close(key)
                self._requests.close(key)
                self.closed.add(key)
                self.events.put(Close(key))
            case "transfer_refused":
                log.warning("the aggregator refused a reply: %s", printable(part.reason, REASON_CHARACTERS))
            case "refused":
                raise refusal_error(self._address, part)
            case "standing":
                try:
                    standing = Standing.parse(part.standing)
                except ValueError as error:
                    raise WireError(Refusal.GARBAGE, "a standing that cannot be read") from error
                self.record.told(standing)
            case "heartbeat":
                pass
            case other:
                raise WireError(Refusal.GARBAGE, f"a {other} in the middle of a stream")


def _is_cut_short(error: Exception) -> bool:
    """Return whether a call ended while we were writing, in which case gRPC does not always report its status."""
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.INTERNAL


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        log.debug("gRPC reports: %s %s", error.code().name, error.details())
        return connection_failure(error.code(), error.details())
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) or type(error).__name__
