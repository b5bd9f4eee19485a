"""``fedloom reproduce``: results pages made again, in a clone of FedLoom, whose research/reproduce.py does it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import Json

PROGRAM = Path("research", "reproduce.py")


def find_clone(package: Path, here: Path) -> Path:
    """Return the clone that an editable package lies in, or that the current folder belongs to.

    Raise ExperimentError, with what to do, if neither is in a clone.
    """
    from fedloom.errors import ExperimentError

    for folder in (package.parents[1], here, *here.parents):
        if (folder / PROGRAM).is_file():
            return folder
    raise ExperimentError(
        "`fedloom reproduce` needs a clone of FedLoom: the installed package has no results pages, and none of their "
        "experiments and programs.",
        hint="Clone the repository, and run the command inside the clone.",
    )


def reproduce_command(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PAGE[/TABLE]]...", help="Page, or one of its parts or tables; none: list them."),
    ] = None,
    runs: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the runs; each page has a folder of its own in it.")
    ] = Path("runs"),
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Only these of the published seeds: 1,2,3 or 1-3.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none.")] = False,
    as_json: Json = False,
) -> None:
    """Make a results page again, or a table of it, and compare it with the published figures. Continues if interrupted.

    Ends with exit code 3 if a figure is missing or outside its tolerance.
    """
    clone = find_clone(Path(__file__).resolve().parents[1], Path.cwd())
    sys.path.insert(0, str(clone / "research"))
    program = importlib.import_module("reproduce")
    program.reproduce(targets or [], runs=runs, seeds=seeds, dry_run=dry_run, as_json=as_json)
