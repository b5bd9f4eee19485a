"""The figures of a report: matplotlib to SVG that reads well on light and dark pages, the same bytes every time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from io import StringIO
from typing import Any, Literal, ParamSpec, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

INK = "#24292f"
"""Colour of text and axes; ``inline`` makes it the colour of the page's text."""

PAPER = "#fefefe"
"""Colour of text on dark ground; ``inline`` makes it the colour of the page."""

COLOURS = {"seen": "#0072b2", "unseen": "#d55e00", "global": "#009e73"}
"""Okabe and Ito's colours, told apart with any colour vision; ``inline`` makes them CSS variables of these names."""

HEAT = COLOURS["seen"]
"""Of heat maps, from transparent to opaque: so zero is the page itself, be it light or dark, and lightness is even in
the value on both. Pages brighten ``image`` of dark figures."""

CLASS_COLOURS = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
"""Petroff's ten accessible colours (arXiv 2107.02270)."""

OTHER = "#c9ccd1"
"""Of the classes that are too rare for a colour of their own."""

LABELS = {"seen": "seen clients", "unseen": "unseen clients", "global": "global model"}

THIRD, HALF, FULL = 2.8, 4.35, 8.9
"""Widths in inches, so that text has the same size in figures that share a line of the page and one that fills it."""

MANY_POINTS = 2000
"""From so many points on, a scatter plot is an image: markers cost a hundred bytes each."""

MANY_CLIENTS = 300
"""Columns of the picture of the partition at most; beyond, neighbours share one."""

MANY_ROUNDS = 60
"""Bars of the time over rounds at most."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedloom",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # where it goes is not worked out anew for each figure
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
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


def as_svg(draw: Callable[_P, Figure]) -> Callable[_P, str]:
    """Give a drawing function the style of a report and its text the form of an SVG."""

    @wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> str:
        with matplotlib.rc_context(_STYLE):
            return _svg(draw(*args, **kwargs))

    return styled


@as_svg
def accuracy(lines: Sequence[Mapping[str, Any]], over: Literal["rounds", "bytes", "steps"]) -> Figure:
    """Mean test accuracy over what it took; the band is ± one standard deviation over clients.

    Parameters
    ----------
    lines
        Evaluated rounds, ascending.
    over
        ``rounds``; ``bytes``: tensor bytes of all clients, both directions; ``steps``: local SGD steps of all clients.
    """
    x, label = _spent(lines, over)
    figure, axes = _panel(THIRD, 2.35, left=0.5)
    top = 0.0
    for name, colour in COLOURS.items():
        those = [i for i, line in enumerate(lines) if line[name] is not None]
        if not those:
            continue
        mean = np.array([lines[i][name]["accuracy_mean"] for i in those])
        std = np.array([lines[i][name]["accuracy_std"] for i in those])
        low, high = np.clip(mean - std, 0, 1), np.clip(mean + std, 0, 1)
        dash = "--" if name == "global" else "-"
        marker = "o" if len(those) <= 25 else None
        axes.fill_between(x[those], low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(x[those], mean, dash, color=colour, marker=marker, markersize=2.6, label=LABELS[name], clip_on=False)
        top = max(top, float(high.max()))
    axes.set(title=f"Over {over}" if over != "steps" else "Over client steps", xlabel=label)
    axes.set_xlim(0, max(float(x.max()), 1e-9) if len(x) > 1 else 1)
    axes.set_ylim(0, min(1.0, math.ceil(10 * top + 0.5) / 10))
    _percent_ticks(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=over == "rounds", steps=[1, 2, 2.5, 5, 10]))
    axes.legend(loc="lower right")
    return figure


@as_svg
def loss(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """Mean test loss over rounds, for data without classes.

    Parameters
    ----------
    lines
        Evaluated rounds, ascending.
    """
    x, label = _spent(lines, "rounds")
    figure, axes = _panel(HALF, 2.35, left=0.6)
    for name, colour in COLOURS.items():
        those = [i for i, line in enumerate(lines) if line[name] is not None]
        if those:
            mean = [lines[i][name]["loss_mean"] for i in those]
            axes.plot(x[those], mean, "--" if name == "global" else "-", color=colour, label=LABELS[name])
    axes.set(title="Over rounds", xlabel=label, ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.legend(loc="best")
    return figure


def spends(lines: Sequence[Mapping[str, Any]], over: Literal["bytes", "steps"]) -> bool:
    """Whether any of it was spent (a method without rounds sends nothing)."""
    return bool(_spent(lines, over)[0].max() > 0)


@as_svg
def distribution(rows: Sequence[Mapping[str, str]], reading: str) -> Figure:
    """Empirical distribution of the clients' test accuracy: how many clients are no better than a given accuracy.

    Parameters
    ----------
    rows
        Of ``clients.csv``.
    reading
        ``unmasked`` or ``masked``.
    """
    groups = (("seen", "personal", ("true",)), ("unseen", "personal", ("false",)), ("global", "global", _EVERYONE))
    curves = {
        name: np.sort(
            [float(row[f"{predictor}_accuracy_{reading}"]) for row in _measured(rows, predictor, reading, of)]
        )
        for name, predictor, of in groups
    }
    figure, axes = _panel(HALF, 3.3, left=0.62)
    lowest = min((float(curve[0]) for curve in curves.values() if len(curve)), default=0.0)
    for name, curve in curves.items():
        n = len(curve)
        if n == 0:
            continue
        decile = math.ceil(n / 10)
        x, y = np.array([lowest - 0.02, *curve, 1.0]), np.array([0.0, *(np.arange(n) + 1) / n, 1.0])
        dash = "--" if name == "global" else "-"
        axes.step(x, y, dash, where="post", color=COLOURS[name], label=f"{LABELS[name]} ({n})")
        axes.step(x[1 : decile + 1], y[1 : decile + 1], where="post", color=COLOURS[name], linewidth=3.6, alpha=0.75)
        axes.plot(x[1 : decile + 1 : decile], y[1 : decile + 1 : decile], "o", color=COLOURS[name], markersize=3.6)
    axes.set(title="Distribution", xlabel="test accuracy of the client", ylabel="clients at or below", ylim=(0, 1.01))
    axes.set_xlim(max(0.0, lowest - 0.02), 1.005)
    axes.grid(visible=True, axis="x")
    _percent_ticks(axes.xaxis)
    _percent_ticks(axes.yaxis)
    axes.legend(loc="best")
    return figure


@as_svg
def before_after(rows: Sequence[Mapping[str, str]], reading: str) -> Figure:
    """Test accuracy of the global model and of the client's own, one point per client.

    Parameters
    ----------
    rows
        Of ``clients.csv``.
    reading
        ``unmasked`` or ``masked``.
    """
    both = _measured(_measured(rows, "personal", reading), "global", reading)
    figure, axes = _panel(HALF, 3.3, left=0.62)
    values = {p: np.array([float(row[f"{p}_accuracy_{reading}"]) for row in both]) for p in ("global", "personal")}
    low = max(0.0, min((float(v.min()) for v in values.values() if len(v)), default=0.0) - 0.03)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.7, alpha=0.5)
    for name, mark, marker in (("seen", "true", "o"), ("unseen", "false", "D")):
        those = np.array([row["seen"] == mark for row in both], dtype=bool)
        if not those.any():
            continue
        x, y = values["global"][those], values["personal"][those]
        worst = np.argsort(y, kind="stable")[: math.ceil(len(y) / 10)]
        raster = len(both) > MANY_POINTS
        axes.scatter(
            x,
            y,
            s=13,
            color=COLOURS[name],
            marker=marker,
            alpha=0.65,
            linewidths=0,
            label=LABELS[name],
            rasterized=raster,
        )
        axes.scatter(
            x[worst],
            y[worst],
            s=26,
            facecolors="none",
            edgecolors=INK,
            marker=marker,
            linewidths=0.8,
            rasterized=raster,
        )
    better, worse = (
        int((values["personal"] > values["global"]).sum()),
        int((values["personal"] < values["global"]).sum()),
    )
    axes.text(0.02, 0.98, f"own model better: {better}", transform=axes.transAxes, va="top", fontsize=8)
    axes.text(0.98, 0.02, f"global model better: {worse}", transform=axes.transAxes, ha="right", fontsize=8)
    handles, labels = axes.get_legend_handles_labels()
    ring = Line2D([], [], linestyle="", marker="o", markersize=5, color="none", markeredgecolor=INK)
    axes.legend([*handles, ring], [*labels, "worst decile"], loc="lower right", bbox_to_anchor=(1, 0.06))
    axes.set(title="Before and after personalization", xlabel="global model", ylabel="own model")
    axes.set(xlim=(low, 1.015), ylim=(low, 1.015))
    axes.grid(visible=True, axis="both")
    for axis in (axes.xaxis, axes.yaxis):
        _percent_ticks(axis)
    return figure


def shares(counts: Sequence[Sequence[int]]) -> Array:
    """Rows that sum to one, ``[r, c]``; a row of zeros stays."""
    values = np.asarray(counts, dtype=np.float64)
    return np.asarray(values / np.maximum(values.sum(1, keepdims=True), 1))


@as_svg
def confusion(counts: Sequence[Sequence[int]], class_names: Sequence[str], title: str) -> Figure:
    """Which class is taken for which: a row per class, in percent of its examples.

    Parameters
    ----------
    counts
        ``C x C``: examples of the class of the row that were taken for the class of the column.
    class_names
        C names.
    """
    share, names = shares(counts), [shown(name) for name in class_names]
    c = len(names)
    width = confusion_width(class_names)
    numbered = c <= 12
    longest = max(len(name) for name in names)
    left = 0.32 + (0.058 * longest if longest > 2 else 0.2)
    bottom = 0.34 + (0.047 * longest if longest > 2 else 0.2)
    side = width - left - (0.08 if numbered else 0.52)
    figure, axes = _panel(width, side + bottom + 0.3, left=left, right=width - left - side, bottom=bottom)
    _heat(axes, np.sqrt(share), (-0.5, c - 0.5, c - 0.5, -0.5))
    pitch = 72 * side / c
    _class_ticks(axes.yaxis, names, pitch)
    _class_ticks(axes.xaxis, names, pitch)
    if longest > 2:
        slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if c <= 12 else {"rotation": 90}
        for label in axes.get_xticklabels():
            label.set(**slanted)
    axes.set(title=title, xlabel="predicted", ylabel="class")
    if numbered:
        for i, row in enumerate(share):
            for j, value in enumerate(row):
                if value >= 0.005:
                    colour = PAPER if value > 0.5 else INK
                    axes.text(j, i, f"{100 * value:.0f}", color=colour, ha="center", va="center", fontsize=7.5)
    else:
        _heat_bar(figure, (width - 0.42) / width, axes)
    return figure


def confusion_width(class_names: Sequence[str]) -> float:
    """Half of the page, or all of it where long names of many classes would not fit."""
    return FULL if len(class_names) > 30 and max(len(shown(name)) for name in class_names) > 2 else HALF


@as_svg
def partition(mixes: Mapping[str, Sequence[Sequence[int]]], class_names: Sequence[str]) -> Figure:
    """Who has what: a column per client with the mix of its classes, and above it how many examples it trains on.

    Clients are ordered by their most frequent class and its share. Beyond :data:`MANY_CLIENTS`, neighbours share a
    column, which shows their means.

    Parameters
    ----------
    mixes
        For ``seen`` and ``unseen``, training examples of each class, a row per client.
    class_names
        C names.
    """
    names, c = [shown(name) for name in class_names], len(class_names)
    groups = {name: np.asarray(rows, dtype=np.float64) for name, rows in mixes.items() if len(rows)}
    together = math.ceil(sum(len(rows) for rows in groups.values()) / MANY_CLIENTS)
    columns = {name: _neighbours(rows, together) for name, rows in groups.items()}
    total = sum(len(sizes) for sizes, _ in columns.values())
    longest = max(len(name) for name in names)
    left = 0.32 + (0.058 * min(longest, 16) if longest > 2 else 0.25)
    gap, right, bottom = 0.12, 0.52, 0.26
    heat = min(max(0.165 * c, 0.8), 4.6)
    unequal = len({float(size) for rows in groups.values() for size in rows.sum(1)}) > 1
    above = 0.68 if unequal else 0.0
    height = bottom + heat + above + 0.3
    figure = Figure(figsize=(FULL, height))
    room = FULL - left - right - gap * (len(columns) - 1)
    largest = max(float(sizes.max()) for sizes, _ in columns.values())
    x = left
    for name, (sizes, mix) in columns.items():
        width = room * len(sizes) / total
        lower = figure.add_axes((x / FULL, bottom / height, width / FULL, heat / height))
        _heat(lower, np.sqrt(mix.T), (-0.5, len(sizes) - 0.5, c - 0.5, -0.5))
        lower.set_xticks([])
        lower.set_xlabel("clients")
        top = lower
        if unequal:
            top = figure.add_axes((x / FULL, (bottom + heat + 0.08) / height, width / FULL, 0.6 / height))
            edges = np.arange(len(sizes) + 1) - 0.5
            top.fill_between(edges, [*sizes, sizes[-1]], step="post", color=COLOURS[name], alpha=0.6, linewidth=0)
            top.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(0, 1.05 * largest))
            top.tick_params(labelbottom=False, bottom=False)
            top.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
        top.set_title(f"{len(groups[name])} {name}")
        if x == left:
            _class_ticks(lower.yaxis, names, 72 * heat / c)
            if unequal:
                top.set_ylabel("examples")
        else:
            lower.set_yticks([])
            top.tick_params(labelleft=False, left=False)
        x += width + gap
    _heat_bar(figure, (FULL - 0.42) / FULL, figure.axes[0])
    return figure


@as_svg
def descriptor_map(document: Mapping[str, Any], class_names: Sequence[str]) -> Figure:
    """Descriptors of the last evaluated round on their two principal axes.

    Parameters
    ----------
    document
        Content of ``descriptors.json``.
    class_names
        C names.
    """
    last, clients = document["maps"][-1], document["clients"]
    legend, colours = _class_colours(clients["class"], clients["seen"], class_names)
    lines = math.ceil(len(legend) / 5)
    figure, axes = _panel(HALF, 3.35 + 0.17 * lines, left=0.2, bottom=0.42 + 0.17 * lines)
    _points(axes, last, clients["seen"], colours, size=13, raster=len(colours) > MANY_POINTS)
    shares = [f"{share:.0%}" for share in last["explained"]]
    axes.set(title=f"Descriptors, round {last['round']}", xlabel=f"first axis, {shares[0]} of the variance")
    axes.set_ylabel(f"second axis, {shares[1]}")
    axes.set_aspect("equal", adjustable="datalim")
    figure.legend(
        handles=legend,
        loc="lower left",
        ncols=5,
        bbox_to_anchor=(0, 0),
        columnspacing=0.9,
        handletextpad=0,
        fontsize=7.5,
    )
    return figure


@as_svg
def descriptor_maps(document: Mapping[str, Any]) -> Figure:
    """Small maps of the descriptors over training, on the axes of the last and on one scale.

    Parameters
    ----------
    document
        Content of ``descriptors.json``.
    """
    maps, clients = document["maps"], document["clients"]
    _, colours = _class_colours(clients["class"], clients["seen"], ())
    points = np.array([point for each in maps for point in each["xy"] if point is not None], dtype=np.float64)
    reach = 1.06 * np.maximum(np.abs(points).max(0), 1e-12) if len(points) else np.ones(2)
    gap, cells = 0.14, max(4, len(maps))
    width = (FULL - gap * (cells - 1)) / cells
    height = 0.9 * width + 0.5
    figure = Figure(figsize=(FULL, height))
    for i, each in enumerate(maps):
        axes = figure.add_axes((i * (width + gap) / FULL, 0.22 / height, width / FULL, 0.9 * width / height))
        _points(axes, each, clients["seen"], colours, size=6, raster=len(points) > MANY_POINTS)
        axes.set(title=f"Round {each['round']}", xlim=(-reach[0], reach[0]), ylim=(-reach[1], reach[1]))
        axes.set_xlabel(f"{sum(each['explained']):.0%} of the variance", fontsize=7.5)
    return figure


@as_svg
def correlation(document: Mapping[str, Any]) -> Figure:
    """Rank correlation of descriptor distances with distances of class mixes, over rounds.

    Parameters
    ----------
    document
        Content of ``descriptors.json``.
    """
    figure, axes = _panel(HALF, 3.35, left=0.56)
    columns = (document["round"], document["spearman"], document["spearman_std"])
    known = [(r, m, s or 0.0) for r, m, s in zip(*columns, strict=True) if m is not None]
    axes.set(title="Rank correlation with the true class mix", xlabel="round", ylabel="Spearman, unseen clients")
    axes.set_xlim(0, max([*document["round"], 1]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if not known:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no unseen client has a coefficient", transform=axes.transAxes, ha="center", alpha=0.7)
        return figure
    rounds, mean, std = (np.array(column, dtype=np.float64) for column in zip(*known, strict=True))
    low, high = np.clip(mean - std, -1, 1), np.clip(mean + std, -1, 1)
    axes.fill_between(rounds, low, high, color=COLOURS["unseen"], alpha=0.13, linewidth=0)
    axes.plot(rounds, mean, color=COLOURS["unseen"], marker="o", markersize=2.6, clip_on=False)
    axes.axhline(mean[0], color=INK, linewidth=0.7, linestyle=":", alpha=0.6)
    axes.set_ylim(min(0.0, math.floor(10 * float(low.min())) / 10), 1)
    return figure


def _points(
    axes: Axes, each: Mapping[str, Any], seen: Sequence[bool], colours: Sequence[str], *, size: float, raster: bool
) -> None:
    """The clients of a map: circles for seen ones, framed diamonds for unseen ones."""
    for kind, marker, area in ((True, "o", size), (False, "D", 1.5 * size)):
        those = [k for k, point in enumerate(each["xy"]) if point is not None and seen[k] is kind]
        xy = np.array([each["xy"][k] for k in those], dtype=np.float64).reshape(-1, 2)
        axes.scatter(
            xy[:, 0],
            xy[:, 1],
            c=[colours[k] for k in those],
            marker=marker,
            s=area,
            alpha=0.9,
            linewidths=0 if kind else 0.05 * size,
            edgecolors="none" if kind else INK,
            rasterized=raster,
        )
    axes.grid(visible=False)
    axes.tick_params(labelbottom=False, labelleft=False, length=0)
    for spine in axes.spines.values():
        spine.set(visible=True, alpha=0.35)


@as_svg
def phases_over_rounds(rounds: Sequence[int], phases: Sequence[Mapping[str, float]]) -> Figure:
    """Seconds of each phase, stacked, over rounds; beyond :data:`MANY_ROUNDS`, a bar is the mean of neighbours.

    Parameters
    ----------
    rounds
        Their numbers, ascending.
    phases
        ``{phase: seconds}``, one per round.
    """
    names = phase_names(phases)
    seconds = np.array([[phase.get(name, 0.0) for name in names] for phase in phases])
    together = math.ceil(len(rounds) / MANY_ROUNDS)
    parts = range(0, len(rounds), together)
    means = np.array([seconds[i : i + together].mean(0) for i in parts])
    edges = np.array([*(rounds[i] for i in parts), rounds[-1] + 1], dtype=np.float64) - 0.5
    figure, axes = _panel(HALF, 2.5, left=0.5)
    below = np.zeros(len(means))
    for k, name in enumerate(names):
        axes.stairs(below + means[:, k], edges, baseline=below, fill=True, color=_phase_colour(k), label=name)
        below = below + means[:, k]
    axes.set(title="Seconds per round", xlabel="round", xlim=(edges[0], edges[-1]))
    axes.set_ylim(0, 1.08 * max(float(below.max()), 1e-9))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    return figure


@as_svg
def phases_total(phases: Sequence[Mapping[str, float]], others: Mapping[str, float]) -> Figure:
    """Seconds of each phase over all rounds, in the colours of :func:`phases_over_rounds`, and what went elsewhere.

    Parameters
    ----------
    phases
        ``{phase: seconds}``, one per round.
    others
        Seconds that belong to no phase, by what they went to.
    """
    names = phase_names(phases)
    seconds = [sum(phase.get(name, 0.0) for phase in phases) for name in names]
    colours = [_phase_colour(k) for k in range(len(names))] + [OTHER] * len(others)
    names, seconds = [*names, *others], [*seconds, *others.values()]
    total = sum(seconds)
    left = 0.2 + 0.061 * max(len(name) for name in names)
    figure, axes = _panel(HALF, max(2.5, 0.85 + 0.22 * len(names)), left=left)
    bars = axes.barh(names, seconds, height=0.66, color=colours)
    labels = [f"{_clock(s)} ({s / total:.0%})" if total else _clock(s) for s in seconds]
    axes.bar_label(bars, labels, padding=3, fontsize=8, color=INK)
    axes.set_ylim(max(len(names), 5) - 0.5, -0.5)
    axes.set_xlim(0, max([*seconds, 1e-9]) * (1 + 1.25 / (HALF - left - 0.12 - 1.25)))
    axes.set(title="Total")
    axes.grid(visible=False)
    axes.tick_params(axis="both", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


def phase_names(phases: Sequence[Mapping[str, float]]) -> list[str]:
    """In the order in which they first occur."""
    return list(dict.fromkeys(name for phase in phases for name in phase))


def inline(svg: str, name: str) -> str:
    """Make an SVG part of a page: ids of its own, the page's text colour, and its palette from CSS variables."""
    svg = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor").replace(PAPER, "var(--page)")
    for group, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{group})")
    return svg


_EVERYONE = ("true", "false")


def _measured(
    rows: Sequence[Mapping[str, str]], predictor: str, reading: str, of: Sequence[str] = _EVERYONE
) -> list[Mapping[str, str]]:
    """The clients, of those whose ``seen`` is one of ``of``, that have an accuracy."""
    return [row for row in rows if row.get(f"{predictor}_accuracy_{reading}") and row["seen"] in of]


def _spent(lines: Sequence[Mapping[str, Any]], over: str) -> tuple[Array, str]:
    """What each evaluated round had taken, and the label of the axis."""
    if over == "rounds":
        return np.array([float(line["round"]) for line in lines]), "round"
    if over == "steps":
        steps = np.array([float(line["client_steps"]) for line in lines])
        return _scaled(steps, "steps of all clients", ("", "thousands", "millions", "billions"))
    spent = [line["communication"] for line in lines]
    payload = np.array([float(each["payload_up"]) + float(each["payload_down"]) for each in spent])
    return _scaled(payload, "tensors sent, all clients", ("B", "kB", "MB", "GB", "TB"))


def _scaled(values: Array, label: str, units: Sequence[str]) -> tuple[Array, str]:
    """Values in the largest unit in which some reach one."""
    power = 0
    while power + 1 < len(units) and values.max() >= 1000 ** (power + 1):
        power += 1
    return values / 1000**power, f"{label} ({units[power]})" if units[power] else label


def _neighbours(rows: Array, together: int) -> tuple[Array, Array]:
    """Clients ``[n, C]`` ordered by most frequent class and its share, ``together`` to a column: sizes, mixes."""
    sizes, mix = rows.sum(1), shares(rows.tolist())
    main = mix.argmax(1)
    order = np.lexsort((np.arange(len(rows)), -mix[np.arange(len(rows)), main], main))
    starts = range(0, len(rows), together)
    groups = [order[i : i + together] for i in starts]
    return np.array([sizes[g].mean() for g in groups]), np.array([mix[g].mean(0) for g in groups])


def _class_colours(
    classes: Sequence[int], seen: Sequence[bool], class_names: Sequence[str]
) -> tuple[list[Line2D], list[str]]:
    """Legend, and the colour of each client: of its class if that is one of the most frequent, else grey."""

    def mark(label: str, colour: str, marker: str = "o") -> Line2D:
        edge = INK if marker == "D" else "none"
        return Line2D(
            [], [], linestyle="", marker=marker, markersize=4.5, color=colour, markeredgecolor=edge, label=label
        )

    present = Counter(classes)
    room = len(CLASS_COLOURS) if len(present) <= len(CLASS_COLOURS) else len(CLASS_COLOURS) - 1
    frequent = sorted(sorted(present, key=lambda k: (-present[k], k))[:room])
    # A class keeps its colour whatever the others are, where the classes are few.
    fixed = max(present, default=0) < len(CLASS_COLOURS)
    colours = {k: CLASS_COLOURS[k if fixed else i] for i, k in enumerate(frequent)}
    legend = [mark(shown(class_names[k]), colours[k]) for k in frequent] if class_names else []
    if len(present) > len(frequent):
        legend.append(mark("another class", OTHER))
    legend += [mark("seen", INK)] if any(seen) else []
    legend += [mark("unseen", OTHER, "D")] if not all(seen) else []
    return legend, [colours.get(k, OTHER) for k in classes]


def _panel(
    width: float, height: float, *, left: float, right: float = 0.12, bottom: float = 0.45, top: float = 0.3
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; inches."""
    figure = Figure(figsize=(width, height))
    room = (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    return figure, figure.add_axes(room)


def _percent_ticks(axis: Axis) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))


def _heat(axes: Axes, value: Array, extent: tuple[float, float, float, float]) -> None:
    """Draw values between 0 and 1 as opacities."""
    image = np.empty((*value.shape, 4))
    image[..., :3], image[..., 3] = to_rgb(HEAT), value
    axes.imshow(image, interpolation="none", aspect="auto", extent=extent)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set(visible=True, alpha=0.35)


def _heat_bar(figure: Figure, x: float, beside: Axes) -> None:
    """The scale of a heat map of square roots of shares."""
    room = beside.get_position()
    width, height = figure.get_size_inches()
    tall = min(room.height, 1.8 / height)
    axes = figure.add_axes((x, room.y1 - tall, 0.09 / width, tall))
    _heat(axes, np.linspace(1, 0, 64)[:, None], (0, 1, 0, 1))
    axes.set_xticks([])
    axes.yaxis.tick_right()
    marks = (0.0, 0.05, 0.25, 0.5, 1.0)
    axes.set_yticks([math.sqrt(mark) for mark in marks], [f"{mark:.0%}" for mark in marks], fontsize=7)


def _class_ticks(axis: Axis, names: Sequence[str], pitch: float) -> None:
    """Name the classes of a heat map whose cells are ``pitch`` points apart: all of them, in two lines, or some."""
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


def shown(name: str) -> str:
    """A class's name as a label: of characters that cannot be seen their sign, of long names the beginning."""
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥", "": "∅"}
    return signs.get(name, name if len(name) <= 16 else f"{name[:15]}…")


def _phase_colour(k: int) -> str:
    return CLASS_COLOURS[k % len(CLASS_COLOURS)]


def _clock(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


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
