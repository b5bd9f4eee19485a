"""``fedloom worker``: serves clients to an aggregator."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedloom.federation.conversations import Conversations
    from fedloom.transport.worker import Joined


class Device(StrEnum):
    """What a worker computes on."""

    CPU = "cpu"
    CUDA = "cuda"


def worker(
    aggregator: Annotated[str, typer.Option(help="The aggregator's address.", metavar="HOST:PORT")],
    partition: Annotated[
        Path, typer.Option(help="Folder of the partition: its manifest and the shards to serve.", metavar="DIR")
    ],
    name: Annotated[str | None, typer.Option(help="Unique name; by default host and process id.")] = None,
    clients: Annotated[
        str | None, typer.Option(help="Ids of the clients to serve, separated by commas; by default all.")
    ] = None,
    device: Annotated[Device, typer.Option(help="What to compute on.")] = Device.CPU,
    threads: Annotated[int, typer.Option(help="Torch threads; the aggregator must use as many.", min=1)] = 1,
    clients_at_once: Annotated[int, typer.Option(help="Clients vectorized together on a GPU.", min=1)] = 1,
    reconnect: Annotated[
        float, typer.Option(help="Seconds to go on dialling an aggregator that is gone.", min=0, metavar="S")
    ] = 60.0,
    states: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the clients' states, for methods that keep any: one that all workers reach.", metavar="DIR"
        ),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Write the log to this file, as JSON lines.")] = None,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="Leave when standard input ends.")] = False,
) -> None:
    """Serve the clients of a partition until the run is over."""
    import json
    import socket

    from fedloom import experiment as experiments
    from fedloom.algorithms.base import available, find
    from fedloom.cli import compose
    from fedloom.cli.watch import logged_to
    from fedloom.data.federated import FederatedDataset
    from fedloom.data.manifest import read_shard
    from fedloom.errors import DataError, ExperimentError
    from fedloom.transport.worker import Identity, serve

    if device is Device.CPU and clients_at_once > 1:
        raise ExperimentError(f"--clients-at-once: found {clients_at_once} on cpu, allowed: 1")
    dataset = FederatedDataset.open(partition)
    everyone = [entry.id for entry in dataset.manifest.clients]
    served = everyone if clients is None else [part.strip() for part in clients.split(",") if part.strip()]
    for client in served:
        entry = dataset.manifest.entry(client)
        if not until_eof:  # `fedloom run` has checked the shards of its own workers
            read_shard(partition, entry)
    target = compose.use_device(device.value, threads)
    runtime = experiments.Runtime(workers=0, threads=threads, device=device.value, clients_at_once=clients_at_once)

    def make_session(joined: Joined) -> Conversations:
        told: dict[str, Any] = json.loads(joined.experiment)
        if told["partition"] != dataset.manifest.fingerprint:
            raise DataError(
                f"{partition}: found partition {dataset.manifest.fingerprint[:12]}, "
                f"the aggregator's is {told['partition'][:12]}",
                hint="make it with the aggregator's experiment file: fedloom partition EXPERIMENT",
            )
        shared = experiments.Experiment.from_shared_json(told["experiment"], runtime=runtime)
        return compose.conversations(compose.parts(shared, dataset.manifest), dataset, target, states)

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if until_eof:
        threading.Thread(target=_leave_at_eof, args=(stop,), daemon=True).start()
    identity = Identity(
        worker=name or f"{socket.gethostname()}-{os.getpid()}",
        clients=served,
        algorithms={known: find(known).version for known in available()},
        device=device.value,
    )
    gc.freeze()  # what imports made is never garbage, and walking it would cost each collection
    with nullcontext() if log is None else logged_to(log):
        serve(aggregator, identity, make_session=make_session, stop=stop, reconnect_s=reconnect)


def _leave_at_eof(stop: threading.Event) -> None:
    """Our parent holds the other end of standard input; it ends when the parent does, however that dies."""
    while sys.stdin.buffer.read(4096):
        continue
    stop.set()
    # A long training step may be under way, and nobody waits for its result.
    timer = threading.Timer(3.0, os._exit, (0,))
    timer.daemon = True
    timer.start()
