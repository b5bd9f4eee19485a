"""Figures of a report."""

from __future__ import annotations

import math
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
    MANY_POINTS,
    MANY_ROUNDS,
    OTHER,
    PAPER,
    Array,
    around,
    as_svg,
    dots,
    framed,
    neighbours,
    over_rounds,
    panel,
    percent,
    sheet,
)
from fedloom.reporting.words import GROUP_TITLES, client_column, human_time
from fedloom.tasks.headline import values_of
from fedloom.tasks.names import Headline

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
def draw_learning_curve(lines: Sequence[Mapping[str, Any]], headline: Headline) -> Figure:
    """Draw the mean of the headline metric on test data over rounds, with a band of ± one standard deviation.

    Axes of fractions begin at zero; others show the trained rounds, and an untrained model may lie outside.
    """
    figure, axes = panel(2.6)
    drawn = [_draw_group(axes, lines, name, headline) for name in COLOURS]
    over_rounds(axes, lines[-1]["round"])
    axes.set(title=f"Test {headline.title}", ylabel="mean over clients")
    if headline.percent:
        top = max((top for _, top in drawn), default=0.0)
        axes.set_ylim(0, min(1.0, math.ceil(10 * top + 0.5) / 10))
        percent(axes.yaxis)
    elif len(trained := [value for values, _ in drawn for value in values]) > 1:
        axes.set_ylim(*around(trained))
    axes.legend(loc="lower right" if headline.percent else "best")
    return figure


def _draw_group(
    axes: Axes, lines: Sequence[Mapping[str, Any]], name: str, headline: Headline
) -> tuple[list[float], float]:
    """Draw a group's learning curve; return its means of trained rounds, and the upper end of its band."""
    groups = [(line["round"], values_of(line[name], headline)) for line in lines if line[name] is not None]
    measured = [(number, values) for number, values in groups if values.mean is not None]
    if not measured:
        return [], 0.0
    x, mean = [number for number, _ in measured], np.array([values.mean for _, values in measured])
    top, colour = 0.0, COLOURS[name]
    if all(values.std is not None for _, values in measured):
        std = np.array([values.std for _, values in measured])
        low, high = mean - std, mean + std
        if headline.percent:
            low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
        top = float(high.max())
    dash, marker = "--" if name == "global" else "-", "o" if len(measured) <= 25 else None
    clipped = not headline.percent
    axes.plot(x, mean, dash, color=colour, marker=marker, markersize=2.6, label=GROUP_TITLES[name], clip_on=clipped)
    return [value for number, value in zip(x, mean.tolist(), strict=True) if number], top


@as_svg
def draw_training_loss(losses: Mapping[int, float]) -> Figure:
    """Draw training loss over rounds; beyond :data:`MANY_ROUNDS`, the line shows means of adjacent rounds."""
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
def draw_distribution(rows: Sequence[Mapping[str, str]], headline: Headline, reading: str) -> Figure:
    """Draw the empirical distribution of the clients' test results: the share of clients at or below each value."""
    groups = (("seen", "personal", ("true",)), ("unseen", "personal", ("false",)), ("global", "global", _EVERYONE))
    columns = {name: (client_column(predictor, headline.name, reading), of) for name, predictor, of in groups}
    curves = {name: np.sort(_values(_measured(rows, column, of), column)) for name, (column, of) in columns.items()}
    figure, axes = panel(3.3)
    found = [float(value) for curve in curves.values() for value in curve]
    left, right = around(found or [0.0])
    if headline.percent:
        left, right = min(found, default=0.0) - 0.02, 1.0
    for name, curve in curves.items():
        n = len(curve)
        if n == 0:
            continue
        tenth = math.ceil(n / 10)
        foot = slice(1, tenth + 1) if headline.higher_is_better else slice(n - tenth + 1, n + 1)
        x, y = np.array([left, *curve, right]), np.array([0.0, *(np.arange(n) + 1) / n, 1.0])
        dash, colour = "--" if name == "global" else "-", COLOURS[name]
        axes.step(x, y, dash, where="post", color=colour, label=f"{GROUP_TITLES[name]} ({n})")
        axes.step(x[foot], y[foot], where="post", color=colour, linewidth=3.6, alpha=0.75)
        end = -1 if headline.higher_is_better else 0
        axes.plot([x[foot][end]], [y[foot][end]], "o", color=colour, markersize=3.6)
    axes.set(title="Distribution over clients", xlabel=f"test {headline.title}", ylabel="share of clients at or below")
    axes.set(xlim=(max(0.0, left), 1.005) if headline.percent else (left, right), ylim=(0, 1.01))
    axes.grid(visible=True, axis="x")
    percent(*([axes.xaxis] if headline.percent else []), axes.yaxis)
    axes.legend(loc="best")
    return figure


@as_svg
def draw_gains(rows: Sequence[Mapping[str, str]], headline: Headline, reading: str) -> Figure:
    """Draw each client's test result with the personalized model against that with the global one, as a point."""
    columns = [client_column(predictor, headline.name, reading) for predictor in ("global", "personal")]
    both = _measured(_measured(rows, columns[1]), columns[0])
    figure, axes = panel(3.3)
    x, y = (_values(both, column) for column in columns)
    sign = headline.sign
    low, high = around([*x, *y] or [0.0])
    if headline.percent:
        low, high = max(0.0, min((float(v.min()) for v in (x, y) if len(v)), default=0.0) - 0.03), 1.015
    seen = np.array([row["seen"] == "true" for row in both], dtype=bool)
    diagonal = [0.0, 1.0] if headline.percent else [low, high]
    axes.plot(diagonal, diagonal, color=INK, linewidth=0.7, alpha=0.5)
    dots(axes, x, y, seen)
    for kind, marker in ((seen, "o"), (~seen, "D")):
        worst = np.flatnonzero(kind)[np.argsort(sign * y[kind], kind="stable")[: math.ceil(kind.sum() / 10)]]
        axes.scatter(
            x[worst], y[worst], s=26, marker=marker, facecolors="none", edgecolors=INK, linewidths=0.8,
            rasterized=len(both) > MANY_POINTS,
        )  # fmt: skip
    above, below = ("personalized", "global") if headline.higher_is_better else ("global", "personalized")
    axes.text(0.02, 0.98, f"{above} better: {(y > x).sum()}", transform=axes.transAxes, va="top")
    axes.text(0.98, 0.02, f"{below} better: {(y < x).sum()}", transform=axes.transAxes, ha="right")
    handles, labels = axes.get_legend_handles_labels()
    circle = Line2D([], [], linestyle="", marker="o", markersize=5, color="none", markeredgecolor=INK)
    legend = axes.legend([*handles, circle], [*labels, "worst decile"], loc="lower right", bbox_to_anchor=(1, 0.06))
    if not headline.higher_is_better:  # the points are below the diagonal
        legend.set(loc="upper left")
        legend.set_bbox_to_anchor((0, 0.94), axes.transAxes)
    axes.set(title="Gain by personalization", xlabel=f"{headline.title} of the global model")
    axes.set_ylabel(f"{headline.title} of the personalized model")
    axes.set(xlim=(low, high), ylim=(low, high))
    if headline.percent:
        percent(axes.xaxis, axes.yaxis)
    return figure


def _shares(counts: Sequence[Sequence[int]]) -> Array:
    """Return rows scaled to sum to one, ``[r, c]``; a row of zeros stays zero."""
    values = np.asarray(counts, dtype=np.float64)
    return np.asarray(values / np.maximum(values.sum(1, keepdims=True), 1))


@as_svg
def draw_confusion(counts: Sequence[Sequence[int]], class_names: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix: a row per true class, in percent of its examples."""
    share, names = _shares(counts), [class_label(name) for name in class_names]
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
    return len(class_names) > 30 and max(len(class_label(name)) for name in class_names) > 2


@as_svg
def draw_partition(mixes: Mapping[str, Sequence[Sequence[int]]], class_names: Sequence[str]) -> Figure:
    """Draw the partition: a column per client with its class proportions, and its number of training examples above.

    Clients are ordered by their most frequent class and its share. Beyond :data:`MANY_CLIENTS`, neighbouring clients
    share a column, which shows their means.
    """
    groups = {name: np.asarray(rows, dtype=np.float64) for name, rows in mixes.items() if len(rows)}
    together = math.ceil(sum(map(len, groups.values())) / MANY_CLIENTS)
    columns = {name: _columns(rows, together) for name, rows in groups.items()}
    sizes = np.concatenate([rows.sum(1) for rows in groups.values()])
    unequal, c = bool((sizes != sizes[0]).any()), len(class_names)
    heat, above = min(max(0.165 * c, 0.8), 4.6), 0.6
    figure = sheet(FULL, heat + above * unequal + 0.55)
    axes = figure.subplots(
        1 + unequal,
        len(columns),
        squeeze=False,
        width_ratios=[max(len(sizes), 3) for sizes, _ in columns.values()],
        height_ratios=[above, heat] if unequal else None,
    )
    for axis, (_, mix) in zip(axes[-1], columns.values(), strict=True):
        image = _heat(axis, mix.T)
        axis.set(xticks=[], yticks=[], xlabel="clients")
    _class_ticks(axes[-1, 0].yaxis, [class_label(name) for name in class_names], 72 * heat / c)
    if unequal:
        _draw_sizes(axes[0], {name: sizes for name, (sizes, _) in columns.items()})
    for axis, (name, rows) in zip(axes[0], groups.items(), strict=True):
        axis.set_title(f"{len(rows)} {name}")
    _heat_bar(figure, image, list(axes[-1]), "share of the client's examples")
    return figure


def _draw_sizes(axes: Sequence[Axes], sizes: Mapping[str, Array]) -> None:
    """Draw the numbers of examples of each group's columns on one scale."""
    most = 1.05 * max(float(each.max()) for each in sizes.values())
    for k, (top, (name, each)) in enumerate(zip(axes, sizes.items(), strict=True)):
        edges = np.arange(len(each) + 1) - 0.5
        top.fill_between(edges, [*each, each[-1]], step="post", color=COLOURS[name], alpha=0.6, linewidth=0)
        top.set(xlim=(edges[0], edges[-1]), ylim=(0, most), ylabel="examples" if k == 0 else "")
        top.tick_params(labelbottom=False, bottom=False, labelleft=k == 0, left=k == 0)
        top.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))


@as_svg
def draw_phases_by_round(rounds: Sequence[int], phases: Sequence[Mapping[str, float]]) -> Figure:
    """Draw stacked seconds per phase over rounds; beyond :data:`MANY_ROUNDS`, a bar is the mean of adjacent rounds."""
    names = _phase_names(phases)
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
def draw_phase_totals(phases: Sequence[Mapping[str, float]], others: Mapping[str, float]) -> Figure:
    """Draw total seconds per phase, in the colours of :func:`draw_phases_by_round`, and time spent outside phases."""
    names = _phase_names(phases)
    seconds = [sum(phase.get(name, 0.0) for phase in phases) for name in names]
    colours = [_phase_colour(k) for k in range(len(names))] + [OTHER] * len(others)
    figure, axes = panel(_time_height(len(names)))
    names, seconds = [*names, *others], [*seconds, *others.values()]
    total = sum(seconds)
    bars = axes.barh(names, seconds, height=0.66, color=colours)
    axes.bar_label(bars, [f"{human_time(s)} ({s / total:.0%})" if total else human_time(s) for s in seconds], padding=3)
    axes.set(title="Total time", xlim=(0, 1.6 * max([*seconds, 1e-9])), ylim=(max(len(names), 5) - 0.5, -0.5))
    axes.grid(visible=False)
    axes.tick_params(axis="both", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


def _phase_names(phases: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the phases' names in order of first occurrence."""
    return list(dict.fromkeys(name for phase in phases for name in phase))


def class_label(name: str) -> str:
    """Return a class name as a label: symbols for invisible characters, and long names shortened."""
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥", "": "∅"}
    return signs.get(name, name if len(name) <= 16 else f"{name[:15]}…")


def _measured(rows: Sequence[Mapping[str, str]], column: str, of: Sequence[str] = _EVERYONE) -> list[Mapping[str, str]]:
    """Return the clients that have a value in a column and whose ``seen`` is in ``of``."""
    return [row for row in rows if row.get(column) and row["seen"] in of]


def _values(rows: Sequence[Mapping[str, str]], column: str) -> Array:
    return np.array([float(row[column]) for row in rows], dtype=np.float64)


def _columns(rows: Array, together: int) -> tuple[Array, Array]:
    """Return sizes and class proportions of clients ``[n, C]``, sorted by main class, ``together`` per column."""
    sizes, mix = rows.sum(1), _shares(rows.tolist())
    main = mix.argmax(1)
    order = np.lexsort((np.arange(len(rows)), -mix[np.arange(len(rows)), main], main))
    groups = [order[i : i + together] for i in range(0, len(rows), together)]
    return np.array([sizes[g].mean() for g in groups]), np.array([mix[g].mean(0) for g in groups])


def _heat(axes: Axes, share: Array, aspect: Literal["auto", "equal"] = "auto") -> AxesImage:
    """Draw shares as opacities, by their square roots, so that small ones are visible."""
    framed(axes)
    return axes.imshow(share, cmap=HEAT, norm=PowerNorm(0.5, 0, 1), interpolation="none", aspect=aspect)


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
