"""A TCP proxy between workers and aggregator that does to connections what networks do: seeded, on one event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Weather:
    """Faults of the bytes that are passed on.

    Attributes
    ----------
    cut_every
        Mean bytes, of both directions of a connection, after which it is cut; 0: never.
    half
        Of the cuts, the share after which one direction alone is closed, and the other passes on.
    flip_every
        Mean bytes until a bit is flipped; 0: never.
    delay_s
        The most that a block waits.
    rate
        Bytes a second in one direction; 0: any.
    faults
        The most cuts and flips in all: what is broken for ever promises nothing.
    """

    cut_every: float = 0.0
    half: float = 0.0
    flip_every: float = 0.0
    delay_s: float = 0.0
    rate: float = 0.0
    faults: int = 1 << 62


class Proxy:
    """Passes connections on to a server; ``address`` is where it listens.

    Attributes
    ----------
    cuts, flips
        How often it did so.
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
        """End every connection, and the thread."""
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
        """Bytes until the next fault of a kind that comes every so many."""
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
        """Pass one direction on until it ends; raises ConnectionAbortedError to end the other, too."""
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
            with suppress(ConnectionError):  # nobody reads any more; the other direction may have something to say
                sink.write(block)
                await sink.drain()
        with suppress(OSError):
            sink.write_eof()

    def _flipped(self, block: bytes, at: int) -> bytes:
        self.flips += 1
        changed = bytearray(block)
        changed[at] ^= 1 << self._random.randrange(8)
        return bytes(changed)
