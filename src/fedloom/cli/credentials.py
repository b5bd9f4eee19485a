"""Options for connections, shared by several commands (docs/security.md). None takes a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
