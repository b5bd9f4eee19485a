"""Transfers that continue on another stream: the receiver reports its first bytes, and the sender sends the rest.

Nothing that a peer reports costs memory or time beyond the bytes that it was sent: a sender compares a report with its
own record of the transfer, and computes no checksum twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fedloom.federation.transport import ConversationKey
from fedloom.federation.validation import TensorSpec
from fedloom.transport.codec import Assembler, Encoded, checksum, specs_to_wire
from fedloom.transport.stream import key_from_wire, key_to_wire
from fedloom.transport.wire import federation_pb2 as wire

Transfer: TypeAlias = tuple[ConversationKey, int, tuple[int, ...]]
"""Identity of a transfer between two processes: conversation, exchange, rows."""


def transfer_of(part: wire.Partial | wire.Envelope) -> Transfer:
    """Return the identity of a transfer."""
    return key_from_wire(part.conversation), part.exchange, tuple(part.rows)


@dataclass(frozen=True, eq=False)
class Partial:
    """Received part of a transfer whose stream has broken."""

    transfer: Transfer
    message: str
    """Name of the message's class."""
    assembler: Assembler

    def to_wire(self) -> wire.Partial:
        """Return the report to the sender."""
        key, exchange, rows = self.transfer
        return wire.Partial(
            conversation=key_to_wire(key),
            exchange=exchange,
            rows=rows,
            message=self.message,
            tensors=specs_to_wire(self.assembler.specs),
            received=self.assembler.received,
            crc32=self.assembler.checksum(),
        )

    def continues(self, begin: wire.Begin, specs: Sequence[TensorSpec]) -> bool:
        """Return whether a transfer begins where this one was interrupted."""
        envelope = begin.envelope
        return (
            (transfer_of(envelope), envelope.message) == (self.transfer, self.message)
            and (begin.offset, begin.total_bytes) == (self.assembler.received, self.assembler.total)
            and tuple(specs) == self.assembler.specs
        )


class Sending:
    """Sender's record of a transfer to one process, from which the next stream continues.

    Parameters
    ----------
    receiver
        Identity of the receiving process.
    encoded
        Message to send.
    before
        Record of the previous stream, if any.
    report
        What the receiver says it has of the transfer, if it says anything.
    """

    def __init__(
        self,
        receiver: object,
        transfer: Transfer,
        encoded: Encoded,
        before: Sending | None = None,
        report: wire.Partial | None = None,
    ) -> None:
        self._receiver, self._transfer, self._layout = receiver, transfer, (encoded.name, encoded.specs)
        self.offset = self._crc = 0
        if before is not None and report is not None and before.allows(receiver, report):
            crc = checksum(encoded.buffers, before.offset, report.received, before._crc)
            if before._layout == self._layout and crc == report.crc32:
                self.offset, self._crc = report.received, crc
        self.sent = self.offset
        """Number of bytes that have left, or need not leave."""

    def allows(self, receiver: object, report: wire.Partial) -> bool:
        """Return whether a report may be true: it is about this transfer, and no more bytes than were sent."""
        name, specs = self._layout
        return (
            (receiver, transfer_of(report), report.message) == (self._receiver, self._transfer, name)
            and self.offset <= report.received <= self.sent
            and list(report.tensors) == specs_to_wire(specs)
        )
