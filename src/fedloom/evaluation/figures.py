"""The figures of a report: matplotlib to SVG that reads well on light and dark pages, the same bytes every time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

INK = "#24292f"
"""Colour of text and axes; ``inline`` makes it the colour of the page's text."""

COLOURS = {"seen": "#0072b2", "unseen": "#d55e00", "global": "#009e73"}
"""Okabe and Ito's colours, told apart with any colour vision; ``inline`` makes them CSS variables of these names."""

CLASS_COLOURS = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
"""Petroff's ten accessible colours (arXiv 2107.02270); they repeat after ten classes."""

LABELS = {"seen": "seen clients", "unseen": "unseen clients", "global": "global model, all clients"}

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedloom",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
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
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def accuracy(lines: Sequence[Mapping[str, Any]]) -> str:
    """Mean test accuracy over rounds and over communication; the band is ± one standard deviation over clients.

    Parameters
    ----------
    lines
        Evaluated rounds, ascending.

    Returns
    -------
    str
        SVG.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 3.2), layout=ConstrainedLayoutEngine(wspace=0.06))
        left, right = figure.subplots(1, 2, sharey=True)
        for name, colour in COLOURS.items():
            measured = [line for line in lines if line[name] is not None]
            if not measured:
                continue
            mean = [line[name]["accuracy_mean"] for line in measured]
            std = [line[name]["accuracy_std"] for line in measured]
            low = [max(0.0, m - s) for m, s in zip(mean, std, strict=True)]
            high = [min(1.0, m + s) for m, s in zip(mean, std, strict=True)]
            dash = "--" if name == "global" else "-"
            rounds = [line["round"] for line in measured]
            traffic = [_payload(line) / 1e9 for line in measured]
            for axes, x in ((left, rounds), (right, traffic)):
                axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
                axes.plot(x, mean, dash, color=colour, marker="o", markersize=3, label=LABELS[name], clip_on=False)
        left.set(title="Accuracy over rounds", xlabel="round", ylabel="mean test accuracy", ylim=(0, 1))
        left.yaxis.set_major_formatter(PercentFormatter(1.0))
        left.xaxis.set_major_locator(_whole_rounds())
        right.set(title="Accuracy over communication", xlabel="tensor bytes sent and received by all clients (GB)")
        left.set_xlim(0, max([line["round"] for line in lines] + [1]))
        right.set_xlim(0, max([_payload(line) / 1e9 for line in lines] + [1e-6]))
        _legend_below(figure, left)
        return _svg(figure)


def distribution(rows: Sequence[Mapping[str, str]], reading: str) -> str:
    """Empirical distribution of the clients' test accuracy: how many clients are no better than a given accuracy.

    Parameters
    ----------
    rows
        Of ``clients.csv``.
    reading
        ``unmasked`` or ``masked``.
    """

    def values(predictor: str, marks: tuple[str, ...]) -> list[float]:
        column = f"{predictor}_accuracy_{reading}"
        return sorted(float(row[column]) for row in rows if row.get(column) and row["seen"] in marks)

    curves = {
        "seen": values("personal", ("true",)),
        "unseen": values("personal", ("false",)),
        "global": values("global", ("true", "false")),
    }
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 3.0), layout="constrained")
        axes = figure.subplots()
        lowest = min((curve[0] for curve in curves.values() if curve), default=0.0)
        for name, curve in curves.items():
            if not curve:
                continue
            x = [min(lowest, 1.0) - 0.02, *curve, 1.0]
            y = [0.0, *((i + 1) / len(curve) for i in range(len(curve))), 1.0]
            dash = "--" if name == "global" else "-"
            axes.step(x, y, dash, where="post", color=COLOURS[name], label=f"{LABELS[name]} ({len(curve)})")
        axes.set(xlabel="test accuracy of the client", ylabel="clients at or below", ylim=(0, 1.01))
        axes.set_xlim(max(0.0, lowest - 0.02), 1.005)
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        _legend_below(figure, axes)
        return _svg(figure)


def descriptors(document: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """Map of the descriptors (two principal components) beside their rank correlation over rounds.

    Parameters
    ----------
    document
        Content of ``descriptors.json``.
    class_names
        C names.
    """
    points = document["map"]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        for seen, marker, size in ((True, "o", 20), (False, "D", 34)):
            those = [i for i, mark in enumerate(points["seen"]) if mark is seen]
            left.scatter(
                [points["xy"][i][0] for i in those],
                [points["xy"][i][1] for i in those],
                c=[CLASS_COLOURS[points["class"][i] % len(CLASS_COLOURS)] for i in those],
                marker=marker,
                s=size,
                linewidths=0 if seen else 1.1,
                edgecolors="none" if seen else INK,
                alpha=0.9,
            )
        parts = [f"component {k + 1} ({share:.0%} of variance)" for k, share in enumerate(points["explained"])]
        left.set(title=f"Descriptors at round {points['round']}", xlabel=parts[0], ylabel=parts[1])
        left.grid(visible=False)
        left.tick_params(labelbottom=False, labelleft=False, length=0)
        _class_legend(figure, sorted(set(points["class"])), class_names)

        known = [(r, m, s) for r, m, s in _spearman(document) if m is not None]
        if known:
            rounds, mean, _ = zip(*known, strict=True)
            low, high = ([m - s for _, m, s in known], [m + s for _, m, s in known])
            right.fill_between(rounds, low, high, color=COLOURS["unseen"], alpha=0.13, linewidth=0)
            right.plot(rounds, mean, color=COLOURS["unseen"], marker="o", markersize=3, clip_on=False)
            right.axhline(mean[0], color=INK, linewidth=0.7, linestyle=":", alpha=0.6)
            right.set_ylim(min(0.0, *low) - 0.02 if min(low) < 0 else 0.0, 1)
        right.set(title="Rank correlation with the true class mix", xlabel="round", ylabel="Spearman, unseen clients")
        right.set_xlim(0, max([*document["round"], 1]))
        right.xaxis.set_major_locator(_whole_rounds())
        return _svg(figure)


def phases(rounds: Sequence[Mapping[str, float]]) -> str:
    """Mean seconds per round in each phase, in the order in which the phases first occur.

    Parameters
    ----------
    rounds
        ``{phase: seconds}``, one per round.
    """
    names = list(dict.fromkeys(name for phase in rounds for name in phase))
    seconds = [sum(phase.get(name, 0.0) for phase in rounds) / len(rounds) for name in names]
    total = sum(seconds)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 0.7 + 0.3 * len(names)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(names, seconds, height=0.62, color=COLOURS["seen"])
        labels = [f"{_seconds(s)}  ({s / total:.0%})" if total else _seconds(s) for s in seconds]
        axes.bar_label(bars, labels, padding=4, fontsize=8.5, color=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, max([*seconds, 1e-9]) * 1.2)
        axes.set_xlabel("mean seconds per round")
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        return _svg(figure)


def inline(svg: str) -> str:
    """Make an SVG part of a page: it takes the page's text colour, and its palette from CSS variables."""
    svg = svg.replace(INK, "currentColor")
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def _payload(line: Mapping[str, Any]) -> int:
    """Tensor bytes, both directions."""
    return int(line["communication"]["payload_up"]) + int(line["communication"]["payload_down"])


def _spearman(document: Mapping[str, Any]) -> list[tuple[int, float | None, float]]:
    columns = (document["round"], document["spearman"], document["spearman_std"])
    return [(r, m, s or 0.0) for r, m, s in zip(*columns, strict=True)]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def _whole_rounds() -> MaxNLocator:
    return MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10])


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))


def _class_legend(figure: Figure, classes: Sequence[int], names: Sequence[str]) -> None:
    def mark(label: str, colour: str, marker: str = "o", edge: str = "none") -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, markersize=5, color=colour, markeredgecolor=edge, label=label
        )

    shown = [
        mark(str(names[c]) if c < len(names) else str(c), CLASS_COLOURS[c % len(CLASS_COLOURS)])
        for c in classes[: 2 * len(CLASS_COLOURS)]
    ]
    kinds = [mark("seen", INK), mark("unseen", INK, "D")]
    figure.legend(handles=[*shown, *kinds], loc="outside lower center", ncols=6, columnspacing=1.2, handletextpad=0.2)


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
