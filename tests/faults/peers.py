"""Hostile peers, by kind: each does its worst to the aggregator at an address until it is told to stop."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import grpc
import torch
from transport_support import Hostile

from faults import http2
from fedloom.algorithms.base import available, find_algorithm
from fedloom.engine.options import WorkerOptions
from fedloom.engine.worker import Worker
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.transport import ConversationKey, Lost
from fedloom.messages import Message
from fedloom.security.options import ClientOptions
from fedloom.transport.frames import FRAME_BYTES, seal_frame, serialize
from fedloom.transport.wire import federation_pb2 as wire

ALGORITHMS = {name: find_algorithm(name).version for name in available()}
CONTROL = "\u2028\u2029\x85\x00\x07\x1b[2J\x1b]0;owned\x07\r\n\t\udcff".replace("\udcff", "\ufeff")


@dataclass
class Attack:
    """State of a hostile peer; ``done`` is set after its attack."""

    address: str
    random: Random
    partition: str
    clients: Sequence[str]
    identity: ClientOptions | None = None  # a certificate of its own, where there is mutual TLS
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def over(self) -> None:
        """Nothing more to do: hold what is held until the end."""
        self.done.set()
        self.stop.wait()

    def peer(self, stack: ExitStack, clients: Sequence[str] = (), name: str | None = None, **hello: Any) -> Hostile:
        """A peer that may send what it likes, and has not said Hello yet."""
        name = f"peer-{self.random.getrandbits(40):x}" if name is None else name
        peer = Hostile(
            self.address, name, clients, credentials=self._credentials(), **{"algorithms": ALGORITHMS, **hello}
        )
        stack.callback(peer.leave)
        return peer

    def _credentials(self) -> Any:
        if self.identity is None:
            return None
        ca, certificate, key = (path.read_bytes() for path in self._files())
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def _files(self) -> tuple[Path, Path, Path]:
        assert self.identity is not None
        files = self.identity.ca, self.identity.certificate, self.identity.key
        return tuple(path for path in files if path is not None)  # type: ignore[return-value]

    def connect(self) -> socket.socket:
        """A TCP connection to the aggregator."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5)

    def connect_as_member(self) -> socket.socket:
        """Connect with the peer's certificate; without TLS if it has no identity."""
        if self.identity is None:
            return self.connect()
        ca, certificate, key = self._files()
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(certificate, key)
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(self.connect(), server_hostname=self.address.rpartition(":")[0])


def frames(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Parts packed into frames as large as they may be."""
    frame = bytearray()
    for part in parts:
        if len(frame) + len(part) > FRAME_BYTES - 16:
            yield seal_frame([frame])
            frame.clear()
        frame += part
    yield seal_frame([frame])


def part(**kind: Any) -> bytes:
    """One serialized part of a worker's frame."""
    return b"".join(serialize(wire.WorkerPart(**kind)))


# --- peers that answer ------------------------------------------------------------------------------------------------


class Liar(Worker):
    """A real worker whose answers are changed before they are sent."""

    lie: Callable[[ConversationKey, Message], Message | Lost]

    def _session(self, joined: Any) -> Any:
        return _Lying(super()._session(joined), self.lie)


class _Lying:
    def __init__(self, honest: Any, lie: Callable[[ConversationKey, Message], Message | Lost]) -> None:
        self.vocabulary, self.close = honest.vocabulary, honest.close
        self._honest, self._lie = honest, lie

    def answer(self, key: ConversationKey, *asked: Any) -> Iterator[tuple[int, Message | Lost]]:
        for row, answer in self._honest.answer(key, *asked):
            yield row, answer if isinstance(answer, Lost) else self._lie(key, answer)


def answering(attack: Attack, lie: Callable[[ConversationKey, Message], Message | Lost]) -> None:
    """Take part as a worker that lies."""

    def lying(key: ConversationKey, answer: Message) -> Message | Lost:
        attack.done.set()
        return lie(key, answer)

    liar = Liar(
        attack.address, "liar", WorkerOptions(attack.partition, verify=False, reconnect_s=0.5, trust=attack.identity)
    )
    liar.lie = lying
    liar.serve(attack.stop)


def wrong_class(attack: Attack) -> None:
    """Metrics in training, and in an evaluation what it answered in training."""
    trained: list[Message] = []

    def lie(key: ConversationKey, answer: Message) -> Message:
        if key.purpose == "train":
            trained.append(answer)
            return EvaluationPlan.of_classes(10).nothing(1, 2)
        return trained[-1] if trained else answer

    answering(attack, lie)


def absurd_counts(attack: Attack) -> None:
    """The largest finite number wherever a float64 is said (steps, losses, metrics), or a fraction, or less than 0."""
    absurd = attack.random.choice((1.7e308, -1.7e308, 0.5, 2.0**53))
    answering(attack, lambda key, answer: changed(answer, torch.float64, absurd))


def absurd_updates(attack: Attack) -> None:
    """The largest finite number wherever a float32 is said."""
    absurd = attack.random.choice((3.4e38, -3.4e38, 1e30))
    answering(attack, lambda key, answer: changed(answer, torch.float32, absurd))


def changed(message: Message, dtype: torch.dtype, value: float) -> Message:
    """A message whose tensors of one type hold this alone."""
    tensors = message.tensors().items()
    return type(message)(**{n: torch.full_like(x, value) if x.dtype == dtype else x for n, x in tensors})


def reasons(attack: Attack) -> None:
    """Refuses every row, for reasons that end lines, terminals and patience."""
    answering(attack, lambda key, answer: Lost(CONTROL * attack.random.choice((1, 1_000))))


def silent(attack: Attack) -> None:
    """Five peers join for every client, and never answer."""
    with ExitStack() as stack:
        for _ in range(5):
            attack.peer(stack, attack.clients).join()
        attack.over()


def stale(attack: Attack) -> None:
    """Frames of earlier rounds again, parts in every order but the right one; then each row is given up."""
    with ExitStack() as stack, suppress(grpc.RpcError, StopIteration):
        peer = attack.peer(stack, attack.clients)
        peer.join()
        recorded: list[Any] = []
        while not attack.stop.is_set():
            request = peer.request()
            zeros = EvaluationPlan.of_classes(10).nothing(1, 2)
            for position in range(len(request.rows)):
                parts = peer.transfer(request, zeros, position)
                old = recorded[-1] if recorded else parts[:1]
                recorded.append(parts)
                orders = (
                    parts[1:],
                    parts[::-1],
                    [*parts[:1], *parts[:1]],
                    old,
                    [*old, *old],
                    attack.random.sample(old, len(old)),
                )
                for order in attack.random.sample(orders, 3):
                    peer.send(order)
                given_up = wire.RowLost(
                    conversation=request.conversation,
                    exchange=request.exchange,
                    row=request.rows[position],
                    reason="stale",
                )
                peer.part(wire.WorkerPart(row_lost=given_up))
            attack.done.set()


# --- peers that flood -------------------------------------------------------------------------------------------------


def flood(attack: Attack, sent: Sequence[bytes]) -> None:
    """Join and send a frame; who is put out for it begins again with the next."""
    with ExitStack() as stack:
        for frame in sent:
            peer = attack.peer(stack)
            with suppress(grpc.RpcError, StopIteration):
                peer.join()
            peer.raw(frame)
        attack.over()


@cache
def all_ends() -> Sequence[bytes]:
    """Four frames of End, made once."""
    return list(frames(part(end=wire.End(transfer=n)) for n in range(1 << 20, (1 << 20) + 4 * FRAME_BYTES // 9)))


def ends(attack: Attack) -> None:
    """Megabytes of End, for transfers that never were."""
    flood(attack, all_ends())


@cache
def all_missing() -> Sequence[bytes]:
    """Two frames that name very many rows, and two with very many that name few."""
    key = wire.ConversationKey(round=1, attempt=1, purpose="train")
    many = part(missing=wire.Missing(conversation=key, exchange=0, rows=range(100_000)))
    few = part(missing=wire.Missing(conversation=key, exchange=0, rows=[0, 0, 1]))
    return list(frames(iter([*[many] * 6, *[few] * (2 * FRAME_BYTES // len(few))])))


def missing(attack: Attack) -> None:
    """Megabytes of Missing, for rows that were never sent."""
    flood(attack, all_missing())


@cache
def all_heartbeats() -> Sequence[bytes]:
    """Two frames of nothing but heartbeats."""
    one = part(heartbeat=wire.Heartbeat())
    return list(frames(iter([one] * (2 * FRAME_BYTES // len(one)))))


def heartbeats(attack: Attack) -> None:
    """Megabytes of Heartbeat."""
    flood(attack, all_heartbeats())


def unread(attack: Attack) -> None:
    """Nonsense that is refused, by a peer that does not read the refusals."""
    with ExitStack() as stack:
        peer = attack.peer(stack)
        with suppress(grpc.RpcError, StopIteration):
            peer.join()
        for n in range(1, 20_000):
            begin = part(begin=wire.Begin(transfer=n, envelope=wire.Envelope(run="x" * 80)))
            peer.raw(seal_frame([begin, part(end=wire.End(transfer=n))]))
            if attack.stop.is_set() or not peer.incoming.is_active():
                break
        attack.over()


# --- peers that join --------------------------------------------------------------------------------------------------


def endless_hello(attack: Attack) -> None:
    """A Hello whose every field is as long as a frame allows, or full of control characters."""
    long = "x" * (FRAME_BYTES - 4096)
    for hello in (
        {"device": long}, {"device": CONTROL * 1000}, {"name": long}, {"name": CONTROL}, {"incarnation": long},
        {"package": long}, {"algorithms": {f"{n:040d}": 1 for n in range(15_000)} | ALGORITHMS},
        {"clients": [long]}, {"clients": [CONTROL]},
    ):  # fmt: skip
        with ExitStack() as stack, suppress(grpc.RpcError, StopIteration):
            attack.peer(stack, **hello).join()
    attack.over()


def invented(attack: Attack) -> None:
    """Thirty Hellos with 110,000 clients that nobody knows."""
    with ExitStack() as stack:
        for n in range(30):
            with suppress(grpc.RpcError, StopIteration):
                attack.peer(stack, [f"{n:x}{i:05x}" for i in range(110_000)]).join()
        attack.over()


def stolen(attack: Attack) -> None:
    """Somebody else says that it is the worker who is here."""
    with ExitStack() as stack:
        for n in range(20):
            with suppress(grpc.RpcError, StopIteration):
                attack.peer(stack, attack.clients, "worker-0", incarnation=f"i{n}").join()
        attack.over()


# --- peers below the protocol -----------------------------------------------------------------------------------------


def idle(attack: Attack) -> None:
    """1,100 connections without a message."""
    with ExitStack() as stack:
        for _ in range(1_100):
            with suppress(OSError):
                stack.enter_context(attack.connect())
        attack.over()


def unfinished(attack: Attack) -> None:
    """Fifty messages of 4 MiB at once on one connection, all but their last byte."""
    with suppress(OSError), attack.connect_as_member() as channel:
        http2.unfinished_messages(channel, "/fedloom.v1.Federation/Join", streams=50, size=4 << 20, stop=attack.stop)
    attack.over()


def other_protocols(attack: Attack) -> None:
    """Speak other protocols: HTTP/1.1, TLS, noise, half a preface, another version of ours."""
    noises = (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        attack.random.randbytes(1000), b"PRI * HTTP/2.0\r\n", http2.PREFACE + attack.random.randbytes(1000),
    )  # fmt: skip
    for noise in noises * 8:
        with suppress(OSError), attack.connect() as channel:
            channel.sendall(noise)
            channel.settimeout(0.05)
            channel.recv(100)
    for hello in ({"protocol": 99}, {"protocol": 9, "oldest_protocol": 10}, {"algorithms": {}}, {"incarnation": ""}):
        with ExitStack() as stack, suppress(grpc.RpcError, StopIteration):
            attack.peer(stack, **hello).join()
    attack.over()
