"""Shared parts of both ends of a stream: names, introductions, the outbox, and the reader of whole messages."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from fedloom.core.words import REASON_CHARACTERS, printable
from fedloom.errors import DataError, FedloomError, RefusedError, argument
from fedloom.federation.roster import Member
from fedloom.federation.states import Versions
from fedloom.federation.transport import ConversationKey
from fedloom.federation.validation import TensorSpec
from fedloom.messages import Message
from fedloom.runs.journal import Version
from fedloom.transport.codec import Assembler, Cutter, Encoded, read_specs
from fedloom.transport.frames import (
    Pieces,
    Refusal,
    WireError,
    pack_parts,
    parse_frame,
    read_parts,
    seal_frame,
    serialize,
)
from fedloom.transport.versions import SPOKEN, Protocols, chosen, remedy
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.transport.wire import personalization_pb2 as personalization

LAST_BACKOFF_S = 5.0  # the longest that a worker waits before it reconnects
HEARTBEAT_S = 15.0  # idle time after which a heartbeat is sent: proxies end idle streams
SILENCE_S = 90.0  # a stream without frames for this long is considered dead
HELD_CONVERSATIONS = 64  # maximum number reported on joining; few are open at one time
SERVICE = "fedloom.v1.Federation"
METHOD = "Join"
MODELS = "fedloom.v1.Personalization"
DESCRIBE = "Describe"
PERSONALIZE = "Personalize"
RETRY = "retry-after-ms"
"""Trailing metadata of a refusal: the delay before the next attempt, in ms."""

_AXES = 8  # maximum number of axes of a tensor


def key_to_wire(key: ConversationKey) -> wire.ConversationKey:
    """Convert a conversation key to its wire format."""
    return wire.ConversationKey(**vars(key))


def key_from_wire(key: wire.ConversationKey) -> ConversationKey:
    """Parse a conversation key."""
    return ConversationKey(key.round, key.attempt, key.conversation, key.purpose)


def states_to_wire(versions: Versions) -> wire.ClientState:
    """Convert the versions of a client's state to their wire format."""
    start = None if versions.start is None else wire.StateVersion(**vars(versions.start))
    versions_needed = [wire.StateVersion(**vars(version)) for version in sorted(versions.needed)]
    return wire.ClientState(start=start, needed=versions_needed, life=versions.life)


def states_from_wire(state: wire.ClientState) -> Versions:
    """Parse the versions of a client's state."""

    def read(version: wire.StateVersion) -> Version:
        return Version(version.round, version.attempt, version.conversation, version.row, version.life)

    start = read(state.start) if state.HasField("start") else None
    return Versions(start, frozenset(read(version) for version in state.needed), state.life)


class Outbox:
    """Queue of parts to write: in order within a lane (a conversation), round-robin between lanes.

    Belongs to one event loop. Parts are serialized when their turn comes, so that waiting costs no memory; small ones
    share a frame.

    Parameters
    ----------
    heartbeat
        Empty part, sent when there was nothing to send for :data:`HEARTBEAT_S`.
    """

    def __init__(self, heartbeat: Pieces) -> None:
        self.heartbeat = seal_frame(heartbeat)
        self._lanes: dict[Hashable, deque[Iterator[Pieces]]] = {}
        self._wake = asyncio.Event()
        self._closing = False

    def put(self, lane: Hashable, parts: Iterator[Pieces]) -> None:
        """Queue parts behind those of the same lane."""
        self._lanes.setdefault(lane, deque()).append(parts)
        self._wake.set()

    def put_part(self, lane: Hashable, part: wire.WorkerPart | wire.AggregatorPart) -> None:
        """Queue one part behind those of the same lane."""
        self.put(lane, iter((serialize(part),)))

    def drop(self, lane: Hashable) -> None:
        """Discard the transfers of a lane that have not begun; one that has begun is completed."""
        waiting = self._lanes.get(lane)
        while waiting is not None and len(waiting) > 1:
            waiting.pop()

    def clear(self) -> None:
        """Discard everything that waits, transfers that have begun included; the stream must end then."""
        self._lanes.clear()

    def waiting(self, lane: Hashable) -> int:
        """Return the number of transfers waiting in a lane."""
        return len(self._lanes.get(lane, ()))

    @property
    def lanes(self) -> int:
        """Number of lanes with waiting wire."""
        return len(self._lanes)

    def close(self) -> None:
        """Close the outbox: :meth:`drain` returns once everything queued is written."""
        self._closing = True
        self._wake.set()

    async def drain(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write frames of at most 1 MiB as parts arrive, until closed."""
        while True:
            self._wake.clear()  # before writing: parts may be put while the last frame is written
            for frame in pack_parts(iter(self._next, ())):
                await write(frame)
            if self._closing and not self._lanes:
                return
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                await write(self.heartbeat)

    def _next(self) -> Pieces:
        """Take the next part, from the lanes in turn; empty if nothing waits."""
        while self._lanes:
            lane, waiting = next(iter(self._lanes.items()))
            part = next(waiting[0], None)
            if part is not None:
                self._lanes[lane] = self._lanes.pop(lane)  # move to the end of the queue of lanes
                return part
            waiting.popleft()
            if not waiting:
                del self._lanes[lane]
        return ()


@dataclass(frozen=True)
class Introduction:
    """Introduction of a worker to the aggregator."""

    worker: str
    """Name, unique in the federation; a restarted worker returns under the same name."""
    clients: Sequence[str]
    """Ids of the clients that it may serve."""
    algorithms: Mapping[str, int]
    """Names and versions of its algorithms."""
    device: str = "cpu"
    """Device that it computes on."""
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of this process; conversations are kept as long as it stays the same."""
    members: Sequence[Member] = ()
    """Announcements of the clients, in the same order, if they have their own data."""

    def hello(self, spoken: Protocols = SPOKEN) -> wire.Hello:
        """Return it as the first part of a stream, naming these protocols."""
        return wire.Hello(
            protocol=spoken.newest,
            oldest_protocol=spoken.oldest if spoken.oldest < spoken.newest else 0,
            package=spoken.package,
            worker=self.worker,
            incarnation=self.incarnation,
            clients=self.clients,
            device=self.device,
            algorithms=dict(self.algorithms),
            announced=[
                wire.Announced(**{name: value for name, value in vars(member).items() if name != "id"})
                for member in self.members
            ],
        )


@dataclass(frozen=True)
class Joined:
    """Welcome received from the aggregator: the run, the id of the aggregator's process, the experiment (JSON)."""

    run: str
    incarnation: str
    experiment: str
    protocol: int = SPOKEN.newest
    """Version of the protocol that both sides use."""


def parse_welcome(address: str, data: bytes, spoken: Protocols, algorithms: Mapping[str, int]) -> Joined:
    """Return the Welcome in the first frame of a stream; raise if the frame refuses us or holds anything else.

    ``spoken`` and ``algorithms`` are those of our Hello.
    """
    first = parse_frame(wire.AggregatorFrame, data).parts[0]
    if first.WhichOneof("part") == "refused":
        raise remedy(first.refused, spoken, algorithms) or refusal_error(address, first.refused)
    if first.WhichOneof("part") != "welcome":
        raise WireError(Refusal.GARBAGE, "the first part was not a Welcome")
    welcome = first.welcome
    return Joined(welcome.run, welcome.incarnation, welcome.experiment, chosen(welcome, spoken))


def refusal_error(address: str, refusal: wire.Refused) -> FedloomError:
    """Return the error of a worker that the aggregator refuses."""
    same_version = "install the version of fedloom that the aggregator has"
    hints = {
        wire.REFUSAL_CODE_PROTOCOL: same_version,
        wire.REFUSAL_CODE_PACKAGE: same_version,
        wire.REFUSAL_CODE_ALGORITHM: "install the version of the algorithm that the aggregator has",
        wire.REFUSAL_CODE_REPLACED: f"give every worker a unique name with {argument('name')}",
    }
    reason = printable(refusal.reason, REASON_CHARACTERS)
    if refusal.code == wire.REFUSAL_CODE_CLIENTS:
        return DataError(
            f"the aggregator at {address} refused: {reason}",
            hint="create the partition from the aggregator's experiment file: fedloom partition EXPERIMENT",
        )
    return RefusedError(f"the aggregator at {address} refused: {reason}", hint=hints.get(refusal.code))


def message_frames(cutter: Cutter, encoded: Encoded, *head: Pieces) -> list[bytes]:
    """Return the frames of one message, preceded by the parts in ``head``."""
    return list(pack_parts((*head, *cutter.parts(wire.Envelope(), encoded))))


@dataclass(frozen=True, eq=False)
class Received:
    """A received message; its tensors are created outside the event loop, which torch would block."""

    cls: type[Message]
    specs: Sequence[TensorSpec]
    _assembler: Assembler

    def message(self) -> Message:
        """Return the message; raise WireError if a bool is neither 0 nor 1."""
        return self._assembler.message(self.cls)


class PartReader:
    """Reads one direction of a conversation's stream: single parts, and whole messages.

    Parameters
    ----------
    read
        Reads the next frame; ``grpc.aio.EOF`` at the end of the stream.
    frame
        Class of the frames.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Any]],
        frame: type[personalization.NewcomerFrame | personalization.ModelFrame],
    ) -> None:
        self._read = read
        self._frame = frame
        self._parts: Iterator[tuple[str, Any]] = iter(())  # parsed one by one: a frame may have very many
        self.size = 0
        """Bytes of the frames read so far."""

    async def part(self, kind: str, transfer: int | None = None) -> Any:
        """Return the next part, which must be of this kind and, if given, of this transfer.

        Raise WireError if it is another part or damaged, or the stream has ended.
        """
        while (next_part := next(self._parts, None)) is None:
            data = await self._read()
            if data is grpc.aio.EOF:
                raise WireError(Refusal.TRUNCATED, f"the stream ended before a part {kind!r}")
            self.size += len(data)
            self._parts = read_parts(self._frame, data)
        part_kind, part = next_part
        if part_kind != kind:
            raise WireError(Refusal.GARBAGE, f"got a part {part_kind!r}, expected {kind!r}")
        if transfer is not None and part.transfer != transfer:
            raise WireError(Refusal.UNKNOWN_TRANSFER, f"transfer {part.transfer}, expected {transfer}")
        return part

    async def message(self, classes: Mapping[str, type[Message]], limit: int) -> Received:
        """Return the next message.

        Parameters
        ----------
        classes
            Allowed classes, by name.
        limit
            Maximum size accepted, in bytes.

        Raises
        ------
        WireError
            If its class or fields are not allowed or it is too large, both before memory is allocated; or if it is
            damaged, or the stream has ended.
        """
        begin: wire.Begin = await self.part("begin")
        name, tensors = begin.envelope.message, begin.envelope.tensors
        if name not in classes:
            allowed = ", ".join(sorted(classes)) or "none"
            raise WireError(Refusal.SHAPE, f"message {name[:80]!r} is not among the expected ones: {allowed}")
        cls = classes[name]
        _check_fields(cls, tensors)
        specs = read_specs(begin.envelope)
        assembler = Assembler(begin, specs, limit)
        while not assembler.is_complete:
            assembler.add(await self.part("chunk", begin.transfer))
        await self.part("end", begin.transfer)
        return Received(cls, specs, assembler)


def _check_fields(cls: type[Message], tensors: Sequence[wire.TensorSpec]) -> None:
    """Raise WireError if the fields are not those of the class, before anything is computed from their shapes."""
    names = [field.name for field in cls.fields()]
    if len(tensors) != len(names) or [spec.name for spec in tensors] != names:
        fields = [spec.name[:80] for spec in tensors[:20]]
        raise WireError(Refusal.SHAPE, f"{cls.__name__} has fields {fields}, expected {names}")
    for spec in tensors:
        if len(spec.shape) > _AXES:
            raise WireError(
                Refusal.SHAPE, f"{cls.__name__}.{spec.name} has {len(spec.shape)} axes, and at most {_AXES} are allowed"
            )
