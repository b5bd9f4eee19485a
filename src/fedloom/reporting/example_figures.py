"""Figures of single test examples and their predictions, from ``examples.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedloom.reporting.drawing import COLOURS, FULL, INK, OTHER, around, as_svg, framed, panel, sheet
from fedloom.reporting.figures import CLASS_COLOURS, class_label


@as_svg
def draw_predictions(document: Mapping[str, Any], k: int, name: str) -> Figure:
    """Draw predicted against true numbers, one point per test example; the diagonal is a perfect prediction.

    Parameters
    ----------
    k, name
        Index of the number among those predicted, and its name.
    """
    figure, axes = panel(3.3)
    everything = [row[k] for client in document["clients"] for key in ("true", "predicted") for row in client[key]]
    limits = around(everything or [0.0])
    axes.plot(limits, limits, color=INK, linewidth=0.7, alpha=0.5)
    for group, marker in (("seen", "o"), ("unseen", "D")):
        of_group = [client for client in document["clients"] if client["seen"] == (group == "seen")]
        x, y = ([row[k] for client in of_group for row in client[key]] for key in ("true", "predicted"))
        if x:
            axes.scatter(
                x, y, s=9, color=COLOURS[group], marker=marker, alpha=0.5, linewidths=0, label=f"{group} clients"
            )
    axes.set(
        title="Predicted against true", xlabel=f"true {name}", ylabel=f"predicted {name}", xlim=limits, ylim=limits
    )
    axes.grid(visible=True, axis="both")
    axes.legend(loc="best")
    return figure


@as_svg
def draw_residuals(document: Mapping[str, Any], k: int, name: str) -> Figure:
    """Draw predicted minus true numbers by client: median, quartiles, and whiskers to the 5th and 95th percentile."""
    clients = document["clients"]
    residuals = [[p[k] - t[k] for t, p in zip(c["true"], c["predicted"], strict=True)] for c in clients]
    figure, axes = panel(max(2.6, 0.7 + 0.22 * len(clients)))
    boxes = axes.boxplot(
        residuals, orientation="horizontal", whis=(5, 95), showfliers=False, patch_artist=True,
        tick_labels=[class_label(client["id"]) for client in clients],
    )  # fmt: skip
    for box, client in zip(boxes["boxes"], clients, strict=True):
        box.set(facecolor=COLOURS["seen" if client["seen"] else "unseen"], alpha=0.6, linewidth=0)
    for line in (*boxes["medians"], *boxes["whiskers"], *boxes["caps"]):
        line.set(color=INK, linewidth=0.9)
    axes.axvline(0, color=INK, linewidth=0.7, alpha=0.5)
    axes.invert_yaxis()
    axes.set(title="Residuals by client, worst first", xlabel=f"predicted minus true {name}")
    axes.grid(visible=True, axis="x")
    return figure


@as_svg
def draw_segmentations(document: Mapping[str, Any]) -> Figure:
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
        names = [class_label(name) for name in document["names"]] or [f"class {i}" for i in range(classes)]
        handles = [Patch(color=CLASS_COLOURS[i], label=name) for i, name in enumerate(names)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(classes, 6))
    return figure
