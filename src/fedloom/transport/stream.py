"""Shared parts of both ends of a stream: versions, names, gRPC options, and the outbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator

from fedloom.federation.carrier import ConversationKey
from fedloom.federation.states import Versions
from fedloom.runs.journal import Version
from fedloom.transport.codec import FRAME_BYTES, SEAL_BYTES, Pieces, sealed, serialize
from fedloom.transport.wire import federation_pb2 as wire

PROTOCOL = 4
LAST_BACKOFF_S = 5.0  # the longest that a worker waits before it reconnects
HEARTBEAT_S = 15.0  # idle time after which a heartbeat is sent: proxies end idle streams
SILENCE_S = 90.0  # a stream without frames for this long is considered dead
HELD_CONVERSATIONS = 64  # maximum number reported on joining; few are open at one time
SERVICE = "fedloom.v1.Federation"
METHOD = "Join"
OBSERVATION = "fedloom.v1.Observation"
WATCH = "Watch"

# A worker that vanishes without closing its connection is detected after time + timeout. The server allows pings twice
# as often as clients send them, so that no client receives "too_many_pings". No message limit is raised.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Bounds the cost of an unknown connection: it must speak HTTP/2 within 10 s, is closed after 30 s without a stream,
    # and has room for one frame in each of the streams that it may hold.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_receive_message_length", FRAME_BYTES),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared by a second server
)
CHANNEL_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.use_local_subchannel_pool", 1),  # each attempt connects anew: our backoff applies, not a shared one
    ("grpc.enable_http_proxy", 0),
)
LIMITED = (
    ("grpc.http2.bdp_probe", 0),  # would admit more data at a time the slower the line is
    ("grpc.http2.lookahead_bytes", 1 << 16),
)
"""Options of a bandwidth-limited channel: unread data stay with the sender."""


def key_to_wire(key: ConversationKey) -> wire.ConversationKey:
    """Convert a conversation key to its wire format."""
    return wire.ConversationKey(
        round=key.round, attempt=key.attempt, conversation=key.conversation, purpose=key.purpose
    )


def key_from_wire(key: wire.ConversationKey) -> ConversationKey:
    """Parse a conversation key."""
    return ConversationKey(key.round, key.attempt, key.conversation, key.purpose)


def states_to_wire(versions: Versions) -> wire.ClientState:
    """Convert the versions of a client's state to their wire format."""

    def written(version: Version) -> wire.StateVersion:
        return wire.StateVersion(
            round=version.round,
            attempt=version.attempt,
            conversation=version.conversation,
            row=version.row,
            life=version.life,
        )

    start = None if versions.start is None else written(versions.start)
    needed = [written(version) for version in sorted(versions.needed)]
    return wire.ClientState(start=start, needed=needed, life=versions.life)


def states_from_wire(state: wire.ClientState) -> Versions:
    """Parse the versions of a client's state."""

    def read(version: wire.StateVersion) -> Version:
        return Version(version.round, version.attempt, version.conversation, version.row, version.life)

    start = read(state.start) if state.HasField("start") else None
    return Versions(start, frozenset(read(version) for version in state.needed), state.life)


class Outbox:
    """Parts waiting to be written: in order within a lane (a conversation), in turn between lanes.

    Belongs to one event loop. Parts are serialized when their turn comes, so that waiting costs no memory; small ones
    share a frame.

    Parameters
    ----------
    heartbeat
        Empty part, sent when there was nothing to send for :data:`HEARTBEAT_S`.
    """

    def __init__(self, heartbeat: Pieces) -> None:
        self.heartbeat = sealed(heartbeat)
        self._lanes: dict[Hashable, deque[Iterator[Pieces]]] = {}
        self._over: Pieces = ()  # part that did not fit into the previous frame
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
        """Let :meth:`drain` return once everything queued is written."""
        self._closing = True
        self._wake.set()

    async def drain(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write frames of at most 1 MiB as parts arrive, until closed."""
        while True:
            while frame := self._frame():
                await write(frame)
            if self._closing:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._wake.wait()
            except TimeoutError:
                await write(self.heartbeat)

    def _frame(self) -> bytes:
        """Join the next parts into a frame; empty if nothing waits."""
        pieces: list[bytes | memoryview] = []
        size = 0
        while part := self._over or self._next():
            part_size = sum(map(len, part))
            if size and size + part_size > FRAME_BYTES - SEAL_BYTES:
                self._over = part
                break
            self._over = ()
            pieces += part
            size += part_size
        return sealed(pieces) if pieces else b""

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
