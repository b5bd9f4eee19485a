"""Every method over real gRPC streams with two workers: results equal those of one process to the bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from conformance_kit import Federation, assert_equal_but_for_traffic

from fedloom.engine import assemble, distributed
from fedloom.federation.loop import vocabulary
from fedloom.sums.messages import VOCABULARY
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.exchanges import ServedRun
from fedloom.transport.stream import Introduction
from fedloom.transport.worker import serve

WORKERS = 2


def make_aggregator(tiny: Federation, incarnation: str = "a1") -> Aggregator:
    """Return an aggregator that has not been started."""
    parts, algorithm = tiny.parts, tiny.parts.algorithm
    run = ServedRun(
        name="conformance",
        incarnation=incarnation,
        experiment=distributed.welcome(parts),
        vocabulary={**vocabulary(algorithm), **VOCABULARY},
        dtype=assemble.DTYPE,
        clients=[entry.id for entry in tiny.dataset.manifest.clients],
        algorithm=algorithm.name,
        version=algorithm.version,
        roster=parts.manifest.roster,
        classes=parts.manifest.spec.classes,
    )
    return Aggregator(run)


def work(
    tiny: Federation, name: str, clients: Sequence[str], address: str, states: Path, stop: threading.Event
) -> None:
    """Serve clients until the aggregator ends or ``stop`` is set."""
    parts, algorithm = tiny.parts, tiny.parts.algorithm
    serve(
        address,
        Introduction(name, list(clients), {algorithm.name: algorithm.version}),
        make_session=lambda joined: assemble.client_side(parts, tiny.dataset, torch.device("cpu"), str(states)),
        stop=stop,
    )


@contextmanager
def aggregator_of(tiny: Federation, states: Path, workers: int = WORKERS) -> Iterator[Aggregator]:
    """Return an aggregator with workers in threads; each serves every other client, or all if there is one."""
    everyone, stop = [entry.id for entry in tiny.dataset.manifest.clients], threading.Event()
    server = make_aggregator(tiny)
    address = server.start("127.0.0.1:0")
    threads = [
        threading.Thread(target=work, args=(tiny, f"w{i}", everyone[i::workers], address, states, stop), daemon=True)
        for i in range(workers)
    ]
    try:
        for thread in threads:
            thread.start()
        server.wait_for(everyone, 30.0, workers)
        yield server
    finally:
        server.stop(finished=True)
        stop.set()
        for thread in threads:
            thread.join(10)


def test_grpc_gives_the_bits_of_one_process(tiny: Federation, method: str) -> None:
    tiny.recorded("whole")
    with aggregator_of(tiny, tiny.tmp / "wire" / "states") as server:
        tiny.run("wire", server)
        assert len(server.workers()) == WORKERS
        assert server.traffic.up > 0
    assert_equal_but_for_traffic(tiny, "wire", "whole")
