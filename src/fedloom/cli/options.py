"""Arguments and options that several commands have. Those for connections (docs/security.md) take no secret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from fedloom.core.home import expanded

F = TypeVar("F", bound=Callable[..., Any])

ExperimentFile = Annotated[
    str, typer.Argument(help="The experiment file, or its URL in a store, s3://BUCKET/NAME.yaml.", metavar="EXPERIMENT")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the file; repeatable.")
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
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="last, best or a round.", metavar="last|best|N")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ClientCredentials = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        help="Folder with credentials, each file optional: ca.crt (use TLS, and trust these authorities), tls.crt and "
        "tls.key (client certificate), token.",
        metavar="DIR",
        envvar="FEDLOOM_CREDENTIALS",
    ),
]
ServerCredentials = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        help="Folder with tls.crt and tls.key (server certificate); to admit peers, ca.crt (certificates of these "
        "authorities), tokens.json (`fedloom token`), or both; and identities.yaml (permissions).",
        metavar="DIR",
        envvar="FEDLOOM_CREDENTIALS",
    ),
]
InsecureClient = Annotated[
    bool, typer.Option("--insecure", help="Send the token in plaintext, which others on the network can read.")
]
InsecureServer = Annotated[
    bool,
    typer.Option("--insecure", help="Accept connections from other machines without authentication, or in plaintext."),
]
AuditLog = Annotated[
    Path | None,
    typer.Option(
        help="Audit log, for authenticated peers; by default logs/audit.jsonl in the run's folder, none for a URL.",
        metavar="FILE",
    ),
]
Health = Annotated[
    str | None,
    typer.Option(
        help="Also serve health checks, and nothing else, in plaintext on this address, for probes.",
        metavar="HOST:PORT",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(help="Serve metrics for Prometheus on this address (docs/metrics.md).", metavar="HOST:PORT"),
]


class Commands(typer.Typer):
    """Group of commands whose paths may begin with ``~``, which a shell leaves in ``--out=~/run``."""

    def command(self, *names: Any, **settings: Any) -> Callable[[F], F]:
        """Return a decorator that adds a command."""
        return super().command(*names, cls=_Command, **settings)


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
            raise ExperimentError(f"{option} {reason}", key=option.removeprefix("--"))
