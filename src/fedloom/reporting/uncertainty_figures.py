"""How often predictions are right, by how sure they are: the reliability diagram, and pictures of single clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from fedloom.reporting.figures import COLOURS, FULL, HALF, INK, LABELS, MANY_POINTS, OTHER, as_svg
from fedloom.reporting.significance import mean_ranks

PICTURED = 5
"""Clients that are shown one by one, as many as in papers/003, Figure 3."""


@as_svg
def reliability(document: Mapping[str, Any]) -> Figure:
    """Accuracy over confidence, bin by bin, and below it how many of the examples are in each bin.

    A calibrated predictor lies on the diagonal; below it, it is surer than it is right.

    Parameters
    ----------
    document
        ``calibration.json``: ``edges``, and for each predictor and group rows of (examples, confidence, accuracy).
    """
    figure = Figure(figsize=(HALF, 4.1))
    upper = figure.add_axes((0.15, 0.4, 0.8, 0.53))
    lower = figure.add_axes((0.15, 0.11, 0.8, 0.22))
    upper.plot([0, 1], [0, 1], color=INK, alpha=0.35, linewidth=0.8, linestyle=":")
    edges = np.asarray(document["edges"])
    for name, rows in _groups(document).items():
        examples, confidence, accuracy = np.asarray(rows, dtype=np.float64).T
        filled = examples > 0
        dash = "--" if name == "global" else "-"
        upper.plot(
            confidence[filled],
            accuracy[filled],
            dash,
            color=COLOURS[name],
            marker="o",
            markersize=3,
            label=LABELS[name],
        )
        lower.stairs(examples / examples.sum(), edges, color=COLOURS[name], linestyle=dash, linewidth=1.2)
    upper.set(title="Reliability", xlim=(0, 1), ylim=(0, 1), ylabel="right")
    lower.set(xlim=(0, 1), xlabel="highest predicted probability", ylabel="of examples")
    lower.set_ylim(bottom=0)
    for axis in (upper.xaxis, upper.yaxis, lower.xaxis, lower.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lower.yaxis.set_major_locator(MaxNLocator(nbins=3))
    if upper.get_legend_handles_labels()[0]:
        upper.legend(loc="upper left")
    return figure


@as_svg
def clients_over_training(document: Mapping[str, Any]) -> Figure:
    """How sure some clients' models are, before training, early in it and after it (papers/003, Figure 3).

    A row for each kept round, a column for each of five clients: those at the minimum, the quartiles and the maximum of
    entropy after the last round. Bars are the client's test examples by confidence, the right ones in colour.

    Parameters
    ----------
    document
        ``uncertainty.json``.
    """
    rounds, ids, seen = document["rounds"], document["clients"]["ids"], document["clients"]["seen"]
    columns = _pictured(rounds[-1]["entropy"])
    cells, height = max(3, len(columns)), 0.45 + 1.35 * len(rounds)
    figure = Figure(figsize=(FULL, height))
    grid = figure.subplots(len(rounds), cells, sharex=True, sharey="row", squeeze=False)
    figure.subplots_adjust(0.075, 0.42 / height, 0.995, 1 - 0.4 / height, wspace=0.12, hspace=0.42)
    for k, (one, line) in enumerate(zip(rounds, grid, strict=True)):
        line[0].set_ylabel(f"round {one['round']}")
        for client, axes in zip(columns, line, strict=False):
            title = f"{ids[client]}\n" if k == 0 else ""
            if one["examples"][client] is None:
                axes.set_title(f"{title}no answer", fontsize=7.5, fontweight="normal")
                continue
            examples, right = (np.asarray(one[key][client], dtype=np.float64) for key in ("examples", "right"))
            group = "seen" if seen[client] else "unseen"
            for counts, colour in ((examples, OTHER), (right, COLOURS[group])):
                axes.stairs(counts / examples.sum(), document["edges"], fill=True, color=colour)
            said = f"{right.sum() / examples.sum():.0%} right, H {one['entropy'][client]:.2f}"
            said += f", I {one['mutual_information'][client]:.3f}"
            axes.set_title(f"{title}{said}", fontsize=7.5, fontweight="normal")
        line[0].set_ylim(bottom=0)
        line[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        line[0].yaxis.set_major_locator(MaxNLocator(nbins=3))
        for axes in line[len(columns) :]:
            axes.set_visible(False)
    for axes in grid[-1]:
        axes.set(xlim=(0, 1), xlabel="confidence")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    return figure


@as_svg
def right_by_uncertainty(document: Mapping[str, Any]) -> Figure:
    """Every client after the last round: how often it is right, over its entropy and its mutual information.

    Parameters
    ----------
    document
        ``uncertainty.json``.
    """
    last, seen = document["rounds"][-1], np.asarray(document["clients"]["seen"], dtype=bool)
    here = [i for i, counts in enumerate(last["examples"]) if counts is not None]
    right = np.array([sum(last["right"][i]) / sum(last["examples"][i]) for i in here])
    figure = Figure(figsize=(HALF, 4.1))
    names = {"entropy": "mean entropy, nats", "mutual_information": "mean mutual information, nats"}
    for k, (key, label) in enumerate(names.items()):
        axes = figure.add_axes((0.15, 0.62 - 0.51 * k, 0.81, 0.31))
        x = np.array([last[key][i] for i in here], dtype=np.float64)
        for group, kind, marker in (("seen", True, "o"), ("unseen", False, "D")):
            those = seen[here] == kind
            if those.any():
                axes.scatter(
                    x[those],
                    right[those],
                    s=13,
                    color=COLOURS[group],
                    marker=marker,
                    alpha=0.65,
                    linewidths=0,
                    label=LABELS[group],
                    rasterized=len(x) > MANY_POINTS,
                )
        r = rank_correlation(x, right)
        axes.set_title(f"By {key.replace('_', ' ')}" + ("" if r is None else f": rank correlation {r:.2f}"))
        axes.set(xlabel=label, ylabel="right")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.grid(visible=True, axis="both")
        if k == 0:
            axes.legend(loc="best")
    return figure


def rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Spearman's coefficient, ties at their mean rank; None for fewer than three values, or equal ones."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(mean_ranks(a), mean_ranks(b))[0, 1])


def _pictured(entropy: Sequence[float | None]) -> list[int]:
    """Clients at the minimum, the quartiles and the maximum of entropy; all, where they are few. Ascending in it."""
    known = sorted((value, i) for i, value in enumerate(entropy) if value is not None)
    places = np.unique(np.linspace(0, len(known) - 1, min(PICTURED, len(known))).round().astype(int))
    return [known[place][1] for place in places]


def _groups(document: Mapping[str, Any]) -> dict[str, Sequence[Sequence[float]]]:
    """What there is of ``seen``, ``unseen`` (own model) and ``global`` (the global model, all clients together)."""
    personal, shared = document["personal"] or {}, document["global"] or {}
    found = {name: personal[name] for name in ("seen", "unseen") if personal.get(name)}
    parts = [np.asarray(rows, dtype=np.float64) for rows in shared.values() if rows]
    if parts:
        examples = np.sum([part[:, :1] for part in parts], axis=0)
        means = np.sum([part[:, :1] * part[:, 1:] for part in parts], axis=0) / np.maximum(examples, 1)
        found["global"] = np.concatenate([examples, means], axis=1).tolist()
    return found
