"""Tables and results on standard output, which adapt to its width and encoding."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.cli.characters import shown_as
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
