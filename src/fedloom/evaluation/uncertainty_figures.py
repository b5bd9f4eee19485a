"""The reliability diagram: how often predictions are right, by how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedloom.evaluation.figures import COLOURS, HALF, INK, LABELS, as_svg


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
