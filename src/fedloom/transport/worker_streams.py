"""Workers' streams on the aggregator's side: admission of a worker by its Hello, and its stream to the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import grpc

from fedloom.core.words import first_of, pluralize, printable
from fedloom.data.manifest import CLIENT_ID
from fedloom.errors import ExperimentError
from fedloom.federation.roster import Member
from fedloom.security.access import Action, Denied, Identity
from fedloom.transport import stream, versions
from fedloom.transport.dispatcher import Dispatcher
from fedloom.transport.exchanges import Clients, Link, ServedRun, WorkerInfo
from fedloom.transport.frames import FRAME_BYTES, Refusal, WireError, parse_frame, seal_frame, serialize
from fedloom.transport.gate import PEER, Peer
from fedloom.transport.limits import TokenBucket
from fedloom.transport.versions import NotAdmitted
from fedloom.transport.wire import federation_pb2 as wire

NAME_CHARACTERS = 200
MOST_EXAMPLES = 10**9  # per client and split

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
    Refusal.DECLINED: grpc.StatusCode.ABORTED,
}
"""gRPC status that ends a stream, by refusal; INVALID_ARGUMENT for any other refusal."""


class Admission:
    """Rules by which workers may join a run. Belongs to the event loop's thread."""

    def __init__(self, run: ServedRun, clients: dict[str, int], dispatcher: Dispatcher) -> None:
        self._run = run
        self._clients = clients
        self._roster = frozenset(run.roster)
        self._dispatcher = dispatcher

    def authorize(self, peer: Peer, hello: wire.Hello) -> None:
        """Raise Denied if a peer may not act as this worker."""
        identity, kind, reason = peer.identity, "clients", ""
        if foreign := identity.foreign(hello.clients):
            reason = f"may not act for {_some(foreign)}"
        elif not identity.may(Action.TRAIN) and (training := self._training(hello)):
            reason = f"is an observer, and may not act for clients that train: {_some(training)}"
        elif excess := self._excess_clients(identity, hello):
            reason = excess
        elif self._dispatcher.taken(hello.worker, hello.incarnation, identity.name):
            kind, reason = "name", f"may not use the worker name {hello.worker!r}, which belongs to another identity"
        if reason:
            peer.refuse(kind, reason)
            raise Denied(f"{identity.name} {reason}", identity)

    def link(self, hello: wire.Hello, protocol: int, identity: Identity | None) -> Link:
        """Return the link of an admitted worker, with which this protocol was agreed.

        Names and clients may have been taken while the Welcome was written, and are checked again.

        Raise WireError if its name, or one of its clients with data of their own, is taken now. Raise Denied if its
        identity has announced too many clients now.
        """
        clients: Collection[str] = frozenset(hello.clients)
        if self._run.presence is None:
            clients = Clients(self._clients, hello.clients)
        elif self._dispatcher.claimed(hello.worker, hello.clients) is not None:
            raise WireError(Refusal.NAME, "another worker has announced one of its clients")
        elif identity is not None and (reason := self._excess_clients(identity, hello)):
            raise Denied(f"{identity.name} {reason}", identity)
        owner = None if identity is None else identity.name
        if self._dispatcher.taken(hello.worker, hello.incarnation, owner):
            raise WireError(Refusal.NAME, f"worker {hello.worker}")
        members = () if self._run.presence is None else _members(hello)
        device, package = printable(hello.device, NAME_CHARACTERS), printable(hello.package, NAME_CHARACTERS)
        worker = WorkerInfo(hello.worker, hello.incarnation, clients, device, members, package)
        return Link(worker, owner=owner, protocol=protocol)

    def forget(self, link: Link) -> None:
        """Remove the clients of a worker whose member has declined from an open federation, without waiting."""
        if self._run.presence is not None:
            self._run.presence.forget(member.id for member in link.worker.members)

    def _excess_clients(self, identity: Identity, hello: wire.Hello) -> str:
        """Return why an identity announces too many clients with data of their own; empty if it does not."""
        if self._run.presence is None or identity.max_clients is None:
            return ""
        others = self._dispatcher.announced(identity.name, hello.worker)
        if others + len(hello.clients) <= identity.max_clients:
            return ""
        elsewhere = f", and {others} through other workers" if others else ""
        return (
            f"may announce {pluralize(identity.max_clients, 'client')} at a time, and announces "
            f"{len(hello.clients)}{elsewhere}: raise its max_clients in the identity file"
        )

    def _training(self, hello: wire.Hello) -> list[str]:
        """Return the worker's clients that train, sorted; all of them if their announcements are missing."""
        if self._run.presence is None:
            return sorted(self._roster.intersection(hello.clients))
        if len(hello.announced) != len(hello.clients):
            return sorted(hello.clients)
        announcements = zip(hello.clients, hello.announced, strict=True)
        return sorted(client for client, announcement in announcements if not announcement.observer)

    def judge(self, hello: wire.Hello) -> int:
        """Return the protocol for a worker's stream; raise NotAdmitted if the worker cannot join."""
        try:
            protocol = versions.negotiate(hello, self._run.algorithm, self._run.version)
        except NotAdmitted as refusal:
            if refusal.too_new:
                self._dispatcher.note_too_new(printable(hello.worker, NAME_CHARACTERS), str(refusal))
            raise
        names = hello.worker, hello.incarnation
        if not all(0 < len(name) <= NAME_CHARACTERS for name in names):
            raise NotAdmitted(f"worker and incarnation must have 1 to {NAME_CHARACTERS} characters")
        if not all(name.isprintable() for name in names):
            raise NotAdmitted("worker and incarnation must consist of characters that print")
        if self._run.presence is not None:
            self._judge_members(hello)
        elif (stranger := next((client for client in hello.clients if client not in self._clients), None)) is not None:
            name = printable(stranger, NAME_CHARACTERS)
            reason = f"the run has no client {name}: the worker has another partition"
            raise NotAdmitted(reason, wire.REFUSAL_CODE_CLIENTS)
        return protocol

    def _judge_members(self, hello: wire.Hello) -> None:
        """Raise NotAdmitted if clients with their own data cannot be admitted."""
        code = wire.REFUSAL_CODE_CLIENTS
        if not hello.clients or len(hello.announced) != len(hello.clients):
            raise NotAdmitted("this federation's clients have their own data: start `fedloom worker --data DIR`", code)
        for client, examples in zip(hello.clients, hello.announced, strict=True):
            sizes, counts = (examples.train, examples.validation, examples.test), examples.class_counts
            if not CLIENT_ID.fullmatch(client):
                raise NotAdmitted("a client's id must have letters, digits, '.', '_' and '-', at most 128", code)
            if not all(0 < size <= MOST_EXAMPLES for size in sizes):
                reason = f"client {client} has splits of {sizes} examples; each must have 1 to {MOST_EXAMPLES:,}"
                raise NotAdmitted(reason, code)
            if counts and (len(counts) != self._run.classes or sum(counts) != examples.train):
                numbers = f"{self._run.classes} numbers that sum to {examples.train}"
                raise NotAdmitted(f"client {client}: class counts must be {numbers}", code)
        if len(set(hello.clients)) != len(hello.clients):
            raise NotAdmitted("a client is listed twice", code)
        if (other := self._dispatcher.claimed(hello.worker, hello.clients)) is not None:
            raise NotAdmitted(f"client {other} is served by another worker", wire.REFUSAL_CODE_CLIENT_TAKEN)


def _members(hello: wire.Hello) -> tuple[Member, ...]:
    return tuple(
        Member(client, each.train, each.validation, each.test, each.labelled, each.observer, tuple(each.class_counts))
        for client, each in zip(hello.clients, hello.announced, strict=True)
    )


def _some(clients: Collection[str]) -> str:
    return first_of([printable(client, NAME_CHARACTERS) for client in clients], 3)


@dataclass
class ByteCount:
    """Bytes of serialized frames: ``up`` from workers, ``down`` to them."""

    up: int = 0
    down: int = 0


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
        frames: dict[int, bytes] = {}
        for protocol in range(versions.OLDEST, versions.PROTOCOL + 1):
            welcome = wire.Welcome(run=run.name, incarnation=run.incarnation, experiment=run.experiment)
            welcome.protocol = protocol
            frame = frames[protocol] = _frame(wire.AggregatorPart(welcome=welcome))
            if len(frame) > FRAME_BYTES:
                size = f"{len(frame)} bytes on the wire, and at most {FRAME_BYTES} are allowed"
                raise ExperimentError(f"the experiment as JSON takes {size}")
        self._welcomes, self._incarnation = frames, run.incarnation

    async def join(self, _: Any, context: Any) -> None:
        """Handle one worker's stream, from its Hello to its end."""
        peer = PEER.get()
        try:
            hello, protocol, welcome = await self._greet(peer, context)
            if welcome is not self._welcomes[protocol]:  # another incarnation by now: the worker must reconnect
                return
            link = self._admission.link(hello, protocol, None if peer is None else peer.identity)
        except EOFError:  # the peer has sent nothing
            return
        except NotAdmitted as refusal:
            self._dispatcher.refusals.count(Refusal.HELLO)
            log.warning("refused a worker (%s): %s", context.peer(), refusal)
            if peer is not None:
                peer.refuse("hello", str(refusal))
            await self._write(context, _frame(wire.AggregatorPart(refused=refusal.part)))
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
            is_ours = hello.held_of == self._incarnation
            self._dispatcher.enter(
                link, hello.held if is_ours else (), hello.partial if is_ours and link.protocol >= 10 else ()
            )
            self._on_entered(link.name)
            await self._hold(link, context)

    async def _greet(self, peer: Peer | None, context: Any) -> tuple[wire.Hello, int, bytes]:
        """Read the Hello and answer with Welcome; return the Hello, the protocol that both sides use, and the Welcome.

        Raise NotAdmitted if the worker cannot join, EOFError if it has sent nothing, and WireError if it must
        reconnect: its Hello arrived damaged, its name is taken, or too many workers join at once. Raise Denied if the
        sender may not act for these clients, or may not use this worker name.
        """
        try:
            hello = await self._read_hello(context)
        except TimeoutError:
            raise NotAdmitted(f"no Hello within {HELLO_TIMEOUT_S:g} s") from None
        except WireError as error:
            if error.refusal in STATUS:
                raise
            raise NotAdmitted(str(error)) from None
        if peer is not None:
            self._admission.authorize(peer, hello)
        protocol = self._admission.judge(hello)
        if peer is not None:
            peer.join(worker=hello.worker, incarnation=hello.incarnation, clients=len(hello.clients))
        elif self._dispatcher.taken(hello.worker, hello.incarnation, None):
            raise WireError(Refusal.NAME, f"worker {hello.worker}")
        welcome = self._welcomes[protocol]
        await self._write(context, welcome)
        return hello, protocol, welcome

    async def _read_hello(self, context: Any) -> wire.Hello:
        data = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
        if data is grpc.aio.EOF:
            raise EOFError
        self._traffic.up += len(data)
        if not self._joins.spend(1 + len(data) / HELLO_BYTES):
            raise WireError(Refusal.JOINS, "retry later")
        hello: wire.Hello = parse_frame(wire.WorkerFrame, data).parts[0].hello  # empty, and refused, for another part
        return hello

    async def _hold(self, link: Link, context: Any) -> None:
        async def write(frame: bytes) -> None:
            await self._write(context, frame)
            if frame is not link.outbox.heartbeat:
                link.sign_at = time.monotonic()

        reader = asyncio.create_task(self._read(link, context))
        writer = asyncio.create_task(link.outbox.drain(write))
        end = asyncio.create_task(link.ended.wait())
        try:
            await asyncio.wait((reader, writer, end), return_when=asyncio.FIRST_COMPLETED)
            error = link.fault
            if reader.done() and isinstance(fault := reader.exception(), WireError):
                error = fault
            if error is not None:
                self._dispatcher.refusals.count(error.refusal)
                log.warning("ended the stream of worker %s: %s", link.name, error, extra={"worker": link.name})
                self._dispatcher.leave(link)  # now: a worker that does not read does not read its status either
                if link.declined is not None:
                    self._admission.forget(link)
                await context.abort(STATUS.get(error.refusal, grpc.StatusCode.INVALID_ARGUMENT), str(error))
        finally:
            self._dispatcher.leave(link)
            for task in (reader, writer, end):
                task.cancel()
            await asyncio.gather(reader, writer, end, return_exceptions=True)

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
