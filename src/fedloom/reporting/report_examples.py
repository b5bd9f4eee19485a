"""Sections of a report on single outputs, and on single test examples of runs that had the data."""

from __future__ import annotations

import math
import statistics

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedloom.core.words import pluralize
from fedloom.errors import DataError
from fedloom.reporting.drawing import (
    CLASS_COLOURS,
    COLOURS,
    FULL,
    INK,
    OTHER,
    around,
    as_svg,
    class_label,
    framed,
    panel,
    sheet,
)
from fedloom.reporting.page import DASH, Column, Panel, Part, table_row, tabulated
from fedloom.reporting.report_results import small_table
from fedloom.reporting.words import GROUP_TITLES, Document
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import KINDS, metric_title, significant

NUMBERS = 3
"""Maximum number of predicted numbers that have figures."""


MANY_OUTPUTS = 100
"""Maximum number of labels or classes in the table: those with the worst results."""


def outputs(run: RunFolder) -> Part:
    """Return a table of the metrics of each label, or of each class of pixels, worst first."""
    document = run.json("outputs.json")
    names, metrics = document["names"], document["metrics"]
    groups = {GROUP_TITLES[key]: document["personal"][key] for key in ("seen", "unseen")}
    groups["global model, seen clients"] = (document["global"] or {}).get("seen")
    groups = {title: rows for title, rows in groups.items() if rows is not None}
    if not groups:
        raise DataError(f"{run.path / 'outputs.json'}: no client answered in round {document['round']}")
    first = next(iter(groups.values()))
    worst = sorted(range(len(names)), key=lambda k: (math.inf if (x := first[k][metrics[0]]) is None else x, k))

    def column(title: str, metric: str) -> Column[int]:
        def cell(k: int) -> str:
            value = groups[title][k][metric]
            return DASH if value is None else significant(value)

        return Column(metric_title(metric), cell, title)

    columns: list[Column[int]] = [
        Column("name", lambda k: names[k]),
        Column("true", lambda k: f"{first[k]['true']:,.0f}"),
        *(column(title, metric) for title in groups for metric in metrics),
    ]
    kind = "label" if metrics[0] == "auroc" else "class"
    text = (
        f"Test split, round {document['round']}, all examples of a group together; the {kind} with the lowest "
        f"{metric_title(metrics[0])} first. True: number of "
        + ("examples that have the label." if kind == "label" else "pixels of the class.")
        + (f" Only the {MANY_OUTPUTS} worst of {len(names)} are listed." if len(names) > MANY_OUTPUTS else "")
    )
    return Part(tables=(tabulated(columns, [("", worst[:MANY_OUTPUTS])]),), text=text)


def examples(run: RunFolder) -> Part:
    """Return pictures or points of the clients with the worst results."""
    document = run.json("examples.json")
    if not document["clients"]:
        raise DataError(f"{run.path / 'examples.json'}: no client has test examples")
    return _numbers(document) if KINDS[document["task"]].is_number else _masks(document)


def _numbers(document: Document) -> Part:
    """Return predicted against true numbers, and residuals by client."""
    k = len(document["clients"][0]["true"][0])
    names = document["names"] or [""] * k
    panels = []
    for i, name in enumerate(names[:NUMBERS]):
        suffix = f"-{i + 1}" if k > 1 else ""
        panels.append(Panel(f"predictions{suffix}", draw_predictions(document, i, name)))
        panels.append(Panel(f"residuals{suffix}", draw_residuals(document, i, name)))
    rows = []
    for client in document["clients"]:
        pairs = list(zip(client["true"], client["predicted"], strict=True))
        for i, name in enumerate(names):
            residuals = [predictions[i] - true[i] for true, predictions in pairs]
            square = statistics.fmean(r * r for r in residuals)
            label = f"{client['id']}, {name}" if k > 1 else client["id"]
            values = (significant(statistics.fmean(residuals)), significant(math.sqrt(square)), str(len(residuals)))
            rows.append(table_row(label, *values, colour=_group_of(client)))
    headings = ("client", "mean residual", "root mean square", "examples")
    text = (
        f"Personalized models after round {document['round']} on test examples of the "
        f"{pluralize(len(document['clients']), 'client')} with the worst results, in the targets' own units. Residual: "
        "predicted minus true; a mean far from zero is a bias. Boxes: quartiles, with whiskers to the 5th and 95th "
        "percentile." + (f" Figures show the first {NUMBERS} of {k} numbers." if k > NUMBERS else "")
    )
    return Part(panels=tuple(panels), tables=(small_table("Residuals", headings, rows),), columns=2, text=text)


def _class_names(document: Document) -> list[str]:
    return [class_label(name) for name in document["names"]] or [f"class {i}" for i in range(document["outputs"])]


def _masks(document: Document) -> Part:
    """Return input, truth and prediction of each client's worst image, and its share of wrong pixels."""
    classes, names = document["outputs"], _class_names(document)
    rows = []
    for client in document["clients"]:
        true, predictions = np.array([client["true"], client["predicted"]])  # raises ValueError if shapes differ
        labelled = (true >= 0) & (true < classes)
        missed = [names[k] for k in true[labelled & (true != predictions)].tolist()]
        most = max(sorted(set(missed)), key=missed.count, default="none")
        share = f"{100 * len(missed) / labelled.sum():.1f}" if labelled.any() else DASH
        rows.append(table_row(client["id"], share, most, colour=_group_of(client)))
    panel = Panel("examples", draw_segmentations(document), wide=True)
    text = (
        f"Personalized models after round {document['round']}: for each of the "
        f"{pluralize(len(document['clients']), 'client')} with the worst results, the test image with the most wrong "
        "pixels. Pixels without a class are grey. The table gives each image's share of wrong pixels, and the true "
        "class that was missed most."
    )
    table = small_table("Wrong pixels", ("client", "wrong, %", "missed most"), rows)
    return Part(panels=(panel,), tables=(table,), columns=2, text=text)


def _group_of(client: Document) -> str:
    return "seen" if client["seen"] else "unseen"


@as_svg
def draw_predictions(document: Document, k: int, name: str) -> Figure:
    """Draw predicted against true numbers, one point per test example; the diagonal is a perfect prediction.

    Parameters
    ----------
    k, name
        Index of the number among those predicted, and its name.
    """
    figure, axes = panel(3.3)
    all_values = [row[k] for client in document["clients"] for key in ("true", "predicted") for row in client[key]]
    limits = around(all_values or [0.0])
    axes.plot(limits, limits, color=INK, linewidth=0.7, alpha=0.5)
    for group, marker in (("seen", "o"), ("unseen", "D")):
        clients = [client for client in document["clients"] if _group_of(client) == group]
        x, y = ([row[k] for client in clients for row in client[key]] for key in ("true", "predicted"))
        if x:
            colour, label = COLOURS[group], GROUP_TITLES[group]
            axes.scatter(x, y, s=9, color=colour, marker=marker, alpha=0.5, linewidths=0, label=label)
    axes.set(title="Predicted against true", xlabel=f"true {name}", ylabel=f"predicted {name}")
    axes.set(xlim=limits, ylim=limits)
    axes.grid(visible=True, axis="both")
    axes.legend(loc="best")
    return figure


@as_svg
def draw_residuals(document: Document, k: int, name: str) -> Figure:
    """Draw predicted minus true numbers by client: median, quartiles, and whiskers to the 5th and 95th percentile."""
    clients = document["clients"]
    residuals = [[p[k] - t[k] for t, p in zip(c["true"], c["predicted"], strict=True)] for c in clients]
    figure, axes = panel(max(2.6, 0.7 + 0.22 * len(clients)))
    boxes = axes.boxplot(
        residuals, orientation="horizontal", whis=(5, 95), showfliers=False, patch_artist=True,
        tick_labels=[class_label(client["id"]) for client in clients],
    )  # fmt: skip
    for box, client in zip(boxes["boxes"], clients, strict=True):
        box.set(facecolor=COLOURS[_group_of(client)], alpha=0.6, linewidth=0)
    for line in (*boxes["medians"], *boxes["whiskers"], *boxes["caps"]):
        line.set(color=INK, linewidth=0.9)
    axes.axvline(0, color=INK, linewidth=0.7, alpha=0.5)
    axes.invert_yaxis()
    axes.set(title="Residuals by client, worst first", xlabel=f"predicted minus true {name}")
    axes.grid(visible=True, axis="x")
    return figure


@as_svg
def draw_segmentations(document: Document) -> Figure:
    """Draw input, truth and prediction of one test image of each client, a row per client.

    Pixels without a class are grey.
    """
    clients, classes = document["clients"], int(document["outputs"])
    colours = ListedColormap([CLASS_COLOURS[i % len(CLASS_COLOURS)] for i in range(classes)], under=OTHER, over=OTHER)
    figure = sheet(FULL, 0.5 + 2.4 * len(clients))
    grid = figure.subplots(len(clients), 3, squeeze=False)
    for line, client in zip(grid, clients, strict=True):
        for axes, key in zip(line, ("image", "true", "predicted"), strict=True):
            framed(axes)
            axes.set(xticks=[], yticks=[])
            if key == "image" and key in client:
                axes.imshow(np.array(client[key], dtype=np.uint8), cmap="gray", vmin=0, vmax=255, interpolation="none")
            elif key in client:
                limits = {"vmin": -0.5, "vmax": classes - 0.5}
                axes.imshow(np.array(client[key]), cmap=colours, interpolation="none", **limits)
        line[0].set_ylabel(client["id"])
    for axes, title in zip(grid[0], ("input", "truth", "prediction"), strict=True):
        axes.set_title(title)
    if classes <= len(CLASS_COLOURS):
        handles = [Patch(color=CLASS_COLOURS[i], label=name) for i, name in enumerate(_class_names(document))]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(classes, 6))
    return figure
