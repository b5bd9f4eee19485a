"""Shared parts of both ends of a stream: versions, names, and the outbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator

from fedloom.federation.states import Versions
from fedloom.federation.transport import ConversationKey
from fedloom.runs.journal import Version
from fedloom.transport.frames import Pieces, pack_parts, seal_frame, serialize
from fedloom.transport.wire import federation_pb2 as wire

PROTOCOL = 8
LAST_BACKOFF_S = 5.0  # the longest that a worker waits before it reconnects
HEARTBEAT_S = 15.0  # idle time after which a heartbeat is sent: proxies end idle streams
SILENCE_S = 90.0  # a stream without frames for this long is considered dead
HELD_CONVERSATIONS = 64  # maximum number reported on joining; few are open at one time
SERVICE = "fedloom.v1.Federation"
METHOD = "Join"


def key_to_wire(key: ConversationKey) -> wire.ConversationKey:
    """Convert a conversation key to its wire format."""
    return wire.ConversationKey(**vars(key))


def key_from_wire(key: wire.ConversationKey) -> ConversationKey:
    """Parse a conversation key."""
    return ConversationKey(key.round, key.attempt, key.conversation, key.purpose)


def states_to_wire(versions: Versions) -> wire.ClientState:
    """Convert the versions of a client's state to their wire format."""
    start = None if versions.start is None else wire.StateVersion(**vars(versions.start))
    needed = [wire.StateVersion(**vars(version)) for version in sorted(versions.needed)]
    return wire.ClientState(start=start, needed=needed, life=versions.life)


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

    def waiting(self, lane: Hashable) -> int:
        """Return the number of transfers waiting in a lane."""
        return len(self._lanes.get(lane, ()))

    @property
    def lanes(self) -> int:
        """Number of lanes with waiting transfers."""
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
        """Take the next part of the lane whose turn it is; empty if nothing waits."""
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
