"""``fedloom schema``: print the schema of experiment files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schema(
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")] = None,
) -> None:
    """Print the JSON schema of experiment files. Editors and other tools use it to complete and check keys."""
    import json

    from fedloom.experiment import json_schema

    text = json.dumps(json_schema(), indent=2, ensure_ascii=False)
    if out is None:
        typer.echo(text)
    else:
        from fedloom.storage.folder import storing

        with storing(out):
            out.write_text(f"{text}\n", encoding="utf-8")
