"""Entry point of ``fedloom``: its commands, and the exit codes of failures (docs/troubleshooting.md).

A command is a typed function in a module of this package, or in ``commands.py`` of an optional part, which registers it
by an entry point in the group ``fedloom.commands``. Showing ``--help`` imports these modules, so they import
torch, gRPC and other packages of FedLoom inside functions, never at the top.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

import fedloom
from fedloom.cli.characters import write_anything
from fedloom.cli.options import CommandGroup, Commands
from fedloom.cli.results import Terminated, UsageError, as_command_failure, described, print_json
from fedloom.core import forks
from fedloom.core.logs import JsonLines, structured
from fedloom.core.plugins import entries, missing_part
from fedloom.core.processes import listen_to_parent, show_traceback, tell_failure, termination_requested
from fedloom.core.words import printable
from fedloom.errors import ExperimentError, FedloomError, arguments_as_options

KEPT = "\n\t"
"""Unprintable characters that are kept in output."""

TRACED, ON = ("run", "aggregator", "worker"), ("1", "true", "yes", "on")
"""Commands that take part in rounds, and values of the environment variable FEDLOOM_TRACING with which they trace."""

COMMANDS = {
    "Experiments": "new:new run:run check:check runs:evaluate runs:runs ui compare report search audit "
    "reproduce:reproduce",
    "Choices for an experiment": "data:datasets catalogue:methods catalogue:models catalogue:schemes catalogue:tasks "
    "tools:schema privacy",
    "Data": "data:data data:partition",
    "Federations": "run:aggregator worker:worker member status:status status:federation security:token "
    "security:certificates",
    "Models for clients": "personalize serve ledger register",
    "Clusters": "cluster pipeline",
    "This machine": "doctor:doctor tools:device",
}
"""Commands by heading of the help: ``module:name`` of this package, ``name`` where an entry point provides it."""

_PLACES = [(heading, *words.rpartition(":")) for heading, line in COMMANDS.items() for words in line.split()]
HEADINGS = {name: heading for heading, _, _, name in _PLACES}
OWN = {name: f"fedloom.cli.{module}:{name}_command" for _, module, _, name in _PLACES if module}


class _LazyCommand(TyperCommand):
    """Command, or group of commands, whose options are read when it is used; the help needs only its first sentence."""

    def __init__(self, point: EntryPoint) -> None:
        self._function, settings = _import(point)
        is_group = isinstance(self._function, typer.Typer)
        text = self._function.info.help if is_group else inspect.getdoc(self._function)
        super().__init__(point.name, help=text, rich_help_panel=HEADINGS.get(point.name, "Other commands"), **settings)

    def build(self) -> Any:
        """Return the command with its options."""
        if isinstance(self._function, typer.Typer):
            return typer.main.get_group(self._function)
        only = Commands(add_completion=False)
        only.command(self.name, context_settings=self.context_settings)(self._function)
        return typer.main.get_command(only)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Return the context of the command with its options."""
        return self.build().make_context(*args, **settings)


def _import(point: EntryPoint) -> tuple[Any, dict[str, Any]]:
    """Return a command and its settings; one of another part that cannot be loaded says so when it is used."""
    try:
        return point.load(), {}
    except Exception as error:
        if not point.group:
            raise
        reason = missing_part(error) or f"{type(error).__name__}: {error}"

    def command(context: typer.Context) -> NoReturn:
        raise ExperimentError(f"`fedloom {point.name}` cannot be loaded: {reason}")

    return command, {"hidden": True, "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True}}


def _entry_point(name: str) -> EntryPoint | None:
    """Return the entry point of a command, or None; FedLoom's own have an empty group."""
    if name in OWN:
        return EntryPoint(name, OWN[name], "")
    return next((point for point in entries("fedloom.commands") if point.name == name), None)


class _CommandsByName(Mapping[str, Any]):
    """Commands by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if (point := _entry_point(name)) is None:
            raise KeyError(name)
        return _LazyCommand(point).build()

    def __iter__(self) -> Iterator[str]:
        others = [point.name for point in entries("fedloom.commands")]
        return iter(dict.fromkeys((*(name for name in HEADINGS if name in OWN or name in others), *others)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _AllCommands(CommandGroup):
    """Group of the installed commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _CommandsByName()  # type: ignore[assignment]  # it is only read

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, without importing the commands."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> _LazyCommand | None:
        """Return a command, or None; its options are not read."""
        point = _entry_point(cmd_name)
        return None if point is None else _LazyCommand(point)


app = Commands(
    name="fedloom",
    cls=_AllCommands,
    help="Personalized federated learning: one experiment file, on one machine or many.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def program() -> NoReturn:
    """Run main as all that a process does: its children may be forks, which unwind the stack to here."""
    forks.is_caught = True
    while True:
        try:
            main()
        except forks.Forked as fork:
            sys.argv[1:] = fork.words
            logging.getLogger().handlers.clear()  # the parent's format


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
