"""Long transfers through a proxy that cuts connections: the rest is sent, and nothing else is assembled."""

import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trusted_wire import Federation
from torch import Tensor
from transport_support import Hostile, Proxy, Start, Sum, Worker, expected, key, make_aggregator, start_call, until

from fedloom.federation.transport import Lost
from fedloom.transport import worker_requests
from fedloom.transport.codec import CHUNK_BYTES, Cutter, encode
from fedloom.transport.frames import FRAME_BYTES, WireError, parse_frame, seal_frame
from fedloom.transport.stream import key_to_wire
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.transport.worker_requests import RequestReader

D = 25_000_000  # 100 MB
EVERY = 20_000_000
OVERHEAD = 0.02  # bytes of HTTP/2 and TLS around frames, at most
SMALL = 1_000_000  # 4 MB: four chunks


class CuttingProxy(Proxy):
    """Proxy that ends a connection after ``every`` bytes in one direction, and counts the bytes that it carries.

    It waits until the receiver has read what the connection has carried, but for a part of a frame: gRPC drops what is
    unread when a connection ends, and a busy machine reads slowly.
    """

    def __init__(self, target: str, every: int) -> None:
        self.every = every
        self.carried = {"up": 0, "down": 0}
        self.read: dict[str, Callable[[], int]] = {}
        """Number of bytes that the receiver has read, by direction."""
        super().__init__(target)

    def _pump(self, source: socket.socket, sink: socket.socket, left: object) -> None:
        way = "down" if source.getpeername() == self.target else "up"
        left, before = self.every, self.read[way]()
        try:
            while left and (data := source.recv(min(left, 1 << 16))):
                left -= len(data)
                sink.sendall(data)
                self.carried[way] += len(data)
            if not left:
                until(lambda: self.read[way]() - before > self.every * (1 - OVERHEAD) - FRAME_BYTES, 120)
                self.cuts += 1
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@pytest.fixture
def aggregator() -> Iterator[Any]:
    aggregator: Any = make_aggregator()
    aggregator.address = aggregator.start("127.0.0.1:0")
    yield aggregator
    aggregator.stop()


@pytest.fixture
def background() -> Iterator[Callable[..., Any]]:
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


@pytest.fixture
def chunk_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the chunks that workers read."""
    sizes: list[int] = []
    add = RequestReader.add
    monkeypatch.setattr(RequestReader, "add", lambda self, chunk: sizes.append(len(chunk.data)) or add(self, chunk))
    return sizes


def cutting(address: str, aggregator: Any, chunk_sizes: list[int]) -> CuttingProxy:
    proxy = CuttingProxy(address, EVERY)
    proxy.read = {"up": lambda: aggregator.traffic.up, "down": lambda: sum(chunk_sizes)}
    return proxy


def ends_with_few_bytes(aggregator: Any, proxy: CuttingProxy, worker: Worker, chunk_sizes: list[int]) -> None:
    """Run one exchange through the proxy; check its bits, and the bytes that the proxy has carried."""
    aggregator.wait_for({"a-1"}, 60)
    call = start_call(["a-1"], deadline_s=300, d=D)
    (answer,) = aggregator.exchange(call)
    assert isinstance(answer, Sum), answer
    assert torch.equal(answer.x, expected([call], 0))
    assert proxy.cuts >= 8
    assert worker.session.computed == 1
    size = call.message.x.nbytes
    assert sum(chunk_sizes) == sum(tensor.nbytes for tensor in call.message.tensors().values())  # none is read twice
    assert all(size < carried <= 1.1 * size for carried in proxy.carried.values()), proxy.carried
    assert aggregator.refusals.counts == {}


def test_transfers_continue_where_a_cut_interrupted_them(aggregator, chunk_sizes: list[int]) -> None:
    proxy = cutting(aggregator.address, aggregator, chunk_sizes)
    worker = Worker(proxy.address, "w", ["a-1"], reconnect_s=60)
    ends_with_few_bytes(aggregator, proxy, worker, chunk_sizes)
    worker.leave()
    proxy.close()


@pytest.mark.slow
def test_transfers_continue_over_tls(tmp_path: Path, chunk_sizes: list[int]) -> None:
    federation = Federation(tmp_path)
    aggregator = federation.start()
    proxy = cutting(federation.address, aggregator, chunk_sizes)
    federation.address = proxy.address
    worker = federation.worker(federation.member("north"), clients=["a-1"], reconnect_s=60)
    ends_with_few_bytes(aggregator, proxy, worker, chunk_sizes)
    federation.stop()
    proxy.close()


# ---- a hostile worker

WORKER_LIES: dict[str, Callable[[wire.Partial], object]] = {
    "more bytes than were sent": lambda report: setattr(report, "received", 3 * CHUNK_BYTES),
    "more bytes than the message has": lambda report: setattr(report, "received", 2**64 - 1),
    "a wrong checksum": lambda report: setattr(report, "crc32", report.crc32 ^ 1),
    "fewer bytes than its checksum covers": lambda report: setattr(report, "received", CHUNK_BYTES),
    "another row": lambda report: report.rows.__setitem__(0, 1),
    "no rows": lambda report: report.ClearField("rows"),
    "many rows": lambda report: report.rows.extend(range(1, 100_000)),
    "another exchange": lambda report: setattr(report, "exchange", 1),
    "another round": lambda report: setattr(report.conversation, "round", 2),
    "another purpose": lambda report: setattr(report.conversation, "purpose", "evaluate"),
    "another class": lambda report: setattr(report, "message", "Step"),
    "another shape": lambda report: report.tensors[0].shape.__setitem__(1, SMALL + 1),
    "an unknown dtype": lambda report: setattr(report.tensors[0], "dtype", 77),
    "no layout": lambda report: report.ClearField("tensors"),
}


def read_until(worker: Hostile, size: int) -> tuple[wire.Begin, bytes]:
    """Return the Begin of a worker's request, and its first bytes."""
    begin, data = worker.next_of("begin"), b""
    while len(data) < size:
        data += worker.next_of("chunk").data
    return begin, data[:size]


def report_on(begin: wire.Begin, data: bytes) -> wire.Partial:
    """Return a true report on the first bytes of a request."""
    envelope = begin.envelope
    return wire.Partial(
        conversation=envelope.conversation, exchange=envelope.exchange, rows=envelope.rows, message=envelope.message,
        tensors=envelope.tensors, received=len(data), crc32=zlib.crc32(data),
    )  # fmt: skip


def returns(aggregator: Any, first: Hostile, report: wire.Partial, count: int = 1, **hello: Any) -> Hostile:
    """Let a worker leave and join again with a report."""
    first.leave()
    until(lambda: all(worker.name != "hostile" for worker in aggregator.workers()), 60)
    held_of = hello.pop("held_of", "a1")
    again = Hostile(aggregator.address, held_of=held_of, partial=[report] * count, **hello)
    assert again.join().WhichOneof("part") == "welcome"
    return again


def begun(aggregator: Any, background: Callable[..., Any]) -> tuple[Any, Hostile, wire.Begin, bytes]:
    """Begin an exchange with one hostile worker, which has read two chunks of its request."""
    worker = Hostile(aggregator.address)
    assert worker.join().WhichOneof("part") == "welcome"
    exchange = background(aggregator.exchange, start_call(["mallory"], deadline_s=60, d=SMALL))
    return exchange, worker, *read_until(worker, 2 * CHUNK_BYTES)


def answers(worker: Hostile, exchange: Any) -> None:
    """Answer the request of a worker; check that the answer counts."""
    answer = Sum(torch.ones(1, SMALL))
    worker.send(worker.transfer(worker.begin.envelope, answer))
    (outcome,) = exchange.result(60)
    assert torch.equal(outcome.x, answer.x)


def test_a_true_report_is_answered_with_the_rest(aggregator, background) -> None:
    exchange, worker, begin, data = begun(aggregator, background)
    worker = returns(aggregator, worker, report_on(begin, data))
    worker.begin = worker.next_of("begin")
    assert worker.begin.offset == worker.next_of("chunk").offset == len(data)
    answers(worker, exchange)
    worker.leave()


@pytest.mark.parametrize("lie", WORKER_LIES)
def test_a_false_report_is_answered_with_the_whole_message(aggregator, background, lie: str) -> None:
    exchange, worker, begin, data = begun(aggregator, background)
    report = report_on(begin, data)
    WORKER_LIES[lie](report)
    worker = returns(aggregator, worker, report)
    worker.begin = worker.next_of("begin")
    assert worker.begin.offset == worker.next_of("chunk").offset == 0
    answers(worker, exchange)
    worker.leave()


@pytest.mark.parametrize("hello", [{"incarnation": "h2"}, {"held_of": "a0"}, {"held_of": ""}])
def test_a_report_of_another_process_is_answered_with_the_whole_message(aggregator, background, hello) -> None:
    exchange, worker, begin, data = begun(aggregator, background)
    worker = returns(aggregator, worker, report_on(begin, data), **hello)
    worker.begin = worker.next_of("begin")
    assert worker.begin.offset == 0
    answers(worker, exchange)
    worker.leave()


def test_thousands_of_reports_in_a_hello_leave_nothing(aggregator, background) -> None:
    exchange, worker, begin, data = begun(aggregator, background)
    report = report_on(begin, data)
    report.conversation.round = 9  # never was
    worker = returns(aggregator, worker, report, count=5_000)
    worker.begin = worker.next_of("begin")
    assert worker.begin.offset == 0
    answers(worker, exchange)
    (link,) = aggregator._dispatcher.links()
    assert not link.reported
    worker.leave()


def arrived(aggregator: Any, size: int) -> bool:
    """Return whether so many bytes of the hostile worker's answer have arrived on its stream."""
    links = [link for link in aggregator._dispatcher.links() if link.name == "hostile"]
    return any(arrival.assembler.received == size for link in links for arrival in list(link.arrivals.values()))


def interrupted(aggregator: Any, background: Callable[..., Any]) -> tuple[Any, Hostile, list[Any], Tensor]:
    """Break the stream of a worker that has sent two chunks of its answer; return its next stream and the Again."""
    worker = Hostile(aggregator.address)
    assert worker.join().WhichOneof("part") == "welcome"
    call = start_call(["mallory", "anna"], deadline_s=60, d=SMALL)
    honest = Worker(aggregator.address, "honest", ["anna"])
    aggregator.wait_for({"mallory", "anna"}, 60)
    exchange = background(aggregator.exchange, call)
    request = worker.request()
    answer = torch.arange(SMALL, dtype=torch.float32)[None]
    parts = worker.transfer(request, Sum(answer))
    worker.send(parts[:3])
    until(lambda: arrived(aggregator, 2 * CHUNK_BYTES), 60)
    worker.leave()
    until(lambda: all(each.name != "hostile" for each in aggregator.workers()), 60)
    held = [wire.Held(conversation=request.conversation, exchange=0, rows=request.rows)]
    again = Hostile(aggregator.address, held_of="a1", held=held)
    assert again.join().WhichOneof("part") == "welcome"
    (report,) = again.next_of("again").partial
    data = answer.numpy().tobytes()[: 2 * CHUNK_BYTES]
    assert (report.received, report.crc32, list(report.rows)) == (len(data), zlib.crc32(data), [0])
    again.honest = honest
    return exchange, again, parts, answer


def rest_of(parts: list[Any], offset: int = 2 * CHUNK_BYTES) -> list[Any]:
    """Return the parts that continue an answer at an offset."""
    begin = wire.WorkerPart()
    begin.CopyFrom(parts[0])
    begin.begin.offset = offset
    return [begin, *(part for part in parts[1:] if part.WhichOneof("part") == "end" or part.chunk.offset >= offset)]


def ends(exchange: Any, worker: Hostile) -> tuple[Any, Any]:
    """Return the outcomes of both rows, of which the honest one is right."""
    mallory, anna = exchange.result(60)
    assert torch.equal(anna.x, expected([start_call(["mallory", "anna"], d=SMALL)], 1))
    worker.honest.leave()
    worker.leave()
    return mallory, anna


def test_an_answer_continues_where_it_was_interrupted(aggregator, background) -> None:
    exchange, worker, parts, answer = interrupted(aggregator, background)
    worker.send(rest_of(parts))
    assert torch.equal(ends(exchange, worker)[0].x, answer)
    assert aggregator.refusals.counts == {}


def test_an_interrupted_answer_may_begin_anew(aggregator, background) -> None:
    exchange, worker, parts, answer = interrupted(aggregator, background)
    worker.send(worker.transfer(parts[0].begin.envelope, Sum(answer + 1)))
    assert torch.equal(ends(exchange, worker)[0].x, answer + 1)


ANSWER_LIES: dict[str, tuple[Callable[[wire.Begin], object], bool]] = {
    "beyond": (lambda begin: setattr(begin, "offset", 3 * CHUNK_BYTES), True),
    "below": (lambda begin: setattr(begin, "offset", CHUNK_BYTES), True),
    "one byte": (lambda begin: setattr(begin, "offset", 1), True),
    "huge": (lambda begin: setattr(begin, "offset", 2**64 - 1), True),
    "another total": (lambda begin: setattr(begin, "total_bytes", begin.total_bytes + 1), True),
    "another shape": (lambda begin: begin.envelope.tensors[0].shape.__setitem__(1, SMALL - 1), True),
    "another class": (lambda begin: setattr(begin.envelope, "message", "Step"), True),
    "the row of another worker": (lambda begin: begin.envelope.rows.__setitem__(0, 1), False),
    "another exchange": (lambda begin: setattr(begin.envelope, "exchange", 1), False),
    "another round": (lambda begin: setattr(begin.envelope.conversation, "round", 9), False),
    "another incarnation": (lambda begin: setattr(begin.envelope, "incarnation", "a0"), False),
}


@pytest.mark.parametrize("lie", ANSWER_LIES)
def test_an_answer_that_continues_anything_else_is_refused(aggregator, background, lie: str) -> None:
    exchange, worker, parts, answer = interrupted(aggregator, background)
    change, loses_the_row = ANSWER_LIES[lie]
    wrong = rest_of(parts)
    change(wrong[0].begin)
    wrong[0].begin.transfer = 99
    worker.part(wrong[0])
    if not loses_the_row:  # it addressed no row of this worker, and the right rest may still come
        worker.send(rest_of(parts))
    outcome, _ = ends(exchange, worker)
    assert isinstance(outcome, Lost) if loses_the_row else torch.equal(outcome.x, answer)
    assert sum(aggregator.refusals.counts.values()) >= 1


def test_reconnecting_with_ever_new_beginnings_keeps_one_of_them(aggregator, background) -> None:
    exchange, worker, parts, answer = interrupted(aggregator, background)
    running = next(iter(aggregator._dispatcher._conversations)).current
    request, honest = parts[0].begin.envelope, worker.honest
    for _ in range(5):
        worker.send(worker.transfer(request, Sum(answer))[:3])
        until(lambda: arrived(aggregator, 2 * CHUNK_BYTES), 60)
        worker.leave()
        until(lambda: list(running.partials) == [0] and not running.arriving, 60)
        held = [wire.Held(conversation=request.conversation, exchange=0, rows=request.rows)]
        worker = Hostile(aggregator.address, held_of="a1", held=held)
        assert worker.join().WhichOneof("part") == "welcome"
    worker.honest = honest
    worker.send(rest_of(parts))
    assert torch.equal(ends(exchange, worker)[0].x, answer)
    assert not running.partials


# ---- a hostile aggregator


def requested(rows: Sequence[int] = (0,), conversation: int = 0) -> tuple[list[Any], bytes]:
    """Return the parts of a request, and its bytes."""
    message = Start(torch.randn(len(rows), SMALL), torch.tensor(2.0))
    envelope = wire.Envelope(
        run="run-1", incarnation="a1", conversation=key_to_wire(key(conversation)), rows=rows,
        clients=[f"c{row}" for row in rows],
    )  # fmt: skip
    encoded = encode(message)
    pieces = Cutter(wire.AggregatorPart).parts(envelope, encoded)
    frames = [parse_frame(wire.AggregatorFrame, seal_frame(piece)).parts[0] for piece in pieces]
    return frames, b"".join(encoded.buffers)


def put(reader: RequestReader, parts: Sequence[Any]) -> None:
    """Deliver parts to a worker."""
    for part in parts:
        if (kind := part.WhichOneof("part")) == "end":
            reader.end(part.end.transfer)
        else:
            (reader.begin if kind == "begin" else reader.add)(getattr(part, kind))


REQUEST_LIES = {name: change for name, (change, _) in ANSWER_LIES.items() if name != "another incarnation"}


def continued(reader: RequestReader, parts: Sequence[Any]) -> list[Any]:
    """Return the parts that continue an interrupted request."""
    (report,) = reader.partials()
    begin = wire.AggregatorPart()
    begin.CopyFrom(parts[0])
    begin.begin.offset = report.received
    return [begin, *parts[3:]]


def test_a_request_continues_with_the_bytes_of_the_whole() -> None:
    reader = RequestReader()
    parts, data = requested()
    put(reader, parts[:3])
    reader.interrupt()
    (report,) = reader.partials()
    assert (report.received, report.crc32) == (2 * CHUNK_BYTES, zlib.crc32(data[: 2 * CHUNK_BYTES]))
    first, *rest = continued(reader, parts)
    put(reader, [first, *rest[:-1]])
    message = reader.end(rest[-1].end.transfer).message({"Start": Start})
    assert b"".join(encode(message).buffers) == data


@pytest.mark.parametrize("lie", REQUEST_LIES)
def test_a_request_that_continues_anything_else_ends_the_stream(lie: str) -> None:
    reader = RequestReader()
    parts, _ = requested()
    put(reader, parts[:3])
    reader.interrupt()
    first, *_ = continued(reader, parts)
    REQUEST_LIES[lie](first.begin)
    with pytest.raises(WireError):
        reader.begin(first.begin)


def test_a_request_continues_once_and_not_after_its_conversation() -> None:
    reader = RequestReader()
    parts, _ = requested()
    put(reader, parts[:3])
    with pytest.raises(WireError):  # nothing was reported yet
        reader.begin(wire.Begin(transfer=5, envelope=parts[0].begin.envelope, total_bytes=4, offset=2 * CHUNK_BYTES))
    reader.interrupt()
    first, *rest = continued(reader, parts)
    put(reader, [first, *rest])
    with pytest.raises(WireError):
        reader.begin(first.begin)
    put(reader, parts[:3])
    reader.interrupt()
    reader.close(key())
    assert not list(reader.partials())


def test_incomplete_requests_take_no_more_memory_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_requests, "REQUEST_BYTES", 3 * 4 * SMALL)
    reader = RequestReader()
    for conversation in range(9):
        put(reader, requested(conversation=conversation)[0][:3])
        reader.interrupt()
    assert [report.conversation.conversation for report in reader.partials()] == [7, 8]
