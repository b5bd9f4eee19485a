"""Garbage for the aggregator's receiving side, in process: mutated frames by the ten thousand."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random

import torch
from transport_support import Sum, expected, key, served_run, start_call

from faults.place import Broken, Place
from faults.table import Fault, Tried
from fedloom.federation.transport import Call, Lost
from fedloom.transport.codec import Assembler, Cutter, encode, read_specs
from fedloom.transport.dispatcher import Dispatcher
from fedloom.transport.exchanges import Arrived, Clients, Exchange, Link, WorkerInfo
from fedloom.transport.frames import WireError, read_parts, seal_frame, serialize
from fedloom.transport.stream import key_to_wire
from fedloom.transport.wire import federation_pb2 as wire

FRAMES = 20_000
D = 40
HONEST, MALLORY = 0, 1  # rows
SOME = (*(bytes([n]) for n in (0, 1, 8, 0x0A, 0x12, 0x1A, 0x7F, 0x80, 0xFF)), b"\xff" * 9 + b"\x01", b"\x80" * 10)


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the log, which is not measured here."""
    logger = logging.getLogger("fedloom.transport")
    before, logger.level = logger.level, logging.CRITICAL + 1
    logging.getLogger("fedloom.transport.aggregator").manager._clear_cache()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logger.setLevel(before)


def dispatcher() -> Dispatcher:
    """Create the receiving side, without sockets."""
    return Dispatcher(served_run(), lambda come, gone: None, lambda text: None)


def link(name: str, *clients: str, incarnation: str = "i1") -> Link:
    """Create the stream of a worker."""
    return Link(WorkerInfo(name, incarnation, Clients({f"c{i}": i for i in range(4)}, clients), "cpu"))


def reply(cutter: Cutter, call: Call, rows: Sequence[int], value: torch.Tensor) -> bytes:
    """Return a valid answer to some rows, ``[rows, d]``: all parts of a frame that is not sealed yet."""
    envelope = wire.Envelope(
        run="run-1", incarnation="a1", conversation=key_to_wire(call.key), exchange=call.exchange, rows=rows,
        clients=[call.clients[call.rows.index(row)] for row in rows],
    )  # fmt: skip
    return b"".join(b"".join(piece) for piece in cutter.parts(envelope, encode(Sum(value))))


def mutated(frame: bytes, others: list[bytes], random: Random) -> bytes:
    """Return a frame with one or more errors."""
    changed = bytearray(frame)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at, other = random.randrange(len(changed) + 1), random.choice(others)
        match random.randrange(8):
            case 0 | 1 | 2 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 3:
                changed[at : at + 1] = random.choice(SOME)
            case 4:
                del changed[at : at + random.randrange(1, 20)]
            case 5:
                changed[at:at] = changed[at : at + random.randrange(1, 50)]
            case 6:
                start = random.randrange(len(other) + 1)
                changed[at:] = other[start:]
            case 7:
                changed[at:] = random.randbytes(random.randrange(30))
    return bytes(changed)


def frames(place: Place, random: Random) -> Tried:
    """Send mutated frames from one worker: at most its own row is lost."""
    count = FRAMES if place.thorough else FRAMES // 5
    board, honest = dispatcher(), link("honest", "c0")
    board.enter(honest)
    accepted = refused = 0
    with quiet():
        exchange, mallory, good = _asked(board, 1)
        for number in range(count):
            if MALLORY not in exchange.outstanding or number % 200 == 199:
                if HONEST not in exchange.outstanding:
                    raise Broken(f"frame {number} settled the row of another worker")
                board.leave(mallory)
                board.close(exchange.call.key)
                exchange, mallory, good = _asked(board, number + 2)
            frame = seal_frame([mutated(random.choice(good), good, random)])  # as a hostile peer would
            if random.random() < 0.05:
                frame = mutated(frame, good, random)
            try:
                board.receiver.take(mallory, frame)
            except WireError:
                refused += 1
                if refused % 20 == 0:  # as after each on a wire, which is slower than all the rest
                    board.leave(mallory)
                    mallory = link("mallory", "c1", incarnation=f"i{number}")
                    board.enter(mallory)
            with suppress(WireError):
                for kind, part in read_parts(wire.AggregatorFrame, frame):
                    if kind == "begin":
                        Assembler(part, read_specs(part.envelope), 1 << 20)
            accepted += MALLORY not in exchange.outstanding
        honest.arrivals.clear()
        answer = reply(Cutter(wire.WorkerPart), exchange.call, [HONEST], expected([exchange.call], HONEST))
        board.receiver.take(honest, seal_frame([answer]))
    items = [exchange.inbox.get_nowait() for _ in range(exchange.inbox.qsize())]
    arrived = [outcome for row, outcome in items if row == HONEST]  # type: ignore[misc]
    if len(arrived) != 1 or not isinstance(arrived[0], Arrived):
        raise Broken(f"the honest row came to {arrived}")
    return Tried(count, {"streams ended": refused, "rows settled": accepted})


def _asked(board: Dispatcher, round: int) -> tuple[Exchange, Link, list[bytes]]:
    """Return an exchange that waits for both rows, a new stream of the hostile worker, and a valid answer."""
    mallory = link("mallory", "c1", incarnation=f"i{round}")
    board.enter(mallory)
    call = start_call(("c0", "c1"), deadline_s=None, d=D, the_key=key(round=round))
    exchange = Exchange(call)
    board.open(exchange)
    cutter, about = Cutter(wire.WorkerPart), key_to_wire(call.key)
    whole = reply(cutter, call, [MALLORY], torch.randn(1, D))
    both = reply(cutter, call, sorted((MALLORY, HONEST)), torch.randn(2, D))
    parts = (
        wire.WorkerPart(missing=wire.Missing(conversation=about, exchange=0, rows=[0, 1, 7])),
        wire.WorkerPart(row_lost=wire.RowLost(conversation=about, exchange=0, row=0, reason="x")),
        wire.WorkerPart(end=wire.End(transfer=1)),
        wire.WorkerPart(hello=wire.Hello(protocol=1, worker="mallory", clients=["c0"])),
    )
    return exchange, mallory, [whole, whole, both, *(b"".join(serialize(part)) for part in parts)]


def flips(place: Place, random: Random) -> Tried:
    """Flip one bit of a valid answer: it is rejected, requested again, or unchanged in meaning."""
    tries = 2_000 if place.thorough else 200
    with quiet():
        for _ in range(tries):
            board, worker = dispatcher(), link("worker", "c0", "c1")
            board.enter(worker)
            call = start_call(("c0", "c1"), deadline_s=None, d=D)
            exchange = Exchange(call)
            board.open(exchange)
            frame = bytearray(seal_frame([reply(Cutter(wire.WorkerPart), call, [MALLORY], expected([call], MALLORY))]))
            bit = random.randrange(8 * len(frame))
            frame[bit // 8] ^= 1 << bit % 8
            with suppress(WireError):
                board.receiver.take(worker, bytes(frame))
            while not exchange.inbox.empty():
                row, outcome = exchange.inbox.get_nowait()  # type: ignore[misc]
                if isinstance(outcome, Lost):
                    raise Broken(f"bit {bit} of {8 * len(frame)} lost row {row}: {outcome.reason}")
                message = outcome.message()
                if row != MALLORY or not torch.equal(message.x, expected([call], MALLORY)):
                    raise Broken(f"bit {bit} of {8 * len(frame)} was taken for an answer of row {row}")
    return Tried(tries)


FAULTS = (
    Fault(
        "frames", "garbage", "mutated frames", "refused with a status; other peers are not affected",
        frames, goal=50, short=1,
    ),
    Fault(
        "damage", "garbage", "one bit of an answer flipped", "refused and requested again, never used",
        flips, goal=20, short=1,
    ),
)  # fmt: skip
