"""Client side of the personalization protocol: requests a model from a server (docs/serving.md)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc

from fedloom.core.words import DEEPEST, parsed_json, printable
from fedloom.data.problem import Problem
from fedloom.errors import DataError, FedloomError, QuorumError, RefusedError
from fedloom.federation.served import About
from fedloom.messages import Message
from fedloom.security.options import Credentials
from fedloom.transport.codec import Cutter, encode
from fedloom.transport.dial import ServerConnection, connection_failure, hint
from fedloom.transport.frames import Refusal, WireError, pack_parts, serialize
from fedloom.transport.stream import (
    DESCRIBE,
    MODELS,
    PERSONALIZE,
    RETRY,
    PartReader,
    message_frames,
)
from fedloom.transport.versions import SPOKEN, package_for
from fedloom.transport.wire import personalization_pb2 as wire

MOST_BYTES = 1 << 32
"""Maximum size of one message from a server."""

RETRY_INTERVAL_S = 0.5
"""Delay before retrying an unavailable server that does not state one."""

RETRYABLE = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
ENDED = "Internal error from Core"
"""Message of grpc.aio for writing to a stream that was refused because the connection has too many streams."""

_SAME_VERSION = "install the same version of fedloom, and of the method, on both sides"

Speak = Callable[[int, int, Message], Message | None]
"""The client algorithm: ``(round, exchange, message) -> answer``; None once it has its predictors."""


@dataclass(frozen=True)
class ServedModels:
    """Description of what a server serves, and of its load."""

    about: About
    round: int
    digest: str
    handed_out: int
    waiting: int


@dataclass(frozen=True)
class Answered:
    """Conversation that has produced a model, with the run, round and digest that the server reports."""

    run: str
    round: int
    digest: str
    up: int
    """Bytes of frames from the client."""
    down: int
    """Bytes of frames to the client."""


class Models:
    """Connection to a model server at ``host:port``, for one event loop.

    Parameters and errors are those of :class:`ServerConnection`.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._connection = ServerConnection(address, credentials, service="the server of models")
        self._channel, self._metadata = self._connection.channel, self._connection.metadata
        self._describe = self._channel.unary_unary(
            f"/{MODELS}/{DESCRIBE}",
            request_serializer=wire.DescribeRequest.SerializeToString,
            response_deserializer=wire.Described.FromString,
        )
        self._protocol = SPOKEN.newest  # until the server has described its run
        self._personalize = self._channel.stream_stream(f"/{MODELS}/{PERSONALIZE}")

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def describe(self, timeout_s: float) -> ServedModels:
        """Return what the server serves.

        Raise RefusedError if the server does not admit us, or speaks no protocol that we speak. Raise QuorumError if
        there is no answer in time, or no round is durable.
        """
        ends = time.monotonic() + timeout_s
        asked = wire.DescribeRequest(protocol=SPOKEN.newest, oldest_protocol=SPOKEN.oldest)
        while True:
            with self._failures(ends) as wait_s:
                description = await self._describe(
                    asked, metadata=self._metadata, timeout=max(0.001, ends - time.monotonic())
                )
                if not SPOKEN.oldest <= description.protocol <= SPOKEN.newest:
                    package = printable(description.package, 80)
                    is_newer = description.protocol > SPOKEN.newest
                    raise RefusedError(
                        f"the server at {self._address} has fedloom {package}, which speaks protocol "
                        f"{description.protocol}, and this client speaks {SPOKEN.oldest} to {SPOKEN.newest}.",
                        hint=f"install fedloom {package} here" if is_newer else "upgrade the server",
                    )
                self._protocol = description.protocol
                if description.HasField("served"):
                    return _parse_description(description)
                wait_s[:] = [1.0]
                if time.monotonic() + 1.0 > ends:
                    raise QuorumError(f"{self._address}: no round of the run is durable yet", hint="retry later")
            await asyncio.sleep(wait_s[0])

    async def converse(
        self,
        description: About,
        client: str,
        vocabulary: Mapping[str, type[Message]],
        speak: Speak,
        *,
        round: int | None = None,
        timeout_s: float = 60.0,
    ) -> Answered:
        """Hold one conversation to its end; one that breaks or is refused temporarily is restarted.

        Parameters
        ----------
        vocabulary
            Messages of the method, by name.
        speak
            The client algorithm; called in a thread.
        round
            Accept only this round; None accepts any round.

        Raises
        ------
        DataError
            If the round is not served, or no model can be computed from the client's answers.
        RefusedError
            If the server does not admit us.
        QuorumError
            If there is no model in time.
        """
        ends = time.monotonic() + timeout_s
        ask = wire.Ask(
            client=client,
            package=package_for(self._protocol),
            algorithm=description.algorithm,
            algorithm_version=description.version,
            round=round,
        )
        while True:
            with self._failures(ends) as wait_s:
                call = self._personalize(metadata=self._metadata, timeout=max(0.001, ends - time.monotonic()))
                try:
                    return await _Conversation(call, vocabulary, speak).hold(ask)
                except WireError as error:
                    raise QuorumError(f"{self._address}: {error}") from error
                finally:
                    call.cancel()
            await asyncio.sleep(wait_s[0])

    @contextlib.contextmanager
    def _failures(self, ends: float) -> Iterator[list[float]]:
        """Translate the errors of a call; suppress those to retry after the seconds in the yielded list."""
        wait_s = [RETRY_INTERVAL_S]
        try:
            yield wait_s
        except grpc.aio.AioRpcError as error:
            delay_ms = str(dict(error.trailing_metadata() or ()).get(RETRY, ""))
            if delay_ms.isdecimal():
                wait_s[:] = [int(delay_ms) / 1e3]
            failure = self._failure(error, says_when=bool(delay_ms))
            if _is_temporary(error) and isinstance(failure, QuorumError) and time.monotonic() + wait_s[0] < ends:
                return
            raise failure from error

    def _failure(self, error: grpc.aio.AioRpcError, *, says_when: bool) -> FedloomError:
        """Return the error of a failed call; ``says_when`` if the server has stated the time of the next attempt."""
        code, details, connection = error.code(), error.details(), self._connection
        text = printable(details or "", 500) or code.name
        if reason := connection.distrust(code, details):
            return RefusedError(f"{self._address}: {reason}", hint="see docs/security.md")
        if _is_temporary(error):
            reason = connection.closed_after_handshake(code, details) or connection.perhaps_tls(code, details)
            reason = reason or (text if says_when else connection_failure(code, details))
            return QuorumError(f"no model from {self._address} in time: {reason}", hint="retry later")
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
            return DataError(f"{self._address}: {text}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            advice = "give the address of `fedloom serve`, or of a `fedloom aggregator`"
            return RefusedError(f"{self._address} does not serve models", hint=advice)
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return RefusedError(f"{self._address}: {text}", hint=hint(code))
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return RefusedError(f"{self._address}: {text}", hint=_SAME_VERSION)
        return QuorumError(f"no model: {self._address}: {text}", hint="retry later")


def _is_temporary(error: grpc.aio.AioRpcError) -> bool:
    return error.code() in RETRYABLE or error.details() == ENDED


class _Conversation:
    """Attempt at a conversation, on a separate stream."""

    def __init__(self, call: Any, vocabulary: Mapping[str, type[Message]], speak: Speak) -> None:
        self._call = call
        self._vocabulary = vocabulary
        self._speak = speak
        self._cutter = Cutter(wire.NewcomerPart)
        self._reader = PartReader(self._frame, wire.ModelFrame)
        self._up = 0

    async def hold(self, ask: wire.Ask) -> Answered:
        """Send the request, and answer the server's messages until the last.

        Raise WireError if the server sends invalid data, or violates the protocol. Raise grpc.aio.AioRpcError if the
        stream ends with an error.
        """
        await self._send(list(pack_parts([serialize(wire.NewcomerPart(ask=ask))])))
        for exchange in count():
            header = await self._reader.part("header")
            message = (await self._reader.message(self._vocabulary, MOST_BYTES)).message()
            answer = await asyncio.to_thread(self._speak, header.served.round, exchange, message)
            if header.last is not (answer is None):
                early = "too early" if header.last else "after its end"
                raise WireError(Refusal.CONVERSATION, f"the server ended or continued the conversation {early}")
            if answer is None:
                break
            await self._send(message_frames(self._cutter, encode(answer)))
        run = header.served
        return Answered(printable(run.run), run.round, printable(run.digest), self._up, self._reader.size)

    async def _send(self, frames: list[bytes]) -> None:
        for frame in frames:
            with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; reading reports how
                await self._call.write(frame)
            self._up += len(frame)

    async def _frame(self) -> bytes:
        data = await self._call.read()
        if data is grpc.aio.EOF:
            code = await self._call.code()  # the error, if any
            if code is not grpc.StatusCode.OK:
                metadata = await self._call.trailing_metadata()
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, await self._call.details())
        return data  # type: ignore[no-any-return]


def _parse_description(description: wire.Described) -> ServedModels:
    run, load, experiment, problem = description.served, description.load, description.experiment, description.problem
    facts = About(printable(run.run), description.algorithm, description.algorithm_version, experiment, problem)
    try:
        Problem.from_json(problem)
        parsed_json(experiment, DEEPEST)
    except (DataError, ValueError) as error:
        raise RefusedError(f"cannot read the server's description of its run: {printable(str(error), 300)}") from error
    return ServedModels(facts, run.round, printable(run.digest), load.handed_out, load.waiting)
