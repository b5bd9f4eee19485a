"""Frames of the wire: at most 1 MiB of serialized parts, sealed by a checksum. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias, TypeVar

from isal.isal_zlib import crc32  # same values as zlib, several times faster; matters for 100 models a round

from fedloom.core.words import printable
from fedloom.transport.wire import federation_pb2 as wire
from fedloom.transport.wire import personalization_pb2 as models

FRAME_BYTES = 1 << 20

PartClass: TypeAlias = type[wire.WorkerPart | wire.AggregatorPart | models.NewcomerPart | models.ModelPart]
Pieces: TypeAlias = tuple[bytes | memoryview, ...]
"""One serialized part of a frame, not joined yet; a frame is the concatenation of its parts and a seal."""

F = TypeVar("F", wire.WorkerFrame, wire.AggregatorFrame, models.NewcomerFrame, models.ModelFrame)

_PARTS: dict[type[Any], PartClass] = {
    wire.WorkerFrame: wire.WorkerPart,
    wire.AggregatorFrame: wire.AggregatorPart,
    models.NewcomerFrame: models.NewcomerPart,
    models.ModelFrame: models.ModelPart,
}
_PARTS_FIELD = wire.WorkerFrame.PARTS_FIELD_NUMBER  # the same number in every frame

SEAL = bytes([wire.WorkerFrame.CRC32_FIELD_NUMBER << 3 | 5])
SEAL_BYTES = 5
"""Size of a frame's seal, its last field: the CRC-32 of everything before it."""


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
    LACKING = "a conversation that the worker repeatedly lacks"
    LATE = "late or repeated reply"
    SHAPE = "wrong message, field, dtype or shape"
    NON_FINITE = "not finite"
    HELLO = "refused hello"
    NAME = "another process is connected under this name"
    JOINS = "too many workers join at once"
    SILENT = "no sign of life"
    DECLINED = "declined by the member"


class WireError(Exception):
    """Refused wire data; ``refusal`` is the kind, and the text says what was found and expected."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(printable(f"{refusal}: {detail}"))
        self.refusal = refusal


def serialize(part: Any) -> Pieces:
    """Serialize one part of a frame."""
    data = part.SerializeToString()
    return (field_header(_PARTS_FIELD, len(data)), data)


def serialize_chunk(kind: PartClass, transfer: int, offset: int, data: Iterable[memoryview]) -> Pieces:
    """Serialize a Chunk around its data, which protobuf itself would copy three times."""
    pieces = tuple(data)
    size = sum(map(len, pieces))
    fields = wire.Chunk(transfer=transfer, offset=offset).SerializeToString()
    chunk = fields + field_header(wire.Chunk.DATA_FIELD_NUMBER, size)
    part = field_header(kind.CHUNK_FIELD_NUMBER, len(chunk) + size) + chunk
    return (field_header(_PARTS_FIELD, len(part) + size) + part, *pieces)


def pack_parts(parts: Iterable[Pieces]) -> Iterator[bytes]:
    """Join serialized parts into sealed frames, as few as possible."""
    pieces: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        part_size = sum(map(len, part))
        if size and size + part_size > FRAME_BYTES - SEAL_BYTES:
            yield seal_frame(pieces)
            pieces, size = [], 0
        pieces += part
        size += part_size
    if pieces:
        yield seal_frame(pieces)


def seal_frame(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Join parts into a sealed frame."""
    pieces = tuple(pieces)
    crc = 0
    for piece in pieces:
        crc = crc32(piece, crc)
    return b"".join((*pieces, SEAL, crc.to_bytes(4, "little")))


def unseal_frame(data: bytes) -> memoryview:
    """Return a frame without its seal.

    Raise WireError if the seal is missing or its checksum is wrong.
    """
    view = memoryview(data)
    checksum = crc32(view[:-SEAL_BYTES])
    if data[-SEAL_BYTES : 1 - SEAL_BYTES] != SEAL or checksum != int.from_bytes(data[1 - SEAL_BYTES :], "little"):
        raise WireError(Refusal.CHECKSUM, f"a frame of {len(data)} bytes arrived damaged")
    return view[:-SEAL_BYTES]


def field_header(field: int, length: int) -> bytes:
    """Return the tag and length of a length-delimited protobuf field."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


class ChunkView(NamedTuple):
    """A Chunk read in place from its frame: protobuf would copy its data twice."""

    transfer: int
    offset: int
    data: memoryview


def read_parts(frame: type[Any], data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the parts of one frame: the kind and value of each, with chunks as :class:`ChunkView`.

    Raise WireError if the frame arrived damaged or has no parts; on reaching an invalid part.
    """
    part_class = _PARTS[frame]
    view = unseal_frame(data)
    at = 0
    while at < len(view) or not at:
        start, end = _delimited(view, at, _PARTS_FIELD)
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
        if (kind := part.WhichOneof("part")) is None:
            raise _garbage(frame, data)
        value = getattr(part, kind)
        yield kind, ChunkView(value.transfer, value.offset, memoryview(value.data)) if kind == "chunk" else value


def _chunk_at(part: memoryview, field: int) -> ChunkView | None:
    """Read a part that is a single Chunk with its fields in order and its data last; None for any other part."""
    at, end = _delimited(part, 0, field)
    if end != len(part) or at == 0:
        return None
    transfer, at = _number(part, at, wire.Chunk.TRANSFER_FIELD_NUMBER)
    offset, at = _number(part, at, wire.Chunk.OFFSET_FIELD_NUMBER)
    start, end = _delimited(part, at, wire.Chunk.DATA_FIELD_NUMBER)
    return ChunkView(transfer, offset, part[start:end]) if end == len(part) and start > at else None


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


def parse_frame(frame: type[F], data: bytes) -> F:
    """Parse one whole frame, such as the first of a stream.

    Raise WireError if the frame arrived damaged, is invalid, or has no parts or an empty part.
    """
    unseal_frame(data)
    try:
        parsed = frame.FromString(data)
    except Exception as error:  # protobuf raises DecodeError, and other errors on some malformed input
        raise _garbage(frame, data) from error
    if not parsed.parts or any(part.WhichOneof("part") is None for part in parsed.parts):
        raise _garbage(frame, data)
    return parsed


def _garbage(frame: type[Any], data: bytes) -> WireError:
    return WireError(Refusal.GARBAGE, f"{len(data)} bytes that are not a valid {frame.__name__}")
