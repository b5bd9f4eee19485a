"""``fedloom worker``: serve clients to an aggregator."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.eof import at_eof
from fedloom.cli.options import ClientCredentials, InsecureClient
from fedloom.core.garbage import collection_paused
from fedloom.core.processes import termination_requested


def worker(
    aggregator: Annotated[
        str | None, typer.Option(help="The aggregator's address.", metavar="HOST:PORT", show_default="required")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="The partition: a folder or s3://BUCKET/PREFIX, from which each client's data are downloaded when "
            "first needed.",
            metavar="DIR|URL",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Instead of --partition: a packed client (`fedloom data pack`), or a folder of packed clients; "
            "repeatable.",
            metavar="DIR",
        ),
    ] = None,
    observe: Annotated[
        list[Path] | None,
        typer.Option(help="Like --data, for clients that are evaluated and get models but never train.", metavar="DIR"),
    ] = None,
    class_counts: Annotated[
        bool,
        typer.Option("--class-counts", help="Send the aggregator the clients' numbers of training examples per class."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the data that these clients would send, and send nothing.")
    ] = False,
    experiment: Annotated[
        str | None,
        typer.Option(help="With --dry-run: the experiment file; without it, every method is shown.", metavar="FILE"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Unique name; by default host and process id.")] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="Clients to serve: ids, separated by commas, or block I (from 0) of N equal blocks; by default all.",
            metavar="ID,...|I/N",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="runtime.device (cpu, cuda), runtime.threads (as many as the aggregator's; 1), "
            "runtime.clients_at_once (vectorized together; 1); repeatable.",
        ),
    ] = None,
    reconnect: Annotated[
        float,
        typer.Option(
            help="Seconds to keep retrying an aggregator that does not answer; inf: forever.",
            min=0,
            metavar="S|inf",
        ),
    ] = 60.0,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Limit on network traffic: 10Mbit/s each way, or 2Mbit/s,20Mbit/s up and down; by default none.",
            metavar="RATE[,RATE]",
        ),
    ] = None,
    states: Annotated[
        str | None,
        typer.Option(
            help="Folder or s3://BUCKET/PREFIX for clients' states, for methods that keep any; every worker must be "
            "able to access it. With --data and secure aggregation, a folder also keeps the record of revealed sums.",
            metavar="DIR|URL",
        ),
    ] = None,
    only_sums: Annotated[
        bool,
        typer.Option(
            "--only-sums",
            help="Refuse an aggregator whose experiment has no secure aggregation with signed keys, or a weaker one "
            "than by default, so that nobody sees the update of a single client.",
            envvar="FEDLOOM_ONLY_SUMS",
        ),
    ] = False,
    credentials: ClientCredentials = None,
    insecure: InsecureClient = False,
    log: Annotated[Path | None, typer.Option(help="Write the log to this file, as JSON lines.")] = None,
) -> None:
    """Serve clients of a partition, or clients with their own data, to an aggregator."""
    import socket

    from fedloom import experiment as experiments
    from fedloom.core import processes
    from fedloom.errors import ExperimentError, InterruptedRun

    with collection_paused():
        from fedloom.runner.log_file import logged_to
        from fedloom.runner.worker import Worker, WorkerOptions
        from fedloom.security.options import ClientOptions
        from fedloom.transport.bandwidth import parse_bandwidth

    runtime = experiments.settings_of(experiments.WorkerSettings, set_ or (), "the worker").runtime
    owned = processes.ends_with_parent()
    options = WorkerOptions(
        partition,
        clients,
        runtime.device,
        runtime.threads,
        runtime.clients_at_once,
        reconnect,
        None if bandwidth is None else parse_bandwidth(bandwidth),
        states,
        # `fedloom run` has already verified the shards of its own workers.
        data=tuple(data or ()),
        observe=tuple(observe or ()),
        class_counts=class_counts,
        verify=not owned,
        trust=ClientOptions.of(credentials, insecure=insecure),
        only_sums=only_sums,
    )
    if dry_run:
        from fedloom.cli.disclosure import show_disclosure

        show_disclosure(options, experiment)
        return
    if aggregator is None:
        raise ExperimentError("Give --aggregator HOST:PORT, or --dry-run.", key="aggregator")
    if experiment is not None:
        raise ExperimentError("--experiment needs --dry-run; an aggregator sends its own.", key="experiment")
    serving = Worker(aggregator, name or f"{socket.gethostname()}-{os.getpid()}", options)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if termination_requested.is_set():
        stop.set()
    if owned:
        at_eof(lambda: _leave(stop))
    with nullcontext() if log is None else logged_to(log):
        over = serving.serve(stop)
    if not over and not owned:  # an evicted pod has not done its work, and another must
        raise InterruptedRun("stopped before the end of the run; another worker may take over")


def _leave(stop: threading.Event) -> None:
    """Stop serving, and end the process within seconds; for a worker whose parent has died."""
    stop.set()
    # A long training step may be in progress, and nobody waits for its result.
    timer = threading.Timer(3.0, os._exit, (0,))
    timer.daemon = True
    timer.start()
