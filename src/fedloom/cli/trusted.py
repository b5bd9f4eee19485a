"""Options about trust that several commands have (docs/security.md); no option takes a secret, only files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Certificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-certificate",
        help="Our certificate, PEM, with those that vouch for it.",
        metavar="FILE",
        envvar="FEDLOOM_TLS_CERTIFICATE",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--tls-key", help="The key of our certificate.", metavar="FILE", envvar="FEDLOOM_TLS_KEY"),
]
CaOfPeers = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="Ask each peer for a certificate of these authorities (mutual TLS).",
        metavar="FILE",
        envvar="FEDLOOM_TLS_CA",
    ),
]
CaOfAggregator = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="Speak TLS, and believe an aggregator whose certificate is of these authorities.",
        metavar="FILE",
        envvar="FEDLOOM_TLS_CA",
    ),
]
Tokens = Annotated[
    Path | None,
    typer.Option(help="Let in who has one of these tokens (`fedloom token`).", metavar="FILE", envvar="FEDLOOM_TOKENS"),
]
Identities = Annotated[
    Path | None,
    typer.Option(
        help="Table of identities: who may do what, for which clients.", metavar="FILE", envvar="FEDLOOM_IDENTITIES"
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File that holds our token; or the token itself in $FEDLOOM_TOKEN.",
        metavar="FILE",
        envvar="FEDLOOM_TOKEN_FILE",
    ),
]
InsecureServer = Annotated[
    bool, typer.Option("--insecure", help="Serve other machines though peers are not known, or all is in plaintext.")
]
InsecureClient = Annotated[
    bool, typer.Option("--insecure", help="Send our token in plaintext, where others on the way can read it.")
]
