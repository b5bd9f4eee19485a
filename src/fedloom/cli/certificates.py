"""``fedloom certificates``: a certificate authority and certificates for testing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import Commands

if TYPE_CHECKING:
    from fedloom.security.certificates import Made

app = Commands(
    help="A CA and certificates for TLS trials; production uses an existing CA.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

INSTEAD = (
    "for trials only: anyone who has ca.key can create any member's certificate. In production, use an existing CA: "
    "cert-manager, step-ca, Vault, or a company's own (docs/security.md)"
)


@app.command("ca")
def _ca(
    out: Annotated[Path, typer.Option(help="Folder for ca.crt and ca.key.", metavar="DIR")] = Path("certificates"),
    days: Annotated[int, typer.Option(help="Days until it expires, 1 to 3650.")] = 365,
) -> None:
    """Create a certificate authority."""
    from fedloom.security.certificates import make_ca

    _show(make_ca(out, days=days))
    typer.echo(INSTEAD, err=True)


@app.command("new")
def _new(
    name: Annotated[str, typer.Argument(help="Name of the member or server.", metavar="NAME")],
    ca: Annotated[Path, typer.Option(help="Folder of the CA.", metavar="DIR")] = Path("certificates"),
    out: Annotated[
        Path | None, typer.Option(help="Folder for NAME.crt and NAME.key; by default the CA's folder.", metavar="DIR")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="For a server: its DNS name or IP address; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days until it expires, 1 to 3650, not after the CA expires.")] = 30,
    replace: Annotated[bool, typer.Option("--replace", help="Replace existing files.")] = False,
) -> None:
    """Create a certificate for a member, or for a server (--host)."""
    from fedloom.security.certificates import make_certificate

    _show(make_certificate(name, out or ca, ca, hosts=host or (), days=days, replace=replace))


def _show(made: Made) -> None:
    names = f", names: {', '.join(made.names)}" if made.names else ""
    typer.echo(f"{made.certificate}: until {made.ends:%Y-%m-%dT%H:%M:%SZ}{names}")
    typer.echo(f"{made.key}: its key, readable by its owner only")
