"""``fedloom token`` and ``fedloom certificates``: credentials of peers of an aggregator."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedloom.cli.options import Commands, refuse_options
from fedloom.cli.results import CommandResult
from fedloom.errors import ExperimentError

if TYPE_CHECKING:
    from fedloom.security.certificates import CertificateFiles
    from fedloom.security.tokens import Token


def token_command(
    action: Annotated[
        Literal["new", "list", "revoke", "signing-key"],
        typer.Argument(
            help="new: create a token; list them; revoke: an aggregator that reads the file disconnects their users "
            "within seconds; signing-key: create a member's key for secure sums, and show its line of the register, "
            "signing-keys.txt.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            help="new: the token's name, as in `token` of the identity file; revoke: its id, or a name for all tokens "
            "of that name; signing-key: the member's client, or a pattern of its clients with * and ?.",
        ),
    ] = None,
    tokens: Annotated[
        Path, typer.Option(help="File of token hashes for the aggregator.", metavar="FILE", envvar="FEDLOOM_TOKENS")
    ] = Path("tokens.json"),
    days: Annotated[float | None, typer.Option(help="Days until a new token expires; by default never.", min=0)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New file (mode 0600) for the token, which is otherwise shown, once; or for the key, by default "
            "signing.key.",
            metavar="FILE",
        ),
    ] = None,
) -> CommandResult:
    """Manage tokens of workers and watchers of an aggregator, and create members' signature keys."""
    from fedloom.security.tokens import read_tokens, revoke_tokens

    if action != "new":
        refuse_options({"--days": days}, "is for new.")
    if action in ("list", "revoke"):
        refuse_options({"--out": out}, "is for new and signing-key.")
    if action == "list":
        refuse_options({"NAME": name}, "is not for list.")
        known = [_facts(token) for token in read_tokens(tokens).all]
        lines = [
            f"{token['id']}  {token['state']:<8} {token['name']}  {token['created']}  "
            f"{token['revoked'] or token['expires'] or 'for ever'}"
            for token in known
        ]
        return CommandResult(known, "\n".join(lines))
    if name is None:
        raise ExperimentError(f"Give a name: fedloom token {action} NAME.", key="name")
    if action == "new":
        return _new_token(name, tokens, days, out)
    if action == "revoke":
        revoked = revoke_tokens(tokens, name)
        if not revoked:
            typer.echo(f"{name}: already revoked", err=True)
        lines = [f"revoked {token.id} of {token.name}" for token in revoked]
        return CommandResult([_facts(token) for token in revoked], "\n".join(lines))
    from fedloom.security.signing import create_signing_key

    key = out or Path("signing.key")
    line = f"{name} {create_signing_key(key)}"
    typer.echo(f"{key}: the key, readable by its owner only; give all members its line (docs/security.md)", err=True)
    return CommandResult({"key": key, "line": line}, line)


def _new_token(name: str, tokens: Path, days: float | None, out: Path | None) -> CommandResult:
    from fedloom.security.files import create
    from fedloom.security.tokens import add_token, revoke_tokens

    token, entry = add_token(tokens, name, days=days)
    secret = None if out is not None else token.get_secret_value()
    if out is not None:
        try:
            create(out, token.get_secret_value() + "\n", private=True)
        except BaseException:
            revoke_tokens(tokens, entry.id)  # it was never delivered
            raise
    until = "" if entry.expires is None else f", until {_time(entry.expires)}"
    where = "shown only once" if out is None else f"in {out}"
    typer.echo(f"token {entry.id} of {name}{until}: {where}; its hash is in {tokens}", err=True)
    return CommandResult({**_facts(entry), "file": out, "token": secret}, secret or "")


def _facts(token: Token) -> dict[str, str | None]:
    """Return what may be shown of a stored token."""
    times = {key: getattr(token, key) for key in ("created", "expires", "revoked")}
    shown = {key: None if when is None else _time(when) for key, when in times.items()}
    return {"id": token.id, "name": token.name, "state": token.state(datetime.now(UTC)), **shown}


def _time(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


# --- certificates -----------------------------------------------------------------------------------------------------

certificates_command = Commands(
    help="A CA and certificates for TLS trials; production uses an existing CA.",
)

FOR_TRIALS = (
    "for trials only: anyone who has ca.key can create any member's certificate. In production, use an existing CA: "
    "cert-manager, step-ca, Vault, or a company's own (docs/security.md)"
)


@certificates_command.command("ca")
def _ca(
    out: Annotated[Path, typer.Option(help="Folder for ca.crt and ca.key.", metavar="DIR")] = Path("certificates"),
    days: Annotated[int, typer.Option(help="Days until it expires, 1 to 3650.")] = 365,
) -> CommandResult:
    """Create a certificate authority."""
    from fedloom.security.certificates import make_ca

    made = make_ca(out, days=days)
    typer.echo(FOR_TRIALS, err=True)
    return _made(made)


@certificates_command.command("new")
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
) -> CommandResult:
    """Create a certificate for a member, or for a server (--host)."""
    from fedloom.security.certificates import make_certificate

    return _made(make_certificate(name, out or ca, ca, hosts=host or (), days=days, replace=replace))


def _made(made: CertificateFiles) -> CommandResult:
    names = f", names: {', '.join(made.names)}" if made.names else ""
    text = (
        f"{made.certificate}: until {made.ends:%Y-%m-%dT%H:%M:%SZ}{names}\n"
        f"{made.key}: its key, readable by its owner only"
    )
    return CommandResult(made, text)
