"""A hostile worker over a real socket: invalid messages are refused and counted, and the round continues."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from facts import tells
from grpc_health.v1 import health_pb2
from torch import Tensor
from transport_support import (
    D,
    Hostile,
    Start,
    Sum,
    Worker,
    expected,
    key,
    make_aggregator,
    served_run,
    start_call,
    step_call,
    until,
)

from fedloom.core.words import REASON_CHARACTERS
from fedloom.federation.transport import Lost
from fedloom.messages import Message, Quantity, broadcast, rows
from fedloom.transport.dispatcher import UNREAD_LANES, Dispatcher
from fedloom.transport.exchanges import Clients, Link, WorkerInfo
from fedloom.transport.frames import FRAME_BYTES, Refusal, seal_frame, serialize
from fedloom.transport.receiver import UNREAD_REFUSALS, Receiver
from fedloom.transport.versions import OLDEST, PROTOCOL
from fedloom.transport.wire import federation_pb2 as wire

COHORT = ("honest", "mallory", "honest2")


class Total(Message):
    """Message that is in no vocabulary."""

    x: Tensor = rows(Quantity.MODEL)


@pytest.fixture
def aggregator():
    aggregator = make_aggregator()
    aggregator.address = aggregator.start("127.0.0.1:0")
    yield aggregator
    aggregator.stop()


@pytest.fixture
def honest(aggregator):
    worker = Worker(aggregator.address, "honest", ["honest", "honest2"])
    yield worker
    worker.leave()


@pytest.fixture
def hostile(aggregator):
    hostile = Hostile(aggregator.address)
    assert hostile.join().WhichOneof("part") == "welcome"
    yield hostile
    hostile.leave()


@pytest.fixture
def background():
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def good(x=None):
    return Sum(torch.randn(1, D) if x is None else x)


def chunk(part, **changes):
    fields = {"transfer": part.chunk.transfer, "offset": part.chunk.offset, "data": part.chunk.data} | changes
    return wire.WorkerPart(chunk=wire.Chunk(**fields))


def tampered(how):
    """Return an attack on the parts of an otherwise valid reply: begin, chunk 1, chunk 2, end."""

    def attack(hostile, request):
        hostile.send(how(hostile.transfer(request, good())))

    return attack


def announced(how):
    """Return an attack on the announcement of an otherwise valid reply."""

    def attack(hostile, request):
        parts = hostile.transfer(request, good())
        how(parts[0].begin)
        hostile.send(parts)

    return attack


def replies(message):
    return lambda hostile, request: hostile.send(hostile.transfer(request, message))


def spec(begin):
    return begin.envelope.tensors[0]


def no_bool_of_ours(begin):
    spec(begin).dtype = wire.DATA_TYPE_INT64
    spec(begin).shape[1] = D // 2


BAD = {
    "nan": (replies(good(torch.full((1, D), torch.nan))), Refusal.NON_FINITE),
    "inf": (replies(good(torch.full((1, D), torch.inf))), Refusal.NON_FINITE),
    "dtype": (replies(good(torch.zeros(1, D, dtype=torch.float64))), Refusal.SHAPE),
    "integer dtype": (announced(no_bool_of_ours), Refusal.SHAPE),
    "shape": (replies(good(torch.zeros(1, D + 1))), Refusal.SHAPE),
    "row count": (replies(good(torch.zeros(2, D))), Refusal.SHAPE),
    "rank": (replies(good(torch.zeros(D))), Refusal.SHAPE),
    "message": (replies(Total(torch.zeros(1, D))), Refusal.SHAPE),
    "quantity": (announced(lambda b: setattr(spec(b), "quantity", wire.QUANTITY_LOSS)), Refusal.SHAPE),
    "unknown quantity": (announced(lambda b: setattr(spec(b), "quantity", 99)), Refusal.SHAPE),
    "unknown dtype": (announced(lambda b: setattr(spec(b), "dtype", 99)), Refusal.SHAPE),
    "field": (announced(lambda b: setattr(spec(b), "name", "y")), Refusal.SHAPE),
    "broadcast": (announced(lambda b: setattr(spec(b), "per_client", False)), Refusal.SHAPE),
    "no field": (announced(lambda b: b.envelope.ClearField("tensors")), Refusal.SHAPE),
    "gigantic": (announced(lambda b: spec(b).shape.__setitem__(1, 1 << 60)), Refusal.SHAPE),
    "total": (announced(lambda b: setattr(b, "total_bytes", b.total_bytes + 4)), Refusal.SIZE),
    "gigantic total": (announced(lambda b: setattr(b, "total_bytes", 1 << 62)), Refusal.SIZE),
    "client": (announced(lambda b: b.envelope.clients.__setitem__(0, "honest")), Refusal.CLIENT),
    "unknown client": (announced(lambda b: b.envelope.clients.__setitem__(0, "nobody")), Refusal.CLIENT),
    "truncated": (tampered(lambda p: [p[0], p[1], p[3]]), Refusal.TRUNCATED),
    "reordered": (tampered(lambda p: [p[0], p[2], p[1], p[3]]), Refusal.ORDER),
    "repeated chunk": (tampered(lambda p: [p[0], p[1], p[1], *p[2:]]), Refusal.ORDER),
    "repeated begin": (tampered(lambda p: [p[0], p[0], *p[1:]]), Refusal.REPEATED_BEGIN),
    "empty chunk": (tampered(lambda p: [p[0], chunk(p[1], data=b""), *p[1:]]), Refusal.ORDER),
    "too much data": (tampered(lambda p: [*p[:3], chunk(p[1], offset=4 * D, data=b"abc"), p[3]]), Refusal.SIZE),
    "short chunk": (tampered(lambda p: [p[0], chunk(p[1], data=p[1].chunk.data[:99]), *p[2:]]), Refusal.ORDER),
}  # fmt: skip


@pytest.mark.parametrize("attack", BAD)
def test_a_bad_reply_loses_only_its_row_and_the_stream_continues(aggregator, honest, hostile, background, attack):
    send, refusal = BAD[attack]
    aggregator.wait_for(set(COHORT), 30)
    calls = [start_call(COHORT, deadline_s=5), step_call(COHORT, 1, deadline_s=5)]
    answers = background(aggregator.exchange, calls[0])
    send(hostile, hostile.request())
    answers = answers.result(10)
    assert isinstance(answers[1], Lost)
    assert answers[1].reason.startswith(refusal), answers[1]
    assert aggregator.refusals.counts == {refusal: 1}
    for row in (0, 2):
        assert torch.equal(answers[row].x, expected(calls[:1], row))

    # The same stream sends a valid reply to the next exchange.
    answers = background(aggregator.exchange, calls[1])
    reply = good()
    hostile.send(hostile.transfer(hostile.request(), reply))
    answers = answers.result(10)
    assert torch.equal(answers[1].x, reply.x)
    assert torch.equal(answers[0].x, expected(calls, 0))
    assert aggregator.refusals.counts == {refusal: 1}


MISADDRESSED = {
    "future round": ({"conversation": key(round=9)}, Refusal.CONVERSATION),
    "old round": ({"conversation": key(round=0)}, Refusal.LATE),
    "attempt": ({"conversation": key(attempt=3)}, Refusal.CONVERSATION),
    "exchange": ({"exchange": 5}, Refusal.CONVERSATION),
    "run": ({"run": "run-2"}, Refusal.RUN),
    "incarnation": ({"incarnation": "a0"}, Refusal.RUN),
    "unknown row": ({"rows": [77]}, Refusal.CLIENT),
    "no row": ({"rows": []}, Refusal.CLIENT),
    "two rows": ({"rows": [0, 1]}, Refusal.CLIENT),
    "a row of another worker": ({"rows": [0], "clients": ["honest"]}, Refusal.LATE),
}


@pytest.mark.parametrize("address", MISADDRESSED)
def test_a_misaddressed_reply_is_dropped_without_losing_a_client(aggregator, honest, hostile, background, address):
    changes, refusal = MISADDRESSED[address]
    aggregator.wait_for(set(COHORT), 30)
    call = start_call(COHORT, deadline_s=5)
    answers = background(aggregator.exchange, call)
    request = hostile.request()
    reply = good()
    hostile.send(hostile.transfer(request, good(), **changes))
    hostile.send(hostile.transfer(request, reply))
    answers = answers.result(10)
    assert torch.equal(answers[0].x, expected([call], 0))
    assert torch.equal(answers[1].x, reply.x)
    assert aggregator.refusals.counts == {refusal: 1}
    if refusal is not Refusal.LATE:
        assert refusal in hostile.next_of("transfer_refused").reason


def test_a_repeated_reply_is_dropped_and_counted(aggregator, honest, hostile, background):
    aggregator.wait_for(set(COHORT), 30)
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=5))
    request = hostile.request()
    reply = good()
    for _ in range(3):
        hostile.send(hostile.transfer(request, reply))
    assert torch.equal(answers.result(10)[1].x, reply.x)
    until(lambda: aggregator.refusals.counts == {Refusal.LATE: 2})


def test_transfers_of_different_rows_may_interleave(aggregator, background):
    hostile = Hostile(aggregator.address, clients=("a", "b"))
    hostile.join()
    answers = background(aggregator.exchange, start_call(("a", "b"), deadline_s=5))
    request = hostile.request()
    sent = [good(), good()]
    both = [hostile.transfer(request, message, position) for position, message in enumerate(sent)]
    hostile.send([part for pair in zip(*reversed(both), strict=True) for part in pair])
    assert all(torch.equal(answer.x, message.x) for answer, message in zip(answers.result(10), sent, strict=True))
    assert aggregator.refusals.counts == {}
    hostile.leave()


# ---- several rows in one reply


@pytest.fixture
def many(aggregator, background):
    """Return a hostile worker that serves four rows, its request, and the future answers."""
    hostile = Hostile(aggregator.address, clients=("a", "b", "mallory", "honest"))
    hostile.join()
    answers = background(aggregator.exchange, start_call(("a", "b", "mallory", "honest"), d=4, deadline_s=5))
    yield hostile, hostile.request(), answers
    hostile.leave()


def of(request, *rows):
    """Return the address of a reply of several rows."""
    return {"rows": rows, "clients": [request.clients[row] for row in rows]}


def test_each_row_of_a_reply_counts_as_one_answer(aggregator, many):
    hostile, request, answers = many
    sent = torch.randn(4, 4)
    hostile.send(hostile.transfer(request, Sum(sent[[0, 2, 3]]), **of(request, 0, 2, 3)))
    hostile.send(hostile.transfer(request, Sum(sent[1:2]), **of(request, 1)))
    answers = answers.result(10)
    assert torch.equal(torch.cat([answer.x for answer in answers]), sent)
    assert aggregator.refusals.counts == {}


def test_a_row_already_answered_keeps_its_first_answer(aggregator, many):
    hostile, request, answers = many
    first, second = torch.randn(1, 4), torch.randn(4, 4)
    hostile.send(hostile.transfer(request, Sum(first), **of(request, 1)))
    hostile.send(hostile.transfer(request, Sum(second), **of(request, 0, 1, 2, 3)))
    answers = answers.result(10)
    assert torch.equal(torch.cat([answer.x for answer in answers]), torch.cat([second[:1], first, second[2:]]))
    assert aggregator.refusals.counts == {Refusal.LATE: 1}


def test_a_nan_loses_only_its_row(aggregator, many):
    hostile, request, answers = many
    sent = torch.randn(4, 4)
    sent[2, 1] = torch.nan
    hostile.send(hostile.transfer(request, Sum(sent), **of(request, 0, 1, 2, 3)))
    answers = answers.result(10)
    assert isinstance(answers[2], Lost)
    assert all(torch.equal(answers[row].x, sent[row : row + 1]) for row in (0, 1, 3))
    assert aggregator.refusals.counts == {Refusal.NON_FINITE: 1}


class Done(Message):
    """Answer without fields."""


def test_rows_without_fields_are_answers(background):
    aggregator = make_aggregator(vocabulary={"Start": Start, "Done": Done})
    hostile = Hostile(aggregator.start("127.0.0.1:0"), clients=("a", "b"))
    hostile.join()
    call = replace(start_call(("a", "b"), d=4, deadline_s=5), shapes={Done: {}})
    answers = background(aggregator.exchange, call)
    hostile.send(hostile.transfer(request := hostile.request(), Done(), **of(request, 0, 1)))
    assert [type(answer) for answer in answers.result(10)] == [Done, Done]
    hostile.leave()
    aggregator.stop()


@pytest.mark.parametrize("wrong", ["fewer rows", "more rows", "a client", "an early end"])
def test_an_invalid_reply_loses_only_its_rows(aggregator, many, wrong):
    hostile, request, answers = many
    address = of(request, 0, 1)
    message = Sum(torch.randn({"fewer rows": 1, "more rows": 3}.get(wrong, 2), 4))
    if wrong == "a client":
        address["clients"] = list(reversed(address["clients"]))
    parts = hostile.transfer(request, message, **address)
    hostile.send([parts[0], parts[2]] if wrong == "an early end" else parts)
    rest = torch.randn(2, 4)
    hostile.send(hostile.transfer(request, Sum(rest), **of(request, 2, 3)))
    answers = answers.result(10)
    assert all(isinstance(answer, Lost) for answer in answers[:2])
    assert torch.equal(torch.cat([answer.x for answer in answers[2:]]), rest)
    assert sum(aggregator.refusals.counts.values()) == 2


@pytest.mark.parametrize("numbers", [(1, 0), (1, 1), (0, 77)])
def test_out_of_order_repeated_or_unknown_rows_lose_no_client(aggregator, many, numbers):
    hostile, request, answers = many
    clients = [request.clients[row] if row < 4 else "a" for row in numbers]
    hostile.send(hostile.transfer(request, Sum(torch.randn(2, 4)), rows=numbers, clients=clients))
    sent = torch.randn(4, 4)
    hostile.send(hostile.transfer(request, Sum(sent), **of(request, 0, 1, 2, 3)))
    assert torch.equal(torch.cat([answer.x for answer in answers.result(10)]), sent)
    assert aggregator.refusals.counts == {Refusal.CLIENT: 1}


def test_small_replies_share_a_transfer(aggregator, monkeypatch):
    """Four rows arrive in one Begin or a few, depending on timing; large ones in one each."""
    begun = []
    begin = Receiver._begin
    monkeypatch.setattr(Receiver, "_begin", lambda self, link, part: (begun.append(part), begin(self, link, part)))
    clients = ("a", "b", "mallory", "honest")
    worker = Worker(aggregator.address, "w", clients)
    aggregator.wait_for(set(clients), 10)
    for number, d in enumerate((4, D)):
        call = start_call(clients, d=d, the_key=key(round=number + 1))
        answers = aggregator.exchange(call)
        assert all(torch.equal(answer.x, expected([call], row)) for row, answer in enumerate(answers))
    small = [part for part in begun if part.total_bytes <= 4 * 4 * 4]
    assert sum(len(part.envelope.rows) for part in small) == 4
    assert all(part.total_bytes == 16 * len(part.envelope.rows) for part in small)
    assert [len(part.envelope.rows) for part in begun if part not in small] == [1] * 4
    worker.leave()


def test_chunks_of_an_unknown_transfer_are_counted_once(aggregator, honest, hostile, background):
    aggregator.wait_for(set(COHORT), 30)
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=5))
    request = hostile.request()
    hostile.send([wire.WorkerPart(chunk=wire.Chunk(transfer=900, data=b"x"))] * 3)
    hostile.send([wire.WorkerPart(end=wire.End(transfer=900)), wire.WorkerPart(end=wire.End(transfer=901))])
    hostile.send(hostile.transfer(request, good()))
    assert isinstance(answers.result(10)[1], Sum)
    assert aggregator.refusals.counts == {Refusal.UNKNOWN_TRANSFER: 2}


GARBAGE = {
    "noise": seal_frame([b"\xff" * 100]),
    "no parts": seal_frame([]),
    "a part that holds nothing": seal_frame([b"\x0a\x00"]),
    "a second hello": seal_frame(serialize(wire.WorkerPart(hello=wire.Hello(protocol=1)))),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_the_stream_and_the_row_is_reassigned(aggregator, honest, hostile, background, data):
    aggregator.wait_for(set(COHORT), 30)
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=10))
    hostile.request()
    hostile.raw(data)
    code, details = hostile.status()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(Refusal.GARBAGE)
    assert aggregator.refusals.counts == {Refusal.GARBAGE: 1}
    successor = Worker(aggregator.address, "successor", ["mallory"])
    assert all(isinstance(answer, Sum) for answer in answers.result(10))
    successor.leave()


def test_a_frame_that_grpc_rejects(aggregator, honest, hostile, background):
    aggregator.wait_for(set(COHORT), 30)
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=0.5))
    hostile.request()
    hostile.raw(bytes(FRAME_BYTES + 1))
    code, _ = hostile.status()
    assert code is not grpc.StatusCode.OK
    answers = answers.result(10)
    assert [type(answer) for answer in answers] == [Sum, Lost, Sum]


def part(**kind):
    return b"".join(serialize(wire.WorkerPart(**kind)))


FLOODS = {
    "begins": lambda: [part(begin=wire.Begin(transfer=number)) for number in range(1, 1_000)],
    "ends": lambda: [part(end=wire.End(transfer=number)) for number in range(20_000)],
    "chunks": lambda: [part(chunk=wire.Chunk(transfer=7, data=b"x"))] * 20_000,
    "missing": lambda: [part(missing=wire.Missing(exchange=5, rows=range(20_000)))],
    "missing, in many": lambda: [part(missing=wire.Missing(exchange=5, rows=[1]))] * 20_000,
    "rows lost": lambda: [part(row_lost=wire.RowLost(row=5))] * 20_000,
    "reports of withheld measurements": lambda: [
        part(withheld=wire.Withheld(reason=f"policy.yaml: {number}")) for number in range(20_000)
    ],
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_useless_messages_ends_its_stream(aggregator, honest, hostile, background, caplog, flood):
    """It costs a few parts and a few lines of log, regardless of the number sent."""
    aggregator.wait_for(set(COHORT), 30)
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=20))
    hostile.request()
    hostile.raw(seal_frame(FLOODS[flood]()))
    code, details = hostile.status()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details.startswith(Refusal.FLOOD)
    assert sum(aggregator.refusals.counts.values()) < 200
    assert len(caplog.records) < 60
    successor = Worker(aggregator.address, "successor", ["mallory"])
    assert all(isinstance(answer, Sum) for answer in answers.result(10))
    successor.leave()


def test_withheld_measurements_are_shown_shortened_and_printable(aggregator, honest, hostile) -> None:
    reports = lambda: {worker.name: worker.withheld for worker in aggregator.activity().workers}  # noqa: E731
    hostile.part(wire.WorkerPart(withheld=wire.Withheld(reason="\x1b[2J\u202e\n" + "x" * 100_000)))
    until(lambda: reports().get("hostile"), 60)
    assert len(reports()["hostile"]) <= REASON_CHARACTERS
    assert reports()["hostile"].isprintable()
    hostile.part(wire.WorkerPart(withheld=wire.Withheld()))  # it withholds nothing any more
    until(lambda: not reports()["hostile"], 60)
    assert reports()["honest"] == ""


def test_rows_of_silent_workers_are_reassigned_and_they_get_fewer(aggregator):
    """Five silent workers cost seconds once, instead of a deadline each round."""
    everyone = ("anna", "bo", "carla", "dai", "emil", "honest")
    silent = [Hostile(aggregator.address, name=f"a{i}", clients=everyone) for i in range(5)]
    for each in silent:
        each.join()
    worker = Worker(aggregator.address, "w", everyone)
    aggregator.wait_for(everyone, 5, workers=6)
    calls = [start_call(everyone, deadline_s=60, d=10), step_call(everyone, 1, deadline_s=60, d=10)]
    began = time.monotonic()
    for i in (1, 2):
        answers = aggregator.exchange(calls[i - 1])
        assert all(torch.equal(answer.x, expected(calls[:i], row)) for row, answer in enumerate(answers))
    aggregator.close(key())
    took = aggregator.traffic.down
    again = start_call(everyone, deadline_s=60, d=10, the_key=key(round=2))
    assert all(isinstance(answer, Sum) for answer in aggregator.exchange(again))
    assert time.monotonic() - began < 30
    assert worker.session.computed == 18
    assert aggregator.traffic.down > took
    worker.leave()
    for each in silent:
        each.leave()


def test_a_second_worker_that_refuses_a_row_does_not_lose_it(aggregator, monkeypatch, background):
    """The first worker is slow; the second gives the row up, or sends an invalid reply: the first is awaited."""
    slow = Worker(aggregator.address, "slow", ["mallory"])
    aggregator.wait_for(["mallory"], 30)
    go_on = threading.Event()
    slow.before = lambda client, exchange: go_on.wait(20) and None
    call = start_call(("mallory",), deadline_s=8, d=10)
    answers = background(aggregator.exchange, call)
    until(lambda: slow.sessions)
    hostile = Hostile(aggregator.address)
    hostile.join()
    request = hostile.request()
    lost = wire.RowLost(conversation=request.conversation, exchange=0, row=0, reason="no")
    hostile.part(wire.WorkerPart(row_lost=lost))
    assert not answers.done()
    go_on.set()
    assert torch.equal(answers.result(10)[0].x, expected([call], 0))
    slow.leave()
    hostile.leave()


def test_unread_refusals_are_bounded():
    async def flooded():
        link = Link(WorkerInfo("w", "1", Clients({}, ()), "cpu"), allowance=10_000)
        board = Dispatcher(served_run(), lambda come, gone: None, lambda text: None)
        for number in range(1, 2_000):
            board.receiver.take(link, seal_frame([part(begin=wire.Begin(transfer=number))]))
        return link.outbox.waiting(None)

    assert asyncio.run(flooded()) == UNREAD_REFUSALS


def test_a_worker_that_does_not_read_is_disconnected(aggregator):
    hostile = Hostile(aggregator.address)
    hostile.join()
    for number in range(2 * UNREAD_LANES):
        the_key = key(round=number)
        aggregator.exchange(start_call(("mallory",), deadline_s=0.0, the_key=the_key))
        aggregator.close(the_key)
    until(lambda: not aggregator.workers())
    assert aggregator.refusals.counts[Refusal.UNREAD] == 1
    hostile.leave()


def test_a_worker_that_always_lacks_the_conversation_is_disconnected_without_loss(
    aggregator, honest, hostile, background
):
    aggregator.wait_for(set(COHORT), 30)
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=30))
    for _ in range(4):
        request = hostile.request()
        missing = wire.Missing(conversation=request.conversation, exchange=0, rows=[1, 1, 55])
        hostile.part(wire.WorkerPart(missing=missing))
    code, details = hostile.status()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(Refusal.LACKING)
    successor = Worker(aggregator.address, "successor", ["mallory"])
    assert all(isinstance(answer, Sum) for answer in answers.result(10))
    successor.leave()


def test_a_row_can_only_be_given_up_by_its_worker(aggregator, honest, hostile, background):
    aggregator.wait_for(set(COHORT), 30)
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=5))
    request = hostile.request()
    for row in (0, 1):
        lost = wire.RowLost(conversation=request.conversation, exchange=0, row=row, reason="x" * 10_000)
        hostile.part(wire.WorkerPart(row_lost=lost))
    answers = answers.result(10)
    assert isinstance(answers[0], Sum)
    assert answers[1] == Lost("x" * 300)


def test_names_and_reasons_of_workers_are_printable(aggregator, honest, background):
    output = "\x1b[2J\u202e\u2028" * 1000
    hostile = Hostile(aggregator.address, device=output)
    hostile.join()
    aggregator.wait_for(set(COHORT), 30)
    (device,) = [worker.device for worker in aggregator.workers() if worker.name == "hostile"]
    answers = background(aggregator.exchange, start_call(COHORT, deadline_s=5))
    request = hostile.request()
    lost = wire.RowLost(conversation=request.conversation, exchange=0, row=1, reason=output)
    hostile.part(wire.WorkerPart(row_lost=lost))
    reason = answers.result(10)[1].reason
    assert device.isprintable()
    assert reason.isprintable()
    assert len(device) <= 200
    assert len(reason) <= 300
    hostile.leave()


@pytest.mark.parametrize(
    ("hello", "code", "facts"),
    [
        ({"protocol": OLDEST - 1}, wire.REFUSAL_CODE_PROTOCOL, (OLDEST - 1, OLDEST, "install fedloom")),
        ({"protocol": 1, "package": "9\x1b[2J"}, wire.REFUSAL_CODE_PROTOCOL, ("9\\x1b[2J", "install fedloom")),
        ({"protocol": PROTOCOL + 1, "package": "9.9"}, wire.REFUSAL_CODE_PROTOCOL, ("9.9", PROTOCOL + 1, "upgrade")),
        ({"protocol": 2**32 - 1, "oldest_protocol": 2**32 - 1}, wire.REFUSAL_CODE_PROTOCOL, (2**32 - 1, "upgrade")),
        ({"protocol": 0}, wire.REFUSAL_CODE_HELLO, ("0 to 0",)),
        ({"protocol": 9, "oldest_protocol": 10}, wire.REFUSAL_CODE_HELLO, ("10 to 9",)),
        ({"algorithms": {"toy": 3}}, wire.REFUSAL_CODE_ALGORITHM, ("toy", "version 3", "upgrade")),
        ({"algorithms": {"toy": 0}}, wire.REFUSAL_CODE_ALGORITHM, ("toy", "version 0", "install fedloom")),
        ({"algorithms": {}}, wire.REFUSAL_CODE_ALGORITHM, ("toy", "not installed", "install fedloom")),
        ({"incarnation": ""}, wire.REFUSAL_CODE_HELLO, ("incarnation", "1 to 200 characters")),
        ({"incarnation": "h\u2028"}, wire.REFUSAL_CODE_HELLO, ("incarnation", "print")),
        ({"name": "hostile\x1b[2J"}, wire.REFUSAL_CODE_HELLO, ("incarnation", "print")),
        ({"clients": ("mallory", "nobody\n")}, wire.REFUSAL_CODE_CLIENTS, ("no client", "nobody\\n")),
    ],
)
def test_a_rejected_hello_gets_a_reason(aggregator, hello, code, facts):
    hostile = Hostile(aggregator.address, **hello)
    refused = hostile.join().refused
    assert refused.code == code
    assert tells(refused.reason, *facts)
    assert hostile.status()[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert aggregator.workers() == ()
    assert aggregator.refusals.counts == {Refusal.HELLO: 1}
    hostile.leave()


def test_a_stream_that_does_not_begin_with_hello_is_rejected(aggregator):
    for data in (seal_frame([b"\xff\xff"]), seal_frame(serialize(wire.WorkerPart(end=wire.End())))):
        hostile = Hostile(aggregator.address)
        hostile.raw(data)
        assert hostile.next().refused.code != wire.REFUSAL_CODE_UNSPECIFIED
        hostile.leave()


def test_booleans_and_broadcasts_in_a_reply_are_checked(background):
    class Flags(Message):
        on: Tensor = rows(Quantity.OTHER)
        shared: Tensor = broadcast(Quantity.OTHER)

    aggregator = make_aggregator(vocabulary={"Flags": Flags})
    hostile = Hostile(aggregator.start("127.0.0.1:0"), clients=("a", "b"))
    hostile.join()
    call = start_call(("a", "b"), d=3)
    object.__setattr__(call, "shapes", {Flags: {"on": (4,), "shared": (2,)}})
    answers = background(aggregator.exchange, call)
    request = hostile.request()
    message = Flags(torch.tensor([[True, False, True, True]]), torch.tensor([1, 2]))
    hostile.send(hostile.transfer(request, message, 0))
    parts = hostile.transfer(request, message, 1)
    data = b"\x07" + parts[1].chunk.data[1:]
    hostile.send([parts[0], chunk(parts[1], data=data), parts[2]])
    fine, lost = answers.result(10)
    assert torch.equal(fine.on, message.on)
    assert "Flags.on" in lost.reason
    answers = background(aggregator.exchange, replace(call, key=key(round=2)))
    request = hostile.request()
    message = Flags(torch.ones(2, 4, dtype=torch.bool), torch.tensor([1, 2]))
    hostile.send(hostile.transfer(request, message, rows=[0, 1], clients=["a", "b"]))
    assert all("broadcast" in answer.reason for answer in answers.result(10))  # one broadcast for each row
    hostile.leave()
    aggregator.stop()


CROWDED = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
sys.path.insert(0, sys.argv[1])
from transport_support import CLIENTS_OF_ALL, Sum, Worker, make_aggregator, start_call, until
said = []
aggregator = make_aggregator(say=said.append)
import fedloom.transport.aggregator as module; module.CONNECTIONS_EVERY_S = 0.1
address = aggregator.start("127.0.0.1:0")
worker = Worker(address, "w", CLIENTS_OF_ALL)
aggregator.wait_for(CLIENTS_OF_ALL, 10)
print("ready", address, flush=True)
input()
files = [open(__file__) for _ in range(150)]  # what journal and checkpoints need
answers = aggregator.exchange(start_call(CLIENTS_OF_ALL, d=10))
assert all(isinstance(answer, Sum) for answer in answers), answers
until(lambda: said)
print(said[0], flush=True)
aggregator.stop(finished=True)
worker.thread.join(10)
"""


@pytest.mark.slow
def test_idle_connections_leave_file_descriptors_free(tmp_path):
    """With more connections than allowed files, the process continues and logs that it is full."""
    program = tmp_path / "crowded.py"
    program.write_text(CROWDED)
    command = [sys.executable, program, Path(__file__).parent]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[1]
        host, port = address.split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(600)]
        output, _ = process.communicate("\n", timeout=60)
        for each in idle:
            each.close()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert "144 connections are open" in output


CHECK_HEALTH = "/grpc.health.v1.Health/Check"


def anonymous(address):
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def asked_for(service):
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


def test_health_accepts_only_service_names(aggregator):
    with anonymous(aggregator.address) as channel:
        for name, code in (
            ("x" * 900_000, grpc.StatusCode.INVALID_ARGUMENT),
            ("x" * 250, grpc.StatusCode.NOT_FOUND),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(CHECK_HEALTH)(asked_for(name), timeout=10)
            assert refused.value.code() is code


def test_calls_without_a_request_end_and_block_no_health_check(aggregator):
    channels = [anonymous(aggregator.address) for _ in range(20)]
    over = threading.Event()

    def nothing():
        over.wait(30)
        yield from ()

    try:
        calls = [channel.stream_unary(CHECK_HEALTH).future(nothing()) for channel in channels for _ in range(4)]
        with anonymous(aggregator.address) as channel:
            started = time.monotonic()
            channel.unary_unary(CHECK_HEALTH)(asked_for(""), timeout=10)
            assert time.monotonic() - started < 5
        until(lambda: all(call.done() for call in calls))
        assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    finally:
        over.set()
        for channel in channels:
            channel.close()
