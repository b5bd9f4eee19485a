"""Entry point of ``fedloom``: its commands, and the exit codes of failures (docs/troubleshooting.md).

A command is a typed function in a module of this package, or in ``commands.py`` of an optional part, which registers it
by an entry point in the group ``fedloom.commands``. Showing ``--help`` imports these modules, so they import
torch, gRPC and other packages of FedLoom inside functions, never at the top.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from importlib.metadata import EntryPoint
from typing import Annotated, Any, Literal, NoReturn

import typer

import fedloom
from fedloom.cli import catalogue, check, data, doctor, new, pack, reproduce, run, runs, security, status, tools, worker
from fedloom.cli.characters import write_anything
from fedloom.cli.options import Commands
from fedloom.cli.results import Terminated, UsageError, as_command_failure, described, print_json
from fedloom.core.logs import JsonLines, structured
from fedloom.core.plugins import entries, missing_part
from fedloom.core.processes import listen_to_parent, show_traceback, tell_failure, termination_requested
from fedloom.core.words import printable
from fedloom.errors import ExperimentError, FedloomError, arguments_as_options

KEPT = "\n\t"
"""Unprintable characters that are kept in output."""

TRACED, ON = ("run", "aggregator", "worker"), ("1", "true", "yes", "on")
"""Commands that take part in rounds, and values of the environment variable FEDLOOM_TRACING with which they trace."""

app = Commands(
    name="fedloom",
    help="Personalized federated learning: one experiment file, on one machine or many.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

data_app = Commands(help="Files of data sets, and clients' own data.")
data_app.command("fetch")(data.fetch_command)
data_app.command("pack")(pack.pack_command)

COMMANDS: dict[str, dict[str, Any]] = {
    "Experiments": {
        "new": new.new_command,
        "run": run.run_command,
        "check": check.check_command,
        "evaluate": runs.evaluate_command,
        "runs": runs.runs_command,
        "ui": None,
        "compare": None,
        "report": None,
        "search": None,
        "audit": None,
        "reproduce": reproduce.reproduce_command,
    },
    "Choices for an experiment": {
        "datasets": data.datasets_command,
        "methods": catalogue.methods_command,
        "models": catalogue.models_command,
        "schemes": catalogue.schemes_command,
        "tasks": catalogue.tasks_command,
        "schema": tools.schema,
        "privacy": None,
    },
    "Data": {"data": data_app, "partition": data.partition_command},
    "Federations": {
        "aggregator": run.aggregator_command,
        "worker": worker.worker,
        "member": None,
        "status": status.status_command,
        "federation": status.federation_command,
        "token": security.token_command,
        "certificates": security.certificates_app,
    },
    "Models for clients": {"personalize": None, "serve": None, "ledger": None, "register": None},
    "Clusters": {"cluster": None, "pipeline": None},
    "This machine": {"doctor": doctor.doctor_command, "device": tools.device_command},
}
"""Commands by heading of the help; None for those of optional parts, which entry points provide."""

HEADINGS = {name: heading for heading, names in COMMANDS.items() for name in names}


def _add(name: str, command: Any) -> None:
    heading = HEADINGS.get(name, "Other commands")
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, rich_help_panel=heading)
    else:
        app.command(name, rich_help_panel=heading)(command)


def _add_installed(point: EntryPoint) -> None:
    """Add a command, or a group of commands, of an optional part; one that cannot be loaded says so when it is used."""
    try:
        command = point.load()
    except Exception as error:
        reason = missing_part(error) or f"{type(error).__name__}: {error}"

        def command(context: typer.Context) -> NoReturn:
            raise ExperimentError(f"`fedloom {point.name}` cannot be loaded: {reason}")

        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(point.name, hidden=True, context_settings=anything)(command)
        return
    _add(point.name, command)


_points = {point.name: point for point in entries("fedloom.commands")}
for _names in COMMANDS.values():
    for _name, _command in _names.items():
        if _command is not None:
            _add(_name, _command)
        elif _name in _points:
            _add_installed(_points.pop(_name))
for _point in _points.values():
    _add_installed(_point)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fedloom.transport.versions import OLDEST, PROTOCOL

        typer.echo(f"fedloom {fedloom.__version__}, protocol {PROTOCOL} (and {OLDEST})")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log in detail; show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(
            envvar="FEDLOOM_LOG_FORMAT", help="Format of the log; json: one object per line, without progress bars."
        ),
    ] = "text",
) -> None:
    """Personalized federated learning: one experiment file, on one machine or many."""
    context.with_resource(arguments_as_options())
    # The root logger stays at WARNING: other libraries' details would drown ours.
    shown = logging.StreamHandler()
    as_json = log_format == "json"
    shown.setFormatter(JsonLines() if as_json else _Printable("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[shown])
    logging.getLogger("fedloom").setLevel(logging.DEBUG if verbose else logging.INFO)
    if not verbose:
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of each request made again
    if context.invoked_subcommand in TRACED and os.environ.get("FEDLOOM_TRACING", "").lower() in ON:
        from fedloom.core.tracing import start_tracing, stop_tracing

        start_tracing(f"fedloom-{context.invoked_subcommand}")
        context.call_on_close(stop_tracing)


def main() -> NoReturn:
    """Run the command line and exit with the code of its outcome.

    Typer itself ends Ctrl-C with 130; exceptions that are no failures are bugs and keep their traceback.
    """
    # Set before slow imports: the first process of a container has no default handler for SIGTERM.
    signal.signal(signal.SIGTERM, _terminated)
    atexit.register(_skip_last_collection)
    write_anything()
    listen_to_parent()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core would repeat our messages on standard error
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        if "--json" in sys.argv:
            print_json(described([error]))
        error.show()
        sys.exit(error.exit_code)
    except (Exception, Terminated) as error:
        failure = as_command_failure(error)
        _fail_as_bug(error) if failure is None else _fail(failure)
    sys.exit(code or 0)


def _skip_last_collection() -> None:
    """Keep garbage until the process has ended, because a collection takes half a second.

    The bindings of Triton, which exports of models import, would report such objects as leaks, on 25 lines.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


class _Printable(logging.Formatter):
    """Formatter that escapes control characters, since a record may hold text from other machines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep=KEPT)


def _terminated(number: int, frame: object) -> NoReturn:
    termination_requested.set()
    raise Terminated


def _fail(error: FedloomError) -> NoReturn:
    tell_failure(error)
    if logging.getLogger("fedloom").isEnabledFor(logging.DEBUG):
        show_traceback(error)
    if structured():
        logging.getLogger("fedloom").error("%s", error, extra={"data": {"exit_code": int(error.exit_code)}})
    else:
        typer.echo(f"error: {printable(str(error), keep=KEPT)}", err=True)
    sys.exit(error.exit_code)


def _fail_as_bug(error: BaseException) -> NoReturn:
    tell_failure(error)
    show_traceback(error)
    sys.exit(1)
