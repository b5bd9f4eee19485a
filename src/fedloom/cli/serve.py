"""``fedloom serve``: serve the models of a run without training."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from fedloom.cli import trusted
from fedloom.words import pluralize


def serve(
    run: Annotated[str, typer.Argument(help="The run's folder, or the URL where it is published.", metavar="RUN|URL")],
    listen: Annotated[str, typer.Option(help="Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7734",
    follow: Annotated[
        bool, typer.Option("--follow", help="Switch to each newer round of the run as soon as a checkpoint holds it.")
    ] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait while nothing is published at the URL.", min=0, metavar="S")
    ] = 0.0,
    checkpoint: Annotated[str, typer.Option(help="last, best or a round.", metavar="last|best|N")] = "last",
    linger: Annotated[
        float,
        typer.Option(
            help="Seconds that a client waits for others, so that their models are computed together.",
            min=0,
            metavar="S",
        ),
    ] = 0.003,
    queue: Annotated[
        int,
        typer.Option(
            help="Most clients that may wait for their model to be computed; the next one is told when to try again.",
            min=1,
        ),
    ] = 1024,
    conversations: Annotated[int, typer.Option(help="Most conversations that may be open at a time.", min=1)] = 4096,
    deadline: Annotated[
        float, typer.Option(help="Seconds that a client may take to answer.", min=0.1, metavar="S")
    ] = 60.0,
    drain: Annotated[
        float, typer.Option(help="Seconds that open conversations may continue after SIGTERM.", min=0, metavar="S")
    ] = 10.0,
    audit: trusted.AuditLog = None,
    health: Annotated[
        str | None,
        typer.Option(
            help="Serve health checks on this address too, and nothing else, in plaintext, for probes.",
            metavar="HOST:PORT",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Serve metrics for Prometheus on this address (docs/metrics.md).", metavar="HOST:PORT"),
    ] = None,
    tls_certificate: trusted.Certificate = None,
    tls_key: trusted.Key = None,
    tls_ca: trusted.CaOfPeers = None,
    tokens: trusted.Tokens = None,
    identities: trusted.Identities = None,
    insecure: trusted.InsecureServer = False,
) -> None:
    """Serve models to clients. They request them with `fedloom personalize --from`."""
    from fedloom.runs.folder import RunFolder
    from fedloom.storage import is_url

    if not is_url(run):
        RunFolder.open(run)  # fail early, before torch is imported
    from fedloom.runner.serve import serve as serve_run
    from fedloom.transport.address import split_address
    from fedloom.transport.personalization import ServingLimits
    from fedloom.trust.options import Protection, ServerOptions, token_of

    host, _ = split_address(listen, what="--listen", lowest=0)
    protection = Protection(ServerOptions(tls_certificate, tls_key, tls_ca, tokens, identities, token_of(), insecure))
    protection.check(host)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    handed_out = serve_run(
        run,
        listen,
        checkpoint=checkpoint,
        follow=follow,
        limits=ServingLimits(linger, queue, conversations, deadline),
        protection=protection,
        audit=audit,
        drain_s=drain,
        stop=stop,
        started=lambda address: typer.echo(f"serving models of {run} at {address}"),
        say=lambda text: typer.echo(text, err=True),
        health=health,
        metrics=metrics,
        wait_s=wait,
    )
    typer.echo(f"{pluralize(handed_out, 'model')} handed out")
