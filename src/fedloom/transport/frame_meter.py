"""Bytes of a worker's stream, by the message that they carry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedloom.federation.worker_record import WorkerRecord
from fedloom.transport.frames import WireError, read_parts
from fedloom.transport.wire import federation_pb2 as wire


class FrameMeter:
    """Counter of the frames of one direction of one stream; the sizes that it reports add up to those of the frames."""

    def __init__(self, record: WorkerRecord, *, sending: bool) -> None:
        self._record, self._sending = record, sending
        self._frame = wire.WorkerFrame if sending else wire.AggregatorFrame
        self._open: dict[int, tuple[str, str]] = {}  # by transfer: class and purpose of its message

    @contextmanager
    def writing(self, frame: bytes) -> Iterator[None]:
        """Count a frame that the block writes."""
        self.count(frame)
        self._record.transferring(1)
        try:
            yield
        finally:
            self._record.transferring(-1)

    def count(self, frame: bytes) -> None:
        """Count a frame; headers and seal count with its last part."""
        if not (self._record.in_detail and frame):
            return
        sizes: dict[tuple[str, str], int] = {}
        carried, before = ("unreadable", ""), len(self._open)
        try:
            for kind, part in read_parts(self._frame, frame):
                carried = self._carried(kind, part)
                sizes[carried] = sizes.get(carried, 0) + (len(part.data) if kind == "chunk" else part.ByteSize())
        except WireError:  # the stream's reader says what is wrong
            pass
        sizes[carried] = sizes.get(carried, 0) + len(frame) - sum(sizes.values())
        for (message, purpose), size in sizes.items():
            self._record.moved(size, message, purpose, sending=self._sending)
        if not self._sending and (change := len(self._open) - before):
            self._record.transferring(change)

    def _carried(self, kind: str, part: Any) -> tuple[str, str]:
        """Return the class and purpose of the message that a part belongs to; its own kind, if it is no transfer."""
        if kind == "begin":
            self._open[part.transfer] = (part.envelope.message, part.envelope.conversation.purpose)
        if kind == "end":
            return self._open.pop(part.transfer, (kind, ""))
        return self._open.get(part.transfer, (kind, "")) if kind in ("begin", "chunk") else (kind, "")
