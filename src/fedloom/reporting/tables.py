"""Specification of tables, from which pages, terminals, notebooks and LaTeX are rendered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from fedloom.core.words import as_csv

Item = TypeVar("Item")


class Cell(NamedTuple):
    """Table cell. ``mark``: ``best``, ``tied`` or none; ``shade``: percent of colour behind it; ``span``: columns."""

    text: str
    mark: str = ""
    shade: int = 0
    span: int = 1


@dataclass(frozen=True)
class TableRow:
    """Row of a table: label and other cells, and a second line of the label.

    ``colour`` is the CSS variable of its colour in figures, ``dash`` the dash pattern of its line there (None: a dot).
    """

    cells: tuple[Cell, ...]
    colour: str = ""
    dash: str | None = None
    note: str = ""


def table_row(*cells: str | Cell, colour: str = "", dash: str | None = None, note: str = "") -> TableRow:
    """Return a row of cells; text stands for a plain cell."""
    return TableRow(tuple(Cell(each) if isinstance(each, str) else each for each in cells), colour, dash, note)


@dataclass(frozen=True)
class Table:
    """Table in titled blocks of rows.

    ``above`` has headings of groups of columns, each with its number of columns; the first ``left`` columns hold text.
    A ``small`` table stands in the grid of the figures; a ``wide`` one takes the grid's full width.
    """

    headings: tuple[str, ...]
    blocks: tuple[tuple[str, tuple[TableRow, ...]], ...]
    title: str = ""
    above: tuple[tuple[str, int], ...] = ()
    left: int = 1
    small: bool = False
    wide: bool = False

    @property
    def keys(self) -> str:
        """Kind of the rows' keys, ``dot`` or ``line``; empty without any."""
        kinds = {"dot" if row.dash is None else "line" for _, rows in self.blocks for row in rows if row.colour}
        return min(kinds, default="")


def one_block(
    headings: Sequence[str],
    rows: Iterable[TableRow],
    title: str = "",
    *,
    above: tuple[tuple[str, int], ...] = (),
    left: int = 1,
    small: bool = False,
    wide: bool = False,
) -> Table:
    """Return a table of one block without a title."""
    return Table(tuple(headings), (("", tuple(rows)),), title, above, left, small, wide)


class Column(NamedTuple, Generic[Item]):
    """Column of a table: its heading, the cell of an item, and the heading above that it shares with its neighbours."""

    heading: str
    cell: Callable[[Item], Cell | str]
    above: str = ""


def tabulated(
    columns: Sequence[Column[Item]],
    blocks: Iterable[tuple[str, Iterable[Item]]],
    key: Callable[[Item], Mapping[str, str]] = lambda item: {},
    *,
    left: int = 1,
) -> Table:
    """Return a table with a row for each item of each titled block.

    Parameters
    ----------
    columns
        Columns from left to right; those that a spanning cell covers are skipped.
    key
        Returns ``colour`` and ``dash`` of an item's row.
    """
    above = tuple((title, len(list(same))) for title, same in itertools.groupby(column.above for column in columns))
    filled = tuple(
        (title, tuple(table_row(*_cells(columns, item), **key(item)) for item in items)) for title, items in blocks
    )
    headings = tuple(column.heading for column in columns)
    return Table(headings, filled, above=above if len(above) > 1 else (), left=left)


def _cells(columns: Sequence[Column[Item]], item: Item) -> Iterable[Cell]:
    covered = 0
    for column in columns:
        if covered:
            covered -= 1
            continue
        content = column.cell(item)
        cell = Cell(content) if isinstance(content, str) else content
        covered = cell.span - 1
        yield cell


def records_as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as CSV with the columns of all of them, in order of first use; empty text if there are none."""
    columns = dict.fromkeys(key for record in records for key in record)
    return as_csv([{**columns, **record} for record in records])


def as_latex(table: Table, caption: str) -> str:
    r"""Return a ``table`` for a LaTeX document with the package ``booktabs``: best in bold, tied rows underlined."""
    rules, end, titles = "", 0, []
    for title, span in table.above:
        start, end = end + 1, end + span
        titles.append(rf"\multicolumn{{{span}}}{{c}}{{{escaped(title)}}}" if span > 1 else escaped(title))
        if title:
            rules += rf"\cmidrule({'l' if end == len(table.headings) else 'lr'}){{{start}-{end}}}"
    rows = [[_latex(cell) for cell in row.cells] for _, rows in table.blocks for row in rows]
    return "\n".join([
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(caption)}}}",
        rf"\begin{{tabular}}{{@{{}}{'l' * table.left}{'r' * (len(table.headings) - table.left)}@{{}}}}",
        r"\toprule",
        *([_line(titles), rules] if table.above else []),
        _line([escaped(heading) for heading in table.headings]),
        r"\midrule",
        *map(_line, rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "",
    ])  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


_SPECIAL = {ord(c): rf"\{c}" for c in "&%$#_{}"} | str.maketrans({
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "±": r"$\pm$", "–": "--",
})  # fmt: skip


def escaped(text: str) -> str:
    """Return a text with LaTeX's special characters escaped."""
    return text.translate(_SPECIAL)


def _latex(cell: Cell) -> str:
    mean, plus_minus, std = cell.text.partition(" ± ")
    command = {"best": r"\textbf", "tied": r"\underline"}.get(cell.mark)
    shown = escaped(mean) if command is None else f"{command}{{{escaped(mean)}}}"
    return rf"{shown} $\pm$ {std}" if plus_minus else shown
