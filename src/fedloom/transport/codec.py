"""Messages as frames: specs and raw little-endian bytes, cut into parts of frames of at most 1 MiB, and put
together again. Each frame ends with a checksum of all that is in it.

The receiver decides what it accepts before it takes memory: :class:`Assembler` is built from specs that the receiver
has checked, and refuses whatever does not follow them.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from isal.isal_zlib import crc32  # zlib's value at several times its speed, which a round of a hundred models feels
from torch import Tensor

from fedloom.federation.validation import TensorSpec, specs
from fedloom.messages import Message, Quantity
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.words import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

if sys.byteorder != "little":  # raw bytes are sent as they lie in memory
    raise ImportError("fedloom.transport needs a little-endian machine")

FRAME_BYTES = 1 << 20
CHUNK_BYTES = FRAME_BYTES - 1024
HUGE_BYTES = 4 << 20  # two huge pages: below that there are few pages to save

PartClass: TypeAlias = type[wire.WorkerPart] | type[wire.AggregatorPart]
Pieces: TypeAlias = tuple[bytes | memoryview, ...]
"""One serialized part of a frame, not joined yet; a frame is the concatenation of its parts, and a seal."""

SEAL = bytes([wire.WorkerFrame.CRC32_FIELD_NUMBER << 3 | 5])
SEAL_BYTES = 5
"""The seal of a frame is its last field, the crc32 of all before it."""

_DTYPES: Mapping[torch.dtype, wire.DataType] = {
    torch.float32: wire.DATA_TYPE_FLOAT32,
    torch.float64: wire.DATA_TYPE_FLOAT64,
    torch.int64: wire.DATA_TYPE_INT64,
    torch.uint8: wire.DATA_TYPE_UINT8,
    torch.bool: wire.DATA_TYPE_BOOL,
}
_DTYPES_BACK = {number: dtype for dtype, number in _DTYPES.items()}
_QUANTITIES: Mapping[Quantity, wire.Quantity] = {
    quantity: getattr(wire, f"QUANTITY_{quantity.name}") for quantity in Quantity
}
_QUANTITIES_BACK = {number: quantity for quantity, number in _QUANTITIES.items()}


class Refusal(StrEnum):
    """Why a frame, transfer or reply was refused or dropped: the reasons that are counted."""

    GARBAGE = "garbage on the stream"
    REPEATED_BEGIN = "repeated begin of a transfer"
    ORDER = "chunks repeated, reordered or missing"
    UNKNOWN_TRANSFER = "frame of an unknown transfer"
    TRUNCATED = "truncated transfer"
    CHECKSUM = "wrong checksum"
    SIZE = "wrong total size"
    RUN = "another run or incarnation"
    CONVERSATION = "unexpected conversation or exchange"
    CLIENT = "unexpected row or client"
    FLOOD = "more refused parts than the work explains"
    UNREAD = "too much that the worker does not read"
    LACKING = "a conversation that is lacking again and again"
    LATE = "late or repeated reply"
    SHAPE = "wrong message, field, dtype or shape"
    NON_FINITE = "not finite"
    HELLO = "refused hello"
    NAME = "another process is connected under this name"
    JOINS = "too many workers join at once"
    SILENT = "no sign of life"


class WireError(Exception):
    """Something on the wire that was refused; ``refusal`` is its kind, the text says what was found and expected."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(printable(f"{refusal}: {detail}"))
        self.refusal = refusal


class Encoded:
    """A message ready to be cut into frames: its class name, specs, and views of the bytes of its tensors.

    The bytes are not copied; the tensors must not change until the frames have been written.
    """

    def __init__(self, name: str, tensors: Sequence[TensorSpec], buffers: Sequence[memoryview]) -> None:
        self.name = name
        self.specs = tuple(tensors)
        self.buffers = tuple(buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(buffer) for buffer in self.buffers)


def encode(message: Message) -> Encoded:
    """View a message as specs and raw bytes; dense CPU tensors are not copied.

    Raises
    ------
    TypeError
        If a tensor has a dtype that the wire does not carry, or is not on the CPU.
    """
    found = specs(message)
    for spec, tensor in zip(found, message.tensors().values(), strict=True):
        if spec.dtype not in _DTYPES or tensor.device.type != "cpu":
            allowed = ", ".join(str(dtype) for dtype in _DTYPES)
            raise TypeError(
                f"{type(message).__name__}.{spec.name} is {spec.dtype} on {tensor.device}; "
                f"the wire carries {allowed}, on cpu"
            )
    return Encoded(type(message).__name__, found, [_bytes_of(tensor) for tensor in message.tensors().values()])


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return _view(flat.view(torch.uint8))


def _view(flat: Tensor) -> memoryview:
    """View the memory of a flat uint8 tensor."""
    return memoryview(cast("Buffer", flat.numpy()))


def joined(answers: Sequence[Encoded]) -> Encoded:
    """The rows of several answers, which are of one class and have a row each, as one message; nothing is copied."""
    first = answers[0]
    if len(answers) == 1:
        return first
    specs = [replace(spec, shape=(len(answers), *spec.shape[1:])) for spec in first.specs]
    return Encoded(first.name, specs, [answer.buffers[i] for i in range(len(specs)) for answer in answers])


def together(answers: Sequence[Encoded]) -> Iterator[range]:
    """Which of these answers, one after the other, share a transfer: those of one class that fit into a chunk.

    An answer with a broadcast has a transfer of its own.
    """
    start, size = 0, 0
    for i, answer in enumerate(answers):
        fits = size + answer.nbytes <= CHUNK_BYTES and all(spec.per_client for spec in answer.specs)
        if i > start and not (fits and (answer.name, answer.specs) == (answers[start].name, answers[start].specs)):
            yield range(start, i)
            start, size = i, 0
        size += answer.nbytes
    if answers:
        yield range(start, len(answers))


def tensor_specs(encoded: Encoded) -> list[wire.TensorSpec]:
    """Write specs as they stand in an envelope."""
    return [
        wire.TensorSpec(
            name=spec.name,
            quantity=_QUANTITIES[spec.quantity],
            per_client=spec.per_client,
            dtype=_DTYPES[spec.dtype],
            shape=spec.shape,
        )
        for spec in encoded.specs
    ]


def read_specs(envelope: wire.Envelope) -> tuple[TensorSpec, ...]:
    """Read the specs of an envelope.

    Raises
    ------
    WireError
        If a quantity or dtype is not one of the contract.
    """
    found = []
    for spec in envelope.tensors:
        if spec.quantity not in _QUANTITIES_BACK or spec.dtype not in _DTYPES_BACK:
            raise WireError(
                Refusal.SHAPE,
                f"{envelope.message[:80]}.{spec.name[:80]} has quantity {spec.quantity} and dtype {spec.dtype}",
            )
        found.append(
            TensorSpec(
                spec.name,
                _QUANTITIES_BACK[spec.quantity],
                spec.per_client,
                _DTYPES_BACK[spec.dtype],
                tuple(spec.shape),
            )
        )
    return tuple(found)


def serialize(part: wire.WorkerPart | wire.AggregatorPart) -> Pieces:
    """Serialize one part of a frame."""
    data = part.SerializeToString()
    return (_header(wire.WorkerFrame.PARTS_FIELD_NUMBER, len(data)), data)


def sealed(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Join parts to a frame."""
    pieces = tuple(pieces)
    crc = 0
    for piece in pieces:
        crc = crc32(piece, crc)
    return b"".join((*pieces, SEAL, crc.to_bytes(4, "little")))


def unsealed(data: bytes) -> memoryview:
    """Return a frame without its seal.

    Raises
    ------
    WireError
        If it is not what was sent.
    """
    view = memoryview(data)
    found = crc32(view[:-SEAL_BYTES])
    if data[-SEAL_BYTES : 1 - SEAL_BYTES] != SEAL or found != int.from_bytes(data[1 - SEAL_BYTES :], "little"):
        raise WireError(Refusal.CHECKSUM, f"a frame of {len(data)} bytes arrived damaged")
    return view[:-SEAL_BYTES]


class Cutter:
    """Cuts messages into parts of frames, for one direction of one stream, numbering the transfers."""

    def __init__(self, part: PartClass) -> None:
        self._part = part
        self._chunk_field = part.CHUNK_FIELD_NUMBER
        self._numbers = count(1)

    def parts(self, envelope: wire.Envelope, encoded: Encoded, remaining_s: float | None = None) -> Iterator[Pieces]:
        """Yield the serialized parts of one transfer: Begin, chunks of at most CHUNK_BYTES, End.

        Parameters
        ----------
        envelope
            What the transfer is; its ``message`` and ``tensors`` are filled in here.
        encoded
            The message.
        remaining_s
            Seconds in which an answer is of use.
        """
        envelope.message = encoded.name
        envelope.tensors.extend(tensor_specs(encoded))
        number = next(self._numbers)
        begin = wire.Begin(transfer=number, envelope=envelope, total_bytes=encoded.nbytes, remaining_s=remaining_s)
        yield serialize(self._part(begin=begin))
        offset = 0
        for pieces in _chunks(encoded.buffers):
            size = sum(map(len, pieces))
            yield self._chunk(number, offset, size, pieces)
            offset += size
        yield serialize(self._part(end=wire.End(transfer=number)))

    def _chunk(self, number: int, offset: int, size: int, pieces: Sequence[memoryview]) -> Pieces:
        """Serialize a Chunk around its data: protobuf itself would copy the data three times."""
        fields = wire.Chunk(transfer=number, offset=offset).SerializeToString()
        chunk = fields + _header(wire.Chunk.DATA_FIELD_NUMBER, size)
        part = _header(self._chunk_field, len(chunk) + size) + chunk
        return (_header(wire.WorkerFrame.PARTS_FIELD_NUMBER, len(part) + size) + part, *pieces)


def _header(field: int, length: int) -> bytes:
    """Tag and length of a length-delimited protobuf field."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _chunks(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the concatenation of the buffers into pieces that make CHUNK_BYTES, without copying."""
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            piece = buffer[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if room == 0:
                yield pieces
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield pieces


class Assembler:
    """Puts one transfer together, straight into the tensors it will become.

    Parameters
    ----------
    begin
        The announcement.
    tensors
        Its specs, as the receiver read and checked them.
    limit_bytes
        The most the receiver takes.
    storage
        Makes the memory of each tensor, flat uint8, in one piece or one for each of its rows; by default new memory in
        one piece.

    Raises
    ------
    WireError
        If the announced total is not that of the specs, or above the limit: before any memory is taken.
    """

    def __init__(
        self,
        begin: wire.Begin,
        tensors: Sequence[TensorSpec],
        limit_bytes: int,
        storage: Callable[[TensorSpec], list[Tensor]] | None = None,
    ) -> None:
        self.total = sum(spec.nbytes for spec in tensors)
        if begin.total_bytes != self.total:
            raise WireError(
                Refusal.SIZE,
                f"{begin.total_bytes} bytes announced, {self.total} expected for {begin.envelope.message[:80]}",
            )
        if self.total > limit_bytes:
            raise WireError(Refusal.SIZE, f"{self.total} bytes announced, at most {limit_bytes} taken")
        self._specs = tuple(tensors)
        self._storage = [storage(spec) if storage else [memory(spec.nbytes)] for spec in tensors]
        self._views = [_view(piece) for pieces in self._storage for piece in pieces]
        self._current = 0  # the piece being filled
        self._filled = 0  # bytes of it that are
        self._received = 0

    def add(self, chunk: wire.Chunk | Data) -> None:
        """Take in the next chunk.

        Raises
        ------
        WireError
            If it is empty, not the next one, or goes beyond the announced total.
        """
        data = chunk.data
        if chunk.offset != self._received or not data:
            raise WireError(
                Refusal.ORDER, f"chunk of {len(data)} bytes at offset {chunk.offset}, expected offset {self._received}"
            )
        if self._received + len(data) > self.total:
            raise WireError(Refusal.SIZE, f"{self._received + len(data)} bytes received, {self.total} announced")
        if len(data) < min(CHUNK_BYTES, self.total - self._received):
            raise WireError(Refusal.ORDER, f"chunk of {len(data)} bytes before the last, expected {CHUNK_BYTES}")
        self._received += len(data)
        rest = memoryview(data)
        while len(rest):
            view = self._views[self._current]
            part = rest[: len(view) - self._filled]
            view[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == len(view):
                self._current, self._filled = self._current + 1, 0

    def end(self) -> None:
        """Check that everything has come.

        Raises
        ------
        WireError
            If bytes are missing.
        """
        if self._received != self.total:
            raise WireError(Refusal.TRUNCATED, f"{self._received} of {self.total} bytes at the end")

    def forget(self, piece: int) -> None:
        """Take what comes for a row into other memory: that of its piece may be another answer's by now."""
        for pieces in self._storage:
            pieces[piece] = memory(pieces[piece].numel())
        self._views = [_view(piece) for pieces in self._storage for piece in pieces]

    def message(self, cls: type[Message], piece: int = 0) -> Message:
        """Make the message, or that of one row where each has a piece of memory, without copying.

        Raises
        ------
        WireError
            If the fields are not those of the class, or a bool is neither 0 nor 1.
        """
        fields = {(field.name, field.quantity, field.per_client) for field in cls.fields()}
        found = {(spec.name, spec.quantity, spec.per_client) for spec in self._specs}
        if fields != found or len(self._specs) != len(fields):
            raise WireError(
                Refusal.SHAPE, f"fields {[spec.name for spec in self._specs]} are not those of {cls.__name__}"
            )
        tensors = {}
        for spec, pieces in zip(self._specs, self._storage, strict=True):
            storage, shape = pieces[piece], spec.shape if len(pieces) == 1 else (1, *spec.shape[1:])
            if spec.dtype == torch.bool and bool((storage > 1).any()):
                raise WireError(Refusal.SHAPE, f"{cls.__name__}.{spec.name} holds bytes that are no bool")
            # Of nothing (data without classes have no confusion) there is no view that torch finds aligned.
            tensors[spec.name] = (
                storage.view(spec.dtype).view(shape) if spec.nbytes else torch.empty(shape, dtype=spec.dtype)
            )
        return cls(**tensors)


def memory(nbytes: int) -> Tensor:
    """Memory for one tensor, flat uint8. It is aligned, which a slice of a buffer shared by several would not be.

    A lot of it is taken in huge pages where the system has them: each exchange takes new memory, and to get that
    page by page costs as much as to read what comes into it.
    """
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(pages, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8)


F = TypeVar("F", wire.WorkerFrame, wire.AggregatorFrame)


class Data(NamedTuple):
    """A Chunk, read where it lies in its frame: protobuf would copy its data twice."""

    transfer: int
    offset: int
    data: memoryview


def read(frame: type[F], data: bytes) -> Iterator[tuple[str, Any]]:
    """Read one frame, part by part: the kind of each, and what it holds; chunks as :class:`Data`.

    Raises
    ------
    WireError
        If it arrived damaged; where the parts are reached that are none; if there are no parts.
    """
    part_class: PartClass = wire.WorkerPart if frame is wire.WorkerFrame else wire.AggregatorPart
    view = unsealed(data)
    at = 0
    while at < len(view) or not at:
        start, end = _delimited(view, at, wire.WorkerFrame.PARTS_FIELD_NUMBER)
        if end > len(view) or start == at:
            raise _garbage(frame, data)
        at = end
        chunk = _chunk_at(view[start:end], part_class.CHUNK_FIELD_NUMBER)
        if chunk is not None:
            yield "chunk", chunk
            continue
        try:
            part = part_class.FromString(bytes(view[start:end]))
        except Exception as error:  # protobuf raises DecodeError, and others on some malformed input
            raise _garbage(frame, data) from error
        if part.WhichOneof("part") is None:
            raise _garbage(frame, data)
        yield _opened(part)


def _opened(part: wire.WorkerPart | wire.AggregatorPart) -> tuple[str, Any]:
    """The kind of a part, and what it holds."""
    kind = cast(str, part.WhichOneof("part"))
    value = getattr(part, kind)
    return kind, Data(value.transfer, value.offset, memoryview(value.data)) if kind == "chunk" else value


def _chunk_at(part: memoryview, field: int) -> Data | None:
    """Read a part that is one Chunk, its fields in order, data last; None if it is anything else."""
    at, end = _delimited(part, 0, field)
    if end != len(part) or at == 0:
        return None
    transfer, at = _number(part, at, wire.Chunk.TRANSFER_FIELD_NUMBER)
    offset, at = _number(part, at, wire.Chunk.OFFSET_FIELD_NUMBER)
    start, end = _delimited(part, at, wire.Chunk.DATA_FIELD_NUMBER)
    return Data(transfer, offset, part[start:end]) if end == len(part) and start > at else None


def _delimited(view: memoryview, at: int, field: int) -> tuple[int, int]:
    """Where a length-delimited field begins and ends; ``(at, at)`` if there is another field or none."""
    if at >= len(view) or view[at] != field << 3 | 2:
        return at, at
    length, start = _varint_at(view, at + 1)
    return (start, start + length) if start else (at, at)


def _number(view: memoryview, at: int, field: int) -> tuple[int, int]:
    """An integer field and where the next begins; 0 (proto3 leaves it out) if there is another field."""
    if at >= len(view) or view[at] != field << 3:
        return 0, at
    value, after = _varint_at(view, at + 1)
    return (value, after) if after else (0, at)


def _varint_at(view: memoryview, at: int) -> tuple[int, int]:
    """A varint and where it ends; ``(0, 0)`` if it does not end within ten bytes."""
    value = 0
    for i, byte in enumerate(view[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    return 0, 0


def parse(frame: type[F], data: bytes, *, seal: bool = True) -> F:
    """Parse one frame whole, as the first of a stream is; without ``seal`` also one of another protocol.

    Raises
    ------
    WireError
        If it arrived damaged; if the bytes are no frame, or one without parts, or with a part that holds nothing.
    """
    if seal:
        unsealed(data)
    try:
        parsed = frame.FromString(data)
    except Exception as error:  # protobuf raises DecodeError, and others on some malformed input
        raise _garbage(frame, data) from error
    if not parsed.parts or any(part.WhichOneof("part") is None for part in parsed.parts):
        raise _garbage(frame, data)
    return parsed


def _garbage(frame: type[F], data: bytes) -> WireError:
    return WireError(Refusal.GARBAGE, f"{len(data)} bytes that are no {frame.__name__}")
