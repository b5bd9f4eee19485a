"""``fedloom report`` and ``compare``: pages of runs, and comparisons on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.options import RunFolderArgument

if TYPE_CHECKING:
    from fedloom.reporting.page import Table


def report_command(run: RunFolderArgument) -> None:
    """Write a run's report.html and figures/ from its other files."""
    from fedloom.reporting.report import write_report

    typer.echo(f"report: {write_report(run)}")


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of finished runs, or folders that contain finished runs.", metavar="RUN..."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write compare.html, .csv, .tex and figures to this folder.", metavar="DIR"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Baseline for the tests: a method or a row; by default the best on validation.",
            metavar="NAME",
        ),
    ] = None,
) -> None:
    """Compare runs. Runs that differ only in the seed form one row."""
    show_comparison(runs, out, against)
    if out is not None:
        typer.echo(f"comparison: {out / 'compare.html'}")


def show_comparison(runs: Sequence[Path], out: Path | None, against: str | None = None) -> None:
    """Show a comparison of finished runs; write it to ``out``, a new folder or an earlier comparison's."""
    from fedloom.cli.tables import print_paragraph
    from fedloom.reporting import compare_tables as tables
    from fedloom.reporting.compare import compare_runs
    from fedloom.reporting.compare_page import check_out, write_comparison
    from fedloom.reporting.compare_tables import caution, findings, sentence

    if out is not None:
        check_out(out)
    comparison = compare_runs(runs, against)
    for notice in comparison.notices:
        typer.echo(notice, err=True)
    several = len(comparison.blocks) > 1
    print_spec(tables.text_title(comparison), tables.terminal_table(comparison), titled=several)
    if sys.stdout.isatty() and len(comparison.rows) > 1:
        print_paragraph(tables.marks_note(comparison))
    if comparison.chosen:
        typer.echo()
        print_spec(f"Best on validation ({comparison.headline.heading})", tables.choice_table(comparison))
    for label, table in tables.own_steps_tables(comparison).items():
        typer.echo()
        title = f"Unseen clients, {comparison.headline.heading}"
        print_spec(f"{title}\n{label}" if several else title, table)
    typer.echo()
    for text in (*(sentence(comparison, finding) for finding in findings(comparison)), caution(comparison)):
        if text:
            print_paragraph(text)
    if out is not None:
        write_comparison(comparison, out)


def show_sweep(folder: Path) -> None:
    """Show and write the results of a sweep.

    If settings were tried, show test accuracy only for those chosen on validation: showing all would invite choosing
    by test accuracy. `fedloom compare SWEEP` shows everything.
    """
    from fedloom.cli.tables import print_table
    from fedloom.reporting.compare import compare_runs

    comparison = compare_runs([folder])
    tried = {choice.row.method_in_block for choice in comparison.chosen}
    chosen = {run.path for choice in comparison.chosen for run in choice.row.runs}
    shown: dict[Path, None] = {}
    title = f"Validation {comparison.headline.heading} (seen clients, pooled)"
    rows: list[tuple[str, ...]] = []
    for row in comparison.rows:
        paths = [run.path for run in row.runs]
        candidate = row.method_in_block in tried
        personal = [r for r in comparison.rows if r.runs == row.runs and r.predictor == "personal"]
        if candidate and (row in personal or not personal):  # without fine-tuning, every client has the global model
            mark = "  <- chosen" if chosen.issuperset(paths) else ""
            rows.append((row.label + mark, *(comparison.shown(row.validation(best=best)) for best in (False, True))))
        if not candidate or chosen.issuperset(paths):
            shown |= dict.fromkeys(paths)
    if comparison.chosen:
        print_table(title, ("", "last round", "best round"), rows)
    show_comparison(list(shown), folder / "comparison")
    typer.echo(f"comparison: {folder / 'comparison' / 'compare.html'}")


def print_spec(title: str, table: Table, *, titled: bool = False) -> None:
    """Print each block of a table, the best cells bold and tied ones underlined; ``titled``: with the block's title."""
    from rich.text import Text

    from fedloom.cli.tables import print_table

    styles = {"best": "bold", "tied": "underline"}
    for label, lines in table.blocks:
        rows = [[Text(cell.text, styles.get(cell.mark, "")) for cell in line.cells] for line in lines]
        print_table(f"{title}\n{label}" if titled else title, table.headings, rows)
