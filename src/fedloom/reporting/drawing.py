"""Drawing style of all figures, and reproducible SVG output that suits light and dark pages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from io import BytesIO, StringIO
from typing import Any, Literal, ParamSpec, TypeAlias
from xml.sax.saxutils import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from fedloom.reporting.words import GROUP_TITLES

Array: TypeAlias = NDArray[np.float64]

INK = "#24292f"
"""Colour of text and axes; :func:`inline` replaces it by the page's text colour."""

PAPER = "#fefefe"
"""Colour of text on dark areas; :func:`inline` replaces it by the page's background colour."""

COLOURS = {"seen": "#0072b2", "unseen": "#d55e00", "global": "#009e73"}
"""Okabe and Ito's colours, distinct under any colour vision; :func:`inline` replaces them by CSS variables."""

HEAT = LinearSegmentedColormap.from_list("heat", [to_rgba(COLOURS["seen"], opacity) for opacity in (0, 1)])
"""Colour map of heat maps, from transparent to opaque: zero shows the page, light or dark, and lightness varies
evenly with the value on both. Pages brighten ``image`` elements of dark figures.
"""


CLASS_COLOURS = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
"""Petroff's ten accessible colours (arXiv 2107.02270)."""

OTHER = "#c9ccd1"
"""Colour of elements without their own colour."""

HALF, FULL = 4.35, 8.9
"""Figure widths in inches, chosen so that text has the same size in half-width and full-width figures."""

MANY_POINTS = 2000
"""Number of points above which a scatter plot is rasterized, since each marker takes a hundred bytes."""

MANY_ROUNDS = 60
"""Maximum number of points or bars over rounds; above it, each is the mean of adjacent rounds."""

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
    """SVG text of a figure; ``figure`` is its source."""

    figure: Figure


class Sheet(Figure):
    """Figure that notebooks display even if pyplot, which normally registers this, has not been imported."""

    def _repr_png_(self) -> bytes:
        image = BytesIO()
        # Matplotlib's version would change the bytes.
        self.savefig(image, format="png", dpi=120, facecolor="white", metadata={"Software": None})
        return image.getvalue()


def as_svg(draw: Callable[_P, Figure]) -> Callable[_P, Drawing]:
    """Decorate a drawing function so that it uses the report's style and returns SVG."""

    @wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Drawing:
        with matplotlib.rc_context(_STYLE):
            figure = draw(*args, **kwargs)
            drawing = Drawing(_svg(figure))
        drawing.figure = figure
        return drawing

    return styled


def sheet(width: float, height: float, **layout: Any) -> Figure:
    """Return an empty figure of this size in inches, with automatic layout."""
    return Sheet(figsize=(width, height), **{"layout": "constrained", **layout})


def panel(height: float, width: float = HALF) -> tuple[Figure, Axes]:
    """Return a figure with a single pair of axes; sizes in inches."""
    figure = sheet(width, height)
    return figure, figure.add_subplot()


def over_rounds(axes: Axes, last: float) -> None:
    """Label the horizontal axis as rounds, from 0 to the last."""
    axes.set(xlabel="round", xlim=(0, max(last, 1)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))


def around(values: Sequence[float]) -> tuple[float, float]:
    """Return axis limits slightly beyond the values."""
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def percent(*each: Axis, bins: int = 6) -> None:
    """Format axes of fractions in percent."""
    for axis in each:
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.10g}%"))
        axis.set_major_locator(MaxNLocator(nbins=bins, steps=[1, 2, 2.5, 5, 10]))


def dots(axes: Axes, x: Array, y: Array, seen: NDArray[np.bool_]) -> None:
    """Draw a point for each client: circles for seen, diamonds for unseen."""
    for name, kind, marker in (("seen", seen, "o"), ("unseen", ~seen, "D")):
        if kind.any():
            axes.scatter(
                x[kind], y[kind], s=13, color=COLOURS[name], marker=marker, alpha=0.65, linewidths=0,
                label=GROUP_TITLES[name], rasterized=len(x) > MANY_POINTS,
            )  # fmt: skip
    axes.grid(visible=True, axis="both")


def framed(axes: Axes) -> None:
    """Frame the axes of a map: without grid or ticks."""
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set(visible=True, alpha=0.35)


def band(
    axes: Axes,
    x: ArrayLike,
    mean: ArrayLike,
    std: ArrayLike,
    colour: str,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[Array, Array]:
    """Draw mean ± standard deviation within limits; return the lower and the upper end."""
    low, high = (np.clip(np.asarray(mean) + sign * np.asarray(std), *limits) for sign in (-1, 1))
    axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    return low, high


def neighbours(values: Sequence[float], most: int = MANY_ROUNDS) -> Array:
    """Return means of adjacent values, grouped so that at most ``most`` values remain."""
    together = -(-len(values) // most)
    return np.array([np.mean(values[i : i + together]) for i in range(0, len(values), together)])


def inline(svg: str, name: str, palette: Mapping[str, str]) -> str:
    """Prepare an SVG for inclusion in a page: unique ids, the page's text colour, and a palette of CSS variables."""
    svg = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", svg).replace(INK, "currentColor")
    for variable, colour in {"page": PAPER, **palette}.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg


def point_url(k: int) -> str:
    """Return the URL that marks the k-th point of a figure until :func:`annotated` replaces it."""
    return f"point:{k}"


def annotated(svg: str, notes: Sequence[str], links: Mapping[int, str]) -> str:
    """Give each marked point its note, shown as a tooltip, and its link, if it has one."""

    def point(match: re.Match[str]) -> str:
        k = int(match[1])
        tag, link = ("a", f' href="#{links[k]}"') if k in links else ("g", "")
        return f"<{tag}{link}><title>{escape(notes[k])}</title>{match[2]}</{tag}>"

    return re.sub(r'<a xlink:href="point:(\d+)"[^>]*>(.*?)</a>', point, svg, flags=re.DOTALL)


def _svg(figure: Figure) -> str:
    """Return the figure as SVG without dates, metadata, prolog, or unreferenced ids."""
    out, dpi = StringIO(), figure.dpi
    figure.dpi = matplotlib.rcParams["savefig.dpi"]  # for rasterized elements
    canvas: Any = FigureCanvasSVG(figure)  # untyped; Figure.savefig would draw twice, with the same result
    canvas.print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    figure.dpi = dpi
    text = "<svg" + out.getvalue().partition("<svg")[2]
    referred = set(re.findall(r'#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referred else "", text)
    return re.sub(r"[ \t]+$", "", text.replace("'DejaVu Sans'", "system-ui, sans-serif"), flags=re.MULTILINE)


def class_label(name: str) -> str:
    """Return a class name as a label: symbols for invisible characters, and long names shortened."""
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥", "": "∅"}
    return signs.get(name, name if len(name) <= 16 else f"{name[:15]}…")


def shares(counts: Sequence[Sequence[int]]) -> Array:
    """Return rows scaled to sum to one, ``[r, c]``; a row of zeros stays zero."""
    values = np.asarray(counts, dtype=np.float64)
    return np.asarray(values / np.maximum(values.sum(1, keepdims=True), 1))


def heat(axes: Axes, share: Array, aspect: Literal["auto", "equal"] = "auto") -> AxesImage:
    """Draw shares as opacities, by their square roots, so that small ones are visible."""
    framed(axes)
    return axes.imshow(share, cmap=HEAT, norm=PowerNorm(0.5, 0, 1), interpolation="none", aspect=aspect)


def heat_bar(figure: Figure, image: AxesImage, beside: Axes | Sequence[Axes], label: str) -> None:
    """Add the colour scale of a heat map."""
    bar = figure.colorbar(image, ax=beside, aspect=18, pad=0.015, fraction=0.02, ticks=[0, 0.05, 0.25, 0.5, 1])
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    bar.set_label(label, fontsize=7.5)


def class_ticks(axis: Axis, names: Sequence[str], pitch: float) -> None:
    """Label the classes of a heat map with ``pitch`` points per cell: all of them, in two lines, or some."""
    places, size = list(range(len(names))), min(8.0, 0.95 * pitch)
    if pitch >= 5:
        axis.set_ticks(places, names, fontsize=size)
    elif max(len(name) for name in names) <= 2:
        size = min(6.5, 1.8 * pitch)
        axis.set_ticks(places[::2], names[::2], fontsize=size)
        axis.set_minor_locator(FixedLocator(places[1::2]))
        axis.set_minor_formatter(FixedFormatter(list(names[1::2])))
        axis.set_tick_params(which="minor", length=0, pad=3 + 1.3 * size, labelsize=size)
    else:
        some = places[:: math.ceil(6.5 / pitch)]
        axis.set_ticks(some, [names[i] for i in some], fontsize=6.5)
