"""Section of a report on the clients' descriptors: maps, and their correlation with the clients' data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedloom.core.words import pluralize
from fedloom.reporting.drawing import (
    CLASS_COLOURS,
    COLOURS,
    FULL,
    INK,
    MANY_POINTS,
    OTHER,
    as_svg,
    band,
    class_label,
    framed,
    over_rounds,
    panel,
    point_url,
    sheet,
)
from fedloom.reporting.page import Panel, Part
from fedloom.reporting.report_classes import class_mix
from fedloom.reporting.words import Document
from fedloom.runs.folder import RunFolder


def descriptors(run: RunFolder) -> Part:
    """Return maps of the clients' descriptors, and their correlation with the clients' data."""
    document, manifest = run.json("descriptors.json"), run.manifest()
    names = [class_label(name) for name in manifest.spec.class_names]
    facts = {}
    for client in manifest.clients:
        name = f"{client.id} ({client.owner})" if client.owner else client.id
        facts[client.id] = ": ".join(filter(None, (name, class_mix(client.class_counts["train"], names))))
    points = [(id, facts.get(id, id)) for id in document["clients"]["ids"]]
    panels = [
        Panel("descriptors", draw_map(document, manifest.spec.class_names), points=tuple(points)),
        Panel("correlation", draw_correlation(document)),
    ]
    if len(document["maps"]) > 1:
        panels.append(Panel("descriptors-training", draw_maps(document), wide=True))
    excluded = document["excluded"][-1]
    text = (
        "Maps: a point per client, coloured by its most frequent class, with diamonds for unseen clients. In the large "
        "map, hover over a point to see the client's classes, and click on it to see its confusion matrix. All are "
        f"drawn on the two principal axes of round {document['maps'][-1]['round']}, each around its own mean; the "
        "small ones have one scale. Rank correlation: for each unseen client, Spearman's coefficient between its "
        "descriptor's distances and its class proportions' distances to all clients; mean and ± one standard deviation "
        "over unseen clients. The dotted line is the value at the first evaluation: an untrained embedding network "
        "that sees labels already correlates."
        + (f" {pluralize(excluded, 'unseen client')} without a coefficient (all distances equal)." if excluded else "")
    )
    return Part(panels=tuple(panels), columns=2, text=text)


@as_svg
def draw_map(document: Document, class_names: Sequence[str]) -> Figure:
    """Draw the last round's descriptors on their two principal axes; each point carries its client's number."""
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
def draw_maps(document: Document) -> Figure:
    """Draw small maps of the descriptors over training, on the axes of the last map and with the same scale."""
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
def draw_correlation(document: Document) -> Figure:
    """Draw the rank correlation between descriptor distances and distances of class proportions, over rounds."""
    figure, axes = panel(3.35)
    columns = (document["round"], document["spearman"], document["spearman_std"])
    points = [(r, m, s or 0.0) for r, m, s in zip(*columns, strict=True) if m is not None]
    axes.set(title="Descriptor distance and class mix", ylabel="Spearman's ρ, unseen clients")
    over_rounds(axes, max(document["round"]))
    if not points:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no unseen client has a coefficient", transform=axes.transAxes, ha="center", alpha=0.7)
        return figure
    rounds, mean, std = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    low, _ = band(axes, rounds, mean, std, COLOURS["unseen"], (-1, 1))
    axes.plot(rounds, mean, color=COLOURS["unseen"], marker="o", markersize=2.6, clip_on=False)
    axes.axhline(mean[0], color=INK, linewidth=0.7, linestyle=":", alpha=0.6)
    axes.set_ylim(min(0.0, math.floor(10 * float(low.min())) / 10), 1)
    return figure


def _points(
    axes: Axes,
    each: Document,
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
    framed(axes)


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
    # If there are few classes, each keeps its colour, regardless of which others are present.
    fixed = max(present, default=0) < len(CLASS_COLOURS)
    colours = {k: CLASS_COLOURS[k if fixed else i] for i, k in enumerate(frequent)}
    legend = [mark(class_label(class_names[k]), colours[k]) for k in frequent] if class_names else []
    if len(present) > len(frequent):
        legend.append(mark("another class", OTHER))
    legend += [mark("seen", INK)] if any(seen) else []
    legend += [mark("unseen", OTHER, "D")] if not all(seen) else []
    return legend, [colours.get(k, OTHER) for k in classes]
