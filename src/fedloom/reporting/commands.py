"""``fedloom report`` and ``compare``: pages of runs, and comparisons on standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.completion import complete_runs
from fedloom.cli.options import RunFolderArgument
from fedloom.cli.results import CommandResult

if TYPE_CHECKING:
    from fedloom.errors import FedloomError
    from fedloom.reporting.compare import RunComparison
    from fedloom.reporting.page import Table

    Failures = Sequence[FedloomError]


def report_command(run: RunFolderArgument) -> CommandResult:
    """Write a run's report.html and figures/ from its other files."""
    from fedloom.reporting.report import write_report

    path = write_report(run)
    return CommandResult({"report": path}, f"report: {path}")


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of finished runs, or folders that contain finished runs.",
            metavar="RUN...",
            autocompletion=complete_runs,
        ),
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
) -> CommandResult:
    """Compare runs. Runs that differ only in the seed form one row."""
    from fedloom.reporting.compare import compare_runs
    from fedloom.reporting.compare_page import check_out

    if out is not None:
        check_out(out)
    return _compared(compare_runs(runs, against), out)


def _compared(
    comparison: RunComparison, out: Path | None, before: Callable[[], None] | None = None, failed: Failures = ()
) -> CommandResult:
    """Return a comparison of finished runs, written to ``out``; its text is shown after ``before``."""
    from fedloom.errors import FedloomError
    from fedloom.reporting.compare_page import write_comparison
    from fedloom.reporting.compare_tables import pair_records, row_records

    failures = [*failed]
    page: Path | None = None
    try:
        page = None if out is None else write_comparison(comparison, out)
    except FedloomError as error:  # after the results are shown
        failures.append(error)

    def show() -> None:
        if before is not None:
            before()
        _show_comparison(comparison)
        if page is not None:
            typer.echo(f"comparison: {page}")

    facts = {"rows": row_records(comparison), "pairs": pair_records(comparison), "notices": comparison.notices}
    return CommandResult({**facts, "comparison": page}, show, failures)


def _show_comparison(comparison: RunComparison) -> None:
    from fedloom.cli.tables import print_paragraph
    from fedloom.reporting import compare_tables as tables
    from fedloom.reporting.compare_tables import caution, findings, sentence

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


def compared_sweep(folder: Path, failures: Failures) -> CommandResult:
    """Write the comparison of a sweep's runs, and return it with the errors of failed runs.

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
    headings = ("", "last round", "best round")
    before = partial(print_table, title, headings, rows) if comparison.chosen else None
    return _compared(compare_runs(list(shown)), folder / "comparison", before, failures)


def print_spec(title: str, table: Table, *, titled: bool = False) -> None:
    """Print each block of a table, the best cells bold and tied ones underlined; ``titled``: with the block's title."""
    from rich.text import Text

    from fedloom.cli.tables import print_table

    styles = {"best": "bold", "tied": "underline"}
    for label, lines in table.blocks:
        rows = [[Text(cell.text, styles.get(cell.mark, "")) for cell in line.cells] for line in lines]
        print_table(f"{title}\n{label}" if titled else title, table.headings, rows)
