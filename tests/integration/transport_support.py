"""A toy federation for the tests of the transport: messages, a session, workers in threads, a hostile worker."""

import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields

import grpc
import torch
from torch import Tensor

import fedloom
from fedloom.federation.transport import Call, ConversationKey, Lost, MissingConversation
from fedloom.federation.worker_record import WorkerRecord
from fedloom.messages import Message, Quantity, broadcast, rows
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.codec import Cutter, encode
from fedloom.transport.exchanges import ServedRun
from fedloom.transport.frames import parse_frame, seal_frame, serialize
from fedloom.transport.stream import METHOD, SERVICE, Introduction, key_to_wire
from fedloom.transport.versions import PROTOCOL
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.transport.worker import serve

D = 300_000  # float32: more than one chunk
ALGORITHMS = {"toy": 1}
CLIENTS_OF_ALL = ("anna", "bo", "carla", "dai", "emil", "honest", "honest2", "mallory", "a", "b")


class Start(Message):
    x: Tensor = rows(Quantity.MODEL)
    shared: Tensor = broadcast(Quantity.EMBEDDING_NETWORK)


class Step(Message):
    x: Tensor = rows(Quantity.MODEL_UPDATE)


class Sum(Message):
    x: Tensor = rows(Quantity.MODEL)


def accumulate(client: str, opening: Start):
    """Client algorithm: accumulates what it receives, and adds a number of the client."""
    total = opening.x * opening.shared + len(client)
    while True:
        message = yield Sum(total)
        total = 0.5 * total + message.x


class ToySession:
    """Session with one coroutine per row, like the federation's; it counts the real computations."""

    def __init__(self) -> None:
        self.vocabulary = {"Start": Start, "Step": Step}
        self.held: dict = {}
        self.computed = 0
        self.closed: list[ConversationKey] = []
        self.before = lambda client, exchange: None
        """Called before a row's answer is computed."""

    def answer(self, key, exchange, rows, clients, message, states=()) -> Iterator[tuple[int, Message | Lost]]:
        missing = [row for row in rows if exchange and self.held.get((key, row), (None, -9))[1] < exchange - 1]
        if missing:
            raise MissingConversation(missing)
        for i, (row, client) in enumerate(zip(rows, clients, strict=True)):
            coroutine, reached, last = self.held.get((key, row), (None, -1, None))
            if reached != exchange:
                outcome = self.before(client, exchange)
                if outcome is not None:
                    yield row, outcome
                    continue
                if exchange == 0:
                    coroutine = accumulate(client, message.select([i]))
                    last = next(coroutine)
                else:
                    last = coroutine.send(message.select([i]))
                self.computed += 1
                self.held[key, row] = (coroutine, exchange, last)
            yield row, last

    def close(self, key) -> None:
        self.closed.append(key)
        self.held = {held: value for held, value in self.held.items() if held[0] != key}


class Worker:
    """``serve`` in a thread, with its exception."""

    def __init__(
        self,
        address,
        name,
        clients,
        reconnect_s=5.0,
        algorithms=ALGORITHMS,
        incarnation=None,
        credentials=None,
        bandwidth=None,
    ) -> None:
        self.sessions: list[ToySession] = []
        self.joined: list = []
        self.told: list = []  # standings
        self.error: BaseException | None = None
        self.over: bool | None = None  # return value of serve
        self.before = lambda client, exchange: None
        self.stop = threading.Event()
        self.bandwidth = bandwidth
        extra = {} if incarnation is None else {"incarnation": incarnation}
        introduction = Introduction(name, list(clients), algorithms, **extra)
        self.thread = threading.Thread(
            target=self._run, args=(address, introduction, reconnect_s, credentials), daemon=True
        )
        self.thread.start()

    def _run(self, address, introduction, reconnect_s, credentials) -> None:
        record = WorkerRecord()
        record.listener = self.told.append
        session = {
            "make_session": self._session,
            "stop": self.stop,
            "bandwidth": self.bandwidth,
            "record": record,
        }
        try:
            self.over = serve(address, introduction, **session, reconnect_s=reconnect_s, credentials=credentials)
        except BaseException as error:
            self.error = error

    def _session(self, joined) -> ToySession:
        session = ToySession()
        session.before = lambda client, exchange: self.before(client, exchange)
        self.joined.append(joined)
        self.sessions.append(session)
        return session

    @property
    def session(self) -> ToySession:
        return self.sessions[-1]

    def leave(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


class Hostile:
    """A worker written by hand on the synchronous gRPC client: it can send anything."""

    def __init__(self, address, name="hostile", clients=("mallory",), metadata=(), credentials=None, **hello) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = (
            grpc.insecure_channel(address, options=options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=options)
        )
        self.outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self.cutter = Cutter(wire.WorkerPart)
        method = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.incoming = method(iter(self.outgoing.get, None), metadata=metadata)
        self.parts: list = []
        usual = {"protocol": PROTOCOL, "package": fedloom.__version__, "incarnation": "h1", "algorithms": ALGORITHMS}
        self.hello = wire.Hello(worker=name, clients=clients, **(usual | hello))

    def join(self):
        self.part(wire.WorkerPart(hello=self.hello))
        return self.next()

    def part(self, part) -> None:
        self.raw(seal_frame(serialize(part)))

    def raw(self, data) -> None:
        self.outgoing.put(data)

    def next(self):
        """Return the next part from the aggregator."""
        while not self.parts:
            self.parts = list(parse_frame(wire.AggregatorFrame, next(self.incoming)).parts)
        return self.parts.pop(0)

    def next_of(self, kind):
        while (part := self.next()).WhichOneof("part") != kind:
            pass
        return getattr(part, kind)

    def request(self):
        """Return the envelope of the next request; its data are read and discarded."""
        begin = self.next_of("begin")
        self.next_of("end")
        return begin.envelope

    def envelope(self, request, position=0, **changes):
        """Return the envelope of a reply to one row of a request."""
        envelope = wire.Envelope(
            run=request.run, incarnation=request.incarnation, conversation=request.conversation,
            exchange=request.exchange, rows=[request.rows[position]], clients=[request.clients[position]],
        )  # fmt: skip
        for name, value in changes.items():
            if name == "conversation":
                envelope.conversation.CopyFrom(key_to_wire(value))
            elif name in ("rows", "clients"):
                del getattr(envelope, name)[:]
                getattr(envelope, name).extend(value)
            else:
                setattr(envelope, name, value)
        return envelope

    def transfer(self, request, message, position=0, **changes) -> list:
        """Return the parts of a reply, for a test to change."""
        pieces = self.cutter.parts(self.envelope(request, position, **changes), encode(message))
        return [part for piece in pieces for part in parse_frame(wire.WorkerFrame, seal_frame(piece)).parts]

    def send(self, parts) -> None:
        for part in parts:
            self.part(part)

    def status(self):
        """Return the status with which the aggregator ended the stream."""
        try:
            while True:
                self.next()
        except grpc.RpcError as error:
            return error.code(), error.details()
        except StopIteration:
            return grpc.StatusCode.OK, ""

    def leave(self) -> None:
        self.incoming.cancel()
        self.outgoing.put(None)
        self.channel.close()


class Proxy:
    """Proxy that forwards TCP connections until it cuts them on request, or each after about so many bytes."""

    def __init__(self, target, cut_after=None, seed=0, damage=None) -> None:
        self.cuts = 0
        self.frozen = False
        self.damage = damage or (lambda data, up: data)
        self.cut_after = cut_after
        self.random = random.Random(seed)
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            self.open += [near, far]
            left = [self.random.expovariate(1 / self.cut_after) if self.cut_after else float("inf")]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink, left), daemon=True).start()

    def _pump(self, source, sink, left) -> None:
        """Forward bytes; ``left`` is the number that both directions together may still carry."""
        try:
            while left[0] > 0 and (data := source.recv(1 << 16)):
                if self.frozen:
                    threading.Event().wait()
                data = data[: min(len(data), int(left[0]) + 1)] if self.cut_after else data
                left[0] -= len(data)
                sink.sendall(self.damage(data, source.getpeername() != self.target))
                self.cuts += left[0] <= 0
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def freeze(self) -> None:
        """Stop forwarding without closing anything, like a vanished machine."""
        self.frozen = True

    def cut(self) -> None:
        for end in self.open:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self.open = []

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()


SERVED = {
    "name": "run-1", "experiment": '{"name": "toy"}', "algorithm": "toy", "version": 1, "vocabulary": {"Sum": Sum},
    "dtype": torch.float32, "clients": (*CLIENTS_OF_ALL, "a-1", "a-2", "b-1"),
}  # fmt: skip


def served_run(incarnation="a1", **changes) -> ServedRun:
    return ServedRun(incarnation=incarnation, **(SERVED | changes))


def make_aggregator(incarnation="a1", **changes) -> Aggregator:
    of_run = {field.name for field in fields(ServedRun)}
    run = served_run(incarnation, **{name: changes[name] for name in changes if name in of_run})
    return Aggregator(run, **{name: changes[name] for name in changes if name not in of_run})


def tensors(clients, d=D, seed=0):
    return torch.randn(len(clients), d, generator=torch.Generator().manual_seed(seed))


def key(number=0, attempt=0, round=1) -> ConversationKey:
    return ConversationKey(round, attempt, number, "train")


def start_call(clients, deadline_s=10.0, d=D, the_key=None) -> Call:
    message = Start(tensors(clients, d), torch.tensor(2.0))
    rows = tuple(range(len(clients)))
    return Call(the_key or key(), 0, rows, tuple(clients), message, {Sum: {"x": (d,)}}, deadline_s)


def step_call(clients, exchange, deadline_s=10.0, d=D, rows=None, the_key=None) -> Call:
    rows = tuple(range(len(clients))) if rows is None else rows
    message = Step(tensors(clients, d, seed=exchange))
    return Call(the_key or key(), exchange, rows, tuple(clients), message, {Sum: {"x": (d,)}}, deadline_s)


def expected(calls, row) -> Tensor:
    """Return a row's reply to the last of the calls, computed without the wire."""
    client = calls[0].clients[row]
    coroutine = accumulate(client, calls[0].message.select([row]))
    answer = next(coroutine)
    for call in calls[1:]:
        answer = coroutine.send(call.message.select([call.rows.index(row)]))
    return answer.x


def until(condition, timeout_s=30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
