"""Messages of personalization conversations: transfers of :mod:`fedloom.transport.codec` on a stream per client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from fedloom.federation.validation import TensorSpec
from fedloom.messages import Message
from fedloom.transport.codec import Assembler, Cutter, Encoded, read_specs
from fedloom.transport.frames import Pieces, Refusal, WireError, pack_parts, read_parts
from fedloom.transport.wire import federation_pb2 as transfers
from fedloom.transport.wire import personalization_pb2 as wire

SERVICE = "fedloom.v1.Personalization"
DESCRIBE = "Describe"
PERSONALIZE = "Personalize"
RETRY = "retry-after-ms"
"""Trailing metadata of a refusal: the delay before the next attempt, in ms."""

_AXES = 8  # maximum number of axes of a tensor


def message_frames(cutter: Cutter, encoded: Encoded, *head: Pieces) -> list[bytes]:
    """Return the frames of one message, preceded by the parts in ``head``."""
    return list(pack_parts((*head, *cutter.parts(transfers.Envelope(), encoded))))


@dataclass(frozen=True, eq=False)
class Received:
    """A received message; its tensors are created outside the event loop, which torch would block."""

    cls: type[Message]
    specs: Sequence[TensorSpec]
    _assembler: Assembler

    def message(self) -> Message:
        """Return the message; raise WireError if a bool is neither 0 nor 1."""
        return self._assembler.message(self.cls)


class PartReader:
    """Reads one direction of a conversation's stream: single parts, and whole messages.

    Parameters
    ----------
    read
        Reads the next frame; ``grpc.aio.EOF`` at the end of the stream.
    frame
        Class of the frames.
    """

    def __init__(self, read: Callable[[], Awaitable[Any]], frame: type[wire.NewcomerFrame | wire.ModelFrame]) -> None:
        self._read = read
        self._frame = frame
        self._parts: Iterator[tuple[str, Any]] = iter(())  # parsed one by one: a frame may have very many
        self.size = 0
        """Bytes of the frames read so far."""

    async def part(self, kind: str, transfer: int | None = None) -> Any:
        """Return the next part, which must be of this kind and, if given, of this transfer.

        Raise WireError if it is another part or damaged, or the stream has ended.
        """
        while (next_part := next(self._parts, None)) is None:
            data = await self._read()
            if data is grpc.aio.EOF:
                raise WireError(Refusal.TRUNCATED, f"the stream ended before a part {kind!r}")
            self.size += len(data)
            self._parts = read_parts(self._frame, data)
        found, part = next_part
        if found != kind:
            raise WireError(Refusal.GARBAGE, f"got a part {found!r}, expected {kind!r}")
        if transfer is not None and part.transfer != transfer:
            raise WireError(Refusal.UNKNOWN_TRANSFER, f"transfer {part.transfer}, expected {transfer}")
        return part

    async def message(self, classes: Mapping[str, type[Message]], limit: int) -> Received:
        """Return the next message.

        Parameters
        ----------
        classes
            Allowed classes, by name.
        limit
            Maximum size accepted, in bytes.

        Raises
        ------
        WireError
            If its class or fields are not allowed or it is too large, both before memory is allocated; or if it is
            damaged, or the stream has ended.
        """
        begin: transfers.Begin = await self.part("begin")
        name, tensors = begin.envelope.message, begin.envelope.tensors
        if name not in classes:
            allowed = ", ".join(sorted(classes)) or "none"
            raise WireError(Refusal.SHAPE, f"message {name[:80]!r} is not among the expected ones: {allowed}")
        cls = classes[name]
        _check_fields(cls, tensors)
        specs = read_specs(begin.envelope)
        assembler = Assembler(begin, specs, limit)
        while not assembler.is_complete:
            assembler.add(await self.part("chunk", begin.transfer))
        await self.part("end", begin.transfer)
        return Received(cls, specs, assembler)


def _check_fields(cls: type[Message], tensors: Sequence[transfers.TensorSpec]) -> None:
    """Raise WireError if the fields are not those of the class, before anything is computed from their shapes."""
    names = [field.name for field in cls.fields()]
    if len(tensors) != len(names) or [spec.name for spec in tensors] != names:
        found = [spec.name[:80] for spec in tensors[:20]]
        raise WireError(Refusal.SHAPE, f"{cls.__name__} has fields {found}, expected {names}")
    for spec in tensors:
        if len(spec.shape) > _AXES:
            raise WireError(
                Refusal.SHAPE, f"{cls.__name__}.{spec.name} has {len(spec.shape)} axes, and at most {_AXES} are allowed"
            )
