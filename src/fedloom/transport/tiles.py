"""Tiles of a personalization service: clients whose answers the server algorithm processes together.

The server algorithm's work is done in threads, one tile at a time; a tile that waits for its clients lets the next one
work. Everything else belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import torch

from fedloom.federation.served import TOGETHER, NobodyLeft, ServedRound, Tile, useless_values
from fedloom.federation.validation import non_finite, place
from fedloom.messages import Message, Metrics, stack
from fedloom.models.hypernetwork import TILE
from fedloom.transport.codec import Cutter, Encoded, encode, split_rows
from fedloom.transport.frames import WireError, serialize
from fedloom.transport.stream import Received, message_frames
from fedloom.transport.wire import personalization_pb2 as wire

log = logging.getLogger("fedloom.transport.personalization")

PAUSE_LINGERS = 10
"""Maximum pause between tiles that are not full, as a multiple of ``ModelServerSettings.linger_s``."""

WAITING_TILES = 64
"""Maximum number of tiles waiting for their clients' answers, in methods with several exchanges."""


class CallError(Exception):
    """Call that is refused, with gRPC's status; ``retry_ms`` is the time after which it may be repeated, if known."""

    def __init__(self, code: grpc.StatusCode, reason: str, retry_ms: int | None = None) -> None:
        super().__init__(reason)
        self.code, self.retry_ms = code, retry_ms


@dataclass(eq=False)
class PreparedRound:
    """Served round, and the frames of its opening, which are the same for every client."""

    served: ServedRound
    opening: Sequence[bytes]
    together: int = TOGETHER
    """Maximum number of clients in a tile; lowered once clients of a tile have had to wait for each other's answers."""

    @classmethod
    def from_served(cls, served: ServedRound) -> PreparedRound:
        """Make the frames of a round's opening."""
        return cls(
            served, _frames(served, Cutter(wire.ModelPart), encode(served.opening), last=served.answer is Metrics)
        )


@dataclass(frozen=True)
class NextMessage:
    """Next message to a client, and the class of the answer awaited; None awaits no answer.

    Its frames are made when they are sent: one at a time, they stay in the processor's cache.
    """

    encoded: Encoded
    awaited: type[Message] | None


@dataclass(eq=False)
class PendingClient:
    """Client in a conversation; after answering the opening, it waits for the server algorithm's next message."""

    client: str
    prepared: PreparedRound
    cutter: Cutter = field(default_factory=lambda: Cutter(wire.ModelPart, first=2))  # the opening is the first
    answer: Received | None = None
    since: float = 0.0
    outgoing: asyncio.Queue[NextMessage | Exception] = field(default_factory=asyncio.Queue)
    waits: bool = False  # its tile has not started
    disconnected: bool = False
    on_answer: Callable[[Received | None], None] | None = None
    """Passes the client's answer to the tile that waits for it."""

    def frames(self, encoded: Encoded, *, last: bool) -> list[bytes]:
        """Return the frames of the server's next message after the opening."""
        return _frames(self.prepared.served, self.cutter, encoded, last=last)


def round_name(served: ServedRound) -> wire.ServedRound:
    """Return a round's name in the wire format."""
    return wire.ServedRound(run=served.about.run, round=served.round, digest=served.digest)


def _frames(served: ServedRound, cutter: Cutter, encoded: Encoded, *, last: bool) -> list[bytes]:
    header = wire.Header(served=round_name(served), last=last)
    return message_frames(cutter, encoded, serialize(wire.ModelPart(header=header)))


class TileQueue:
    """Queue of clients that wait for the server algorithm, which serves them in tiles (see ``ModelServerSettings``)."""

    def __init__(self, linger_s: float, answer_s: float, threads: int) -> None:
        self._linger_s, self._answer_s = linger_s, answer_s
        self._queue: deque[PendingClient] = deque()
        self._computing = threading.Lock()
        self._busy = 0  # tiles that compute, or are about to
        self._tiles = 0
        self._timer: asyncio.TimerHandle | None = None
        self._free_since = 0.0  # when the last tile finished computing
        self._tile_s = 0.01  # duration of a tile, smoothed
        self._cpu_s = 0.0  # CPU time of the last tile
        self._executor = ThreadPoolExecutor(
            WAITING_TILES, "personalize", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def expected_s(self) -> float:
        """Time by which the queue will have been processed, in seconds."""
        return self._tile_s * (len(self._queue) / TOGETHER + 1)

    def add(self, client: PendingClient) -> None:
        """Let a client wait for a tile."""
        client.since, client.waits = time.monotonic(), True
        self._queue.append(client)
        self._pump()

    def remove(self, client: PendingClient) -> None:
        """Forget a client, whose conversation has ended."""
        client.disconnected = True
        if client.waits:
            self._queue.remove(client)
            self._pump()
        if client.on_answer is not None:
            client.on_answer(None)

    def close(self) -> None:
        """Start no more tiles."""
        if self._timer is not None:
            self._timer.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _pump(self) -> None:
        """Start the next tile if none is computing and it is full, or has waited for long enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue or self._busy or self._tiles >= WAITING_TILES:
            return
        first = self._queue[0]
        linger_s = self._due() - time.monotonic()
        if len(self._queue) < first.prepared.together and linger_s > 0:
            self._timer = asyncio.get_running_loop().call_later(linger_s, self._pump)
            return
        clients: list[PendingClient] = []
        while self._queue and len(clients) < first.prepared.together and self._queue[0].prepared is first.prepared:
            clients.append(self._queue.popleft())
            clients[-1].waits = False
        self._busy += 1
        self._tiles += 1
        work = _TileRun(clients, self._answer_s, asyncio.get_running_loop(), self._computing, self._released)
        self._executor.submit(work.run).add_done_callback(lambda _: work.post(self._done))

    def _due(self) -> float:
        """Return the time at which the next tile begins even if it is not full.

        A tile of 64 costs each client half as much as a tile of 16. While models are sent, others arrive to share the
        next: it waits for them twice the CPU time of the last one.
        """
        pause_s = min(2 * self._cpu_s, PAUSE_LINGERS * self._linger_s)
        return max(self._queue[0].since + self._linger_s, self._free_since + pause_s)

    def _released(self, seconds: float, cpu_s: float) -> None:
        """Record that a tile has stopped computing: it is done, or waits for its clients."""
        self._busy -= 1
        self._free_since = time.monotonic()
        self._tile_s += 0.1 * (seconds - self._tile_s)
        self._cpu_s = cpu_s
        self._pump()

    def _done(self) -> None:
        self._tiles -= 1
        self._pump()


class _TileRun:
    """Tile at work, in its own thread.

    Parameters
    ----------
    computing
        Held while it computes, so that only one tile does at a time.
    on_release
        Called on the event loop, once, when it first stops computing, with the seconds that it took and
        its CPU time.
    """

    def __init__(
        self,
        clients: Sequence[PendingClient],
        answer_s: float,
        loop: asyncio.AbstractEventLoop,
        computing: threading.Lock,
        on_release: Callable[[float, float], None],
    ) -> None:
        self._loop = loop
        self._clients = clients
        self._answer_s = answer_s
        self._computing = computing
        self._released: Callable[[float, float], None] | None = on_release
        self._answers: queue.SimpleQueue[tuple[int, Received | None]] = queue.SimpleQueue()
        self._here = set(range(len(clients)))
        self._started = self._cpu_started = 0.0

    def run(self) -> None:
        """Run the server algorithm's side of the conversation."""
        self._computing.acquire()
        self._started, self._cpu_started = time.perf_counter(), time.thread_time()
        current = self._clients[0].prepared
        try:
            answers = self._usable(
                {i: client.answer for i, client in enumerate(self._clients) if client.answer is not None}
            )
            tile = Tile([client.client for client in self._clients], answers, self._send, self._receive)
            current.served.server.personalize(tile)
        except NobodyLeft:
            pass
        except Exception as error:
            log.exception("the server algorithm of %s failed", current.served.about.algorithm)
            description = f"{type(error).__name__} ({place(error)})"
            reason = f"the server algorithm of {current.served.about.algorithm} failed: {description}"
            failed = CallError(grpc.StatusCode.INTERNAL, reason)
            self._deliver(dict.fromkeys(self._here, failed))
        finally:
            self._release()

    def _release(self) -> None:
        """Let the next tile compute."""
        self._computing.release()
        on_release, self._released = self._released, None
        if on_release is not None:
            seconds, cpu_s = time.perf_counter() - self._started, time.thread_time() - self._cpu_started
            self.post(lambda: on_release(seconds, cpu_s))

    def post(self, callback: Callable[[], None]) -> None:
        """Run a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the process with it
            self._loop.call_soon_threadsafe(callback)

    def _send(self, message: Message, message_type: type[Message] | None) -> None:
        messages: dict[int, NextMessage | Exception] = {}
        if message_type is not None:
            self._clients[0].prepared.together = TILE
        suspect = non_finite(message) is not None
        rows = split_rows(encode(message), len(self._clients))
        for i in sorted(self._here):
            if suspect and non_finite(message.select([i])) is not None:
                reason = "the model computed from the client's answers is not finite"
                messages[i] = CallError(grpc.StatusCode.INVALID_ARGUMENT, reason)
                self._here.discard(i)
            else:
                messages[i] = NextMessage(rows[i], message_type)
        self._deliver(messages)

    def _deliver(self, messages: Mapping[int, NextMessage | Exception]) -> None:
        """Deliver a message to each client, and route its answer to the tile that waits for it."""

        def deliver() -> None:
            for i, message in messages.items():
                client = self._clients[i]
                if isinstance(message, NextMessage) and message.awaited is not None:
                    if client.disconnected:
                        self._answers.put((i, None))
                        continue
                    client.on_answer = lambda answer, i=i: self._answers.put((i, answer))
                else:
                    client.on_answer = None
                client.outgoing.put_nowait(message)

        self.post(deliver)

    def _receive(self) -> Sequence[Message | None]:
        self._release()
        replies: dict[int, Received] = {}
        waiting, ends = set(self._here), time.monotonic() + self._answer_s
        while waiting:
            try:
                i, answer = self._answers.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                break
            if i in waiting:
                waiting.discard(i)
                if answer is not None:
                    replies[i] = answer
        self._deliver(dict.fromkeys(waiting, TimeoutError()))  # its own deadline may not have expired yet
        self._here = set(replies)
        self._computing.acquire()
        return self._usable(replies)

    def _usable(self, replies: Mapping[int, Received]) -> Sequence[Message | None]:
        """Return the usable answers in the order of the tile, else None; send the other clients the reason."""
        by_position: dict[int, Message] = {}
        wrong: dict[int, Exception] = {}
        for i, answer in replies.items():
            try:
                by_position[i] = answer.message()
            except WireError as error:
                wrong[i] = error
        messages = list(by_position.values())  # all of one class, the awaited one
        together = stack(type(messages[0]), messages) if messages else None
        if together is not None and useless_values(together) is not None:  # at least one is useless
            for i, message in by_position.items():
                if (reason := useless_values(message)) is not None:
                    wrong[i] = CallError(grpc.StatusCode.INVALID_ARGUMENT, reason)
        if wrong:
            self._here -= wrong.keys()
            self._deliver(wrong)
        return [by_position.get(i) if i in self._here else None for i in range(len(self._clients))]
