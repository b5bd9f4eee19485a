"""Tables and results on standard output, which adapt to its width and encoding."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli.characters import shown_as
from fedloom.reporting.tables import Table as TableSpec
from fedloom.tasks.names import ACCURACY, RESULT_HEADINGS, headline_of, result_rows

FIRST_COLUMN = 16
"""Minimum width of the first column, in characters; longer cells wrap if there is not enough room."""


PARAGRAPH_WIDTH = 80


def print_results(summary: dict[str, Any]) -> None:
    """Print the final results of a run; the title names the headline metric, unless it is accuracy."""
    headline = headline_of(summary)
    title = f"{summary['name']} · {summary['algorithm']} · seed {summary['seed']}"
    print_table(
        title if headline == ACCURACY else f"{title} · test {headline.title}",
        RESULT_HEADINGS,
        result_rows(summary, headline.exact),
    )


def print_paragraph(text: str) -> None:
    """Print sentences in lines of at most 80 characters."""
    print(textwrap.fill(text, PARAGRAPH_WIDTH))


def print_spec(title: str, table: TableSpec, *, titled: bool = False) -> None:
    """Print each block of a table, the best cells bold and tied ones underlined; ``titled``: with the block's title."""
    styles = {"best": "bold", "tied": "underline"}
    for label, lines in table.blocks:
        rows = [[Text(cell.text, styles.get(cell.mark, "")) for cell in line.cells] for line in lines]
        print_table(f"{title}\n{label}" if titled else title, table.headings, rows)


def print_table(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str | Text]], *, texts: Sequence[int] = (0,)
) -> None:
    """Print a table; on a terminal that is too narrow, print each row as a list of cells. Nothing is left out.

    Parameters
    ----------
    title
        Title above the table; may be empty.
    headings, rows
        Headings wrap, so that a table of numbers fits 80 columns. Cells do not, except in the first column.
    texts
        Indices of the columns that hold text and not numbers.
    """
    console = Console(highlight=False)
    title, headings = shown_as(console.encoding, title), [shown_as(console.encoding, text) for text in headings]
    cells = [[_cell(console, cell) for cell in row] for row in rows]
    names = [line for text in (headings[0], *(row[0].plain for row in cells)) for line in text.split("\n")]
    first = max(map(cell_len, names), default=0)
    least = min(first, FIRST_COLUMN)
    table = _table(title, headings, cells, texts, least)
    width = console.measure(table, options=console.options.update(max_width=10_000)).maximum - first + least
    if width > console.width and not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=width)  # a file has no width limit
    if width <= console.width:
        console.print(table)
    else:
        _print_list(console, title, headings, cells)


def _table(
    title: str, headings: Sequence[str], cells: Sequence[Sequence[Text]], texts: Sequence[int], least: int
) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for i, heading in enumerate(headings):
        wraps = i > 0 and "±" not in heading and "+/-" not in heading
        table.add_column(
            heading.replace(" ", "\n") if wraps else heading,
            justify="left" if i in texts else "right",
            vertical="bottom",
            no_wrap=bool(i),
            overflow="fold",
            min_width=0 if i else least,
        )
    for row in cells:
        table.add_row(*row)
    return table


def _print_list(console: Console, title: str, headings: Sequence[str], cells: Sequence[Sequence[Text]]) -> None:
    if title:
        console.print(Text(title, "italic"), overflow="fold")
    for row in cells:
        console.print(row[0], overflow="fold")
        for heading, cell in zip(headings[1:], row[1:], strict=True):
            if cell.plain:
                console.print(Text.assemble(f"  {heading}: ", cell), overflow="fold")


def _cell(console: Console, cell: str | Text) -> Text:
    text = cell if isinstance(cell, Text) else Text(cell)
    return Text(shown_as(console.encoding, text.plain), text.style)


def show_comparison(runs: Sequence[Path], out: Path | None, against: str | None = None) -> None:
    """Show a comparison of finished runs; write it to ``out``, a new folder or an earlier comparison's."""
    from fedloom.reporting import compare_tables as tables
    from fedloom.reporting.compare import compare_runs
    from fedloom.reporting.compare_findings import caution, findings, sentence
    from fedloom.reporting.compare_page import check_out, write_comparison

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
    from fedloom.reporting.compare import compare_runs

    comparison = compare_runs([folder])
    tried = {
        (comparison.rows[choice.row].block, comparison.rows[choice.row].runs[0].method) for choice in comparison.chosen
    }
    chosen = {run.path for choice in comparison.chosen for run in comparison.rows[choice.row].runs}
    shown: dict[Path, None] = {}
    title = f"Validation {comparison.headline.heading} (seen clients, pooled)"
    rows: list[tuple[str, ...]] = []
    for row in comparison.rows:
        paths = [run.path for run in row.runs]
        candidate = (row.block, row.runs[0].method) in tried
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
