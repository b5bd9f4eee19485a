"""Page of a run or a comparison: its sections, tables and figures, rendered as one self-contained HTML file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedloom.core.digests import RESTORE
from fedloom.errors import DataError, ExperimentError
from fedloom.reporting.tables import Table

if TYPE_CHECKING:
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

    def render(self) -> str:
        """Return the page as HTML."""
        check_installed("jinja2")
        import jinja2

        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("fedloom.reporting"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        targets = {card.client: card.target for part in self.parts for card in part.cards}
        environment.filters["inline"] = lambda panel, title: _inline(panel, title, self.palette, targets)
        return environment.get_template("page.html.j2").render(page=self, targets=targets)

    def figures(self) -> dict[str, str]:
        """Return the figures as separate SVG files, by file name."""
        from fedloom.reporting import drawing

        panels = (panel for part in self.parts for panel in part.panels)
        return {f"{p.name}.svg": drawing.annotated(p.svg, [n for _, n in p.points], {}) for p in panels}


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
