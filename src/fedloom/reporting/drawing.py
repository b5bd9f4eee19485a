"""What all figures share: one style, and matplotlib to SVG that reads well on light and dark pages, always alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from io import BytesIO, StringIO
from typing import Any, ParamSpec, TypeAlias
from xml.sax.saxutils import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

INK = "#24292f"
"""Colour of text and axes; :func:`inline` makes it the colour of the page's text."""

PAPER = "#fefefe"
"""Colour of text on dark ground; :func:`inline` makes it the colour of the page."""

COLOURS = {"seen": "#0072b2", "unseen": "#d55e00", "global": "#009e73"}
"""Okabe and Ito's colours, told apart with any colour vision; :func:`inline` makes them CSS variables."""

LABELS = {"seen": "seen clients", "unseen": "unseen clients", "global": "global model"}

OTHER = "#c9ccd1"
"""Of what has no colour of its own."""

HALF, FULL = 4.35, 8.9
"""Widths in inches, so that text has the same size in figures that share a line of the page and one that fills it."""

MANY_POINTS = 2000
"""From so many points on, a scatter plot is an image: markers cost a hundred bytes each."""

MANY_ROUNDS = 60
"""Points of a curve over rounds, or bars, at most: beyond, each is the mean of neighbours."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedloom",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **{f"{what}.color": INK for what in ("text", "xtick", "ytick", "grid")},
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **{f"{what}.width": 0.6 for what in ("xtick.major", "ytick.major")},
    **{f"{what}.size": 2.5 for what in ("xtick.major", "ytick.major")},
    **{f"{what}.linewidth": 0.6 for what in ("axes", "grid")},
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.14,
    "axes.axisbelow": True,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.6,
    "legend.labelspacing": 0.3,
    "legend.borderaxespad": 0.3,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.dpi": 200,
}

_P = ParamSpec("_P")


class Drawing(str):
    """A figure as the text of an SVG; ``figure`` is what it was made of."""

    figure: Figure


class Sheet(Figure):
    """A figure that a notebook shows also where nothing has imported pyplot, which else would see to it."""

    def _repr_png_(self) -> bytes:
        image = BytesIO()
        self.savefig(image, format="png", dpi=120, facecolor="white")
        return image.getvalue()


def as_svg(draw: Callable[_P, Figure]) -> Callable[_P, Drawing]:
    """Give a drawing function the style of a report and its text the form of an SVG."""

    @wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Drawing:
        with matplotlib.rc_context(_STYLE):
            figure = draw(*args, **kwargs)
            drawing = Drawing(_svg(figure))
        drawing.figure = figure
        return drawing

    return styled


def sheet(width: float, height: float, **layout: Any) -> Figure:
    """An empty figure of so many inches, whose parts find their own room."""
    return Sheet(figsize=(width, height), **{"layout": "constrained", **layout})


def panel(height: float, width: float = HALF) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; inches."""
    figure = sheet(width, height)
    return figure, figure.add_subplot()


def over_rounds(axes: Axes, last: float) -> None:
    """Make the horizontal axis that of rounds, from 0 to the last."""
    axes.set(xlabel="round", xlim=(0, max(last, 1)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))


def percent(*each: Axis, bins: int = 6) -> None:
    """Show fractions in percent."""
    for axis in each:
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.10g}%"))
        axis.set_major_locator(MaxNLocator(nbins=bins, steps=[1, 2, 2.5, 5, 10]))


def dots(axes: Axes, x: Array, y: Array, seen: NDArray[np.bool_]) -> None:
    """A point for each client: circles for the seen, diamonds for the unseen."""
    for name, kind, marker in (("seen", seen, "o"), ("unseen", ~seen, "D")):
        if kind.any():
            axes.scatter(
                x[kind], y[kind], s=13, color=COLOURS[name], marker=marker, alpha=0.65, linewidths=0,
                label=LABELS[name], rasterized=len(x) > MANY_POINTS,
            )  # fmt: skip
    axes.grid(visible=True, axis="both")


def neighbours(values: Sequence[float], most: int = MANY_ROUNDS) -> Array:
    """Means of as few neighbours as leave at most so many values."""
    together = -(-len(values) // most)
    return np.array([np.mean(values[i : i + together]) for i in range(0, len(values), together)])


def inline(svg: str, name: str, palette: Mapping[str, str]) -> str:
    """Make an SVG part of a page: ids of its own, the page's text colour, and its palette from CSS variables."""
    svg = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor").replace(PAPER, "var(--page)")
    for variable, colour in palette.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg


def point_url(k: int) -> str:
    """What marks the k-th point of a figure, until :func:`annotated` puts in its place what a reader gets."""
    return f"point:{k}"


def annotated(svg: str, notes: Sequence[str], links: Sequence[str | None]) -> str:
    """Give each marked point its note, shown where the pointer rests, and its link, where it has one."""

    def point(match: re.Match[str]) -> str:
        k = int(match[1])
        tag, link = ("a", f' href="#{links[k]}"') if links[k] is not None else ("g", "")
        return f"<{tag}{link}><title>{escape(notes[k])}</title>{match[2]}</{tag}>"

    return re.sub(r'<a xlink:href="point:(\d+)"[^>]*>(.*?)</a>', point, svg, flags=re.DOTALL)


def _svg(figure: Figure) -> str:
    """Render without dates, metadata, prolog, and ids that nothing refers to."""
    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    referred = set(re.findall(r'#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referred else "", text)
    text = text.replace("'DejaVu Sans'", "system-ui, sans-serif")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
