"""Options that several commands have; commands take those that are declared as fields (:mod:`fedloom.core.options`)."""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from fedloom.cli.completion import complete_overrides, complete_runs
from fedloom.cli.results import CommandResult, described, print_json
from fedloom.core.home import expanded
from fedloom.core.options import DeclaredOption, Option, declared_options

if TYPE_CHECKING:
    from fedloom.security.options import ClientOptions, ServerOptions

F = TypeVar("F", bound=Callable[..., Any])

ExperimentFile = Annotated[
    str, typer.Argument(help="The experiment file, or its URL in a store, s3://BUCKET/NAME.yaml.", metavar="EXPERIMENT")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the file; repeatable.",
        autocompletion=complete_overrides,
    ),
]
Space = Annotated[
    Path, typer.Option(help="YAML file: the keys to search, and how (docs/search.md).", metavar="SPACE.yaml")
]
TrialCount = Annotated[
    int | None,
    typer.Option(
        "--trials",
        help="Number of trials; by default the file's, or 20, or with sampler grid all combinations.",
        min=1,
        metavar="N",
    ),
]
Parallel = Annotated[
    int, typer.Option(help="Number of parallel runs, each with its share of the cores.", min=1, metavar="N")
]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="last, best or a round.", metavar="last|best|N")]
RunFolderArgument = Annotated[
    Path, typer.Argument(help="The run's folder.", metavar="RUN", autocompletion=complete_runs)
]
OtherPartition = Annotated[
    str | None,
    typer.Option(
        "--partition", metavar="DIR|URL", help="Use the clients of another partition of the same kind of data."
    ),
]
OwnFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="For a run with data.own: a packed client, or a folder of packed clients; repeatable.",
    ),
]
WHOLE_SENTENCE = 1000
"""Characters of a command's sentence in a list of commands."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, also of errors (docs/cli-json.md).")]
"""Option that every command has that returns a CommandResult; only one that needs its value declares it."""


@dataclass(frozen=True)
class ClientAccess:
    """Options with which a command connects to an aggregator or a server (docs/security.md)."""

    credentials: Annotated[
        Path | None,
        Option(
            "Folder with credentials, each file optional: ca.crt (use TLS, and trust these authorities), tls.crt and "
            "tls.key (client certificate), token.",
            metavar="DIR",
            envvar="FEDLOOM_CREDENTIALS",
        ),
    ] = None
    insecure: Annotated[bool, Option("Send the token in plaintext, which others on the network can read.")] = False

    def options(self) -> "ClientOptions":
        """Return the credentials; raise ExperimentError or RefusedError if there are none or they are invalid."""
        from fedloom.security.options import ClientOptions

        return ClientOptions.from_folder(self.credentials, insecure=self.insecure)


@dataclass(frozen=True)
class ServerAccess:
    """Options with which a server protects itself (docs/security.md)."""

    credentials: Annotated[
        Path | None,
        Option(
            "Folder with tls.crt and tls.key (server certificate); to admit peers, ca.crt (certificates of these "
            "authorities), tokens.json (`fedloom token`), or both; and identities.yaml (permissions).",
            metavar="DIR",
            envvar="FEDLOOM_CREDENTIALS",
        ),
    ] = None
    insecure: Annotated[
        bool, Option("Accept connections from other machines without authentication, or in plaintext.")
    ] = False

    def options(self) -> "ServerOptions":
        """Return the credentials; raise ExperimentError if the folder has none."""
        from fedloom.security.options import ServerOptions

        return ServerOptions.from_folder(self.credentials, insecure=self.insecure)


def with_options(*, without: Sequence[str] = ()) -> Callable[[F], F]:
    """Return a decorator that replaces a command's parameters of classes with options by these options."""

    def decorate(function: F) -> F:
        hints = get_type_hints(function, include_extras=True)
        models: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind) and name != "return"}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in models:
                options = declared_options(models[parameter.name])
                parameters += [_typer_parameter(each) for each in options if each.name not in without]
            else:
                keyword = inspect.Parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(kind=keyword, annotation=hints[parameter.name]))

        parameters.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)  # arguments first

        def call(*args: Any, **values: Any) -> Any:
            values |= zip((parameter.name for parameter in parameters), args, strict=False)
            for name, model in models.items():
                own = [each for each in declared_options(model) if each.name in values]
                given = {each.name: values.pop(each.name) for each in own}
                values[name] = model(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
            return function(**values)

        return _with_parameters(call, function, parameters)

    return decorate


def _with_parameters(call: Callable[..., Any], function: F, parameters: Sequence[inspect.Parameter]) -> F:
    """Return ``call`` with a function's name and docstring, and with these parameters for typer."""
    result = inspect.signature(function).return_annotation
    functools.update_wrapper(call, function)
    call.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del call.__wrapped__  # type: ignore[attr-defined]  # typer would look for the annotations there
    return call  # type: ignore[return-value]


def _typer_parameter(each: DeclaredOption) -> inspect.Parameter:
    kind: Any = list[get_args(each.type)[0]] if each.is_sequence else each.type  # type: ignore[misc]
    option = typer.Option(
        each.flag,
        help=each.option.help,
        metavar=each.option.metavar,
        envvar=each.option.envvar,
        min=each.option.least,
    )
    default = list(each.default) if each.is_sequence else each.default
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(each.name, keyword, default=default, annotation=Annotated[kind, option])


class CommandGroup(TyperGroup):
    """Group whose help lists the commands under their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings, sorted by name, each with a whole sentence."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                sections.setdefault(heading, []).append((name, command.get_short_help_str(WHOLE_SENTENCE)))
        column = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(column), text) for name, text in sorted(rows)])


class Commands(typer.Typer):
    """Group of commands whose paths may begin with ``~``, which a shell leaves in ``--out=~/run``."""

    def __init__(self, cls: type[CommandGroup] = CommandGroup, **settings: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, no_args_is_help=True, **settings)

    def command(self, *names: Any, **settings: Any) -> Callable[[F], F]:
        """Return a decorator that adds a command."""
        add = super().command(*names, cls=_Command, **settings)
        return lambda function: add(_printing(function))


def _printing(function: F) -> F:
    """Return a command that prints its CommandResult and has ``--json``; other commands as they are."""
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    if CommandResult.__name__ not in str(signature.return_annotation):
        return function
    is_option = "as_json" in signature.parameters
    parameters = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
    if not is_option:
        json_option = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        parameters.append(json_option)

    def call(*, as_json: bool, **values: Any) -> None:
        try:
            result = function(**values, **({"as_json": as_json} if is_option else {}))
        except (typer.Exit, typer.Abort):
            raise
        except BaseException as error:
            if as_json:
                print_json(described([error]))
            raise
        if result is not None:
            result.print(as_json=as_json)

    return _with_parameters(call, function, parameters)


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        """Run the command with expanded paths: values of type Path, and texts that begin with ``~/``."""
        ctx.params = {name: _expanded(value) for name, value in ctx.params.items()}
        return super().invoke(ctx)


def _expanded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_expanded, value))
    if isinstance(value, str):  # such as DIR|URL
        return str(expanded(value)) if value.startswith("~/") else value
    return expanded(value) if isinstance(value, Path) else value


def refuse_options(values: Mapping[str, object], reason: str) -> None:
    """Raise ExperimentError for the first option whose value is neither None nor False; the message begins with it."""
    from fedloom.errors import ExperimentError

    for option, value in values.items():
        if value is not None and value is not False:
            raise ExperimentError(f"{option} {reason}", key=option.split()[-1].removeprefix("--"))


def act_at_eof(act: Callable[[], None]) -> None:
    """Call a function, in a thread of its own, once standard input ends, as it does when the parent process ends.

    It reads the file descriptor and not ``sys.stdin``: if the process ended while a thread held that object's lock, it
    would abort and lose its exit code.
    """

    def read() -> None:
        while os.read(0, 4096):
            continue
        act()

    threading.Thread(target=read, name="until-eof", daemon=True).start()
