"""Codec for messages: specs and raw little-endian bytes, cut into parts of frames, and reassembled.

The receiver decides what it accepts before allocating memory: :class:`Assembler` is built from specs that the receiver
has checked, and refuses data that do not match them.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from isal.isal_zlib import crc32
from torch import Tensor

from fedloom.core.memory import spooled
from fedloom.federation.validation import TensorSpec, specs
from fedloom.messages import Message, Quantity
from fedloom.transport.frames import (
    FRAME_BYTES,
    ChunkView,
    PartClass,
    Pieces,
    Refusal,
    WireError,
    serialize,
    serialize_chunk,
)
from fedloom.transport.wire import federation_pb2 as wire

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from fedloom.transport.resuming import Sending

if sys.byteorder != "little":  # raw bytes are sent as they are in memory
    raise ImportError("fedloom.transport needs a little-endian machine")

CHUNK_BYTES = FRAME_BYTES - 1024
SMALL_BYTES = 64 << 10  # received into plain memory: torch takes longer to make a small tensor than to copy it
HUGE_BYTES = 4 << 20  # two huge pages; smaller buffers gain little from them

DTYPES: Mapping[torch.dtype, wire.DataType] = {
    torch.float32: wire.DATA_TYPE_FLOAT32,
    torch.float64: wire.DATA_TYPE_FLOAT64,
    torch.int64: wire.DATA_TYPE_INT64,
    torch.uint8: wire.DATA_TYPE_UINT8,
    torch.bool: wire.DATA_TYPE_BOOL,
}
"""Types of tensors on the wire."""

_DTYPES_BACK = {number: dtype for dtype, number in DTYPES.items()}
_QUANTITIES: Mapping[Quantity, wire.Quantity] = {
    quantity: getattr(wire, f"QUANTITY_{quantity.name}") for quantity in Quantity
}
_QUANTITIES_BACK = {number: quantity for quantity, number in _QUANTITIES.items()}


@dataclass(frozen=True, eq=False)
class Encoded:
    """A message ready to be cut into frames."""

    name: str
    """Name of the message's class."""
    specs: tuple[TensorSpec, ...]
    buffers: tuple[memoryview, ...]
    """Views of the fields' bytes: the tensors must not change until the frames are written."""

    @property
    def nbytes(self) -> int:
        """Number of bytes to send."""
        return sum(map(len, self.buffers))


def encode(message: Message) -> Encoded:
    """Return a message as specs and raw bytes; contiguous CPU tensors are not copied.

    Raise TypeError if a tensor has a dtype that the wire does not carry, or is not on the CPU.
    """
    fields = specs(message)
    for spec, tensor in zip(fields, message.tensors().values(), strict=True):
        if spec.dtype not in DTYPES or not tensor.is_cpu:
            raise TypeError(
                f"{type(message).__name__}.{spec.name} is {spec.dtype} on {tensor.device}; "
                f"the wire carries {', '.join(map(str, DTYPES))}, on cpu"
            )
    buffers = (_bytes_of(tensor.detach()) for tensor in message.tensors().values())
    return Encoded(type(message).__name__, tuple(fields), tuple(buffers))


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(cast("Buffer", tensor.contiguous().numpy().reshape(-1).view(np.uint8)))


def _view(flat: Tensor | bytearray) -> memoryview:
    return memoryview(flat if isinstance(flat, bytearray) else cast("Buffer", flat.numpy()))


def join_answers(answers: Sequence[Encoded]) -> Encoded:
    """Return one message with the rows of several one-row answers of the same class; nothing is copied."""
    first = answers[0]
    if len(answers) == 1:
        return first
    specs = tuple(spec._replace(shape=(len(answers), *spec.shape[1:])) for spec in first.specs)
    return Encoded(first.name, specs, tuple(answer.buffers[i] for i in range(len(specs)) for answer in answers))


def split_rows(encoded: Encoded, count: int) -> list[Encoded]:
    """Return the messages of ``count`` clients, each with its row of each row field: the inverse of join_answers."""
    specs = tuple(spec._replace(shape=(1, *spec.shape[1:])) if spec.per_client else spec for spec in encoded.specs)
    fields = [
        [buffer[i : i + size] for i in range(0, size * count, size)] if spec.per_client and size else [buffer] * count
        for spec, buffer, size in ((s, b, len(b) // count) for s, b in zip(specs, encoded.buffers, strict=True))
    ]
    return [Encoded(encoded.name, specs, tuple(field[i] for field in fields)) for i in range(count)]


def group_answers(answers: Sequence[Encoded]) -> Iterator[range]:
    """Yield ranges of consecutive answers of one class that fit into a chunk and share a transfer.

    An answer with a broadcast has a separate transfer.
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


def specs_to_wire(specs: Sequence[TensorSpec]) -> list[wire.TensorSpec]:
    """Convert specs to those of an envelope."""
    return [
        wire.TensorSpec(
            name=spec.name,
            quantity=_QUANTITIES[spec.quantity],
            per_client=spec.per_client,
            dtype=DTYPES[spec.dtype],
            shape=spec.shape,
        )
        for spec in specs
    ]


def read_specs(envelope: wire.Envelope) -> tuple[TensorSpec, ...]:
    """Parse the specs of an envelope; raise WireError if a quantity or dtype is unknown."""
    specs = []
    for spec in envelope.tensors:
        quantity, dtype = _QUANTITIES_BACK.get(spec.quantity), _DTYPES_BACK.get(spec.dtype)
        if quantity is None or dtype is None:
            name = f"{envelope.message[:80]}.{spec.name[:80]}"
            raise WireError(Refusal.SHAPE, f"{name} has quantity {spec.quantity} and dtype {spec.dtype}")
        specs.append(TensorSpec(spec.name, quantity, spec.per_client, dtype, tuple(spec.shape)))
    return tuple(specs)


class Cutter:
    """Cuts messages into parts of frames, for one direction of one stream, and numbers the transfers."""

    def __init__(self, part: PartClass, first: int = 1) -> None:
        self._part = part
        self._numbers = count(first)

    def parts(
        self,
        envelope: wire.Envelope,
        encoded: Encoded,
        remaining_s: float | None = None,
        sending: Sending | None = None,
    ) -> Iterator[Pieces]:
        """Yield the serialized parts of one transfer: Begin, chunks of at most CHUNK_BYTES, End.

        The envelope's ``message`` and ``tensors`` are filled in here. An answer is useful for ``remaining_s`` seconds.
        The transfer begins where the record ``sending`` says, and the record is kept up to date.
        """
        envelope.message = encoded.name
        envelope.tensors.extend(specs_to_wire(encoded.specs))
        number = next(self._numbers)
        offset, total = 0 if sending is None else sending.offset, encoded.nbytes
        yield serialize(
            self._part(
                begin=wire.Begin(
                    transfer=number, envelope=envelope, total_bytes=total, remaining_s=remaining_s, offset=offset
                )
            )
        )
        for start in range(offset, total, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, total)
            if sending is not None:
                sending.sent = end
            yield serialize_chunk(self._part, number, start, _between(encoded.buffers, start, end))
        yield serialize(self._part(end=wire.End(transfer=number)))


def _between(buffers: Sequence[memoryview], start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes from ``start`` to ``end`` of concatenated buffers, without copying."""
    for buffer in buffers:
        if start < len(buffer) and end > 0:
            yield buffer[max(start, 0) : end]
        start, end = start - len(buffer), end - len(buffer)


def checksum(buffers: Sequence[memoryview], start: int, end: int, crc: int) -> int:
    """Return the CRC-32 of the first ``end`` bytes of concatenated buffers, given that of the first ``start``."""
    for piece in _between(buffers, start, end):
        crc = crc32(piece, crc)
    return crc


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
        Allocates the memory of each tensor as flat uint8, in one piece or one piece per row (all tensors alike); by
        default new memory in one piece.

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
            raise WireError(Refusal.SIZE, f"{self.total} bytes announced, at most {limit_bytes} accepted")
        self.specs = tuple(tensors)
        self._storage: list[list[Tensor | bytearray]] = [
            [*storage(spec)] if storage else [_small_or_memory(spec.nbytes)] for spec in tensors
        ]
        self._views = [_view(piece) for pieces in self._storage for piece in pieces]
        self.received = 0
        """Number of bytes that have arrived."""
        self._checked = 0, 0  # number of bytes, and their CRC-32

    def add(self, chunk: wire.Chunk | ChunkView) -> None:
        """Store the next chunk; raise WireError if it is empty, short, not the next one, or exceeds the total."""
        data = chunk.data
        if chunk.offset != self.received or not data:
            raise WireError(
                Refusal.ORDER, f"chunk of {len(data)} bytes at offset {chunk.offset}, expected offset {self.received}"
            )
        if self.received + len(data) > self.total:
            raise WireError(Refusal.SIZE, f"{self.received + len(data)} bytes received, {self.total} announced")
        if len(data) < min(CHUNK_BYTES, self.total - self.received):
            raise WireError(Refusal.ORDER, f"chunk of {len(data)} bytes before the last, expected {CHUNK_BYTES}")
        start, rest = self.received, memoryview(data)
        self.received += len(data)
        for view in self._views:
            if len(rest) and start < len(view):
                part = rest[: len(view) - start]
                view[start : start + len(part)] = part
                start, rest = 0, rest[len(part) :]
            else:
                start -= len(view)

    def checksum(self) -> int:
        """Return the CRC-32 of the bytes that have arrived; each byte is read once, however often this is called."""
        start, crc = self._checked
        self._checked = self.received, checksum(self._views, start, self.received, crc)
        return self._checked[1]

    @property
    def is_complete(self) -> bool:
        """True once all bytes have arrived."""
        return self.received == self.total

    def end(self) -> None:
        """Raise WireError if bytes are missing."""
        if not self.is_complete:
            raise WireError(Refusal.TRUNCATED, f"{self.received} of {self.total} bytes at the end")

    @property
    def is_whole(self) -> bool:
        """True if there are fields, and their rows are adjacent in memory, so that :meth:`message` has all rows."""
        return bool(self.specs) and all(len(pieces) == 1 for pieces in self._storage)

    def forget(self, row: int) -> None:
        """Store the rest of a row in separate memory, because its memory may now hold another answer."""
        for spec, pieces in zip(self.specs, self._storage, strict=True):
            if spec.per_client and len(pieces) == 1:
                pieces[:] = [_row(spec, pieces, i) for i in range(spec.shape[0])]
            pieces[row] = memory(len(pieces[row]))
        self._views = [_view(piece) for pieces in self._storage for piece in pieces]

    def message(self, cls: type[Message], row: int | None = None) -> Message:
        """Return the message, or that of one row; see :meth:`tensors`."""
        return cls(**self.tensors(cls, row))

    def tensors(self, cls: type[Message], row: int | None = None) -> dict[str, Tensor]:
        """Return the fields of a message, or of one row of it, by name, copying small ones only.

        Raise WireError if the fields are not those of the class, or a bool is neither 0 nor 1.
        """
        fields = {(field.name, field.quantity, field.per_client) for field in cls.fields()}
        announced = {(spec.name, spec.quantity, spec.per_client) for spec in self.specs}
        if fields != announced or len(self.specs) != len(fields):
            raise WireError(
                Refusal.SHAPE, f"fields {[spec.name for spec in self.specs]} are not those of {cls.__name__}"
            )
        return {
            spec.name: _tensor(spec, pieces[0] if row is None else _row(spec, pieces, row), row is not None, cls)
            for spec, pieces in zip(self.specs, self._storage, strict=True)
        }


def _row(spec: TensorSpec, pieces: list[Tensor | bytearray], row: int) -> Tensor | bytearray:
    """Return the memory of a row of a tensor; a message with a broadcast has a single row."""
    if len(pieces) > 1 or not spec.per_client:
        return pieces[row]
    size = len(pieces[0]) // spec.shape[0]
    return pieces[0][row * size : (row + 1) * size]


def _small_or_memory(nbytes: int) -> Tensor | bytearray:
    return bytearray(nbytes) if nbytes < SMALL_BYTES else memory(nbytes)


def _tensor(spec: TensorSpec, storage: Tensor | bytearray, is_row: bool, cls: type[Message]) -> Tensor:
    """Return the received bytes of a tensor, or of one row of it."""
    if isinstance(storage, bytearray):  # copied, because it is not aligned
        storage = torch.frombuffer(storage, dtype=torch.uint8).clone() if storage else torch.empty(0, dtype=torch.uint8)
    shape = (1, *spec.shape[1:]) if is_row and spec.per_client else spec.shape
    if spec.dtype == torch.bool and bool((storage > 1).any()):
        raise WireError(Refusal.SHAPE, f"{cls.__name__}.{spec.name} holds bytes other than 0 and 1")
    if not len(storage):  # torch cannot view empty storage as aligned (data without classes have no confusion matrix)
        return torch.empty(shape, dtype=spec.dtype)
    return storage.view(spec.dtype).view(shape)


def memory(nbytes: int) -> Tensor:
    """Allocate aligned memory for one tensor as flat uint8; a slice of a shared buffer would not be aligned.

    Large tensors use huge pages where the system has them: each exchange allocates new memory, and obtaining that page
    by page costs as much as reading the data that fill it. Very large ones are files (:func:`spooled`).
    """
    if (file := spooled(nbytes)) is not None:
        return torch.frombuffer(file, dtype=torch.uint8)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernel without huge pages
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(pages, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8)
