"""``fedloom serve``: serve the models of a run without training."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from fedloom.cli.options import Checkpoint, ServerAccess, with_options
from fedloom.core.processes import termination_requested
from fedloom.core.words import pluralize
from fedloom.engine.options import ProbeOptions


@with_options()
def serve_command(
    probes: ProbeOptions,
    access: ServerAccess,
    run: Annotated[str, typer.Argument(help="The run's folder, or the URL where it is published.", metavar="RUN|URL")],
    listen: Annotated[str, typer.Option(help="Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7734",
    follow: Annotated[
        bool, typer.Option("--follow", help="Switch to each newer round of the run as soon as it has a checkpoint.")
    ] = False,
    checkpoint: Checkpoint = "last",
    rest: Annotated[
        str | None,
        typer.Option(
            help="Also serve predictions of the clients' saved models on this address, by the Open Inference Protocol "
            "over HTTP (docs/serving.md).",
            metavar="HOST:PORT",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a setting: wait_s, linger_s, queue, conversations, deadline_s, drain_s, models, model_name, "
            "models_kept, body_bytes (docs/serving.md); repeatable.",
        ),
    ] = None,
) -> None:
    """Serve models to clients. They request them with `fedloom personalize HOST:PORT`."""
    from fedloom.runs.folder import RunFolder
    from fedloom.storage import is_url

    if not is_url(run):
        RunFolder.open(run)  # fail early, before torch is imported
    from fedloom.core.address import split_address
    from fedloom.experiment import settings_of
    from fedloom.security.options import Protection
    from fedloom.serving.serve import serve_run
    from fedloom.transport.personalization import ModelServerSettings

    settings = settings_of(ModelServerSettings, set_ or (), "the server")
    host, _ = split_address(listen, what="--listen", lowest=0)
    protection = Protection(access.options())
    protection.check(host)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if termination_requested.is_set():
        stop.set()
    handed_out = serve_run(
        run,
        listen,
        checkpoint=checkpoint,
        follow=follow,
        settings=settings,
        protection=protection,
        audit=probes.audit,
        stop=stop,
        started=lambda address: typer.echo(f"serving models of {run} at {address}"),
        say=lambda text: typer.echo(text, err=True),
        health=probes.health,
        metrics=probes.metrics,
        rest=rest,
    )
    typer.echo(f"{pluralize(handed_out, 'model')} handed out")
