"""Messages of the version before, as gRPC carried them, against this version (record_messages.py made them).

The frames of either side are replayed over a real socket to this version's other side.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from facts import tells
from ports import free_address
from record_messages import RECORDED, packed
from run_processes import WAIT_S, ended, final, started

from fedloom.runs.checkpoint import decode_tensors
from fedloom.transport.frames import parse_frame, seal_frame, serialize
from fedloom.transport.stream import METHOD, SERVICE
from fedloom.transport.wire import federation_pb2 as wire

DTYPES = {wire.DATA_TYPE_FLOAT32: "<f4", wire.DATA_TYPE_FLOAT64: "<f8", wire.DATA_TYPE_INT64: "<i8"}
Transfer = tuple[wire.Begin, bytes]


@pytest.fixture(scope="module")
def recorded() -> Any:
    return json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the two members of the recorded federation."""
    return packed(tmp_path_factory.mktemp("members"), 2)


def transfers(parts: Iterator[Any]) -> Iterator[Transfer]:
    """Yield the complete transfers among parts of one direction."""
    open_transfers: dict[int, tuple[wire.Begin, bytearray]] = {}
    for part in parts:
        kind = part.WhichOneof("part")
        if kind == "begin":
            open_transfers[part.begin.transfer] = part.begin, bytearray()
        elif kind == "chunk":
            open_transfers[part.chunk.transfer][1].extend(part.chunk.data)
        elif kind == "end":
            begin, data = open_transfers.pop(part.end.transfer)
            yield begin, bytes(data)


def place(envelope: wire.Envelope) -> tuple[Any, ...]:
    """Return the place of a message in a run: its conversation, exchange and rows, with the clients of these."""
    key = envelope.conversation
    numbers = key.round, key.attempt, key.conversation, key.purpose, envelope.exchange
    return *numbers, tuple(envelope.rows), tuple(envelope.clients)


def values(transfer: Transfer) -> dict[str, np.ndarray]:
    """Return the tensors of a transfer by name."""
    begin, data = transfer
    tensors, at = {}, 0
    for spec in begin.envelope.tensors:
        array = np.frombuffer(data, DTYPES[spec.dtype], count=int(np.prod(spec.shape)), offset=at)
        tensors[spec.name], at = array.reshape(list(spec.shape)), at + array.nbytes
    assert at == len(data)
    return tensors


def check_equal(ours: Transfer, theirs: Transfer) -> None:
    """Check that two messages have the same form, and values that differ only as machines do."""
    one, other = ours[0].envelope, theirs[0].envelope
    assert (one.message, place(one), list(one.tensors)) == (other.message, place(other), list(other.tensors))
    mine, others = values(ours), values(theirs)
    for name, array in mine.items():
        np.testing.assert_allclose(array, others[name], rtol=1e-4, atol=1e-6, err_msg=f"{one.message}.{name}")


def frames(stream: Any, direction: str) -> list[bytes]:
    return [base64.b64decode(frame) for way, frame in stream["frames"] if way == direction]


def parts_of(kind: Any, data: list[bytes]) -> Iterator[Any]:
    return (part for frame in data for part in parse_frame(kind, frame).parts)


def extended(kind: Any, data: bytes) -> bytes:
    """Return a frame whose parts have fields of a later version: a number and a text."""
    frame = parse_frame(kind, data)
    for part in frame.parts:
        getattr(part, part.WhichOneof("part")).MergeFromString(b"\xa0\x06\x07\xaa\x06\x03abc")  # fields 100, 101
    return seal_frame([piece for part in frame.parts for piece in serialize(part)])


# ---- workers of the version before


def act_as_worker(address: str, streams: list[Any], newer: bool, protocols: list[int]) -> None:
    """Send a worker's recorded frames: each Hello as it was, and each answer, with the ids of the present run.

    With ``newer``, every part has fields that nobody knows yet.
    """
    answers = {
        place(begin.envelope): (begin, data)
        for stream in streams
        for begin, data in transfers(parts_of(wire.WorkerFrame, frames(stream, "up")))
    }
    requests = {
        place(begin.envelope): (begin, data)
        for stream in streams
        for begin, data in transfers(parts_of(wire.AggregatorFrame, frames(stream, "down")))
    }
    for stream in streams:
        outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        hello = frames(stream, "up")[0]
        outgoing.put(extended(wire.WorkerFrame, hello) if newer else hello)
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(WAIT_S)
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(outgoing.get, None), timeout=WAIT_S)
            arriving = (part for frame in call for part in parse_frame(wire.AggregatorFrame, frame).parts)
            run = next(arriving).welcome
            protocols.append(run.protocol)
            for number, request in enumerate(transfers(arriving)):
                check_equal(request, requests[place(request[0].envelope)])
                begin, data = answers[place(request[0].envelope)]
                begin.envelope.run, begin.envelope.incarnation = run.run, run.incarnation
                begin.transfer = number
                chunk = wire.Chunk(transfer=number, data=data)
                for part in ({"begin": begin}, {"chunk": chunk}, {"end": wire.End(transfer=number)}):
                    frame = seal_frame(serialize(wire.WorkerPart(**part)))
                    outgoing.put(extended(wire.WorkerFrame, frame) if newer else frame)
            outgoing.put(None)


@pytest.mark.parametrize("newer", [False, True])
def test_recorded_workers_train_with_this_aggregator(tmp_path: Path, recorded: Any, newer: bool) -> None:
    (tmp_path / "e.yaml").write_text(recorded["experiment"])
    address, by_worker = free_address(), defaultdict(list)
    for stream in recorded["streams"]:
        by_worker[stream["worker"]].append(stream)
    assert all(len(streams) == 2 for streams in by_worker.values())  # inputs are measured on the first
    protocols: list[int] = []
    at = ("aggregator", tmp_path / "e.yaml", "--listen", address, "--out", tmp_path / "run", "--no-report")
    with started(*at) as aggregator, ThreadPoolExecutor() as pool:
        acting = [pool.submit(act_as_worker, address, streams, newer, protocols) for streams in by_worker.values()]
        for worker in acting:
            worker.result(WAIT_S)
        ended(aggregator, 0)
    assert protocols == [9] * 4
    found, _ = decode_tensors(final(tmp_path / "run"))
    expected, _ = decode_tensors(base64.b64decode(recorded["state"]))
    torch.testing.assert_close(dict(found), dict(expected))


# ---- an aggregator of the version before


class OldAggregator:
    """Aggregator that sends recorded frames, and each one once what came before it has been answered."""

    def __init__(self, recorded: Any, newer: bool) -> None:
        self.newer = newer
        self.hellos: list[wire.Hello] = []
        self.answers = 0
        self.errors: list[BaseException] = []
        self._refused = [base64.b64decode(frame) for frame in recorded["refused"]]
        self._streams: dict[str, list[Any]] = defaultdict(list)
        for stream in recorded["streams"]:
            self._streams[stream["worker"]].append(stream)
        self._server = grpc.server(ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def _join(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        hello = parse_frame(wire.WorkerFrame, next(incoming)).parts[0].hello
        self.hellos.append(hello)
        if (hello.protocol, hello.package) != (9, "0.1.0"):
            yield from self._refused
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused; the previous frame gives the reason")
        stream = self._streams[hello.worker].pop(0)
        answers = transfers(part for frame in incoming for part in parse_frame(wire.WorkerFrame, frame).parts)
        expected = transfers(parts_of(wire.WorkerFrame, frames(stream, "up")))
        for way, frame in stream["frames"][1:]:
            if way == "down":
                data = base64.b64decode(frame)
                yield extended(wire.AggregatorFrame, data) if self.newer else data
                continue
            for part in parts_of(wire.WorkerFrame, [base64.b64decode(frame)]):
                if part.WhichOneof("part") == "end":
                    try:
                        check_equal(next(answers), next(expected))
                    except BaseException as error:
                        self.errors.append(error)
                        raise
                    self.answers += 1


@pytest.mark.parametrize("newer", [False, True])
def test_these_workers_train_with_a_recorded_aggregator(members: Path, recorded: Any, newer: bool) -> None:
    aggregator = OldAggregator(recorded, newer)
    with contextlib.ExitStack() as processes:
        processes.callback(aggregator.stop)
        at = ("worker", "--aggregator", aggregator.address, "--name")
        workers = [processes.enter_context(started(*at, f"w{i}", "--data", members / f"s{i}")) for i in range(2)]
        outputs = [ended(worker, 0) for worker in workers]
    assert not aggregator.errors
    assert all(tells(output, "protocol 9", "protocol 9") for output in outputs)
    spoken = sorted((hello.worker, hello.protocol, hello.oldest_protocol) for hello in aggregator.hellos)
    assert spoken == [(f"w{i}", *protocols) for i in range(2) for protocols in ((9, 0), (9, 0), (10, 9), (10, 9))]
    assert aggregator.answers == sum(
        1 for stream in recorded["streams"] for _ in transfers(parts_of(wire.WorkerFrame, frames(stream, "up")))
    )
