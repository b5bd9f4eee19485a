"""``fedloom ui``: a local page about runs and a live federation."""

import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import with_options
from fedloom.core.options import Option
from fedloom.core.processes import termination_requested

if TYPE_CHECKING:
    from fedloom.security.access import Access
    from fedloom.ui.pages import LiveFederation


@dataclass(frozen=True)
class PageAccess:
    """Options for who may open the page, and for the connection to an aggregator (docs/security.md)."""

    credentials: Annotated[
        Path | None,
        Option(
            "Folder with credentials: tokens.json (`fedloom token`) and identities.yaml say who may open the page; "
            "ca.crt, tls.crt, tls.key and token connect to the aggregator.",
            metavar="DIR",
            envvar="FEDLOOM_CREDENTIALS",
        ),
    ] = None
    insecure: Annotated[
        bool, Option("Serve other machines, and send the token to the aggregator, in plaintext, which others can read.")
    ] = False


@with_options()
def ui_command(
    access: PageAccess,
    runs: Annotated[Path, typer.Argument(help="Folder that holds runs, at any depth.", metavar="[RUNS]")] = Path(
        "runs"
    ),
    listen: Annotated[str, typer.Option(help="Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7740",
    aggregator: Annotated[
        str | None, typer.Option(help="Also show the live federation of this aggregator.", metavar="HOST:PORT")
    ] = None,
) -> None:
    """Show runs as they go in a browser. The page only reads, and requests nothing from the internet."""
    from fedloom.reporting.page import check_installed
    from fedloom.runs.listing import check_runs_folder
    from fedloom.transport.http_server import HttpLimits, http_served
    from fedloom.ui.access import check_listen
    from fedloom.ui.pages import Site
    from fedloom.ui.server import application

    check_runs_folder(runs)
    check_installed("jinja2", "matplotlib")
    admits = _access(access.credentials)
    check_listen(listen, admits, insecure=access.insecure)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        federation = None if aggregator is None else _federation(stack, aggregator, access)
        served = http_served("listen", listen, application(Site(runs, federation), admits), HttpLimits(64, 60.0))
        port = stack.enter_context(served)
        typer.echo(f"showing {runs} at http://{listen.rpartition(':')[0]}:{port}/")
        while not (stop.wait(1.0) or termination_requested.is_set()):
            continue


def _access(credentials: Path | None) -> "Access | None":
    """Return who may open the page; None without a token file, for everyone on this machine."""
    import os

    from fedloom.security.access import Access
    from fedloom.security.options import FILES, IN_FOLDER, ServerOptions

    folder = credentials if credentials is not None and (credentials / IN_FOLDER["tokens"]).exists() else None
    if folder is None and not os.environ.get(FILES["tokens"]):
        return None
    options = ServerOptions.from_folder(folder)
    return Access(options.tokens, options.identities)


def _federation(stack: ExitStack, address: str, access: PageAccess) -> "LiveFederation":
    from fedloom.security.options import ClientOptions, Credentials
    from fedloom.transport.control import dialled
    from fedloom.ui.pages import LiveFederation

    options = ClientOptions.from_folder(access.credentials, insecure=access.insecure)
    client = stack.enter_context(dialled(address, Credentials(options)))
    return LiveFederation(address, client.status, lambda: list(client.clients()))
