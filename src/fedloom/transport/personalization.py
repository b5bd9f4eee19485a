"""Personalization service (docs/serving.md): on an aggregator's port, or in its own process.

Streams and bookkeeping live on one event loop; the server algorithm's work is done in tiles
(``fedloom.transport.tiles``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from pydantic import Field

from fedloom.core.settings import Settings
from fedloom.core.words import pluralize, printable
from fedloom.data.manifest import CLIENT_ID
from fedloom.errors import ExperimentError, FedloomError
from fedloom.federation.served import ServedRound
from fedloom.federation.validation import mismatch
from fedloom.messages import Message, Metrics
from fedloom.security.audit import Audit, Value
from fedloom.security.options import Protection
from fedloom.transport.frames import Refusal, WireError
from fedloom.transport.gate import PEER
from fedloom.transport.limits import RateLimitFilter, connections
from fedloom.transport.server import SERVER_OPTIONS, listening
from fedloom.transport.stream import (
    DESCRIBE,
    MODELS,
    PERSONALIZE,
    RETRY,
    PartReader,
    Received,
)
from fedloom.transport.tiles import CallError, PendingClient, PreparedRound, TileQueue, round_name
from fedloom.transport.versions import FIXED, SPOKEN, Protocols, package_for
from fedloom.transport.wire import personalization_pb2 as wire

log = logging.getLogger("fedloom.transport.personalization")
log.addFilter(RateLimitFilter())

ASK_TIMEOUT_S = 10.0
LATENCIES = 10_000
"""Number of latest models that latency quantiles are computed from."""
STREAMS = 100
"""Maximum number of conversations on one connection."""
SOON_MS, LATE_MS = 10, 5_000
"""Minimum and maximum retry delay sent to a refused client."""

_SAME_VERSION = "install the same version of fedloom on both sides"

Load = Callable[[str | None], ServedRound | None]
"""Return the new round to serve, given the digest of the current one; None if that is up to date. Called in a thread.
"""


class ModelServerSettings(Settings):
    """Limits of ``fedloom serve``."""

    wait_s: float = Field(default=0.0, ge=0, description="Seconds to wait while nothing is published at the URL.")
    linger_s: float = Field(
        default=0.003,
        ge=0,
        description="Seconds that a client waits for others, so that models are computed in one batch.",
    )
    queue: int = Field(
        default=1024, ge=1, description="Clients that may wait for their model; others are refused and retry later."
    )
    conversations: int = Field(default=4096, ge=1, description="Maximum number of open conversations.")
    deadline_s: float = Field(default=60.0, gt=0, description="Seconds that a client may take to answer.")
    drain_s: float = Field(
        default=10.0, ge=0, description="Seconds that open conversations may continue after SIGTERM."
    )
    share_port: bool = Field(
        default=False, description="Share the port with other servers that do; Linux divides connections among them."
    )
    models: str | None = Field(
        default=None, description="Folder of clients' saved models, ID.pt2; by default models in the run's folder."
    )
    model_name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="Name of the model in requests for predictions; by default the run's name.",
    )
    models_kept: int = Field(default=64, ge=1, description="Maximum number of saved models in memory.")
    body_bytes: int = Field(
        default=4 << 20,
        ge=1024,
        description="Largest body of a request for predictions, and number of outputs in an answer.",
    )


@dataclass(frozen=True)
class ServingLoad:
    """Load of the service."""

    round: int | None
    """Round that is served; None while there is none."""
    handed_out: int
    """Models handed out since the start."""
    refused: int
    """Requests refused since the start."""
    waiting: int
    """Clients waiting for a tile."""
    conversations: int
    """Open conversations."""
    latency_s: dict[str, float]
    """Latency of recent models by quantile, from a client's last answer to the sending of its model; 0 while there are
    none."""


class Personalization:
    """Serves the last durable round of a run to clients that request their models.

    Parameters
    ----------
    load
        Finds the round to serve.
    audit
        Audit log of the models handed out, where clients must identify themselves.
    lazy
        True to load nothing until the first request.
    follow_s
        Interval between checks for a newer durable round; None disables them.
    threads
        Threads of torch.
    """

    def __init__(
        self,
        load: Load,
        settings: ModelServerSettings | None = None,
        audit: Audit | None = None,
        *,
        lazy: bool = False,
        follow_s: float | None = 1.0,
        threads: int = 1,
    ) -> None:
        self._load = load
        self._settings = settings or ModelServerSettings()
        self._follow_s = follow_s
        self._audit = audit or Audit()
        self._now: PreparedRound | None = None
        self._following: asyncio.Task[None] | None = None
        self._asked = not lazy  # the first request of a lazy service loads the round
        self._open = 0
        self._handed_out = self._refused = 0
        self._never: str | None = None  # why the run's method has no models to hand out
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._tiles = TileQueue(self._settings.linger_s, self._settings.deadline_s, threads)

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

        Raise FedloomError if there is nothing to serve and the service is not lazy.
        """
        if self._asked:
            await self._refresh()
            self._follow()

    async def end(self) -> None:
        """Stop serving; the gRPC server ends open calls."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
        self._tiles.close()

    # ---- the served round

    def _follow(self) -> None:
        if self._follow_s is not None:
            self._following = asyncio.create_task(self._refresh_every(self._follow_s))

    async def _refresh_every(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self._refresh()
            except ExperimentError:
                return  # the method has no models to serve, and never will
            except FedloomError as error:  # keep serving the current round
                log.warning("cannot load a newer round: %s", error)
            except Exception:
                log.exception("cannot load a newer round")

    async def _refresh(self) -> None:
        try:
            new_round = await asyncio.to_thread(self._newer, None if self._now is None else self._now.served.digest)
        except ExperimentError as error:
            self._never = str(error)
            raise
        if new_round is not None:
            self._now, round = new_round, new_round.served
            log.info("serving round %d of %s (%s)", round.round, round.about.run, round.digest[:12])

    def _newer(self, digest: str | None) -> PreparedRound | None:
        loaded = self._load(digest)
        return None if loaded is None else PreparedRound.from_served(loaded)

    async def _served(self) -> PreparedRound | None:
        """Return the served round, which a lazy service loads on the first request; None if none is durable yet.

        Raise CallError if the method has no models.
        """
        if not self._asked:
            self._asked = True
            with contextlib.suppress(FedloomError):  # no round is durable yet
                await self._refresh()
            self._follow()
        if self._never is not None:
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, self._never)
        return self._now

    # ---- calls

    async def _describe(self, request: wire.DescribeRequest, context: Any) -> wire.Described:
        async with self._refusing(context):
            current = await self._served()
        newest = request.protocol or FIXED.newest
        protocol = SPOKEN.choose(Protocols(newest, request.oldest_protocol or newest)) or SPOKEN.newest
        load, description = self.load, wire.Described(package=package_for(protocol), protocol=protocol)
        description.load.handed_out, description.load.refused = load.handed_out, load.refused
        description.load.waiting = load.waiting
        for share, name in (("0.5", "p50_ms"), ("0.9", "p90_ms"), ("0.99", "p99_ms")):
            setattr(description.load, name, 1e3 * load.latency_s[share])
        if current is not None:
            facts = current.served.about
            description.served.CopyFrom(round_name(current.served))
            description.algorithm, description.algorithm_version = facts.algorithm, facts.version
            description.experiment, description.problem = facts.experiment, facts.problem
        return description

    @property
    def load(self) -> ServingLoad:
        """Current load; callable from any thread."""
        latencies = sorted(self._latencies) or [0.0]
        latency = {
            f"{share}": latencies[min(len(latencies) - 1, int(share * len(latencies)))] for share in (0.5, 0.9, 0.99)
        }
        round = None if self._now is None else self._now.served.round
        return ServingLoad(round, self._handed_out, self._refused, len(self._tiles), self._open, latency)

    async def _personalize(self, _: Any, context: Any) -> None:
        self._open += 1
        try:
            async with self._refusing(context):
                await self._converse(context)
        finally:
            self._open -= 1

    @contextlib.asynccontextmanager
    async def _refusing(self, context: Any) -> AsyncIterator[None]:
        """Abort a call whose handling fails because of the client, the load or the method."""
        try:
            yield
            return
        except CallError as error:
            code, reason = error.code, str(error)
            if error.retry_ms is not None:
                context.set_trailing_metadata(((RETRY, str(error.retry_ms)),))
        except WireError as error:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except TimeoutError:
            code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {self._settings.deadline_s:g} s"
        self._refused += 1
        await context.abort(code, printable(reason, 500))

    async def _converse(self, context: Any) -> None:
        reader = PartReader(context.read, wire.NewcomerFrame)
        async with asyncio.timeout(ASK_TIMEOUT_S):
            ask = await _read_ask(reader)
        if ask is None:
            return
        _check_ask(ask)
        client = PendingClient(ask.client, await self._round(ask))
        round, opening = client.prepared.served, client.prepared.opening
        if round.answer is Metrics:
            self._hand_out(client, time.perf_counter())
            await self._write(context, opening)
        else:
            await self._write(context, opening)
            client.answer = await self._received(reader, round, round.answer)
            await self._take_part(context, reader, client)

    async def _take_part(self, context: Any, reader: PartReader, client: PendingClient) -> None:
        """Let a client that has answered the opening wait for a tile, and hold its conversation to the end."""
        received_at = time.perf_counter()
        if len(self._tiles) >= self._settings.queue:
            raise self._overloaded(f"the queue is full: {pluralize(self._settings.queue, 'client')} waiting")
        self._tiles.add(client)
        try:
            while True:
                message = await client.outgoing.get()
                if isinstance(message, Exception):
                    raise message
                frames, message_type = client.frames(message.encoded, last=message.awaited is None), message.awaited
                del message  # holds the models of the whole tile
                if message_type is None:
                    self._hand_out(client, received_at)
                    await self._write(context, frames)
                    return
                await self._write(context, frames)
                answer = await self._received(reader, client.prepared.served, message_type)
                received_at = time.perf_counter()
                if client.on_answer is not None:
                    client.on_answer(answer)
        finally:
            self._tiles.remove(client)

    def _hand_out(self, client: PendingClient, received_at: float) -> None:
        """Count and log a model before it is sent: a client that has received it disconnects at once.

        Parameters
        ----------
        received_at
            Time at which the client's last message was received, in seconds of ``time.perf_counter``.

        Raises
        ------
        StorageError
            If the audit log cannot be written; the model must not be sent then.
        """
        if (peer := PEER.get()) is not None:
            round = client.prepared.served
            details: dict[str, Value] = {"client": client.client, "round": round.round, "digest": round.digest}
            self._audit.write("handed_out", identity=peer.identity.name, host=peer.host, **details)
        self._handed_out += 1
        self._latencies.append(time.perf_counter() - received_at)

    async def _round(self, ask: wire.Ask) -> PreparedRound:
        """Return the round to serve; raise CallError if the client asks for another, or must retry later."""
        current = await self._served()
        if current is None:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "no round of the run is durable yet; retry later", 1_000)
        round = current.served
        if (ask.algorithm, ask.algorithm_version) != (round.about.algorithm, round.about.version):
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the client asks for method {printable(ask.algorithm, 80)} version {ask.algorithm_version}, and the "
                f"run has {round.about.algorithm} version {round.about.version}; {_SAME_VERSION}",
            )
        if ask.HasField("round") and ask.round != round.round:
            reason = f"round {ask.round} is not served; the current round is {round.round}"
            raise CallError(grpc.StatusCode.NOT_FOUND, reason)
        if self._open > self._settings.conversations:
            limit = pluralize(self._settings.conversations, "open conversation")
            raise self._overloaded(f"the limit of {limit} is reached")
        return current

    def _overloaded(self, reason: str) -> CallError:
        """Return the refusal of a client, with the time that the queue is expected to take."""
        retry_ms = round(min(LATE_MS, max(SOON_MS, 1e3 * self._tiles.expected_s)))
        log.warning("refused a client: %s", reason)
        return CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{reason}: retry in {retry_ms} ms", retry_ms)

    async def _write(self, context: Any, frames: Sequence[bytes]) -> None:
        async with asyncio.timeout(self._settings.deadline_s):  # a client that does not read holds memory
            for frame in frames:
                await context.write(frame)

    async def _received(self, reader: PartReader, round: ServedRound, message_type: type[Message]) -> Received:
        """Read one client's answer, whose values are checked by the tile that uses it.

        Raise WireError or CallError if it is damaged, or not of the awaited class in this run; TimeoutError if it does
        not arrive in time.
        """
        shapes = {message_type: round.shapes[message_type]}
        limit = 8 * sum(map(math.prod, shapes[message_type].values()))
        async with asyncio.timeout(self._settings.deadline_s):
            message = await reader.message({message_type.__name__: message_type}, limit)
        if (wrong := mismatch(message_type, message.specs, shapes, round.dtype)) is not None:
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        return message


async def _read_ask(reader: PartReader) -> wire.Ask | None:
    """Read a client's first part; None if it disconnected without one."""
    try:
        ask: wire.Ask = await reader.part("ask")
    except WireError as error:
        if not reader.size and error.refusal is Refusal.TRUNCATED:
            return None
        if error.refusal is Refusal.CHECKSUM:  # may be an older protocol, whose frames have no seal
            raise WireError(error.refusal, f"the first frame cannot be read; {_SAME_VERSION}") from None
        raise
    return ask


def _check_ask(ask: wire.Ask) -> None:
    """Raise CallError if a client's request cannot be served."""
    if not CLIENT_ID.fullmatch(ask.client):
        reason = "the client's id must have 1 to 128 letters, digits, '.', '_' and '-'"
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, reason)
    peer = PEER.get()
    if peer is not None and not peer.identity.speaks_for(ask.client):
        reason = f"may not act for {ask.client}"
        peer.refuse("clients", reason)
        raise CallError(grpc.StatusCode.PERMISSION_DENIED, f"{peer.identity.name} {reason}")


async def serve_models(
    service: Personalization,
    listen: str,
    protection: Protection,
    audit: Audit,
    stop: threading.Event,
    settings: ModelServerSettings,
    started: Callable[[str], None],
    say: Callable[[str], None],
    health: str | None = None,
) -> None:
    """Serve models until asked to stop, then let open conversations end.

    Parameters
    ----------
    started
        Called with the bound address.
    say
        Shows one line to the user.
    health
        ``host:port`` on which only health is served; None disables it.

    Raises
    ------
    ExperimentError
        If the address cannot be bound.
    FedloomError
        If there is nothing to serve.
    """
    options = dict(SERVER_OPTIONS) | {
        "grpc.max_concurrent_streams": STREAMS,
        "grpc.max_allowed_incoming_connections": connections(),
        "grpc.so_reuseport": int(settings.share_port),
    }
    await service.begin()
    services = {MODELS: service.handlers}
    address = await listening(listen, services, protection, audit, [*options.items()], say, health)
    started(address.address)
    try:
        await asyncio.to_thread(stop.wait)
    finally:
        await address.stop(settings.drain_s)
        await service.end()
