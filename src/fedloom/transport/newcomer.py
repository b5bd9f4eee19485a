"""Client side of the personalization protocol: requests a model from a server (docs/serving.md)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from torch import Tensor

import fedloom
from fedloom.data.problem import Problem
from fedloom.errors import DataError, QuorumError, RefusedError
from fedloom.federation.served import About
from fedloom.messages import Message
from fedloom.transport import dial
from fedloom.transport.address import split_address
from fedloom.transport.dial import closed_after_handshake, distrust, perhaps_tls
from fedloom.transport.failures import described, hint
from fedloom.transport.spoken import (
    DESCRIBE,
    MOST_HELD,
    PERSONALIZE,
    PRECISIONS,
    RETRY,
    SERVICE,
    Incoming,
    Unfit,
    digest_of,
    frames,
    pieces,
)
from fedloom.transport.stream import CHANNEL_OPTIONS
from fedloom.transport.wire import personalization_pb2 as wire
from fedloom.trust.options import Credentials
from fedloom.words import DEEPEST, parsed_json, printable

MOST_BYTES = 1 << 32
"""Maximum size of one message from a server."""

REMEMBERED_BYTES = 256 << 20
"""Maximum size of the broadcasts cached for later models."""

RETRY_INTERVAL_S = 0.5
"""Delay before retrying an unavailable server that names no delay of its own."""

RETRYABLE = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
ENDED = "Internal error from Core"
"""Message that grpc.aio reports for a frame on a stream refused meanwhile: a connection carries few streams."""

Speak = Callable[[int, int, Message], Message | None]
"""The client half: ``(round, exchange, message) -> answer``; None once it has its predictors."""


@dataclass(frozen=True)
class Found:
    """Description of what a server serves, and of its load."""

    about: About
    round: int
    digest: str
    handed_out: int
    refused: int
    waiting: int
    latency_ms: Mapping[str, float]


@dataclass(frozen=True)
class Answered:
    """Conversation that has produced a model.

    Attributes
    ----------
    run, round, digest, precision
        Values named by the server.
    up, down
        Bytes of frames from and to the client.
    warm
        True if the opening was not sent again.
    """

    run: str
    round: int
    digest: str
    precision: str
    up: int
    down: int
    warm: bool


class Memory:
    """Thread-safe cache of received broadcasts, and of the opening answered last in each run."""

    def __init__(self, most: int = REMEMBERED_BYTES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._tensors: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0
        self._openings: dict[tuple[About, int], tuple[wire.ServedRound, Message]] = {}

    def held(self) -> list[str]:
        """Return the digests of the most recently used broadcasts."""
        with self._lock:
            return list(self._tensors)[-MOST_HELD:]

    def tensor(self, digest: str) -> Tensor | None:
        """Return a broadcast in the form it was sent in; None if it is not cached."""
        with self._lock:
            if digest in self._tensors:
                self._tensors.move_to_end(digest)
            return self._tensors.get(digest)

    def keep(self, digest: str, tensor: Tensor) -> None:
        """Cache a broadcast, evicting the least recently used ones."""
        with self._lock:
            if digest not in self._tensors and tensor.nbytes <= self._most:
                self._tensors[digest] = tensor
                self._bytes += tensor.nbytes
            while self._bytes > self._most:
                self._bytes -= self._tensors.popitem(last=False)[1].nbytes

    def opening(self, about: About, precision: int) -> tuple[wire.ServedRound, Message] | None:
        """Return the opening of the last conversation with a server of this run, if any."""
        with self._lock:
            return self._openings.get((about, precision))

    def opened(self, about: About, precision: int, served: wire.ServedRound, message: Message) -> None:
        """Remember the opening of a conversation with a server of this run."""
        with self._lock:
            self._openings[about, precision] = (served, message)


MEMORY = Memory()
"""Cache of this process."""


class Models:
    """Connection to a model server, for one event loop.

    Parameters
    ----------
    address
        ``host:port``.
    credentials
        Credentials to connect with; without them, the connection is plaintext and anonymous.
    memory
        Cache for broadcasts.

    Raises
    ------
    ExperimentError
        If the address is invalid, or a token would be sent in plaintext to another machine.
    RefusedError
        If our certificate is not valid now.
    """

    def __init__(self, address: str, credentials: Credentials | None = None, memory: Memory = MEMORY) -> None:
        self._address = address
        self._memory = memory
        host, _ = split_address(address, what="the server of models", lowest=1)
        self._shown = (credentials or Credentials()).show(host)
        self._channel = dial.channel(address, self._shown, CHANNEL_OPTIONS)
        self._metadata = dial.metadata(self._shown)
        self._describe = self._channel.unary_unary(
            f"/{SERVICE}/{DESCRIBE}",
            request_serializer=wire.DescribeRequest.SerializeToString,
            response_deserializer=wire.Described.FromString,
        )
        self._personalize = self._channel.stream_stream(f"/{SERVICE}/{PERSONALIZE}")

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def describe(self, timeout_s: float) -> Found:
        """Return what the server serves.

        Raises
        ------
        RefusedError
            If the server does not admit us, or has another version.
        QuorumError
            If there is no answer in time, or no round is durable.
        """
        ends = time.monotonic() + timeout_s
        while True:
            with self._failures(ends) as wait_s:
                told = await self._describe(
                    wire.DescribeRequest(), metadata=self._metadata, timeout=max(0.001, ends - time.monotonic())
                )
                if told.package != fedloom.__version__:
                    raise RefusedError(
                        f"{self._address}: found fedloom {printable(told.package, 80)}; allowed: "
                        f"{fedloom.__version__}, as here",
                        hint="install the same version of fedloom on both sides",
                    )
                if told.HasField("served"):
                    return _found(told)
                wait_s[:] = [1.0]
                if time.monotonic() + 1.0 > ends:
                    raise QuorumError(f"{self._address}: no round of the run is durable yet", hint="ask again later")
            await asyncio.sleep(wait_s[0])

    async def converse(
        self,
        about: About,
        client: str,
        vocabulary: Mapping[str, type[Message]],
        speak: Speak,
        *,
        precision: str = "float32",
        round: int | None = None,
        timeout_s: float = 60.0,
        early: bool = True,
    ) -> Answered:
        """Hold one conversation to its end; one that breaks or is refused temporarily is restarted.

        Parameters
        ----------
        client
            Id of the client.
        vocabulary
            Messages of the method, by name.
        speak
            The client half; called in a thread.
        round
            Accept only this round; None accepts whichever is served.
        early
            Answer the previous opening before it is known whether the server sends the same one.

        Raises
        ------
        DataError
            If the round is not served, or no model follows from the client's answers.
        RefusedError
            If the server does not admit us.
        QuorumError
            If there is no model in time.
        """
        ends = time.monotonic() + timeout_s
        number, _ = PRECISIONS[precision]
        ask = wire.Ask(
            client=client,
            package=fedloom.__version__,
            algorithm=about.algorithm,
            algorithm_version=about.version,
            precision=number,
            round=round,
        )
        while True:
            with self._failures(ends) as wait_s:
                return await self._once(about, ask, vocabulary, speak, precision, ends, early=early)
            await asyncio.sleep(wait_s[0])

    async def _once(
        self,
        about: About,
        ask: wire.Ask,
        vocabulary: Mapping[str, type[Message]],
        speak: Speak,
        precision: str,
        ends: float,
        *,
        early: bool,
    ) -> Answered:
        number, up, down, exchange = ask.precision, 0, 0, 0
        first = wire.NewcomerFrame(ask=ask)
        first.ask.held.extend(self._memory.held())
        known = self._memory.opening(about, number) if early else None
        answers: Message | None = None
        if known is not None and not (ask.HasField("round") and ask.round != known[0].round):
            answers = await asyncio.to_thread(speak, known[0].round, 0, known[1])
        call = self._personalize(metadata=self._metadata, timeout=max(0.001, ends - time.monotonic()))
        try:
            if known is None or answers is None:
                sent = [first.SerializeToString()]
            else:
                first.ask.answers = known[0].digest
                sent = list(frames(first, type(answers).__name__, pieces(answers)))
            up += await _write(call, sent)
            warm = False
            while True:
                head, incoming, size = await self._read(call, vocabulary)
                down += size
                message, served = self._taken(incoming), head.served
                if exchange == 0:
                    if answers is not None and known is not None and served.digest == known[0].digest:
                        exchange, warm = 1, True
                    else:
                        self._memory.opened(about, number, served, message)
                        warm = incoming.total == 0 and any(spec.held for spec in incoming.specs)
                answer = await asyncio.to_thread(speak, served.round, exchange, message)
                if head.last:
                    if answer is not None:
                        raise QuorumError(f"{self._address} ended the conversation too early")
                    return Answered(
                        printable(served.run), served.round, printable(served.digest), precision, up, down, warm
                    )
                if answer is None:
                    raise QuorumError(f"{self._address} goes on with a conversation that is over")
                reply = wire.NewcomerFrame()
                up += await _write(call, list(frames(reply, type(answer).__name__, pieces(answer))))
                exchange += 1
        except Unfit as unfit:
            raise QuorumError(f"{self._address}: {unfit}") from unfit
        finally:
            call.cancel()

    async def _read(self, call: Any, vocabulary: Mapping[str, type[Message]]) -> tuple[wire.ModelFrame, Incoming, int]:
        data = await self._frame(call)
        size = len(data)
        head = wire.ModelFrame.FromString(data)
        incoming = Incoming(head.spoken, vocabulary, MOST_BYTES)
        incoming.add(head.data)
        while not incoming.whole:
            data = await self._frame(call)
            size += len(data)
            incoming.add(wire.ModelFrame.FromString(data).data)
        return head, incoming, size

    @staticmethod
    async def _frame(call: Any) -> bytes:
        data = await call.read()
        if data is grpc.aio.EOF:
            code = await call.code()  # the error, if any
            if code is not grpc.StatusCode.OK:
                raise _Ended(code, await call.details(), await call.trailing_metadata())
            raise Unfit("the stream ended before the conversation did")
        return bytes(data)

    def _taken(self, incoming: Incoming) -> Message:
        message = incoming.message(self._memory.tensor)
        travelled = incoming.tensors(self._memory.tensor)
        for spec in incoming.specs:
            if spec.digest and not spec.held:
                tensor = travelled[spec.name]
                if digest_of(tensor) != spec.digest:
                    raise Unfit(f"{spec.name} is not what its digest says")
                self._memory.keep(spec.digest, tensor)
        return message

    @contextlib.contextmanager
    def _failures(self, ends: float) -> Iterator[list[float]]:
        """Translate the errors of a call; suppress those to retry after the seconds in the yielded list."""
        wait_s = [RETRY_INTERVAL_S]
        try:
            yield wait_s
        except (grpc.aio.AioRpcError, _Ended) as error:
            code, details = error.code(), error.details()
            said = f"{self._address}: {printable(details or '', 500) or code.name}"
            if why := distrust(self._address, self._shown, code, details):
                raise RefusedError(f"{self._address}: {why}", hint="see docs/security.md") from error
            if code in RETRYABLE or details == ENDED:
                asked = dict(error.trailing_metadata() or ()).get(RETRY)
                wait_s[:] = [
                    int(str(asked)) / 1e3 if asked is not None and str(asked).isdecimal() else RETRY_INTERVAL_S
                ]
                if time.monotonic() + wait_s[0] < ends:
                    return
                found = self._shown, code, details
                why = closed_after_handshake(*found) or perhaps_tls(*found)
                words = why or (printable(details or "", 500) if asked is not None else described(code, details))
                raise QuorumError(f"no model from {self._address} in time: {words}", hint="ask again later") from error
            _raise(code, said, details, error)


class _Ended(Exception):
    """A stream that ended with an error status."""

    def __init__(self, code: grpc.StatusCode, details: str | None, metadata: Any) -> None:
        super().__init__(details)
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        return self._code

    def details(self) -> str | None:
        """Return the server's message."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return the trailing metadata."""
        return self._metadata


def _raise(code: grpc.StatusCode, said: str, details: str | None, error: Exception) -> NoReturn:
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        raise DataError(said) from error
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise RefusedError(
            f"{said.partition(': ')[0]}: nobody hands out models there",
            hint="give the address of `fedloom serve`, or of a `fedloom aggregator`",
        ) from error
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        raise RefusedError(said, hint=hint(code)) from error
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        raise RefusedError(
            said, hint="install the same version of fedloom, and of the method, on both sides"
        ) from error
    raise QuorumError(f"no model: {said}", hint="ask again later") from error


async def _write(call: Any, sent: list[bytes]) -> int:
    for frame in sent:
        with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended; reading reports how
            await call.write(frame)
    return sum(map(len, sent))


def _found(told: wire.Described) -> Found:
    about = About(printable(told.served.run), told.algorithm, told.algorithm_version, told.experiment, told.problem)
    try:
        Problem.from_json(told.problem)
        parsed_json(told.experiment, DEEPEST)
    except (DataError, ValueError) as error:
        raise RefusedError(f"the server's account of its run cannot be read: {printable(str(error), 300)}") from error
    load = told.load
    return Found(
        about,
        told.served.round,
        printable(told.served.digest),
        load.handed_out,
        load.refused,
        load.waiting,
        {"p50": load.p50_ms, "p90": load.p90_ms, "p99": load.p99_ms},
    )
