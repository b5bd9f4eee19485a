"""Options for connections, shared by several commands (docs/security.md). None takes a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ClientCredentials = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        help="Folder with what a connection needs of: ca.crt (use TLS, and trust these authorities), tls.crt and "
        "tls.key (our certificate), token.",
        metavar="DIR",
        envvar="FEDLOOM_CREDENTIALS",
    ),
]
ServerCredentials = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        help="Folder with tls.crt and tls.key (our certificate); and to admit peers, ca.crt (by certificates of these "
        "authorities), tokens.json (`fedloom token`), or both; identities.yaml says who may do what.",
        metavar="DIR",
        envvar="FEDLOOM_CREDENTIALS",
    ),
]
InsecureClient = Annotated[
    bool, typer.Option("--insecure", help="Send our token in plaintext, where others on the network can read it.")
]
InsecureServer = Annotated[
    bool,
    typer.Option("--insecure", help="Accept connections from other machines without authentication, or in plaintext."),
]
AuditLog = Annotated[
    Path | None,
    typer.Option(
        help="The audit log, where peers say who they are; by default logs/audit.jsonl of the run's folder, "
        "none for a URL.",
        metavar="FILE",
    ),
]
Health = Annotated[
    str | None,
    typer.Option(
        help="Serve health checks on this address too, and nothing else, in plaintext, for probes.", metavar="HOST:PORT"
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(help="Serve metrics for Prometheus on this address (docs/metrics.md).", metavar="HOST:PORT"),
]
