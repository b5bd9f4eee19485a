"""Personalization service (docs/serving.md): on an aggregator's port, or in a process of its own.

Streams and bookkeeping live on one event loop. The server half's work is done in threads, one tile at a time; a tile
that waits for its clients lets the next one work.
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
from typing import Any, NoReturn

import grpc
import torch

import fedloom
from fedloom.data.manifest import CLIENT_ID
from fedloom.errors import ExperimentError, FedloomError
from fedloom.federation.bugs import place
from fedloom.federation.served import TILE, TOGETHER, NobodyLeft, ServedRound, Tile
from fedloom.federation.validation import non_finite
from fedloom.messages import Message, Metrics
from fedloom.transport.gate import PEER, AuthInterceptor, Peer, watch_certificate
from fedloom.transport.limits import RateLimitFilter, connections
from fedloom.transport.server import listening
from fedloom.transport.spoken import (
    DESCRIBE,
    MOST_HELD,
    PERSONALIZE,
    PRECISIONS,
    RETRY,
    SERVICE,
    Incoming,
    Piece,
    Unfit,
    frames,
    pieces,
)
from fedloom.transport.stream import SERVER_OPTIONS
from fedloom.transport.wire import personalization_pb2 as wire
from fedloom.trust.audit import Audit, Value
from fedloom.trust.options import Protection
from fedloom.words import pluralize, printable

log = logging.getLogger("fedloom.transport.personalization")
log.addFilter(RateLimitFilter())

ASK_TIMEOUT_S = 10.0
WAITING_TILES = 64
"""Maximum number of tiles waiting for their clients' answers, in methods with several exchanges."""
LATENCIES = 10_000
"""Number of latest models that latency quantiles are computed from."""
STREAMS = 100
"""Maximum number of conversations on one connection."""
SOON_MS, LATE_MS = 10, 5_000
"""Minimum and maximum delay that a refused client is told."""

Load = Callable[[str | None], ServedRound | None]
"""Return the new round to serve, given the digest of the current one; None if that is up to date. Called in a thread.
"""


@dataclass(frozen=True)
class ServingLimits:
    """Resource limits of serving.

    Attributes
    ----------
    linger_s
        Seconds that a client waits for others to share its tile.
    waiting
        Maximum number of clients waiting for a tile.
    conversations
        Maximum number of open conversations: clients compute in the middle of one.
    answer_s
        Seconds that a client may take to answer.
    follow_s
        Interval between checks for a newer durable round; None disables them.
    threads
        Number of torch threads.
    """

    linger_s: float = 0.003
    waiting: int = 1024
    conversations: int = 4096
    answer_s: float = 60.0
    follow_s: float | None = 1.0
    threads: int = 1


@dataclass(frozen=True)
class ServingLoad:
    """Load of the service.

    Attributes
    ----------
    round
        The round that is served; None while there is none.
    handed_out, refused
        Models handed out and requests refused since the start.
    waiting, conversations
        Clients waiting for a tile, and open conversations.
    latency_s
        Latency of recent models by quantile, from a client's last answer to the sending of its model; 0 while there are
        none.
    """

    round: int | None
    handed_out: int
    refused: int
    waiting: int
    conversations: int
    latency_s: dict[str, float]


@dataclass(eq=False)
class _Prepared:
    """Served round, and its opening in the wire format of each precision."""

    served: ServedRound
    openings: Mapping[wire.Precision, tuple[torch.dtype, list[Piece]]]
    together: int = TOGETHER
    """Maximum number of clients in a tile; lowered once clients of a tile have had to wait for each other's answers."""

    @property
    def named(self) -> wire.ServedRound:
        """The round, in the form that answers name it."""
        return wire.ServedRound(run=self.served.about.run, round=self.served.round, digest=self.served.digest)


@dataclass(frozen=True)
class _Said:
    """Next message to a client: frames, and the class of the answer awaited; None awaits no answer."""

    frames: Sequence[bytes]
    awaited: type[Message] | None


@dataclass(eq=False)
class _PendingClient:
    """A client that has answered the opening and waits for the server half's next message."""

    client: str
    prepared: _Prepared
    precision: wire.Precision
    answer: Message
    since: float
    told: asyncio.Queue[_Said | Exception] = field(default_factory=asyncio.Queue)
    waits: bool = True  # its tile has not started
    gone: bool = False
    heard: Callable[[Message | None], None] | None = None
    """Passes the client's answer to the tile that waits for it."""


class Unusable(Exception):
    """No model follows from what a client sent; the text says why."""


class Personalization:
    """Serves the last durable round of a run to clients that request their models.

    Parameters
    ----------
    load
        Finds the round to serve.
    limits
        Resource limits.
    audit
        Audit log of the models handed out, where clients must identify themselves.
    lazy
        Load nothing until the first request.
    """

    def __init__(
        self, load: Load, limits: ServingLimits | None = None, audit: Audit | None = None, *, lazy: bool = False
    ) -> None:
        self._load = load
        self._limits = limits or ServingLimits()
        self._audit = audit or Audit()
        self._lazy = lazy
        self._now: _Prepared | None = None
        self._following: asyncio.Task[None] | None = None
        self._looked: asyncio.Event | None = None
        self._queue: deque[_PendingClient] = deque()
        self._computing = threading.Lock()
        self._busy = 0  # tiles that compute, or are about to
        self._tiles = 0
        self._timer: asyncio.TimerHandle | None = None
        self._open = 0
        self._handed_out = self._refused = 0
        self._never: str | None = None  # why the run's method has no models to hand out
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._free_since = 0.0  # when the last tile finished computing
        self._tile_s = 0.01  # duration of a tile, smoothed
        self._executor = ThreadPoolExecutor(
            WAITING_TILES, "personalize", initializer=torch.set_num_threads, initargs=(self._limits.threads,)
        )

    @property
    def handlers(self) -> dict[str, Any]:
        """The service's methods, for a gRPC server; those of a conversation read and write bytes."""
        return {
            DESCRIBE: grpc.unary_unary_rpc_method_handler(
                self._describe, wire.DescribeRequest.FromString, wire.Described.SerializeToString
            ),
            PERSONALIZE: grpc.stream_stream_rpc_method_handler(self._personalize),
        }

    async def begin(self) -> None:
        """Start serving on the running event loop.

        Raises
        ------
        FedloomError
            If there is nothing to serve, unless the service is lazy.
        """
        self._looked = asyncio.Event()
        if not self._lazy:
            await self._refresh()
            self._follow()

    async def end(self) -> None:
        """Stop serving; the gRPC server ends open calls."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
        if self._timer is not None:
            self._timer.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- the served round

    def _follow(self) -> None:
        assert self._looked is not None
        self._looked.set()
        if self._limits.follow_s is not None and self._following is None:
            self._following = asyncio.create_task(self._keep_following(self._limits.follow_s))

    async def _keep_following(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._refresh()
            except ExperimentError:
                return  # the method has no models to serve, and never will
            except FedloomError as error:  # keep serving the current round
                log.warning("no newer round can be served: %s", error)
            except Exception:
                log.exception("no newer round can be served")

    async def _refresh(self) -> None:
        now = self._now
        try:
            found = await asyncio.to_thread(self._prepared, None if now is None else now.served.digest)
        except ExperimentError as error:
            self._never = str(error)
            raise
        if found is not None:
            self._now = found
            log.info(
                "serving round %d of %s (%s)", found.served.round, found.served.about.run, found.served.digest[:12]
            )

    def _prepared(self, digest: str | None) -> _Prepared | None:
        served = self._load(digest)
        if served is None:
            return None
        openings = {number: (dtype, pieces(served.opening, dtype)) for number, dtype in PRECISIONS.values()}
        return _Prepared(served, openings)

    async def _served(self) -> _Prepared | None:
        """Return the served round; a lazy service loads it on the first request."""
        assert self._looked is not None
        if self._lazy and not self._looked.is_set():
            self._looked.set()
            with contextlib.suppress(FedloomError):  # no round is durable yet
                await self._refresh()
            self._follow()
        return self._now

    # ---- calls

    async def _describe(self, request: wire.DescribeRequest, context: Any) -> wire.Described:
        prepared = await self._served()
        if self._never is not None:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, self._never)
        load = wire.ServerLoad(
            handed_out=self._handed_out, refused=self._refused, waiting=len(self._queue), **self.quantiles_ms()
        )
        if prepared is None:
            return wire.Described(package=fedloom.__version__, load=load)
        about = prepared.served.about
        return wire.Described(
            served=prepared.named,
            package=fedloom.__version__,
            algorithm=about.algorithm,
            algorithm_version=about.version,
            experiment=about.experiment,
            problem=about.problem,
            load=load,
        )

    def quantiles_ms(self) -> dict[str, float]:
        """Return latencies of recent models in ms: ``p50_ms``, ``p90_ms``, ``p99_ms``; 0 while there are none."""
        ordered = sorted(self._latencies)

        def at(share: float) -> float:
            return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

        return {"p50_ms": at(0.5), "p90_ms": at(0.9), "p99_ms": at(0.99)}

    @property
    def load(self) -> ServingLoad:
        """Current load; callable from any thread."""
        now = self._now
        latency = {f"0.{name[1:3]}".rstrip("0"): ms / 1e3 for name, ms in self.quantiles_ms().items()}
        served = None if now is None else now.served.round
        return ServingLoad(served, self._handed_out, self._refused, len(self._queue), self._open, latency)

    @property
    def handed_out(self) -> int:
        """Number of models handed out so far."""
        return self._handed_out

    async def _personalize(self, _: Any, context: Any) -> None:
        """Handle one client's conversation."""
        self._open += 1
        try:
            await self._converse(context)
        except Unfit as unfit:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(unfit))
        except Unusable as unusable:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(unusable))
        except TimeoutError:
            allowed = f"no answer within {self._limits.answer_s:g} s"
            await self._refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, allowed)
        finally:
            self._open -= 1

    async def _converse(self, context: Any) -> None:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            first = _frame(await context.read())
        if first is None:
            return
        prepared = await self._judged(first, context)
        served, ask, peer = prepared.served, first.ask, PEER.get()
        heard_at = time.perf_counter()
        if served.answer is Metrics:
            self._hand_out(peer, ask, served, heard_at)
            await self._write(context, self._opening(prepared, ask, last=True))
        else:
            if ask.answers == served.digest and first.HasField("spoken"):
                answer = await self._answer(context, served, served.answer, first)
            else:
                await self._write(context, self._opening(prepared, ask, last=False))
                answer = await self._answer(context, served, served.answer)
            heard_at = time.perf_counter()
            seat = _PendingClient(ask.client, prepared, ask.precision, answer, time.monotonic())
            await self._admit(context, seat)
            try:
                while True:
                    said = await seat.told.get()
                    if isinstance(said, Exception):
                        raise said
                    if said.awaited is None:
                        self._hand_out(peer, ask, served, heard_at)
                    await self._write(context, said.frames)
                    if said.awaited is None:
                        break
                    answer = await self._answer(context, served, said.awaited)
                    heard_at = time.perf_counter()
                    if seat.heard is not None:
                        seat.heard(answer)
            except _Failed as failed:
                await self._refuse(context, grpc.StatusCode.INTERNAL, str(failed))
            finally:
                self._leave(seat)

    def _hand_out(self, peer: Peer | None, ask: wire.Ask, served: ServedRound, heard_at: float) -> None:
        """Count and log a model before it is sent: a client that has received it disconnects at once.

        Parameters
        ----------
        heard_at
            Time at which the client's last message was received, in seconds of ``time.perf_counter``.

        Raises
        ------
        StorageError
            If the audit log cannot be written; the model must not be sent then.
        """
        if peer is not None:
            told: dict[str, Value] = {"client": ask.client, "round": served.round, "digest": served.digest}
            self._audit.write("handed_out", identity=peer.identity.name, host=peer.host, **told)
        self._handed_out += 1
        self._latencies.append(time.perf_counter() - heard_at)

    async def _judged(self, first: wire.NewcomerFrame, context: Any) -> _Prepared:
        """Return the round that the client is served, or refuse the client."""
        ask = first.ask
        if not first.HasField("ask"):
            raise Unfit("the first frame must have an Ask")
        if ask.package != fedloom.__version__:
            found = printable(ask.package, 80)
            await self._refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"found fedloom {found} at the client; allowed: {fedloom.__version__}, as here",
            )
        if not CLIENT_ID.fullmatch(ask.client):
            raise Unfit("client: allowed are ids of letters, digits, '.', '_' and '-', at most 128")
        if ask.precision not in {number for number, _ in PRECISIONS.values()}:
            raise Unfit(f"precision: found {ask.precision}; allowed: {', '.join(PRECISIONS)}")
        if len(ask.held) > MOST_HELD:
            raise Unfit(f"held: found {len(ask.held)} digests; allowed: at most {MOST_HELD}")
        peer = PEER.get()
        if peer is not None and not peer.identity.speaks_for(ask.client):
            reason = f"may not speak for {ask.client}"
            peer.refuse("clients", reason)
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"{peer.identity.name} {reason}")
        prepared = await self._served()
        if self._never is not None:
            raise Unfit(self._never)
        if prepared is None:
            await self._refuse(
                context, grpc.StatusCode.UNAVAILABLE, "no round of the run is durable yet: come again", retry_ms=1_000
            )
        assert prepared is not None
        served = prepared.served
        if (ask.algorithm, ask.algorithm_version) != (served.about.algorithm, served.about.version):
            found = f"{printable(ask.algorithm, 80)} version {ask.algorithm_version}"
            allowed = f"{served.about.algorithm} version {served.about.version}, the run's"
            await self._refuse(
                context, grpc.StatusCode.FAILED_PRECONDITION, f"method: found {found}; allowed: {allowed}"
            )
        if ask.HasField("round") and ask.round != served.round:
            await self._refuse(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"round: found {ask.round}; allowed: {served.round}, which is served",
            )
        if self._open > self._limits.conversations:
            await self._overloaded(context, f"{pluralize(self._limits.conversations, 'conversation')} are open")
        return prepared

    async def _refuse(self, context: Any, code: grpc.StatusCode, reason: str, retry_ms: int | None = None) -> NoReturn:
        self._refused += 1
        if retry_ms is not None:
            context.set_trailing_metadata(((RETRY, str(retry_ms)),))
        await context.abort(code, printable(reason, 500))
        raise AssertionError("abort raises")

    async def _overloaded(self, context: Any, reason: str) -> NoReturn:
        """Refuse at once, with the time by which the queue will have been processed."""
        ahead_ms = 1e3 * self._tile_s * (len(self._queue) / TOGETHER + 1)
        retry_ms = round(min(LATE_MS, max(SOON_MS, ahead_ms)))
        log.warning("refused a client: %s", reason)
        await self._refuse(
            context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{reason}: come again in {retry_ms} ms", retry_ms
        )

    def _opening(self, prepared: _Prepared, ask: wire.Ask, *, last: bool) -> Sequence[bytes]:
        _, parts = prepared.openings[ask.precision]
        head = wire.ModelFrame(served=prepared.named, precision=ask.precision, last=last)
        return list(frames(head, type(prepared.served.opening).__name__, parts, frozenset(ask.held)))

    async def _write(self, context: Any, said: Sequence[bytes]) -> None:
        async with asyncio.timeout(self._limits.answer_s):  # a client that does not read holds memory
            for frame in said:
                await context.write(frame)

    async def _answer(
        self,
        context: Any,
        served: ServedRound,
        awaited: type[Message],
        frame: wire.NewcomerFrame | None = None,
    ) -> Message:
        """Read and check one client's answer.

        Raises
        ------
        Unfit, Unusable
            If it cannot be used.
        TimeoutError
            If it does not arrive in time.
        """
        async with asyncio.timeout(self._limits.answer_s):
            if frame is None:
                frame = _frame(await context.read())
            if frame is None or not frame.HasField("spoken"):
                raise Unfit(f"found no {awaited.__name__}; allowed: the answer to the message before")
            room = 8 * sum(_numbers(shape) for shape in served.shapes[awaited].values())
            incoming = Incoming(frame.spoken, {awaited.__name__: awaited}, room)
            if any(spec.held for spec in incoming.specs):
                raise Unfit(f"{awaited.__name__}: found a tensor without its bytes")
            incoming.add(frame.data)
            while not incoming.whole:
                more = _frame(await context.read())
                if more is None:
                    raise Unfit(f"{awaited.__name__} ended too early")
                incoming.add(more.data)
        message = incoming.message()
        wrong = served.fault(awaited, message)
        if wrong is not None:
            raise Unusable(wrong)
        return message

    # ---- tiles

    async def _admit(self, context: Any, seat: _PendingClient) -> None:
        if len(self._queue) >= self._limits.waiting:
            await self._overloaded(context, f"{pluralize(self._limits.waiting, 'client')} wait already")
        self._queue.append(seat)
        self._pump()

    def _leave(self, seat: _PendingClient) -> None:
        seat.gone = True
        if seat.waits:
            self._queue.remove(seat)
            self._pump()
        if seat.heard is not None:
            seat.heard(None)

    def _pump(self) -> None:
        """Start the next tile if none is computing and it is full, or has waited for long enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue or self._busy or self._tiles >= WAITING_TILES:
            return
        first = self._queue[0]
        since = first.since  # while clients of the previous tile fetch their models, others arrive to share the next
        if len(self._queue) >= TILE and len(self._queue) < min(first.prepared.together, self._open):
            since = self._free_since
        linger_s = since + self._limits.linger_s - time.monotonic()
        if len(self._queue) < min(first.prepared.together, max(TILE, self._open)) and linger_s > 0:
            self._timer = asyncio.get_running_loop().call_later(linger_s, self._pump)
            return
        seats: list[_PendingClient] = []
        while self._queue and len(seats) < first.prepared.together and self._queue[0].prepared is first.prepared:
            seats.append(self._queue.popleft())
            seats[-1].waits = False
        self._busy += 1
        self._tiles += 1
        work = _Work(seats, self._limits.answer_s, asyncio.get_running_loop(), self._computing, self._released)
        self._executor.submit(work.run).add_done_callback(lambda _: work.post(self._done))

    def _released(self, seconds: float) -> None:
        """Record that a tile has stopped computing: it is done, or waits for its clients."""
        self._busy -= 1
        self._free_since = time.monotonic()
        self._tile_s += 0.1 * (seconds - self._tile_s)
        self._pump()

    def _done(self) -> None:
        self._tiles -= 1
        self._pump()


class _Failed(Exception):
    """The server half failed."""


class _Work:
    """One tile at work, in a thread of its own.

    Parameters
    ----------
    computing
        Held while it computes, so that only one tile does at a time.
    released
        Called on the event loop, once, when it first stops computing, with the seconds that it computed.
    """

    def __init__(
        self,
        seats: Sequence[_PendingClient],
        answer_s: float,
        loop: asyncio.AbstractEventLoop,
        computing: threading.Lock,
        released: Callable[[float], None],
    ) -> None:
        self._loop = loop
        self._seats = seats
        self._answer_s = answer_s
        self._computing = computing
        self._released: Callable[[float], None] | None = released
        self._answers: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._here = set(range(len(seats)))
        self._started = 0.0

    def run(self) -> None:
        """Run the server half's side of the conversation."""
        self._computing.acquire()
        self._started = time.perf_counter()
        prepared = self._seats[0].prepared
        try:
            answers = [seat.answer for seat in self._seats]
            tile = Tile([seat.client for seat in self._seats], answers, self._say, self._hear)
            prepared.served.server.personalize(tile)
        except NobodyLeft:
            pass
        except Exception as error:
            log.exception("the server half of %s failed", prepared.served.about.algorithm)
            about = f"{type(error).__name__} ({place(error)})"
            failed = _Failed(f"the server half of {prepared.served.about.algorithm} failed: {about}")
            self._tell(dict.fromkeys(self._here, failed))
        finally:
            self._release()

    def _release(self) -> None:
        """Let the next tile compute."""
        self._computing.release()
        released, self._released = self._released, None
        if released is not None:
            seconds = time.perf_counter() - self._started
            self.post(lambda: released(seconds))

    def post(self, what: Callable[[], None]) -> None:
        """Run a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the process with it
            self._loop.call_soon_threadsafe(what)

    def _say(self, message: Message, awaited: type[Message] | None) -> None:
        said: dict[int, _Said | Exception] = {}
        if awaited is not None:
            self._seats[0].prepared.together = TILE
        for i in sorted(self._here):
            seat = self._seats[i]
            row = message.select([i])
            if non_finite(row) is not None:  # checked row by row, because a row stays in the cache
                said[i] = Unusable("the model that follows from what the client sent is not finite")
                self._here.discard(i)
                continue
            dtype, _ = seat.prepared.openings[seat.precision]
            head = wire.ModelFrame(served=seat.prepared.named, precision=seat.precision, last=awaited is None)
            said[i] = _Said(list(frames(head, type(message).__name__, pieces(row, dtype))), awaited)
        self._tell(said)

    def _tell(self, said: Mapping[int, _Said | Exception]) -> None:
        """Deliver a message to each client, and route its answer to the tile that waits for it."""

        def tell() -> None:
            for i, what in said.items():
                seat = self._seats[i]
                if isinstance(what, _Said) and what.awaited is not None:
                    if seat.gone:
                        self._answers.put((i, None))
                        continue
                    seat.heard = lambda answer, i=i: self._answers.put((i, answer))
                else:
                    seat.heard = None
                seat.told.put_nowait(what)

        self.post(tell)

    def _hear(self) -> Sequence[Message | None]:
        self._release()
        found: dict[int, Message] = {}
        waiting, ends = set(self._here), time.monotonic() + self._answer_s
        while waiting:
            try:
                i, answer = self._answers.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                break
            if i in waiting:
                waiting.discard(i)
                if answer is not None:
                    found[i] = answer
        self._tell(dict.fromkeys(waiting, TimeoutError()))  # its own deadline may not have expired yet
        self._here = set(found)
        self._computing.acquire()
        return [found.get(i) for i in range(len(self._seats))]


def _frame(data: Any) -> wire.NewcomerFrame | None:
    """Parse a frame; None at the end of the stream.

    Raises
    ------
    Unfit
        If it is not a valid frame.
    """
    if data is grpc.aio.EOF:
        return None
    try:
        return wire.NewcomerFrame.FromString(data)
    except Exception as error:  # protobuf raises DecodeError, and other errors on some malformed input
        raise Unfit(f"found {len(data)} bytes that are no frame") from error


def _numbers(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


async def serve_models(
    service: Personalization,
    listen: str,
    protection: Protection,
    audit: Audit,
    stop: threading.Event,
    drain_s: float,
    started: Callable[[str], None],
    say: Callable[[str], None],
    health: str | None = None,
) -> None:
    """Serve models until told to stop, then let open conversations end.

    Parameters
    ----------
    drain_s
        Seconds that open conversations have to end.
    started
        Called with the bound address.
    say
        Shows one line to a person.
    health
        ``host:port`` on which only health is served; None disables it.

    Raises
    ------
    ExperimentError
        If the address cannot be bound.
    FedloomError
        If there is nothing to serve.
    """
    gate = None if protection.access is None else AuthInterceptor(protection.access, audit)
    options = (
        *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_concurrent_streams"),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_allowed_incoming_connections", connections()),
    )
    await service.begin()
    at = await listening(listen, {SERVICE: service.handlers}, protection, gate, options, health)
    started(at.address)
    watching = [] if gate is None else [asyncio.create_task(gate.watch())]
    if protection.tls is not None:
        watching.append(asyncio.create_task(watch_certificate(protection.tls, say, audit)))
    try:
        await asyncio.to_thread(stop.wait)
    finally:
        for task in watching:
            task.cancel()
        await at.stop(drain_s)
        await service.end()
