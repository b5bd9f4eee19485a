"""``fedloom worker``: serves clients to an aggregator."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
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
        str,
        typer.Option(
            help="The partition: a folder, or s3://BUCKET/PREFIX, of which each shard is fetched when its "
            "client is first served.",
            metavar="DIR|URL",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Unique name; by default host and process id.")] = None,
    clients: Annotated[
        str | None, typer.Option(help="Ids of the clients to serve, separated by commas; by default all.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="Serve the I-th, from 0, of N equal blocks of the partition's clients.", metavar="I/N"),
    ] = None,
    device: Annotated[Device, typer.Option(help="What to compute on.")] = Device.CPU,
    threads: Annotated[int, typer.Option(help="Torch threads; the aggregator must use as many.", min=1)] = 1,
    clients_at_once: Annotated[int, typer.Option(help="Clients vectorized together on a GPU.", min=1)] = 1,
    reconnect: Annotated[
        float, typer.Option(help="Seconds to go on dialling an aggregator that is gone.", min=0, metavar="S")
    ] = 60.0,
    states: Annotated[
        str | None,
        typer.Option(
            help="Folder or s3://BUCKET/PREFIX of the clients' states, for methods that keep any: one that all workers "
            "reach.",
            metavar="DIR|URL",
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
    from fedloom.cli.watch import logged_to
    from fedloom.data.federated import FederatedDataset
    from fedloom.errors import DataError, ExperimentError, InterruptedRun
    from fedloom.run import assemble
    from fedloom.storage import is_url
    from fedloom.transport.address import split_address
    from fedloom.transport.worker import Identity, serve

    if device is Device.CPU and clients_at_once > 1:
        raise ExperimentError(f"--clients-at-once: found {clients_at_once} on cpu, allowed: 1")
    split_address(aggregator, what="--aggregator", lowest=1)
    dataset = FederatedDataset.open(partition)
    everyone = [entry.id for entry in dataset.manifest.clients]
    served = chosen(everyone, clients, part)
    for client in served:
        dataset.manifest.entry(client)
    # `fedloom run` has checked the shards of its own workers. Of a store, only shards that nobody else serves are
    # fetched now; others when their client comes here.
    if not until_eof and (served != everyone or not is_url(partition)):
        dataset.verify(served)
    target = assemble.use_device(device.value, threads)
    runtime = experiments.Runtime(workers=0, threads=threads, device=device.value, clients_at_once=clients_at_once)

    def make_session(joined: Joined) -> Conversations:
        told: dict[str, Any] = json.loads(joined.experiment)
        if told["partition"] != dataset.manifest.fingerprint:
            raise DataError(
                f"{partition}: found partition {dataset.manifest.fingerprint[:12]}, "
                f"the aggregator's is {told['partition'][:12]}",
                hint="make it with the aggregator's experiment file: fedloom partition EXPERIMENT",
            )
        shared = experiments.from_shared_json(told["experiment"], runtime=runtime)
        return assemble.conversations(assemble.make_parts(shared, dataset.manifest), dataset, target, states)

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
        over = serve(aggregator, identity, make_session=make_session, stop=stop, reconnect_s=reconnect)
    if not over and not until_eof:  # a pod that is told to go has not done its work, and another has to
        raise InterruptedRun("asked to stop before the run was over; another worker may take over")


def chosen(everyone: Sequence[str], clients: str | None, part: str | None) -> list[str]:
    """Return the clients that a worker is to serve.

    Parameters
    ----------
    everyone
        Ids of all clients of the partition, in its order.
    clients
        Ids, separated by commas.
    part
        ``I/N``: the I-th, from 0, of N blocks of equal size (to one), in order.

    Raises
    ------
    ExperimentError
        If both are given, ``part`` is none, or ``clients`` names nobody.
    """
    from fedloom.errors import ExperimentError

    if clients is not None:
        if part is not None:
            raise ExperimentError(f"--part: found {part} with --clients; allowed: one of them")
        named = [name.strip() for name in clients.split(",") if name.strip()]
        if not named:
            raise ExperimentError(
                f"--clients: found {clients!r}; allowed: ids of the partition's {len(everyone)} clients, such as "
                f"{everyone[0]}, separated by commas"
            )
        return named
    if part is None:
        return list(everyone)
    given = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    i, n = (int(given[1]), int(given[2])) if given else (0, 0)
    if not i < n <= len(everyone):
        raise ExperimentError(
            f"--part: found {part}; allowed: I/N, with I from 0 to N - 1, and N at most {len(everyone)}, the number of "
            "clients"
        )
    return list(everyone[i * len(everyone) // n : (i + 1) * len(everyone) // n])


def _leave_at_eof(stop: threading.Event) -> None:
    """Our parent holds the other end of standard input; it ends when the parent does, however that dies."""
    while sys.stdin.buffer.read(4096):
        continue
    stop.set()
    # A long training step may be under way, and nobody waits for its result.
    timer = threading.Timer(3.0, os._exit, (0,))
    timer.daemon = True
    timer.start()
