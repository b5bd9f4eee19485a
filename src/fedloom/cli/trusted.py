"""Security options shared by several commands (docs/security.md). None takes a secret, only files with secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Certificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-certificate",
        help="Our certificate as PEM, followed by its intermediate certificates.",
        metavar="FILE",
        envvar="FEDLOOM_TLS_CERTIFICATE",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--tls-key", help="The private key of our certificate.", metavar="FILE", envvar="FEDLOOM_TLS_KEY"),
]
CaOfPeers = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="Require peers to have a certificate signed by these authorities (mutual TLS).",
        metavar="FILE",
        envvar="FEDLOOM_TLS_CA",
    ),
]
CaOfAggregator = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="Use TLS, and accept a server whose certificate is signed by these authorities.",
        metavar="FILE",
        envvar="FEDLOOM_TLS_CA",
    ),
]
Tokens = Annotated[
    Path | None,
    typer.Option(
        help="Accept peers that have one of the tokens in this file (`fedloom token`).",
        metavar="FILE",
        envvar="FEDLOOM_TOKENS",
    ),
]
Identities = Annotated[
    Path | None,
    typer.Option(
        help="Table of identities: who may do what, and for which clients.", metavar="FILE", envvar="FEDLOOM_IDENTITIES"
    ),
]
AuditLog = Annotated[
    Path | None,
    typer.Option(
        help="The audit log, where peers say who they are; by default logs/audit.jsonl of the run's folder, "
        "none for a URL.",
        metavar="FILE",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with our token; or put the token itself in $FEDLOOM_TOKEN.",
        metavar="FILE",
        envvar="FEDLOOM_TOKEN_FILE",
    ),
]
InsecureServer = Annotated[
    bool,
    typer.Option("--insecure", help="Accept connections from other machines without authentication, or in plaintext."),
]
InsecureClient = Annotated[
    bool, typer.Option("--insecure", help="Send our token in plaintext, where others on the network can read it.")
]
