"""Baseline: bytes over a bare bidirectional gRPC stream, the cost of the wire itself.

    python research/benchmarks/bare.py HOST:PORT                   (the other end, started by the benchmark)

Raw messages of 1 MiB without a serializer, both ends ``grpc.aio``, which was the fastest of the variants tried (sync,
sync with aio). The server sends one buffer repeatedly; no byte is inspected. The other end either returns each
message as it arrives (``pipelined``: both directions at once) or, like a client that needs its model before it can
train, returns as many bytes once all have arrived (``in turn``).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import grpc

MESSAGE_BYTES = 1 << 20
METHOD = "/benchmarks.Bare/Echo"
PIPELINED, IN_TURN = b"pipelined", b"in turn"


class Bare:
    """Server, on an event loop in its own thread, and the processes at the other end."""

    def __init__(self, peers: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._start(peers))

    def transfer(self, down: int, how: bytes) -> float:
        """Move this many bytes to all peers together, and as many back; return the seconds."""

        async def all_peers() -> float:
            share, rest = divmod(down, len(self._streams))
            started = time.perf_counter()
            sizes = [share + (i < rest) for i in range(len(self._streams))]
            both = (part for stream, size in zip(self._streams, sizes, strict=True) for part in both_ways(stream, size))
            await asyncio.gather(*both)
            return time.perf_counter() - started

        def both_ways(stream: Any, size: int) -> tuple[Any, Any]:
            return self._send(stream, size, how), self._receive(stream, size)

        seconds: float = self._call(all_peers())
        return seconds

    def stop(self) -> None:
        """Stop the streams, the processes and the thread."""
        self._call(self._stop())
        for process in self._processes:
            process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self, peers: int) -> None:
        self._joined: asyncio.Queue[Any] = asyncio.Queue()
        self._over = asyncio.Event()
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Handler(self._hold),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        command = [sys.executable, __file__, f"127.0.0.1:{port}"]
        self._processes = [subprocess.Popen(command) for _ in range(peers)]
        self._streams = [await self._joined.get() for _ in range(peers)]
        self._buffer = os.urandom(MESSAGE_BYTES)

    async def _hold(self, _: Any, stream: Any) -> None:
        await self._joined.put(stream)
        await self._over.wait()

    async def _stop(self) -> None:
        self._over.set()
        await self._server.stop(2.0)

    async def _send(self, stream: Any, size: int, how: bytes) -> None:
        await stream.write(size.to_bytes(8, "little") + how)
        while size:
            message = self._buffer[:size]
            await stream.write(message)
            size -= len(message)

    @staticmethod
    async def _receive(stream: Any, size: int) -> None:
        while size:
            size -= len(await stream.read())


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    def __init__(self, hold: Any) -> None:
        self._hold = hold

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._hold)


async def answer(address: str) -> None:
    """Run the other end."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(METHOD)()
        while (head := await call.read()) is not grpc.aio.EOF:
            left, how = int.from_bytes(head[:8], "little"), head[8:]
            kept = []
            while left:
                message = await call.read()
                left -= len(message)
                if how == PIPELINED:
                    await call.write(message)
                else:
                    kept.append(message)
            for message in kept:
                await call.write(message)


if __name__ == "__main__":
    asyncio.run(answer(sys.argv[1]))
