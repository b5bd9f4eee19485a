"""Messages of personalization conversations, as frames of at most 1 MiB (personalization.proto)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from fedloom.messages import Message
from fedloom.transport.codec import FRAME_BYTES
from fedloom.transport.wire import personalization_pb2 as wire

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

SERVICE = "fedloom.v1.Personalization"
DESCRIBE = "Describe"
PERSONALIZE = "Personalize"
RETRY = "retry-after-ms"
"""Trailing metadata of a refusal: the delay before the next attempt, in ms."""

MOST_HELD = 16
"""Maximum number of broadcasts that a client may list as held."""

_TYPES: Mapping[torch.dtype, wire.ElementType] = {
    torch.float32: wire.ELEMENT_TYPE_FLOAT32,
    torch.float64: wire.ELEMENT_TYPE_FLOAT64,
    torch.int64: wire.ELEMENT_TYPE_INT64,
    torch.uint8: wire.ELEMENT_TYPE_UINT8,
    torch.bool: wire.ELEMENT_TYPE_BOOL,
    torch.bfloat16: wire.ELEMENT_TYPE_BFLOAT16,
}
_DTYPES = {number: dtype for dtype, number in _TYPES.items()}
_DATA = bytes([wire.ModelFrame.DATA_FIELD_NUMBER << 3 | 2])
_HEAD_BYTES = 16  # maximum size of the data's tag and length

Frame: TypeAlias = wire.ModelFrame | wire.NewcomerFrame

PRECISIONS: Mapping[str, tuple[wire.Precision, torch.dtype]] = {
    "float32": (wire.PRECISION_FLOAT32, torch.float32),
    "bfloat16": (wire.PRECISION_BFLOAT16, torch.bfloat16),
}
"""Floating-point types that the server may send."""


class Unfit(Exception):
    """Unusable frame; the text says what was found and what is allowed."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One tensor in wire format: its spec (with the digest of a broadcast) and its bytes."""

    spec: wire.SpokenTensor
    data: memoryview


def pieces(message: Message, floating: torch.dtype | None = None) -> list[Piece]:
    """Return a message as tensors in wire format.

    Parameters
    ----------
    floating
        Type in which float32 is sent; None keeps float32. Other types are unchanged.
    """
    found = []
    for field, tensor in zip(message.fields(), message.tensors().values(), strict=True):
        sent = tensor.detach()
        if floating is not None and sent.dtype == torch.float32:
            sent = sent.to(floating)
        data = _view(sent)
        digest = "" if field.per_client else hashlib.sha256(data).hexdigest()
        spec = wire.SpokenTensor(name=field.name, type=_TYPES[sent.dtype], shape=sent.shape, digest=digest)
        found.append(Piece(spec, data))
    return found


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a broadcast in wire format."""
    return hashlib.sha256(_view(tensor)).hexdigest()


def _view(tensor: Tensor) -> memoryview:
    """View a tensor as bytes."""
    return memoryview(cast("Buffer", tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))


def frames(head: Frame, name: str, parts: Sequence[Piece], held: Collection[str] = ()) -> Iterator[bytes]:
    """Cut a message into frames; the first also carries the fields of ``head``.

    Parameters
    ----------
    name
        Class name of the message.
    held
        Digests of broadcasts that the other side has.
    """
    data, crc = [], 0
    head.spoken.message = name
    for part in parts:
        spec = head.spoken.tensors.add()
        spec.CopyFrom(part.spec)
        if part.spec.digest and part.spec.digest in held:
            spec.held = True
        else:
            data.append(part.data)
            crc = crc32(part.data, crc)
    head.spoken.crc32 = crc
    begin = head.SerializeToString()
    room = FRAME_BYTES - len(begin) - _HEAD_BYTES
    waiting: list[memoryview] = []
    for block in data:
        rest = block
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            waiting.append(piece)
            room -= len(piece)
            if room == 0:
                yield _framed(begin, waiting)
                begin, waiting, room = b"", [], FRAME_BYTES - _HEAD_BYTES
    if begin or waiting:
        yield _framed(begin, waiting)


def _framed(begin: bytes, data: Sequence[memoryview]) -> bytes:
    """Return a frame around its data; protobuf itself would copy the data twice."""
    size = sum(map(len, data))
    if not size:
        return begin
    length = bytearray()
    left = size
    while left > 0x7F:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return b"".join((begin, _DATA, length, *data))


class Incoming:
    """A message being received, in one frame or several.

    Parameters
    ----------
    spoken
        Announcement of the message.
    messages
        Allowed classes, by name.
    limit
        Maximum size accepted, in bytes.

    Raises
    ------
    Unfit
        If its class or fields are not allowed or it is too large; raised before memory is allocated.
    """

    def __init__(self, spoken: wire.Spoken, messages: Mapping[str, type[Message]], limit: int) -> None:
        if spoken.message not in messages:
            allowed = ", ".join(sorted(messages)) or "nothing"
            raise Unfit(f"found message {spoken.message[:80]!r}; allowed: {allowed}")
        self.cls = messages[spoken.message]
        self.specs = list(spoken.tensors)
        names = [field.name for field in self.cls.fields()]
        if [spec.name for spec in self.specs] != names:
            raise Unfit(f"{self.cls.__name__}: found fields {[s.name[:80] for s in self.specs][:20]}; allowed: {names}")
        for spec in self.specs:
            if spec.type not in _DTYPES or len(spec.shape) > 8:
                raise Unfit(
                    f"{self.cls.__name__}.{spec.name}: found element type {spec.type} of {len(spec.shape)} axes"
                )
        self.total = sum(_nbytes(spec) for spec in self.specs if not spec.held)
        if self.total > limit:
            raise Unfit(f"{self.cls.__name__}: found {self.total:,} bytes; allowed: at most {limit:,}")
        self._crc = spoken.crc32
        self._data = bytearray()

    @property
    def whole(self) -> bool:
        """True once the message is complete."""
        return len(self._data) == self.total

    def add(self, data: bytes) -> None:
        """Store the next bytes.

        Raises
        ------
        Unfit
            If they are empty while some are missing, or exceed the announced size.
        """
        if (not data and not self.whole) or len(self._data) + len(data) > self.total:
            raise Unfit(f"{self.cls.__name__}: found {len(self._data) + len(data):,} bytes; announced: {self.total:,}")
        self._data += data

    def message(self, held: Callable[[str], Tensor | None] = lambda digest: None) -> Message:
        """Return the message, with bfloat16 converted to float32.

        Parameters
        ----------
        held
            Returns a held broadcast in wire format by its digest, or None.

        Raises
        ------
        Unfit
            If it arrived damaged, a broadcast is not held, or a bool is neither 0 nor 1.
        """
        if crc32(self._data) != self._crc:
            raise Unfit(f"{self.cls.__name__} arrived damaged")
        return self.cls(**{name: _float32(tensor) for name, tensor in self.tensors(held).items()})

    def tensors(self, held: Callable[[str], Tensor | None] = lambda digest: None) -> dict[str, Tensor]:
        """Return the fields in wire format, by name."""
        found, at = {}, 0
        for spec in self.specs:
            dtype, size = _DTYPES[spec.type], _nbytes(spec)
            if spec.held:
                there = held(spec.digest)
                if there is None:
                    raise Unfit(f"{self.cls.__name__}.{spec.name}: the broadcast {spec.digest[:12]!r} is not here")
                found[spec.name] = there
                continue
            if not size:
                found[spec.name] = torch.empty(list(spec.shape), dtype=dtype)
                continue
            flat = torch.frombuffer(self._data, dtype=torch.uint8, count=size, offset=at).clone()
            if dtype == torch.bool and bool((flat > 1).any()):
                raise Unfit(f"{self.cls.__name__}.{spec.name} holds bytes that are no bool")
            found[spec.name] = flat.view(dtype).view(list(spec.shape))
            at += size
        return found


def _nbytes(spec: wire.SpokenTensor) -> int:
    return math.prod(spec.shape) * _DTYPES[spec.type].itemsize


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
