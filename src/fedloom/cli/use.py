"""What is done with a finished run: ``fedloom evaluate``, ``personalize``, ``report`` and ``compare``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedloom.words import counted

Run = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")]
Which = Annotated[str, typer.Option("--checkpoint", help="last, best or a round.", metavar="last|best|N")]
Other = Annotated[
    str | None,
    typer.Option("--partition", metavar="DIR|URL", help="Clients of another partition of the same kind of data."),
]
OwnFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Of a run with data.own: a packed client, or a folder of some; repeatable.",
    ),
]


def evaluate(
    run: Run,
    checkpoint: Which = "last",
    partition: Other = None,
    data: OwnFolders = None,
    out: Annotated[Path | None, typer.Option(help="Write the statistics as JSON to this file.")] = None,
) -> None:
    """Measure a trained model again on every client, or on the clients of another partition."""
    from fedloom.federation.folder import RunFolder

    RunFolder.open(run)  # before torch is imported
    from fedloom.cli.tables import print_results
    from fedloom.run import trained

    statistics = trained.evaluate(run, checkpoint, partition, data or ()).statistics
    print_results(statistics)  # first: what was measured is not lost with a file that cannot be written
    if out is not None:
        from fedloom.errors import StorageError
        from fedloom.storage.folder import write_atomically

        try:
            write_atomically(out, (json.dumps(statistics, indent=2) + "\n").encode())
        except StorageError as error:
            raise StorageError(str(error.args[0]), hint="choose another file with --out") from error


def personalize(
    run: Run,
    out: Annotated[Path, typer.Option(help="New folder for one safetensors file per client.", metavar="DIR")],
    checkpoint: Which = "last",
    partition: Other = None,
    data: OwnFolders = None,
    clients: Annotated[str | None, typer.Option(help="Ids, separated by commas; by default all.")] = None,
) -> None:
    """Give clients, seen or never seen, their own models, and save them."""
    from fedloom.errors import QuorumError
    from fedloom.federation.folder import RunFolder

    RunFolder.open(run)  # before torch is imported
    from fedloom.run.trained import personalize

    made = personalize(run, out, checkpoint, partition, clients, data or ())
    typer.echo(f"{counted(len(made.saved), 'model')} in {out}")
    for client, reason in made.lost.items():
        typer.echo(f"{client}: no model: {reason}", err=True)
    if made.lost:
        everyone = counted(len(made.saved) + len(made.lost), "client")
        raise QuorumError(f"{len(made.lost)} of {everyone} got no model")


def report(run: Run) -> None:
    """Write report.html and figures/ anew from a run's files."""
    from fedloom.reporting.report import write_report

    typer.echo(f"report: {write_report(run)}")


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of finished runs, or folders that hold some.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write compare.html, .csv, .tex and figures to this folder.", metavar="DIR"),
    ] = None,
) -> None:
    """Show side by side what each client would get; runs that differ in the seed alone are merged."""
    show_comparison(runs, out)
    if out is not None:
        typer.echo(f"comparison: {out / 'compare.html'}")


def show_comparison(runs: Sequence[Path], out: Path | None) -> None:
    """Show what finished runs found, and write it to a folder that is new or an earlier comparison's."""
    from rich.text import Text

    from fedloom.cli.tables import print_table
    from fedloom.reporting.compare import compare
    from fedloom.reporting.compare_report import check_out, write_comparison
    from fedloom.reporting.compare_tables import as_text, choice_headings, choices_as_text, headings, text_title

    if out is not None:
        check_out(out)
    comparison = compare(runs)
    for notice in comparison.notices:
        typer.echo(notice, err=True)
    several = len(comparison.blocks) > 1
    styles = {"best": "bold", "tied": "underline"}
    for title, lines in as_text(comparison).items():
        about = text_title(comparison)
        rows = [[Text(cell.text, styles.get(cell.mark, "")) for cell in cells] for cells in lines]
        print_table(f"{about}\n{title}" if several else about, headings(comparison), rows)
    if sys.stdout.isatty() and len(comparison.rows) > 1:
        typer.echo("bold: best; underlined: not told from it by a paired test over clients")
    if comparison.chosen:
        title = f"\nBest on validation ({comparison.scale.words})"
        print_table(title, choice_headings(comparison), choices_as_text(comparison))
    if out is not None:
        write_comparison(comparison, out)
