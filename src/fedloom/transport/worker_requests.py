"""Requests that a worker receives, and the decoding of their messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.federation.transport import ConversationKey
from fedloom.messages import Message
from fedloom.transport.codec import Assembler, read_specs
from fedloom.transport.frames import ChunkView, Refusal, WireError
from fedloom.transport.stream import key_from_wire
from fedloom.transport.wire import federation_pb2 as wire

REQUEST_BYTES = 4 << 30  # maximum memory of one request


@dataclass(frozen=True, eq=False)
class WorkerRequest:
    """Request from the aggregator."""

    incarnation: str
    """Id of the aggregator process that sent it."""
    key: ConversationKey
    envelope: wire.Envelope
    assembler: Assembler | None
    """Content of the request; None if it exceeded :data:`REQUEST_BYTES` and was skipped."""
    expires: float | None
    """Deadline on the monotonic clock; None if there is none."""

    @property
    def expired(self) -> bool:
        """True if the deadline has passed."""
        return self.expires is not None and time.monotonic() > self.expires

    def message(self, vocabulary: Mapping[str, type[Message]]) -> Message:
        """Decode its message.

        Raise WireError if the message was too large, is not in the vocabulary, or its tensors are not one row per
        client.
        """
        envelope, assembler = self.envelope, self.assembler
        cls = vocabulary.get(envelope.message)
        if cls is None:
            raise WireError(Refusal.SHAPE, f"unknown message {envelope.message[:80]!r}")
        if assembler is None:
            raise WireError(
                Refusal.SIZE, f"more than {REQUEST_BYTES} bytes; start more workers, so that each receives fewer rows"
            )
        message = assembler.message(cls)
        per_client = {field.name for field in message.fields() if field.per_client}
        for name, tensor in message.tensors().items():
            if name in per_client and (tensor.ndim == 0 or tensor.shape[0] != len(envelope.rows)):
                raise WireError(
                    Refusal.SHAPE,
                    f"{envelope.message}.{name} has shape {tuple(tensor.shape)}, expected {len(envelope.rows)} rows",
                )
        return message


class RequestReader:
    """Assembles the requests of one stream."""

    def __init__(self) -> None:
        self._arriving: dict[int, WorkerRequest] = {}

    def begin(self, begin: wire.Begin) -> None:
        """Begin to receive a request."""
        envelope = begin.envelope
        if len(envelope.rows) != len(envelope.clients):
            raise WireError(Refusal.CLIENT, f"{len(envelope.rows)} rows and {len(envelope.clients)} clients")
        if envelope.states and len(envelope.states) != len(envelope.rows):
            raise WireError(Refusal.CLIENT, f"{len(envelope.rows)} rows and {len(envelope.states)} client states")
        fits = begin.total_bytes <= REQUEST_BYTES
        assembler = Assembler(begin, read_specs(envelope), REQUEST_BYTES) if fits else None
        expires = time.monotonic() + begin.remaining_s if begin.HasField("remaining_s") else None
        key = key_from_wire(envelope.conversation)
        self._arriving[begin.transfer] = WorkerRequest(envelope.incarnation, key, envelope, assembler, expires)

    def add(self, chunk: wire.Chunk | ChunkView) -> None:
        """Add a chunk of a request."""
        assembler = self._arrival(chunk.transfer).assembler
        if assembler is not None:
            assembler.add(chunk)

    def end(self, number: int) -> WorkerRequest:
        """Return a request that has been received completely."""
        request = self._arrival(number)
        if request.assembler is not None:
            request.assembler.end()
        return self._arriving.pop(number)

    def _arrival(self, number: int) -> WorkerRequest:
        if number not in self._arriving:
            raise WireError(Refusal.UNKNOWN_TRANSFER, f"transfer {number}")
        return self._arriving[number]
