"""Workers' streams on the aggregator's side: from a worker's Hello to the end of its stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from fedloom.errors import ExperimentError
from fedloom.security.access import Denied
from fedloom.transport import stream
from fedloom.transport.admission import Admission, parse_hello, refusal_part
from fedloom.transport.dispatcher import Dispatcher
from fedloom.transport.exchanges import Link
from fedloom.transport.frames import FRAME_BYTES, Refusal, WireError, seal_frame, serialize
from fedloom.transport.gate import PEER, Peer
from fedloom.transport.limits import TokenBucket
from fedloom.transport.served_run import ServedRun
from fedloom.transport.wire import federation_pb2 as wire

log = logging.getLogger("fedloom.transport.aggregator")

HELLO_TIMEOUT_S = 10.0
HELLO_BYTES = 10_000  # a Hello of this size costs as much as one more Hello
JOINS = 1_000, 200  # Hellos at once, and further ones per second
STATUS = {
    Refusal.CHECKSUM: grpc.StatusCode.DATA_LOSS,
    Refusal.FLOOD: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.UNREAD: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.NAME: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.JOINS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.SILENT: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC status that ends a stream, by refusal; INVALID_ARGUMENT for any other refusal."""


@dataclass
class ByteCount:
    """Bytes of serialized frames: ``up`` from workers, ``down`` to them."""

    up: int = 0
    down: int = 0


class _NotAdmitted(Exception):
    """The worker was refused with a reason, or sent nothing."""


class WorkerStreams:
    """Serves the streams of workers; calls ``on_entered`` with the name of each worker that has joined.

    Belongs to the event loop's thread.
    """

    def __init__(
        self,
        run: ServedRun,
        admission: Admission,
        dispatcher: Dispatcher,
        traffic: ByteCount,
        on_entered: Callable[[str], None],
    ) -> None:
        self._admission = admission
        self._dispatcher = dispatcher
        self._traffic = traffic
        self._on_entered = on_entered
        self._joins = TokenBucket(*JOINS)
        self.change(run)

    def change(self, run: ServedRun) -> None:
        """Switch to this incarnation of the run for workers that join.

        Raise ExperimentError if the Welcome does not fit into a frame.
        """
        welcome = wire.Welcome(run=run.name, incarnation=run.incarnation, experiment=run.experiment)
        frame = _frame(wire.AggregatorPart(welcome=welcome))
        if len(frame) > FRAME_BYTES:
            raise ExperimentError(
                f"the experiment as JSON takes {len(frame)} bytes on the wire, and at most {FRAME_BYTES} are allowed"
            )
        self._welcome, self._incarnation = frame, run.incarnation

    async def join(self, _: Any, context: Any) -> None:
        """Handle one worker's stream, from its Hello to its end."""
        peer = PEER.get()
        try:
            hello, welcome = await self._greet(peer, context)
            if welcome is not self._welcome:  # the incarnation has changed meanwhile: the worker must reconnect
                return
            link = self._admission.link(hello, None if peer is None else peer.identity)
        except _NotAdmitted:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused; the previous frame gives the reason")
        except WireError as error:
            self._dispatcher.refusals.count(error.refusal)
            log.warning("ended the stream of %s: %s", context.peer(), error)
            await context.abort(STATUS[error.refusal], str(error))
        except Denied as denied:
            self._dispatcher.refusals.count(Refusal.HELLO)
            log.warning("refused a worker (%s): %s", context.peer(), denied)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(denied))
        else:
            self._dispatcher.enter(link, hello.held if hello.held_of == self._incarnation else ())
            self._on_entered(link.name)
            await self._hold(link, context)

    async def _greet(self, peer: Peer | None, context: Any) -> tuple[wire.Hello, bytes]:
        """Read the Hello and answer with Welcome, returning both.

        Raise _NotAdmitted if the worker was refused, or sent nothing. Raise WireError if it must reconnect: its Hello
        arrived damaged, its name is taken, or too many workers join at once. Raise Denied if the sender may not act
        for these clients, or may not use this worker name.
        """
        try:
            hello = await self._read_hello(context)
        except TimeoutError:
            await self._refuse(peer, context, f"no Hello within {HELLO_TIMEOUT_S:g} s")
        except WireError as error:
            if error.refusal in STATUS:
                raise
            await self._refuse(peer, context, str(error))
        if peer is not None:
            self._admission.authorize(peer, hello)
        if (found := self._admission.judge(hello)) is not None:
            await self._refuse(peer, context, found.reason, found.code)
        if peer is not None:
            peer.join(worker=hello.worker, incarnation=hello.incarnation, clients=len(hello.clients))
        elif self._dispatcher.taken(hello.worker, hello.incarnation, None):
            raise WireError(Refusal.NAME, f"worker {hello.worker}")
        welcome = self._welcome
        await self._write(context, welcome)
        return hello, welcome

    async def _read_hello(self, context: Any) -> wire.Hello:
        data = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
        if data is grpc.aio.EOF:
            raise _NotAdmitted
        self._traffic.up += len(data)
        if not self._joins.spend(1 + len(data) / HELLO_BYTES):
            raise WireError(Refusal.JOINS, "retry later")
        return parse_hello(data)

    async def _refuse(
        self, peer: Peer | None, context: Any, reason: str, code: wire.RefusalCode = wire.REFUSAL_CODE_HELLO
    ) -> NoReturn:
        """Send a worker the reason why it cannot join, and raise _NotAdmitted."""
        self._dispatcher.refusals.count(Refusal.HELLO)
        log.warning("refused a worker (%s): %s", context.peer(), reason)
        if peer is not None:
            peer.refuse("hello", reason)
        await self._write(context, _frame(wire.AggregatorPart(refused=refusal_part(code, reason))))
        raise _NotAdmitted

    async def _hold(self, link: Link, context: Any) -> None:
        async def write(frame: bytes) -> None:
            await self._write(context, frame)
            if frame is not link.outbox.heartbeat:
                link.sign_at = time.monotonic()

        reader = asyncio.create_task(self._read(link, context))
        writer = asyncio.create_task(link.outbox.drain(write))
        ended = asyncio.create_task(link.ended.wait())
        try:
            await asyncio.wait((reader, writer, ended), return_when=asyncio.FIRST_COMPLETED)
            error = link.fault
            if reader.done() and isinstance(found := reader.exception(), WireError):
                error = found
            if error is not None:
                self._dispatcher.refusals.count(error.refusal)
                log.warning("ended the stream of worker %s: %s", link.name, error, extra={"worker": link.name})
                self._dispatcher.leave(link)  # now: a worker that does not read does not read its status either
                await context.abort(STATUS.get(error.refusal, grpc.StatusCode.INVALID_ARGUMENT), str(error))
        finally:
            self._dispatcher.leave(link)
            for task in (reader, writer, ended):
                task.cancel()
            await asyncio.gather(reader, writer, ended, return_exceptions=True)

    async def _read(self, link: Link, context: Any) -> None:
        """Read a worker's frames until its stream ends.

        Raise WireError if data is not a valid frame, or nothing arrives for ``stream.SILENCE_S``.
        """
        while True:
            try:
                async with asyncio.timeout(stream.SILENCE_S):
                    data = await context.read()
            except TimeoutError:
                raise WireError(Refusal.SILENT, f"no data for {stream.SILENCE_S:g} s") from None
            if data is grpc.aio.EOF:
                return
            self._traffic.up += len(data)
            self._dispatcher.receiver.take(link, data)

    async def _write(self, context: Any, frame: bytes) -> None:
        self._traffic.down += len(frame)
        await context.write(frame)


def _frame(part: wire.AggregatorPart) -> bytes:
    return seal_frame(serialize(part))
