"""Many workers in one process without torch; each has its own connection and token, and answers at once.

    python research/benchmarks/peers.py FOLDER FIRST COUNT                (started by research/benchmarks/scale.py)

They implement the protocol of docs/wire.md and answer each message with fixed bytes, which ``scale.py`` has prepared:
``peers.json`` has the aggregator's address, and a worker's introduction and answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import grpc

from fedloom.transport.wire import federation_pb2 as wire

FRAME_BYTES = 1 << 20
SEAL = bytes([wire.WorkerFrame.CRC32_FIELD_NUMBER << 3 | 5])
JOIN = "/fedloom.v1.Federation/Join"
LONGEST_PAUSE_S = 5.0
HEARTBEAT_S = 15.0
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # separate connections
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def sealed(frame: bytes) -> bytes:
    """Return a frame with its checksum."""
    return frame + SEAL + zlib.crc32(frame).to_bytes(4, "little")


def worker_name(number: int) -> str:
    """Return the name of a worker, which is also its identity's."""
    return f"w{number:05d}"


def client_names(number: int, clients: int) -> list[str]:
    """Return the names of a worker's clients."""
    return [f"{worker_name(number)}-{i:03d}" for i in range(clients)]


class Peer:
    """Simulated worker."""

    def __init__(self, told: dict[str, Any], number: int) -> None:
        self.name = worker_name(number)
        self._told = told
        self._address = told["address"]
        self._metadata = (("authorization", f"Bearer {told['tokens'][number]}"),)
        self._credentials = grpc.ssl_channel_credentials(Path(told["ca"]).read_bytes())
        clients = client_names(number, told["clients"])
        self._hello = wire.Hello(
            protocol=told["protocol"],
            package=told["package"],
            worker=self.name,
            incarnation=f"{self.name}-{os.getpid()}",
            clients=clients,
            device="cpu",
            algorithms=told["algorithms"],
            announced=[wire.Announced(train=100, validation=20, test=20, labelled=True) for _ in clients],
        )
        self._answers = {
            asked: (wire.Begin.FromString(bytes.fromhex(begin)), bytes.fromhex(data))
            for asked, (begin, data) in told["answers"].items()
        }
        self._number = 0
        self._writing = asyncio.Lock()

    async def serve(self) -> None:
        """Connect, answer, and reconnect, until the run is over."""
        pause = 0.1
        while True:
            try:
                async with grpc.aio.secure_channel(self._address, self._credentials, OPTIONS) as channel:
                    if await self._stream(channel):
                        return
                    pause = 0.1
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    raise
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _stream(self, channel: Any) -> bool:
        """Hold one stream; return whether the run is over."""
        call = channel.stream_stream(JOIN)(metadata=self._metadata)
        await call.write(sealed(wire.WorkerFrame(parts=[wire.WorkerPart(hello=self._hello)]).SerializeToString()))
        asked: dict[int, wire.Envelope] = {}
        beating = asyncio.create_task(self._beat(call))
        try:
            return await self._read(call, asked)
        finally:
            beating.cancel()

    async def _beat(self, call: Any) -> None:
        """Send heartbeats."""
        beat = sealed(wire.WorkerFrame(parts=[wire.WorkerPart(heartbeat=wire.Heartbeat())]).SerializeToString())
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            async with self._writing:
                await call.write(beat)

    async def _read(self, call: Any, asked: dict[int, wire.Envelope]) -> bool:
        """Process messages until the stream ends; return whether the run is over."""
        while (data := await call.read()) is not grpc.aio.EOF:
            for part in wire.AggregatorFrame.FromString(data).parts:
                match part.WhichOneof("part"):
                    case "begin":
                        asked[part.begin.transfer] = part.begin.envelope
                    case "end":
                        await self._answer(call, asked.pop(part.end.transfer))
                    case "refused":
                        raise SystemExit(f"{self.name} was refused: {part.refused.reason}")
                    case "goodbye":
                        return True
        return False

    async def _answer(self, call: Any, asked: wire.Envelope) -> None:
        """Answer every row of a request in as few frames as possible."""
        if asked.replay:
            return
        template, data = self._answers[asked.message]
        frame = b""
        for row, client in zip(asked.rows, asked.clients, strict=True):
            self._number += 1
            begin = wire.Begin()
            begin.CopyFrom(template)
            begin.transfer = self._number
            envelope = begin.envelope
            envelope.run, envelope.incarnation, envelope.exchange = asked.run, asked.incarnation, asked.exchange
            envelope.conversation.CopyFrom(asked.conversation)
            envelope.rows.append(row)
            envelope.clients.append(client)
            parts = wire.WorkerFrame(
                parts=[
                    wire.WorkerPart(begin=begin),
                    wire.WorkerPart(chunk=wire.Chunk(transfer=self._number, data=data)),
                    wire.WorkerPart(end=wire.End(transfer=self._number)),
                ]
            ).SerializeToString()
            if len(frame) + len(parts) > FRAME_BYTES - 16:
                async with self._writing:
                    await call.write(sealed(frame))
                frame = b""
            frame += parts
        async with self._writing:
            await call.write(sealed(frame))


async def main() -> None:
    """Run all workers."""
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    told = json.loads((folder / "peers.json").read_text())
    await asyncio.gather(*(Peer(told, first + i).serve() for i in range(count)))


if __name__ == "__main__":
    assert "torch" not in sys.modules
    asyncio.run(main())
