"""Figures of a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from fedloom.reporting.drawing import (
    COLOURS,
    FULL,
    HALF,
    INK,
    LABELS,
    MANY_POINTS,
    MANY_ROUNDS,
    OTHER,
    PAPER,
    Array,
    as_svg,
    dots,
    neighbours,
    over_rounds,
    panel,
    percent,
    point_url,
    sheet,
)

HEAT = LinearSegmentedColormap.from_list("heat", [to_rgba(COLOURS["seen"], opacity) for opacity in (0, 1)])
"""Colour map of heat maps, from transparent to opaque: zero shows the page, light or dark, and lightness varies
evenly with the value on both. Pages brighten ``image`` elements of dark figures.
"""

CLASS_COLOURS = (
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
"""Petroff's ten accessible colours (arXiv 2107.02270)."""

MANY_CLIENTS = 300
"""Maximum number of columns in the partition figure; above it, neighbouring clients share a column."""

_EVERYONE = ("true", "false")


@as_svg
def learning_curve(lines: Sequence[Mapping[str, Any]], what: Literal["accuracy", "loss"]) -> Figure:
    """Draw mean test accuracy (or loss) over rounds, with a band of ± one standard deviation over clients.

    Parameters
    ----------
    lines
        Evaluated rounds, in ascending order.
    what
        ``loss`` if the data have no classes; it has no band.
    """
    figure, axes = panel(2.6)
    top = 0.0
    for name, colour in COLOURS.items():
        those = [line for line in lines if line[name] is not None]
        if not those:
            continue
        x, mean = [line["round"] for line in those], np.array([line[name][f"{what}_mean"] for line in those])
        if what == "accuracy":
            std = np.array([line[name]["accuracy_std"] for line in those])
            low, high = np.clip(mean - std, 0, 1), np.clip(mean + std, 0, 1)
            axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
            top = max(top, float(high.max()))
        dash, marker = "--" if name == "global" else "-", "o" if len(those) <= 25 else None
        axes.plot(x, mean, dash, color=colour, marker=marker, markersize=2.6, label=LABELS[name], clip_on=False)
    axes.set(title=f"Test {what}", ylabel=f"mean over clients{'' if what == 'accuracy' else ', nats'}")
    over_rounds(axes, lines[-1]["round"])
    if what == "accuracy":
        axes.set_ylim(0, min(1.0, math.ceil(10 * top + 0.5) / 10))
        percent(axes.yaxis)
    axes.legend(loc="lower right" if what == "accuracy" else "best")
    return figure


@as_svg
def training_loss(losses: Mapping[int, float]) -> Figure:
    """Draw training loss over rounds; beyond :data:`MANY_ROUNDS`, the line shows means of adjacent rounds.

    Parameters
    ----------
    losses
        Loss by round, in ascending order.
    """
    figure, axes = panel(2.6)
    if len(losses) > MANY_ROUNDS:
        axes.plot([*losses], [*losses.values()], color=COLOURS["seen"], linewidth=0.6, alpha=0.3)
    marker = "o" if len(losses) <= 25 else None
    means = neighbours([*losses.values()])
    axes.plot(neighbours([*losses]), means, color=COLOURS["seen"], marker=marker, markersize=2.6)
    axes.set(title="Training loss", ylabel="mean over the cohort")
    over_rounds(axes, max(losses))
    if min(losses.values()) >= 0:
        axes.set_ylim(0, 1.08 * max(float(means.max()), 1e-9))
    return figure


@as_svg
def distribution(rows: Sequence[Mapping[str, str]], reading: str) -> Figure:
    """Draw the empirical distribution of clients' test accuracy: the share of clients at or below each value.

    Parameters
    ----------
    rows
        Rows of ``clients.csv``.
    reading
        ``unmasked`` or ``masked``.
    """
    groups = (("seen", "personal", ("true",)), ("unseen", "personal", ("false",)), ("global", "global", _EVERYONE))
    curves = {name: np.sort(_accuracies(_measured(rows, p, reading, of), p, reading)) for name, p, of in groups}
    figure, axes = panel(3.3)
    lowest = min((float(curve[0]) for curve in curves.values() if len(curve)), default=0.0)
    for name, curve in curves.items():
        n = len(curve)
        if n == 0:
            continue
        foot = slice(1, math.ceil(n / 10) + 1)
        x, y = np.array([lowest - 0.02, *curve, 1.0]), np.array([0.0, *(np.arange(n) + 1) / n, 1.0])
        dash, colour = "--" if name == "global" else "-", COLOURS[name]
        axes.step(x, y, dash, where="post", color=colour, label=f"{LABELS[name]} ({n})")
        axes.step(x[foot], y[foot], where="post", color=colour, linewidth=3.6, alpha=0.75)
        axes.plot(x[foot][-1:], y[foot][-1:], "o", color=colour, markersize=3.6)
    axes.set(title="Distribution over clients", xlabel="test accuracy", ylabel="share of clients at or below")
    axes.set(xlim=(max(0.0, lowest - 0.02), 1.005), ylim=(0, 1.01))
    axes.grid(visible=True, axis="x")
    percent(axes.xaxis, axes.yaxis)
    axes.legend(loc="best")
    return figure


@as_svg
def before_after(rows: Sequence[Mapping[str, str]], reading: str) -> Figure:
    """Draw test accuracy of the global model against that of the personalized model, one point per client.

    Parameters
    ----------
    rows
        Rows of ``clients.csv``.
    reading
        ``unmasked`` or ``masked``.
    """
    both = _measured(_measured(rows, "personal", reading), "global", reading)
    figure, axes = panel(3.3)
    x, y = (_accuracies(both, predictor, reading) for predictor in ("global", "personal"))
    seen = np.array([row["seen"] == "true" for row in both], dtype=bool)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.7, alpha=0.5)
    dots(axes, x, y, seen)
    for kind, marker in ((seen, "o"), (~seen, "D")):
        worst = np.flatnonzero(kind)[np.argsort(y[kind], kind="stable")[: math.ceil(kind.sum() / 10)]]
        axes.scatter(
            x[worst], y[worst], s=26, marker=marker, facecolors="none", edgecolors=INK, linewidths=0.8,
            rasterized=len(both) > MANY_POINTS,
        )  # fmt: skip
    axes.text(0.02, 0.98, f"personalized better: {(y > x).sum()}", transform=axes.transAxes, va="top")
    axes.text(0.98, 0.02, f"global better: {(y < x).sum()}", transform=axes.transAxes, ha="right")
    handles, labels = axes.get_legend_handles_labels()
    circle = Line2D([], [], linestyle="", marker="o", markersize=5, color="none", markeredgecolor=INK)
    axes.legend([*handles, circle], [*labels, "worst decile"], loc="lower right", bbox_to_anchor=(1, 0.06))
    axes.set(title="Gain by personalization", xlabel="accuracy of the global model")
    axes.set_ylabel("accuracy of the personalized model")
    low = max(0.0, min((float(v.min()) for v in (x, y) if len(v)), default=0.0) - 0.03)
    axes.set(xlim=(low, 1.015), ylim=(low, 1.015))
    percent(axes.xaxis, axes.yaxis)
    return figure


def shares(counts: Sequence[Sequence[int]]) -> Array:
    """Return rows scaled to sum to one, ``[r, c]``; a row of zeros stays zero."""
    values = np.asarray(counts, dtype=np.float64)
    return np.asarray(values / np.maximum(values.sum(1, keepdims=True), 1))


@as_svg
def confusion(counts: Sequence[Sequence[int]], class_names: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix: a row per true class, in percent of its examples.

    Parameters
    ----------
    counts
        ``C x C``: numbers of examples by true class (row) and predicted class (column).
    class_names
        Names of the C classes.
    """
    share, names = shares(counts), [shown(name) for name in class_names]
    c, longest, width = len(names), max(map(len, names)), FULL if confusion_is_wide(class_names) else HALF
    figure = sheet(width, width, layout="compressed")
    axes = figure.add_subplot()
    image = _heat(axes, share, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        _class_ticks(axis, names, 72 * 0.8 * width / c)
    if longest > 2:
        slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if c <= 12 else {"rotation": 90}
        for label in axes.get_xticklabels():
            label.set(**slanted)
    axes.set(title=title, xlabel="predicted class", ylabel="true class")
    if c > 12:
        _heat_bar(figure, image, axes, "share of the true class")
        return figure
    for i, row in enumerate(share):
        for j, value in enumerate(row):
            if value >= 0.005:
                colour = PAPER if value > 0.5 else INK
                axes.text(j, i, f"{100 * value:.0f}", color=colour, ha="center", va="center", fontsize=7.5)
    return figure


def confusion_is_wide(class_names: Sequence[str]) -> bool:
    """Return whether the matrix needs the full page width: many classes with long names."""
    return len(class_names) > 30 and max(len(shown(name)) for name in class_names) > 2


@as_svg
def partition(mixes: Mapping[str, Sequence[Sequence[int]]], class_names: Sequence[str]) -> Figure:
    """Draw the partition: a column per client with its class proportions, and its number of training examples above.

    Clients are ordered by their most frequent class and its share. Beyond :data:`MANY_CLIENTS`, neighbouring clients
    share a column, which shows their means.

    Parameters
    ----------
    mixes
        Training examples per class, a row per client, for ``seen`` and ``unseen``.
    class_names
        Names of the C classes.
    """
    names, c = [shown(name) for name in class_names], len(class_names)
    groups = {name: np.asarray(rows, dtype=np.float64) for name, rows in mixes.items() if len(rows)}
    together = math.ceil(sum(len(rows) for rows in groups.values()) / MANY_CLIENTS)
    columns = {name: _neighbours(rows, together) for name, rows in groups.items()}
    unequal = len({float(size) for rows in groups.values() for size in rows.sum(1)}) > 1
    heat, above = min(max(0.165 * c, 0.8), 4.6), 0.6 if unequal else 0.0
    figure = sheet(FULL, heat + above + 0.55)
    rows: list[Any] = [[f"sizes {name}" for name in columns], [*columns]]
    axes: dict[str, Axes] = figure.subplot_mosaic(
        rows if unequal else rows[1:],
        width_ratios=[max(len(sizes), 3) for sizes, _ in columns.values()],
        height_ratios=[above, heat] if unequal else None,
    )
    for k, (name, (sizes, mix)) in enumerate(columns.items()):
        image = _heat(axes[name], mix.T)
        axes[name].set_xticks([])
        axes[name].set_xlabel("clients")
        if k == 0:
            _class_ticks(axes[name].yaxis, names, 72 * heat / c)
        else:
            axes[name].set_yticks([])
        top = axes[f"sizes {name}" if unequal else name]
        top.set_title(f"{len(groups[name])} {name}")
        if unequal:
            edges = np.arange(len(sizes) + 1) - 0.5
            top.fill_between(edges, [*sizes, sizes[-1]], step="post", color=COLOURS[name], alpha=0.6, linewidth=0)
            top.set(xlim=(edges[0], edges[-1]), ylim=(0, 1.05 * max(float(s.max()) for s, _ in columns.values())))
            top.tick_params(labelbottom=False, bottom=False, labelleft=k == 0, left=k == 0)
            top.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
            top.set_ylabel("examples" if k == 0 else "")
    _heat_bar(figure, image, [axes[name] for name in columns], "share of the client's examples")
    return figure


@as_svg
def descriptor_map(document: Mapping[str, Any], class_names: Sequence[str]) -> Figure:
    """Draw the last round's descriptors on their two principal axes; each point carries its client's number.

    Parameters
    ----------
    document
        Content of ``descriptors.json``.
    class_names
        Names of the C classes.
    """
    last, clients = document["maps"][-1], document["clients"]
    legend, colours = _class_colours(clients["class"], clients["seen"], class_names)
    figure, axes = panel(3.35 + 0.17 * math.ceil(len(legend) / 5))
    _points(axes, last, clients["seen"], colours, size=13, raster=len(colours) > MANY_POINTS, marked=True)
    first, second = (f"{share:.0%} of the variance" for share in last["explained"])
    axes.set(title=f"Descriptors of the clients, round {last['round']}", xlabel=f"principal component 1, {first}")
    axes.set_ylabel(f"principal component 2, {second}")
    axes.set_aspect("equal", adjustable="datalim")
    narrow = {"ncols": 5, "columnspacing": 0.9, "handletextpad": 0, "fontsize": 7.5}
    figure.legend(handles=legend, loc="outside lower left", **narrow)
    return figure


@as_svg
def descriptor_maps(document: Mapping[str, Any]) -> Figure:
    """Draw small maps of the descriptors over training, on the axes of the last map and with the same scale.

    Parameters
    ----------
    document
        Content of ``descriptors.json``.
    """
    maps, clients = document["maps"], document["clients"]
    _, colours = _class_colours(clients["class"], clients["seen"], ())
    points = np.array([point for each in maps for point in each["xy"] if point is not None], dtype=np.float64)
    reach = 1.06 * np.maximum(np.abs(points).max(0), 1e-12) if len(points) else np.ones(2)
    cells = max(4, len(maps))
    figure = sheet(FULL, 0.9 * FULL / cells + 0.5)
    for each, axes in zip(maps, figure.subplots(1, cells)[: len(maps)], strict=True):
        _points(axes, each, clients["seen"], colours, size=6, raster=len(points) > MANY_POINTS)
        axes.set(title=f"Round {each['round']}", xlim=(-reach[0], reach[0]), ylim=(-reach[1], reach[1]))
        axes.set_xlabel(f"{sum(each['explained']):.0%} of the variance", fontsize=7.5)
    for axes in figure.axes[len(maps) :]:
        axes.set_visible(False)
    return figure


@as_svg
def correlation(document: Mapping[str, Any]) -> Figure:
    """Draw the rank correlation between descriptor distances and distances of class proportions, over rounds.

    Parameters
    ----------
    document
        Content of ``descriptors.json``.
    """
    figure, axes = panel(3.35)
    columns = (document["round"], document["spearman"], document["spearman_std"])
    known = [(r, m, s or 0.0) for r, m, s in zip(*columns, strict=True) if m is not None]
    axes.set(title="Descriptor distance and class mix", ylabel="Spearman's ρ, unseen clients")
    over_rounds(axes, max(document["round"]))
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


@as_svg
def phases_over_rounds(rounds: Sequence[int], phases: Sequence[Mapping[str, float]]) -> Figure:
    """Draw stacked seconds per phase over rounds; beyond :data:`MANY_ROUNDS`, a bar is the mean of adjacent rounds.

    Parameters
    ----------
    rounds
        Round numbers, in ascending order.
    phases
        ``{phase: seconds}``, one per round.
    """
    names = phase_names(phases)
    means = {name: neighbours([phase.get(name, 0.0) for phase in phases]) for name in names}
    together = math.ceil(len(rounds) / MANY_ROUNDS)
    edges = np.array([*rounds[::together], rounds[-1] + 1], dtype=np.float64) - 0.5
    figure, axes = panel(_time_height(len(names)))
    below = np.zeros(len(edges) - 1)
    for k, (name, mean) in enumerate(means.items()):
        axes.stairs(below + mean, edges, baseline=below, fill=True, color=_phase_colour(k), label=name)
        below = below + mean
    axes.set(title="Time per round", ylabel="seconds")
    over_rounds(axes, edges[-1])
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 1.08 * max(float(below.max()), 1e-9)))
    return figure


@as_svg
def phases_total(phases: Sequence[Mapping[str, float]], others: Mapping[str, float]) -> Figure:
    """Draw total seconds per phase, in the colours of :func:`phases_over_rounds`, and time spent outside phases.

    Parameters
    ----------
    phases
        ``{phase: seconds}``, one per round.
    others
        Seconds outside phases, by use.
    """
    names = phase_names(phases)
    seconds = [sum(phase.get(name, 0.0) for phase in phases) for name in names]
    colours = [_phase_colour(k) for k in range(len(names))] + [OTHER] * len(others)
    figure, axes = panel(_time_height(len(names)))
    names, seconds = [*names, *others], [*seconds, *others.values()]
    total = sum(seconds)
    bars = axes.barh(names, seconds, height=0.66, color=colours)
    axes.bar_label(bars, [f"{_clock(s)} ({s / total:.0%})" if total else _clock(s) for s in seconds], padding=3)
    axes.set(title="Time in all", xlim=(0, 1.6 * max([*seconds, 1e-9])), ylim=(max(len(names), 5) - 0.5, -0.5))
    axes.grid(visible=False)
    axes.tick_params(axis="both", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


def phase_names(phases: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the phases' names in order of first occurrence."""
    return list(dict.fromkeys(name for phase in phases for name in phase))


def shown(name: str) -> str:
    """Return a class name as a label: symbols for invisible characters, and long names shortened."""
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥", "": "∅"}
    return signs.get(name, name if len(name) <= 16 else f"{name[:15]}…")


def _measured(
    rows: Sequence[Mapping[str, str]], predictor: str, reading: str, of: Sequence[str] = _EVERYONE
) -> list[Mapping[str, str]]:
    """Return the clients that have an accuracy and whose ``seen`` is in ``of``."""
    return [row for row in rows if row.get(f"{predictor}_accuracy_{reading}") and row["seen"] in of]


def _accuracies(rows: Sequence[Mapping[str, str]], predictor: str, reading: str) -> Array:
    return np.array([float(row[f"{predictor}_accuracy_{reading}"]) for row in rows], dtype=np.float64)


def _neighbours(rows: Array, together: int) -> tuple[Array, Array]:
    """Return sizes and class proportions of clients ``[n, C]``, sorted by main class, ``together`` per column."""
    sizes, mix = rows.sum(1), shares(rows.tolist())
    main = mix.argmax(1)
    order = np.lexsort((np.arange(len(rows)), -mix[np.arange(len(rows)), main], main))
    groups = [order[i : i + together] for i in range(0, len(rows), together)]
    return np.array([sizes[g].mean() for g in groups]), np.array([mix[g].mean(0) for g in groups])


def _points(
    axes: Axes,
    each: Mapping[str, Any],
    seen: Sequence[bool],
    colours: Sequence[str],
    *,
    size: float,
    raster: bool,
    marked: bool = False,
) -> None:
    """Draw the clients of a map: circles for seen ones, outlined diamonds for unseen ones.

    If ``marked``, points carry their client's number for :func:`~fedloom.reporting.drawing.annotated`.
    """
    for kind, marker, area in ((True, "o", size), (False, "D", 1.5 * size)):
        those = [k for k, point in enumerate(each["xy"]) if point is not None and seen[k] is kind]
        xy = np.array([each["xy"][k] for k in those], dtype=np.float64).reshape(-1, 2)
        axes.scatter(
            xy[:, 0], xy[:, 1], c=[colours[k] for k in those], marker=marker, s=area, alpha=0.9, rasterized=raster,
            urls=[point_url(k) for k in those] if marked and not raster else None,
            linewidths=0 if kind else 0.05 * size, edgecolors="none" if kind else INK,
        )  # fmt: skip
    axes.tick_params(labelbottom=False, labelleft=False)
    _framed(axes)


def _class_colours(
    classes: Sequence[int], seen: Sequence[bool], class_names: Sequence[str]
) -> tuple[list[Line2D], list[str]]:
    """Return the legend and each client's colour: its class's colour if that class is frequent, else grey."""

    def mark(label: str, colour: str, marker: str = "o") -> Line2D:
        edge = INK if marker == "D" else "none"
        return Line2D([], [], ls="", marker=marker, markersize=4.5, color=colour, markeredgecolor=edge, label=label)

    present = Counter(classes)
    room = len(CLASS_COLOURS) if len(present) <= len(CLASS_COLOURS) else len(CLASS_COLOURS) - 1
    frequent = sorted(sorted(present, key=lambda k: (-present[k], k))[:room])
    # If there are few classes, each keeps its colour whichever others are present.
    fixed = max(present, default=0) < len(CLASS_COLOURS)
    colours = {k: CLASS_COLOURS[k if fixed else i] for i, k in enumerate(frequent)}
    legend = [mark(shown(class_names[k]), colours[k]) for k in frequent] if class_names else []
    if len(present) > len(frequent):
        legend.append(mark("another class", OTHER))
    legend += [mark("seen", INK)] if any(seen) else []
    legend += [mark("unseen", OTHER, "D")] if not all(seen) else []
    return legend, [colours.get(k, OTHER) for k in classes]


def _heat(axes: Axes, share: Array, aspect: Literal["auto", "equal"] = "auto") -> AxesImage:
    """Draw shares as opacities, by their square roots, so that small ones are visible."""
    _framed(axes)
    return axes.imshow(share, cmap=HEAT, norm=PowerNorm(0.5, 0, 1), interpolation="none", aspect=aspect)


def _framed(axes: Axes) -> None:
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set(visible=True, alpha=0.35)


def _heat_bar(figure: Figure, image: AxesImage, beside: Axes | Sequence[Axes], label: str) -> None:
    """Add the colour scale of a heat map."""
    bar = figure.colorbar(image, ax=beside, aspect=18, pad=0.015, fraction=0.02, ticks=[0, 0.05, 0.25, 0.5, 1])
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    bar.set_label(label, fontsize=7.5)


def _class_ticks(axis: Axis, names: Sequence[str], pitch: float) -> None:
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


def _time_height(phases: int) -> float:
    return max(2.5, 0.85 + 0.22 * (phases + 2))


def _phase_colour(k: int) -> str:
    return CLASS_COLOURS[k % len(CLASS_COLOURS)]


def _clock(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"
