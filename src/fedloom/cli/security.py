"""``fedloom token`` and ``fedloom certificates``: credentials of peers of an aggregator."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import Commands

if TYPE_CHECKING:
    from fedloom.security.certificates import CertificateFiles

token_app = Commands(
    help="Tokens for workers and watchers of an aggregator.", no_args_is_help=True, rich_markup_mode=None
)

TokensFile = Annotated[
    Path,
    typer.Option(
        "--tokens", help="The file of token hashes that the aggregator reads.", metavar="FILE", envvar="FEDLOOM_TOKENS"
    ),
]


@token_app.command("new")
def _new_token(
    name: Annotated[str, typer.Argument(help="Name of the token, as in `token` of the identity file.", metavar="NAME")],
    tokens: TokensFile = Path("tokens.json"),
    days: Annotated[float | None, typer.Option(help="Days until it expires; by default never.", min=0)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the token to a new file (mode 0600) instead of showing it.", metavar="FILE"),
    ] = None,
) -> None:
    """Create a token. It is shown or written only once, and its hash is stored."""
    from fedloom.security.files import create
    from fedloom.security.tokens import add_token, revoke_tokens

    token, entry = add_token(tokens, name, days=days)
    if out is None:
        typer.echo(token.get_secret_value())
    else:
        try:
            create(out, token.get_secret_value() + "\n", private=True)
        except BaseException:
            revoke_tokens(tokens, entry.id)  # it was never delivered
            raise
    until = "" if entry.expires is None else f", until {_time(entry.expires)}"
    where = "shown only once" if out is None else f"in {out}"
    typer.echo(f"token {entry.id} of {name}{until}: {where}; its hash is in {tokens}", err=True)


@token_app.command("list")
def _list(tokens: TokensFile = Path("tokens.json")) -> None:
    """List the tokens of a file: id, state, name, time created, and time of expiry or revocation."""
    from fedloom.security.tokens import read_tokens

    now = datetime.now(UTC)
    for token in read_tokens(tokens).all:
        ends = token.revoked or token.expires
        until = "for ever" if ends is None else _time(ends)
        typer.echo(f"{token.id}  {token.state(now):<8} {token.name}  {_time(token.created)}  {until}")


@token_app.command("revoke")
def _revoke(
    which: Annotated[
        str, typer.Argument(help="A token's id, or a name for all tokens of that name.", metavar="ID|NAME")
    ],
    tokens: TokensFile = Path("tokens.json"),
) -> None:
    """Revoke tokens. An aggregator that reads this file disconnects their users within seconds."""
    from fedloom.security.tokens import revoke_tokens

    revoked = revoke_tokens(tokens, which)
    for token in revoked:
        typer.echo(f"revoked {token.id} of {token.name}")
    if not revoked:
        typer.echo(f"{which}: already revoked", err=True)


@token_app.command("signing-key")
def _signing_key(
    clients: Annotated[
        str, typer.Argument(help="The member's client, or a pattern of its clients with * and ?.", metavar="CLIENT")
    ],
    out: Annotated[Path, typer.Option(help="New file for the key (mode 0600).", metavar="FILE")] = Path("signing.key"),
) -> None:
    """Create a member's signature key for secure sums, and show its line of the register, signing-keys.txt."""
    from fedloom.security.signing import create_signing_key

    typer.echo(f"{clients} {create_signing_key(out)}")
    typer.echo(
        f"{out}: the key, readable by its owner only; give all members the line above (docs/security.md)", err=True
    )


def _time(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


# --- certificates -----------------------------------------------------------------------------------------------------

certificates_app = Commands(
    help="A CA and certificates for TLS trials; production uses an existing CA.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FOR_TRIALS = (
    "for trials only: anyone who has ca.key can create any member's certificate. In production, use an existing CA: "
    "cert-manager, step-ca, Vault, or a company's own (docs/security.md)"
)


@certificates_app.command("ca")
def _ca(
    out: Annotated[Path, typer.Option(help="Folder for ca.crt and ca.key.", metavar="DIR")] = Path("certificates"),
    days: Annotated[int, typer.Option(help="Days until it expires, 1 to 3650.")] = 365,
) -> None:
    """Create a certificate authority."""
    from fedloom.security.certificates import make_ca

    _show(make_ca(out, days=days))
    typer.echo(FOR_TRIALS, err=True)


@certificates_app.command("new")
def _new_certificate(
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


def _show(made: CertificateFiles) -> None:
    names = f", names: {', '.join(made.names)}" if made.names else ""
    typer.echo(f"{made.certificate}: until {made.ends:%Y-%m-%dT%H:%M:%SZ}{names}")
    typer.echo(f"{made.key}: its key, readable by its owner only")
