"""Probes of a worker over HTTP: ``/healthz`` while its event loop runs, ``/readyz`` while it has joined a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def probes_served(address: str | None, ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Answer probes on this event loop for the duration of the block. ``address`` is ``host:port``; None: do not.

    Raise ExperimentError if the address is invalid or cannot be bound.
    """
    if address is None:
        yield
        return
    from fedloom.transport.server import HEALTH_PATH, READY_PATH, Probes, answer_probe  # slow to import

    async def probe(scope: Any, receive: Any, send: Any) -> None:
        healthy = scope["path"] == HEALTH_PATH or ready()
        await answer_probe(send, 404 if scope["path"] not in (HEALTH_PATH, READY_PATH) else 200 if healthy else 503)

    probes = Probes.start(address, probe)
    try:
        yield
    finally:
        await probes.stop()
