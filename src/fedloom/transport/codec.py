"""Codec for messages: specs and raw little-endian bytes, cut into frames of at most 1 MiB, and reassembled.

Each frame ends with a checksum of its content. The receiver decides what it accepts before allocating memory:
:class:`Assembler` is built from specs that the receiver has checked, and refuses data that do not match them.
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
from isal.isal_zlib import crc32  # zlib's value at several times its speed, which a round of 100 models needs
from torch import Tensor

from fedloom.federation.validation import TensorSpec, specs
from fedloom.messages import Message, Quantity
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.words import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

if sys.byteorder != "little":  # raw bytes are sent as they are in memory
    raise ImportError("fedloom.transport needs a little-endian machine")

FRAME_BYTES = 1 << 20
CHUNK_BYTES = FRAME_BYTES - 1024
HUGE_BYTES = 4 << 20  # two huge pages: smaller buffers have few pages to save

PartClass: TypeAlias = type[wire.WorkerPart] | type[wire.AggregatorPart]
Pieces: TypeAlias = tuple[bytes | memoryview, ...]
"""One serialized part of a frame, not joined yet; a frame is the concatenation of its parts and a seal."""

SEAL = bytes([wire.WorkerFrame.CRC32_FIELD_NUMBER << 3 | 5])
SEAL_BYTES = 5
"""Size of a frame's seal, its last field: the CRC-32 of everything before it."""

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
    """Reasons for refusing or dropping a frame, transfer or reply, as they are counted."""

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
    """Refused wire data; ``refusal`` is the kind, and the text says what was found and expected."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(printable(f"{refusal}: {detail}"))
        self.refusal = refusal


class Encoded:
    """A message ready to be cut into frames: its class name, specs, and views of its tensors' bytes.

    The bytes are not copied; the tensors must not change until the frames have been written.
    """

    def __init__(self, name: str, tensors: Sequence[TensorSpec], buffers: Sequence[memoryview]) -> None:
        self.name = name
        self.specs = tuple(tensors)
        self.buffers = tuple(buffers)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(len(buffer) for buffer in self.buffers)


def encode(message: Message) -> Encoded:
    """Return a message as specs and raw bytes; contiguous CPU tensors are not copied.

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
    """Return one message with the rows of several one-row answers of the same class; nothing is copied."""
    first = answers[0]
    if len(answers) == 1:
        return first
    specs = [replace(spec, shape=(len(answers), *spec.shape[1:])) for spec in first.specs]
    return Encoded(first.name, specs, [answer.buffers[i] for i in range(len(specs)) for answer in answers])


def together(answers: Sequence[Encoded]) -> Iterator[range]:
    """Yield ranges of consecutive answers that share a transfer: those of one class that fit into a chunk.

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
    """Convert specs to those of an envelope."""
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
    """Parse the specs of an envelope.

    Raises
    ------
    WireError
        If a quantity or dtype is unknown.
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
    """Join parts into a sealed frame."""
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
        If the seal is missing or its checksum is wrong.
    """
    view = memoryview(data)
    found = crc32(view[:-SEAL_BYTES])
    if data[-SEAL_BYTES : 1 - SEAL_BYTES] != SEAL or found != int.from_bytes(data[1 - SEAL_BYTES :], "little"):
        raise WireError(Refusal.CHECKSUM, f"a frame of {len(data)} bytes arrived damaged")
    return view[:-SEAL_BYTES]


class Cutter:
    """Cuts messages into parts of frames, for one direction of one stream, and numbers the transfers."""

    def __init__(self, part: PartClass) -> None:
        self._part = part
        self._chunk_field = part.CHUNK_FIELD_NUMBER
        self._numbers = count(1)

    def parts(self, envelope: wire.Envelope, encoded: Encoded, remaining_s: float | None = None) -> Iterator[Pieces]:
        """Yield the serialized parts of one transfer: Begin, chunks of at most CHUNK_BYTES, End.

        Parameters
        ----------
        envelope
            Description of the transfer; its ``message`` and ``tensors`` are filled in here.
        encoded
            The message.
        remaining_s
            Seconds for which an answer is useful.
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
    """Return the tag and length of a length-delimited protobuf field."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _chunks(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut the concatenated buffers into chunks of CHUNK_BYTES, without copying; the last may be shorter."""
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
    """Assembles one transfer directly into the memory of its tensors.

    Parameters
    ----------
    begin
        Announcement of the transfer.
    tensors
        Its specs, as the receiver parsed and checked them.
    limit_bytes
        Maximum size that the receiver accepts.
    storage
        Allocates the memory of each tensor as flat uint8, in one piece or one piece per row; by default new memory in
        one piece.

    Raises
    ------
    WireError
        If the announced total differs from that of the specs or exceeds the limit; raised before any memory is
        allocated.
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
        self._current = 0  # index of the piece being filled
        self._filled = 0  # bytes filled in this piece
        self._received = 0

    def add(self, chunk: wire.Chunk | Data) -> None:
        """Store the next chunk.

        Raises
        ------
        WireError
            If it is empty, short, not the next one, or exceeds the announced total.
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
        """Check that the transfer is complete.

        Raises
        ------
        WireError
            If bytes are missing.
        """
        if self._received != self.total:
            raise WireError(Refusal.TRUNCATED, f"{self._received} of {self.total} bytes at the end")

    def forget(self, piece: int) -> None:
        """Store the rest of a row in other memory: that of its piece may now hold another answer."""
        for pieces in self._storage:
            pieces[piece] = memory(pieces[piece].numel())
        self._views = [_view(piece) for pieces in self._storage for piece in pieces]

    def message(self, cls: type[Message], piece: int = 0) -> Message:
        """Return the message, or that of one row where each row has its own memory, without copying.

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
            # torch cannot view empty storage as aligned (data without classes have no confusion matrix).
            tensors[spec.name] = (
                storage.view(spec.dtype).view(shape) if spec.nbytes else torch.empty(shape, dtype=spec.dtype)
            )
        return cls(**tensors)


def memory(nbytes: int) -> Tensor:
    """Allocate aligned memory for one tensor as flat uint8; a slice of a shared buffer would not be aligned.

    Large tensors use huge pages where the system has them: each exchange allocates new memory, and obtaining that page
    by page costs as much as reading the data that fill it.
    """
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernel without huge pages
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(pages, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8)


F = TypeVar("F", wire.WorkerFrame, wire.AggregatorFrame)


class Data(NamedTuple):
    """A Chunk read in place from its frame: protobuf would copy its data twice."""

    transfer: int
    offset: int
    data: memoryview


def read(frame: type[F], data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the parts of one frame: the kind and value of each, with chunks as :class:`Data`.

    Raises
    ------
    WireError
        If the frame arrived damaged or has no parts; on reaching an invalid part.
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
        except Exception as error:  # protobuf raises DecodeError, and other errors on some malformed input
            raise _garbage(frame, data) from error
        if part.WhichOneof("part") is None:
            raise _garbage(frame, data)
        yield _opened(part)


def _opened(part: wire.WorkerPart | wire.AggregatorPart) -> tuple[str, Any]:
    """Return the kind and value of a part."""
    kind = cast(str, part.WhichOneof("part"))
    value = getattr(part, kind)
    return kind, Data(value.transfer, value.offset, memoryview(value.data)) if kind == "chunk" else value


def _chunk_at(part: memoryview, field: int) -> Data | None:
    """Read a part that is a single Chunk with its fields in order and its data last; None for any other part."""
    at, end = _delimited(part, 0, field)
    if end != len(part) or at == 0:
        return None
    transfer, at = _number(part, at, wire.Chunk.TRANSFER_FIELD_NUMBER)
    offset, at = _number(part, at, wire.Chunk.OFFSET_FIELD_NUMBER)
    start, end = _delimited(part, at, wire.Chunk.DATA_FIELD_NUMBER)
    return Data(transfer, offset, part[start:end]) if end == len(part) and start > at else None


def _delimited(view: memoryview, at: int, field: int) -> tuple[int, int]:
    """Return the bounds of a length-delimited field; ``(at, at)`` if there is another field or none."""
    if at >= len(view) or view[at] != field << 3 | 2:
        return at, at
    length, start = _varint_at(view, at + 1)
    return (start, start + length) if start else (at, at)


def _number(view: memoryview, at: int, field: int) -> tuple[int, int]:
    """Return an integer field and the position after it; 0 (omitted by proto3) if there is another field."""
    if at >= len(view) or view[at] != field << 3:
        return 0, at
    value, after = _varint_at(view, at + 1)
    return (value, after) if after else (0, at)


def _varint_at(view: memoryview, at: int) -> tuple[int, int]:
    """Return a varint and the position after it; ``(0, 0)`` if it does not end within ten bytes."""
    value = 0
    for i, byte in enumerate(view[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    return 0, 0


def parse(frame: type[F], data: bytes, *, seal: bool = True) -> F:
    """Parse one whole frame, such as the first of a stream; without ``seal``, also one of another protocol.

    Raises
    ------
    WireError
        If the frame arrived damaged, is invalid, or has no parts or an empty part.
    """
    if seal:
        unsealed(data)
    try:
        parsed = frame.FromString(data)
    except Exception as error:  # protobuf raises DecodeError, and other errors on some malformed input
        raise _garbage(frame, data) from error
    if not parsed.parts or any(part.WhichOneof("part") is None for part in parsed.parts):
        raise _garbage(frame, data)
    return parsed


def _garbage(frame: type[F], data: bytes) -> WireError:
    return WireError(Refusal.GARBAGE, f"{len(data)} bytes that are no {frame.__name__}")
