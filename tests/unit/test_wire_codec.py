"""Messages as frames and back: round trips, limits, and messages rejected before memory is allocated."""

import asyncio
import contextlib
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fedloom.core.memory import SPOOLED_BYTES
from fedloom.federation.transport import Call, ConversationKey
from fedloom.messages import Message, Quantity, broadcast, rows, stack
from fedloom.transport import stream
from fedloom.transport.codec import (
    CHUNK_BYTES,
    HUGE_BYTES,
    Assembler,
    Cutter,
    encode,
    group_answers,
    join_answers,
    memory,
    read_specs,
    split_rows,
)
from fedloom.transport.exchanges import HEARTBEAT, Exchange
from fedloom.transport.frames import (
    FRAME_BYTES,
    ChunkView,
    Refusal,
    WireError,
    parse_frame,
    read_parts,
    seal_frame,
    serialize,
)
from fedloom.transport.stream import Outbox
from fedloom.transport.wire import federation_pb2 as wire

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


class Everything(Message):
    a: Tensor = rows(Quantity.MODEL)
    b: Tensor = broadcast(Quantity.EMBEDDING_NETWORK)
    c: Tensor = rows(Quantity.OTHER)


def random_tensor(shape, dtype, seed):
    size = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


tensors = st.builds(
    random_tensor, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES), st.integers(0, 2**31)
)
messages = st.builds(Everything, tensors, tensors, tensors)


def parts_of(message, part=wire.WorkerPart):
    """Return the parts of one transfer, parsed."""
    frame = wire.WorkerFrame if part is wire.WorkerPart else wire.AggregatorFrame
    pieces = Cutter(part).parts(wire.Envelope(), encode(message))
    return [p for piece in pieces for p in parse_frame(frame, seal_frame(piece)).parts]


def assemble(parts, limit=1 << 30):
    begin = parts[0].begin
    assembler = Assembler(begin, read_specs(begin.envelope), limit)
    for part in parts[1:]:
        if part.WhichOneof("part") == "chunk":
            assembler.add(part.chunk)
        else:
            assembler.end()
    return assembler


def same(left, right):
    return all(
        x.dtype == y.dtype and x.shape == y.shape and encode_bytes(x) == encode_bytes(y)
        for x, y in zip(left.tensors().values(), right.tensors().values(), strict=True)
    )


def encode_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(messages)
@settings(max_examples=60)
def test_a_round_trip_preserves_every_bit(message):
    for part in (wire.WorkerPart, wire.AggregatorPart):
        assert same(assemble(parts_of(message, part)).message(Everything), message)


PARTS = (
    wire.WorkerPart(hello=wire.Hello(protocol=2, worker="w", clients=["a", "b"], algorithms={"toy": 1})),
    wire.WorkerPart(begin=wire.Begin(transfer=1, envelope=wire.Envelope(run="r", rows=[3], clients=["a"]))),
    wire.WorkerPart(chunk=wire.Chunk(transfer=1, data=b"data")),
    wire.WorkerPart(end=wire.End(transfer=1)),
    wire.WorkerPart(missing=wire.Missing(exchange=2, rows=[1, 2])),
    wire.WorkerPart(row_lost=wire.RowLost(row=1, reason="why")),
    wire.AggregatorPart(welcome=wire.Welcome(run="r", experiment='{"lr": 0.1}')),
    wire.AggregatorPart(refused=wire.Refused(code=wire.REFUSAL_CODE_PROTOCOL, reason="why")),
    wire.AggregatorPart(again=wire.Again(exchange=2, rows=[1, 2])),
    wire.AggregatorPart(close=wire.CloseConversation()),
    wire.AggregatorPart(goodbye=wire.Goodbye()),
    wire.AggregatorPart(standing=wire.Standing(standing='{"phase": "training"}')),
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.WhichOneof("part"))
def test_any_flipped_bit_is_detected(part):
    frame = wire.WorkerFrame if isinstance(part, wire.WorkerPart) else wire.AggregatorFrame
    whole = seal_frame(serialize(part))
    assert parse_frame(frame, whole).parts[0] == part
    assert len(list(read_parts(frame, whole))) == 1
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        for reader in (parse_frame, lambda frame, data: list(read_parts(frame, data))):
            with pytest.raises(WireError) as caught:
                reader(frame, bytes(damaged))
            assert caught.value.refusal is Refusal.CHECKSUM


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error_or_a_frame(data):
    for frame in (wire.WorkerFrame, wire.AggregatorFrame):
        with contextlib.suppress(WireError):
            assert parse_frame(frame, seal_frame([data])).parts
        with contextlib.suppress(WireError):
            assert list(read_parts(frame, seal_frame([data])))
        with pytest.raises(WireError):
            parse_frame(frame, data)


def test_non_contiguous_and_gradient_tensors_are_encoded():
    x = torch.arange(12.0).view(3, 4).t().requires_grad_()
    message = Everything(x, torch.tensor(1.5), x[:, ::2])
    back = assemble(parts_of(message)).message(Everything)
    assert torch.equal(back.a, x)
    assert back.b.shape == ()
    assert torch.equal(back.c, x[:, ::2])


def test_large_messages_are_split_into_frames_of_at_most_one_mebibyte():
    message = Everything(torch.randn(5, 100_000), torch.randn(300_001), torch.zeros(5, 1, dtype=torch.bool))
    pieces = list(Cutter(wire.WorkerPart).parts(wire.Envelope(), encode(message)))
    assert all(sum(map(len, piece)) <= FRAME_BYTES for piece in pieces)
    assert len(pieces) == 2 + math.ceil(encode(message).nbytes / CHUNK_BYTES)
    assert same(assemble(parts_of(message)).message(Everything), message)


def test_handwritten_chunk_encoding_equals_protobufs():
    message = Everything(torch.randn(2, 50_000), torch.randn(3), torch.zeros(1))
    for piece in Cutter(wire.WorkerPart).parts(wire.Envelope(), encode(message)):
        data = b"".join(piece)
        assert wire.WorkerFrame.FromString(data).SerializeToString() == data


def test_decoded_tensors_are_aligned_and_writable():
    message = Everything(torch.randn(1, 3), torch.randn(5, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.bool))
    for tensor in assemble(parts_of(message)).message(Everything).tensors().values():
        assert tensor.data_ptr() % 64 == 0
        tensor.zero_()


class Vectors(Message):
    a: Tensor = rows(Quantity.MODEL)


def small():
    return Everything(torch.randn(1, 4), torch.randn(2), torch.tensor([True]))


@pytest.mark.parametrize("nbytes", [0, 10, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 3, SPOOLED_BYTES + 3])
def test_memory_is_aligned_writable_and_of_the_requested_size(nbytes):
    flat = memory(nbytes)
    assert (flat.shape, flat.dtype) == ((nbytes,), torch.uint8)
    assert flat.data_ptr() % 64 == 0
    flat.fill_(7)
    assert int(flat.sum()) == 7 * nbytes


def descriptors_of_deleted_files():
    links = [entry.readlink().name for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(name.endswith("(deleted)") for name in links)


def test_very_large_memory_is_a_file_of_its_own_while_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = descriptors_of_deleted_files()
    flat = memory(SPOOLED_BYTES)
    assert descriptors_of_deleted_files() == before + 1
    assert list(tmp_path.iterdir()) == []  # without a name
    parts = [torch.full((1, SPOOLED_BYTES // 4), value) for value in (1.0, 2.0)]
    joined = stack(Vectors, [Vectors(parts[0]), None, Vectors(parts[1])]).a
    assert torch.equal(joined, torch.cat([parts[0], torch.zeros_like(parts[0]), parts[1]]))
    del flat, joined
    assert descriptors_of_deleted_files() == before


def test_memory_is_plain_if_the_folder_has_no_space(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    flat = memory(SPOOLED_BYTES)
    flat.fill_(7)
    assert int(flat.sum()) == 7 * SPOOLED_BYTES


def test_a_total_that_differs_from_the_specs_is_rejected():
    begin = parts_of(small())[0].begin
    begin.total_bytes += 1
    with pytest.raises(WireError, match="announced") as caught:
        Assembler(begin, read_specs(begin.envelope), 1 << 20)
    assert caught.value.refusal is Refusal.SIZE


def test_messages_beyond_the_limit_are_rejected_before_allocating():
    begin = wire.Begin(total_bytes=4 << 50)
    spec = wire.TensorSpec(name="a", quantity=wire.QUANTITY_MODEL, dtype=wire.DATA_TYPE_FLOAT32, shape=[1 << 50])
    begin.envelope.tensors.append(spec)
    with pytest.raises(WireError, match="at most 1048576"):
        Assembler(begin, read_specs(begin.envelope), 1 << 20)


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (lambda p: [p[0], p[2], p[1], *p[3:]], Refusal.ORDER),
        (lambda p: [p[0], p[1], p[1], *p[2:]], Refusal.ORDER),
        (lambda p: [p[0], p[2], *p[3:]], Refusal.ORDER),
        (lambda p: [p[0], p[1], p[-1]], Refusal.TRUNCATED),
        (lambda p: [*p[:-1], wire.WorkerPart(chunk=wire.Chunk(offset=1_200_000, data=b"x"))], Refusal.SIZE),
        (lambda p: [p[0], wire.WorkerPart(chunk=wire.Chunk())], Refusal.ORDER),
    ],
    ids=["reordered", "repeated", "gap", "truncated", "overlong", "empty chunk"],
)
def test_damaged_transfers_are_rejected(damage, refusal):
    message = Everything(torch.randn(1, 100_000), torch.randn(200_000), torch.zeros(0))
    with pytest.raises(WireError) as caught:
        assemble(damage(parts_of(message)))
    assert caught.value.refusal is refusal


def test_unknown_dtype_quantity_field_and_bool_are_rejected():
    parts = parts_of(small())
    envelope = parts[0].begin.envelope
    for field, value in (("dtype", 77), ("quantity", 77), ("dtype", 0)):
        broken = wire.Envelope()
        broken.CopyFrom(envelope)
        setattr(broken.tensors[0], field, value)
        with pytest.raises(WireError, match=f"{field} {value}"):
            read_specs(broken)
    renamed = parts_of(small())
    renamed[0].begin.envelope.tensors[0].name = "z"
    with pytest.raises(WireError, match="Everything"):
        assemble(renamed).message(Everything)
    data = parts[1].chunk.data[:-1] + b"\x02"
    parts[1] = wire.WorkerPart(chunk=wire.Chunk(data=data))
    with pytest.raises(WireError, match="0 and 1"):
        assemble(parts).message(Everything)
    with pytest.raises(TypeError, match=r"Everything\.a is torch\.float16 .* torch\.float32"):
        encode(Everything(torch.zeros(1, dtype=torch.float16), torch.zeros(1), torch.zeros(1)))


def test_an_outbox_keeps_order_within_a_lane_and_alternates_between_lanes():
    def parts(lane, number, size=400_000):
        for i in range(3):
            chunk = wire.Chunk(transfer=100 * lane + 10 * number + i, data=bytes(size))
            yield serialize(wire.WorkerPart(chunk=chunk))

    async def written():
        outbox, frames = Outbox(HEARTBEAT), []

        async def write(frame):
            frames.append(frame)
            await asyncio.sleep(0)

        for lane in (1, 2):
            for number in (0, 1):
                outbox.put(lane, parts(lane, number))
        outbox.put(3, parts(3, 0, size=10))
        outbox.close()
        await outbox.drain(write)
        return frames

    frames = asyncio.run(written())
    assert all(len(frame) <= FRAME_BYTES for frame in frames)
    order = [part.chunk.transfer for frame in frames for part in parse_frame(wire.WorkerFrame, frame).parts]
    for lane in (1, 2, 3):
        mine = [number for number in order if number // 100 == lane]
        assert mine == sorted(mine)
    assert order[:3] == [100, 200, 300]
    assert len(frames) < len(order)


def test_frames_added_during_the_last_write_are_written_too() -> None:
    goodbye = serialize(wire.AggregatorPart(goodbye=wire.Goodbye()))

    async def written():
        outbox, frames = Outbox(HEARTBEAT), []

        async def write(frame):
            frames.append(frame)
            if len(frames) < 3:
                await asyncio.sleep(0)
                outbox.put(None, iter((goodbye,)))
            else:
                outbox.close()

        outbox.put(None, iter((goodbye,)))
        await asyncio.wait_for(outbox.drain(write), 5)
        return len(frames)

    assert asyncio.run(written()) == 3


def test_an_idle_outbox_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.01)

    async def written():
        outbox, kinds = Outbox(HEARTBEAT), []

        async def write(frame):
            kinds.extend(part.WhichOneof("part") for part in parse_frame(wire.AggregatorFrame, frame).parts)
            if len(kinds) == 2:
                outbox.put(None, iter((serialize(wire.AggregatorPart(goodbye=wire.Goodbye())),)))
            if len(kinds) == 5:
                outbox.close()

        await outbox.drain(write)
        return kinds

    assert asyncio.run(written()) == ["heartbeat", "heartbeat", "goodbye", "heartbeat", "heartbeat"]


def test_the_contract_names_the_quantities():
    assert {name.removeprefix("QUANTITY_").lower() for name in wire.Quantity.keys()} - {"unspecified"} == set(Quantity)  # noqa: SIM118


GENERATOR = "6.31.1"
"""Version of protobuf in grpcio-tools 1.75: the newest whose code runs beside kfp, which needs protobuf < 7."""


@pytest.mark.parametrize("contract_of", ["federation", "control", "personalization"])
def test_generated_code_matches_the_contract(tmp_path, contract_of):
    pytest.importorskip("grpc_tools")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", f"--python_out={tmp_path}"]
    command += [f"--pyi_out={tmp_path}", f"fedloom/v1/{contract_of}.proto"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    made, kept = tmp_path / "fedloom/v1", ROOT / "src/fedloom/transport/wire"
    for path in made.iterdir():  # as in the Makefile
        path.write_text(path.read_text().replace("from fedloom.v1 import", "from fedloom.transport.wire import"))

    def version_and_contract(folder):
        lines = (folder / f"{contract_of}_pb2.py").read_text().splitlines()
        (version,) = (line.rsplit(" ", 1)[1] for line in lines if "Protobuf Python Version:" in line)
        (contract,) = (line for line in lines if line.startswith("DESCRIPTOR = "))
        return version, contract

    version, contract = version_and_contract(made)
    kept_version, kept_contract = version_and_contract(kept)
    assert kept_contract == contract, "the generated code is not what protos/ gives: run `make protos`"
    assert kept_version == GENERATOR, f"generated by protobuf {kept_version}: install 'grpcio-tools==1.75.*' first"
    if version == kept_version:  # another generator formats the same contract slightly differently
        for name in (f"{contract_of}_pb2.py", f"{contract_of}_pb2.pyi"):
            assert (made / name).read_text() == (kept / name).read_text()


# ---- frames parsed in place


def as_parsed(frame):
    """Parse a frame by protobuf alone, with chunks as ``read`` returns them."""
    found = []
    for part in parse_frame(wire.WorkerFrame, frame).parts:
        kind = part.WhichOneof("part")
        value = getattr(part, kind)
        found.append((kind, ChunkView(value.transfer, value.offset, value.data) if kind == "chunk" else value))
    return found


@given(st.lists(messages, min_size=1, max_size=3))
@settings(max_examples=50)
def test_a_frame_is_parsed_as_by_protobuf(sent):
    cutter = Cutter(wire.WorkerPart)
    pieces = [piece for message in sent for part in cutter.parts(wire.Envelope(), encode(message)) for piece in part]
    frame = seal_frame(pieces)
    assert list(read_parts(wire.WorkerFrame, frame)) == as_parsed(frame)


def field(number, content):
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


CHUNK = wire.Chunk(transfer=3, offset=300, data=b"data").SerializeToString()
PART = wire.WorkerPart.CHUNK_FIELD_NUMBER


@pytest.mark.parametrize(
    "frame",
    [
        field(1, field(PART, CHUNK)),
        field(1, field(PART, wire.Chunk(data=b"x").SerializeToString())),  # zeros are omitted
        field(1, field(PART, field(3, b"data") + b"\x08\x03\x10\x05")),  # fields in another order
        field(1, field(PART, CHUNK + b"\x78\x01")),  # and an unknown one
        field(1, field(PART, CHUNK) + field(PART, CHUNK)),  # twice in one part: the last one counts
        field(1, field(PART, CHUNK) + field(4, b"\x08\x07")),  # a chunk, then an end in the same part
        field(1, field(PART, b"")),  # an empty chunk
        field(1, field(4, b"\x08\x07")) + field(1, field(PART, CHUNK)),
    ],
)
def test_unusual_frames_are_parsed_as_by_protobuf(frame):
    frame = seal_frame([frame])
    assert list(read_parts(wire.WorkerFrame, frame)) == as_parsed(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"garbage",
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        field(1, b""),
        b"\x78\x01" + field(1, field(PART, CHUNK)),  # an unknown field of the frame
        field(1, field(PART, CHUNK))[:-1],
        field(1, field(PART, CHUNK)) + field(1, b""),
        field(1, field(PART, CHUNK)) + field(1, field(15, b"")),
        field(1, field(PART, b"\x08")),
        field(1, bytes([PART << 3 | 2, 60]) + CHUNK),  # a chunk that extends beyond its part
    ],
)
def test_invalid_frames_are_rejected(frame):
    with pytest.raises(WireError) as refused:
        list(read_parts(wire.WorkerFrame, seal_frame([frame])))
    assert refused.value.refusal is Refusal.GARBAGE


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_any_bytes_are_rejected_or_parsed_as_by_protobuf(data):
    data = seal_frame([data])
    try:
        found = list(read_parts(wire.WorkerFrame, data))
    except WireError:
        return
    assert found == as_parsed(data)


# ---- a cohort's answers in one block


def answers_of(exchange, sent):
    """Return the answers from the memory of the exchange, one per row."""
    found = []
    for row, message in enumerate(sent):
        parts = list(Cutter(wire.WorkerPart).parts(wire.Envelope(), encode(message)))
        ((_, begin),) = read_parts(wire.WorkerFrame, seal_frame(parts[0]))
        assembler = Assembler(begin, read_specs(begin.envelope), 1 << 20, exchange.storage(Everything, [row]))
        for part in parts[1:-1]:
            ((_, chunk),) = read_parts(wire.WorkerFrame, seal_frame(part))
            assembler.add(chunk)
        found.append(assembler.message(Everything))
    return found


def an_exchange(count):
    call = Call(
        ConversationKey(1, 1, 0, "train"), 0, tuple(range(count)), ("c",) * count, Everything(*[torch.ones(1)] * 3), {}
    )
    return Exchange(call)


def some_answers(count):
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(1, 7, generator=generator) for _ in range(count)]
    return [Everything(x, x.double(), x[:, :3].double()) for x in draws]


def test_answers_are_stacked_in_the_memory_they_were_received_in():
    sent = some_answers(4)
    found = answers_of(an_exchange(4), sent)
    stacked, expected = stack(Everything, found), stack(Everything, sent)
    assert stacked.a.data_ptr() == found[0].a.data_ptr()  # no copy
    for name in ("a", "b", "c"):
        assert torch.equal(getattr(stacked, name), getattr(expected, name))
    assert torch.equal(stack(Everything, found[::-1]).a, torch.cat([m.a for m in sent[::-1]]))
    found[2] = None  # absent: zeros
    assert torch.equal(stack(Everything, found).a, torch.cat([sent[0].a, sent[1].a, torch.zeros(1, 7), sent[3].a]))


# ---- several rows in one transfer


class Pair(Message):
    a: Tensor = rows(Quantity.MODEL)
    c: Tensor = rows(Quantity.OTHER)


def pairs(count, size=7):
    generator = torch.Generator().manual_seed(2)
    draws = [torch.randn(1, size, generator=generator) for _ in range(count)]
    return [Pair(x, x[:, :3].double()) for x in draws]


def transfer_of(sent):
    """Return the parts of one transfer of several answers, parsed."""
    pieces = Cutter(wire.WorkerPart).parts(wire.Envelope(), join_answers([encode(message) for message in sent]))
    return [part for piece in pieces for part in read_parts(wire.WorkerFrame, seal_frame(piece))]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("size", [7, 0])
def test_split_rows_equal_those_encoded_alone(count, size):
    class Mixed(Message):
        x: Tensor = rows(Quantity.OTHER)
        shared: Tensor = broadcast(Quantity.OTHER)

    x, shared = torch.randn(count, size), torch.randn(3)
    found = split_rows(encode(Mixed(x, shared)), count)
    for i, row in enumerate(found):
        alone = encode(Mixed(x[i : i + 1], shared))
        assert (row.name, row.specs, row.buffers) == (alone.name, alone.specs, alone.buffers)
    assert len(found) == count


def test_small_tensors_are_received_aligned():
    (_, begin), (_, chunk), _ = transfer_of(pairs(1))
    assembler = Assembler(begin, read_specs(begin.envelope), 1 << 20)
    assembler.add(chunk)
    received = assembler.message(Pair)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in received.tensors().values())
    assert all(
        torch.equal(a, b) for a, b in zip(received.tensors().values(), pairs(1)[0].tensors().values(), strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("size", [7, 3 * CHUNK_BYTES // 8])
def test_rows_of_one_transfer_are_yielded_one_by_one_and_stored_stacked(count, size):
    sent = pairs(count, size)
    exchange = an_exchange(count + 1)
    (_, begin), *chunks, _ = transfer_of(sent)
    numbers = list(range(1, count + 1))
    assembler = Assembler(begin, read_specs(begin.envelope), 1 << 30, exchange.storage(Pair, numbers))
    for _, chunk in chunks:
        assembler.add(chunk)
    assembler.end()
    found = [assembler.message(Pair, place) for place in range(count)]
    assert all(same(one, message) for one, message in zip(found, sent, strict=True))
    assert stack(Pair, found).a.data_ptr() == found[0].a.data_ptr()  # no copy


def test_a_partially_received_row_leaves_its_memory_alone():
    """The memory may belong to another answer by then."""
    sent = pairs(3)
    exchange = an_exchange(3)
    (_, begin), (_, chunk), _ = transfer_of(sent)
    assembler = Assembler(begin, read_specs(begin.envelope), 1 << 20, exchange.storage(Pair, [0, 1, 2]))
    before = assembler.message(Pair, 1)
    before.a.fill_(8.0)
    before.c.fill_(9.0)
    assembler.forget(1)
    assembler.add(chunk)
    assert before.a.eq(8.0).all()
    assert before.c.eq(9.0).all()
    assert same(assembler.message(Pair, 0), sent[0])
    assert same(assembler.message(Pair, 2), sent[2])


def test_answers_of_one_kind_that_fit_into_a_chunk_share_a_transfer():
    small, other = encode(pairs(1)[0]), encode(pairs(1, 9)[0])
    large, broad = encode(pairs(1, CHUNK_BYTES // 8 + 1)[0]), encode(some_answers(1)[0])

    def groups(*answers):
        return [list(span) for span in group_answers(answers)]

    assert groups() == []
    assert groups(small, small, small) == [[0, 1, 2]]
    assert groups(small, other, other) == [[0], [1, 2]]
    assert groups(large, large, small, small) == [[0], [1], [2, 3]]
    assert groups(broad, broad, small) == [[0], [1], [2]]
    fits = CHUNK_BYTES // small.nbytes
    assert [len(group) for group in groups(*[small] * (fits + 1))] == [fits, 1]
