"""A TCP proxy between workers and aggregator that simulates network faults: seeded, on one event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Weather:
    """Faults of the forwarded bytes.

    Attributes
    ----------
    cut_every
        Mean number of bytes, of both directions of a connection, between cuts; 0: never.
    half
        Fraction of the cuts that close one direction only.
    flip_every
        Mean number of bytes between flipped bits; 0: never.
    delay_s
        Maximum delay of a block.
    rate
        Bytes per second in one direction; 0: unlimited.
    faults
        Maximum number of cuts and flips: there is no guarantee for connections that fail for ever.
    """

    cut_every: float = 0.0
    half: float = 0.0
    flip_every: float = 0.0
    delay_s: float = 0.0
    rate: float = 0.0
    faults: int = 1 << 62


class Proxy:
    """Proxy that forwards connections to a server; ``address`` is its own.

    Attributes
    ----------
    cuts, flips
        Number of these faults.
    """

    def __init__(self, server: str, weather: Weather, random: Random) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._weather = weather
        self._random = random
        self.cuts = self.flips = 0
        self._loop = asyncio.new_event_loop()
        self._listening = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._listening.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _until(self, mean: float) -> float:
        """Return the number of bytes until the next fault, given their mean distance."""
        more = mean and self.cuts + self.flips < self._weather.faults
        return self._random.expovariate(1 / mean) if more else float("inf")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with suppress(OSError, asyncio.CancelledError):
            there = await asyncio.open_connection(*self._server)
            left = [self._until(self._weather.cut_every)]  # of both directions together
            ways = [(reader, there[1]), (there[0], writer)]
            await asyncio.gather(*(self._pass_on(source, sink, left) for source, sink in ways))
        for end in (writer, *(there[1:] if there else ())):
            end.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: list[float]) -> None:
        """Forward one direction until it ends; raise ConnectionAbortedError to end the other, too."""
        weather, flip = self._weather, self._until(self._weather.flip_every)
        while block := await source.read(1 << 16):
            if weather.delay_s:
                await asyncio.sleep(self._random.uniform(0, weather.delay_s))
            if weather.rate:
                await asyncio.sleep(len(block) / weather.rate)
            if len(block) > flip:
                block = self._flipped(block, int(flip))
                flip = len(block) + self._until(weather.flip_every)
            flip -= len(block)
            if len(block) > left[0]:
                sink.write(block[: int(left[0])])
                self.cuts += 1
                if self._random.random() >= weather.half:
                    raise ConnectionAbortedError
                break
            left[0] -= len(block)
            with suppress(ConnectionError):  # the receiver has left; the other direction may still have data
                sink.write(block)
                await sink.drain()
        with suppress(OSError):
            sink.write_eof()

    def _flipped(self, block: bytes, at: int) -> bytes:
        self.flips += 1
        changed = bytearray(block)
        changed[at] ^= 1 << self._random.randrange(8)
        return bytes(changed)
