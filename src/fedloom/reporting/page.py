"""Page of a run or a comparison: its sections, tables and figures, rendered as one self-contained HTML file."""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from fedloom.core.digests import RESTORE
from fedloom.core.words import as_csv
from fedloom.errors import DataError, ExperimentError

if TYPE_CHECKING:
    import jinja2

    from fedloom.reporting.drawing import Drawing
    from fedloom.runs.folder import RunFolder

_log = logging.getLogger("fedloom.reporting")

MALFORMED_FILE_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)
"""Exceptions of code that reads a file whose digest is right, but not its form."""

DASH = "–"
"""Placeholder for an unknown value."""

FEWEST_POINTS = 4
"""Minimum number of points for a learning curve; a straight line between two shows nothing."""


@dataclass(frozen=True)
class Panel:
    """Figure: the name of its file, its SVG, and whether it takes the full width of the page.

    ``points``: if its points are clients, the id of each and the text of its tooltip.
    """

    name: str
    svg: Drawing
    wide: bool = False
    points: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ConfusionCard:
    """Card of a client, shown when its link is followed; ``target`` is its id on the page."""

    client: str
    target: str
    group: str
    owner: str
    facts: str
    table: Table | None


@dataclass(frozen=True)
class Part:
    """Figures and tables with one explanation, in the order of the attributes.

    Figures and small tables share a grid with this number of ``columns``. ``pairs`` are keys with values; ``pre`` is
    shown verbatim.
    """

    title: str = ""
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    columns: int = 1
    cards: tuple[ConfusionCard, ...] = ()
    text: str = ""
    pairs: tuple[tuple[str, str], ...] = ()
    pre: str = ""


@dataclass(frozen=True)
class PageSection:
    """Section of the page, or the reason for its absence."""

    title: str
    parts: tuple[Part, ...] = ()
    absent: str = ""

    @property
    def anchor(self) -> str:
        """Id on the page, for links to the section."""
        return f"section-{re.sub(r'[^a-z0-9]+', '-', self.title.lower())}"


@dataclass(frozen=True)
class ReportSection:
    """Declaration of a section of a run's report.

    Attributes
    ----------
    title
        Heading.
    build
        Returns the content, or raises DataError if a file is missing or damaged.
    files
        Files that it reads, besides those of every run.
    applies
        Returns whether the run has such a section; False also if its files cannot be read.
    """

    title: str
    build: Callable[[RunFolder], Part | Sequence[Part]]
    files: tuple[str, ...] = ()
    applies: Callable[[RunFolder], bool] = lambda run: True

    def page_section(self, run: RunFolder) -> PageSection | None:
        """Return the section of a run, or a note on the damaged file in its place; None if it does not apply."""
        try:
            with reading(run, *self.files):
                if not self.applies(run):
                    return None
                content = self.build(run)
        except DataError as error:
            return PageSection(self.title, absent=without_folder(run, error))
        return PageSection(self.title, (content,) if isinstance(content, Part) else tuple(content))


@contextmanager
def reading(run: RunFolder, *files: str) -> Iterator[None]:
    """Raise :class:`DataError` for files of a run that do not have the expected form, such as a missing key."""
    try:
        yield
    except MALFORMED_FILE_ERRORS as error:
        _log.warning("%s cannot be read", ", ".join(files), exc_info=True)
        names = run.path / ", ".join(files)
        raise DataError(
            f"{names}: not written by this version of FedLoom, or edited ({type(error).__name__}: {error})",
            hint=RESTORE,
        ) from error


def without_folder(run: RunFolder, error: DataError) -> str:
    """Return a message with paths relative to the run's folder: a page reveals nothing about its machine."""
    return str(error).replace(f"{run.path}/", "")


@dataclass(frozen=True)
class Fact:
    """Number at the top of the page, with the CSS variable of its colour."""

    label: str
    value: str
    note: str = ""
    colour: str = ""


@dataclass(frozen=True)
class Lead:
    """Sentence at the top of the page, with its content as data attributes."""

    text: str
    data: Mapping[str, str]


@dataclass(frozen=True)
class ReportPage:
    """Page of a run or a comparison.

    Attributes
    ----------
    palette
        Colour of each CSS variable that figures refer to.
    facts
        Numbers at the top, by CSS class.
    broad
        True if tables are broader than text.
    """

    title: str
    subtitles: tuple[str, ...]
    sections: tuple[PageSection, ...]
    palette: Mapping[str, str]
    leads: tuple[Lead, ...] = ()
    notices: tuple[str, ...] = ()
    facts: Mapping[str, tuple[Fact, ...]] = field(default_factory=dict)
    broad: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of all sections."""
        return tuple(part for section in self.sections for part in section.parts)

    def render(self, template: str = "page.html.j2", package: str = "fedloom.reporting", **context: Any) -> str:
        """Return the page as HTML, by a template of a package that gets the ``context``, too."""
        targets = {card.client: card.target for part in self.parts for card in part.cards}
        return str(page_templates(package).get_template(template).render(page=self, targets=targets, **context))

    def figures(self) -> dict[str, str]:
        """Return the figures as separate SVG files, by file name."""
        from fedloom.reporting import drawing

        panels = (panel for part in self.parts for panel in part.panels)
        return {f"{p.name}.svg": drawing.annotated(p.svg, [n for _, n in p.points], {}) for p in panels}


@functools.cache
def page_templates(package: str) -> jinja2.Environment:
    """Return the templates of a package, which may extend those of reports."""
    check_installed("jinja2")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in (package, "fedloom.reporting")]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = _inline
    return environment


def check_installed(*packages: str, extra: str = "report") -> None:
    """Raise :class:`ExperimentError` if a package of an extra is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise ExperimentError(
                f"{extra} needs the package {package}, which is not installed", hint=f"pip install 'fedloom[{extra}]'"
            )


def _inline(panel: Panel, title: str, palette: Mapping[str, str], targets: Mapping[str, str]) -> str:
    """Return a figure as part of the page, its points linked to the cards; a template filter."""
    from markupsafe import Markup, escape

    from fedloom.reporting import drawing

    links = {k: targets[client] for k, (client, _) in enumerate(panel.points) if client in targets}
    svg = drawing.annotated(drawing.inline(panel.svg, panel.name, palette), [note for _, note in panel.points], links)
    label = escape(f"{title}: {panel.name}")
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))


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

    ``colour`` is the CSS variable of its colour in figures, ``dash`` the dash pattern of its line there (None: a dot),
    and ``href`` the target of its label's link, if it has one.
    """

    cells: tuple[Cell, ...]
    colour: str = ""
    dash: str | None = None
    note: str = ""
    href: str = ""


def table_row(
    *cells: str | Cell, colour: str = "", dash: str | None = None, note: str = "", href: str = ""
) -> TableRow:
    """Return a row of cells; text stands for a plain cell."""
    return TableRow(tuple(Cell(each) if isinstance(each, str) else each for each in cells), colour, dash, note, href)


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
    text_columns: int = 1,
    small: bool = False,
    wide: bool = False,
) -> Table:
    """Return a table of one block without a title."""
    return Table(tuple(headings), (("", tuple(rows)),), title, above, text_columns, small, wide)


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
    text_columns: int = 1,
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
    rows_filled = tuple(
        (title, tuple(table_row(*_cells(columns, item), **key(item)) for item in items)) for title, items in blocks
    )
    headings = tuple(column.heading for column in columns)
    return Table(headings, rows_filled, above=above if len(above) > 1 else (), left=text_columns)


def _cells(columns: Sequence[Column[Item]], item: Item) -> Iterable[Cell]:
    columns_left = 0
    for column in columns:
        if columns_left:
            columns_left -= 1
            continue
        content = column.cell(item)
        cell = Cell(content) if isinstance(content, str) else content
        columns_left = cell.span - 1
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
    text = escaped(mean) if command is None else f"{command}{{{escaped(mean)}}}"
    return rf"{text} $\pm$ {std}" if plus_minus else text
